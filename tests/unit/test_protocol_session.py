"""A session leads its driver, and believes nothing that comes out of turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tidegate.destinations.contract import Answer
from tidegate.errors import Fenced, MaybeDone, ProtocolViolation
from tidegate.protocol.fence import Fence
from tidegate.protocol.messages import (
    START,
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    KeyRange,
    Load,
    Loaded,
    MaterializationSpec,
    Opened,
    RuntimeCheckpoint,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
)
from tidegate.protocol.patch import below_range
from tidegate.protocol.session import Session
from tidegate.testing.memory import MemoryRecoveryLog

SPEC = MaterializationSpec("m", (), {})
RANGE = KeyRange(0, 9)


class Driver:
    """A destination that leaves the checkpoint to the recovery log, and writes down what it hears."""

    def __init__(self, checkpoint: RuntimeCheckpoint | None = None) -> None:
        self.opened = Opened(checkpoint)
        self.heard: list[str] = []
        self.acknowledged: Future[Acknowledged] = Future()
        self.acknowledged.set_result(Acknowledged())
        self.started: Any = StartedCommit()
        self.on_load: Callable[[Answer], None] = lambda answer: None
        self.on_flush: Callable[[Answer], None] = lambda answer: None
        self.fails: Exception | None = None

    def acknowledge(self, message: Acknowledge) -> Future[Acknowledged]:
        self.heard.append("acknowledge")
        return self.acknowledged

    def load(self, loads: Sequence[Load], answer: Answer) -> None:
        self.heard.append(f"{len(loads)} load")
        self.on_load(answer)

    def flush(self, message: Flush, answer: Answer) -> Flushed:
        self.heard.append("flush")
        self.on_flush(answer)
        return Flushed()

    def store(self, stores: Sequence[Store]) -> None:
        self.heard.append(f"{len(stores)} store")

    def start_commit(self, message: StartCommit) -> StartedCommit:
        self.heard.append("startCommit")
        if self.fails:
            raise self.fails
        started: StartedCommit = self.started
        return started

    def close(self) -> None:
        self.heard.append("close")


def opened(driver: Driver, log: MemoryRecoveryLog | None = None) -> Session:
    return Session.open(lambda message: driver, SPEC, log or MemoryRecoveryLog(), key_range=RANGE)


def loads(count: int) -> list[Load]:
    return [Load(0, (number,)) for number in range(count)]


def test_a_round_is_told_in_order_and_in_batches() -> None:
    driver = Driver()
    with opened(driver) as session:
        session.run_round((Store(0, (number,), ()) for number in range(5_001)), RuntimeCheckpoint(1), loads(2))
    told = ["acknowledge", "2 load", "flush", "5000 store", "1 store", "startCommit", "acknowledge", "close"]
    assert driver.heard == told


def test_loads_do_not_wait_for_acknowledged_but_flush_does() -> None:
    driver = Driver()
    driver.acknowledged = Future()
    session = opened(driver)

    def acknowledge_late(answer: Answer) -> None:
        assert "flush" not in driver.heard
        driver.acknowledged.set_result(Acknowledged())

    driver.on_load = acknowledge_late
    session.run_round([], RuntimeCheckpoint(1), loads(1))
    assert driver.heard.index("1 load") < driver.heard.index("flush")


def test_stores_are_made_after_the_last_answer() -> None:
    driver, answers = Driver(), list[Loaded]()
    driver.on_flush = lambda answer: answer(Loaded(0, b"{}"))
    with opened(driver) as session:
        session.run_round(
            (Store(0, (len(answers),), ()) for _ in range(1)), RuntimeCheckpoint(1), loads(1), answers.append
        )
    assert answers == [Loaded(0, b"{}")]


def test_an_answer_after_flushed_is_a_violation() -> None:
    driver, kept = Driver(), list[Answer]()
    driver.on_flush = kept.append
    session = opened(driver)

    def stores() -> Any:
        kept[0](Loaded(0, b"{}"))
        yield

    with pytest.raises(ProtocolViolation, match="Loaded came out of turn"):
        session.run_round(stores(), RuntimeCheckpoint(1), loads(1))


def test_more_answers_than_loads_are_a_violation() -> None:
    driver = Driver()

    def answer_twice(answer: Answer) -> None:
        answer(Loaded(0, b"{}"))
        answer(Loaded(0, b"{}"))

    driver.on_flush = answer_twice
    with pytest.raises(ProtocolViolation, match="more loads than were sent"):
        opened(driver).run_round([], RuntimeCheckpoint(1), loads(1))


def test_a_wrong_answer_is_a_violation() -> None:
    driver = Driver()
    driver.started = Flushed()
    with pytest.raises(ProtocolViolation, match="Flushed where only StartedCommit"):
        opened(driver).run_round([], RuntimeCheckpoint(1))


def test_an_error_that_nobody_sorted_may_have_happened_or_not() -> None:
    driver = Driver()
    driver.fails = OSError("the cable")
    with pytest.raises(MaybeDone, match="the cable"):
        opened(driver).run_round([], RuntimeCheckpoint(1))
    assert driver.heard[-1] == "close"


def test_fenced_stays_fenced() -> None:
    driver = Driver()
    driver.fails = Fenced("taken over", remedy="End.")
    with pytest.raises(Fenced):
        opened(driver).run_round([], RuntimeCheckpoint(1))


def test_an_error_of_the_runtimes_own_documents_is_not_the_drivers() -> None:
    driver = Driver()

    def stores() -> Any:
        raise LookupError("of the runtime")
        yield

    with pytest.raises(LookupError):
        opened(driver).run_round(stores(), RuntimeCheckpoint(1))
    assert "startCommit" not in driver.heard and driver.heard[-1] == "close"


def test_after_an_error_a_session_is_of_no_more_use() -> None:
    driver = Driver()
    driver.fails = OSError("once")
    session = opened(driver)
    with pytest.raises(MaybeDone):
        session.run_round([], RuntimeCheckpoint(1))
    driver.fails = None
    with pytest.raises(ProtocolViolation):
        session.run_round([], RuntimeCheckpoint(1))
    session.close()


@pytest.mark.parametrize("tick", [6, 7])
def test_a_round_that_does_not_go_forward_is_a_violation(tick: int) -> None:
    with pytest.raises(ProtocolViolation, match="tick 7"):
        opened(Driver(RuntimeCheckpoint(7, None, 1))).run_round([], RuntimeCheckpoint(tick))


def test_without_a_checkpoint_of_the_destination_the_log_counts() -> None:
    log = MemoryRecoveryLog()
    with opened(Driver(), log) as session:
        assert session.checkpoint is None
        session.run_round([], RuntimeCheckpoint(3, "here"))
    assert opened(Driver(), log).checkpoint == RuntimeCheckpoint(3, "here", 1)


def test_a_destination_that_is_ahead_wins_and_the_log_learns_of_it_at_once() -> None:
    log = MemoryRecoveryLog()
    for number in range(1, 5):  # killed each time between its own commit and the log's
        session = opened(Driver(RuntimeCheckpoint(10 * number, None, number)), log)
        assert session.checkpoint == RuntimeCheckpoint(10 * number, None, number)
        assert log.rows["m"][RANGE].checkpoint == session.checkpoint


def test_a_brand_new_destination_says_start() -> None:
    assert opened(Driver(START)).checkpoint is None


def test_state_is_kept_with_the_checkpoint_and_given_to_the_next_session() -> None:
    log, driver = MemoryRecoveryLog(), Driver()
    driver.started = StartedCommit(below_range(RANGE, "orders", {"files": ["a"]}))
    with opened(driver, log) as session:
        session.run_round([], RuntimeCheckpoint(1))
    assert log.states["m"] == {RANGE.text: {"orders": {"files": ["a"]}}}


def test_state_that_comes_with_the_last_acknowledged_is_kept_too() -> None:
    log, driver = MemoryRecoveryLog(), Driver()
    driver.acknowledged = Future()
    driver.acknowledged.set_result(Acknowledged(below_range(RANGE, "orders", {"files": []})))
    opened(driver, log).close()
    assert log.states["m"] == {RANGE.text: {"orders": {"files": []}}}


@pytest.mark.parametrize("update", [StateUpdate({"orders": 1}), StateUpdate({}, merge_patch=False)])
def test_a_split_that_writes_outside_its_range_is_a_violation(update: StateUpdate) -> None:
    driver = Driver()
    driver.started = StartedCommit(update)
    with pytest.raises(ProtocolViolation, match="outside its key range"):
        opened(driver).run_round([], RuntimeCheckpoint(1))


def test_a_session_that_the_log_has_fenced_off_ends() -> None:
    log = MemoryRecoveryLog()
    zombie = opened(Driver(), log)
    assert log.open("m", RANGE).fence == Fence(2)
    with pytest.raises(Fenced):
        zombie.run_round([], RuntimeCheckpoint(1))
