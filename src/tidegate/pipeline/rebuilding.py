"""Arrangements that are lost are filled again: each file of the tables' history is read once, and spread by key.

A key's updates may lie in several files, in those of another number of partitions too. So what one task sums up of a
row is a part only: all parts of a key come together in one partition, and only what is current there reaches a view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from tidegate.catalog.contract import HistoryFile
from tidegate.collections import history
from tidegate.model.key import key_hash
from tidegate.pipeline.tasks import Blob, changes_in, view_layout
from tidegate.pipeline.work import Derivation, Rebuild, ViewWork, Written
from tidegate.spark.failures import carrying_errors
from tidegate.spark.jobs import Jobs, balanced
from tidegate.views.arrangement import AlreadyApplied, Arrangement
from tidegate.views.kernel import compiled

_BLOB_BYTES = 16 << 20
_TO_ALL: tuple[str, bytes] = ("", b"")  # a partition for which there is no row must hear of the work, too
_pack = msgspec.msgpack.Encoder().encode
_row_sums = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, int]]).decode
Sized = tuple[int, Any, int]  # target partition, what goes there, bytes


def rebuild(jobs: Jobs, work: Derivation, parts: Sequence[Rebuild], files: Sequence[HistoryFile]) -> list[Written]:
    """Fills each part that is not where it must be, from the tables' files, as of the work's tick; says which."""
    checked = balanced(parts, [1] * len(parts), jobs.parallelism)
    lost = Lost(work, tuple(jobs.run(checked, partial(find_lost, work))))
    if not lost.parts:
        return []
    needed = [file for file in files if lost.partitions_of(file.collection)]
    loads = balanced(needed, [file.size_bytes for file in needed], jobs.parallelism) or [[]]
    return jobs.run(loads, partial(spread_rows, lost), partial(fill_tables, lost), partial(fill_views, lost))


@dataclass(frozen=True)
class Lost:
    """The parts of arrangements that have to be filled."""

    work: Derivation
    parts: tuple[Rebuild, ...]

    def part(self, collection: str, partition: int) -> Rebuild | None:
        found = (one for one in self.parts if (one.collection, one.partition) == (collection, partition))
        return next(found, None)

    @property
    def views(self) -> list[ViewWork]:
        names = {part.collection for part in self.parts}
        return [view for view in self.work.views if view.name in names]

    def partitions_of(self, table: str) -> frozenset[int]:
        """Whose rows are needed: for a view those of all partitions."""
        if any(used.table.name == table for view in self.views for used in view.plan.inputs):
            return frozenset(range(self.work.layout.partitions))
        return frozenset(part.partition for part in self.parts if part.collection == table)

    def target(self, key: bytes) -> int:
        return key_hash(key) % self.work.layout.partitions


def _arrangement(work: Derivation, part: Rebuild) -> Arrangement:
    is_view = any(view.name == part.collection for view in work.views)
    layout = view_layout(work, part.collection) if is_view else work.layout.name
    return Arrangement.open(work.layout.arrangement(part.collection, part.partition), layout)


def _is_there(work: Derivation, part: Rebuild, arrangement: Arrangement) -> bool:
    """One tick further is right too: it was cut off after this partition had applied it."""
    return not part.emit and part.expected <= arrangement.applied <= work.sealed.tick + 1


@carrying_errors
def find_lost(work: Derivation, loads: Iterable[Sequence[Rebuild]]) -> Iterator[Rebuild]:
    """The parts that are not where they must be."""
    for part in (part for parts in loads for part in parts):
        if not _is_there(work, part, _arrangement(work, part)):
            yield part


# --- each file once


@carrying_errors
def spread_rows(lost: Lost, loads: Iterable[Sequence[HistoryFile]]) -> Iterator[Blob]:
    """What the files of a load sum up to, by the partition of the row's key."""
    yield from ((partition, _TO_ALL) for partition in range(lost.work.layout.partitions))
    for files in loads:
        ordered = sorted(files, key=lambda file: (file.collection, file.first, file.path))
        for table, of_table in groupby(ordered, key=lambda file: file.collection):
            yield from _blobs(table, _sums_of_files(lost, table, [file.path for file in of_table]))


def _sums_of_files(lost: Lost, table: str, paths: Sequence[str]) -> Iterator[Sized]:
    sums, wanted = history.RowSums(), lost.partitions_of(table)
    for path in paths:
        for batch in history.batches(path, -1, lost.work.sealed.tick):
            sums.add_updates(batch)
            if sums.size_bytes >= history.BATCH_BYTES:
                yield from _to_their_partitions(lost, wanted, sums.taken())
    yield from _to_their_partitions(lost, wanted, sums.taken())


def _to_their_partitions(lost: Lost, wanted: frozenset[int], sums: Iterable[history.RowSum]) -> Iterator[Sized]:
    for one in sums:
        target = lost.target(one[0])
        if target in wanted:
            yield target, one, len(one[0]) + len(one[1])


def _blobs(name: str, items: Iterable[Sized]) -> Iterator[Blob]:
    """Packs up what goes to each partition whenever there is enough of it."""
    waiting: defaultdict[int, list[Any]] = defaultdict(list)
    waiting_bytes = 0
    for target, item, size_bytes in items:
        waiting[target].append(item)
        waiting_bytes += size_bytes
        if waiting_bytes >= _BLOB_BYTES:
            yield from _packed(name, waiting)
            waiting.clear()
            waiting_bytes = 0
    yield from _packed(name, waiting)


def _packed(name: str, waiting: Mapping[int, Sequence[Any]]) -> Iterator[Blob]:
    for target, items in waiting.items():
        yield target, (name, _pack(items))


# --- a table's partition


@carrying_errors
def fill_tables(lost: Lost, blobs: Iterable[Blob]) -> Iterator[Blob | tuple[int, Written]]:
    """Adds up the sums of all files, fills the tables' lost parts with the rows that are current, and sends them on."""
    sums: defaultdict[int, defaultdict[str, history.RowSums]] = defaultdict(lambda: defaultdict(history.RowSums))
    for partition, (name, blob) in blobs:
        of_tables = sums[partition]
        if name:
            of_tables[name].add(_row_sums(blob))
    for partition, of_tables in sums.items():
        yield partition, _TO_ALL
        for table in lost.work.tables:
            rows = of_tables.pop(table.name, history.RowSums()).current(table.name)
            part = lost.part(table.name, partition)
            if part:
                yield partition, _fill_table(lost.work, part, rows)
            for view in lost.views:
                yield from _blobs(view.name, _routed(lost, view, table.name, rows))


def _fill_table(work: Derivation, part: Rebuild, rows: Mapping[bytes, bytes]) -> Written:
    arrangement = _arrangement(work, part)
    if not _is_there(work, part, arrangement):
        arrangement.reset()
        with suppress(AlreadyApplied), arrangement.write(work.sealed.tick) as transaction:
            transaction.putmulti(sorted(rows.items()))
    return Written(part.collection, part.partition, None, len(rows), 0)


def _routed(lost: Lost, view: ViewWork, table: str, rows: Mapping[bytes, bytes]) -> Iterator[Sized]:
    """The rows as changes of the view's inputs, by the partition of the view's key."""
    wanted = {part.partition for part in lost.parts if part.collection == view.name}
    for used in compiled(view.plan).inputs_of(table):
        for key, cell in rows.items():
            for change in used.route(key, None, cell):
                target = lost.target(change[0])
                if target in wanted:
                    yield target, change, len(change[0]) + len(key) + len(change[3] or b"")


# --- a view's partition


@carrying_errors
def fill_views(lost: Lost, blobs: Iterable[tuple[int, Any]]) -> Iterator[Written]:
    """Folds the views' lost parts from all rows; passes on which of the tables' were filled."""
    changes: defaultdict[int, defaultdict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
    for partition, content in blobs:
        of_partition = changes[partition]
        if isinstance(content, Written):
            yield content
        elif content != _TO_ALL:
            of_partition[content[0]].append(content[1])
    for partition, of_views in changes.items():
        for view in lost.views:
            part = lost.part(view.name, partition)
            if part:
                yield _fill_view(lost.work, part, view, of_views.pop(view.name, []))


def _fill_view(work: Derivation, part: Rebuild, view: ViewWork, blobs: Iterable[bytes]) -> Written:
    arrangement, tick = _arrangement(work, part), work.sealed.tick
    path = history.tick_file(work.layout.state, view.name, tick, work.layout.name, part.partition)
    if not _is_there(work, part, arrangement):
        arrangement.reset()
        with suppress(AlreadyApplied), arrangement.write(tick):
            outputs = compiled(view.plan).fold(arrangement, tick, [one for blob in blobs for one in changes_in(blob)])
            if part.emit:
                _write_first(path, [history.Update(key, 0, 1, new) for key, _, new in outputs if new is not None], tick)
    if not part.emit or not path.exists():
        return Written(view.name, part.partition, None, 0, 0)
    return Written(view.name, part.partition, str(path), pq.read_metadata(path).num_rows, path.stat().st_size)


def _write_first(path: Path, updates: Sequence[history.Update], tick: int) -> None:
    """A file may lie there from a run that was cut off before it was listed, when the view was another."""
    path.unlink(missing_ok=True)
    if updates:
        history.write(path, history.as_table(updates, tick))
