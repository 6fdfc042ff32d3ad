"""Ticks: bind, ingest, seal, derive. Each step is durable before the next; a restart goes on where the last stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import SparkContext

from tidegate.capture.debezium import Place, TransactionEvent, notification, transaction_event
from tidegate.capture.log import LogReader
from tidegate.capture.sealing import (
    REMEMBERED_TRANSACTIONS,
    Ranges,
    Remembered,
    RowsSeen,
    SealedBefore,
    SealedTransaction,
    Sealer,
    TickFacts,
    Waiting,
)
from tidegate.catalog.contract import Applied, Catalog, HistoryFile, Seal
from tidegate.crash_points import reach
from tidegate.errors import Fenced, FixConfiguration
from tidegate.model.schema import TableSchema
from tidegate.pipeline import tasks
from tidegate.pipeline.flows import Flows
from tidegate.pipeline.rebuilding import rebuild
from tidegate.pipeline.work import Chunk, Derivation, Ingested, Layout, Pending, Rebuild, Sealed, ViewWork, Written
from tidegate.spark.jobs import Jobs, balanced
from tidegate.timeline.binding import Barrier, Binding, LogPartition, OffsetRange, Tick, after, bind, rewound

CHUNK_EVENTS = 50_000
_TRANSACTIONS = pa.schema(
    [
        ("position", pa.int64()),
        ("group", pa.string()),
        ("id", pa.string()),
        ("lsn", pa.int64()),
        ("commit_ms", pa.int64()),
        ("rows", pa.int64()),
        ("first_tick", pa.int64()),
        ("tables", pa.dictionary(pa.int32(), pa.string())),
        ("numbers", pa.string()),
    ]
)


@dataclass(frozen=True)
class SourceTopics:
    """The topics of a source beside those of its tables."""

    prefix: str

    @property
    def transactions(self) -> str:
        return f"{self.prefix}.transaction"

    @property
    def notifications(self) -> str:
        return f"{self.prefix}.notifications"

    def collection_of(self, topic: str) -> str:
        """What END calls the table that this topic is of."""
        return topic.removeprefix(f"{self.prefix}.")


@dataclass(frozen=True)
class TickDone:
    """What one tick did, for whoever watches."""

    tick: int
    events: int
    transactions: int
    rows: Mapping[str, int]
    source_position: str | None
    commit_ms: int | None


class Ticks:
    """Drives one source's ticks; one at a time, by the one owner of the catalog."""

    def __init__(
        self,
        context: SparkContext,
        catalog: Catalog,
        layout: Layout,
        topics: SourceTopics,
        tables: Sequence[TableSchema],
        views: Sequence[ViewWork],
        max_events: int,
        flows: Flows | None = None,
    ) -> None:
        self._jobs, self._catalog, self._layout, self._topics = (
            Jobs(context, layout.partitions),
            catalog,
            layout,
            topics,
        )
        self._tables, self._views, self._max_events = tuple(tables), tuple(views), max_events
        self._flows = flows
        self._by_topic = {table.topic: table for table in tables}
        self._reader = LogReader(layout.log)
        self._sealer = Sealer(self._collections(), Remembered())
        self._barrier, self._snapshot_barrier = Barrier(), Barrier()
        self._read: dict[LogPartition, int] = {}
        self._next = Tick(0)
        self._last_facts = -1
        self._pending: dict[int, list[Ingested]] = {}

    def _collections(self) -> dict[str, str]:
        return {self._topics.collection_of(table.topic): table.name for table in self._tables}

    # --- one tick

    def step(self, *, log_is_filled: bool = True) -> TickDone | None:
        """Runs the next tick if there is anything to read, or if something waits for the log to be read through."""
        ends = self._ends()
        binding = bind(self._next, self._read, ends, self._held(), self._max_events)
        waits = log_is_filled and self._sealer.wants_barrier and self._barrier.read_all_since < self._last_facts
        if not binding.ranges and not waits:
            return None
        if not self._catalog.bind(binding):
            raise Fenced(
                f"tick {binding.tick} was bound by another process",
                remedy="Run one `tidegate run` for a state folder.",
            )
        reach("bound")
        return self._bound(binding, ends if log_is_filled else None)

    def _bound(self, binding: Binding, ends: Mapping[LogPartition, int] | None) -> TickDone:
        self._read = after(self._read, binding)
        events = self._take(binding)
        reach("ingested")
        self._barrier.bound(binding.tick, ends, self._read)
        self._snapshot_barrier.bound(binding.tick, ends, self._read, self._holds_no_snapshot(self._sealer.streamed))
        sealed = self._sealer.seal(self._barrier.read_all_since, self._snapshot_barrier.read_all_since)
        self._catalog.seal(self._seal_of(binding.tick, sealed))
        reach("sealed")
        self._next = Tick(binding.tick + 1)
        written = self._derive(binding.tick, sealed)
        return self._done(binding.tick, events, sealed, written)

    def _holds_no_snapshot(self, streamed: frozenset[tuple[str, int]]) -> Callable[[LogPartition], bool]:
        """Of the topics beside the tables' only the notifications count: what they said was said of this snapshot."""
        others = {self._topics.notifications, *self._by_topic}
        return lambda one: one.topic not in others or (one.topic, one.partition) in streamed

    def _done(
        self, tick: int, events: int, sealed: Sequence[SealedTransaction], written: Sequence[Written]
    ) -> TickDone:
        rows: dict[str, int] = {}
        for one in written:
            rows[one.collection] = rows.get(one.collection, 0) + one.rows
        last = sealed[-1] if sealed else None
        return TickDone(tick, events, len(sealed), rows, last.id if last else None, last.commit_ms if last else None)

    def _ends(self) -> dict[LogPartition, int]:
        wanted = {self._topics.transactions, self._topics.notifications, *self._by_topic}
        ends = {LogPartition(*place): end for place, end in self._reader.ends().items() if place[0] in wanted}
        if any(one.topic == self._topics.transactions and one.partition > 0 for one in ends):
            raise FixConfiguration(
                f"topic {self._topics.transactions} has more than one partition: the order of commits is lost",
                remedy="Give the transaction topic exactly one partition, and take a new snapshot.",
            )
        return ends

    def _held(self) -> dict[LogPartition, int]:
        """How far ahead each partition was read: rows that wait for others of their transaction."""
        rows, held = self._sealer.pending_rows, {LogPartition(self._topics.transactions, 0): 0}
        partitions = [one for one in self._read if one.topic in self._by_topic]
        for one in partitions:
            siblings = sum(1 for other in partitions if other.topic == one.topic)
            held[one] = rows.get(self._by_topic[one.topic].name, 0) // siblings
        held[LogPartition(self._topics.transactions, 0)] = 2 * self._sealer.pending_transactions
        return held

    # --- ingest

    def _take(self, binding: Binding) -> int:
        places = [place for one in binding.ranges if one.topic in self._by_topic for place in _pieces(one)]
        chunks = [self._chunk(binding.tick, number, one) for number, one in enumerate(places)]
        seen = self._ingest(chunks) if chunks else []
        self._sealer.take(self._facts(binding, seen))
        if binding.ranges:
            self._last_facts = binding.tick
        self._pending[binding.tick] = [replace(one, ranges=b"") for one in seen if one.rows]
        return sum(one.rows for one in seen)

    def _chunk(self, tick: int, number: int, place: OffsetRange) -> Chunk:
        return Chunk(tick, number, self._by_topic[place.topic], self._topics.collection_of(place.topic), place)

    def _ingest(self, chunks: Sequence[Chunk]) -> list[Ingested]:
        weights = [one.range.end - one.range.start for one in chunks]
        return self._jobs.run(balanced(chunks, weights, self._jobs.parallelism), partial(tasks.ingest, self._layout))

    def _facts(self, binding: Binding, seen: Sequence[Ingested]) -> TickFacts:
        streamed = ((one.chunk.range.topic, one.chunk.range.partition) for one in seen if one.streamed)
        return TickFacts(
            tick=binding.tick,
            rows=[rows for one in seen for rows in _rows_seen(one)],
            transactions=self._transaction_events(binding),
            last_snapshot_rows=frozenset(group for one in seen for group in one.last_snapshot_rows),
            snapshot_words=self._snapshot_words(binding),
            streamed=frozenset(streamed),
            partitions=frozenset((one.topic, one.partition) for one in self._read if one.topic in self._by_topic),
        )

    def _transaction_events(self, binding: Binding) -> list[TransactionEvent]:
        return [transaction_event(value, place) for place, value in self._values(binding, self._topics.transactions)]

    def _snapshot_words(self, binding: Binding) -> list[str]:
        """What was said of initial snapshots in this tick: that one has started, is of some tables only, is whole."""
        found = (notification(value) for _, value in self._values(binding, self._topics.notifications))
        said = [one for one in found if one and one.aggregate_type == "Initial Snapshot"]
        wanted = set(self._collections())
        words = ["PARTIAL" if one.collections and not wanted <= one.collections else one.type for one in said]
        return [word for word in words if word in ("STARTED", "PARTIAL", "COMPLETED")]

    def _values(self, binding: Binding, topic: str) -> Iterable[tuple[Place, bytes]]:
        for one in binding.ranges:
            if one.topic == topic:
                offset = one.start
                for batch in self._reader.read(one.topic, one.partition, one.start, one.end):
                    for value in batch.column(1).to_pylist():
                        if value is not None:
                            yield Place(one.topic, one.partition, offset), value
                        offset += 1

    # --- seal

    def _seal_of(self, tick: Tick, sealed: Sequence[SealedTransaction]) -> Seal:
        former = self._catalog.last_seal()
        last = sealed[-1] if sealed else None
        lsns = [one.lsn for one in sealed if one.lsn is not None]
        snapshots = [one.group for one in sealed if one.is_snapshot]
        return Seal(
            tick=tick,
            next_position=last.position + 1 if last else (former.next_position if former else 0),
            last_lsn=lsns[-1] if lsns else (former.last_lsn if former else -1),
            last_snapshot=snapshots[-1] if snapshots else (former.last_snapshot if former else None),
            source_position=last.id if last else (former.source_position if former else None),
            commit_ms=last.commit_ms if last else (former.commit_ms if former else None),
            needed_since=self._sealer.needed_since,
            transactions=_transactions_blob(sealed),
        )

    # --- derive

    def _derive(self, tick: int, sealed: Sequence[SealedTransaction]) -> list[Written]:
        written = self._derive_on_spark(tick, sealed) if any(one.rows or one.is_snapshot for one in sealed) else []
        reach("derived")
        self._catalog.derive(Tick(tick), _files(written, tick), self._applied(written, tick))
        self._forget_pending()
        return written

    def _derive_on_spark(self, tick: int, sealed: Sequence[SealedTransaction]) -> list[Written]:
        positions = {one.group: one.position for one in sealed}
        snapshots = tuple(one.position for one in sealed if one.is_snapshot)
        work = self._work(Sealed(tick, snapshots, sealed[-1].position))
        parts = self._parts({needed for one in sealed for needed in one.ticks}, tick)
        sizes = [sum(Path(path).stat().st_size for path in part.paths) for part in parts]
        loads = balanced(parts, sizes, self._jobs.parallelism) or [[]]
        first, follow = partial(tasks.spread, work, positions), partial(tasks.follow_tables, work)
        if self._flows is None:
            return self._jobs.run(loads, first, follow, partial(tasks.fold_views, work))
        found = self._jobs.run_through(loads, (first, follow), partial(self._flows.chain, work))
        return [written for _, written in found]

    def _parts(self, needed: Set[int], tick: int) -> list[Pending]:
        """Each file by itself; those of a table whose rows have moved to other keys together, beside its history."""
        files: dict[str, list[str]] = {}
        moving: set[str] = set()
        for one in (one for number in sorted(needed) for one in self._pending[number]):
            files.setdefault(one.chunk.table.name, []).append(self._path(one))
            moving |= {one.chunk.table.name} if one.has_moved else set()
        alone = [Pending(table, (path,)) for table, paths in files.items() if table not in moving for path in paths]
        return alone + [Pending(table, tuple(files[table]), self._paths(table, tick - 1)) for table in sorted(moving)]

    def _path(self, one: Ingested) -> str:
        return str(self._layout.pending(one.chunk.tick, one.chunk.number))

    def _applied(self, written: Sequence[Written], tick: int) -> list[Applied]:
        return [Applied(one.collection, self._layout.name, one.partition, tick) for one in written]

    def _work(self, sealed: Sealed) -> Derivation:
        flows = self._flows.work(sealed) if self._flows else None
        return Derivation(self._layout, sealed, self._tables, self._views, flows)

    def _forget_pending(self) -> None:
        """Pending files are a cache: what a restart still needs, it reads from the log again."""
        needed = self._sealer.needed_since
        for tick in [tick for tick in self._pending if needed is None or tick < needed]:
            for one in self._pending.pop(tick):
                Path(self._path(one)).unlink(missing_ok=True)

    # --- after a restart

    def recover(self) -> None:
        """Brings everything to where the catalog says it is: pending rows, arrangements, the tick under way."""
        last = self._catalog.last_seal()
        sealed_tick = last.tick if last else -1
        underived = self._catalog.seals(self._catalog.derived() + 1, sealed_tick + 1)
        assert len(underived) <= 1, underived
        since = self._replay_since(last, underived)
        self._forget_pending_of_the_dead(since)
        self._sealer = Sealer(self._collections(), self._remembered(last, since))
        self._check_arrangements()
        bindings = self._catalog.bindings(since)
        self._read = rewound(self._catalog.positions(), bindings)
        for binding in bindings:
            if binding.tick <= sealed_tick:
                self._read = after(self._read, binding)
                self._take(binding)
        self._next = Tick(sealed_tick + 1)
        for seal in underived:
            self._derive(seal.tick, _transactions_of(seal))
        for binding in bindings:
            if binding.tick > sealed_tick:
                self._bound(binding, None)

    def _forget_pending_of_the_dead(self, since: int) -> None:
        """Drafts, and what ticks before `since` no longer need; a run that is fenced off may still remove some too."""
        folder = self._layout.pending(0, 0).parent
        for path in folder.iterdir() if folder.is_dir() else ():
            tick = path.name.split("-")[0]
            if path.name.startswith(".") or (tick.isdigit() and int(tick) < since):
                path.unlink(missing_ok=True)

    @staticmethod
    def _replay_since(last: Seal | None, underived: Sequence[Seal]) -> int:
        """The first tick whose ranges have to be read again, because something of it is not derived."""
        if last is None:
            return 0
        ticks = [last.needed_since if last.needed_since is not None else last.tick + 1]
        ticks += [min(one.ticks) for seal in underived for one in _transactions_of(seal) if one.ticks]
        return min(ticks)

    def _remembered(self, last: Seal | None, since: int) -> Remembered:
        if last is None:
            return Remembered()
        recent: list[SealedBefore] = []
        before = last.tick + 1
        while before > 0 and (len(recent) < REMEMBERED_TRANSACTIONS or before > since):
            page = self._catalog.seals(max(0, before - 1000), before)
            found = [one for seal in page for one in _transactions_of(seal) if not one.is_snapshot]
            recent = [one.remembered_as for one in found] + recent
            before -= 1000
        return Remembered(last.next_position, last.last_lsn, last.last_snapshot, tuple(recent))

    def _check_arrangements(self) -> None:
        """Fills again, from history, what a crash, a reboot or another number of partitions has taken."""
        derived, layout = self._catalog.derived(), self._layout.name
        if derived >= 0:
            expected = self._expected(derived)
            files = [file for table in self._tables for file in self._catalog.files(table.name, -1, derived)]
            parts = [
                Rebuild(name, partition, expected.get((name, partition), expected["", 0]), emit)
                for name, emit in self._arranged({file.collection for file in files})
                for partition in range(self._layout.partitions)
            ]
            rebuilt = rebuild(self._jobs, self._work(Sealed(derived, (), 0)), parts, files)
            self._catalog.add_files(_files(rebuilt, derived), self._applied(rebuilt, derived))
        if self._flows:
            self._check_flows(self._flows, derived)
        self._catalog.set("layout", layout)

    def _check_flows(self, flows: Flows, derived: int) -> None:
        """A tick that was cut off is repeated by the same flows only: others have other edges."""
        is_same = self._catalog.setting("flows") == flows.digest
        if derived >= 0:
            self._refill(flows, derived, derived + 1 if is_same else derived)
        elif not is_same:
            flows.reset(self._jobs)
        self._catalog.set("flows", flows.digest)

    def _refill(self, flows: Flows, derived: int, upto: int) -> None:
        """Fills the flows of which a stage is not where it must be, or that are new."""
        expected = self._expected(derived)
        tables = {table.name for table in self._tables}
        known = {one.collection for one in self._catalog.applied()}

        def files(source: str) -> tuple[str, ...] | None:
            return None if source in tables else self._paths(source, derived)

        def at_least(stage: str, partition: int) -> int:
            return expected.get((stage, partition), expected["", 0])

        lost = flows.lost(self._jobs, at_least, upto)
        for view in flows.views:
            is_new = view.name not in known
            if is_new or view.name in lost:
                written = flows.refill(self._jobs, view.name, derived, files, is_new)
                self._catalog.add_files(_files(written, derived), self._applied(written, derived))

    def _expected(self, derived: int) -> dict[tuple[str, int], int]:
        """What each partition must have applied; under ("", 0) what one must that the catalog does not name."""
        layout = self._layout.name
        if self._catalog.setting("layout") != layout:
            return {("", 0): derived}
        named = {(one.collection, one.partition): one.tick for one in self._catalog.applied() if one.layout == layout}
        return {("", 0): -1, **named}

    def _arranged(self, with_rows: Set[str]) -> Iterable[tuple[str, bool]]:
        """Each collection, and whether it is a new view over tables that have rows already."""
        for table in self._tables:
            yield table.name, False
        known = {one.collection for one in self._catalog.applied()}
        for view in self._views:
            has_rows = any(used.table.name in with_rows for used in view.plan.inputs)
            yield view.name, view.name not in known and has_rows

    def _paths(self, collection: str, upto: int) -> tuple[str, ...]:
        return tuple(one.path for one in self._catalog.files(collection, -1, upto))

    # --- what is pending

    def waiting(self) -> list[Waiting]:
        return self._sealer.waiting()

    @property
    def unread(self) -> int:
        """Records in the log that no tick has read yet."""
        return sum(max(0, end - self._read.get(place, 0)) for place, end in self._ends().items())

    @property
    def pending_rows(self) -> int:
        return sum(self._sealer.pending_rows.values())

    @property
    def last_tick(self) -> int:
        return self._next - 1


def _pieces(one: OffsetRange) -> list[OffsetRange]:
    starts = range(one.start, one.end, CHUNK_EVENTS)
    return [OffsetRange(one.topic, one.partition, start, min(start + CHUNK_EVENTS, one.end)) for start in starts]


def _files(written: Sequence[Written], tick: int) -> list[HistoryFile]:
    return [HistoryFile(one.collection, one.path, tick, tick, one.rows, one.size_bytes) for one in written if one.path]


def _rows_seen(ingested: Ingested) -> list[RowsSeen]:
    ranges = tasks.ipc_table(ingested.ranges)
    name = ingested.chunk.table.name
    columns = (ranges[column].to_pylist() for column in ("group", "first", "last", "lsn"))
    group, first, last, lsn = columns
    is_new = ranges["sequence"].null_count == ranges.num_rows
    sequence = repeat(None) if is_new else ranges["sequence"].to_pylist()
    place = repeat(str(ingested.chunk.range))
    return list(map(RowsSeen._make, zip(group, repeat(name), first, last, lsn, sequence, place, strict=False)))


def _transactions_blob(sealed: Sequence[SealedTransaction]) -> bytes:
    columns: list[list[Any]] = [
        [one.position for one in sealed],
        [one.group for one in sealed],
        [one.id for one in sealed],
        [one.lsn for one in sealed],
        [one.commit_ms for one in sealed],
        [one.rows for one in sealed],
        [min(one.ticks, default=None) for one in sealed],
        [None if one.tables is None else "\n".join(sorted(one.tables)) for one in sealed],
        [None if one.numbers is None else json.dumps(one.numbers) for one in sealed],
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, _TRANSACTIONS, strict=True)]
    return tasks.ipc_bytes(pa.record_batch(arrays, schema=_TRANSACTIONS))


def _transactions_of(seal: Seal) -> list[SealedTransaction]:
    """As they were sealed; of the ticks that hold their rows all that may be are named."""
    return [
        SealedTransaction(
            one["position"],
            one["group"],
            one["id"],
            one["lsn"],
            one["commit_ms"],
            one["rows"],
            frozenset(range(one["first_tick"], seal.tick + 1)) if one["first_tick"] is not None else frozenset(),
            _tables_of(one.get("tables")),
            _numbers_of(one.get("numbers")),
        )
        for one in tasks.ipc_table(seal.transactions).to_pylist()
    ]


@lru_cache(maxsize=1024)
def _tables_of(text: str | None) -> frozenset[str] | None:
    """Seals of earlier versions do not say which tables END counted."""
    return None if text is None else frozenset(text.split("\n")) - {""}


def _numbers_of(text: str | None) -> Ranges | None:
    return None if text is None else tuple((first, last) for first, last in json.loads(text))
