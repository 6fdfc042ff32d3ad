"""Sealing: whole transactions, in the order of their commits, each once; whatever order the records arrive in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sealing_simulation import (
    COLLECTIONS,
    Announced,
    Committed,
    Record,
    Row,
    Simulation,
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
    """Generations that were cut short, and at the end a whole one; announced or not."""
    last, announced = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    started = [Announced(False)] if announced else []
    kinds = st.lists(st.lists(SUBSCRIBED, min_size=1, max_size=4), max_size=2)
    torn = [[*started, *snapshot(number, rows, last=False)] for number, rows in enumerate(draw(kinds))]
    whole = snapshot(7, draw(st.lists(SUBSCRIBED, min_size=1, max_size=5)), last=last)
    return [*chain(*torn), *started, *whole, *([Announced(True)] if announced else [])]


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


# --- one at a time


def begin(xid: int, lsn: int) -> TransactionEvent:
    return TransactionEvent("BEGIN", f"{xid}:{lsn}")


def end(xid: int, lsn: int, **counts: int) -> TransactionEvent:
    promised = [Collected(f"public.{table}", count) for table, count in counts.items()]
    return TransactionEvent("END", f"{xid}:{lsn}", sum(counts.values()), promised, 1_700_000_000_000)


def rows(xid: int, table: str, first: int, last: int, lsn: int = 50) -> RowsSeen:
    return RowsSeen(str(xid), table, first, last, lsn)


BEHIND_THE_SNAPSHOT = Remembered(next_position=1)


def sealer_of(*ticks: TickFacts, remembered: Remembered = BEHIND_THE_SNAPSHOT) -> Sealer:
    """A sealer that has taken these facts."""
    sealer = Sealer(COLLECTIONS, remembered)
    for facts in ticks:
        sealer.take(facts)
    return sealer


def groups_of(sealed: Sequence[SealedTransaction]) -> list[str]:
    return [one.group for one in sealed]


def test_a_whole_transaction_says_where_it_stands_and_which_ticks_hold_its_rows() -> None:
    first = TickFacts(4, [rows(7, "orders", 1, 1)], [begin(7, 40)])
    second = TickFacts(6, [rows(7, "lines", 2, 3)], [end(7, 60, orders=1, lines=2)])
    assert sealer_of(first, second).seal(-1) == [
        SealedTransaction(1, "7", "7:60", 60, 1_700_000_000_000, 3, frozenset({4, 6}))
    ]


def test_a_count_that_is_not_met_is_reported_with_transaction_table_expected_and_seen() -> None:
    sealer = sealer_of(TickFacts(0, [rows(7, "lines", 2, 4)], [begin(7, 40), end(7, 60, orders=1, lines=5)]))
    assert sealer.seal(0) == []
    assert sealer.waiting() == [Waiting("7:60", "orders", 1, 0), Waiting("7:60", "lines", 5, 3)]
    assert str(sealer.waiting()[1]) == "transaction 7:60: table lines: 5 row events expected, 3 seen"


def test_rows_without_an_end_are_reported_with_their_number() -> None:
    sealer = sealer_of(TickFacts(0, [rows(7, "lines", 1, 2)], [begin(7, 40)]))
    assert sealer.seal(0) == []
    assert [str(one) for one in sealer.waiting()] == [
        "transaction 7:40: its END has not come (2 row events of lines seen)"
    ]


def test_rows_whose_transaction_never_shows_up_are_reported() -> None:
    sealer = sealer_of(TickFacts(0, [rows(7, "lines", 1, 2)]))
    assert sealer.seal(0) == []
    assert sealer.waiting() == [Waiting("7", "lines", None, 2)]


def test_an_unfinished_transaction_holds_back_all_that_committed_after_it() -> None:
    events = [begin(7, 40), end(7, 60, orders=1), begin(8, 41), end(8, 70, orders=1)]
    sealer = sealer_of(TickFacts(0, [rows(8, "orders", 1, 1)], events))
    assert sealer.seal(0) == []
    sealer.take(TickFacts(1, [rows(7, "orders", 1, 1)]))
    assert groups_of(sealer.seal(0)) == ["7", "8"]


def test_a_table_that_nobody_subscribes_to_holds_nothing_back() -> None:
    sealer = sealer_of(TickFacts(0, [], [begin(7, 40), end(7, 60, elsewhere=9, idle=0)]))
    assert groups_of(sealer.seal(-1)) == ["7"]


def test_more_rows_than_were_promised_are_refused() -> None:
    sealer = sealer_of(TickFacts(0, [rows(7, "orders", 1, 3)], [begin(7, 40), end(7, 60, orders=2)]))
    with pytest.raises(FixConfiguration, match="transaction 7:60: table orders: 2 row events expected, 3 seen"):
        sealer.seal(0)


def test_what_a_restarted_run_remembers_is_not_sealed_again() -> None:
    remembered = Remembered(next_position=3, last_lsn=60, recent=(("7", 60),))
    again = TickFacts(9, [rows(7, "orders", 1, 1)], [begin(7, 40), end(7, 60, orders=1)])
    sealer = sealer_of(again, remembered=remembered)
    assert sealer.seal(9) == []
    assert sealer.pending_rows == {}
    assert sealer.needed_since is None


def test_a_number_that_comes_round_again_is_another_transaction() -> None:
    remembered = Remembered(next_position=3, last_lsn=60, recent=(("7", 60),))
    later = TickFacts(9, [rows(7, "orders", 1, 1, lsn=905)], [begin(7, 900), end(7, 910, orders=1)])
    assert [one.position for one in sealer_of(later, remembered=remembered).seal(-1)] == [3]


def test_an_open_transaction_that_a_repeat_follows_is_not_taken_for_finished() -> None:
    """The connector fell inside the transaction with this id and goes on from before the one that was sealed."""
    sealer = sealer_of(TickFacts(0, [], [TransactionEvent("BEGIN", "0-1-7"), TransactionEvent("END", "0-1-7")]))
    assert groups_of(sealer.seal(0)) == ["0-1-7"]
    half = [TransactionEvent("BEGIN", "0-1-8"), TransactionEvent("BEGIN", "0-1-7"), TransactionEvent("END", "0-1-7")]
    sealer.take(TickFacts(1, [RowsSeen("0-1-8", "orders", 1, 1, 0)], half))
    assert sealer.seal(1) == []
    promised = [Collected("public.orders", 2)]
    whole = [TransactionEvent("BEGIN", "0-1-8"), TransactionEvent("END", "0-1-8", 2, promised)]
    sealer.take(TickFacts(2, [RowsSeen("0-1-8", "orders", 1, 2, 0)], whole))
    assert [(one.group, one.rows) for one in sealer.seal(2)] == [("0-1-8", 2)]


def test_a_snapshot_cut_short_is_replaced_by_the_next_one() -> None:
    torn, whole = (RowsSeen(f"snapshot:600:{lsn}", "orders", 0, 4, lsn) for lsn in (10, 20))
    sealer = sealer_of(TickFacts(0, [torn]), TickFacts(1, [whole]), remembered=Remembered())
    sealer.take(TickFacts(2, last_snapshot_rows=frozenset({"snapshot:600:20"})))
    sealer.take(TickFacts(3, [torn]))
    assert groups_of(sealer.seal(3)) == ["snapshot:600:20"]
    assert sealer.pending_rows == {}


def test_a_snapshot_without_an_end_is_reported() -> None:
    sealer = sealer_of(TickFacts(0, [RowsSeen("snapshot:600:10", "orders", 0, 4, 10)]), remembered=Remembered())
    assert sealer.seal(0) == []
    assert sealer.waiting() == [Waiting("snapshot:600:10", "orders", None, 5)]


def test_the_word_that_the_first_snapshot_is_whole_may_come_before_its_rows() -> None:
    sealer = sealer_of(TickFacts(0, snapshot_completed=True), remembered=Remembered())
    assert sealer.needed_since == 0
    sealer.take(TickFacts(1, [RowsSeen("snapshot:600:10", "orders", 0, 4, 10)]))
    assert sealer.wants_barrier
    assert sealer.seal(0) == []
    assert groups_of(sealer.seal(1)) == ["snapshot:600:10"]
    assert sealer.needed_since is None


def test_that_word_counts_for_nothing_once_another_snapshot_has_started() -> None:
    sealer = sealer_of(TickFacts(0, snapshot_completed=True), remembered=Remembered())
    sealer.take(TickFacts(1, [RowsSeen("snapshot:600:10", "orders", 0, 4, 10)], snapshot_completed=False))
    assert sealer.seal(1) == []
    sealer.take(TickFacts(2, snapshot_completed=True))
    assert groups_of(sealer.seal(2)) == ["snapshot:600:10"]


@pytest.mark.parametrize(
    ("ranges", "count"),
    [([(1, 3)], 3), ([(1, 3), (2, 5)], 5), ([(4, 9), (1, 2), (5, 6)], 8), ([(0, 0), (0, 0)], 1), ([(1, 1), (3, 3)], 2)],
)
def test_repeated_numbers_count_once(ranges: list[tuple[int, int]], count: int) -> None:
    assert distinct(ranges) == count


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1))
def test_ranges_count_as_the_numbers_in_them(spans: list[tuple[int, int]]) -> None:
    ranges = [(first, first + more) for first, more in spans]
    assert distinct(ranges) == len({number for first, last in ranges for number in range(first, last + 1)})
