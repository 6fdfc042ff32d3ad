"""The process that holds Debezium's engine and writes the log: `python -m tidegate.capture.engine_process`.

It takes its settings as one JSON line on standard input, tells its state as JSON lines on standard output, and ends,
between two batches, when standard input ends. A kill at any moment is its ordinary end: all that counts is in the log
and in the kept offsets.

Why nothing is lost or torn by a kill: a batch is synced to the log before the engine may move the source's position,
and the position moves only to the END of a transaction (or to a record outside of any), so that a transaction that was
cut is sent again from its BEGIN, with the same identities. Resuming inside of one loses rows: those of one COPY share
an LSN, and the connector skips what it believes to have seen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tidegate.capture.engine import (
    HEARTBEAT_TOPICS,
    LOG4J_PROPERTIES,
    CaptureSettings,
    connector_properties,
    has_whole_snapshot,
)
from tidegate.capture.log import LogInUse, LogWriter
from tidegate.capture.server_check import conninfo_parts, free_slot, server_parts
from tidegate.errors import DefinitelyNotDone, FixConfiguration, TidegateError

LOCK_SECONDS = 5.0  # so long nobody is told that the log is in use


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the child's standard output."""

    state: str
    cause: str = ""
    remedy: str = ""
    exit_code: int = 0
    works: bool = False  # a batch has become durable


class _Event(msgspec.Struct):
    status: str | None = None
    type: str | None = None
    aggregate_type: str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Batches:
    """Puts the engine's batches into the log, and says up to which record the source's position may move."""

    def __init__(self, settings: CaptureSettings, writer: LogWriter, tell: Callable[[Status], None]) -> None:
        self._writer = writer
        self._tell = tell
        self._partitions = settings.topics
        self._transaction_topic = settings.transaction_topic
        self._notification_topic = settings.notification_topic
        self._is_inside_transaction = False
        for topic, partitions in settings.topics.items():
            writer.declare(topic, partitions)
        writer.sync()

    def take(self, records: Iterable[Any]) -> Any | None:
        """Makes the batch durable; returns the last record that ends or lies outside of a transaction, if any."""
        columns: dict[str, tuple[list[bytes | None], list[bytes | None]]] = {}
        resumable = None
        for record in records:
            topic, key, value = str(record.destination()), _raw(record.key()), _raw(record.value())
            if topic in (self._transaction_topic, self._notification_topic):
                self._follow(topic, value)
            if not self._is_inside_transaction:
                resumable = record
            if not topic.startswith(HEARTBEAT_TOPICS):
                keys, values = columns.setdefault(topic, ([], []))
                keys.append(key)
                values.append(value)
        for topic, (keys, values) in columns.items():
            partitions = self._partitions.get(topic, 1)
            self._writer.declare(topic, partitions)
            self._writer.append_by_key(topic, partitions, keys, values)
        self._writer.sync()
        return resumable

    def _follow(self, topic: str, value: bytes | None) -> None:
        event = _decode_event(value or b"{}")
        if topic == self._transaction_topic:
            self._is_inside_transaction = event.status == "BEGIN"
        elif event.aggregate_type == "Initial Snapshot" and event.type in ("COMPLETED", "SKIPPED"):
            self._tell(Status("streaming"))


def _raw(text: Any) -> bytes | None:
    return None if text is None else str(text).encode()


class EngineProcess:
    """The engine, its consumer, and the one way out: `end`, between two batches."""

    def __init__(self, settings: CaptureSettings, status_out: int) -> None:
        self._settings = settings
        self._status_out = status_out
        self._between_batches = threading.Lock()
        self._secret = conninfo_parts(settings.dsn).get("password", "")
        self._told = Status("starting")

    def tell(self, status: Status) -> None:
        self._told = status
        os.write(self._status_out, msgspec.json.encode(status) + b"\n")

    def run(self) -> NoReturn:
        threading.Thread(target=self._end_with_parent, daemon=True).start()
        try:
            self.tell(Status("starting"))
            self._capture()
        except TidegateError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(self._engine_error(f"{type(error).__name__}: {error}"))

    def fail(self, error: TidegateError) -> NoReturn:
        self.tell(Status("failed", error.message, error.remedy, error.exit_code))
        os._exit(error.exit_code)

    def _end_with_parent(self) -> None:
        while sys.stdin.buffer.read(4096):
            pass
        self._between_batches.acquire()
        os._exit(0)

    def _capture(self) -> NoReturn:
        writer = self._writer()  # the former child is dead from here on
        free_slot(self._settings)
        begin_from_kept_offsets(self._settings)
        server = server_parts(self._settings.dsn)
        self._secret = server["password"] or self._secret
        batches = Batches(self._settings, writer, self.tell)
        _start_java(self._settings.state)
        self.tell(Status("streaming" if has_whole_snapshot(self._settings) else "snapshot"))
        failure: list[str] = []
        engine = _build_engine(connector_properties(self._settings, server), self._consumer(batches), failure)
        engine.run()
        raise self._engine_error("; ".join(failure) or "the engine ended by itself")

    def _writer(self) -> LogWriter:
        """Waits for the log as long as it takes: a run that is fenced off ends its tick before it lets go."""
        while True:
            try:
                return LogWriter(self._settings.log_root, wait_seconds=LOCK_SECONDS)
            except LogInUse as error:
                self.tell(Status("waiting", error.message, error.remedy))

    def _engine_error(self, cause: str) -> TidegateError:
        shown = cause.replace(self._secret, "***") if self._secret else cause
        log = self._settings.state / "engine.log"
        for symptom, remedy in _NEEDS_A_HUMAN.items():
            if symptom in cause:
                return FixConfiguration(f"Debezium's engine stopped: {shown}", remedy=remedy)
        return DefinitelyNotDone(f"Debezium's engine stopped: {shown}", remedy=f"It is started again; see {log}.")

    def _consumer(self, batches: Batches) -> Any:
        import jpype

        outer = self

        @jpype.JImplements("io.debezium.engine.DebeziumEngine$ChangeConsumer")
        class Consumer:
            @jpype.JOverride  # type: ignore[untyped-decorator]
            def handleBatch(self, records: Any, committer: Any) -> None:  # noqa: N802
                outer.take_batch(batches, records, committer)

            @jpype.JOverride  # type: ignore[untyped-decorator]
            def supportsTombstoneEvents(self) -> bool:  # noqa: N802
                return True

        return Consumer()

    def take_batch(self, batches: Batches, records: Any, committer: Any) -> None:
        """One batch, from the engine to the log and the kept offsets; a failure ends the process here."""
        with self._between_batches:
            try:
                resumable = batches.take(records)
                if resumable is not None:
                    committer.markProcessed(resumable)
                    committer.markBatchFinished()
                    keep_offsets(self._settings)
                if not self._told.works:
                    self.tell(Status(self._told.state, works=True))
            except TidegateError as error:
                self.fail(error)
            except BaseException as error:
                self.fail(self._engine_error(f"{type(error).__name__}: {error}"))


_NEEDS_A_HUMAN = {
    "password authentication failed": "Correct user and password in the source's dsn.",
    "permission denied": "Grant the role what it lacks, then start again.",
    "no longer available on the server": "Remove the capture's state and the collections: a new snapshot is taken.",
    "must be owner of": "Let the role own the captured tables, then start again.",
}


def begin_from_kept_offsets(settings: CaptureSettings) -> None:
    """The engine finds the last whole position, never one that a kill has torn.

    A snapshot that was cut begins anew on a new slot; a position from within it would be looked for there in vain.
    """
    settings.offsets.unlink(missing_ok=True)
    if has_whole_snapshot(settings):
        settings.offsets.write_bytes(settings.kept_offsets.read_bytes())


def keep_offsets(settings: CaptureSettings) -> None:
    """Keeps a copy of the position that the engine has just written, replaced as a whole."""
    if not settings.offsets.exists():
        return
    draft = settings.kept_offsets.with_suffix(".draft")
    with draft.open("wb") as file:
        file.write(settings.offsets.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(settings.kept_offsets)


def _start_java(state: Path) -> None:
    import jpype
    from pydbzengine.engine.jvm import ensure_jvm_started

    config = state / "log4j2.properties"
    config.write_text(LOG4J_PROPERTIES.format(path=state / "engine.log"))
    options = ["-Xms64m", "-Xmx512m", "-XX:-UseG1GC", "-XX:+UseSerialGC", "-Xrs", "-XX:TieredStopAtLevel=4"]
    try:
        ensure_jvm_started([*options, f"-Dlog4j2.configurationFile={config}", f"-XX:ErrorFile={state}/java-crash.log"])
    except (jpype.JVMNotFoundException, OSError) as error:
        raise FixConfiguration(
            f"Java cannot be started: {error}", remedy="Install Java 17 or later and set JAVA_HOME."
        ) from error


def _build_engine(settings: dict[str, str], consumer: Any, failure: list[str]) -> Any:
    import jpype

    @jpype.JImplements("io.debezium.engine.DebeziumEngine$CompletionCallback")
    class Completion:
        @jpype.JOverride  # type: ignore[untyped-decorator]
        def handle(self, success: bool, message: Any, error: Any) -> None:
            if not success:
                failure.append(_java_causes(message, error))

    properties = jpype.JClass("java.util.Properties")()
    for name, value in settings.items():
        properties.setProperty(name, value)
    engine_class = jpype.JClass("io.debezium.engine.DebeziumEngine")
    builder = engine_class.create(jpype.JClass("io.debezium.engine.format.Json")).using(properties)
    return builder.using(Completion()).notifying(consumer).build()


def _java_causes(message: Any, error: Any) -> str:
    """The failure's message and its causes, innermost last."""
    said = [str(message)]
    while error is not None and len(said) < 8:
        said.append(str(error.getMessage() or error.getClass().getName()))
        error = error.getCause()
    return ": ".join(dict.fromkeys(said))


def main() -> NoReturn:
    status_out = os.dup(1)
    os.dup2(2, 1)  # what Java may print does not get between the status lines
    settings = msgspec.json.decode(
        sys.stdin.buffer.readline(), type=CaptureSettings, dec_hook=lambda kind, raw: kind(raw)
    )
    EngineProcess(settings, status_out).run()


if __name__ == "__main__":
    main()
