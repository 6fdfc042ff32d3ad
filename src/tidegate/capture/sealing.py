"""Which source transactions are whole, in commit order. Pure: facts in, sealed transactions out.

The order is that of the transaction topic. A transaction is whole when every subscribed table has as many distinct
row events as its END promises. What has no count (a snapshot, a transaction of a binlog connector without END) is whole
once everything that the log held after its last sign of life was seen has been read: a `barrier`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tidegate.capture.debezium import (
    TransactionEvent,
    commit_lsn,
    snapshot_lsn,
    snapshot_order,
    transaction_group,
)
from tidegate.errors import FixConfiguration

REMEMBERED_TRANSACTIONS = 200_000
SNAPSHOT = "snapshot:"
Ranges = tuple[tuple[int, int], ...]


class RowsSeen(NamedTuple):
    """Row events of one transaction and table with consecutive numbers `first` to `last`."""

    group: str
    table: str
    first: int
    last: int
    lsn: int
    sequence: str | None = None  # what its rows share; only of versions that count anew after a restart
    place: str = ""  # where in the log they were read


@dataclass(frozen=True)
class TickFacts:
    """What ingesting one tick's ranges has shown."""

    tick: int
    rows: Iterable[RowsSeen] = ()
    transactions: Iterable[TransactionEvent] = ()
    last_snapshot_rows: frozenset[str] = frozenset()
    snapshot_words: Sequence[
        str
    ] = ()  # of initial snapshots, in order: STARTED, COMPLETED; PARTIAL: of some tables only
    streamed: frozenset[tuple[str, int]] = frozenset()
    partitions: frozenset[tuple[str, int]] = frozenset()


class SealedBefore(NamedTuple):
    """By this a repeat is told from another transaction with the same number, and from rows that END did not count."""

    group: str
    lsn: int
    tables: frozenset[str] | None = None  # those that END counted; None if that is not known
    numbers: Ranges | None = None  # of all row events that came, where no END counted them


@dataclass(frozen=True)
class SealedTransaction:
    """A whole source transaction (or snapshot), its place in commit order, and the ticks that hold its rows."""

    position: int
    group: str
    id: str
    lsn: int | None
    commit_ms: int | None
    rows: int
    ticks: frozenset[int]
    tables: frozenset[str] | None = None  # those that END counted; None without an END
    numbers: Ranges | None = None  # of its row events, without an END

    @property
    def is_snapshot(self) -> bool:
        return self.group.startswith(SNAPSHOT)

    @property
    def remembered_as(self) -> SealedBefore:
        return SealedBefore(self.group, commit_lsn(self.id) or 0, self.tables, self.numbers)


@dataclass(frozen=True)
class Remembered:
    """What the timeline knows of earlier seals; enough to go on after a restart."""

    next_position: int = 0
    last_lsn: int = -1
    last_snapshot: str | None = None
    recent: tuple[SealedBefore, ...] = ()


class Numbers:
    """Which numbers have come, in closed ranges; they are merged and counted when asked for, once for all that came."""

    __slots__ = ("_count", "_is_counted", "_ranges")

    def __init__(self, first: int, last: int) -> None:
        self._ranges = [(first, last)]
        self._count, self._is_counted = last - first + 1, True

    def add(self, first: int, last: int) -> None:
        self._ranges.append((first, last))
        self._is_counted = False

    @property
    def count(self) -> int:
        if not self._is_counted:
            self._ranges = _merged(self._ranges)
            self._count, self._is_counted = sum(last - first + 1 for first, last in self._ranges), True
        return self._count

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(self._ranges)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ranges.sort()
    merged = ranges[:1]
    for first, last in ranges:
        begun, reached = merged[-1]
        if first > reached + 1:
            merged.append((first, last))
        elif last > reached:
            merged[-1] = (begun, last)
    return merged


@dataclass(frozen=True)
class Waiting:
    """Why a transaction is not sealed yet: what its END promises of a table, and what has come."""

    id: str
    table: str
    expected: int | None
    seen: int

    def __str__(self) -> str:
        if self.expected is None:
            return f"transaction {self.id}: its END has not come ({self.seen} row events of {self.table} seen)"
        return f"transaction {self.id}: table {self.table}: {self.expected} row events expected, {self.seen} seen"


@dataclass(slots=True)
class _Open:
    id: str
    group: str
    tick: int
    expected: dict[str, int] | None = None
    closed: int | None = None  # the tick in which it was closed
    lsn: int | None = None
    commit_ms: int | None = None
    begun_again: bool = False


@dataclass(slots=True)
class _Seen:
    numbers: dict[str, Numbers] = field(default_factory=dict)
    ticks: set[int] = field(default_factory=set)
    sequence: str | None = None

    @property
    def ranges(self) -> Ranges:
        return tuple(_merged([one for numbers in self.numbers.values() for one in numbers.ranges]))


@dataclass
class _Snapshot:
    group: str
    tick: int
    ended: int | None = None  # the tick in which its end was learnt


class Sealer:
    """Collects facts tick by tick and says which transactions may be sealed, each exactly once, in order."""

    def __init__(self, tables: Mapping[str, str], remembered: Remembered) -> None:
        """`tables` maps a data collection, as END names it, to the name of the table that subscribes to it."""
        self._tables = tables
        self._queue: deque[_Open] = deque()
        self._seen: dict[str, _Seen] = {}
        self._closed: dict[str, _Open] = {}  # of the queue, those that have their END or were left
        self._sealed: OrderedDict[str, SealedBefore] = OrderedDict((one.group, one) for one in remembered.recent)
        self._position = remembered.next_position
        self._last_lsn, self._last_id = remembered.last_lsn, ""
        self._last_snapshot = remembered.last_snapshot
        self._snapshot: _Snapshot | None = None
        self._completed: int | None = None  # the tick that said so of the newest snapshot; its rows may come later
        self._announced: int | None = None  # the tick that said that another snapshot than the first has started
        self._has_started = False
        self._fresh = remembered.next_position == 0
        self._first_begin: int | None = None
        self._streamed: set[tuple[str, int]] = set()
        self._partitions: set[tuple[str, int]] = set()
        self._counted: dict[frozenset[str], frozenset[str]] = {}
        self._pending_rows: dict[str, int] | None = None  # until something changes
        self._waiting: list[Waiting] | None = None

    # --- facts in

    def take(self, facts: TickFacts) -> None:
        """Takes the facts of one tick; ticks come in order, a repeated one changes nothing."""
        self._partitions |= facts.partitions
        self._streamed |= facts.streamed
        self._changed()
        for rows in facts.rows:
            self._rows(rows, facts.tick)
        for event in facts.transactions:
            self._transaction(event, facts.tick)
        self._snapshot_end(facts)

    def _rows(self, rows: RowsSeen, tick: int) -> None:
        group, table, first, last, _, sequence, _ = rows
        if group.startswith(SNAPSHOT):
            if not self._snapshot_rows(group, tick):
                return
        elif self._is_repeat(rows):
            return
        seen = self._seen.get(group)
        if seen is None:
            seen = self._seen[group] = _Seen()
        if sequence is not None:
            self._check_sequence(seen, rows)
        numbers = seen.numbers.get(table)
        if numbers is None:
            seen.numbers[table] = Numbers(first, last)
        else:
            numbers.add(first, last)
        seen.ticks.add(tick)

    @staticmethod
    def _check_sequence(seen: _Seen, rows: RowsSeen) -> None:
        if seen.sequence is not None and seen.sequence != rows.sequence:
            raise _counted_anew(rows.group, rows.place)
        seen.sequence = rows.sequence

    def _changed(self) -> None:
        self._pending_rows = self._waiting = None

    def _is_repeat(self, rows: RowsSeen) -> bool:
        """Numbers of transactions are used again after four thousand million: a later LSN means another one."""
        sealed = self._sealed.get(rows.group)
        if sealed is None or rows.lsn > sealed.lsn:
            return False
        if sealed.tables is not None and rows.table not in sealed.tables:
            raise _not_counted(rows.group, rows.table)
        if sealed.numbers is not None:
            _check_came_before(rows, sealed.numbers)
        return True

    def _snapshot_rows(self, group: str, tick: int) -> bool:
        """Notes a generation; False if a later one has replaced it."""
        current = self._snapshot.group if self._snapshot else self._last_snapshot
        if current is not None and group != current and snapshot_order(group) < snapshot_order(current):
            return False
        if group == self._last_snapshot:
            return False
        if self._snapshot is None or self._snapshot.group != group:
            if self._snapshot:
                self._seen.pop(self._snapshot.group, None)
            self._snapshot = _Snapshot(group, tick)
        return True

    def _snapshot_end(self, facts: TickFacts) -> None:
        for word in facts.snapshot_words:
            self._snapshot_word(word, facts.tick)
        snapshot = self._snapshot
        if snapshot is None or snapshot.ended is not None:
            return
        begun = self._fresh and self._first_begin is not None
        if snapshot.group in facts.last_snapshot_rows or begun or self._stream_passed(snapshot):
            snapshot.ended = facts.tick

    def _snapshot_word(self, word: str, tick: int) -> None:
        """A start announces another snapshot, unless it is that of the very first one."""
        if word == "STARTED":
            self._announced = tick if self._follows_another() else None
            self._completed, self._has_started = None, True
        elif word == "PARTIAL":
            self._announced = None
        else:
            self._announced = None if self._fresh else self._announced
            self._completed = tick

    def _follows_another(self) -> bool:
        """The one before it may be sealed first, also if the connector fell before it said that it is whole."""
        has_ended = self._snapshot is not None and self._snapshot.ended is not None
        return not self._fresh or self._has_started or has_ended or self._completed is not None

    def _stream_passed(self, snapshot: _Snapshot) -> bool:
        behind = snapshot_lsn(snapshot.group)
        return behind is not None and any(entry.lsn is not None and entry.lsn > behind for entry in self._queue)

    def _transaction(self, event: TransactionEvent, tick: int) -> None:
        group = transaction_group(event.id)
        if self._first_begin is None:
            self._first_begin = tick
        if event.status == "BEGIN":
            self._begin(event, group, tick)
        elif event.status == "END":
            self._end(event, group, tick)

    def _begin(self, event: TransactionEvent, group: str, tick: int) -> None:
        if self._left_open is not None:
            if self._left_open.group == group:
                self._left_open.begun_again = True
                return
            self._leave(tick, is_repeat=self._is_known(group, event.id))
        self._queue.append(_Open(event.id, group, tick))

    @property
    def _left_open(self) -> _Open | None:
        return self._queue[-1] if self._queue and self._queue[-1].closed is None else None

    def _leave(self, tick: int, is_repeat: bool) -> None:
        """What follows an open transaction closes it; but a repeat of what is known says that both come again."""
        left = self._queue.pop()
        if not is_repeat and not self._is_known(left.group, left.id):
            left.closed = tick
            self._queue.append(left)
            self._closed[left.group] = left

    def _is_known(self, group: str, begin_id: str) -> bool:
        """A transaction that is sealed, or closed and waiting for that."""
        sealed = self._sealed.get(group)
        return group in self._closed or (sealed is not None and (commit_lsn(begin_id) or 0) <= sealed.lsn)

    def _end(self, event: TransactionEvent, group: str, tick: int) -> None:
        lsn = commit_lsn(event.id)
        is_known, begun = self._is_known_end(group, event.id, lsn), self._left_open
        if begun and begun.group != group:
            self._leave(tick, is_repeat=is_known)
            begun = None
        if is_known:
            if begun:
                self._queue.pop()
            return
        if begun is None:
            begun = _Open(event.id, group, tick)
            self._queue.append(begun)
        begun.id, begun.closed, begun.lsn, begun.commit_ms = event.id, tick, lsn, event.ts_ms
        begun.expected = self._promised(event)
        self._closed[group] = begun
        self._last_lsn, self._last_id = (lsn, event.id) if lsn is not None else (self._last_lsn, self._last_id)

    def _is_known_end(self, group: str, end_id: str, lsn: int | None) -> bool:
        """A repeat of what is sealed or waits for that; anything else that commits earlier is out of order."""
        sealed, closed = self._sealed.get(group), self._closed.get(group)
        if lsn is None:
            return sealed is not None or closed is not None
        if lsn > self._last_lsn:
            return False
        if (sealed is None or lsn > sealed.lsn) and (closed is None or closed.lsn != lsn):
            raise _not_in_commit_order(end_id, self._last_id or f"one that ends at LSN {self._last_lsn}")
        return True

    def _promised(self, event: TransactionEvent) -> dict[str, int]:
        promised: dict[str, int] = {}
        for collected in event.data_collections or ():
            table = self._tables.get(collected.data_collection)
            if table is not None and collected.event_count:
                promised[table] = promised.get(table, 0) + collected.event_count
        return promised

    # --- decisions out

    def seal(self, read_all_since: int, snapshot_read_since: int | None = None) -> list[SealedTransaction]:
        """All that may be sealed now; what the log held after the facts of tick `read_all_since` were known is read.

        `snapshot_read_since`: the same for the rows of the first snapshot alone, which none of `streamed` can hold.
        """
        sealed: list[SealedTransaction] = []
        first_read_since = max(read_all_since, -1 if snapshot_read_since is None else snapshot_read_since)
        self._forget_announced(read_all_since)
        while True:
            found = self._next(read_all_since, first_read_since if self._fresh else read_all_since)
            if found is None:
                return sealed
            sealed.append(found)

    def _forget_announced(self, read_all_since: int) -> None:
        """A snapshot that was announced, and is whole without a row, or was sealed before that was read."""
        if self._snapshot is None and self._completed is not None and read_all_since >= self._completed:
            self._announced = None

    def _next(self, read_all_since: int, snapshot_read_since: int) -> SealedTransaction | None:
        head = self._queue[0] if self._queue else None
        if self._snapshot is not None:
            if self._is_unannounced(read_all_since):
                raise _another_snapshot(self._snapshot.group)
            if self._fresh or not (head and self._is_behind(head, self._snapshot.group)):
                return self._seal_snapshot(snapshot_read_since)
        elif self._fresh and not self._past_snapshot(snapshot_read_since):
            return None
        if head is None:
            return None
        if head.expected and self._last_snapshot and self._is_behind(head, self._last_snapshot):
            raise _older_than_snapshot(head, self._last_snapshot)
        if not self._is_whole(head, read_all_since):
            return None
        self._queue.popleft()
        if self._closed.get(head.group) is head:
            del self._closed[head.group]
        return self._sealed_transaction(head)

    @staticmethod
    def _is_behind(head: _Open, snapshot: str) -> bool:
        """The snapshot holds the transaction already."""
        lsn = snapshot_lsn(snapshot)
        return head.lsn is not None and lsn is not None and head.lsn <= lsn

    def _is_unannounced(self, read_all_since: int) -> bool:
        """A snapshot behind the baseline, and no word that all tables were begun anew was written before its rows."""
        assert self._snapshot is not None
        return not self._fresh and self._announced is None and read_all_since >= self._snapshot.tick

    @property
    def streamed(self) -> frozenset[tuple[str, int]]:
        """The partitions that have shown a row of the stream: the first snapshot is behind them."""
        return frozenset(self._streamed)

    def _past_snapshot(self, read_all_since: int) -> bool:
        """No snapshot row can be ahead: each partition shows the stream, or all that was there has been read."""
        if self._first_begin is None:
            return False
        topics = {topic for topic, _ in self._partitions}
        if len(topics) == len(set(self._tables.values())) and self._partitions <= self._streamed:
            return True
        return read_all_since >= self._first_begin

    def _seal_snapshot(self, read_all_since: int) -> SealedTransaction | None:
        snapshot, ended = self._snapshot, self._snapshot_ended
        assert snapshot is not None
        if ended is None or read_all_since < ended:
            return None
        self._snapshot, self._last_snapshot, self._completed = None, snapshot.group, None
        self._announced = self._announced if self._fresh else None
        return self._sealed_transaction(_Open(snapshot.group, snapshot.group, snapshot.tick))

    @property
    def _snapshot_ended(self) -> int | None:
        """The tick in which it was known that the snapshot has an end; a start that is read later takes it back."""
        assert self._snapshot is not None
        if self._snapshot.ended is None and self._completed is not None:
            return max(self._completed, self._snapshot.tick)
        return self._snapshot.ended

    def _is_whole(self, head: _Open, read_all_since: int) -> bool:
        seen = self._seen.get(head.group)
        if head.begun_again and seen is not None and seen.sequence is not None:
            raise _counted_anew(head.id)
        if head.closed is None:
            return False
        if head.expected is None:
            binlog = transaction_group(head.id) == head.id
            return read_all_since >= head.closed and (binlog or seen is None)
        came = {table: numbers.count for table, numbers in seen.numbers.items()} if seen else {}
        for table, count in came.items():
            if count > head.expected.get(table, 0):
                raise _too_many(head, table, head.expected.get(table, 0), count)
        return all(came.get(table, 0) == expected for table, expected in head.expected.items())

    def _sealed_transaction(self, head: _Open) -> SealedTransaction:
        seen = self._seen.pop(head.group, None) or _Seen()
        rows = sum(numbers.count for numbers in seen.numbers.values())
        position, ticks = self._position, frozenset(seen.ticks)
        tables = None if head.expected is None else self._same(frozenset(head.expected))
        self._position, self._fresh = position + 1, False
        self._changed()
        sealed = SealedTransaction(position, head.group, head.id, head.lsn, head.commit_ms, rows, ticks, tables)
        if tables is None and not sealed.is_snapshot:
            sealed = replace(sealed, numbers=seen.ranges)
        if not sealed.is_snapshot:
            self._remember(sealed.remembered_as)
        return sealed

    def _same(self, tables: frozenset[str]) -> frozenset[str]:
        """One object for each set of tables: very many transactions count the same ones."""
        return self._counted.setdefault(tables, tables)

    def _remember(self, sealed: SealedBefore) -> None:
        self._sealed[sealed.group] = sealed
        self._sealed.move_to_end(sealed.group)
        while len(self._sealed) > REMEMBERED_TRANSACTIONS:
            self._sealed.popitem(last=False)

    # --- what is pending

    @property
    def wants_barrier(self) -> bool:
        """Something waits until all that the log holds has been read, even if nothing new comes."""
        if self._snapshot is not None:
            return self._snapshot_ended is not None or (not self._fresh and self._announced is None)
        if self._announced is not None and self._completed is not None:
            return True
        head = self._queue[0] if self._queue else None
        return head is not None and (self._fresh or (head.closed is not None and head.expected is None))

    @property
    def needed_since(self) -> int | None:
        """The oldest tick that holds something unsealed; None if nothing is pending."""
        ticks = [min(seen.ticks) for seen in self._seen.values()]
        ticks += [entry.tick for entry in self._queue]
        ticks += [self._completed] if self._fresh and self._completed is not None else []
        ticks += [self._announced] if self._announced is not None else []
        return min(ticks, default=None)

    @property
    def pending_rows(self) -> dict[str, int]:
        """Row events read and not yet sealed, for each table."""
        if self._pending_rows is None:
            self._pending_rows = {}
            for seen in self._seen.values():
                for table, numbers in seen.numbers.items():
                    self._pending_rows[table] = self._pending_rows.get(table, 0) + numbers.count
        return self._pending_rows

    @property
    def pending_transactions(self) -> int:
        return len(self._queue)

    def waiting(self) -> list[Waiting]:
        """What the first unsealed transaction waits for, and an unfinished snapshot."""
        if self._waiting is None:
            self._waiting = [*self._missing_of_snapshot(), *self._missing_of_transactions()]
        return self._waiting

    def _missing_of_snapshot(self) -> list[Waiting]:
        if self._snapshot is None:
            return []
        return _uncounted(self._snapshot.group, self._seen.get(self._snapshot.group, _Seen()))

    def _missing_of_transactions(self) -> list[Waiting]:
        if self._queue:
            return self._missing(self._queue[0])
        unknown = ((group, seen) for group, seen in self._seen.items() if not group.startswith(SNAPSHOT))
        return [one for group, seen in unknown for one in _uncounted(group, seen)]

    def _missing(self, head: _Open) -> list[Waiting]:
        seen = self._seen.get(head.group, _Seen())
        if head.expected is None:
            return _uncounted(head.id, seen)
        came = {table: numbers.count for table, numbers in seen.numbers.items()}
        wanted = head.expected.items()
        return [Waiting(head.id, t, count, came.get(t, 0)) for t, count in wanted if came.get(t, 0) < count]


def _uncounted(id: str, seen: _Seen) -> list[Waiting]:
    return [Waiting(id, table, None, numbers.count) for table, numbers in seen.numbers.items()]


def _too_many(head: _Open, table: str, expected: int, came: int) -> FixConfiguration:
    return FixConfiguration(
        f"transaction {head.id}: table {table}: {expected} row events expected, {came} seen",
        remedy="The connector counted this transaction anew after a restart (Debezium before 3.6.1), or the topics"
        " hold records of another connector. Use Debezium 3.6.1 or later; start with a new snapshot and state folder.",
    )


def _counted_anew(id: str, place: str = "") -> FixConfiguration:
    return FixConfiguration(
        f"{place and place + ': '}the connector was restarted inside transaction {id} and counts its rows anew:"
        " which of them are repeats cannot be told",
        remedy="Use Debezium 3.6.1 or later, and start with a new snapshot and state folder.",
    )


def _check_came_before(rows: RowsSeen, numbers: Ranges) -> None:
    """Without a count there is no other word on what came after the transaction was sealed."""
    first = rows.first
    for begun, reached in numbers:
        if begun <= first <= reached:
            first = reached + 1
    if first > rows.last:
        return
    raise FixConfiguration(
        f"{rows.place and rows.place + ': '}row event {first} of transaction {rows.group} (table {rows.table}) came"
        " after the transaction was sealed: it has no END that counts its rows, and all that had come was taken",
        remedy="Record what a transaction changed before what follows it, and let no run read a recording before it is"
        " whole; then start with a new state folder.",
    )


def _not_counted(group: str, table: str) -> FixConfiguration:
    return FixConfiguration(
        f"transaction {group} is sealed, and its END counts no row event of table {table}: but one has come",
        remedy=f"The topic of table {table} holds another table's rows, or the table was declared after the run had"
        " begun. Record without routing, declare all tables, and start with a new state folder.",
    )


def _not_in_commit_order(end_id: str, last_id: str) -> FixConfiguration:
    return FixConfiguration(
        f"transaction {end_id} comes behind {last_id}, which committed after it: not in commit order",
        remedy="Recordings are read in the order of their files' names (10.jsonl before 2.jsonl): name them in order"
        " of time. In Kafka the transaction topic has one partition. Then start with a new state folder.",
    )


def _older_than_snapshot(head: _Open, snapshot: str) -> FixConfiguration:
    return FixConfiguration(
        f"transaction {head.id} committed before the snapshot {snapshot}, and comes behind it: the snapshot is torn",
        remedy="The replication slot was older than the snapshot, or a snapshot was taken again later on. Let the"
        " connector create the slot, take a new snapshot, and start with it in a new state folder.",
    )


def _another_snapshot(snapshot: str) -> FixConfiguration:
    return FixConfiguration(
        f"rows of another snapshot ({snapshot}) came, and no word that an initial snapshot has started:"
        " taken as one, they would empty all other tables",
        remedy="Take no blocking snapshot of single tables. If the connector began anew with all tables, set"
        " notification.enabled.channels=sink, and start with a new state folder.",
    )
