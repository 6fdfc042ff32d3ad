"""A collection's history: Parquet files of updates (key, tick, position, diff, row), a row being a JSON cell."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.errors import DefinitelyNotDone, FixConfiguration
from tidegate.model.cell import Cell
from tidegate.model.key import KeyBytes

SCHEMA = pa.schema(
    [
        pa.field("_key", pa.binary(), nullable=False),
        pa.field("_tick", pa.int64(), nullable=False),
        pa.field("_position", pa.int64(), nullable=False),
        pa.field("_diff", pa.int8(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
    ]
)
BATCH_BYTES = 64 << 20  # so much is unpacked at once
_BATCH_ROWS = 65_536
_ROW_BYTES = 256  # what Python needs for a row beside its text
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_FROM_BACKUP = "Restore it from a backup of the state folder; without it, start with a new state folder."


class Update(NamedTuple):
    """One row leaves (diff -1) or enters (diff +1) the collection."""

    key: KeyBytes
    position: int
    diff: int
    cell: Cell


def folder_of(state: Path, collection: str) -> Path:
    return state / "history" / collection


def tick_file(state: Path, collection: str, tick: int, layout: str, partition: int) -> Path:
    """Where a partition's updates of one tick lie: the same name for the same tick, whoever writes it."""
    return folder_of(state, collection) / f"{tick:012d}-{layout}-{partition}.parquet"


def as_table(updates: Sequence[Update], tick: int) -> pa.Table:
    keys, positions, diffs, cells = zip(*updates, strict=True) if updates else ((), (), (), ())
    columns = [
        pa.array(keys, pa.binary()),
        pa.array([tick], pa.int64()).take(pa.array([0] * len(updates), pa.int32()))
        if updates
        else pa.array([], pa.int64()),
        pa.array(positions, pa.int64()),
        pa.array(diffs, pa.int8()),
        pa.array(cells, pa.binary()).cast(pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def write(path: Path, table: pa.Table) -> None:
    """Puts the file in place whole and durable; the same content may be put there again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            pq.write_table(
                table.cast(SCHEMA),
                file,
                compression="zstd",
                compression_level=1,
                use_dictionary=["_tick", "_position", "_diff"],
            )
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise not_written(path, error) from error
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_written(path: Path, error: OSError) -> DefinitelyNotDone:
    """A clear word about a file that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    why = "the disk is full" if full else str(error)
    return DefinitelyNotDone(
        f"{path} could not be written: {why}",
        remedy="Make room (or give the folder back its rights) and run again; the tick is repeated, nothing is lost.",
    )


def unbounded(table: pa.Table) -> pa.Table:
    """The same with offsets of 64 bits: else whatever joins arrays (to sort them, say) ends at 2 GiB of text."""
    fields = [field.with_type(_LARGE.get(field.type, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields))


def read(paths: Sequence[str], after: int, upto: int) -> pa.Table:
    """The updates of the ticks after `after` up to `upto`, oldest first; within a tick and key -1 before +1."""
    tables = [table for path in paths for table in batches(path, after, upto)]
    table = pa.concat_tables(tables) if tables else unbounded(SCHEMA.empty_table())
    return table.sort_by(
        [("_tick", "ascending"), ("_position", "ascending"), ("_key", "ascending"), ("_diff", "ascending")]
    )


def batches(path: str, after: int, upto: int, batch_bytes: int = BATCH_BYTES) -> Iterator[pa.Table]:
    """A file's updates of these ticks as they lie there, about so many bytes at a time."""
    try:
        with pq.ParquetFile(path) as file:
            rows = max(1, file.metadata.num_rows * batch_bytes // max(1, _unpacked_bytes(file.metadata)))
            for batch in file.iter_batches(min(rows, _BATCH_ROWS)):
                table = unbounded(pa.Table.from_batches([batch]))
                ticks = table["_tick"]
                yield table.filter(pc.and_(pc.greater(ticks, after), pc.less_equal(ticks, upto)))
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(path, error) from error


def unpacked_bytes(path: str) -> int:
    """How much a file holds when it is unpacked."""
    try:
        return _unpacked_bytes(pq.read_metadata(path))
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(path, error) from error


def _unpacked_bytes(metadata: Any) -> int:
    return sum(metadata.row_group(place).total_byte_size for place in range(metadata.num_row_groups))


def _unreadable(path: str, error: Exception) -> FixConfiguration:
    return FixConfiguration(f"the history file {path} cannot be read: {error}", remedy=_FROM_BACKUP)


def updates(table: pa.Table) -> Iterator[tuple[int, Update]]:
    """The updates of a table that `read` gave, with their ticks."""
    rows = zip(
        table["_tick"].to_pylist(),
        table["_key"].to_pylist(),
        table["_position"].to_pylist(),
        table["_diff"].to_pylist(),
        table["row"].cast(pa.large_binary()).to_pylist(),
        strict=True,
    )
    for tick, key, position, diff, cell in rows:
        yield tick, Update(key, position, diff, cell)


def net(updates: Sequence[Update]) -> dict[KeyBytes, tuple[Cell | None, Cell | None]]:
    """The first old and the last new row of each key."""
    changes: dict[KeyBytes, tuple[Cell | None, Cell | None]] = {}
    for key, _, diff, cell in updates:
        seen = changes.get(key)
        if diff > 0:
            changes[key] = (seen[0] if seen else None, cell)
        else:
            changes[key] = (seen[0] if seen else cell, None)
    return changes


RowSum = tuple[KeyBytes, Cell, int]


class RowSums:
    """Adds up the diffs of each row, whatever the order of the ticks; a row that has come and gone takes no room."""

    def __init__(self) -> None:
        self._sums: dict[tuple[KeyBytes, Cell], int] = {}
        self.size_bytes = 0

    def add(self, rows: Iterable[RowSum]) -> None:
        sums, size_bytes = self._sums, 0
        for key, cell, diff in rows:
            row = (key, cell)
            before = sums.get(row, 0)
            if before == -diff:
                del sums[row]
                size_bytes -= len(key) + len(cell) + _ROW_BYTES
            else:
                sums[row] = before + diff
                size_bytes += 0 if before else len(key) + len(cell) + _ROW_BYTES
        self.size_bytes += size_bytes

    def add_updates(self, table: pa.Table) -> None:
        """Adds updates that `batches` or `read` gave."""
        columns = (table["_key"], table["row"].cast(pa.large_binary()), table["_diff"])
        self.add(zip(*(column.to_pylist() for column in columns), strict=True))

    def taken(self) -> Iterator[RowSum]:
        """The sums so far, which are a part of all; starts anew."""
        sums, self._sums, self.size_bytes = self._sums, {}, 0
        return ((key, cell, diff) for (key, cell), diff in sums.items())

    def current(self, collection: str) -> dict[KeyBytes, Cell]:
        """The collection's rows, if all updates were added: each key has one, which has come once more than it went."""
        rows: dict[KeyBytes, Cell] = {}
        for (key, cell), diff in self._sums.items():
            if diff != 1 or key in rows:
                raise _contradicts_itself(collection, cell)
            rows[key] = cell
        return rows


def current_rows(
    collection: str, paths: Sequence[str], upto: int, keys: Collection[KeyBytes] | None = None
) -> dict[KeyBytes, Cell]:
    """The collection's rows at a tick, or those with these keys."""
    wanted = None if keys is None else pa.array(sorted(keys), pa.large_binary())
    sums = RowSums()
    for path in paths:
        for table in batches(path, -1, upto):
            sums.add_updates(table if wanted is None else table.filter(pc.is_in(table["_key"], wanted)))
    return sums.current(collection)


def _contradicts_itself(collection: str, cell: Cell) -> FixConfiguration:
    return FixConfiguration(
        f'the history of "{collection}" contradicts itself: a row left that was not there, or came where one was:'
        f" {cell[:200].decode(errors='replace')}",
        remedy=_FROM_BACKUP,
    )
