"""A session: one driver's open stream, led through one round after another, with the order checked on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec

from tidegate.crash_points import reach
from tidegate.errors import MaybeDone, ProtocolViolation, TidegateError
from tidegate.protocol.fence import Fence, agreed_checkpoint
from tidegate.protocol.messages import (
    ALL_KEYS,
    START,
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    KeyRange,
    Load,
    Loaded,
    MaterializationSpec,
    Open,
    Opened,
    RuntimeCheckpoint,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
)
from tidegate.protocol.order import End, Phase, next_phase
from tidegate.protocol.patch import apply_updates, stays_below_range

BATCH_MESSAGES = 5_000  # messages that are handed to a driver in one call
ACKNOWLEDGED_TIMEOUT_SECONDS = 3_600.0

Answer = Callable[[Loaded], None]
T = TypeVar("T")


class Transactor(Protocol):
    """The driver's side of one session. Each call is a message, or several of one kind in their order.

    A driver bounds every wait on the outside by a deadline of its own.
    """

    @property
    def opened(self) -> Opened:
        """The answer to Open; the fence was taken before it."""

    def acknowledge(self, message: Acknowledge) -> Future[Acknowledged]:
        """Returns at once; the future is done when the last round is in place."""

    def load(self, loads: Sequence[Load], answer: Answer) -> None:
        """Answers now, or remembers the keys until flush. Must not read what acknowledge has yet to change."""

    def flush(self, message: Flush, answer: Answer) -> Flushed:
        """Answers every load that has a document and was not answered yet."""

    def store(self, stores: Sequence[Store]) -> None:
        """Takes documents; no reader sees them before the commit."""

    def start_commit(self, message: StartCommit) -> StartedCommit:
        """As the driver's pattern says; raises Fenced if another session has taken over."""

    def close(self) -> None:
        """Lets everything go; what was not committed is undone. May be called at any point, and twice."""


@dataclass(frozen=True)
class Recovered:
    """What the recovery log knows when a session opens; `checkpoint` is START if no round was ever committed."""

    fence: Fence
    checkpoint: RuntimeCheckpoint
    state: Any = None


class RecoveryLog(Protocol):
    """Durable checkpoints of rounds, kept by the catalog, by materialization and key range."""

    def open(self, materialization: str, key_range: KeyRange) -> Recovered:
        """Fences off older sessions of overlapping ranges; a new range inherits (`fence.plan_open` decides)."""

    def commit(
        self,
        materialization: str,
        key_range: KeyRange,
        fence: Fence,
        checkpoint: RuntimeCheckpoint,
        updates: Sequence[StateUpdate],
    ) -> None:
        """Checkpoint and state updates become durable together, or Fenced is raised and nothing is changed."""

    def checkpoint_at(self, tick: int) -> RuntimeCheckpoint | None:
        """What a round up to this tick commits, its number aside; None if there is no such tick, or not yet."""


class Session:
    """Drives one Transactor; after any error it is of no more use, and a new one finds out the truth."""

    def __init__(
        self, transactor: Transactor, recovery_log: RecoveryLog, message: Open, recovered: Recovered, phase: Phase
    ) -> None:
        self._transactor = transactor
        self._log = recovery_log
        self._name = message.materialization.name
        self._range = message.key_range
        self._fence = recovered.fence
        self._state = recovered.state
        self._updates: list[StateUpdate] = []
        self._committed = recovered.checkpoint
        self._phase = phase
        self._unanswered = 0
        self._acknowledged: Future[Acknowledged] | None = None

    @classmethod
    def open(
        cls,
        connect: Callable[[Open], Transactor],
        materialization: MaterializationSpec,
        recovery_log: RecoveryLog,
        *,
        version: str = "",
        key_range: KeyRange = ALL_KEYS,
    ) -> Session:
        """Takes both fences and learns the checkpoint to resume from; the first acknowledge is already under way."""
        recovered = recovery_log.open(materialization.name, key_range)
        message = Open(materialization, version, key_range, recovered.state)
        phase = next_phase(Phase.NEW, Open)
        with _driver("open"):
            transactor = connect(message)
        session = cls(transactor, recovery_log, message, recovered, next_phase(phase, Opened))
        try:
            session._adopt(transactor.opened.runtime_checkpoint)
            session._acknowledge()
        except BaseException:
            session._abandon()
            raise
        return session

    @property
    def checkpoint(self) -> RuntimeCheckpoint | None:
        """Up to where this range is delivered; None: from zero."""
        return None if self._committed.tick <= START.tick else self._committed

    def run_round(
        self,
        stores: Iterable[Store],
        checkpoint: RuntimeCheckpoint,
        loads: Iterable[Load] = (),
        loaded: Answer | None = None,
    ) -> RuntimeCheckpoint:
        """One transaction; returns its checkpoint. `stores` is read after the last `loaded`, and only then."""
        try:
            numbered = self._numbered(checkpoint)
            self._load_phase(loads, loaded or _ignore)
            self._store_phase(stores)
            self._commit_phase(numbered)
            self._acknowledge()
        except BaseException:
            self._abandon()
            raise
        return numbered

    def close(self) -> None:
        """Ends between two rounds: everything committed is in place when this returns."""
        if self._phase is Phase.CLOSED:
            return
        try:
            if self._phase is Phase.ACKNOWLEDGING:
                self._await_acknowledged()
            self._turn(End)
            self._keep_last_updates()
        finally:
            self._abandon()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def _turn(self, message: type[Any]) -> None:
        self._phase = next_phase(self._phase, message)

    def _adopt(self, destination: RuntimeCheckpoint | None) -> None:
        """A destination that keeps the checkpoint wins over the log, which then hears of the round it missed."""
        if destination is None:
            return
        behind = self._committed
        here = self._log.checkpoint_at(destination.tick)
        self._committed = agreed_checkpoint(self._name, behind, destination, here)
        # Without this, a second crash before the log's commit would leave the log two rounds behind.
        if self._committed.round > behind.round:
            self._log.commit(self._name, self._range, self._fence, self._committed, ())

    def _numbered(self, checkpoint: RuntimeCheckpoint) -> RuntimeCheckpoint:
        if checkpoint.tick <= self._committed.tick:
            raise ProtocolViolation(
                f'materialization "{self._name}" is at tick {self._committed.tick} '
                f"and was given a round for tick {checkpoint.tick}",
                remedy="This is a bug in the runtime: it must go on behind `Session.checkpoint`. Please report it.",
            )
        return msgspec.structs.replace(checkpoint, round=self._committed.round + 1)

    def _acknowledge(self) -> None:
        self._turn(Acknowledge)
        with _driver("acknowledge"):
            self._acknowledged = self._transactor.acknowledge(Acknowledge(self._state))

    def _await_acknowledged(self) -> None:
        assert self._acknowledged is not None
        with _driver("acknowledge"):
            answer = _expect(Acknowledged, self._acknowledged.result(ACKNOWLEDGED_TIMEOUT_SECONDS))
        self._turn(Acknowledged)
        self._keep(answer.state)

    def _load_phase(self, loads: Iterable[Load], loaded: Answer) -> None:
        for batch in _batches(loads):
            self._turn(Load)
            self._unanswered += len(batch)
            with self._answers("load", loaded) as answer:
                self._transactor.load(batch, answer)
        self._await_acknowledged()
        self._turn(Flush)
        with self._answers("flush", loaded) as answer:
            flushed = _expect(Flushed, self._transactor.flush(Flush(), answer))
        self._turn(Flushed)
        self._unanswered = 0
        self._keep(flushed.state)

    @contextmanager
    def _answers(self, call: str, loaded: Answer) -> Iterator[Answer]:
        """What the driver answers is checked at once, and handed on when its call is over."""
        answers: list[Loaded] = []

        def answer(message: Loaded) -> None:
            self._check_answer()
            answers.append(message)

        with _driver(call):
            yield answer
        for message in answers:
            loaded(message)

    def _check_answer(self) -> None:
        self._turn(Loaded)
        self._unanswered -= 1
        if self._unanswered < 0:
            raise ProtocolViolation(
                f'the driver of "{self._name}" answered more loads than were sent',
                remedy="This is a bug in the driver: it may answer each load once. Please report it.",
            )

    def _store_phase(self, stores: Iterable[Store]) -> None:
        for batch in _batches(stores):
            self._turn(Store)
            with _driver("store"):
                self._transactor.store(batch)
        reach("stored")

    def _commit_phase(self, checkpoint: RuntimeCheckpoint) -> None:
        self._turn(StartCommit)
        with _driver("startCommit"):
            started = _expect(StartedCommit, self._transactor.start_commit(StartCommit(checkpoint)))
        self._turn(StartedCommit)
        self._keep(started.state)
        reach("destination-committed")
        self._log.commit(self._name, self._range, self._fence, checkpoint, tuple(self._updates))
        self._updates.clear()
        self._committed = checkpoint
        reach("log-committed")

    def _keep(self, update: StateUpdate | None) -> None:
        """Remembers a change of the driver's state for the next commit of the log."""
        if update is None:
            return
        if not stays_below_range(update, self._range):
            raise ProtocolViolation(
                f'the driver of "{self._name}" changed state outside its key range {self._range.text}',
                remedy="This is a bug in the driver: it may write below its own range key only. Please report it.",
            )
        self._state = apply_updates(self._state, (update,))
        self._updates.append(update)

    def _keep_last_updates(self) -> None:
        if self._updates:
            self._log.commit(self._name, self._range, self._fence, self._committed, tuple(self._updates))
            self._updates.clear()

    def _abandon(self) -> None:
        self._phase = Phase.CLOSED
        with _driver("close"):
            self._transactor.close()


def _ignore(_: Loaded) -> None:
    return None


def _batches(messages: Iterable[T]) -> Iterator[Sequence[T]]:
    source = iter(messages)
    while batch := list(islice(source, BATCH_MESSAGES)):
        yield batch


def _expect(kind: type[T], answer: object) -> T:
    if isinstance(answer, kind):
        return answer
    raise ProtocolViolation(
        f"the driver answered {type(answer).__name__} where only {kind.__name__} may come",
        remedy="This is a bug in the driver. Please report it.",
    )


@contextmanager
def _driver(call: str) -> Iterator[None]:
    """What a driver raises without having sorted it may have happened, or not."""
    try:
        yield
    except TidegateError:
        raise
    except Exception as error:
        raise MaybeDone(
            f"the driver failed in {call}: {type(error).__name__}: {error}",
            remedy="Open a new session: it finds out what was committed. If it comes again, report it with its cause.",
        ) from error
