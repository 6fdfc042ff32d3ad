"""Recorded events, replayed into the log: JSON lines of topic, partition, key and value, plain or gzip.

A line of a topic and its `config` states facts of the topic, and is no record. How far each file came is durable in the
same instant as its records: whenever this ends, the next run goes on behind the last durable line, and each record is
in the log once. A file may grow; what was imported of it may not change.
"""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class ImportResult:
    """What this run added to the log."""

    files: int
    records: int


class _Line(msgspec.Struct, gc=False):
    topic: str
    value: msgspec.Raw = msgspec.Raw()
    key: msgspec.Raw = msgspec.Raw(b"null")
    partition: Annotated[int, msgspec.Meta(ge=0, lt=10_000)] | None = None
    config: dict[str, str] | None = None


_decode_lines = msgspec.json.Decoder(_Line).decode_lines
_key_of, _value_of = attrgetter("key"), attrgetter("value")
_decode_text = msgspec.json.Decoder(str).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
CheckTopic = Callable[[TopicFacts], None]


class _BrokenFileError(Exception):
    """The file cannot be read any further; the message says why."""


class _UnfinishedFileError(_BrokenFileError):
    """The same, as of a file that somebody is still writing."""


def import_files(
    pattern: str, writer: LogWriter, partitions_of: Callable[[str], int], check_topic: CheckTopic = lambda facts: None
) -> ImportResult:
    """Appends to the log what the files hold beyond what was imported before, in the order of their names."""
    return FilesImport(pattern, partitions_of, check_topic).look(writer)


@dataclass(frozen=True)
class FilesImport:
    """Looks for more in the files, again and again; a file that has not changed since the last look is not read.

    With `is_live`, a file that ends within a line is taken up to there: the rest is awaited.
    """

    pattern: str
    partitions_of: Callable[[str], int]
    check_topic: CheckTopic
    is_live: bool = False
    is_stopping: Callable[[], bool] = lambda: False
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def look(self, writer: LogWriter) -> ImportResult:
        """Appends what has come since the last look; ends early, between two blocks, if it is to stop."""
        paths = self.paths()
        return ImportResult(len(paths), sum(self._look_at(Path(path), writer) for path in paths))

    def paths(self) -> list[str]:
        """The files that there are; refuses a pattern that no file matches."""
        paths = sorted(glob.glob(self.pattern, recursive=True))  # noqa: PTH207 (a Path's glob takes no absolute pattern)
        if not paths:
            raise FixConfiguration(
                f'no file matches "{self.pattern}"', remedy="Correct the path; * and ** match names."
            )
        return paths

    def _look_at(self, path: Path, writer: LogWriter) -> int:
        facts = path.stat()
        seen = (facts.st_size, facts.st_mtime_ns)
        if self.is_stopping() or self._seen.get(path) == seen:
            return 0
        records = self._import_file(path, writer)
        if not self.is_stopping():
            self._seen[path] = seen
        return records

    def _import_file(self, path: Path, writer: LogWriter) -> int:
        """Appends the rest of one file and returns how many records that were."""
        records = 0
        try:
            for block in self._blocks(path, writer):
                records += self._append(path, block, writer)
        except _BrokenFileError as error:
            if not (self.is_live and isinstance(error, _UnfinishedFileError)):
                writer.sync()
                raise _refusal(path, writer, error) from error
        writer.sync()
        return records

    def _blocks(self, path: Path, writer: LogWriter) -> Iterator[_Block]:
        """What the file holds behind its imported part, up to its end or to a broken line."""
        with _opened(path) as file:
            for _ in _imported(path, file, _mark(path, writer)):
                if self.is_stopping():
                    return
            for text in _whole_lines(file):
                block = _decode_block(text)
                yield block
                if block.broken:
                    raise block.broken
                if self.is_stopping():
                    return

    def _append(self, path: Path, block: _Block, writer: LogWriter) -> int:
        for topic, policy in block.policies:
            self.check_topic(TopicFacts(str(path), topic, self.partitions_of(topic), policy))
        counts = [self._partitions(path, part) for part in block.columns]
        _append_block(block, counts, _mark(path, writer), writer)
        if writer.pending_bytes >= _SYNC_BYTES:
            writer.sync()
        return block.records

    def _partitions(self, path: Path, part: _Columns) -> int:
        """How many partitions a topic has, as far as these records tell; a topic that is refused gets no record."""
        count = self.partitions_of(part.topic) if part.partition is None else part.partition + 1
        self.check_topic(TopicFacts(str(path), part.topic, count))
        return count


def _mark(path: Path, writer: LogWriter) -> Mark:
    name = str(path.absolute())
    return writer.mark_of(name) or Mark(name, 0, 0, 0)


def _refusal(path: Path, writer: LogWriter, error: _BrokenFileError) -> BadRecord:
    return BadRecord(
        f"{path}, line {_mark(path, writer).lines + 1}: {error}",
        remedy="Correct it and run again: what stands before is imported.",
    )


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
        raise _UnfinishedFileError("the gzip file ends too early") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise _BrokenFileError(f"the gzip file is broken: {error}") from None


def _imported(path: Path, file: BinaryIO, mark: Mark) -> Iterator[bytes]:
    """The imported part in large blocks; it must be the same as when it was imported."""
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
        yield block
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
    """Records, what is said of topics, the text that both were read from, and what is wrong with the line behind it."""

    columns: Sequence[_Columns]
    policies: Sequence[tuple[str, str]]
    taken: bytes
    broken: _BrokenFileError | None = None

    @property
    def records(self) -> int:
        return sum(len(part.values) for part in self.columns)


def _decode_block(text: bytes) -> _Block:
    try:
        return _block(_decode_lines(text), text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _decode_up_to_the_broken(text)


def _decode_up_to_the_broken(text: bytes) -> _Block:
    lines: list[_Line] = []
    at = 0
    for raw in text.split(b"\n"):
        try:
            _block(found := _decode_lines(raw), raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            is_last = at + len(raw) == len(text)
            kind = _UnfinishedFileError if is_last else _BrokenFileError
            return _block(lines, text[:at], kind(str(error)))
        lines += found
        at += len(raw) + 1
    return _block(lines, text)


def _block(lines: Sequence[_Line], taken: bytes, broken: _BrokenFileError | None = None) -> _Block:
    groups: dict[tuple[str, int | None], list[_Line]] = {}
    policies = []
    for line in lines:
        if line.config is None:
            groups.setdefault((line.topic, line.partition), []).append(line)
        else:
            policies.append((line.topic, _policy(line.config, bytes(line.value))))
    columns = [
        _Columns(topic, partition, _texts(map(_key_of, group)), _documents(map(_value_of, group)))
        for (topic, partition), group in groups.items()
    ]
    return _Block(columns, policies, taken, broken)


def _policy(config: dict[str, str], value: bytes) -> str:
    if value:
        raise msgspec.ValidationError("a line holds a record's `value` or a topic's `config`, not both")
    return config.get("cleanup.policy", "delete")


def _texts(raws: Iterable[msgspec.Raw]) -> list[bytes | None]:
    return [text if text[:1] == b"{" else _unquoted(text) for text in map(bytes, raws)]


def _documents(raws: Iterable[msgspec.Raw]) -> list[bytes | None]:
    return [text if text[:1] == b"{" else _document(text) for text in map(bytes, raws)]


def _document(text: bytes) -> bytes | None:
    """A value that stands in the file as text; once in the log it could not be mended any more."""
    if not text:
        raise msgspec.ValidationError("Object missing required field `value`")
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


def _append_block(block: _Block, counts: Sequence[int], mark: Mark, writer: LogWriter) -> None:
    """Appends the records and marks the file."""
    for part, count in zip(block.columns, counts, strict=True):
        writer.declare(part.topic, count)
    for part, count in zip(block.columns, counts, strict=True):
        if part.partition is None:
            writer.append_by_key(part.topic, count, part.keys, part.values)
        else:
            writer.append_columns(part.topic, part.partition, part.keys, part.values)
    taken = block.taken
    checksum = zlib.crc32(taken, mark.checksum)
    writer.mark(Mark(mark.name, mark.size_bytes + len(taken), checksum, mark.lines + taken.count(b"\n")))
