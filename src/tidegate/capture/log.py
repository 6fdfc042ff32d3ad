"""The embedded log: segment files per topic and partition, written by one process and read by any.

A segment is a row of frames; a frame is a header, with a checksum, and one Arrow record batch of keys and values. The
file `ends` names what is durable; it is replaced as a whole after the frames are on disk, so that a reader never sees a
record that a crash could take back, and the ends of all partitions move together.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import msgspec
import pyarrow as pa

from tidegate import crash_points
from tidegate.capture.murmur2 import partitions_for
from tidegate.errors import BadRecord, DefinitelyNotDone, FixConfiguration, MaybeDone

Record = tuple[bytes | None, bytes | None]
TopicPartition = tuple[str, int]
Column = Sequence[bytes | None]

SEGMENT_BYTES = 64 * 1024 * 1024
SEGMENT_FRAMES = 8192
SCHEMA = pa.schema([("key", pa.binary()), ("value", pa.binary())])

_MAGIC = b"TGL1"
# magic, base offset, records, payload bytes, the same unpacked (if equal: stored as it is), checksum of all and payload
_HEADER = struct.Struct("<4sQIIII")
_CODEC = pa.Codec("zstd", compression_level=1)
_FRAME_BYTES = 16 * 1024 * 1024
_ENDS_FILE = "ends"
_LOCK_FILE = "writer.lock"
_LONGEST_NAME_BYTES = 200


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """What is durable of one partition: `[start, end)`, and where its last segment ends."""

    topic: str
    partition: int
    start: int = 0
    end: int = 0
    segment: int = 0
    segment_bytes: int = 0
    segment_frames: int = 0


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How far one imported file has become durable; `checksum` is of its first `size_bytes` bytes, unpacked."""

    name: str
    size_bytes: int
    checksum: int
    lines: int


class _Published(msgspec.Struct, frozen=True):
    extents: list[Extent]
    marks: list[Mark] = []


@dataclass(frozen=True)
class _Frame:
    base: int
    records: int
    payload_at: int
    payload_bytes: int
    unpacked_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        return self.base + self.records

    @property
    def ends_at(self) -> int:
        return self.payload_at + self.payload_bytes


class LogInUse(DefinitelyNotDone):
    """Another process writes to the log; which of the two has to end is for the catalog to say."""


class LogWriter:
    """The one writer of a log; `append` takes records, and `sync` makes all that was taken durable and visible."""

    def __init__(self, root: Path, wait_seconds: float = 0.0) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(root / _LOCK_FILE, wait_seconds)
        try:
            published = _read_published(root / _ENDS_FILE)
            self._durable = {(extent.topic, extent.partition): extent for extent in published.extents}
            self._marks = {mark.name: mark for mark in published.marks}
            self._cut_torn_tails()
        except BaseException:
            os.close(self._lock)
            raise
        self._next = {place: extent.end for place, extent in self._durable.items()}
        self._pending: dict[TopicPartition, list[bytes]] = {}
        self._new_marks: dict[str, Mark] = {}
        self.pending_bytes = 0

    def declare(self, topic: str, partitions: int) -> None:
        """The topic has at least so many partitions, visible as empty ones from the next sync on."""
        _folder_name(topic)
        for partition in range(partitions):
            self._next.setdefault((topic, partition), 0)

    def append(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        """Takes the records, in this order; they are neither durable nor visible before `sync`."""
        if not records:
            return
        self.declare(topic, partition + 1)
        keys, values = zip(*records, strict=True)
        self.append_columns(topic, partition, keys, values)

    def append_columns(self, topic: str, partition: int, keys: Column, values: Column) -> None:
        """The same, with keys and values apart; the topic's partition must have been declared."""
        place = (topic, partition)
        for key_part, value_part in _portions(keys, values):
            frame = _encode_frame(self._next[place], key_part, value_part)
            self._pending.setdefault(place, []).append(frame)
            self._next[place] += len(key_part)
            self.pending_bytes += len(frame)

    def append_by_key(self, topic: str, partitions: int, keys: Column, values: Column) -> None:
        """The same, each record in the partition that Kafka would choose for its key."""
        if partitions == 1:
            self.append_columns(topic, 0, keys, values)
            return
        parts: list[tuple[list[bytes | None], list[bytes | None]]] = [([], []) for _ in range(partitions)]
        for partition, key, value in zip(partitions_for(keys, partitions), keys, values, strict=True):
            parts[partition][0].append(key)
            parts[partition][1].append(value)
        for partition, (some_keys, some_values) in enumerate(parts):
            self.append_columns(topic, partition, some_keys, some_values)

    def mark(self, mark: Mark) -> None:
        """This much of a file was appended; becomes durable in the same instant as the records before it."""
        self._new_marks[mark.name] = mark

    def mark_of(self, name: str) -> Mark | None:
        return self._new_marks.get(name) or self._marks.get(name)

    def ends(self) -> dict[TopicPartition, int]:
        return {place: extent.end for place, extent in self._durable.items()}

    def sync(self) -> None:
        """All that was appended is durable and visible; if this raises DefinitelyNotDone it may be called again."""
        extents = self._durable | {place: Extent(*place) for place in self._next if place not in self._durable}
        if not self._pending and not self._new_marks and extents.keys() == self._durable.keys():
            return
        try:
            written = self._write_pending(extents)
            marks = self._marks | self._new_marks
            draft = _write_draft(self.root / _ENDS_FILE, _Published([*written.values()], [*marks.values()]))
        except OSError as error:
            self._cut_torn_tails()
            raise _not_written(self.root, error) from error
        draft.replace(self.root / _ENDS_FILE)
        self._durable, self._marks = written, marks
        self._pending, self._new_marks, self.pending_bytes = {}, {}, 0
        _make_rename_durable(self.root)

    def forget_before(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Removes the segments that lie entirely below these offsets."""
        kept = dict(self._durable)
        for place, offset in offsets.items():
            bases = [base for base in _segment_bases(_folder(self.root, place)) if base <= offset]
            if place in kept and bases:
                kept[place] = msgspec.structs.replace(kept[place], start=max(bases[-1], kept[place].start))
        if kept == self._durable:
            return
        _write_draft(self.root / _ENDS_FILE, _Published([*kept.values()], [*self._marks.values()])).replace(
            self.root / _ENDS_FILE
        )
        self._durable = kept
        _make_rename_durable(self.root)
        self._remove_forgotten()

    def close(self) -> None:
        """Gives the log to the next writer; what was not synced is gone."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_pending(self, extents: Mapping[TopicPartition, Extent]) -> dict[TopicPartition, Extent]:
        """Writes everything first and syncs it afterwards, so that the disk works on all files at once."""
        written = dict(extents)
        touched: list[Path] = []
        for place, frames in self._pending.items():
            folder = _folder(self.root, place)
            if extents[place].end == 0:
                _make_folders(folder)
            written[place] = _write_frames(folder, extents[place], frames, touched)
        crash_points.reach("log-appended")
        for path in touched:
            _sync_file(path)
        for folder in {path.parent for path in touched}:
            _sync_file(folder)
        crash_points.reach("log-synced")
        return written

    def _cut_torn_tails(self) -> None:
        """Removes what a crash or a full disk left past the durable ends, and nothing below them."""
        topics = self.root / "topics"
        known = {_folder(self.root, place): extent for place, extent in self._durable.items()}
        for folder in topics.glob("*/*") if topics.exists() else ():
            if folder not in known:
                _remove_segments(folder, _segment_bases(folder))
        for folder, extent in known.items():
            _cut_tail(folder, extent)
        self._remove_forgotten()

    def _remove_forgotten(self) -> None:
        for place, extent in self._durable.items():
            folder = _folder(self.root, place)
            _remove_segments(folder, [base for base in _segment_bases(folder) if base < extent.start])


class LogReader:
    """Reads what is durable, in any number of processes beside the writer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: tuple[int, int, int] | None = None
        self._extents: dict[TopicPartition, Extent] = {}

    def topics(self) -> dict[str, int]:
        """Each topic and the number of its partitions."""
        counts: dict[str, int] = {}
        for topic, partition in self._refresh():
            counts[topic] = max(counts.get(topic, 0), partition + 1)
        return counts

    def ends(self) -> dict[TopicPartition, int]:
        """The offset after the last durable record of each partition."""
        return {place: extent.end for place, extent in self._refresh().items()}

    def starts(self) -> dict[TopicPartition, int]:
        """The first offset of each partition that is still there."""
        return {place: extent.start for place, extent in self._refresh().items()}

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Exactly the records `[start, end)` as batches of `key` and `value`, each checked against its checksum."""
        place = (topic, partition)
        extent = self._refresh().get(place) or Extent(topic, partition)
        if not extent.start <= start <= end <= extent.end:
            raise BadRecord(
                f"{topic}/{partition}: offsets {start} to {end} are not in the log, "
                f"which holds {extent.start} to {extent.end}",
                remedy="The log was shortened or replaced: rebuild the tables from a new snapshot.",
            )
        return _read_range(_folder(self.root, place), start, end) if start < end else iter(())

    def _refresh(self) -> dict[TopicPartition, Extent]:
        path = self.root / _ENDS_FILE
        try:
            facts = path.stat()
        except FileNotFoundError:
            return {}
        seen = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
        if seen != self._seen:
            published = _decode_published(path, path.read_bytes())
            self._extents = {(extent.topic, extent.partition): extent for extent in published.extents}
            self._seen = seen
        return self._extents


def _take_lock(path: Path, wait_seconds: float) -> int:
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise LogInUse(
                    f"another process writes to the log {path.parent}",
                    remedy="Wait until it is done: a run that is fenced off ends its tick first. Or stop it.",
                ) from None
            time.sleep(0.02)


def _read_published(path: Path) -> _Published:
    return _decode_published(path, path.read_bytes()) if path.exists() else _Published([])


def _decode_published(path: Path, raw: bytes) -> _Published:
    try:
        return msgspec.json.decode(raw, type=_Published)
    except msgspec.MsgspecError as error:
        raise _damage(path, 0, str(error)) from error


def _damage(path: Path, at: int, what: str) -> BadRecord:
    return BadRecord(
        f"the log is damaged: {path}, byte {at}: {what}",
        remedy="Restore this file from a backup, or remove the log and the collections and take a new snapshot.",
    )


def _not_written(root: Path, error: OSError) -> DefinitelyNotDone:
    return DefinitelyNotDone(
        f"the log {root} cannot be written: {error.strerror}; nothing of this group was kept",
        remedy="Make room on the disk (and check its health); appending then goes on without loss.",
    )


def _folder_name(topic: str) -> str:
    """The topic's name as a safe and distinct folder name."""
    name = quote(topic, safe="")
    name = name.replace(".", "%2E", 1) if name.startswith(".") else name
    if not topic or len(name) > _LONGEST_NAME_BYTES:
        raise FixConfiguration(
            f'"{topic[:60]}" cannot be the name of a topic', remedy="Use 1 to 200 letters, digits, dots and dashes."
        )
    return name


def _folder(root: Path, place: TopicPartition) -> Path:
    return root / "topics" / _folder_name(place[0]) / str(place[1])


def _segment_path(folder: Path, base: int) -> Path:
    return folder / f"{base:020d}.seg"


def _segment_bases(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.seg"))


def _remove_segments(folder: Path, bases: Iterable[int]) -> None:
    for base in bases:
        _segment_path(folder, base).unlink(missing_ok=True)


def _make_folders(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
        _sync_file(parent)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_rename_durable(root: Path) -> None:
    try:
        _sync_file(root)
    except OSError as error:
        raise MaybeDone(
            f"the log {root} was written, but the disk does not confirm it: {error.strerror}",
            remedy="Check the disk, then start again: what is there is found out then.",
        ) from error


def _write_draft(path: Path, published: _Published) -> Path:
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(published))
        file.flush()
        os.fsync(file.fileno())
    return draft


def _portions(keys: Column, values: Column) -> Iterator[tuple[Column, Column]]:
    """Cuts a group so that no frame grows far beyond its limit."""
    total = sum(map(len, filter(None, values)))
    step = max(1, len(keys) * _FRAME_BYTES // max(total, _FRAME_BYTES))
    for first in range(0, len(keys), step):
        yield keys[first : first + step], values[first : first + step]


def _encode_frame(base: int, keys: Column, values: Column) -> bytes:
    batch = pa.RecordBatch.from_arrays([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=SCHEMA)
    unpacked = batch.serialize()
    packed = _CODEC.compress(unpacked)
    payload = packed if packed.size < unpacked.size else unpacked
    checksum = zlib.crc32(payload, zlib.crc32(_header(base, len(keys), payload.size, unpacked.size, 0)))
    return b"".join((_header(base, len(keys), payload.size, unpacked.size, checksum), payload))


def _header(base: int, records: int, payload_bytes: int, unpacked_bytes: int, checksum: int) -> bytes:
    return _HEADER.pack(_MAGIC, base, records, payload_bytes, unpacked_bytes, checksum)


def _write_frames(folder: Path, extent: Extent, frames: Sequence[bytes], touched: list[Path]) -> Extent:
    """Appends the frames to the last segment and to new ones, and says where the partition ends then."""
    for group in _by_segment(extent, frames):
        extent = group.extent_before
        path = _segment_path(folder, extent.segment)
        touched.append(path)
        with path.open("ab", buffering=0) as file:
            assert file.tell() == extent.segment_bytes or extent.segment_bytes == 0, path
            for frame in group.frames:
                _write_whole(file, frame)
        extent = group.extent_after
    return extent


def _write_whole(file: FileIO, frame: bytes) -> None:
    rest = memoryview(frame)
    while rest:
        rest = rest[file.write(rest) :]


@dataclass
class _Group:
    """Frames that go into one segment."""

    extent_before: Extent
    extent_after: Extent
    frames: list[bytes]


def _by_segment(extent: Extent, frames: Sequence[bytes]) -> Iterator[_Group]:
    group = _Group(extent, extent, [])
    for frame in frames:
        after = group.extent_after
        if after.segment_bytes >= SEGMENT_BYTES or after.segment_frames >= SEGMENT_FRAMES:
            yield group
            fresh = msgspec.structs.replace(after, segment=after.end, segment_bytes=0, segment_frames=0)
            group = _Group(fresh, fresh, [])
        group.frames.append(frame)
        group.extent_after = _after_frame(group.extent_after, frame)
    yield group


def _after_frame(extent: Extent, frame: bytes) -> Extent:
    records = _HEADER.unpack_from(frame)[2]
    return msgspec.structs.replace(
        extent,
        end=extent.end + records,
        segment_bytes=extent.segment_bytes + len(frame),
        segment_frames=extent.segment_frames + 1,
    )


def _cut_tail(folder: Path, extent: Extent) -> None:
    """Shortens the partition to its durable end, after checking that everything durable is there."""
    bases = _segment_bases(folder)
    _remove_segments(folder, [base for base in bases if base > extent.segment])
    path = _segment_path(folder, extent.segment)
    size = path.stat().st_size if path.exists() else 0
    if size < extent.segment_bytes:
        raise _damage(path, size, f"{extent.segment_bytes} bytes of it were durable")
    if size > extent.segment_bytes:
        os.truncate(path, extent.segment_bytes)
    if extent.start < extent.end and extent.start not in bases:
        raise _damage(_segment_path(folder, extent.start), 0, "the segment is missing")
    if extent.segment_bytes:
        _check_chain(path, extent)


def _check_chain(path: Path, extent: Extent) -> None:
    """Walks the frames of the last segment: they must follow one another up to the durable end."""
    with path.open("rb", buffering=0) as file:
        offset, at = extent.segment, 0
        while at < extent.segment_bytes:
            frame = _read_header(file, path, at, offset)
            offset, at = frame.end, frame.ends_at
    if (offset, at) != (extent.end, extent.segment_bytes):
        raise _damage(path, at, f"offset {offset} is there, {extent.end} was durable")


def _read_header(file: FileIO, path: Path, at: int, offset: int) -> _Frame:
    raw = os.pread(file.fileno(), _HEADER.size, at)
    if len(raw) < _HEADER.size:
        raise _damage(path, at, "the file ends here, inside a frame's header")
    magic, base, records, payload_bytes, unpacked_bytes, checksum = _HEADER.unpack(raw)
    if magic != _MAGIC or base != offset:
        raise _damage(path, at, f"no frame of offset {offset} begins here")
    return _Frame(base, records, at + _HEADER.size, payload_bytes, unpacked_bytes, checksum)


def _read_range(folder: Path, start: int, end: int) -> Iterator[pa.RecordBatch]:
    bases = _segment_bases(folder)
    wanted = [base for base, after in zip(bases, [*bases[1:], end], strict=True) if base < end and after > start]
    position = start
    for base in wanted:
        for batch in _read_segment(_segment_path(folder, base), base, position, end):
            position += batch.num_rows
            yield batch
    if position != end:
        raise _damage(folder, 0, f"the records from offset {position} on are missing")


def _read_segment(path: Path, base: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
    with path.open("rb", buffering=0) as file:
        size, at, offset = path.stat().st_size, 0, base
        while offset < end and at < size:
            frame = _read_header(file, path, at, offset)
            offset, at = frame.end, frame.ends_at
            if frame.end > start:
                first = max(start - frame.base, 0)
                yield _read_payload(file, path, frame).slice(first, min(end, frame.end) - frame.base - first)


def _read_payload(file: FileIO, path: Path, frame: _Frame) -> pa.RecordBatch:
    payload = os.pread(file.fileno(), frame.payload_bytes, frame.payload_at)
    header = _header(frame.base, frame.records, frame.payload_bytes, frame.unpacked_bytes, 0)
    if len(payload) < frame.payload_bytes or zlib.crc32(payload, zlib.crc32(header)) != frame.checksum:
        raise _damage(path, frame.payload_at, f"the records from offset {frame.base} on do not match their checksum")
    is_packed = frame.payload_bytes < frame.unpacked_bytes
    unpacked = _CODEC.decompress(payload, frame.unpacked_bytes) if is_packed else pa.py_buffer(payload)
    batch = pa.ipc.read_record_batch(unpacked, SCHEMA)
    assert batch.num_rows == frame.records, (path, frame)
    return batch
