"""A collection's history: Parquet files of updates (key, tick, position, diff, row), a row being a JSON cell."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
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
                table, file, compression="zstd", compression_level=1, use_dictionary=["_tick", "_position", "_diff"]
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


def read(
    paths: Sequence[str],
    after: int,
    upto: int,
    columns: Sequence[str] | None = None,
    keys: Collection[KeyBytes] | None = None,
) -> pa.Table:
    """The updates of the ticks after `after` up to `upto`, oldest first; within a tick and key -1 before +1."""
    tables = [_read_file(path, columns, keys) for path in paths]
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    ticks = table["_tick"]
    table = table.filter(pa.compute.and_(pa.compute.greater(ticks, after), pa.compute.less_equal(ticks, upto)))
    return table.sort_by(
        [("_tick", "ascending"), ("_position", "ascending"), ("_key", "ascending"), ("_diff", "ascending")]
    )


def _read_file(path: str, columns: Sequence[str] | None, keys: Collection[KeyBytes] | None) -> pa.Table:
    wanted = None if keys is None else pa.compute.field("_key").isin(pa.array(keys, pa.binary()))
    try:
        return pq.read_table(path, columns=list(columns) if columns else None, partitioning=None, filters=wanted)
    except (OSError, pa.ArrowInvalid) as error:
        raise FixConfiguration(
            f"the history file {path} cannot be read: {error}",
            remedy="Restore it from a backup of the state folder; without it, start with a new state folder.",
        ) from error


def updates(table: pa.Table) -> Iterator[tuple[int, Update]]:
    """The updates of a table that `read` gave, with their ticks."""
    rows = zip(
        table["_tick"].to_pylist(),
        table["_key"].to_pylist(),
        table["_position"].to_pylist(),
        table["_diff"].to_pylist(),
        table["row"].cast(pa.binary()).to_pylist(),
        strict=True,
    )
    for tick, key, position, diff, cell in rows:
        yield tick, Update(key, position, diff, cell)


def current_rows(paths: Sequence[str], upto: int, keys: Collection[KeyBytes] | None = None) -> dict[KeyBytes, Cell]:
    """The collection's rows at a tick, or those with these keys."""
    rows: dict[KeyBytes, Cell] = {}
    for _, update in updates(read(paths, -1, upto, keys=keys)):
        if update.diff > 0:
            rows[update.key] = update.cell
        elif rows.get(update.key) == update.cell:
            del rows[update.key]
    return rows
