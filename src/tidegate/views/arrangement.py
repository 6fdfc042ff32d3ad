"""Arrangement: a stage's current rows in one partition, ordered by key, with the tick that they have reached.

It is a cache of a fold and nothing else: whatever could have torn it (a reboot, another layout, a bad file) empties it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import lmdb

from tidegate.errors import DefinitelyNotDone

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROWS, _TICK, _LAYOUT = b"rows", b"tick", b"layout"  # in the main database: that of the rows by name, and our marks
_KEY_BYTES = 511  # LMDB's limit
_HEAD_BYTES = _KEY_BYTES - 32  # longer keys: this many bytes, then a hash of all
_FIRST_MAP_BYTES = 1 << 30
_UNUSABLE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)

Entry = tuple[bytes, bytes]


class AlreadyApplied(Exception):
    """Another attempt of the same task has applied the tick: its output stands, and this one writes nothing."""


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"


def _stored(key: bytes) -> bytes:
    """The key as LMDB holds it: injective, and no short key has a long one's length."""
    return key if len(key) < _HEAD_BYTES else key[:_HEAD_BYTES] + hashlib.sha256(key).digest()


def _wrapped(key: bytes, value: bytes) -> bytes:
    return len(key).to_bytes(4, "big") + key + value


def _unwrapped(value: bytes) -> Entry:
    end = 4 + int.from_bytes(value[:4], "big")
    return value[4:end], value[end:]


class Transaction:
    """One tick's reads and writes of an arrangement; sees its own writes; all or nothing of it is kept."""

    def __init__(self, environment: Any, rows: Any, grow: Callable[[], None], tick: int) -> None:
        self.tick = tick
        self._environment = environment
        self._rows = rows
        self._grow = grow
        self._log: list[Callable[[Any], object]] = []  # replayed into a new transaction after the map has grown
        self._begin()

    def _begin(self) -> None:
        self._transaction = self._environment.begin(write=True)
        self._cursor = self._transaction.cursor(self._rows)

    def _do(self, action: Callable[[Any], object]) -> None:
        self._log.append(action)
        try:
            action(self._cursor)
        except lmdb.MapFullError:
            self._replay()

    def _replay(self) -> None:
        while True:
            self._transaction.abort()
            self._grow()
            self._begin()
            try:
                for action in self._log:
                    action(self._cursor)
                return
            except lmdb.MapFullError:
                continue

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        value: bytes | None = self._transaction.get(_stored(key), db=self._rows)
        return _unwrapped(value)[1] if value is not None and len(key) >= _HEAD_BYTES else value

    def getmulti(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, in the order of the keys; quickest when they are sorted."""
        stored = [key if len(key) < _HEAD_BYTES else _stored(key) for key in keys]
        found: dict[bytes, bytes] = dict(self._cursor.getmulti(stored))
        return [
            _unwrapped(value)[1] if value is not None and len(key) >= _HEAD_BYTES else value
            for key, value in zip(keys, map(found.get, stored), strict=True)
        ]

    def put(self, key: bytes, value: bytes) -> None:
        """Sets the value of a key."""
        self.putmulti([(key, value)])

    def putmulti(self, entries: Iterable[Entry]) -> None:
        """Sets many values; quickest when sorted by key."""
        stored = [entry if len(entry[0]) < _HEAD_BYTES else (_stored(entry[0]), _wrapped(*entry)) for entry in entries]
        if stored:
            self._do(lambda cursor: cursor.putmulti(stored))

    def delete(self, key: bytes) -> None:
        """Removes a key; a key that is not there is no error."""
        self.deletemulti([key])

    def deletemulti(self, keys: Iterable[bytes]) -> None:
        """Removes many keys; quickest when they are sorted."""
        stored = [_stored(key) for key in keys]
        if stored:
            self._do(lambda cursor: _delete_all(cursor, stored))

    def scan(self, prefix: bytes) -> list[Entry]:
        """All entries whose key starts with the prefix, in the order of their keys."""
        cursor, entries, long = self._cursor, [], False
        start = prefix[:_HEAD_BYTES]
        if cursor.set_range(start):
            for entry in cursor.iternext():
                key = entry[0]
                if not key.startswith(start):
                    break
                if len(key) == _KEY_BYTES:
                    long = True
                entries.append(entry)
        if not long:
            return entries
        whole = [_unwrapped(entry[1]) if len(entry[0]) == _KEY_BYTES else entry for entry in entries]
        return sorted(entry for entry in whole if entry[0].startswith(prefix))

    def walk(self, prefix: bytes) -> Iterator[Entry]:
        """The entries of a scan, read only as far as they are taken; nothing may be written meanwhile."""
        start = prefix[:_HEAD_BYTES]
        run: list[Entry] = []  # long keys with the same beginning: only together can they be put in order
        with self._transaction.cursor(self._rows) as cursor:
            entries = cursor.iternext() if cursor.set_range(start) else ()
            for key, value in takewhile(lambda entry: entry[0].startswith(start), entries):
                if run and not key.startswith(run[0][0][:_HEAD_BYTES]):
                    yield from sorted(run)
                    run = []
                if len(key) < _KEY_BYTES:
                    yield key, value
                elif (entry := _unwrapped(value))[0].startswith(prefix):
                    run.append(entry)
            yield from sorted(run)

    def commit(self) -> None:
        """Keeps everything, the tick with it."""
        tick = self.tick.to_bytes(8, "big", signed=True)
        self._do(lambda _: self._transaction.put(_TICK, tick))
        while True:
            try:
                self._transaction.commit()
                return
            except lmdb.MapFullError:
                self._replay()

    def abort(self) -> None:
        """Forgets everything."""
        self._transaction.abort()


def _delete_all(cursor: Any, keys: Sequence[bytes]) -> None:
    for key in keys:
        if cursor.set_key(key):
            cursor.delete()


class Arrangement:
    """Keyed entries in one folder, and the tick that they have applied; several processes may hold it open."""

    def __init__(self, folder: Path, layout: str, first_map_bytes: int = _FIRST_MAP_BYTES) -> None:
        self.folder = folder
        self.layout = layout
        self._current: Transaction | None = None
        self._environment = _environment(folder, first_map_bytes)
        self._file = _identity(folder)
        self._rows = self._environment.open_db(_ROWS)
        if self._read(_LAYOUT) != layout.encode():
            self.reset()

    @staticmethod
    def open(folder: Path, layout: str) -> Arrangement:
        """The arrangement in a folder, opened once per process; empty if it cannot be trusted."""
        path = folder.absolute()
        known = _open.get((os.getpid(), path))
        if known and known.layout == layout and known.is_current():
            return known
        if known:
            known.close()
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _discard_after_reboot(path)
            _open[os.getpid(), path] = arrangement = _opened(path, layout)
        return arrangement

    def is_current(self) -> bool:
        """Whether the folder still holds the file that this process has open."""
        return _identity(self.folder) == self._file

    @property
    def applied(self) -> int:
        """The newest tick that is in here completely, or -1."""
        value = self._read(_TICK)
        return int.from_bytes(value, "big", signed=True) if value is not None else -1

    def _read(self, key: bytes) -> bytes | None:
        self._adopt_map_size()
        with self._environment.begin() as transaction:
            value: bytes | None = transaction.get(key)
        return value

    def _adopt_map_size(self) -> None:
        """Another process may have grown the map."""
        try:
            self._environment.begin().abort()
        except lmdb.MapResizedError:
            self._environment.set_mapsize(0)

    def _grow(self) -> None:
        self._environment.set_mapsize(self._environment.info()["map_size"] * 2)

    @contextmanager
    def write(self, tick: int) -> Iterator[Transaction]:
        """A transaction that records the tick as it commits; inside one of the same tick, it is that one."""
        if self._current is not None:
            assert self._current.tick == tick, f"tick {self._current.tick} is being written, not {tick}"
            yield self._current
            return
        self._adopt_map_size()
        transaction = self._current = Transaction(self._environment, self._rows, self._grow, tick)
        try:
            self._refuse_what_is_applied(transaction)
            yield transaction
            transaction.commit()
        except lmdb.Error as error:
            transaction.abort()
            raise _not_written(self.folder, error) from error
        except BaseException:
            transaction.abort()
            raise
        finally:
            self._current = None

    def _refuse_what_is_applied(self, transaction: Transaction) -> None:
        value = transaction._transaction.get(_TICK)
        applied = int.from_bytes(value, "big", signed=True) if value is not None else -1
        if transaction.tick <= applied:
            raise AlreadyApplied(f"{self.folder} has applied tick {applied}, so tick {transaction.tick} is too late")

    def entries(self) -> Iterator[Entry]:
        """Everything that it holds, in the order of the keys as they are stored."""
        self._adopt_map_size()
        with self._environment.begin() as transaction:
            for key, value in transaction.cursor(self._rows):
                yield _unwrapped(value) if len(key) == _KEY_BYTES else (key, value)

    def reset(self) -> None:
        """Empties it: nothing is in it and no tick is applied."""
        assert self._current is None, "a write is open"
        self._adopt_map_size()
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._rows, delete=False)
            transaction.delete(_TICK)
            transaction.put(_LAYOUT, self.layout.encode())

    def close(self) -> None:
        """Lets go of the files."""
        self._environment.close()
        _open.pop((os.getpid(), self.folder), None)


_open: dict[tuple[int, Path], Arrangement] = {}


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = (folder / "data.mdb").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_dev


def _environment(folder: Path, first_map_bytes: int) -> Any:
    """Opens LMDB without syncs: a crash of the process tears nothing, and after one of the machine we start empty."""
    size_bytes = (folder / "data.mdb").stat().st_size if (folder / "data.mdb").exists() else 0
    environment = lmdb.open(
        str(folder),
        map_size=max(first_map_bytes, size_bytes * 2),
        sync=False,
        metasync=False,
        writemap=False,
        meminit=False,
        readahead=False,
        max_spare_txns=1,
        max_dbs=1,
    )
    _refuse_truncated(environment, size_bytes)
    return environment


def _refuse_truncated(environment: Any, size_bytes: int) -> None:
    """Reading a page beyond the file's end would kill the process, so look before."""
    used_bytes = environment.info()["last_pgno"] * environment.stat()["psize"]
    if size_bytes and used_bytes > size_bytes:
        environment.close()
        raise lmdb.CorruptedError("the file is shorter than its pages")


def _opened(folder: Path, layout: str) -> Arrangement:
    try:
        return Arrangement(folder, layout)
    except _UNUSABLE:
        _discard(folder)
        return Arrangement(folder, layout)
    except (OSError, lmdb.Error) as error:
        raise _not_written(folder, error) from error


def _not_written(folder: Path, error: Exception) -> DefinitelyNotDone:
    return DefinitelyNotDone(
        f"the arrangement in {folder} could not be written: {error}",
        remedy="Make room on the disk (and check its health) and run again; the tick is repeated, nothing is lost.",
    )


def _discard(folder: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _discard_after_reboot(folder: Path) -> None:
    """Files of an earlier boot were never synced, so LMDB must not even look at them."""
    marker, boot = folder / "boot", _boot_id().encode()
    if not marker.exists() or marker.read_bytes() != boot:
        _discard(folder)
        marker.write_bytes(boot)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "open.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
