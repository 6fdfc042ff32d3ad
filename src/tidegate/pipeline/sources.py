"""Where records come from: each source fills the log in the background and says when it holds what there was."""

from __future__ import annotations

import difflib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from tidegate.capture.debezium import RowEvents, check_collection, columns_from_schema, payload, row_decoder
from tidegate.capture.files import import_files
from tidegate.capture.log import LogReader, LogWriter
from tidegate.capture.topic_facts import TopicFacts, check_topic
from tidegate.capture.values import is_base64_number
from tidegate.errors import FixConfiguration
from tidegate.model.schema import TableSchema
from tidegate.pipeline.project import FilesSource, PostgresSource, Project, declared_table, topic_of

LOCK_WAIT_SECONDS = 60.0
LOOK_AGAIN_SECONDS = 1.0
SAMPLED_RECORDS = 1_000


class Source(Protocol):
    """Fills the log until it is stopped."""

    def start(self) -> Sequence[str]:
        """Begins; returns what the user should know. Refuses what cannot be captured."""

    def tables(self) -> tuple[TableSchema, ...]:
        """The tables that views can be made of."""

    def check(self) -> None:
        """Raises what has gone wrong in the background."""

    @property
    def trouble(self) -> str | None:
        """What has gone wrong and is tried again, until it goes well."""

    @property
    def log_is_filled(self) -> bool:
        """All that was there before the start is in the log."""

    @property
    def captured(self) -> bool:
        """All that was there when this was first asked is in the log."""

    def stop(self) -> None: ...


def source(project: Project) -> Source:
    settings = project.file.source
    return FilesFeed(project, settings) if isinstance(settings, FilesSource) else PostgresFeed(project, settings)


def check_source(project: Project) -> tuple[tuple[TableSchema, ...], tuple[str, ...]]:
    """The tables of the source, and what the user should know; changes nothing."""
    settings = project.file.source
    if isinstance(settings, FilesSource):
        return _check_files(project, settings)
    from tidegate.capture.engine import is_known
    from tidegate.capture.server_check import check_server

    feed = PostgresFeed(project, settings)
    wanted = feed.capture_settings
    facts = check_server(wanted.dsn, wanted.tables, wanted.slot, wanted.publication, known=is_known(wanted))
    return feed.tables(), facts.warnings


def _check_files(project: Project, settings: FilesSource) -> tuple[tuple[TableSchema, ...], tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        feed = FilesFeed(project, settings, Path(folder) / "log")
        feed.import_once()
        feed.check()
        tables, reader = feed.tables(), LogReader(Path(folder) / "log")
        _check_records(tables, reader, f"{settings.topic_prefix}.")
        return tables, (*_idle_warnings(tables, reader), *_base64_warnings(tables, reader))


def _check_records(tables: Sequence[TableSchema], reader: LogReader, prefix: str) -> None:
    """Refuses a table whose first records do not fit it, before they are in a log that keeps them."""
    for table in tables:
        for partition, values in _sampled(table, reader):
            check_collection(values, table.topic.removeprefix(prefix), table.topic, partition, 0)
            row_decoder(table).decode(RowEvents(), values, table.topic, partition, 0)


def _sampled(table: TableSchema, reader: LogReader) -> Iterator[tuple[int, list[bytes | None]]]:
    """The first values of each partition of a table's topic."""
    for (topic, partition), end in sorted(reader.ends().items()):
        if topic == table.topic:
            batches = reader.read(topic, partition, 0, min(end, SAMPLED_RECORDS))
            yield partition, [value for batch in batches for value in batch.column(1).to_pylist()]


def _idle_warnings(tables: Sequence[TableSchema], reader: LogReader) -> tuple[str, ...]:
    topics = reader.topics()
    idle = [table for table in tables if table.topic not in topics]
    return tuple(f'table "{table.name}": no record has the topic "{table.topic}" yet' for table in idle)


def _base64_warnings(tables: Sequence[TableSchema], reader: LogReader) -> tuple[str, ...]:
    """Decimals that come as base64 can be read, but the text form is safer: say so."""
    found = []
    for table in tables:
        decimals = [column.name for column in table.columns if column.type.kind == "decimal"]
        if decimals and (name := _base64_column(table, decimals, reader)):
            found.append(
                f'table "{table.name}": column "{name}" comes as base64 of the unscaled number:'
                " set decimal.handling.mode=string in the connector, so that scale and NaN are not lost"
            )
    return tuple(found)


def _base64_column(table: TableSchema, decimals: Sequence[str], reader: LogReader) -> str | None:
    for _, values in _sampled(table, reader):
        for value in values:
            row = (msgspec.json.decode(payload(value)).get("after") or {}) if value else {}
            name = next((one for one in decimals if is_base64_number(row.get(one))), None)
            if name:
                return name
    return None


class FilesFeed:
    """Imports recorded events into the log; looks for more until it is stopped."""

    def __init__(self, project: Project, settings: FilesSource, root: Path | None = None) -> None:
        self._project, self._settings = project, settings
        self._root = root or project.state / "log"
        self._filled, self._stopping = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="import files", daemon=True)

    def start(self) -> Sequence[str]:
        declared = [declared_table(self._project, name) for name in self._project.file.tables]
        self._thread.start()
        if not all(declared):
            self._await_filled()
        return ()

    def import_once(self) -> None:
        """Imports what there is, in the caller's thread."""
        with LogWriter(self._root, wait_seconds=LOCK_WAIT_SECONDS) as writer:
            import_files(self._pattern(), writer, self._partitions, self._check_topic)
        self._filled.set()

    def _await_filled(self) -> None:
        """Types that only the records tell are not known before."""
        while not self._filled.wait(0.05):
            self.check()

    def _work(self) -> None:
        try:
            with LogWriter(self._root, wait_seconds=LOCK_WAIT_SECONDS) as writer:
                while not self._stopping.is_set():
                    import_files(self._pattern(), writer, self._partitions, self._check_topic)
                    self._filled.set()
                    self._stopping.wait(LOOK_AGAIN_SECONDS)
        except BaseException as failure:
            self._failure = failure

    def _pattern(self) -> str:
        return str(self._project.folder / self._settings.path)

    def _partitions(self, topic: str) -> int:
        return self._settings.partitions if topic in self._row_topics() else 1

    def _check_topic(self, facts: TopicFacts) -> None:
        check_topic(facts, f"{self._settings.topic_prefix}.transaction")

    def _row_topics(self) -> set[str]:
        return {topic_of(self._project, name) for name in self._project.file.tables}

    def tables(self) -> tuple[TableSchema, ...]:
        return tuple(self._table(name) for name in self._project.file.tables)

    def _table(self, name: str) -> TableSchema:
        declared = declared_table(self._project, name)
        return declared if declared else discovered(self._project, name, LogReader(self._root))

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._filled.is_set():
            self._check_topics()

    def _check_topics(self) -> None:
        """A table may be idle; a topic that is nearly called so, and that no table takes, is a mistake."""
        topics, wanted = LogReader(self._root).topics(), self._row_topics()
        prefix = self._settings.topic_prefix + "."
        others = [topic for topic in topics if topic not in wanted and topic.count(".") > prefix.count(".")]
        for topic in sorted(wanted - set(topics)):
            near = difflib.get_close_matches(topic, others, n=1, cutoff=0.9)
            if near:
                raise FixConfiguration(
                    f'no record has the topic "{topic}"',
                    remedy=f'Did you mean "{near[0]}"? Correct the table\'s topic.',
                )

    @property
    def trouble(self) -> str | None:
        return None

    @property
    def log_is_filled(self) -> bool:
        return self._filled.is_set()

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

    def start(self) -> Sequence[str]:
        return self._capture.start().warnings

    def tables(self) -> tuple[TableSchema, ...]:
        from tidegate.capture.server_check import discover

        found = discover(self._settings.dsn, self._settings.tables, self._settings.topic_prefix)
        declared = {name: declared_table(self._project, name) for name in self._project.file.tables}
        return tuple(declared.get(table.name) or table for table in found)

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


def discovered(project: Project, name: str, reader: LogReader) -> TableSchema:
    """A table whose records carry their schema."""
    topic, settings = topic_of(project, name), project.file.tables[name]
    for (found, partition), end in sorted(reader.ends().items()):
        if found == topic and end:
            batch = next(reader.read(topic, partition, 0, 1))
            key, value = batch.column(0)[0].as_py(), batch.column(1)[0].as_py()
            columns = columns_from_schema(value) if value else None
            if columns:
                keys = tuple(settings.key or _key_of_schema(key))
                return TableSchema(name, topic, keys, columns)
    raise FixConfiguration(
        f'the types of table "{name}" are not known: its records carry no schema',
        remedy=f"Declare them: tables.{name}.columns and tables.{name}.key in tidegate.yaml.",
    )


def _key_of_schema(key: bytes | None) -> tuple[str, ...]:
    schema = msgspec.json.decode(key).get("schema") if key else None
    return tuple(field["field"] for field in schema["fields"]) if schema else ()
