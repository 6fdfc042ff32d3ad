"""Recorded Debezium events, replayed: every state a reader can see is one that the database had, in order."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import recordings
from tests.pipeline import Bench, bench, read_rows, write_files, write_project
from tests.recordings import Documents, Record

from tidegate.capture.sealing import Waiting

EVERYTHING = 100_000  # events a tick, more than any recording has
LONG_TRANSACTION = "769"  # of 501 rows


@dataclass(frozen=True)
class Recording:
    """What a source sent, and the states of the view that it went through."""

    records: Callable[[], list[Record]]
    truth: Callable[[], list[Documents]] | None = None
    price: str = "decimal(10,2)"
    prefix: str = "shop"
    schema: str = "public"

    def states(self) -> list[Documents]:
        return self.truth() if self.truth else recordings.replayed_truth(self.records())

    def replay(
        self, spark: SparkSession, folder: Path, partitions: int, max_events: int, order: random.Random | None
    ) -> int:
        """Runs to the end, and returns how many different states were seen on the way."""
        recordings.write(folder / "events/all.jsonl.gz", self.records(), partitions, order)
        write_project(folder, max_events=max_events, price=self.price, prefix=self.prefix, schema=self.schema)
        with bench(spark, folder) as one:
            seen = assert_follows(one, self.states())
            assert [verdict.equal for verdict in one.verdicts()] == [True]
        return seen


def assert_follows(one: Bench, truth: Sequence[Documents]) -> int:
    """Runs to the end; returns how many different states of the truth were seen on the way."""
    at, seen = -1, set[int]()
    while True:
        done = one.step()
        state = one.documents()
        if state or at >= 0:
            found = next((place for place in range(max(at, 0), len(truth)) if truth[place] == state), None)
            assert found is not None, f"after tick {done} the destination holds a state that never was after {at}"
            at = found
            seen.add(at)
        if done is None:
            break
    assert one.documents() == truth[-1]
    assert not one.ticks.waiting()
    return len(seen)


def recommended() -> list[Record]:
    return recordings.load("events_recommended_raw")


def short() -> list[Record]:
    """The recommended run without its one long transaction."""
    return [one for one in recommended() if not _belongs_to(one, LONG_TRANSACTION)]


def _belongs_to(record: Record, group: str) -> bool:
    value = json.loads(record["value"] or "{}")
    transaction = value.get("transaction") or (value if record["topic"].endswith(".transaction") else {})
    return str(transaction.get("id", "")).startswith(f"{group}:")


RECORDINGS = {
    "recommended": Recording(recommended, recordings.recorded_truth, "decimal(12,4)"),
    "short": Recording(short, None, "decimal(12,4)"),
    "mariadb": Recording(lambda: recordings.load("events_mariadb"), prefix="mshop", schema="shop"),
    "killA": Recording(lambda: recordings.load("killA.run1", "killA.run2")),
    "killSnap": Recording(lambda: recordings.load("killSnap.run1", "killSnap.run2")),
}
CELLS = [(partitions, max_events) for partitions in (1, 2, 7) for max_events in (1, 10, EVERYTHING)]
BOUNDED = [
    ("recommended", 1, 10, False),
    ("recommended", 2, EVERYTHING, True),
    ("recommended", 7, 10, True),
    ("recommended", 1, EVERYTHING, False),
    ("short", 2, 1, True),
    ("mariadb", 1, 1, True),
    ("mariadb", 2, 10, False),
    ("mariadb", 7, 1, True),
    ("mariadb", 7, EVERYTHING, True),
    ("killA", 1, 100, False),
    ("killA", 2, 100, True),
    ("killA", 7, EVERYTHING, True),
    ("killSnap", 1, EVERYTHING, False),
    ("killSnap", 2, 100, True),
    ("killSnap", 7, 100, True),
]


@pytest.mark.parametrize(("name", "partitions", "max_events", "shuffle"), BOUNDED)
def test_a_reader_sees_only_states_that_the_database_had_in_order(
    spark: SparkSession, tmp_path: Path, name: str, partitions: int, max_events: int, shuffle: bool
) -> None:
    order = random.Random(partitions) if shuffle else None
    seen = RECORDINGS[name].replay(spark, tmp_path, partitions, max_events, order)
    assert seen > 2 or max_events == EVERYTHING or name == "killSnap"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("partitions", "max_events"), CELLS)
@pytest.mark.parametrize("name", ["recommended", "mariadb", "killA", "killSnap"])
def test_in_whatever_partitions_ticks_and_order_a_reader_sees_only_states_that_the_database_had(
    spark: SparkSession, tmp_path: Path, name: str, partitions: int, max_events: int
) -> None:
    RECORDINGS[name].replay(spark, tmp_path, partitions, max_events, random.Random(random.randrange(2**32)))


def test_the_database_and_the_events_tell_the_same_truth() -> None:
    told = [state for state, former in _with_former(recordings.recorded_truth()) if state != former]
    replayed = [state for state, former in _with_former(recordings.replayed_truth(recommended())) if state != former]
    assert told == replayed


def _with_former(states: Sequence[Documents]) -> list[tuple[Documents, Documents | None]]:
    return list(zip(states, [None, *states], strict=False))


# --- live: the events arrive while ticks go on


def until_idle(one: Bench) -> None:
    while one.step() is not None:
        pass


def arrivals(records: Sequence[Record]) -> list[list[Record]]:
    """The snapshot, and then each transaction with what came before it."""
    pieces: list[list[Record]] = [[]]
    for record in records:
        pieces[-1].append(record)
        value = json.loads(record["value"] or "{}")
        if value.get("status") == "END" or value.get("type") == "COMPLETED":
            pieces.append([])
    return [piece for piece in pieces if piece]


def test_each_transaction_is_delivered_before_the_next_one_comes(spark: SparkSession, tmp_path: Path) -> None:
    write_project(tmp_path)
    pieces = arrivals(recommended())
    so_far: list[Record] = []
    (tmp_path / "events").mkdir()
    recordings.write(tmp_path / "events/000.jsonl.gz", pieces[0], 2, None)
    with bench(spark, tmp_path) as one:
        for number, piece in enumerate(pieces):
            recordings.write(tmp_path / f"events/{number:03d}.jsonl.gz", piece, 2, None)
            one.arrive()
            until_idle(one)
            so_far += piece
            assert one.documents() == recordings.replayed_truth(so_far)[-1]
        assert [verdict.equal for verdict in one.verdicts()] == [True]


def test_a_restart_after_every_few_ticks_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    recordings.write(tmp_path / "events/all.jsonl.gz", short(), 2, random.Random(5))
    write_project(tmp_path, max_events=9)
    truth, at, done = recordings.replayed_truth(short()), 0, False
    while not done:
        with bench(spark, tmp_path) as one:
            for _ in range(3):
                done = one.step() is None
                state = one.documents()
                assert not state or state in truth[at:]
                at += truth[at:].index(state) if state else 0
    assert one.documents() == truth[-1]


# --- what a kill of the connector leaves behind


def test_a_killed_stream_that_goes_on_has_no_duplicate(spark: SparkSession, tmp_path: Path) -> None:
    records = recordings.load("killA.run1", "killA.run2")
    moments = ("ts_ms", "ts_us", "ts_ns")
    events = [{name: one for name, one in record["value"].items() if name not in moments} for record in records]
    assert len({json.dumps(event, sort_keys=True) for event in events}) < len(events)
    recordings.write(tmp_path / "events/all.jsonl.gz", records, 2, None)
    with bench(spark, write_project(tmp_path, price="decimal(10,2)")) as one:
        one.run()
        documents = one.documents()
        rows = sum(size.rows for size in one.catalog.files("order_lines", -1, one.ticks.last_tick))
    lines = [line[0] for document in documents.values() for line in document[5]]
    assert len(lines) == len(set(lines)) == rows
    assert (len(documents), len(lines)) == (303, 1303)


def test_a_transaction_that_a_kill_cut_off_is_reported_and_all_before_it_is_there(
    spark: SparkSession, tmp_path: Path
) -> None:
    records = recordings.load("killA.run1")
    recordings.write(tmp_path / "events/all.jsonl.gz", records, 2, None)
    with bench(spark, write_project(tmp_path, price="decimal(10,2)")) as one:
        one.run()
        assert one.documents() == recordings.replayed_truth(records)[-1]
        assert set(one.ticks.waiting()) == {
            Waiting("908:24260688", "purchase_orders", None, 1),
            Waiting("908:24260688", "order_lines", None, 190),
        }
        recordings.write(tmp_path / "events/more.jsonl.gz", recordings.load("killA.run2"), 2, None)
        one.arrive()
        one.run()
        assert one.ticks.waiting() == []
        assert one.documents() == recordings.replayed_truth([*records, *recordings.load("killA.run2")])[-1]


def test_a_run_until_idle_says_which_transaction_is_not_whole(tmp_path: Path) -> None:
    recordings.write(tmp_path / "events/all.jsonl.gz", recordings.load("killA.run1"), 2, None)
    project = write_project(tmp_path, price="decimal(10,2)")
    command = [sys.executable, "-m", "tidegate.cli.main", "run", "--until-idle", "--project", str(project)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3
    assert "transaction 908" in ended.stderr


def test_a_snapshot_that_was_begun_again_leaves_no_ghost(spark: SparkSession, tmp_path: Path) -> None:
    """Order 2 was in the first, torn snapshot, and was deleted before the second."""
    torn, whole = recordings.load("killSnap.run1"), recordings.load("killSnap.run2")
    gone = [one for one in whole if not (one["topic"].endswith("purchase_orders") and one["key"] == {"id": 2})]
    recordings.write(tmp_path / "events/all.jsonl.gz", [*torn, *gone], 2, None)
    with bench(spark, write_project(tmp_path, max_events=100, price="decimal(10,2)")) as one:
        assert_follows(one, recordings.replayed_truth(gone))
        assert 2 not in one.documents()
        assert len(one.documents()) == len(recordings.replayed_truth(whole)[-1]) - 1


def test_a_truncate_without_an_end_is_taken_when_the_next_transaction_begins(
    spark: SparkSession, tmp_path: Path
) -> None:
    recordings.write(tmp_path / "events/all.jsonl.gz", recordings.load("events_mariadb"), 2, None)
    with bench(spark, write_project(tmp_path, prefix="mshop", schema="shop")) as one:
        one.run()
        documents = one.documents()
    assert sorted(documents) == [1, 2, 100, 400]
    assert {order: [line[0] for line in document[5]] for order, document in documents.items() if document[5]} == {
        100: [9001]
    }


# --- what rows a stream does not carry whole

SHOP = """
name: shop
spark: {master: "local[2]"}
source: {kind: files, topic_prefix: shop, path: "events/*.jsonl.gz"}
tables:
  customers: {key: [id], columns: {id: bigint, name: string, vip: boolean}}
  docs: {key: [id], columns: {id: bigint, title: string, body: string}}
  purchase_orders: {key: [id], columns: {id: bigint, customer: bigint, status: string, note: string}}
  returns: {key: [id], columns: {id: bigint, order_id: bigint}}
materializations:
  - {view: orders_of_customers, to: sqlite, path: out.db, table: orders_of_customers}
  - {view: pages, to: sqlite, path: out.db, table: pages}
  - {view: orders_with_returns, to: sqlite, path: out.db, table: orders_with_returns}
tick: {max_events: 12, every_ms: 0}
"""
LAST_MATERIALIZATION = "  - {view: orders_with_returns, to: sqlite, path: out.db, table: orders_with_returns}\n"
ORDERS_OF_CUSTOMERS = """
SELECT c.id, c.name, c.vip, COUNT(po.id) AS orders
FROM customers c LEFT JOIN purchase_orders po ON po.customer = c.id
GROUP BY c.id, c.name, c.vip
"""
PAGES = "SELECT d.id, d.title, d.body, COUNT(*) AS copies FROM docs d GROUP BY d.id, d.title, d.body"
ORDERS_WITH_RETURNS = """
SELECT po.id, po.status, po.note, COUNT(r.id) AS returned
FROM purchase_orders po LEFT JOIN returns r ON r.order_id = po.id
GROUP BY po.id, po.status, po.note
"""
Shop = tuple[list[tuple[object, ...]], ...]


def write_shop(folder: Path) -> Path:
    views = {"orders_of_customers": ORDERS_OF_CUSTOMERS, "pages": PAGES, "orders_with_returns": ORDERS_WITH_RETURNS}
    return write_files(folder, SHOP, **views)


def shop_of(tables: dict[str, dict[int, Record]]) -> Shop:
    customers, docs, orders = (tables[name].values() for name in ("customers", "docs", "purchase_orders"))
    counts = Counter(order["customer"] for order in orders)
    return (
        sorted((one["id"], one["name"], int(one["vip"]), counts[one["id"]]) for one in customers),
        sorted((one["id"], one["title"], one["body"], 1) for one in docs),
        sorted((one["id"], one["status"], one.get("note"), 0) for one in orders),
    )


def shop_read(folder: Path) -> Shop:
    return (
        read_rows(folder / "out.db", "SELECT id, name, vip, orders FROM orders_of_customers ORDER BY id"),
        read_rows(folder / "out.db", "SELECT id, title, body, copies FROM pages ORDER BY id"),
        read_rows(folder / "out.db", "SELECT id, status, note, returned FROM orders_with_returns ORDER BY id"),
    )


def test_rows_that_come_in_part_are_completed_from_the_rows_before_them(spark: SparkSession, tmp_path: Path) -> None:
    """Default replica identity, unchanged TOAST, a new column, changed keys, and a table that never had an event."""
    truth = [shop_of(tables) for tables in recordings.replayed(short(), ("customers", "docs", "purchase_orders"))]
    assert not any(recordings.UNAVAILABLE in str(page) for _, pages, _ in truth for page in pages)
    recordings.write(tmp_path / "events/all.jsonl.gz", short(), 2, random.Random(3))
    write_shop(tmp_path)
    at, seen = 0, 0
    with bench(spark, tmp_path) as one:
        while one.step() is not None:
            state = shop_read(tmp_path)
            if state != ([], [], []):
                assert state in truth[at:]
                seen, at = seen + 1, at + truth[at:].index(state)
        assert shop_read(tmp_path) == truth[-1]
        assert [verdict.equal for verdict in one.verdicts()] == [True] * 3
    assert seen > 4


def test_a_column_that_is_declared_later_is_read_from_then_on(spark: SparkSession, tmp_path: Path) -> None:
    pieces = arrivals(short())
    added = next(place for place, piece in enumerate(pieces) if any(_belongs_to(one, "790") for one in piece))
    for name, part in (("before", pieces[:added]), ("after", pieces[added:])):
        recordings.write(tmp_path / f"{name}.jsonl.gz", chain.from_iterable(part), 2, None)
    (tmp_path / "events").mkdir()
    (tmp_path / "before.jsonl.gz").rename(tmp_path / "events/0.jsonl.gz")
    former = SHOP.replace(", note: string", "").replace(LAST_MATERIALIZATION, "")
    write_files(tmp_path, former, orders_of_customers=ORDERS_OF_CUSTOMERS, pages=PAGES)
    with bench(spark, tmp_path) as one:
        one.run()
    (tmp_path / "after.jsonl.gz").rename(tmp_path / "events/1.jsonl.gz")
    write_shop(tmp_path)
    with bench(spark, tmp_path) as one:
        one.run()
        assert [verdict.equal for verdict in one.verdicts()] == [True] * 3
    truth = recordings.replayed(short(), ("customers", "docs", "purchase_orders"))[-1]
    assert shop_read(tmp_path) == shop_of(truth)
