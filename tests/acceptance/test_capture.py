"""Capture with a real Postgres and the real engine: nothing that was committed is lost, whoever dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tidegate.capture.engine import CaptureSettings
from tidegate.capture.log import LogReader
from tidegate.capture.server_check import check_server, discover
from tidegate.capture.supervisor import Capture
from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.errors import DefinitelyNotDone, FixConfiguration, TidegateError

TABLES = ("orders", "lines")
DEADLINE_SECONDS = 40.0


def wait_until(condition: Callable[[], bool], timeout_seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the deadline has passed"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(tmp_path_factory.mktemp("source") / "postgres", settings={"fsync": "off"})
    postgres.start()
    yield postgres
    postgres.remove()


@pytest.fixture
def database(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> str:
    """A new database with two tables and some rows; its name serves as the slot's and the publication's too."""
    name = re.sub(r"\W+", "_", request.node.name)[-50:].strip("_").lower()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, status text)")
        connection.execute("CREATE TABLE lines (order_id int, id int, price numeric(10,2), PRIMARY KEY (order_id, id))")
        connection.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
        connection.execute("INSERT INTO orders SELECT n, 'old' FROM generate_series(1, 50) n")
    return name


@pytest.fixture
def settings(server: EmbeddedPostgres, database: str, tmp_path: Path) -> CaptureSettings:
    return CaptureSettings(server.dsn(database), TABLES, "shop", 3, tmp_path / "state", database, database)


@pytest.fixture
def capture(settings: CaptureSettings) -> Iterator[Capture]:
    capture = Capture(settings)
    yield capture
    capture.stop()
    with suppress(TidegateError):
        capture.drop()


def values_of(settings: CaptureSettings, topic: str) -> list[dict[str, Any]]:
    reader = LogReader(settings.log_root)
    return [
        json.loads(value)
        for (name, partition), end in sorted(reader.ends().items())
        if name == f"shop.{topic}"
        for batch in reader.read(name, partition, reader.starts()[name, partition], end)
        for value in batch["value"].to_pylist()
        if value is not None
    ]


def catch_up(capture: Capture) -> None:
    """Everything that is committed now is in the log when this returns."""
    token = capture.mark_idle_target()
    reader = LogReader(capture.settings.log_root)

    def is_reached() -> bool:
        capture.check()
        return capture.reached(token, reader)

    wait_until(is_reached)


def start(capture: Capture) -> None:
    capture.start()
    catch_up(capture)


def wait_for_refusal(capture: Capture) -> None:
    def check() -> bool:
        capture.check()
        return False

    wait_until(check)


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def check_nothing_is_lost(settings: CaptureSettings) -> None:
    """Every transaction has all rows that its END counts, an identity means one row, and all rows are there."""
    rows = [row for table in TABLES for row in values_of(settings, f"public.{table}")]
    streamed = [row for row in rows if row["transaction"]]
    identities: dict[tuple[int, int], set[str]] = {}
    for row in streamed:
        identity = (row["source"]["txId"], row["transaction"]["total_order"])
        identities.setdefault(identity, set()).add(json.dumps([row["source"]["table"], row["before"], row["after"]]))
    assert all(len(contents) == 1 for contents in identities.values())
    ends = {event["id"]: event for event in values_of(settings, "transaction") if event["status"] == "END"}
    counted = {int(end["id"].split(":")[0]): rows_counted(end) for end in ends.values()}
    seen: dict[int, int] = {}
    for xid, _ in identities:
        seen[xid] = seen.get(xid, 0) + 1
    assert seen == {xid: count for xid, count in counted.items() if count}
    for table, key in (("orders", ("id",)), ("lines", ("order_id", "id"))):
        with psycopg.connect(settings.dsn) as connection:
            committed = set(connection.execute(f"SELECT {', '.join(key)} FROM {table}".encode()).fetchall())
        captured = {
            tuple(row["after"][name] for name in key)
            for row in rows
            if row["source"]["table"] == table and row["after"]
        }
        assert committed <= captured


def rows_counted(end: dict[str, Any]) -> int:
    """Of our tables: END counts the idle tokens as well."""
    named = {f"public.{table}" for table in TABLES}
    return sum(one["event_count"] for one in end["data_collections"] if one["data_collection"] in named)


class Load:
    """Commits orders with their lines (multi-row inserts, COPY, updates) until it is told to stop."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.committed = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        order = 1000
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self.dsn) as connection:
                    while not self._stopping.is_set():
                        order += 1
                        self._commit_one(connection, order)
            except psycopg.Error:
                time.sleep(0.05)

    def _commit_one(self, connection: psycopg.Connection[Any], order: int) -> None:
        lines = 500 if order % 15 == 0 else order % 7
        with connection.transaction():
            connection.execute("INSERT INTO orders VALUES (%s, 'new')", [order])
            connection.execute("INSERT INTO lines SELECT %s, n, 1.5 FROM generate_series(1, %s) n", [order, lines])
            with connection.cursor().copy("COPY lines (order_id, id, price) FROM STDIN") as copy:
                for line in range(10_000, 10_000 + lines):
                    copy.write_row((order, line, 2))
            connection.execute("UPDATE orders SET status = 'done' WHERE id = %s", [order - 1])
        self.committed += 1
        self._stopping.wait(0.01)


def await_commits(load: Load, count: int) -> None:
    wanted = load.committed + count
    wait_until(lambda: load.committed >= wanted)


def test_a_snapshot_and_then_each_transaction_lie_in_the_log(capture: Capture, settings: CaptureSettings) -> None:
    start(capture)
    execute(settings.dsn, "INSERT INTO orders VALUES (100, 'new')", "INSERT INTO lines VALUES (100, 1, 9.99)")
    execute(settings.dsn, "UPDATE orders SET status = 'sent' WHERE id = 100", "DELETE FROM lines", "TRUNCATE lines")
    catch_up(capture)
    orders = values_of(settings, "public.orders")
    assert sorted(row["after"]["id"] for row in orders if row["op"] == "r") == list(range(1, 51))
    assert [row["op"] for row in orders if row["op"] != "r"] == ["c", "u"]
    assert sorted(row["op"] for row in values_of(settings, "public.lines")) == ["c", "d", "t"]
    transactions = values_of(settings, "transaction")
    assert [event["status"] for event in transactions] == ["BEGIN", "END", "BEGIN", "END"]
    assert [event["event_count"] for event in transactions if event["status"] == "END"] == [2, 3]
    topics = LogReader(settings.log_root).topics()
    assert topics["shop.public.orders"] == topics["shop.public.lines"] == 3
    assert not [topic for topic in topics if "heartbeat" in topic]
    assert capture.status.state == "streaming"


def test_an_empty_table_is_a_topic_from_the_first_moment_on(capture: Capture, settings: CaptureSettings) -> None:
    capture.start()
    reader = LogReader(settings.log_root)
    wait_until(lambda: ("shop.public.lines", 2) in reader.ends())


@pytest.mark.parametrize("point", ["log-appended:12", "log-synced:15"])
def test_a_child_that_dies_inside_a_batch_loses_nothing(
    capture: Capture, settings: CaptureSettings, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_CRASH_AT", point)
    start(capture)
    first = capture.pid
    assert first is not None
    monkeypatch.delenv("TIDEGATE_CRASH_AT")
    with Load(settings.dsn) as load:
        wait_until(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
        await_commits(load, 5)
    catch_up(capture)
    assert capture.pid != first
    check_nothing_is_lost(settings)


def test_a_child_killed_again_and_again_under_load_loses_nothing(capture: Capture, settings: CaptureSettings) -> None:
    start(capture)
    with Load(settings.dsn) as load:
        for pause_seconds in (0.05, 0.3, 0.0):
            wait_until(lambda: is_streaming_again(capture))
            await_commits(load, 15)
            time.sleep(pause_seconds)
            assert capture.pid is not None
            os.kill(capture.pid, signal.SIGKILL)
    catch_up(capture)
    check_nothing_is_lost(settings)


def is_streaming_again(capture: Capture) -> bool:
    capture.check()
    return capture.status.state == "streaming"


def test_a_killed_server_is_followed_again_and_nothing_is_lost(
    capture: Capture, settings: CaptureSettings, server: EmbeddedPostgres
) -> None:
    start(capture)
    with Load(settings.dsn) as load:
        await_commits(load, 25)
        server.kill()
        server.start()
        await_commits(load, 25)
    catch_up(capture)
    check_nothing_is_lost(settings)


def test_a_snapshot_that_was_cut_begins_anew_and_is_whole(capture: Capture, settings: CaptureSettings) -> None:
    execute(settings.dsn, "INSERT INTO lines SELECT 1, n, 1 FROM generate_series(1, 60000) n")
    capture.start()
    reader = LogReader(settings.log_root)
    wait_until(lambda: sum(reader.ends().values()) > 1000)
    assert capture.pid is not None
    os.kill(capture.pid, signal.SIGKILL)
    execute(settings.dsn, "DELETE FROM lines WHERE id <= 1000", "INSERT INTO orders VALUES (77, 'between')")
    catch_up(capture)
    rows = [row for table in TABLES for row in values_of(settings, f"public.{table}")]
    generations = sorted({row["source"]["lsn"] for row in rows if row["op"] == "r"})
    assert len(generations) == 2
    last = [row for row in rows if row["source"]["lsn"] == generations[-1]]
    assert len(last) == 51 + 59_000
    assert not [row for row in rows if row["op"] != "r"], "the new slot begins at the new snapshot"


CAPTURE_AND_WAIT = """
import sys, time
from pathlib import Path
from tidegate.capture.engine import CaptureSettings
from tidegate.capture.supervisor import Capture
dsn, state, name = sys.argv[1:]
capture = Capture(CaptureSettings(dsn, ("orders", "lines"), "shop", 3, Path(state), name, name))
capture.start()
while capture.status.state not in ("snapshot", "streaming"):
    time.sleep(0.02)
print(capture.pid, flush=True)
time.sleep(120)
"""


def test_the_child_ends_with_its_parent_and_the_next_one_goes_on(capture: Capture, settings: CaptureSettings) -> None:
    words = [sys.executable, "-c", CAPTURE_AND_WAIT, settings.dsn, str(settings.state), settings.slot]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5)
    start(capture)
    execute(settings.dsn, "INSERT INTO orders VALUES (100, 'new')")
    catch_up(capture)
    assert {row["after"]["id"] for row in values_of(settings, "public.orders")} == {*range(1, 51), 100}


def test_an_idle_capture_stops_promptly_and_goes_on_where_it_was(capture: Capture, settings: CaptureSettings) -> None:
    start(capture)
    before = time.monotonic()
    capture.stop()
    assert time.monotonic() - before < 3
    execute(settings.dsn, "INSERT INTO orders VALUES (100, 'new')")
    start(capture)
    assert len(values_of(settings, "public.orders")) == 51


def test_a_server_at_rest_shows_that_all_is_captured(capture: Capture, settings: CaptureSettings) -> None:
    """A message by itself is swallowed while the engine looks for its place behind the last transaction."""
    start(capture)
    execute(settings.dsn, "INSERT INTO orders VALUES (100, 'new')")
    wait_until(lambda: len(values_of(settings, "public.orders")) == 51)
    wait_until(lambda: any(end["status"] == "END" for end in values_of(settings, "transaction")))
    capture.stop()
    start(capture)


def test_a_slot_that_somebody_dropped_needs_a_human(capture: Capture, settings: CaptureSettings) -> None:
    start(capture)
    capture.stop()
    execute(settings.dsn, f"SELECT pg_drop_replication_slot('{settings.slot}')")
    capture.start()
    with pytest.raises(FixConfiguration, match=r"slot .* is gone"):
        wait_for_refusal(capture)


def test_a_state_folder_keeps_to_its_settings(capture: Capture, settings: CaptureSettings) -> None:
    capture.start()
    capture.stop()
    with pytest.raises(FixConfiguration, match="another setting of partitions: 3"):
        Capture(replace(settings, partitions=4)).start()


def test_dropping_a_capture_leaves_nothing_on_the_server(capture: Capture, settings: CaptureSettings) -> None:
    start(capture)
    capture.drop()
    with psycopg.connect(settings.dsn) as connection:
        assert not connection.execute(
            "SELECT FROM pg_replication_slots WHERE slot_name = %s", [settings.slot]
        ).fetchall()
        assert not connection.execute("SELECT FROM pg_publication").fetchall()


def test_nothing_that_the_child_writes_holds_the_password(
    server: EmbeddedPostgres, database: str, settings: CaptureSettings, capture: Capture
) -> None:
    secret = "kept-to-ourselves"
    execute(server.dsn(), f"DROP ROLE IF EXISTS keeper; CREATE ROLE keeper SUPERUSER LOGIN PASSWORD '{secret}'")
    own = Capture(replace(settings, dsn=server.dsn(database, "keeper", secret)))
    try:
        start(own)
        assert own.pid is not None
        child = psutil.Process(own.pid)
        assert secret not in " ".join(child.cmdline()) + str(child.environ())
        execute(server.dsn(), "ALTER ROLE keeper PASSWORD 'changed'")
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(FixConfiguration, match="does not let keeper in") as refused:
            wait_for_refusal(own)
        assert secret not in str(refused.value)
        files = [path for path in settings.state.rglob("*") if path.is_file()]
        assert files and not [path for path in files if secret.encode() in path.read_bytes()]
    finally:
        own.stop()


def refusal(dsn: str, *tables: str, slot: str = "new_slot", known: bool = False) -> str:
    with pytest.raises(FixConfiguration) as refused:
        check_server(dsn, tables, slot, "new_publication", known=known)
    assert "tidegate@" not in str(refused.value)
    return str(refused.value)


def test_a_table_or_a_server_that_cannot_be_captured_is_refused(server: EmbeddedPostgres, database: str) -> None:
    dsn = server.dsn(database)
    execute(dsn, "CREATE TABLE keyless (a int)")
    execute(dsn, "SELECT pg_create_logical_replication_slot('taken', 'pgoutput')")
    assert "there is no table" in refusal(dsn, "nowhere.orders")
    assert "has no primary key" in refusal(dsn, "keyless")
    assert "exists already" in refusal(dsn, "orders", slot="taken")
    assert check_server(dsn, ["orders"], "taken", "p", known=True).version >= 14
    assert "does not let postgres in" in refusal(server.dsn(database, password="wrong"), "orders")
    assert "does not exist" in refusal(server.dsn("nowhere"), "orders")
    execute(dsn, "SELECT pg_drop_replication_slot('taken')")
    with pytest.raises(DefinitelyNotDone, match="cannot be reached"):
        check_server("postgresql://postgres:tidegate@127.0.0.1:1/postgres", ["orders"], "s", "p")


def test_a_table_that_does_not_log_its_key_is_refused(server: EmbeddedPostgres, database: str) -> None:
    dsn = server.dsn(database)
    execute(dsn, "ALTER TABLE orders REPLICA IDENTITY NOTHING")
    assert "every UPDATE and DELETE on it fails" in refusal(dsn, "orders")
    execute(dsn, "ALTER TABLE orders ALTER status SET NOT NULL", "CREATE UNIQUE INDEX by_status ON orders (id, status)")
    execute(dsn, "ALTER TABLE orders REPLICA IDENTITY USING INDEX by_status")
    assert "not that of the primary key" in refusal(dsn, "orders")
    execute(dsn, "ALTER TABLE orders REPLICA IDENTITY USING INDEX orders_pkey")
    assert check_server(dsn, ["orders"], "s", "p").replica_identity == {"orders": "INDEX"}


def test_large_arrays_without_the_full_identity_are_warned_of(server: EmbeddedPostgres, database: str) -> None:
    dsn = server.dsn(database)
    execute(dsn, "ALTER TABLE lines ADD names text[]", "ALTER TABLE orders ADD names text[]")
    warnings = check_server(dsn, TABLES, "s", "p").warnings
    assert [one for one in warnings if "array" in one and 'table "public.lines", column "names"' in one]
    assert not [one for one in warnings if "public.orders" in one]


@pytest.mark.parametrize(
    ("publication", "what"),
    [
        ("FOR TABLE orders, lines WITH (publish = 'insert, update, delete')", "leaves out changes"),
        ("FOR TABLE orders WHERE (id > 10), lines", 'row filter or a column list for table "orders"'),
        ("FOR TABLE orders, lines (order_id, id)", 'row filter or a column list for table "lines"'),
    ],
)
def test_a_publication_that_leaves_something_out_is_refused(
    server: EmbeddedPostgres, database: str, publication: str, what: str
) -> None:
    execute(server.dsn(database), f"CREATE PUBLICATION new_publication {publication}")
    assert what in refusal(server.dsn(database), *TABLES)


def test_a_partitioned_table_comes_whole_under_its_own_topic(settings: CaptureSettings) -> None:
    execute(
        settings.dsn,
        "CREATE TABLE parted (id int PRIMARY KEY, status text) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE parted_low REPLICA IDENTITY FULL",
        "ALTER TABLE parted_high REPLICA IDENTITY FULL",
        "INSERT INTO parted VALUES (1, 'old'), (11, 'old')",
    )
    capture = Capture(replace(settings, tables=("parted", "orders")))
    try:
        assert [one for one in capture.start().warnings if "is partitioned" in one]
        catch_up(capture)
        execute(
            settings.dsn, "INSERT INTO parted VALUES (2, 'new'), (12, 'new')", "INSERT INTO orders VALUES (100, '')"
        )
        execute(settings.dsn, "UPDATE parted SET id = 13 WHERE id = 2", "DELETE FROM parted WHERE id = 11")
        execute(settings.dsn, "TRUNCATE parted")
        catch_up(capture)
    finally:
        capture.drop()
    rows = values_of(settings, "public.parted")
    assert sorted(row["after"]["id"] for row in rows if row["op"] == "r") == [1, 11]
    assert sorted(row["op"] for row in rows if row["op"] != "r") == ["c", "c", "c", "d", "d", "t"]
    assert not [name for name in LogReader(settings.log_root).topics() if "parted_" in name]
    ends = [event for event in values_of(settings, "transaction") if event["status"] == "END"]
    named = [{one["data_collection"]: one["event_count"] for one in event["data_collections"]} for event in ends]
    counts = [{name: count for name, count in one.items() if name.startswith("public.")} for one in named]
    assert [one for one in counts if one] == [
        {"public.parted": 2, "public.orders": 1},
        {"public.parted": 3},
        {"public.parted": 1},
    ]


def test_partitions_that_are_published_by_themselves_are_refused(server: EmbeddedPostgres, database: str) -> None:
    dsn = server.dsn(database)
    execute(dsn, "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    execute(dsn, "CREATE PUBLICATION new_publication FOR TABLE parted")
    assert "publish_via_partition_root = true" in refusal(dsn, "parted")


def test_a_slot_that_the_server_has_given_up_needs_a_human(tmp_path: Path) -> None:
    small = {"fsync": "off", "max_slot_wal_keep_size": "16MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    postgres = EmbeddedPostgres(tmp_path / "pg", settings=small)
    try:
        postgres.start()
        execute(postgres.dsn(), "CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)")
        capture = Capture(CaptureSettings(postgres.dsn(), ("orders",), "shop", 1, tmp_path / "state", "s", "p"))
        start(capture)
        capture.stop()
        for _ in range(6):
            with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
                connection.execute("INSERT INTO orders SELECT max(id) + 1 FROM orders")
                connection.execute("SELECT pg_switch_wal()")
                connection.execute("CHECKPOINT")
        capture.start()
        try:
            with pytest.raises(
                FixConfiguration, match="has thrown away changes that the slot s still needed"
            ) as refused:
                wait_for_refusal(capture)
            assert "max_slot_wal_keep_size" in refused.value.remedy
        finally:
            capture.stop()
    finally:
        postgres.remove()


@pytest.mark.parametrize("told_by", ["environment", "passfile"])
def test_a_password_that_is_not_in_the_dsn_reaches_the_engine_and_is_not_kept(
    server: EmbeddedPostgres, settings: CaptureSettings, tmp_path: Path, told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "kept-somewhere-else"
    execute(server.dsn(), f"DROP ROLE IF EXISTS keeper2; CREATE ROLE keeper2 SUPERUSER LOGIN PASSWORD '{secret}'")
    if told_by == "environment":
        monkeypatch.setenv("PGPASSWORD", secret)
    else:
        (tmp_path / "passfile").write_text(f"*:*:*:keeper2:{secret}\n")
        (tmp_path / "passfile").chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "passfile"))
    dsn = settings.dsn.replace("postgres:tidegate@", "keeper2@")
    capture = Capture(replace(settings, dsn=dsn))
    try:
        start(capture)
    finally:
        capture.drop()
    assert len(values_of(settings, "public.orders")) == 50
    files = [path for path in settings.state.rglob("*") if path.is_file()]
    assert files and not [path for path in files if secret.encode() in path.read_bytes()]


def test_an_engine_without_its_server_says_so_until_it_goes_on(
    capture: Capture, settings: CaptureSettings, server: EmbeddedPostgres
) -> None:
    start(capture)
    capture.check()
    assert capture.trouble is None
    server.stop()
    try:
        wait_until(lambda: trouble_of(capture) is not None)
        assert capture.trouble and "remedy: " in capture.trouble and "tidegate@" not in capture.trouble
    finally:
        server.start()
    wait_until(lambda: trouble_of(capture) is None)
    catch_up(capture)


def trouble_of(capture: Capture) -> str | None:
    capture.check()
    return capture.trouble


def test_a_role_learns_one_by_one_what_it_lacks(server: EmbeddedPostgres, database: str) -> None:
    owner, dsn = server.dsn(database), server.dsn(database, "clerk", "clerk")
    execute(owner, "CREATE ROLE clerk LOGIN PASSWORD 'clerk'")
    assert "may not replicate" in refusal(dsn, "orders")
    execute(owner, "ALTER ROLE clerk WITH REPLICATION")
    assert "may not read table" in refusal(dsn, "orders")
    execute(owner, "GRANT SELECT ON orders TO clerk")
    assert "may not create the publication" in refusal(dsn, "orders")
    execute(owner, f"GRANT CREATE ON DATABASE {database} TO clerk")
    assert "does not own table" in refusal(dsn, "orders")
    execute(owner, "ALTER TABLE orders OWNER TO clerk")
    assert check_server(dsn, ["orders"], "s", "p").warnings == ()


def test_a_server_without_logical_wal_or_a_free_slot_is_refused(tmp_path: Path) -> None:
    poor = EmbeddedPostgres(
        tmp_path / "pg", settings={"fsync": "off", "wal_level": "replica", "max_replication_slots": "1"}
    )
    try:
        poor.start()
        execute(poor.dsn(), "CREATE TABLE orders (id int PRIMARY KEY)")
        assert "wal_level is replica" in refusal(poor.dsn(), "orders")
        poor.stop()
        poor.settings["wal_level"] = "logical"
        poor.start()
        execute(poor.dsn(), "SELECT pg_create_logical_replication_slot('taken', 'pgoutput')")
        assert "all 1 replication slots" in refusal(poor.dsn(), "orders")
        assert "REPLICA IDENTITY FULL" in check_server(poor.dsn(), ["orders"], "taken", "p", known=True).warnings[0]
    finally:
        poor.remove()


def test_the_catalog_tells_the_types_and_the_key(server: EmbeddedPostgres, database: str) -> None:
    execute(
        server.dsn(database),
        "CREATE TYPE mood AS ENUM ('good')",
        "CREATE DOMAIN money2 AS numeric(12,2)",
        "CREATE TABLE all_types (b text, a int2, n1 numeric(20,4), n2 numeric, n3 numeric(50,2), f4 real, f8 float8,"
        " flag bool, big bigint, d date, ts timestamp, tz timestamptz, raw bytea, names text[], numbers numeric(5,1)[],"
        " m mood, u uuid, j jsonb, i interval, t time, c char(3), v varchar(9), amount money2, PRIMARY KEY (b, a))",
    )
    table = discover(server.dsn(database), ["all_types"], "shop")[0]
    assert (table.name, table.topic, table.key) == ("all_types", "shop.public.all_types", ("b", "a"))
    assert table.ddl == (
        "`b` string NOT NULL, `a` smallint NOT NULL, `n1` decimal(20,4), `n2` decimal(38,18), `n3` string,"
        " `f4` float, `f8` double, `flag` boolean, `big` bigint, `d` date, `ts` timestamp_ntz, `tz` timestamp,"
        " `raw` binary, `names` array<string>, `numbers` array<decimal(5,1)>, `m` string, `u` string, `j` string,"
        " `i` string, `t` string, `c` string, `v` string, `amount` decimal(12,2)"
    )
