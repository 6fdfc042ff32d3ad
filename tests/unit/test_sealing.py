"""Sealing: whole transactions, in the order of their commits, each once; whatever order the records arrive in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sealing_simulation import (
    COLLECTIONS,
    Committed,
    Completed,
    Record,
    Row,
    Simulation,
    partition_of,
    shuffled,
    snapshot,
    transaction,
)
from tidegate.capture.debezium import Collected, TransactionEvent
from tidegate.capture.sealing import Remembered, RowsSeen, SealedTransaction, Sealer, TickFacts, Waiting, distinct
from tidegate.errors import FixConfiguration

PARTITIONS = st.integers(0, 2)
SUBSCRIBED = st.tuples(st.sampled_from(["orders", "lines"]), PARTITIONS)
ANY_TABLE = st.tuples(st.sampled_from(["orders", "lines", "unread"]), PARTITIONS)
EXTRA = st.dictionaries(st.sampled_from(["public.idle", "public.orders", "java.lang.Message"]), st.just(0), max_size=2)


@dataclass(frozen=True)
class History:
    """What a source writes, records in its own order, and what must be sealed of it."""

    stream: tuple[Record, ...]
    snapshot: str | None
    committed: tuple[Committed, ...]

    @property
    def open(self) -> Committed | None:
        """The last transaction, if nothing has closed it: neither its END nor a BEGIN after it."""
        return self.committed[-1] if self.committed and not self.committed[-1].ended else None

    @property
    def groups(self) -> tuple[str, ...]:
        closed = self.committed[:-1] if self.open else self.committed
        return (*([self.snapshot] if self.snapshot else []), *(one.group for one in closed))

    @property
    def subscribed(self) -> dict[str, set[tuple[str, int | None]]]:
        return {one.group: one.subscribed for one in self.committed}


@st.composite
def transactions(draw: st.DrawFn) -> list[Committed]:
    binlog = draw(st.booleans())
    found = []
    for number in range(draw(st.integers(0, 5))):
        end = draw(st.integers(0, 3)) > 0
        most = 6 if end or binlog else 0  # Postgres sends an END for whatever has rows
        found.append(
            transaction(
                number,
                draw(st.lists(ANY_TABLE, max_size=most)),
                binlog=binlog,
                end=end,
                extra=draw(EXTRA) if end else {},
            )
        )
    return found


@st.composite
def snapshots(draw: st.DrawFn) -> list[Record]:
    """Generations that were cut short, and at the end a whole one, or none at all."""
    whole = draw(st.lists(SUBSCRIBED, min_size=1, max_size=5))
    kinds = st.lists(st.lists(SUBSCRIBED, min_size=1, max_size=4), max_size=2)
    records = [row for number, rows in enumerate(draw(kinds)) for row in snapshot(number, rows, last=False)]
    last, completed = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    records += snapshot(7, whole, last=last)
    return [*records, Completed()] if completed else records


def with_restarts(draw: st.DrawFn, stream: Sequence[Record]) -> list[Record]:
    """The connector was stopped at any record, and began again at any earlier one."""
    written: list[Record] = []
    start = 0
    for _ in range(draw(st.integers(0, 2))):
        stop = draw(st.integers(start, len(stream)))
        written += stream[start:stop]
        start = draw(st.integers(0, stop))
    return [*written, *stream[start:]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    first = draw(st.one_of(st.just([]), snapshots()))
    committed = draw(transactions())
    stream = [record for one in committed for record in one.records]
    generations = [record.group for record in first if isinstance(record, Row)]
    whole = generations[-1] if generations else None
    return History((*first, *with_restarts(draw, stream)), whole, tuple(committed))


def assert_sealed_as_committed(simulation: Simulation, history: History) -> None:
    """A prefix of the history, each transaction once, with all of its rows and the ticks that hold them."""
    sealed, rows = simulation.sealed, history.subscribed
    assert [one.position for one in sealed] == list(range(len(sealed)))
    assert tuple(one.group for one in sealed) == history.groups[: len(sealed)]
    for one in sealed:
        if not one.is_snapshot:
            assert one.rows == len(rows[one.group])
            assert {simulation.first_seen[one.group, *row] for row in rows[one.group]} <= one.ticks


def assert_finished(simulation: Simulation, history: History) -> None:
    assert tuple(one.group for one in simulation.sealed) == history.groups
    left = Counter(table for table, _ in history.open.subscribed) if history.open else {}
    assert {one.table: one.seen for one in simulation.sealer.waiting()} == left
    assert simulation.sealer.pending_rows == left
    assert (simulation.sealer.needed_since is None) == (history.open is None)


@given(histories(), st.randoms(use_true_random=False), st.data())
@settings(deadline=None, max_examples=400)
def test_an_import_in_any_order_seals_every_transaction_once_in_commit_order(
    history: History, order: random.Random, data: st.DataObject
) -> None:
    arriving = shuffled(history.stream, order)
    simulation = Simulation(filled=False)
    while arriving:
        count = data.draw(st.integers(1, 12))
        simulation.append(arriving[:count])
        arriving = arriving[count:]
        simulation.filled = not arriving
        simulation.step(data.draw(st.integers(1, 8)))
        assert_sealed_as_committed(simulation, history)
        if data.draw(st.integers(0, 3)) == 0:
            simulation.restart()
    while simulation.step(data.draw(st.integers(1, 20))):
        assert_sealed_as_committed(simulation, history)
    assert_finished(simulation, history)


@given(histories(), st.randoms(use_true_random=False), st.data())
@settings(deadline=None, max_examples=400)
def test_a_live_stream_in_ticks_of_any_size_seals_every_transaction_once_in_commit_order(
    history: History, order: random.Random, data: st.DataObject
) -> None:
    arriving = list(history.stream)
    simulation = Simulation()
    while arriving:
        count = data.draw(st.integers(1, 12))
        simulation.append(arriving[:count])
        arriving = arriving[count:]
        simulation.step(data.draw(st.integers(1, 8)))
        assert_sealed_as_committed(simulation, history)
        if data.draw(st.integers(0, 3)) == 0:
            simulation.restart()
    while simulation.step(data.draw(st.integers(1, 20))):
        assert_sealed_as_committed(simulation, history)
    assert_finished(simulation, history)
