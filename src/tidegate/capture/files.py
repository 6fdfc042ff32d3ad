"""Recorded events, replayed into the log: JSON lines of topic, partition, key and value, plain or gzip.

How far each file came is durable in the same instant as its records: whenever this ends, the next run goes on behind
the last durable line, and each record is in the log once. A file may grow; what was imported of it may not change.
"""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from tidegate.capture.log import LogWriter, Mark
from tidegate.capture.topic_facts import TopicFacts
from tidegate.errors import BadRecord, FixConfiguration

_CHUNK_BYTES = 4 * 1024 * 1024
_SYNC_BYTES = 16 * 1024 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
_BRACE = ord("{")


@dataclass(frozen=True)
class ImportResult:
    """What this run added to the log."""

    files: int
    records: int


class _Line(msgspec.Struct, gc=False):
    topic: str
    value: msgspec.Raw
    key: msgspec.Raw = msgspec.Raw(b"null")
    partition: Annotated[int, msgspec.Meta(ge=0, lt=10_000)] | None = None


_decode_lines = msgspec.json.Decoder(_Line).decode_lines
_key_of, _value_of = attrgetter("key"), attrgetter("value")
_decode_text = msgspec.json.Decoder(str).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
CheckTopic = Callable[[TopicFacts], None]


class _BrokenFileError(Exception):
    """The file cannot be read any further; the message says why."""


def import_files(
    pattern: str, writer: LogWriter, partitions_of: Callable[[str], int], check_topic: CheckTopic = lambda facts: None
) -> ImportResult:
    """Appends to the log what the files hold beyond what was imported before, in the order of their names."""
    paths = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (a Path's glob takes no absolute pattern)
    if not paths:
        raise FixConfiguration(f'no file matches "{pattern}"', remedy="Correct the path; * and ** match names.")
    topics = _Topics(partitions_of, check_topic)
    return ImportResult(len(paths), sum(_import_file(Path(path), writer, topics) for path in paths))


@dataclass(frozen=True)
class _Topics:
    """What is asked about a topic before anything is appended to it."""

    partitions_of: Callable[[str], int]
    check: CheckTopic

    def checked(self, path: Path, part: _Columns) -> int:
        """How many partitions the topic has, as far as these records tell."""
        count = self.partitions_of(part.topic) if part.partition is None else part.partition + 1
        self.check(TopicFacts(str(path), part.topic, count))
        return count


def _import_file(path: Path, writer: LogWriter, topics: _Topics) -> int:
    """Appends the rest of one file and returns how many records that were."""
    name = str(path.absolute())
    mark, records = writer.mark_of(name) or Mark(name, 0, 0, 0), 0
    with _opened(path) as file:
        _skip_imported(path, file, mark)
        try:
            for text in _whole_lines(file):
                block = _decode_block(text)
                counts = [topics.checked(path, part) for part in block.columns]
                mark, records = _append_block(block, counts, mark, writer), records + block.records
                if block.broken:
                    raise _BrokenFileError(block.broken)
                if writer.pending_bytes >= _SYNC_BYTES:
                    writer.sync()
        except _BrokenFileError as error:
            writer.sync()
            raise BadRecord(
                f"{path}, line {mark.lines + 1}: {error}",
                remedy="Correct it and run again: what stands before is imported.",
            ) from error
        writer.sync()
    return records


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file


def _read(read: Callable[[int], bytes], size_bytes: int) -> bytes:
    try:
        return read(size_bytes)
    except EOFError:
        raise _BrokenFileError("the gzip file ends too early") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise _BrokenFileError(f"the gzip file is broken: {error}") from None


def _skip_imported(path: Path, file: BinaryIO, mark: Mark) -> None:
    """Stands behind the imported part, which must be the same as when it was imported."""
    left, checksum = mark.size_bytes, 0
    while left:
        try:
            block = _read(file.read, min(left, _CHUNK_BYTES))
        except _BrokenFileError:
            block = b""
        if not block:
            break
        left -= len(block)
        checksum = zlib.crc32(block, checksum)
    if left or checksum != mark.checksum:
        what = "is shorter than" if left else "no longer begins with"
        raise FixConfiguration(
            f"{path} {what} the {mark.size_bytes} bytes that were imported from it",
            remedy="Restore the file, or give other content under another name.",
        )


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The rest of the file in large blocks of whole lines; the last may lack its newline."""
    while block := _read(file.read, _CHUNK_BYTES):
        yield block if block.endswith(b"\n") else block + _read(file.readline, -1)


@dataclass(frozen=True)
class _Columns:
    """Keys and values of one topic, and of one partition if the recording names it."""

    topic: str
    partition: int | None
    keys: list[bytes | None]
    values: list[bytes | None]


@dataclass(frozen=True)
class _Block:
    """Records, the text that they were read from, and what is wrong with the line behind it."""

    columns: Sequence[_Columns]
    taken: bytes
    broken: str | None = None

    @property
    def records(self) -> int:
        return sum(len(part.values) for part in self.columns)


def _decode_block(text: bytes) -> _Block:
    try:
        return _Block(_columns(_decode_lines(text)), text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _decode_up_to_the_broken(text)


def _decode_up_to_the_broken(text: bytes) -> _Block:
    lines: list[_Line] = []
    at = 0
    for raw in text.split(b"\n"):
        try:
            _columns(found := _decode_lines(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _Block(_columns(lines), text[:at], str(error))
        lines += found
        at += len(raw) + 1
    return _Block(_columns(lines), text)


def _columns(lines: Sequence[_Line]) -> list[_Columns]:
    groups: dict[tuple[str, int | None], list[_Line]] = {}
    for line in lines:
        groups.setdefault((line.topic, line.partition), []).append(line)
    return [
        _Columns(topic, partition, _texts(map(_key_of, group)), _documents(map(_value_of, group)))
        for (topic, partition), group in groups.items()
    ]


def _texts(raws: Iterable[msgspec.Raw]) -> list[bytes | None]:
    return [text if text[0] == _BRACE else _unquoted(text) for text in map(bytes, raws)]


def _documents(raws: Iterable[msgspec.Raw]) -> list[bytes | None]:
    return [text if text[0] == _BRACE else _document(text) for text in map(bytes, raws)]


def _document(text: bytes) -> bytes | None:
    """A value that stands in the file as text; once in the log it could not be mended any more."""
    document = _unquoted(text)
    if document is not None:
        try:
            _check_json(document)
        except msgspec.DecodeError as error:
            raise msgspec.DecodeError(f"its value is not JSON: {error}") from None
    return document


def _unquoted(text: bytes) -> bytes | None:
    """A JSON string's own text; any other JSON as it stands; null is none."""
    if text[:1] == b'"':
        return _decode_text(text).encode()
    return None if text == b"null" else text


def _append_block(block: _Block, counts: Sequence[int], mark: Mark, writer: LogWriter) -> Mark:
    """Appends the records and marks the file; refuses a topic before anything is appended."""
    for part, count in zip(block.columns, counts, strict=True):
        writer.declare(part.topic, count)
    for part, count in zip(block.columns, counts, strict=True):
        if part.partition is None:
            writer.append_by_key(part.topic, count, part.keys, part.values)
        else:
            writer.append_columns(part.topic, part.partition, part.keys, part.values)
    taken = block.taken
    checksum = zlib.crc32(taken, mark.checksum)
    after = Mark(mark.name, mark.size_bytes + len(taken), checksum, mark.lines + taken.count(b"\n"))
    writer.mark(after)
    return after
