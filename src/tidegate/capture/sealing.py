"""Which source transactions are whole, in commit order. Pure: facts in, sealed transactions out.

The order is that of the transaction topic. A transaction is whole when every subscribed table has as many distinct
row events as its END promises. What has no count (a snapshot, a transaction of a binlog connector without END) is whole
once everything that the log held after its last sign of life was seen has been read: a `barrier`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.capture.debezium import TransactionEvent, commit_lsn, snapshot_order, transaction_group
from tidegate.errors import FixConfiguration

REMEMBERED_TRANSACTIONS = 200_000
SNAPSHOT = "snapshot:"


class RowsSeen(NamedTuple):
    """Row events of one transaction and table with consecutive numbers `first` to `last`."""

    group: str
    table: str
    first: int
    last: int
    lsn: int


@dataclass(frozen=True)
class TickFacts:
    """What ingesting one tick's ranges has shown."""

    tick: int
    rows: Iterable[RowsSeen] = ()
    transactions: Iterable[TransactionEvent] = ()
    last_snapshot_rows: frozenset[str] = frozenset()
    snapshot_completed: bool | None = None  # False: one has started since
    streamed: frozenset[tuple[str, int]] = frozenset()
    partitions: frozenset[tuple[str, int]] = frozenset()


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

    @property
    def is_snapshot(self) -> bool:
        return self.group.startswith(SNAPSHOT)

    @property
    def remembered_as(self) -> tuple[str, int]:
        """By this a repeat is told from another transaction with the same number."""
        return self.group, commit_lsn(self.id) or 0


@dataclass(frozen=True)
class Remembered:
    """What the timeline knows of earlier seals; enough to go on after a restart."""

    next_position: int = 0
    last_lsn: int = -1
    last_snapshot: str | None = None
    recent: tuple[tuple[str, int], ...] = ()


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


@dataclass(slots=True)
class _Seen:
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    ticks: set[int] = field(default_factory=set)


@dataclass
class _Snapshot:
    group: str
    tick: int
    ended: int | None = None  # the tick in which its end was learnt


def distinct(ranges: list[tuple[int, int]]) -> int:
    """How many numbers the closed ranges cover."""
    if len(ranges) == 1:
        return ranges[0][1] - ranges[0][0] + 1
    count, reached = 0, -1
    for first, last in sorted(ranges):
        count += max(0, last - max(first - 1, reached))
        reached = max(reached, last)
    return count


class Sealer:
    """Collects facts tick by tick and says which transactions may be sealed, each exactly once, in order."""

    def __init__(self, tables: Mapping[str, str], remembered: Remembered) -> None:
        """`tables` maps a data collection, as END names it, to the name of the table that subscribes to it."""
        self._tables = tables
        self._queue: deque[_Open] = deque()
        self._seen: dict[str, _Seen] = {}
        self._sealed: OrderedDict[str, int] = OrderedDict(remembered.recent)
        self._position = remembered.next_position
        self._last_lsn = remembered.last_lsn
        self._last_snapshot = remembered.last_snapshot
        self._snapshot: _Snapshot | None = None
        self._completed: int | None = None  # the tick that said so of the newest snapshot; its rows may come later
        self._fresh = remembered.next_position == 0
        self._first_begin: int | None = None
        self._streamed: set[tuple[str, int]] = set()
        self._partitions: set[tuple[str, int]] = set()

    # --- facts in

    def take(self, facts: TickFacts) -> None:
        """Takes the facts of one tick; ticks come in order, a repeated one changes nothing."""
        self._partitions |= facts.partitions
        self._streamed |= facts.streamed
        for rows in facts.rows:
            self._rows(rows, facts.tick)
        for event in facts.transactions:
            self._transaction(event, facts.tick)
        self._snapshot_end(facts)

    def _rows(self, rows: RowsSeen, tick: int) -> None:
        group, table, first, last, lsn = rows
        if group.startswith(SNAPSHOT):
            if not self._snapshot_rows(group, tick):
                return
        elif self._is_repeat(group, lsn):
            return
        seen = self._seen.get(group)
        if seen is None:
            seen = self._seen[group] = _Seen()
        ranges = seen.ranges.get(table)
        if ranges is None:
            seen.ranges[table] = [(first, last)]
        else:
            ranges.append((first, last))
        seen.ticks.add(tick)

    def _is_repeat(self, group: str, lsn: int) -> bool:
        """Numbers of transactions are used again after four thousand million: a later LSN means another one."""
        return group in self._sealed and lsn <= self._sealed[group]

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
        if facts.snapshot_completed is not None:
            self._completed = facts.tick if facts.snapshot_completed else None
        snapshot = self._snapshot
        if snapshot is None or snapshot.ended is not None:
            return
        begun = self._fresh and self._first_begin is not None
        if snapshot.group in facts.last_snapshot_rows or begun or self._stream_passed(snapshot):
            snapshot.ended = facts.tick

    def _stream_passed(self, snapshot: _Snapshot) -> bool:
        order = snapshot_order(snapshot.group)
        return any(entry.lsn is not None and entry.lsn > order for entry in self._queue)

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

    def _is_known(self, group: str, begin_id: str) -> bool:
        """A transaction that is sealed, or closed and waiting for that."""
        sealed_lsn = self._sealed.get(group, -1)
        return (commit_lsn(begin_id) or 0) <= sealed_lsn or any(
            entry.group == group and entry.closed is not None for entry in self._queue
        )

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
        self._last_lsn = lsn if lsn is not None else self._last_lsn

    def _is_known_end(self, group: str, end_id: str, lsn: int | None) -> bool:
        if lsn is not None:
            return lsn <= self._last_lsn
        return group in self._sealed or any(entry.id == end_id and entry.closed is not None for entry in self._queue)

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
        while True:
            found = self._next(read_all_since, first_read_since if self._fresh else read_all_since)
            if found is None:
                return sealed
            sealed.append(found)

    def _next(self, read_all_since: int, snapshot_read_since: int) -> SealedTransaction | None:
        head = self._queue[0] if self._queue else None
        if self._snapshot is not None:
            before = head is not None and head.lsn is not None and head.lsn <= snapshot_order(self._snapshot.group)
            if self._fresh or not before:
                return self._seal_snapshot(snapshot_read_since)
        elif self._fresh and not self._past_snapshot(snapshot_read_since):
            return None
        if head is None or not self._is_whole(head, read_all_since):
            return None
        self._queue.popleft()
        return self._sealed_transaction(head)

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
        return self._sealed_transaction(_Open(snapshot.group, snapshot.group, snapshot.tick))

    @property
    def _snapshot_ended(self) -> int | None:
        """The tick in which it was known that the snapshot has an end; a start that is read later takes it back."""
        assert self._snapshot is not None
        if self._snapshot.ended is None and self._completed is not None:
            return max(self._completed, self._snapshot.tick)
        return self._snapshot.ended

    def _is_whole(self, head: _Open, read_all_since: int) -> bool:
        if head.closed is None:
            return False
        seen = self._seen.get(head.group)
        if head.expected is None:
            binlog = transaction_group(head.id) == head.id
            return read_all_since >= head.closed and (binlog or seen is None)
        for table, expected in head.expected.items():
            came = distinct(seen.ranges[table]) if seen and table in seen.ranges else 0
            if came > expected:
                raise _too_many(head, table, expected, came)
            if came < expected:
                return False
        return True

    def _sealed_transaction(self, head: _Open) -> SealedTransaction:
        seen = self._seen.pop(head.group, None) or _Seen()
        promised = head.expected or {}  # as many have come, or it would not be whole
        rows = sum(promised.get(table) or distinct(ranges) for table, ranges in seen.ranges.items())
        position = self._position
        self._position, self._fresh = position + 1, False
        ticks = frozenset(seen.ticks)
        sealed = SealedTransaction(position, head.group, head.id, head.lsn, head.commit_ms, rows, ticks)
        if not sealed.is_snapshot:
            self._remember(*sealed.remembered_as)
        return sealed

    def _remember(self, group: str, lsn: int) -> None:
        self._sealed[group] = lsn
        self._sealed.move_to_end(group)
        while len(self._sealed) > REMEMBERED_TRANSACTIONS:
            self._sealed.popitem(last=False)

    # --- what is pending

    @property
    def wants_barrier(self) -> bool:
        """Something waits until all that the log holds has been read, even if nothing new comes."""
        if self._snapshot is not None:
            return self._snapshot_ended is not None
        head = self._queue[0] if self._queue else None
        return head is not None and (self._fresh or (head.closed is not None and head.expected is None))

    @property
    def needed_since(self) -> int | None:
        """The oldest tick that holds something unsealed; None if nothing is pending."""
        ticks = [min(seen.ticks) for seen in self._seen.values()]
        ticks += [entry.tick for entry in self._queue]
        ticks += [self._completed] if self._fresh and self._completed is not None else []
        return min(ticks, default=None)

    @property
    def pending_rows(self) -> dict[str, int]:
        """Row events read and not yet sealed, for each table."""
        rows: dict[str, int] = {}
        for seen in self._seen.values():
            for table, ranges in seen.ranges.items():
                rows[table] = rows.get(table, 0) + distinct(ranges)
        return rows

    @property
    def pending_transactions(self) -> int:
        return len(self._queue)

    def waiting(self) -> list[Waiting]:
        """What the first unsealed transaction waits for, and an unfinished snapshot."""
        found: list[Waiting] = []
        if self._snapshot is not None:
            seen = self._seen.get(self._snapshot.group, _Seen())
            found += [Waiting(self._snapshot.group, t, None, distinct(r)) for t, r in seen.ranges.items()]
        if self._queue:
            return found + self._missing(self._queue[0])
        unknown = ((group, seen) for group, seen in self._seen.items() if not group.startswith(SNAPSHOT))
        return found + [Waiting(group, t, None, distinct(r)) for group, seen in unknown for t, r in seen.ranges.items()]

    def _missing(self, head: _Open) -> list[Waiting]:
        seen = self._seen.get(head.group, _Seen())
        came = {table: distinct(ranges) for table, ranges in seen.ranges.items()}
        if head.expected is None:
            return [Waiting(head.id, table, None, count) for table, count in came.items()]
        wanted = head.expected.items()
        return [Waiting(head.id, t, count, came.get(t, 0)) for t, count in wanted if came.get(t, 0) < count]


def _too_many(head: _Open, table: str, expected: int, came: int) -> FixConfiguration:
    return FixConfiguration(
        f"transaction {head.id}: table {table}: {expected} row events expected, {came} seen",
        remedy="The connector counted this transaction anew after a restart (Debezium before 3.6.1), or the topics"
        " hold records of another connector. Use Debezium 3.6.1 or later; start with a new snapshot and state folder.",
    )
