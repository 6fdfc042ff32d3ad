"""Trouble outside: a full disk, a server that is away, a password that is wrong. It is said, nothing is lost, and when
the trouble is over all goes on."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.pipeline import read_rows, write_files
from tests.shell import Shell

from tidegate.cli.init import write_project
from tidegate.embedded.postgres import EmbeddedPostgres

DEADLINE_SECONDS = 90.0
ROWS = 6_000

LIMITED = """
import resource, sys
most_bytes = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
from tidegate.cli.main import main
main()
"""


def transaction(xid: int, first: int, count: int) -> Iterator[str]:
    """A transaction that inserts so many lines, a kilobyte each, into the orders of the first project."""
    chance, topic = random.Random(xid), "shop.public.order_lines"
    origin = {"version": "3.6.3.Final", "connector": "postgresql", "schema": "public", "table": "order_lines"}
    yield event("shop.transaction", {"status": "BEGIN", "id": f"{xid}:{first}", "ts_ms": 1})
    for order, number in enumerate(range(first, first + count), 1):
        row = {"id": number, "order_id": 1 + number % 2, "quantity": 1, "price": "1.00"}
        row["item"] = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=256))
        place = {
            "id": f"{xid}:{number}",
            "total_order": order,
            "data_collection_order": order,
        }
        source = {**origin, "txId": xid, "lsn": number}
        yield event(topic, {"op": "c", "before": None, "after": row, "source": source, "transaction": place})
    counts = [{"data_collection": "public.order_lines", "event_count": count}]
    end = {"status": "END", "id": f"{xid}:{first + count}", "ts_ms": 1, "event_count": count}
    yield event("shop.transaction", {**end, "data_collections": counts})


def event(topic: str, value: dict[str, Any]) -> str:
    return json.dumps({"topic": topic, "key": None, "value": value}) + "\n"


def large_project(folder: Path) -> Path:
    list(write_project(folder))
    (folder / "events" / "zz.jsonl").write_text("".join(transaction(800, 5_000, ROWS)))
    return folder


def run_limited(folder: Path, most_bytes: int) -> subprocess.CompletedProcess[str]:
    """A run of which no file may become larger, whoever the user is."""
    words = [sys.executable, "-c", LIMITED, str(most_bytes), "run", "--until-idle", "--project", str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def goes_on(shell: Shell, folder: Path) -> None:
    done = shell("run", "--until-idle", "--project", folder)
    assert done.code == 0, done.err
    verified = shell("verify", "--json", "--project", folder)
    assert verified.code == 0, verified.out + verified.err
    assert json.loads(verified.out)[0]["rows"] == 3


# --- a full disk

LOG, PENDING, ARRANGEMENT = 500_000, 1_100_000, 2_500_000
TOLD = {
    100_000: ("catalog.db cannot be used", "Nothing is lost."),
    LOG: ("log cannot be written: File too large", "appending then goes on without loss."),
    PENDING: ("could not be written: the disk is full", "the tick is repeated, nothing is lost."),
    ARRANGEMENT: ("could not be written: mdb_txn_commit", "the tick is repeated, nothing is lost."),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "limits", [pytest.param(tuple(TOLD), marks=pytest.mark.slow), (LOG, ARRANGEMENT)], ids=["everywhere", "twice"]
)
def test_a_file_that_cannot_grow_ends_the_run_and_with_room_it_goes_on(
    tmp_path: Path, shell: Shell, limits: tuple[int, ...]
) -> None:
    folder = large_project(tmp_path / "shop")
    for most_bytes in limits:
        done = run_limited(folder, most_bytes)
        assert done.returncode == 3, done.stderr
        what, remedy = TOLD[most_bytes]
        assert str(folder / ".tidegate") in done.stderr
        assert what in done.stderr
        assert done.stderr.endswith(f"{remedy}\n")
        assert "Traceback" not in done.stderr
    goes_on(shell, folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of five megabytes; only root may have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no file system may be mounted here; test_a_file_that_cannot_grow… shows the same")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_with_room_it_goes_on(tmp_path: Path, shell: Shell, small_disk: Path) -> None:
    folder = large_project(tmp_path / "shop")
    (folder / ".tidegate").symlink_to(small_disk)
    done = shell("run", "--until-idle", "--project", folder)
    assert done.code == 3, done.err
    assert "could not be written" in done.err and "Make room" in done.err
    assert "Traceback" not in done.err
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    goes_on(shell, folder)


# --- a server that is away, and one that lets nobody in


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(tmp_path_factory.mktemp("server") / "postgres", settings={"fsync": "off"})
    postgres.start()
    yield postgres
    postgres.remove()


def deliver_to_postgres(folder: Path) -> Path:
    """The first project, with a Postgres as its destination."""
    list(write_project(folder))
    path = folder / "tidegate.yaml"
    sqlite = "to: sqlite, path: out.db, table: orders_with_lines"
    text = path.read_text().replace("{view: orders", f"{{name: {folder.name}, view: orders")
    assert sqlite in text
    path.write_text(text.replace(sqlite, f'to: postgres, dsn: "${{DESTINATION_DSN}}", table: {folder.name}'))
    return folder


class LiveRun:
    """`tidegate run --json` in a process of its own, and what it says."""

    def __init__(self, folder: Path, dsn: str) -> None:
        words = [sys.executable, "-m", "tidegate.cli.main", "run", "--json", "--project", str(folder)]
        environment = {**os.environ, "DESTINATION_DSN": dsn}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def await_event(self, **wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            if wanted.items() <= found.items():
                return found

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(timeout=30)
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def rows_of(dsn: str, table: str) -> dict[int, str]:
    with psycopg.connect(dsn) as connection:
        return {row[0]: row[1] for row in connection.execute(f"SELECT id, status FROM {table}".encode()).fetchall()}


@pytest.mark.timeout(240)
def test_a_destination_that_is_away_is_waited_for(tmp_path: Path, shell: Shell, server: EmbeddedPostgres) -> None:
    folder, name = deliver_to_postgres(tmp_path / "waited"), "waited"
    later = folder / "events" / "zz.jsonl"
    live = LiveRun(folder, server.dsn())
    try:
        live.await_event(event="delivered", materialization=name, tick=0)
        server.stop()
        later.write_text("".join(transaction(800, 5_000, 3)))
        trouble = live.await_event(event="trouble", name=name)["error"]
        assert f"127.0.0.1:{server.port}" in trouble and "tidegate@" not in trouble
        time.sleep(1.5)  # it goes on trying
        assert live.process.poll() is None
        server.start()
        live.await_event(event="trouble", name=name, error=None)
    finally:
        server.start()
        code = live.stop()
    assert code == 0
    verified = shell("verify", "--project", folder, DESTINATION_DSN=server.dsn())
    assert verified.code == 0, verified.out + verified.err
    assert rows_of(server.dsn(), "waited") == {1: "paid", 2: "paid", 4: "new"}


IMPATIENT = """
import sys
from pathlib import Path
from tidegate.cli.show import Lines
from tidegate.errors import TidegateError
from tidegate.pipeline.project import load
from tidegate.pipeline.runner import Run
try:
    Run(load(Path(sys.argv[1])), Lines(as_json=False), until_idle=True, patience_seconds=1.0).run()
except TidegateError as error:
    sys.stderr.write(f"error: {error}")
    sys.exit(error.exit_code)
"""


@pytest.mark.timeout(240)
def test_until_idle_gives_up_on_a_destination_that_stays_away_and_goes_on_later(
    tmp_path: Path, shell: Shell, server: EmbeddedPostgres
) -> None:
    folder = deliver_to_postgres(tmp_path / "later")
    environment = {**os.environ, "DESTINATION_DSN": server.dsn()}
    server.stop()
    try:
        done = subprocess.run(
            [sys.executable, "-c", IMPATIENT, str(folder)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            env=environment,
            check=False,
        )
    finally:
        server.start()
    assert done.returncode == 3, done.stderr
    assert 'error: "later" could not deliver for 1 seconds: Postgres at 127.0.0.1:' in done.stderr
    assert done.stderr.endswith("It goes on where it stopped.")
    assert shell("run", "--until-idle", "--project", folder, DESTINATION_DSN=server.dsn()).code == 0
    assert rows_of(server.dsn(), "later") == {1: "paid", 2: "paid", 4: "new"}


@pytest.mark.timeout(240)
def test_a_source_that_is_away_is_told_and_followed_again(tmp_path: Path, server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("CREATE TABLE notes (id int PRIMARY KEY, text text)")
        connection.execute("INSERT INTO notes VALUES (1, 'first')")
    project = "name: away\nsource: {kind: postgres, dsn: '${DESTINATION_DSN}', tables: [notes]}\nmaterializations:\n"
    copies = "SELECT n.id, n.text, COUNT(*) AS copies FROM notes n GROUP BY n.id, n.text"
    materialization = "  - {view: copies, to: sqlite, path: out.db, table: copies}\n"
    live = LiveRun(write_files(tmp_path, project + materialization, copies=copies), server.dsn())
    try:
        live.await_event(event="delivered", documents=1)
        server.stop()
        trouble = live.await_event(event="trouble", name="source")["error"]
        assert "remedy: " in trouble and "tidegate@" not in trouble
        server.start()
        live.await_event(event="trouble", name="source", error=None)
        with psycopg.connect(server.dsn()) as connection:
            connection.execute("INSERT INTO notes VALUES (2, 'second')")
        live.await_event(event="delivered", documents=1)
    finally:
        server.start()
        code = live.stop()
    assert code == 0
    assert read_rows(tmp_path / "out.db", "SELECT id, text FROM copies ORDER BY id") == [(1, "first"), (2, "second")]


def files_with(secret: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


@pytest.mark.timeout(240)
def test_a_wrong_password_is_told_and_never_shown_nor_stored(
    tmp_path: Path, shell: Shell, server: EmbeddedPostgres
) -> None:
    folder = deliver_to_postgres(tmp_path / "secret")
    right, wrong = "kept-to-ourselves", "mistyped-by-somebody"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE keeper SUPERUSER LOGIN PASSWORD '{right}'".encode())
    said = []
    for word in (["run", "--until-idle"], ["run", "--until-idle", "--json"]):
        refused = shell(*word, "--project", folder, DESTINATION_DSN=server.dsn(user="keeper", password=wrong))
        assert refused.code == 2, refused.err
        assert 'password authentication failed for user "keeper"' in refused.err
        assert "remedy: " in refused.err and "Traceback" not in refused.err
        said.append(refused)
    for words in (["check"], ["run", "--until-idle"], ["status"], ["verify"]):
        done = shell(*words, "--project", folder, DESTINATION_DSN=server.dsn(user="keeper", password=right))
        assert done.code == 0, done.err
        said.append(done)
    for secret in (right, wrong):
        assert not [one for one in said if secret in one.out + one.err]
        assert not files_with(secret, folder)
    assert rows_of(server.dsn(), "secret") == {1: "paid", 2: "paid", 4: "new"}


def test_a_source_with_a_wrong_password_is_told_and_never_shown(
    tmp_path: Path, shell: Shell, server: EmbeddedPostgres
) -> None:
    folder, wrong = tmp_path / "source", "mistyped-by-somebody"
    list(write_project(folder))
    (folder / "tidegate.yaml").write_text(
        'name: shop\nsource: {kind: postgres, dsn: "${SHOP_DSN}", tables: [purchase_orders, order_lines]}\n'
    )
    for word in ("check", "run"):
        refused = shell(word, "--project", folder, SHOP_DSN=server.dsn(password=wrong))
        assert refused.code == 2, refused.err
        assert f"error: Postgres at 127.0.0.1:{server.port} does not let postgres in: " in refused.err
        assert "remedy: Correct user and password in the source's dsn, or the server's pg_hba.conf.\n" in refused.err
        assert wrong not in refused.out + refused.err
    assert not files_with(wrong, folder)
