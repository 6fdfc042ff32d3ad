"""Keeps the engine's process running: starts it, hears its status, starts it again with a growing delay."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec

from tidegate.capture.engine import MESSAGE_PREFIX, CaptureSettings, has_whole_snapshot, is_known, remember
from tidegate.capture.engine_process import Status
from tidegate.capture.log import LogReader
from tidegate.capture.server_check import ServerFacts, check_server, connected, drop_slot, with_absolute_files
from tidegate.errors import DefinitelyNotDone, FixConfiguration

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0
_STEADY_SECONDS = 60.0


@dataclass(frozen=True)
class IdleToken:
    """Stands in the server's log behind everything that was committed before it."""

    text: str
    message_offset: int

    @property
    def content(self) -> bytes:
        """As it stands in the message's record."""
        return base64.b64encode(self.text.encode())


class Backoff:
    """How long to wait before a process that died is started again."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def after(self, lived_seconds: float) -> float:
        """Doubles from one early death to the next; begins anew after a steady while."""
        is_first = lived_seconds > _STEADY_SECONDS or not self._seconds
        self._seconds = min(_FIRST_DELAY_SECONDS if is_first else 2 * self._seconds, _LONGEST_DELAY_SECONDS)
        return self._seconds


class Capture:
    """Follows one server's transactions into the log, in a process of its own.

    `trouble` says why it does not get on, from the process's end, or from when it waits for the log, until a batch has
    become durable.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self.settings = replace(settings, state=settings.state.absolute())
        self.status = Status("stopped")
        self.trouble: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._hearing: threading.Thread | None = None
        self._backoff = Backoff()
        self._started_at = 0.0
        self._next_start_at = 0.0
        self._on_the_way: set[str] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def check_server(self) -> ServerFacts:
        """Refuses what cannot be captured; changes nothing."""
        settings = self.settings
        known = is_known(settings)
        return check_server(settings.dsn, settings.tables, settings.slot, settings.publication, known=known)

    def start(self) -> ServerFacts:
        """Checks the server, then begins."""
        facts = self.check_server()
        self.begin()
        return facts

    def begin(self) -> None:
        """Starts the engine's process, on a server that was checked."""
        remember(self.settings)
        self._spawn()

    def check(self) -> None:
        """Raises what needs a human; a process that died of anything else is started again after a while."""
        if self._process is None or self._process.poll() is None:
            self.trouble = None if self.status.works else self._waiting_for or self.trouble
            return
        assert self._hearing is not None
        self._hearing.join(1.0)
        self._raise_what_needs_a_human()
        now = time.monotonic()
        if self._next_start_at == 0.0:
            self._next_start_at = now + self._backoff.after(now - self._started_at)
            self.status = _waiting(self.status, self._process.returncode)
            self.trouble = self._waiting_for
        if now >= self._next_start_at:
            self._spawn()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """The process has ended when this returns: between two batches, or by a kill when the time is over."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._finish_hearing(process)
        self.status = Status("stopped")

    def mark_idle_target(self) -> IdleToken:
        """Writes a token into the server's log: everything committed before lies in front of it."""
        offset = LogReader(self.settings.log_root).ends().get((self.settings.message_topic, 0), 0)
        token = IdleToken(uuid.uuid4().hex, offset)
        self._emit(token)
        return token

    def reached(self, token: IdleToken, reader: LogReader) -> bool:
        """Whether everything that was committed before the token is in the log."""
        if token.text not in self._on_the_way:
            self._emit(token)
        topic = self.settings.message_topic
        end = reader.ends().get((topic, 0), 0)
        batches = reader.read(topic, 0, token.message_offset, end)
        return any(token.content in (value or b"") for batch in batches for value in batch["value"].to_pylist())

    def _emit(self, token: IdleToken) -> None:
        """Before the snapshot is whole its slot may be made anew, behind a token: then nothing is written yet."""
        if not has_whole_snapshot(self.settings):
            return
        with connected(self.settings.dsn) as connection:
            # As a transaction: a starting engine swallows messages outside of one until it has found its place.
            connection.execute("SELECT pg_logical_emit_message(true, %s, %s)", [MESSAGE_PREFIX, token.text])
        self._on_the_way.add(token.text)

    def drop(self) -> None:
        """Removes the slot and the publication from the server; a stopped capture cannot go on after this."""
        self.stop()
        with connected(self.settings.dsn) as connection:
            drop_slot(connection, self.settings.slot)
            quoted = self.settings.publication.replace('"', '""')
            connection.execute(f'DROP PUBLICATION IF EXISTS "{quoted}"'.encode())

    @property
    def _waiting_for(self) -> str | None:
        status = self.status
        return f"{status.cause}\n  remedy: {status.remedy}" if status.state == "waiting" else None

    def __enter__(self) -> Capture:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self) -> None:
        if self._process is not None:
            self._finish_hearing(self._process)
        self._started_at, self._next_start_at = time.monotonic(), 0.0
        with (self.settings.state / "engine.stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidegate.capture.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=self.settings.state,
                start_new_session=True,  # an interrupt of the terminal is the parent's to answer
            )
        self.status = Status("starting")
        self._hearing = threading.Thread(target=self._hear, args=[self._process], daemon=True)
        self._hearing.start()
        _give_settings(self._process, self.settings)

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.status = msgspec.json.decode(line, type=Status)

    def _finish_hearing(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None and self._hearing is not None
        self._hearing.join(5.0)
        process.stdout.close()
        if not process.stdin.closed:
            process.stdin.close()

    def _raise_what_needs_a_human(self) -> None:
        status = self.status
        if status.state == "failed" and status.exit_code == FixConfiguration.exit_code:
            raise FixConfiguration(status.cause, remedy=status.remedy)


def _waiting(last: Status, code: int) -> Status:
    cause = last.cause if last.state == "failed" else f"the engine's process ended with code {code}"
    return Status("waiting", cause, last.remedy or "Nothing to do: it is started again.", last.exit_code)


def _give_settings(process: subprocess.Popen[bytes], settings: CaptureSettings) -> None:
    assert process.stdin is not None
    given = replace(settings, dsn=with_absolute_files(settings.dsn))
    try:
        process.stdin.write(msgspec.json.encode(given, enc_hook=str) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise DefinitelyNotDone(
            "the engine's process ended before it began", remedy=f"Read {settings.state / 'engine.stderr'}."
        ) from None
