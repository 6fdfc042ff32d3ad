"""Reading a range of a table's topic: whose rows they are, and which snapshot has come to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.capture.debezium import Op, RowEvents
from tidegate.capture.log import LogWriter
from tidegate.errors import BadRecord
from tidegate.model.key import encode_integer, key_hash
from tidegate.model.schema import Column, ColumnType, TableSchema
from tidegate.pipeline import tasks
from tidegate.pipeline.work import Chunk, Derivation, Ingested, Layout, Pending, Sealed
from tidegate.spark.failures import TaskError, carried
from tidegate.timeline.binding import OffsetRange

POSTGRES = {"version": "3.6.3.Final", "connector": "postgresql", "db": "shop", "schema": "public", "table": "orders"}
MARIADB = {
    "version": "3.6.3.Final",
    "connector": "mariadb",
    "db": "public",
    "table": "orders",
    "file": "b.01",
    "pos": 4,
}


def table(topic: str) -> TableSchema:
    return TableSchema("orders", topic, ("id",), (Column("id", ColumnType("bigint")),))


def read(number: int, source: dict[str, Any]) -> bytes:
    return json.dumps({"op": "r", "before": None, "after": {"id": number}, "source": source}).encode()


def snapshot_row(number: int, lsn: int, kind: str) -> bytes:
    return read(number, {**POSTGRES, "snapshot": kind, "txId": 700, "lsn": lsn})


def ingested(folder: Path, *values: bytes | None, topic: str = "shop.public.orders") -> Ingested:
    with LogWriter(folder / "log", wait_seconds=1) as writer:
        writer.declare(topic, 1)
        writer.append_columns(topic, 0, [None] * len(values), list(values))
        writer.sync()
    chunk = Chunk(0, 0, table(topic), topic.removeprefix("shop."), OffsetRange(topic, 0, 0, len(values)))
    try:
        (one,) = tasks.ingest(Layout(folder, 1), [[chunk]])
    except TaskError as failure:
        raise carried(failure) or failure from None
    return one


def test_the_end_of_a_snapshot_is_not_taken_for_the_end_of_the_next_one(tmp_path: Path) -> None:
    one = ingested(tmp_path, snapshot_row(1, 10, "first"), snapshot_row(2, 10, "last"), snapshot_row(1, 20, "first"))
    assert one.last_snapshot_rows == ("snapshot:700:10",)


def test_two_snapshots_may_end_in_one_range(tmp_path: Path) -> None:
    one = ingested(tmp_path, snapshot_row(1, 10, "last"), snapshot_row(1, 20, "last"))
    assert one.last_snapshot_rows == ("snapshot:700:10", "snapshot:700:20")


@pytest.mark.parametrize("topic", ["shop.cdc.orders", "shop.cdc.public.orders", "shop.public.lines"])
def test_rows_in_a_topic_with_another_name_than_their_table_are_refused(tmp_path: Path, topic: str) -> None:
    with pytest.raises(BadRecord) as refused:
        ingested(tmp_path, None, snapshot_row(1, 10, "true"), topic=topic)
    wanted = topic.removeprefix("shop.")
    assert refused.value.message.startswith(
        f'topic {topic}, partition 0, offset 1: a row of table "public.orders" in the topic of "{wanted}"'
    )
    assert "without routing" in refused.value.remedy


def test_a_binlog_names_a_table_by_its_database(tmp_path: Path) -> None:
    assert ingested(tmp_path, read(1, MARIADB)).rows == 1
    with pytest.raises(BadRecord, match=r'a row of table "other\.orders"'):
        ingested(tmp_path / "other", read(1, {**MARIADB, "db": "other", "schema": "public"}))


def change(number: int, version: str, previous_commit: int) -> bytes:
    source = {**POSTGRES, "version": version, "lsn": 50, "sequence": f'["{previous_commit}","50"]'}
    transaction = {"id": "7:50", "total_order": number}
    return json.dumps({"op": "c", "after": {"id": number}, "source": source, "transaction": transaction}).encode()


@pytest.mark.parametrize(("version", "shared"), [("3.6.0.Final", '["20"'), ("3.6.1.Final", None)])
def test_what_rows_share_is_told_of_versions_that_count_anew_after_a_restart(
    tmp_path: Path, version: str, shared: str | None
) -> None:
    """Another task, or another tick, may read what was numbered anew."""
    one = ingested(tmp_path, change(1, version, 20), change(2, version, 20))
    assert tasks.ipc_table(one.ranges).to_pylist() == [
        {"group": "7", "first": 1, "last": 2, "lsn": 50, "sequence": shared}
    ]
    again = ingested(tmp_path / "again", change(1, version, 35))
    assert tasks.ipc_table(again.ranges)["sequence"].to_pylist() == [shared and '["35"']


# --- pending rows, and what is spread of them

GROUPS = ("7", "8", "9")  # the last one is not sealed
PARTITIONS = 2
Spread = dict[int, list[tuple[int, int, bytes, bytes | None]]]


def row_events(sizes_bytes: list[int]) -> RowEvents:
    """One event for each size, its cell so long (0: a delete); of mixed transactions, and the last one truncates."""
    events = RowEvents()
    for place, size_bytes in enumerate(sizes_bytes):
        events.groups.append(GROUPS[place % 3])
        events.orders.append(place)
        events.ops.append(Op.UPSERT if size_bytes else Op.DELETE)
        events.keys.append(encode_integer(place))
        events.cells.append(b"x" * size_bytes if size_bytes else None)
        events.lsns.append(place)
    events.groups[-1], events.ops[-1] = GROUPS[0], Op.TRUNCATE
    return events


def written(path: Path, events: RowEvents, batch_bytes: int) -> int:
    """How many batches the pending file has."""
    tasks.write_pending(path, events, pa.array(events.groups, pa.string()).dictionary_encode(), batch_bytes)
    with pa.memory_map(str(path)) as file:
        return int(pa.ipc.open_file(file).num_record_batches)


def spread(folder: Path, path: Path) -> tuple[Spread, int]:
    """What each partition receives of the sealed transactions, and in how many blobs."""
    work = Derivation(Layout(folder, PARTITIONS), Sealed(3, (), 1), (), ())
    found: Spread = {partition: [] for partition in range(PARTITIONS)}
    blobs = list(tasks.spread(work, {"7": 0, "8": 1}, [[Pending("orders", (str(path),))]]))
    for partition, (_, blob) in blobs:
        columns = (tasks.ipc_table(blob)[name].to_pylist() for name in ("position", "order", "key", "cell"))
        found[partition] += zip(*columns, strict=True)
    return found, len(blobs)


def test_a_large_chunk_is_pending_in_several_batches_and_spread_in_several_blobs(tmp_path: Path) -> None:
    events = row_events([100, 0, 5_000, 1, 0, 100, 300, 300, 300, 300, 9_000, 0, 0, 0, 1, 1] * 3)
    assert written(tmp_path / "whole.arrow", events, 1 << 20) == 1
    assert written(tmp_path / "cut.arrow", events, 1_000) > 6
    (whole, few), (cut, many) = spread(tmp_path, tmp_path / "whole.arrow"), spread(tmp_path, tmp_path / "cut.arrow")
    assert cut == whole
    assert few == PARTITIONS < many
    truncate = len(events.keys) - 1
    for partition, received in whole.items():
        wanted = [
            order
            for order, (group, key) in enumerate(zip(events.groups, events.keys, strict=True))
            if order == truncate or (group in GROUPS[:2] and key_hash(key) % PARTITIONS == partition)
        ]
        assert [(order, cell) for _, order, _, cell in received] == [(order, events.cells[order]) for order in wanted]


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
@pytest.mark.parametrize("sizes", [[3], [0, 0], [50, 50]])
def test_no_event_is_left_out_where_batches_end(tmp_path: Path, sizes: list[int], batch_bytes: int) -> None:
    path = tmp_path / "one.arrow"
    assert written(path, row_events(sizes), batch_bytes) == (1 if batch_bytes > 1 else len(sizes))
    with pa.memory_map(str(path)) as file:
        assert pa.ipc.open_file(file).read_all()["order"].to_pylist() == list(range(len(sizes)))
