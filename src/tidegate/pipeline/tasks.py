"""What runs in Spark's Python workers: reading ranges of the log, following tables, folding views.

Each task may run again, or twice at once: what it writes has a name and a content that depend on the tick alone, and an
arrangement applies a tick once. A history file is in place before the arrangement commits its tick: so a partition that
has applied the tick finds there what it put out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.capture.debezium import Op, RowEvents, check_collection, row_decoder
from tidegate.capture.log import LogReader
from tidegate.collections import history
from tidegate.collections.tables import FIRST_ORDER, Event, follow, moved_rows
from tidegate.crash_points import reach
from tidegate.model.key import key_hash
from tidegate.pipeline.flow_tasks import Pair, is_read, produced, run_level
from tidegate.pipeline.work import Chunk, Derivation, FlowWork, Ingested, Layout, Pending, Written
from tidegate.spark.failures import carrying_errors
from tidegate.views.arrangement import AlreadyApplied, Arrangement
from tidegate.views.kernel import compiled

Blob = tuple[int, tuple[str, bytes]]  # target partition, (collection, content)
Positions = Mapping[str, int]
_PENDING = pa.schema(
    [
        ("group", pa.dictionary(pa.int32(), pa.string())),
        ("order", pa.int64()),
        ("op", pa.uint8()),
        ("hash", pa.uint32()),
        ("key", pa.binary()),
        ("cell", pa.binary()),
    ]
)
_PENDING_BATCH_BYTES = 64 << 20
_RANGES = pa.schema(
    [
        ("group", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("lsn", pa.int64()),
        ("sequence", pa.string()),
    ]
)


def ipc_bytes(table: pa.Table | pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def ipc_table(blob: bytes) -> pa.Table:
    return pa.ipc.open_stream(blob).read_all()


# --- ingest


@carrying_errors
def ingest(layout: Layout, loads: Iterable[Sequence[Chunk]]) -> Iterator[Ingested]:
    """Reads each chunk's range, writes its rows down as pending, and says which transactions' rows came."""
    for chunks in loads:
        for chunk in chunks:
            yield _ingest_chunk(layout, chunk)


def _ingest_chunk(layout: Layout, chunk: Chunk) -> Ingested:
    events, place = RowEvents(), chunk.range
    decoder, offset = row_decoder(chunk.table), place.start
    for batch in LogReader(layout.log).read(place.topic, place.partition, place.start, place.end):
        values = batch.column(1).to_pylist()
        if offset == place.start:
            check_collection(values, chunk.collection, place.topic, place.partition, offset)
        decoder.decode(events, values, place.topic, place.partition, offset)
        offset += batch.num_rows
    groups = pa.array(events.groups, pa.string()).dictionary_encode()
    if events.ops:
        write_pending(layout.pending(chunk.tick, chunk.number), events, groups)
    last = tuple(sorted(events.last_snapshot_rows))
    return Ingested(chunk, len(events.ops), _ranges(events, groups), last, events.streamed, events.has_moved)


def write_pending(
    path: Path, events: RowEvents, groups: pa.DictionaryArray, batch_bytes: int = _PENDING_BATCH_BYTES
) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, _PENDING) as writer:
            for start, end in _cut(events, batch_bytes):
                writer.write(_pending_batch(events, groups, start, end))
        draft.replace(path)
    except OSError as error:
        raise history.not_written(path, error) from error


def _cut(events: RowEvents, batch_bytes: int) -> Iterator[tuple[int, int]]:
    """Where batches of about so many bytes start and end: an array, and what is shuffled, holds 2 GiB at most."""
    sizes = [len(key) + len(cell or b"") for key, cell in zip(events.keys, events.cells, strict=True)]
    ends = np.cumsum(sizes)
    last_of_batch = np.flatnonzero(np.diff((ends - sizes) // batch_bytes)) + 1
    yield from pairwise([0, *last_of_batch.tolist(), len(sizes)])


def _pending_batch(events: RowEvents, groups: pa.DictionaryArray, start: int, end: int) -> pa.RecordBatch:
    keys = events.keys[start:end]
    columns = [
        groups.slice(start, end - start),
        pa.array(events.orders[start:end], pa.int64()),
        pa.array(events.ops[start:end], pa.uint8()),
        pa.array(list(map(key_hash, keys)), pa.uint32()),
        pa.array(keys, pa.binary()),
        pa.array(events.cells[start:end], pa.binary()),
    ]
    return pa.record_batch(columns, schema=_PENDING)


def _ranges(events: RowEvents, groups: pa.DictionaryArray) -> bytes:
    """Consecutive numbers of one transaction become one row: (group, first, last, greatest LSN, sequence)."""
    code = groups.indices.to_numpy()
    order = np.asarray(events.orders, dtype=np.int64)
    lsn = np.asarray(events.lsns, dtype=np.int64)
    sorting = np.lexsort((order, code))
    code, order, lsn = code[sorting], order[sorting], lsn[sorting]
    starts = np.flatnonzero(np.r_[True, (np.diff(code) != 0) | (np.diff(order) > 1)]) if len(code) else np.empty(0, int)
    ends = np.r_[starts[1:], len(code)] - 1 if len(code) else starts
    named = groups.dictionary.take(pa.array(code[starts]))
    columns = [
        named,
        pa.array(order[starts]),
        pa.array(order[ends]),
        pa.array(np.maximum.reduceat(lsn, starts) if len(code) else lsn),
        _sequences(events, named),
    ]
    return ipc_bytes(pa.record_batch(columns, schema=_RANGES))


def _sequences(events: RowEvents, groups: pa.Array) -> pa.Array:
    if not events.sequences:
        return pa.nulls(len(groups), pa.string())
    return pa.array(map(events.sequences.get, groups.to_pylist()), pa.string())


# --- derive: spread the sealed events by primary key


@carrying_errors
def spread(work: Derivation, positions: Positions, loads: Iterable[Sequence[Pending]]) -> Iterator[Blob]:
    """Of the pending files, the events of the transactions that have a position, by the partition of their key."""
    if work.sealed.snapshots:  # a snapshot empties every partition, also those that it has no row for
        yield from ((partition, ("", b"")) for partition in range(work.layout.partitions))
    for pending in (one for load in loads for one in load):
        for events in _events_of(work, positions, pending):
            for partition, part in _by_partition(events, work.layout.partitions):
                yield partition, (pending.table, ipc_bytes(part))


def _events_of(work: Derivation, positions: Positions, pending: Pending) -> Iterator[pa.RecordBatch | pa.Table]:
    """Batch by batch; rows that have moved to other keys need all of their table's events."""
    batches = (batch for path in pending.paths for batch in _sealed_events(positions, path))
    if pending.history is None:
        yield from batches
    else:
        yield _with_moved(work, pending, pa.Table.from_batches(list(batches)))


def _sealed_events(positions: Positions, path: str) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        for place in range(reader.num_record_batches):
            batch = reader.get_batch(place)
            groups = batch.column("group")
            known = np.array([positions.get(group, -1) for group in groups.dictionary.to_pylist()], np.int64)
            found = known[groups.indices.to_numpy()]
            wanted = pa.array(found >= 0)
            events = batch.drop_columns(["group"]).append_column("position", pa.array(found))
            yield events if wanted.true_count == len(found) else events.filter(wanted)


def _with_moved(work: Derivation, pending: Pending, events: pa.Table) -> pa.Table:
    """The events, those of rows under another key made whole: the former key may belong to another partition."""
    assert pending.history is not None
    is_moved = pa.compute.equal(events["op"], int(Op.MOVED))
    moved, others = events.filter(is_moved), events.filter(pa.compute.invert(is_moved))
    if not moved.num_rows:
        return events
    keys = _former_keys(moved, others)
    touching = pa.compute.or_(
        pa.compute.is_in(others["key"], pa.array(keys, pa.binary())), pa.compute.equal(others["op"], int(Op.TRUNCATE))
    )
    before = history.current_rows(pending.table, pending.history, work.sealed.tick - 1, keys)
    steps = _in_order([ipc_bytes(moved), ipc_bytes(others.filter(touching))], work.sealed.snapshots)
    whole = moved_rows(pending.table, before, steps)
    cells = [whole[place] for place in _places(moved)]
    columns = {"op": pa.array([Op.UPSERT] * len(cells), pa.uint8()), "cell": pa.array(cells, pa.binary())}
    made = pa.table([columns.get(name, moved[name]) for name in moved.column_names], schema=moved.schema)
    return pa.concat_tables([others, made])


def _former_keys(moved: pa.Table, others: pa.Table) -> list[bytes]:
    """The keys of the rows that were deleted right before one came under another key."""
    places = set(_places(moved))
    deletes = others.filter(pa.compute.equal(others["op"], int(Op.DELETE)))
    named = zip(_places(deletes), deletes["key"].to_pylist(), strict=True)
    return sorted({key for (position, order), key in named if (position, order + 1) in places})


def _places(events: pa.Table) -> list[tuple[int, int]]:
    return list(zip(events["position"].to_pylist(), events["order"].to_pylist(), strict=True))


def _by_partition(events: pa.RecordBatch | pa.Table, partitions: int) -> Iterator[tuple[int, Any]]:
    """A truncate has no key: it goes to all."""
    target = events.column("hash").to_numpy() % partitions
    everywhere = events.column("op").to_numpy() == Op.TRUNCATE
    for partition in range(partitions):
        mask = (target == partition) | everywhere
        if mask.any():
            yield partition, events if mask.all() else events.filter(pa.array(mask))


# --- derive: tables follow their events


@carrying_errors
def follow_tables(work: Derivation, blobs: Iterable[Blob]) -> Iterator[Pair]:
    """Brings this partition's tables to the tick, writes their updates down, and sends them on to the views."""
    received = list(blobs)
    for partition in sorted({target for target, _ in received}):
        for table in work.tables:
            parts = [blob for target, (name, blob) in received if target == partition and name == table.name]
            if not parts and not work.sealed.snapshots:
                continue
            updates = _follow_table(work, table.name, partition, parts)
            yield _written(work, table.name, partition, updates)
            yield from _to_views(work, table.name, updates)
            if work.flows:
                yield from produced(work.flows, table.name, updates)


def _follow_table(work: Derivation, table: str, partition: int, parts: Sequence[bytes]) -> list[history.Update]:
    layout, tick = work.layout, work.sealed.tick
    arrangement = Arrangement.open(layout.arrangement(table, partition), layout.name)
    path = history.tick_file(layout.state, table, tick, layout.name, partition)
    if arrangement.applied < tick:
        events = _in_order(parts, work.sealed.snapshots)
        with suppress(AlreadyApplied), arrangement.write(tick) as rows:
            updates = follow(table, rows, events)
            if updates:
                history.write(path, history.as_table(updates, tick))
                reach("table-history-written")
            return updates
    written = history.read([str(path)], tick - 1, tick) if path.exists() else history.SCHEMA.empty_table()
    return [update for _, update in history.updates(written)]


def _in_order(parts: Sequence[bytes], snapshots: Sequence[int]) -> list[Event]:
    """Sorted as they were committed; a snapshot starts by emptying the table."""
    events = [Event(position, FIRST_ORDER, Op.TRUNCATE, b"", None) for position in snapshots]
    if parts:
        table = history.unbounded(pa.concat_tables(map(ipc_table, parts)))
        table = table.sort_by([("position", "ascending"), ("order", "ascending"), ("key", "ascending")])
        names = ("position", "order", "op", "key", "cell")
        events += map(Event._make, zip(*(table[name].to_pylist() for name in names), strict=True))
    if snapshots:
        events.sort(key=lambda event: event[:2])
    return events


def _written(work: Derivation, collection: str, partition: int, updates: Sequence[Any]) -> tuple[int, Written]:
    if not updates:
        return partition, Written(collection, partition, None, 0, 0)
    layout = work.layout
    path = history.tick_file(layout.state, collection, work.sealed.tick, layout.name, partition)
    return partition, Written(collection, partition, str(path), len(updates), path.stat().st_size)


def _to_views(work: Derivation, table: str, updates: Sequence[history.Update]) -> Iterator[Blob]:
    """Each row's change over the whole tick, as changes of the views' inputs, by the partition of the view's key."""
    changes = history.net(updates)
    for view in work.views:
        targets: list[list[Any]] = [[] for _ in range(work.layout.partitions)]
        for used in compiled(view.plan).inputs_of(table):
            for key, (old, new) in changes.items():
                for change in used.route(key, old, new):
                    targets[key_hash(change[0]) % work.layout.partitions].append(change)
        for target, routed in enumerate(targets):
            if routed:
                yield target, (view.name, msgspec.msgpack.encode(routed))


# --- derive: views fold their changes

changes_in = msgspec.msgpack.Decoder(list[tuple[bytes, int, bytes, bytes | None]]).decode


@carrying_errors
def fold_views(work: Derivation, blobs: Iterable[tuple[int, Any]]) -> Iterator[Written]:
    """Brings this partition's views to the tick; passes on what the tables' tasks have written."""
    received = list(blobs)
    yield from (content for _, content in received if isinstance(content, Written))
    sent = [(target, content) for target, content in received if not isinstance(content, Written)]
    for partition in sorted({target for target, _ in sent}):
        for view in work.views:
            parts = [blob for target, (name, blob) in sent if target == partition and name == view.name]
            if parts:
                yield _fold_view(work, view.name, partition, [one for blob in parts for one in changes_in(blob)])


@carrying_errors
def fold_level(work: Derivation, level: int, pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Brings the stages of a level to the tick; views of the first shape are of the first level."""
    assert work.flows is not None
    return run_level(work.flows, level, _with_first_shape(work, work.flows, pairs) if level == 1 else pairs)


def _with_first_shape(work: Derivation, flows: FlowWork, pairs: Iterable[Pair]) -> Iterator[Pair]:
    names, mine = {view.name for view in work.views}, []
    for target, content in pairs:
        if isinstance(content, Written) or target is None or content[0] not in names:
            yield target, content
        else:
            mine.append((target, content))
    for written in fold_views(work, mine):
        yield written.partition, written
        if written.path and is_read(flows, written.collection):
            found = history.updates(history.read([written.path], work.sealed.tick - 1, work.sealed.tick))
            yield from produced(flows, written.collection, [update for _, update in found])


def _fold_view(work: Derivation, view: str, partition: int, changes: list[Any]) -> Written:
    layout, tick = work.layout, work.sealed.tick
    arrangement = Arrangement.open(layout.arrangement(view, partition), view_layout(work, view))
    path = history.tick_file(layout.state, view, tick, layout.name, partition)
    if arrangement.applied < tick:
        plan = next(one.plan for one in work.views if one.name == view)
        with suppress(AlreadyApplied), arrangement.write(tick):
            outputs = compiled(plan).fold(arrangement, tick, changes)
            position = work.sealed.last_position
            updates = [update for output in outputs for update in _output_updates(position, *output)]
            if updates:
                history.write(path, history.as_table(updates, tick))
                reach("view-history-written")
            return _written(work, view, partition, updates)[1]
    rows = pq.read_metadata(path).num_rows if path.exists() else 0
    return Written(view, partition, str(path) if rows else None, rows, path.stat().st_size if rows else 0)


def _output_updates(position: int, key: bytes, old: bytes | None, new: bytes | None) -> Iterator[history.Update]:
    if old is not None:
        yield history.Update(key, position, -1, old)
    if new is not None:
        yield history.Update(key, position, 1, new)


def view_layout(work: Derivation, view: str) -> str:
    plan = next(one.plan for one in work.views if one.name == view)
    return f"{work.layout.name} {plan.layout}"


# --- many small files become one


@carrying_errors
def merge(parts: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, int, int]]:
    """Writes (path, sources) as one file in the order of the ticks; returns path, rows and bytes."""
    for path, sources in parts:
        table = history.read(sources, -1, 1 << 62)
        history.write(Path(path), table)
        yield path, table.num_rows, Path(path).stat().st_size
