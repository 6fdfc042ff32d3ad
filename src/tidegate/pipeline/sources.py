"""Where records come from: each source fills the log in the background and says when it holds what there was."""

from __future__ import annotations

import difflib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tidegate.capture.debezium import (
    RowEvents,
    check_collection,
    columns_from_schema,
    key_from_schema,
    payload,
    row_decoder,
)
from tidegate.capture.files import FilesImport
from tidegate.capture.log import LogInUse, LogReader, LogWriter
from tidegate.capture.topic_facts import TopicFacts, check_topic
from tidegate.capture.values import is_base64_number
from tidegate.errors import FixConfiguration, UnknownColumn
from tidegate.model.schema import Column, TableSchema
from tidegate.pipeline.project import FilesSource, PostgresSource, Project, declared_table, topic_of

LOCK_WAIT_SECONDS = 5.0  # so long nobody is told that the log is in use
LOOK_AGAIN_SECONDS = 1.0
SAMPLED_RECORDS = 1_000


class Source(Protocol):
    """Fills the log until it is stopped."""

    def look(self) -> Sequence[str]:
        """What the user should know. Refuses what cannot be captured; changes nothing."""

    def tables_ahead(self) -> Iterator[tuple[TableSchema, ...]]:
        """What `tables` may say after the start, the cheapest guess first; none where nobody knows. Changes nothing."""

    def start(self) -> None:
        """Begins, after a look; waits in the background for whoever still writes to the log."""

    @property
    def tables_are_known(self) -> bool:
        """Nothing has to be in the log before `tables` can tell."""

    def tables(self) -> tuple[TableSchema, ...]:
        """The tables that views can be made of, as they are now."""

    def met(self, table: str, column: str) -> None:
        """A record has this column, which the table had not when `tables` was last asked."""

    def check(self) -> None:
        """Raises what has gone wrong in the background."""

    @property
    def trouble(self) -> str | None:
        """What has gone wrong and is tried again, until it goes well."""

    @property
    def log_is_filled(self) -> bool:
        """All that was there before the start is in the log, and of what came later nothing is there by half."""

    @property
    def captured(self) -> bool:
        """All that was there when this was first asked is in the log."""

    def stop(self) -> None: ...


def source(project: Project, *, is_live: bool) -> Source:
    """The project's source; one that is live waits for what is still being written."""
    settings = project.file.source
    if isinstance(settings, FilesSource):
        return FilesFeed(project, settings, is_live=is_live)
    return PostgresFeed(project, settings)


def check_source(project: Project) -> tuple[tuple[TableSchema, ...], tuple[str, ...]]:
    """The tables of the source, and what the user should know; changes nothing."""
    settings = project.file.source
    if isinstance(settings, FilesSource):
        return _check_files(project, settings)
    feed = PostgresFeed(project, settings)
    warnings, tables = feed.look(), feed.tables()
    return tables, (*warnings, *left_out_warnings(tables))


def left_out_warnings(tables: Sequence[TableSchema]) -> tuple[str, ...]:
    """Which columns of the server's tables are not read."""
    return tuple(
        f'table "{table.name}": left out: {", ".join(table.left_out)} (generated, or of a type that has no text form)'
        for table in tables
        if table.left_out
    )


def _check_files(project: Project, settings: FilesSource) -> tuple[tuple[TableSchema, ...], tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        feed = FilesFeed(project, settings, Path(folder) / "log")
        feed.import_once()
        feed.check()
        reader, prefix = LogReader(Path(folder) / "log"), f"{settings.topic_prefix}."
        while True:
            try:
                tables = feed.tables()
                return tables, (*_idle_warnings(tables, reader), *_sample_warnings(tables, reader, prefix))
            except UnknownColumn as error:
                feed.met(error.table, error.column)


def _sample_warnings(tables: Sequence[TableSchema], reader: LogReader, prefix: str) -> tuple[str, ...]:
    """What a table's first records tell; refuses those that do not fit it, before they are in a log that keeps them."""
    found: list[str] = []
    for table in tables:
        rows: list[_Row] = []
        for partition, values in _sampled(table, reader):
            check_collection(values, table.topic.removeprefix(prefix), table.topic, partition, 0)
            row_decoder(table).decode(RowEvents(), values, table.topic, partition, 0)
            rows += _after_rows(values)
        found += [*_lacking_warnings(table, rows), *_base64_warnings(table, rows), *_unit_warnings(table, rows)]
    return tuple(found)


def _sampled(table: TableSchema, reader: LogReader) -> Iterator[tuple[int, list[bytes | None]]]:
    """The first values of each partition of a table's topic."""
    for (topic, partition), end in sorted(reader.ends().items()):
        if topic == table.topic:
            batches = reader.read(topic, partition, 0, min(end, SAMPLED_RECORDS))
            yield partition, [value for batch in batches for value in batch.column(1).to_pylist()]


_Row = dict[str, Any]


def _after_rows(values: Sequence[bytes | None]) -> Iterator[_Row]:
    for value in values:
        row = msgspec.json.decode(payload(value)).get("after") if value else None
        if row:
            yield row


def _idle_warnings(tables: Sequence[TableSchema], reader: LogReader) -> tuple[str, ...]:
    topics = reader.topics()
    idle = [table for table in tables if table.topic not in topics]
    return tuple(f'table "{table.name}": no record has the topic "{table.topic}" yet' for table in idle)


def _lacking_warnings(table: TableSchema, rows: Sequence[_Row]) -> Iterator[str]:
    """A column that no record has is NULL everywhere: more often a wrong name than a column to come."""
    sent = dict.fromkeys(name for row in rows for name in row)
    lacking = [column.name for column in table.columns if column.name not in sent]
    for name in lacking if sent else ():
        near = difflib.get_close_matches(name, sent, n=1, cutoff=0.5)
        hint = f'; did you mean "{near[0]}"?' if near else f"; they have {', '.join(sent)}"
        yield f'table "{table.name}": no record has the column "{name}", so it is NULL{hint}'


def _base64_warnings(table: TableSchema, rows: Sequence[_Row]) -> Iterator[str]:
    """Decimals that come as base64 can be read, but the text form is safer: say so."""
    decimals = [column for column in table.columns if column.type.kind == "decimal"]
    for column in _columns_with(decimals, rows, is_base64_number)[:1]:
        yield (
            f'table "{table.name}": column "{column.name}" comes as base64 of the unscaled number:'
            " set decimal.handling.mode=string in the connector, so that scale and NaN are not lost"
        )


def _unit_warnings(table: TableSchema, rows: Sequence[_Row]) -> Iterator[str]:
    guessed = [column for column in table.columns if column.is_moment and column.unit == "auto"]
    for column in _columns_with(guessed, rows, _holds_integer):
        yield (
            f'table "{table.name}": column "{column.name}" comes as integers, and whether they are milli-, micro- or'
            f" nanoseconds is guessed by their size: set tables.{table.name}.timestamps, or"
            " time.precision.mode=isostring in the connector"
        )


def _columns_with(columns: Sequence[Column], rows: Sequence[_Row], has: Callable[[object], bool]) -> list[Column]:
    return [column for column in columns if any(has(row.get(column.name)) for row in rows)]


def _holds_integer(value: object) -> bool:
    return any(map(_holds_integer, value)) if isinstance(value, list) else isinstance(value, int)


class FilesFeed:
    """Imports recorded events into the log; looks for more until it is stopped."""

    def __init__(
        self, project: Project, settings: FilesSource, root: Path | None = None, *, is_live: bool = False
    ) -> None:
        self._project, self._settings = project, settings
        self._root = root or project.state / "log"
        self._filled, self._stopping = threading.Event(), threading.Event()
        self._settled = threading.Event()  # no look is under way
        self._failure: BaseException | None = None
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name="import files", daemon=True)
        self._met: dict[str, set[str]] = {}
        pattern = str(project.folder / settings.path)
        self._files = FilesImport(pattern, self._partitions, self._check_topic, is_live, self._stopping.is_set)

    def look(self) -> Sequence[str]:
        self._files.paths()
        return ()

    def tables_ahead(self) -> Iterator[tuple[TableSchema, ...]]:
        """What the log tells, then what all files tell; before the first record is imported, what is declared."""
        if not self._all_declared and not LogReader(self._root).topics():
            return
        known = self._tables_of_the_log()
        if known is not None:
            yield known
        if known is None or not self._all_declared:
            yield _check_files(self._project, self._settings)[0]

    def _tables_of_the_log(self) -> tuple[TableSchema, ...] | None:
        """None where it tells too little: records that are still to be imported may tell more."""
        try:
            self._check_topics()
            return self.tables()
        except FixConfiguration:
            return None

    def start(self) -> None:
        self._thread.start()

    def import_once(self) -> None:
        """Imports what there is, in the caller's thread."""
        with LogWriter(self._root, wait_seconds=LOCK_WAIT_SECONDS) as writer:
            self._import(writer)

    @property
    def tables_are_known(self) -> bool:
        return self._all_declared or self._filled.is_set()

    @property
    def _all_declared(self) -> bool:
        return all(declared_table(self._project, name) for name in self._project.file.tables)

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_the_log_and_import()
        except BaseException as failure:
            self._failure = failure

    def _take_the_log_and_import(self) -> None:
        """Another run may still write to the log: one that is fenced off ends its tick before it lets go."""
        try:
            writer = LogWriter(self._root, wait_seconds=LOCK_WAIT_SECONDS)
        except LogInUse as error:
            self._trouble = str(error)
            return
        self._trouble = None
        with writer:
            while not self._stopping.is_set():
                self._import(writer)
                self._stopping.wait(LOOK_AGAIN_SECONDS)

    def _import(self, writer: LogWriter) -> None:
        self._settled.clear()
        self._files.look(writer)
        if not self._stopping.is_set():
            self._check_topics()
            self._settled.set()
            self._filled.set()

    def _partitions(self, topic: str) -> int:
        return self._settings.partitions if topic in self._row_topics() else 1

    def _check_topic(self, facts: TopicFacts) -> None:
        transaction_topic = f"{self._settings.topic_prefix}.transaction"
        if facts.topic == transaction_topic or facts.topic in self._row_topics():
            check_topic(facts, transaction_topic)

    def _row_topics(self) -> set[str]:
        return {topic_of(self._project, name) for name in self._project.file.tables}

    def tables(self) -> tuple[TableSchema, ...]:
        return tuple(self._table(name) for name in self._project.file.tables)

    def _table(self, name: str) -> TableSchema:
        declared = declared_table(self._project, name)
        return (
            declared if declared else discovered(self._project, name, LogReader(self._root), self._met.get(name, set()))
        )

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_topics(self) -> None:
        """A table may be idle; a topic that is nearly called so, and that no table takes, is a mistake."""
        topics, wanted = LogReader(self._root).topics(), self._row_topics()
        prefix = self._settings.topic_prefix + "."
        if topics and not any(map(self._is_ours, topics)):
            raise self._foreign(topics)
        others = [topic for topic in topics if topic not in wanted and topic.count(".") > prefix.count(".")]
        for topic in sorted(wanted - set(topics)):
            near = difflib.get_close_matches(topic, others, n=1, cutoff=0.9)
            if near:
                raise FixConfiguration(
                    f'no record has the topic "{topic}"',
                    remedy=f'Did you mean "{near[0]}"? Correct the table\'s topic.',
                )

    def met(self, table: str, column: str) -> None:
        self._met.setdefault(table, set()).add(column)

    def _is_ours(self, topic: str) -> bool:
        """Schema changes have the prefix itself as their topic, heartbeats have it behind a prefix of their own."""
        prefix = self._settings.topic_prefix
        return topic == prefix or topic.startswith(prefix + ".") or topic.endswith("." + prefix)

    def _foreign(self, topics: Iterable[str]) -> FixConfiguration:
        prefix, shown = self._settings.topic_prefix, sorted(topics)
        near = difflib.get_close_matches(prefix, [topic.rsplit(".", 2)[0] for topic in shown], n=1)
        hint = f'Did you mean "{near[0]}"? ' if near else ""
        return FixConfiguration(
            f'no record has a topic that begins with "{prefix}."; there are {", ".join(shown[:5])}',
            remedy=f"{hint}Set source.topic_prefix in tidegate.yaml to the connector's topic.prefix.",
        )

    @property
    def trouble(self) -> str | None:
        return self._trouble

    @property
    def log_is_filled(self) -> bool:
        return self._settled.is_set()

    @property
    def captured(self) -> bool:
        return self._filled.is_set()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()


class PostgresFeed:
    """Follows a Postgres server by the embedded Debezium engine."""

    def __init__(self, project: Project, settings: PostgresSource) -> None:
        from tidegate.capture.engine import CaptureSettings
        from tidegate.capture.supervisor import Capture, IdleToken

        slot = settings.slot or f"tidegate_{project.file.name}".lower().replace("-", "_")
        self._settings, self._project = settings, project
        self.capture_settings = CaptureSettings(
            settings.dsn,
            tuple(settings.tables),
            settings.topic_prefix,
            settings.partitions,
            project.state,
            slot,
            settings.publication or slot,
        )
        self._capture = Capture(self.capture_settings)
        self._token: IdleToken | None = None
        self._reached = False
        self._met: set[tuple[str, str]] = set()

    def look(self) -> Sequence[str]:
        return self._capture.check_server().warnings

    def tables_ahead(self) -> Iterator[tuple[TableSchema, ...]]:
        yield self.tables()

    def start(self) -> None:
        self._capture.begin()

    @property
    def tables_are_known(self) -> bool:
        return True

    def tables(self) -> tuple[TableSchema, ...]:
        from tidegate.capture.server_check import discover

        found = discover(self._settings.dsn, self._settings.tables, self._settings.topic_prefix)
        declared = {name: declared_table(self._project, name) for name in self._project.file.tables}
        return tuple(replace(declared.get(table.name) or self._closed(table), decimals="text") for table in found)

    def _closed(self, table: TableSchema) -> TableSchema:
        """A column that was met and is no longer there has gone again: it is left out."""
        known = {column.name for column in table.columns} | set(table.left_out or ())
        gone = sorted(column for name, column in self._met if name == table.name and column not in known)
        return replace(table, left_out=(*(table.left_out or ()), *gone))

    def met(self, table: str, column: str) -> None:
        self._met.add((table, column))

    def check(self) -> None:
        self._capture.check()

    @property
    def trouble(self) -> str | None:
        return self._capture.trouble

    @property
    def log_is_filled(self) -> bool:
        return True

    @property
    def captured(self) -> bool:
        if self._capture.status.state != "streaming":
            return False
        if self._token is None:
            self._token = self._capture.mark_idle_target()
        self._reached = self._reached or self._capture.reached(self._token, LogReader(self._project.state / "log"))
        return self._reached

    def stop(self) -> None:
        self._capture.stop()


def discovered(project: Project, name: str, reader: LogReader, met: Set[str] = frozenset()) -> TableSchema:
    """A table whose records carry their schema; of the columns that were met, the first schema with them counts."""
    topic, settings = topic_of(project, name), project.file.tables[name]
    columns: tuple[Column, ...] | None = None
    key = tuple(settings.key or ())
    for record_key, value in _records(topic, reader):
        if value is not None and columns is None:
            columns = columns_from_schema(name, value)
        if record_key is not None and not key:
            key = key_from_schema(record_key)
        if columns and key:
            return _discovered_table(project, name, key, _with_later(columns, name, topic, reader, met))
    raise _undiscovered(name, columns)


def _with_later(
    columns: tuple[Column, ...], name: str, topic: str, reader: LogReader, met: Set[str]
) -> tuple[Column, ...]:
    """The columns of the first record, those of each partition's last one, and those that were met in between."""
    found = {column.name: column for column in columns}
    for value in _last_values(topic, reader):
        found = {column.name: column for column in columns_from_schema(name, value) or ()} | found
    for column_name in met - found.keys():
        quoted = json.dumps(column_name).encode()
        later = (value for _, value in _records(topic, reader) if value is not None and quoted in value)
        schemas = ({one.name: one for one in columns_from_schema(name, value) or ()} for value in later)
        found |= next(({column_name: schema[column_name]} for schema in schemas if column_name in schema), {})
    return tuple(sorted(found.values(), key=lambda column: column not in columns))


def _last_values(topic: str, reader: LogReader) -> Iterator[bytes]:
    starts = reader.starts()
    for (found, partition), end in sorted(reader.ends().items()):
        if found == topic:
            first = max(starts[found, partition], end - 2)  # a delete's tombstone has no schema
            for batch in reader.read(topic, partition, first, end):
                yield from (value for value in batch.column(1).to_pylist() if value is not None)


def _records(topic: str, reader: LogReader) -> Iterator[tuple[bytes | None, bytes | None]]:
    starts = reader.starts()
    for (found, partition), end in sorted(reader.ends().items()):
        if found == topic:
            for batch in reader.read(topic, partition, starts[found, partition], end):
                yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


def _discovered_table(project: Project, name: str, key: tuple[str, ...], columns: Sequence[Column]) -> TableSchema:
    settings, names = project.file.tables[name], [column.name for column in columns]
    if missing := [column for column in key if column not in names]:
        raise FixConfiguration(
            f'table "{name}": the key column {missing[0]} is not among its columns {", ".join(names)}',
            remedy=f"Set `key: [...]` of tables.{name} in tidegate.yaml to the table's primary key columns.",
        )
    if settings.timestamps != "auto":
        columns = [replace(column, unit=settings.timestamps) for column in columns]
    # a decimal's schema says so: it is text only if the connector was told to send text, and then it is no decimal
    decimals = "base64" if settings.decimals == "auto" else settings.decimals
    return TableSchema(name, topic_of(project, name), key, tuple(columns), decimals, left_out=())


def _undiscovered(name: str, columns: Sequence[Column] | None) -> FixConfiguration:
    if columns:
        return FixConfiguration(
            f'the key of table "{name}" is not known: no record has a key with a schema',
            remedy=f"Set tables.{name}.key in tidegate.yaml to the table's primary key columns.",
        )
    return FixConfiguration(
        f'the types of table "{name}" are not known: its records carry no schema',
        remedy=f"Declare them: tables.{name}.columns and tables.{name}.key in tidegate.yaml.",
    )
