"""A source, a log and ticks in plain Python: whatever order records arrive in, whenever a run ends and begins again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.capture.debezium import Collected, TransactionEvent
from tidegate.capture.sealing import Remembered, RowsSeen, SealedTransaction, Sealer, TickFacts
from tidegate.timeline.binding import Barrier, LogPartition, OffsetRange, Tick, after, bind

COLLECTIONS = {"public.orders": "orders", "public.lines": "lines", "public.idle": "idle"}
TRANSACTIONS = LogPartition("transaction", 0)
NOTIFICATIONS = LogPartition("notifications", 0)


@dataclass(frozen=True)
class Row:
    """A row event; `order` is None for a row of a snapshot."""

    group: str
    table: str
    order: int | None
    lsn: int
    partition: int
    last_of_snapshot: bool = False


@dataclass(frozen=True)
class Announced:
    """The notification that a snapshot has started, or that it is whole."""

    completed: bool


Record = Row | TransactionEvent | Announced


@dataclass(frozen=True)
class Committed:
    """A transaction as the source wrote it; `records` begin with BEGIN."""

    group: str
    ended: bool
    records: tuple[Record, ...]

    @property
    def subscribed(self) -> set[tuple[str, int | None]]:
        rows = (record for record in self.records if isinstance(record, Row))
        return {(row.table, row.order) for row in rows if row.table in COLLECTIONS.values()}


def transaction(
    number: int,
    rows: Sequence[tuple[str, int]],
    *,
    binlog: bool = False,
    end: bool = True,
    extra: Mapping[str, int] = {},
) -> Committed:
    """The transaction `number` with rows (table, partition); END also counts the collections in `extra`."""
    xid, lsn = 700 + number, 1_000 * (number + 1)
    group = f"0-11-{xid}" if binlog else str(xid)
    named: Callable[[int], str] = (lambda at: group) if binlog else (lambda at: f"{xid}:{at}")
    records: list[Record] = [TransactionEvent("BEGIN", named(lsn - 999))]
    for order, (table, partition) in enumerate(rows, 1):
        records.append(Row(group, table, order, 0 if binlog else lsn - 999 + order, partition))
    counts = {f"public.{table}": sum(1 for one, _ in rows if one == table) for table, _ in rows}
    promised = [Collected(name, count) for name, count in {**extra, **counts}.items()]
    if end:
        records.append(TransactionEvent("END", named(lsn), len(rows), promised, 1_700_000_000_000 + number))
    return Committed(group, end, tuple(records))


def snapshot(number: int, rows: Sequence[tuple[str, int]], *, last: bool) -> list[Record]:
    """The rows of a snapshot's generation; the last row says so, unless its table is not subscribed to."""
    group = f"snapshot:{600 + number}:{number + 1}"
    ends = [last and place == len(rows) - 1 for place in range(len(rows))]
    return [Row(group, table, None, 0, at, end) for (table, at), end in zip(rows, ends, strict=True)]


def partition_of(record: Record) -> LogPartition:
    if isinstance(record, Row):
        return LogPartition(record.table, record.partition)
    return NOTIFICATIONS if isinstance(record, Announced) else TRANSACTIONS


def shuffled(stream: Sequence[Record], order: random.Random) -> list[Record]:
    """Partitions interleaved anew; each keeps its own order."""
    by_partition: dict[LogPartition, list[Record]] = {}
    for record in stream:
        by_partition.setdefault(partition_of(record), []).append(record)
    turns = [partition_of(record) for record in stream]
    order.shuffle(turns)
    waiting = {place: iter(records) for place, records in by_partition.items()}
    return [next(waiting[place]) for place in turns]


@dataclass
class Simulation:
    """What `Ticks` does, without Spark: bind, read, tell the sealer, note the barriers, seal."""

    log: dict[LogPartition, list[Record]] = field(default_factory=dict)
    sealed: list[SealedTransaction] = field(default_factory=list)
    first_seen: dict[tuple[str, str, int | None], int] = field(default_factory=dict)
    filled: bool = True
    _facts: list[TickFacts] = field(default_factory=list)
    _needed_since: int | None = None

    def __post_init__(self) -> None:
        self._read: dict[LogPartition, int] = {}
        self._start(Remembered())

    def _start(self, remembered: Remembered) -> None:
        self.sealer = Sealer(COLLECTIONS, remembered)
        self._barrier, self._snapshot_barrier = Barrier(), Barrier()
        self._last_facts = -1

    def append(self, records: Sequence[Record]) -> None:
        for record in records:
            self.log.setdefault(partition_of(record), []).append(record)

    def restart(self) -> None:
        """A new process: only what the seals say is remembered, pending ticks are read again."""
        streamed = [one for one in self.sealed if not one.is_snapshot]
        snapshots = [one.group for one in self.sealed if one.is_snapshot]
        lsns = [one.lsn for one in streamed if one.lsn is not None]
        recent = tuple(one.remembered_as for one in streamed)
        since = len(self._facts) if self._needed_since is None else self._needed_since
        since = since if self._facts else 0
        self._start(Remembered(len(self.sealed), max(lsns, default=-1), snapshots[-1] if snapshots else None, recent))
        for facts in self._facts[since:]:
            self.sealer.take(facts)
            self._last_facts = facts.tick

    def step(self, budget: int) -> bool:
        """One tick; False if there is nothing to do."""
        tick, ends = Tick(len(self._facts)), {place: len(records) for place, records in self.log.items()}
        binding = bind(tick, self._read, ends, {}, budget)
        waits = self.filled and self.sealer.wants_barrier and self._barrier.read_all_since < self._last_facts
        if not binding.ranges and not waits:
            return False
        self._read = after(self._read, binding)
        facts = self._facts_of(tick, binding.ranges, ends)
        self._facts.append(facts)
        self.sealer.take(facts)
        self._last_facts = tick if binding.ranges else self._last_facts
        seen = ends if self.filled else None
        self._barrier.bound(tick, seen, self._read)
        self._snapshot_barrier.bound(tick, seen, self._read, self._holds_no_snapshot)
        self.sealed += self.sealer.seal(self._barrier.read_all_since, self._snapshot_barrier.read_all_since)
        self._needed_since = self.sealer.needed_since
        return True

    def _holds_no_snapshot(self, one: LogPartition) -> bool:
        others = {NOTIFICATIONS.topic, *COLLECTIONS.values()}
        return one.topic not in others or (one.topic, one.partition) in self.sealer.streamed

    def _facts_of(self, tick: int, ranges: Sequence[OffsetRange], ends: Mapping[LogPartition, int]) -> TickFacts:
        records = [(place, record) for one in ranges for place, record in self._records(one)]
        rows = [(place, record) for place, record in records if isinstance(record, Row)]
        rows = [(place, row) for place, row in rows if row.table in COLLECTIONS.values()]
        for _, row in rows:
            self.first_seen.setdefault((row.group, row.table, row.order), tick)
        announced = [record.completed for _, record in records if isinstance(record, Announced)]
        partitions = {(one.topic, one.partition) for one in ends if one.topic in COLLECTIONS.values()}
        return TickFacts(
            tick,
            [seen for one in ranges for seen in self._rows_seen(one)],
            [record for _, record in records if isinstance(record, TransactionEvent)],
            frozenset(row.group for _, row in rows if row.last_of_snapshot),
            ["COMPLETED" if completed else "STARTED" for completed in announced],
            frozenset((row.table, row.partition) for _, row in rows if row.order is not None),
            frozenset(partitions if self.filled else ()),
        )

    def _records(self, one: OffsetRange) -> Iterator[tuple[int, Record]]:
        records = self.log[LogPartition(one.topic, one.partition)]
        return ((offset, records[offset]) for offset in range(one.start, one.end))

    def _rows_seen(self, one: OffsetRange) -> list[RowsSeen]:
        if one.topic not in COLLECTIONS.values():
            return []
        found: dict[str, list[tuple[int, int]]] = {}
        for offset, row in self._records(one):
            assert isinstance(row, Row)
            found.setdefault(row.group, []).append((offset if row.order is None else row.order, row.lsn))
        return [
            RowsSeen(group, one.topic, first, last, max(lsn for _, lsn in orders))
            for group, orders in found.items()
            for first, last in consecutive([order for order, _ in orders])
        ]


def consecutive(orders: Sequence[int]) -> list[tuple[int, int]]:
    """The numbers as closed ranges without gaps."""
    ranges: list[tuple[int, int]] = []
    for order in sorted(set(orders)):
        if ranges and ranges[-1][1] + 1 == order:
            ranges[-1] = (ranges[-1][0], order)
        else:
            ranges.append((order, order))
    return ranges
