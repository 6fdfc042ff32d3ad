"""The catalog in one SQLite file: for one machine."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tidegate.catalog.contract import Applied, HistoryFile, Seal
from tidegate.errors import DefinitelyNotDone, Fenced, FixConfiguration
from tidegate.protocol.fence import Fence, FenceRow, plan_open
from tidegate.protocol.messages import START, KeyRange, RuntimeCheckpoint, StateUpdate
from tidegate.protocol.patch import apply_updates
from tidegate.protocol.session import Recovered
from tidegate.timeline.binding import Binding, LogPartition, OffsetRange, Tick

FORMAT = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS owner (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS bindings (tick INTEGER PRIMARY KEY, ranges TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS positions (topic TEXT, partition INTEGER, next INTEGER NOT NULL,
  PRIMARY KEY (topic, partition));
CREATE TABLE IF NOT EXISTS seals (tick INTEGER PRIMARY KEY, next_position INTEGER NOT NULL, last_lsn INTEGER NOT NULL,
  last_snapshot TEXT, source_position TEXT, commit_ms INTEGER, needed_since INTEGER, transactions BLOB NOT NULL,
  mark TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS frontier (one INTEGER PRIMARY KEY CHECK (one = 1), derived INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, collection TEXT NOT NULL, first INTEGER NOT NULL,
  last INTEGER NOT NULL, rows INTEGER NOT NULL, size_bytes INTEGER NOT NULL, merges INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_tick ON files (collection, last);
CREATE TABLE IF NOT EXISTS applied (collection TEXT, layout TEXT, partition INTEGER, tick INTEGER NOT NULL,
  PRIMARY KEY (collection, layout, partition));
CREATE TABLE IF NOT EXISTS rounds (materialization TEXT, key_begin INTEGER, key_end INTEGER, fence INTEGER NOT NULL,
  checkpoint TEXT NOT NULL, PRIMARY KEY (materialization, key_begin, key_end));
CREATE TABLE IF NOT EXISTS driver_states (materialization TEXT PRIMARY KEY, state TEXT NOT NULL);
INSERT OR IGNORE INTO owner VALUES (1, 0);
INSERT OR IGNORE INTO frontier VALUES (1, -1);
"""
_FROM_FORMAT_1 = """
ALTER TABLE seals ADD COLUMN mark TEXT NOT NULL DEFAULT '';
UPDATE seals SET mark = lower(hex(randomblob(8)));
"""
_SEAL = "tick, next_position, last_lsn, last_snapshot, source_position, commit_ms, needed_since, transactions"
_FILE = "collection, path, first, last, rows, size_bytes, merges"


def _chance() -> str:
    return secrets.token_hex(8)


class SqliteCatalog:
    """One connection, used by one thread at a time; every write checks that its owner is still the newest."""

    def __init__(self, path: Path, new_mark: Callable[[], str] = _chance) -> None:
        self._path, self._new_mark = path, new_mark
        self._lock = threading.RLock()
        self._epoch: int | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        with self._explained():
            self._prepare()

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        found = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if found > FORMAT:
            raise FixConfiguration(
                f"{self._path} was written by a newer Tidegate (format {found}, this one knows {FORMAT})",
                remedy="Install that version again, or use another state folder.",
            )
        if found < FORMAT:
            steps = _FROM_FORMAT_1 if found else _SCHEMA
            self._connection.executescript(f"BEGIN IMMEDIATE;{steps};PRAGMA user_version={FORMAT};COMMIT;")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise  # what is written twice is a bug of ours, not the disk's
        except sqlite3.Error as error:
            raise DefinitelyNotDone(
                f"the catalog {self._path} cannot be used: {error}",
                remedy="See that the disk has room and that the folder is yours; then run again. Nothing is lost.",
            ) from error

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._require_owner()
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _require_owner(self) -> None:
        newest = self._connection.execute("SELECT epoch FROM owner").fetchone()[0]
        if newest != self._epoch:
            raise Fenced(
                f"another process has taken over the state folder of {self._path}",
                remedy="Run one `tidegate run` for a state folder. This one has stopped and changed nothing since.",
            )

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._explained():
            return self._connection.execute(query, values).fetchall()

    # --- owner

    def take_over(self) -> int:
        with self._lock, self._explained():
            query = "UPDATE owner SET epoch = epoch + 1 RETURNING epoch"
            self._epoch = int(self._connection.execute(query).fetchone()[0])
            return self._epoch

    def check_owner(self) -> None:
        with self._lock, self._explained():
            self._require_owner()

    # --- settings

    def setting(self, name: str) -> str | None:
        found = self._rows("SELECT value FROM settings WHERE name = ?", name)
        return found[0][0] if found else None

    def settings(self, prefix: str) -> dict[str, str]:
        return dict(self._rows("SELECT name, value FROM settings WHERE substr(name, 1, ?) = ?", len(prefix), prefix))

    def set(self, name: str, value: str) -> None:
        with self._write() as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))

    # --- timeline

    def bind(self, binding: Binding) -> bool:
        ranges = json.dumps([[one.topic, one.partition, one.start, one.end] for one in binding.ranges])
        with self._write() as connection:
            last = connection.execute("SELECT max(tick) FROM bindings").fetchone()[0]
            if binding.tick != (0 if last is None else last + 1):
                return False
            connection.execute("INSERT INTO bindings VALUES (?, ?)", (binding.tick, ranges))
            positions = [(one.topic, one.partition, one.end) for one in binding.ranges]
            connection.executemany("INSERT OR REPLACE INTO positions VALUES (?, ?, ?)", positions)
            return True

    def positions(self) -> dict[LogPartition, int]:
        found = self._rows("SELECT topic, partition, next FROM positions")
        return {LogPartition(topic, partition): end for topic, partition, end in found}

    def bindings(self, since: int) -> list[Binding]:
        found = self._rows("SELECT tick, ranges FROM bindings WHERE tick >= ? ORDER BY tick", since)
        return [Binding(Tick(tick), tuple(OffsetRange(*one) for one in json.loads(ranges))) for tick, ranges in found]

    def seal(self, seal: Seal) -> None:
        with self._write() as connection:
            last = connection.execute("SELECT max(tick) FROM seals").fetchone()[0]
            assert seal.tick == (0 if last is None else last + 1), (seal.tick, last)
            values = (*_seal_values(seal), self._new_mark())
            connection.execute(f"INSERT INTO seals ({_SEAL}, mark) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def last_seal(self) -> Seal | None:
        found = self._rows(f"SELECT {_SEAL} FROM seals ORDER BY tick DESC LIMIT 1")
        return Seal(*found[0]) if found else None

    def seals(self, since: int, before: int) -> list[Seal]:
        query = f"SELECT {_SEAL} FROM seals WHERE tick >= ? AND tick < ? ORDER BY tick"
        return [Seal(*row) for row in self._rows(query, since, before)]

    # --- collections

    def derive(self, tick: Tick, files: Sequence[HistoryFile], applied: Sequence[Applied]) -> None:
        with self._write() as connection:
            last = connection.execute("SELECT derived FROM frontier").fetchone()[0]
            assert tick == last + 1, (tick, last)
            for one in files:
                connection.execute(f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)", self._file_values(one))
            self._put_applied(connection, applied)
            connection.execute("UPDATE frontier SET derived = ?", (tick,))

    def derived(self) -> int:
        return int(self._rows("SELECT derived FROM frontier")[0][0])

    def applied(self) -> list[Applied]:
        return [Applied(*row) for row in self._rows("SELECT collection, layout, partition, tick FROM applied")]

    def files(self, collection: str, after: int, upto: int) -> list[HistoryFile]:
        query = f"SELECT {_FILE} FROM files WHERE collection = ? AND last > ? AND first <= ? ORDER BY first, path"
        return [self._file(row) for row in self._rows(query, collection, after, upto)]

    def add_files(self, files: Sequence[HistoryFile], applied: Sequence[Applied]) -> None:
        with self._write() as connection:
            for one in files:
                connection.execute(f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)", self._file_values(one))
            self._put_applied(connection, applied)

    @staticmethod
    def _put_applied(connection: sqlite3.Connection, applied: Sequence[Applied]) -> None:
        for part in applied:
            values = (part.collection, part.layout, part.partition, part.tick)
            connection.execute("INSERT OR REPLACE INTO applied VALUES (?, ?, ?, ?)", values)

    def _file(self, row: tuple[Any, ...]) -> HistoryFile:
        """Paths are kept as seen from the catalog's folder: the state folder may be moved, or copied."""
        collection, path, *rest = row
        return HistoryFile(collection, str(self._path.parent / path), *rest)

    def _file_values(self, one: HistoryFile) -> tuple[Any, ...]:
        path = self._kept_path(one.path)
        return (one.collection, path, one.first, one.last, one.rows, one.size_bytes, one.merges)

    def _kept_path(self, path: str) -> str:
        return os.path.relpath(path, self._path.parent)

    def replace(self, old: Sequence[HistoryFile], new: HistoryFile) -> None:
        with self._write() as connection:
            for one in old:
                gone = connection.execute("DELETE FROM files WHERE path = ?", (self._kept_path(one.path),)).rowcount
                assert gone == 1, one
            connection.execute(f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)", self._file_values(new))

    # --- recovery log

    def open(self, materialization: str, key_range: KeyRange) -> Recovered:
        with self._write() as connection:
            plan = plan_open(self._fence_rows(connection, materialization), key_range)
            for row in plan.rows:
                self._put_row(connection, materialization, row)
            return Recovered(plan.mine.fence, plan.mine.checkpoint, self._driver_state(connection, materialization))

    def commit(
        self,
        materialization: str,
        key_range: KeyRange,
        fence: Fence,
        checkpoint: RuntimeCheckpoint,
        updates: Sequence[StateUpdate],
    ) -> None:
        with self._write() as connection:
            mine = FenceRow(key_range, fence, checkpoint)
            if not any(
                row.key_range == key_range and row.fence == fence
                for row in self._fence_rows(connection, materialization)
            ):
                raise Fenced(
                    f"materialization {materialization}: a newer session has taken over its keys {key_range.text}",
                    remedy="Nothing to do: the newer session goes on from the last committed round.",
                )
            self._put_row(connection, materialization, mine)
            if updates:
                state = apply_updates(self._driver_state(connection, materialization), updates)
                values = (materialization, msgspec.json.encode(state))
                connection.execute("INSERT OR REPLACE INTO driver_states VALUES (?, ?)", values)

    def _fence_rows(self, connection: sqlite3.Connection, materialization: str) -> list[FenceRow]:
        query = "SELECT key_begin, key_end, fence, checkpoint FROM rounds WHERE materialization = ?"
        return [
            FenceRow(KeyRange(begin, end), fence, msgspec.json.decode(checkpoint, type=RuntimeCheckpoint))
            for begin, end, fence, checkpoint in connection.execute(query, (materialization,))
        ]

    def _put_row(self, connection: sqlite3.Connection, materialization: str, row: FenceRow) -> None:
        checkpoint = msgspec.json.encode(row.checkpoint)
        values = (materialization, row.key_range.begin, row.key_range.end, row.fence, checkpoint)
        connection.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", values)

    def _driver_state(self, connection: sqlite3.Connection, materialization: str) -> Any:
        query = "SELECT state FROM driver_states WHERE materialization = ?"
        found = connection.execute(query, (materialization,)).fetchone()
        return msgspec.json.decode(found[0]) if found else None

    def checkpoint(self, materialization: str) -> RuntimeCheckpoint:
        rows = self._fence_rows(self._connection, materialization)
        return min((row.checkpoint for row in rows), key=lambda one: one.tick, default=START)

    def checkpoint_at(self, tick: int) -> RuntimeCheckpoint | None:
        if tick <= START.tick:
            return START
        query = "SELECT source_position, mark FROM seals, frontier WHERE tick = ? AND tick <= derived"
        found = self._rows(query, tick)
        return RuntimeCheckpoint(tick, found[0][0], seal=found[0][1]) if found else None

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _seal_values(seal: Seal) -> tuple[Any, ...]:
    return (
        seal.tick,
        seal.next_position,
        seal.last_lsn,
        seal.last_snapshot,
        seal.source_position,
        seal.commit_ms,
        seal.needed_since,
        seal.transactions,
    )
