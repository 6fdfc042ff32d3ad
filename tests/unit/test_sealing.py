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
from tidegate.capture.sealing import (
    Numbers,
    Remembered,
    RowsSeen,
    SealedBefore,
    SealedTransaction,
    Sealer,
    TickFacts,
    Waiting,
)
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
    tables = frozenset({"orders", "lines"})
    assert sealer_of(first, second).seal(-1) == [
        SealedTransaction(1, "7", "7:60", 60, 1_700_000_000_000, 3, frozenset({4, 6}), tables)
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
    remembered = Remembered(next_position=3, last_lsn=60, recent=(SealedBefore("7", 60),))
    again = TickFacts(9, [rows(7, "orders", 1, 1)], [begin(7, 40), end(7, 60, orders=1)])
    sealer = sealer_of(again, remembered=remembered)
    assert sealer.seal(9) == []
    assert sealer.pending_rows == {}
    assert sealer.needed_since is None


def test_a_number_that_comes_round_again_is_another_transaction() -> None:
    remembered = Remembered(next_position=3, last_lsn=60, recent=(SealedBefore("7", 60),))
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
    sealer = sealer_of(TickFacts(0, snapshot_words=["COMPLETED"]), remembered=Remembered())
    assert sealer.needed_since == 0
    sealer.take(TickFacts(1, [RowsSeen("snapshot:600:10", "orders", 0, 4, 10)]))
    assert sealer.wants_barrier
    assert sealer.seal(0) == []
    assert groups_of(sealer.seal(1)) == ["snapshot:600:10"]
    assert sealer.needed_since is None


def test_that_word_counts_for_nothing_once_another_snapshot_has_started() -> None:
    sealer = sealer_of(TickFacts(0, snapshot_words=["COMPLETED"]), remembered=Remembered())
    sealer.take(TickFacts(1, [RowsSeen("snapshot:600:10", "orders", 0, 4, 10)], snapshot_words=["STARTED"]))
    assert sealer.seal(1) == []
    sealer.take(TickFacts(2, snapshot_words=["COMPLETED"]))
    assert groups_of(sealer.seal(2)) == ["snapshot:600:10"]


# --- versions that count anew after a restart inside a transaction


def old(xid: int, first: int, last: int, sequence: str, place: str = "") -> RowsSeen:
    """Row events of a Debezium before 3.6.1."""
    return RowsSeen(str(xid), "orders", first, last, 50, sequence, place)


def test_rows_of_one_transaction_that_were_counted_twice_are_refused_whichever_ticks_and_tables_hold_them() -> None:
    sealer = sealer_of(TickFacts(0, [old(7, 1, 2, "20")], [begin(7, 40)]))
    sealer.take(TickFacts(1, [old(7, 3, 3, "20")]))
    with pytest.raises(FixConfiguration, match=r"topic o, partition 1: .* inside transaction 7 and counts") as refused:
        sealer.take(TickFacts(2, [old(7, 1, 1, "35", "topic o, partition 1")]))
    assert "3.6.1" in refused.value.remedy


@pytest.mark.parametrize("begun_again_in", [0, 1])
def test_a_transaction_that_such_a_version_begins_twice_is_refused_before_it_is_sealed(begun_again_in: int) -> None:
    """What was numbered anew may not have been read, and END counts no more than what has come."""
    events: list[list[TransactionEvent]] = [[begin(7, 40)], []]
    events[begun_again_in].append(begin(7, 45))
    sealer = sealer_of(TickFacts(0, [old(7, 1, 2, "20")], events[0]))
    sealer.take(TickFacts(1, [], [*events[1], end(7, 60, orders=2)]))
    with pytest.raises(FixConfiguration, match="restarted inside transaction 7:60"):
        sealer.seal(1)


def test_a_later_version_may_begin_a_transaction_twice() -> None:
    events = [begin(7, 40), begin(7, 45), end(7, 60, orders=2)]
    assert groups_of(sealer_of(TickFacts(0, [rows(7, "orders", 1, 2)], events)).seal(0)) == ["7"]


def test_what_such_a_version_repeats_of_a_sealed_transaction_is_passed_over() -> None:
    events = [begin(7, 40), end(7, 60, orders=2)]
    sealer = sealer_of(TickFacts(0, [old(7, 1, 2, "20")], events))
    assert groups_of(sealer.seal(0)) == ["7"]
    sealer.take(TickFacts(1, [old(7, 1, 2, "")], events))
    assert (sealer.seal(1), sealer.pending_rows) == ([], {})


# --- transactions without an END


def bare(group: str) -> TransactionEvent:
    """A BEGIN as binlog connectors write it for DDL; the next one closes it."""
    return TransactionEvent("BEGIN", group)


def of_binlog(group: str, table: str, first: int, last: int) -> RowsSeen:
    return RowsSeen(group, table, first, last, 0, None, "topic t, partition 0, offsets 4 to 9")


def test_rows_that_come_after_their_uncounted_transaction_is_sealed_are_refused_with_their_place() -> None:
    facts = TickFacts(0, [of_binlog("0-1-7", "orders", 1, 2)], [bare("0-1-7"), bare("0-1-8")])
    sealer = sealer_of(facts)
    told = [one.remembered_as for one in sealer.seal(0)]
    assert [one.group for one in told] == ["0-1-7"]
    restarted = Remembered(next_position=2, recent=tuple(told))
    for one in (sealer, Sealer(COLLECTIONS, restarted)):
        one.take(TickFacts(1, [of_binlog("0-1-7", "orders", 2, 2)]))
        assert one.pending_rows == {}
        with pytest.raises(FixConfiguration, match=r"offsets 4 to 9: row event 4 of transaction 0-1-7 .*table lines"):
            one.take(TickFacts(2, [of_binlog("0-1-7", "lines", 4, 5)]))
        with pytest.raises(FixConfiguration, match="row event 3 of transaction 0-1-7"):
            one.take(TickFacts(2, [of_binlog("0-1-7", "orders", 1, 3)]))


def test_so_are_rows_of_one_that_was_sealed_without_any() -> None:
    """On Postgres the first row event has the LSN of BEGIN."""
    sealer = sealer_of(TickFacts(0, [], [begin(7, 40), begin(8, 50)]))
    assert groups_of(sealer.seal(0)) == ["7"]
    with pytest.raises(FixConfiguration, match="row event 1 of transaction 7"):
        sealer.take(TickFacts(1, [rows(7, "orders", 1, 1, lsn=40)]))


# --- tables that END does not count


def test_a_row_of_a_table_that_its_end_does_not_count_is_refused_before_the_transaction_is_sealed() -> None:
    """Its topic is routed: END counts the table by another name."""
    facts = TickFacts(0, [rows(7, "orders", 1, 1), rows(7, "lines", 2, 2)], [begin(7, 40), end(7, 60, lines=1)])
    with pytest.raises(FixConfiguration, match="transaction 7:60: table orders: 0 row events expected, 1 seen"):
        sealer_of(facts).seal(0)


def test_such_a_row_is_not_taken_for_a_repeat_once_the_transaction_is_sealed() -> None:
    sealer = sealer_of(TickFacts(0, [rows(7, "lines", 2, 2)], [begin(7, 40), end(7, 60, lines=1)]))
    told = [one.remembered_as for one in sealer.seal(0)]
    restarted = Remembered(next_position=2, last_lsn=60, recent=tuple(told))
    for one in (sealer, Sealer(COLLECTIONS, restarted)):
        one.take(TickFacts(1, [rows(7, "lines", 2, 2)]))
        assert one.pending_rows == {}
        with pytest.raises(FixConfiguration, match="its END counts no row event of table orders: but one has come"):
            one.take(TickFacts(2, [rows(7, "orders", 1, 1)]))


# --- commit order


def test_a_transaction_that_comes_behind_a_later_one_is_refused_not_taken_for_a_repeat() -> None:
    """Recordings called 10.jsonl and 2.jsonl are read in this order."""
    sealer = sealer_of(TickFacts(0, [rows(9, "orders", 1, 1)], [begin(9, 80), end(9, 90, orders=1)]))
    with pytest.raises(FixConfiguration, match=r"7:60 comes behind 9:90, .*: not in commit order") as refused:
        sealer.take(TickFacts(1, [], [begin(7, 40), end(7, 60, orders=1)]))
    assert "names" in refused.value.remedy


def test_the_order_is_kept_over_a_restart() -> None:
    remembered = Remembered(next_position=3, last_lsn=90, recent=(SealedBefore("9", 90),))
    with pytest.raises(FixConfiguration, match="7:60 comes behind one that ends at LSN 90"):
        sealer_of(TickFacts(1, [], [begin(7, 40), end(7, 60, orders=1)]), remembered=remembered)


def test_a_repeat_of_what_is_sealed_or_waits_changes_nothing() -> None:
    both = [begin(7, 40), end(7, 60, orders=1), begin(8, 41), end(8, 70, orders=1)]
    sealer = sealer_of(TickFacts(0, [rows(7, "orders", 1, 1)], both))
    assert groups_of(sealer.seal(0)) == ["7"]
    sealer.take(TickFacts(1, [rows(7, "orders", 1, 1)], both))
    assert sealer.pending_transactions == 1
    sealer.take(TickFacts(2, [rows(8, "orders", 1, 1)]))
    assert groups_of(sealer.seal(0)) == ["8"]


def test_of_very_many_transactions_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.capture.sealing.REMEMBERED_TRANSACTIONS", 3)
    events = {xid: [begin(xid, 10 * xid), end(xid, 10 * xid + 5, idle=0)] for xid in range(1, 6)}
    sealer = sealer_of(TickFacts(0, [], [event for one in events.values() for event in one]))
    assert len(sealer.seal(0)) == 5
    sealer.take(TickFacts(1, [], [*events[3], *events[4], *events[5]]))
    assert sealer.seal(1) == []
    with pytest.raises(FixConfiguration, match="2:25 comes behind 5:55"):
        sealer.take(TickFacts(2, [], events[2]))


# --- snapshots and what comes around them


def test_binlog_snapshots_follow_each_other_by_file_and_then_by_position() -> None:
    torn, whole = "snapshot:mysql-bin.000009:900", "snapshot:mysql-bin.000010:150"
    sealer = sealer_of(TickFacts(0, [RowsSeen(torn, "orders", 0, 4, 0)]), remembered=Remembered())
    sealer.take(TickFacts(1, [RowsSeen(whole, "orders", 5, 7, 0)], last_snapshot_rows=frozenset({whole})))
    sealer.take(TickFacts(2, [RowsSeen(torn, "orders", 8, 8, 0)]))
    assert [(one.group, one.rows) for one in sealer.seal(2)] == [(whole, 3)]


def baseline(lsn: int, tick: int = 0, words: Sequence[str] = ("STARTED", "COMPLETED")) -> TickFacts:
    group = f"snapshot:600:{lsn}"
    return TickFacts(tick, [RowsSeen(group, "orders", 0, 4, lsn)], (), frozenset({group}), words)


def test_a_transaction_that_the_snapshot_holds_already_is_refused() -> None:
    """The slot was older than the snapshot: what is streamed again would undo what came in between."""
    sealer = sealer_of(baseline(65), remembered=Remembered())
    assert groups_of(sealer.seal(0)) == ["snapshot:600:65"]
    sealer.take(TickFacts(1, [rows(7, "orders", 1, 1)], [begin(7, 40), end(7, 60, orders=1)]))
    with pytest.raises(FixConfiguration, match="7:60 committed before the snapshot snapshot:600:65") as refused:
        sealer.seal(1)
    assert "create the slot" in refused.value.remedy


def test_a_transaction_of_other_tables_may_be_older_than_the_snapshot() -> None:
    events = [begin(7, 40), end(7, 60, elsewhere=1), begin(8, 61), end(8, 70, orders=1)]
    sealer = sealer_of(baseline(65), TickFacts(1, [rows(8, "orders", 1, 1)], events), remembered=Remembered())
    assert groups_of(sealer.seal(1)) == ["snapshot:600:65", "7", "8"]


BASELINE = Remembered(next_position=1, last_snapshot="snapshot:600:10")


def test_another_snapshot_behind_the_baseline_is_refused() -> None:
    """It may be of one table: taken as a baseline it would empty the others."""
    sealer = sealer_of(baseline(10), remembered=Remembered())
    assert groups_of(sealer.seal(0)) == ["snapshot:600:10"]
    sealer.take(baseline(90, 1, words=()))
    assert sealer.wants_barrier
    assert sealer.seal(0) == []
    with pytest.raises(FixConfiguration, match=r"another snapshot \(snapshot:600:90\)"):
        sealer.seal(1)


def test_a_snapshot_of_some_tables_is_refused_though_it_was_announced() -> None:
    sealer = sealer_of(baseline(90, words=("STARTED", "PARTIAL", "COMPLETED")), remembered=BASELINE)
    with pytest.raises(FixConfiguration, match="they would empty all other tables"):
        sealer.seal(0)


def test_another_snapshot_that_was_announced_replaces_the_baseline() -> None:
    sealer = sealer_of(TickFacts(3, snapshot_words=["STARTED"]), remembered=BASELINE)
    sealer.take(baseline(90, 4, words=["COMPLETED"]))
    assert groups_of(sealer.seal(4)) == ["snapshot:600:90"]
    sealer.take(baseline(95, 5, words=()))
    with pytest.raises(FixConfiguration, match="another snapshot"):
        sealer.seal(5)


def test_that_it_was_announced_is_known_after_a_restart() -> None:
    announced = TickFacts(3, snapshot_words=["STARTED"])
    sealer = sealer_of(announced, remembered=BASELINE)
    assert sealer.seal(3) == []
    assert sealer.needed_since == 3
    restarted = sealer_of(announced, baseline(90, 4, words=["COMPLETED"]), remembered=BASELINE)
    assert groups_of(restarted.seal(4)) == ["snapshot:600:90"]
    assert restarted.needed_since is None


def test_an_announcement_is_over_when_that_snapshot_is_whole_without_a_row() -> None:
    sealer = sealer_of(TickFacts(3, snapshot_words=["STARTED", "COMPLETED"]), remembered=BASELINE)
    assert sealer.seal(3) == []
    assert sealer.needed_since is None
    sealer.take(baseline(90, 4, words=()))
    with pytest.raises(FixConfiguration, match="another snapshot"):
        sealer.seal(4)


def test_a_snapshot_that_begins_before_the_baseline_is_sealed_replaces_it_later() -> None:
    """The connector fell between the word that its snapshot is whole and its own note of that."""
    sealer = sealer_of(baseline(10), TickFacts(1, snapshot_words=["STARTED"]), remembered=Remembered())
    assert groups_of(sealer.seal(1)) == ["snapshot:600:10"]
    sealer.take(baseline(90, 2, words=["COMPLETED"]))
    assert groups_of(sealer.seal(2)) == ["snapshot:600:90"]


def cut_at_its_end(lsn: int, tick: int, *, ended: bool) -> TickFacts:
    """Rows of a snapshot whose last row is durable, and the word of its end is not."""
    group = f"snapshot:600:{lsn}"
    return TickFacts(tick, [RowsSeen(group, "orders", tick, tick, lsn)], (), frozenset({group} if ended else ()))


@pytest.mark.parametrize(
    ("has_word_of_its_start", "ends_after_the_next_start"), [(False, False), (True, False), (True, True)]
)
def test_a_snapshot_that_follows_one_cut_at_its_end_is_announced_before_that_is_sealed(
    has_word_of_its_start: bool, ends_after_the_next_start: bool
) -> None:
    started = ["STARTED"] if has_word_of_its_start else []
    sealer = sealer_of(TickFacts(0, snapshot_words=started), remembered=Remembered())
    sealer.take(cut_at_its_end(10, 1, ended=not ends_after_the_next_start))
    sealer.take(TickFacts(2, snapshot_words=["STARTED"]))
    sealer.take(cut_at_its_end(10, 3, ended=True))
    assert groups_of(sealer.seal(3)) == ["snapshot:600:10"]
    sealer.take(cut_at_its_end(90, 4, ended=True))
    assert groups_of(sealer.seal(4)) == ["snapshot:600:90"]
    assert sealer.needed_since is None


def test_the_word_that_the_snapshot_is_whole_takes_back_what_was_announced() -> None:
    """The first one was cut, and the second is the baseline: nothing is announced behind it."""
    sealer = sealer_of(TickFacts(0, snapshot_words=["STARTED"]), remembered=Remembered())
    sealer.take(cut_at_its_end(10, 1, ended=False))
    sealer.take(TickFacts(2, snapshot_words=["STARTED"]))
    sealer.take(cut_at_its_end(20, 3, ended=True))
    assert groups_of(sealer.seal(3)) == ["snapshot:600:20"]
    sealer.take(TickFacts(4, snapshot_words=["COMPLETED"]))
    assert sealer.wants_barrier
    sealer.seal(4)
    assert (sealer.wants_barrier, sealer.needed_since) == (False, None)
    sealer.take(baseline(90, 5, words=()))
    with pytest.raises(FixConfiguration, match="another snapshot"):
        sealer.seal(5)


# --- counting


def test_what_is_pending_is_counted_once_until_something_comes_or_is_sealed() -> None:
    sealer = sealer_of(TickFacts(0, [rows(7, "orders", 1, 2), rows(7, "orders", 2, 3)], [begin(7, 40)]))
    assert sealer.pending_rows == {"orders": 3}
    assert sealer.pending_rows is sealer.pending_rows
    assert sealer.waiting() is sealer.waiting()
    sealer.take(TickFacts(1, [rows(7, "orders", 4, 4)]))
    assert sealer.pending_rows == {"orders": 4}
    assert [one.seen for one in sealer.waiting()] == [4]
    sealer.take(TickFacts(2, [], [end(7, 60, orders=4)]))
    assert groups_of(sealer.seal(2)) == ["7"]
    assert (sealer.pending_rows, sealer.waiting()) == ({}, [])


def count_of(ranges: Sequence[tuple[int, int]]) -> int:
    """As it is counted in one go, and after each range."""
    together, one_by_one = Numbers(*ranges[0]), Numbers(*ranges[0])
    for first, last in ranges[1:]:
        together.add(first, last)
        one_by_one.add(first, last)
        assert one_by_one.count > 0
    assert together.count == one_by_one.count
    return together.count


@pytest.mark.parametrize(
    ("ranges", "count"),
    [([(1, 3)], 3), ([(1, 3), (2, 5)], 5), ([(4, 9), (1, 2), (5, 6)], 8), ([(0, 0), (0, 0)], 1), ([(1, 1), (3, 3)], 2)],
)
def test_repeated_numbers_count_once(ranges: list[tuple[int, int]], count: int) -> None:
    assert count_of(ranges) == count


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1))
def test_ranges_count_as_the_numbers_in_them(spans: list[tuple[int, int]]) -> None:
    ranges = [(first, first + more) for first, more in spans]
    assert count_of(ranges) == len({number for first, last in ranges for number in range(first, last + 1)})
