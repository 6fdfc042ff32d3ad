"""Streams out of the ordinary: partitions that are added, counting that begins anew, large values that stay away."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests import recordings
from tests.pipeline import bench, read_rows, write_files, write_project
from tests.recordings import Record

from tidegate.errors import FixConfiguration

Row = Mapping[str, Any]


def row_event(
    table: str, order: int, op: str, before: Row | None, after: Row | None, *, xid: int = 900, version: str, **more: Any
) -> Record:
    """One row event of transaction `xid`, keyed by id."""
    source: dict[str, Any] = {
        "version": version,
        "connector": "postgresql",
        "db": "postgres",
        "schema": "public",
        "table": table,
    }
    source |= {"txId": xid, "lsn": 10 * xid + order, "snapshot": "false", **more}
    transaction = {"id": f"{xid}:{10 * xid + order}", "total_order": order, "data_collection_order": order}
    value = {"op": op, "before": before, "after": after, "source": source, "transaction": transaction}
    return {"topic": f"shop.public.{table}", "key": {"id": (after or before or {})["id"]}, "value": value}


def word(status: str, xid: int, lsn: int, **counts: int) -> Record:
    """BEGIN or END of a transaction."""
    collections = [{"data_collection": f"public.{table}", "event_count": count} for table, count in counts.items()]
    value = {"status": status, "id": f"{xid}:{lsn}", "event_count": sum(counts.values()), "ts_ms": 1_700_000_000_000}
    value["data_collections"] = collections if status == "END" else None
    return {"topic": "shop.transaction", "key": {"id": value["id"]}, "value": value}


def arrive(folder: Path, number: int, records: Sequence[Record], partitions: int) -> None:
    recordings.write(folder / f"events/{number:03d}.jsonl.gz", records, partitions, None)


def order_of(number: int, status: str) -> Row:
    return {"id": number, "customer": 1, "order_date": "2026-01-01Z", "status": status}


def put(order: int, op: str, row: Row, sequence: str) -> Record:
    return row_event("purchase_orders", order, op, None, row, version="3.5.0.Final", sequence=f'["{sequence}","9001"]')


@pytest.mark.parametrize("begins_again", [False, True])
def test_an_old_debezium_that_counts_anew_is_refused_before_an_update_is_lost(
    spark: SparkSession, tmp_path: Path, begins_again: bool
) -> None:
    write_project(tmp_path)
    first = [word("BEGIN", 900, 9000), put(1, "c", order_of(1, "new"), "80"), put(2, "c", order_of(2, "new"), "80")]
    later = "80" if begins_again else "95"
    second = [put(1, "u", order_of(1, "paid"), later), put(2, "c", order_of(3, "new"), later)]
    begin = [word("BEGIN", 900, 9003)] if begins_again else []
    arrive(tmp_path, 0, first, 2)
    with bench(spark, tmp_path) as one:
        one.run()
        arrive(tmp_path, 1, [*begin, *second, word("END", 900, 9050, purchase_orders=2)], 2)
        one.arrive()
        with pytest.raises(FixConfiguration, match="restarted inside transaction 900"):
            one.run()
        assert one.documents() == {}


def test_a_row_that_comes_late_to_a_transaction_without_an_end_is_refused_also_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    """MariaDB writes a bare BEGIN for TRUNCATE."""
    records = recordings.load("events_mariadb")
    emptied = next(record for record in records if record["value"] and record["value"].get("op") == "t")
    write_project(tmp_path, prefix="mshop", schema="shop")
    arrive(tmp_path, 0, [*records, emptied], 1)
    with bench(spark, tmp_path) as one:
        one.run()
        documents = one.documents()
    late = {**emptied["value"], "transaction": {**emptied["value"]["transaction"], "total_order": 2}}
    arrive(tmp_path, 1, [emptied], 1)
    with bench(spark, tmp_path) as one:
        one.run()
        assert (one.documents(), one.ticks.waiting()) == (documents, [])
        arrive(tmp_path, 2, [{**emptied, "value": late}], 1)
        one.arrive()
        with pytest.raises(FixConfiguration, match=rf"topic {emptied['topic']}, partition 0, .*: row event 2 of"):
            one.run()


DOCS = """
name: shop
spark: {master: "local[2]"}
source: {kind: files, topic_prefix: shop, path: "events/*.jsonl.gz"}
tables: {docs: {key: [id], columns: {id: bigint, title: string, body: string}}}
materializations: [{view: pages, to: sqlite, path: out.db, table: pages}]
tick: {max_events: MAX_EVENTS, every_ms: 0}
"""
PAGES = "SELECT d.id, d.title, d.body, COUNT(*) AS copies FROM docs d GROUP BY d.id, d.title, d.body"


def doc(number: int, title: str, body: str = recordings.UNAVAILABLE) -> Row:
    return {"id": number, "title": title, "body": body}


def committed(xid: int, *changes: tuple[str, Row]) -> list[Record]:
    """A transaction over docs, with the default replica identity: what a delete had is made up but for its key."""
    events = []
    for order, (op, row) in enumerate(changes, 1):
        before, after = (doc(row["id"], "", ""), None) if op == "d" else (None, row)
        events.append(row_event("docs", order, op, before, after, xid=xid, version="3.6.3.Final"))
    return [word("BEGIN", xid, 10 * xid), *events, word("END", xid, 10 * xid + 9, docs=len(events))]


MOVES = [
    committed(900, *(("c", doc(number, "new", f"large {number}")) for number in range(1, 6))),
    committed(901, ("d", doc(1, "")), ("c", doc(11, "moved"))),
    committed(902, ("u", doc(2, "touched")), ("d", doc(2, "")), ("c", doc(12, "moved"))),
    committed(903, ("d", doc(12, "")), ("c", doc(13, "on")), ("d", doc(13, "")), ("c", doc(2, "back"))),
    committed(904, ("c", doc(6, "new", "large 6")), ("d", doc(6, "")), ("c", doc(16, "moved"))),
    committed(905, ("d", doc(3, "")), ("c", doc(23, "3 to 23")), ("d", doc(4, "")), ("c", doc(3, "4 to 3"))),
]
MOVED = [
    (2, "back", "large 2"),
    (3, "4 to 3", "large 4"),
    (5, "new", "large 5"),
    (11, "moved", "large 1"),
    (16, "moved", "large 6"),
    (23, "3 to 23", "large 3"),
]


@pytest.mark.parametrize("max_events", [2, 100_000])
def test_a_row_with_another_primary_key_keeps_the_large_value_that_was_not_sent(
    spark: SparkSession, tmp_path: Path, max_events: int
) -> None:
    """Its former row may lie in another partition of the table, and its two events in different ticks."""
    write_files(tmp_path, DOCS.replace("MAX_EVENTS", str(max_events)), pages=PAGES)
    recordings.write(tmp_path / "events/0.jsonl.gz", chain.from_iterable(MOVES), 5, random.Random(4))
    with bench(spark, tmp_path, partitions=3) as one:
        one.run()
        assert one.ticks.waiting() == []
        assert read_rows(tmp_path / "out.db", "SELECT id, title, body FROM pages ORDER BY id") == MOVED
        assert [verdict.equal for verdict in one.verdicts()] == [True]


def test_each_such_move_may_be_the_work_of_another_run(spark: SparkSession, tmp_path: Path) -> None:
    write_files(tmp_path, DOCS.replace("MAX_EVENTS", "100"), pages=PAGES)
    for number, records in enumerate(MOVES):
        arrive(tmp_path, number, records, 5)
        with bench(spark, tmp_path) as one:
            one.run()
    assert read_rows(tmp_path / "out.db", "SELECT id, title, body FROM pages ORDER BY id") == MOVED


def test_such_a_row_whose_former_one_nobody_has_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_files(tmp_path, DOCS.replace("MAX_EVENTS", "100"), pages=PAGES)
    arrive(tmp_path, 0, MOVES[0], 2)
    with bench(spark, tmp_path) as one:
        one.run()
        arrive(tmp_path, 1, committed(901, ("u", doc(1, "before it")), ("c", doc(11, "moved"))), 2)
        one.arrive()
        with pytest.raises(FixConfiguration, match="the value of body was not sent"):
            one.run()


def cut_within(records: Sequence[Record], group: str) -> int:
    """A place in the middle of a transaction's rows."""
    inside = [
        place
        for place, record in enumerate(records)
        if str((json.loads(record["value"] or "{}").get("transaction") or {}).get("id", "")).startswith(f"{group}:")
    ]
    return inside[len(inside) // 2]


@pytest.mark.parametrize("max_events", [40, 100_000])
def test_a_row_topic_may_gain_partitions_in_the_middle_of_a_transaction(
    spark: SparkSession, tmp_path: Path, max_events: int
) -> None:
    """A row's key then lies in another partition than before: the old one may be read later."""
    records = recordings.load("events_recommended_raw")
    at = cut_within(records, "769")
    write_project(tmp_path, max_events=max_events)
    arrive(tmp_path, 0, records[:at], 1)
    with bench(spark, tmp_path) as one:
        one.run()
        assert one.documents() == recordings.replayed_truth(records[:at])[-1]
        assert {waiting.id.split(":")[0] for waiting in one.ticks.waiting()} == {"769"}
        arrive(tmp_path, 1, records[at:], 5)
        one.arrive()
        truth = recordings.replayed_truth(records)
        while one.step() is not None:
            truth = truth[truth.index(one.documents()) :]
        assert len(one.documents()) and one.documents() == truth[-1]
        assert one.ticks.waiting() == []
        assert [verdict.equal for verdict in one.verdicts()] == [True]
