"""What runs in Spark's Python workers for dataflows: rows leave a producer, stages fold what came.

Elements travel as pairs: (partition, (name, blob)) for a stage's input, (None, (edge, lines)) for rows that Spark
has to evaluate first, (partition, Written) for what is done. What a stage sends is in a file before its arrangement
commits the tick, so that a repeated task sends the same again.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pyarrow import compute

from tidegate.collections import history
from tidegate.crash_points import reach
from tidegate.errors import FixConfiguration
from tidegate.model.key import key_hash
from tidegate.pipeline.work import FlowWork, Written
from tidegate.spark.failures import carrying_errors
from tidegate.views.arrangement import AlreadyApplied, Arrangement, Transaction
from tidegate.views.dataflow import Delta, Group, Sink, Stage
from tidegate.views.evaluation import evaluated_batch
from tidegate.views.expressions import TypeOverflowError
from tidegate.views.operators import GroupFold, NotOnlyOne, TwoRowsOfOneKey
from tidegate.views.operators import compiled as compiled_operator
from tidegate.views.routing import CompiledEdge, Moved
from tidegate.views.routing import compiled as compiled_edge

CHUNK_ROWS = 20_000
BEFORE_ALL = -1  # the step before the first transaction
Pair = tuple[int | None, Any]
_encode = msgspec.msgpack.Encoder().encode
_deltas = msgspec.msgpack.Decoder(list[Delta]).decode


class Numbered(NamedTuple):
    """An edge, where it belongs, and its number among all edges of the work."""

    number: int
    flow: int
    edge: CompiledEdge


def edges_of(work: FlowWork, producer: str, flow: int | None) -> Iterator[Numbered]:
    """The edges that leave a stage of a flow, or a table or view (flow None)."""
    first = 0
    for place, one in enumerate(work.flows):
        for number, edge in enumerate(one.edges, first):
            if edge.producer == producer and flow in (None, place) and place in work.taking_part:
                yield Numbered(number, place, compiled_edge(edge))
        first += len(one.edges)


def is_read(work: FlowWork, producer: str) -> bool:
    """Whether any flow reads a table or view."""
    return next(edges_of(work, producer, None), None) is not None


def stage_name(flow: str, stage: int) -> str:
    return f"{flow}#{stage}"


# --- rows leave a producer


def leaving(work: FlowWork, edges: Sequence[Numbered], rows: Iterable[Moved]) -> Iterator[Pair]:
    """Rows along all edges of their producer, in chunks."""
    left = iter(rows)
    while chunk := list(islice(left, CHUNK_ROWS)):
        for one in edges:
            yield from _along(work, one, chunk)


def _along(work: FlowWork, one: Numbered, rows: Sequence[Moved]) -> Iterator[Pair]:
    if one.edge.evaluate is None:
        yield from routed(work, one, one.edge.deltas(rows))
        return
    net = _net(one.edge.before(rows))
    if net:
        lines = b"\n".join(b"%d %d\t%b" % (moved.step, moved.diff, moved.row) for moved in net)
        yield None, (one.number, lines.decode())


def _net(rows: Iterable[Moved]) -> list[Moved]:
    """Copies that enter and leave in one step are none."""
    counts: dict[tuple[int, bytes], int] = {}
    for step, diff, row in rows:
        counts[step, row] = counts.get((step, row), 0) + diff
    return [Moved(step, diff, row) for (step, row), diff in counts.items() if diff]


def routed(work: FlowWork, one: Numbered, deltas: Iterable[Delta]) -> Iterator[Pair]:
    """Blobs for the partitions of the deltas' keys."""
    partitions, counts = work.layout.partitions, dict[tuple[bytes, int, bytes], int]()
    for key, step, diff, row in deltas:
        counts[key, step, row] = counts.get((key, step, row), 0) + diff
    targets: list[list[Delta]] = [[] for _ in range(partitions)]
    for (key, step, row), diff in counts.items():
        if diff:
            targets[key_hash(key) % partitions].append(Delta(key, step, diff, row))
    edge = one.edge.edge
    name = f"{stage_name(work.flows[one.flow].name, edge.stage)}.{edge.input}"
    yield from ((target, (name, _encode(mine))) for target, mine in enumerate(targets) if mine)


# --- between two levels: what Spark has evaluated


def carried(pairs: Iterable[Pair]) -> Iterator[tuple[Any, ...]]:
    """Pairs as rows of a DataFrame."""
    for target, content in pairs:
        if target is None:
            yield None, None, None, *content
        elif isinstance(content, Written):
            yield target, "", pickle.dumps(content), None, None
        else:
            yield target, *content, None, None


@carrying_errors
def made(work: FlowWork, batches: Iterable[bytes]) -> Iterator[Pair]:
    """Rows that Spark has evaluated on their way to their stages; blobs pass."""
    waiting: dict[int, list[Moved]] = {}
    for batch in map(evaluated_batch, batches):
        passing = batch.filter(compute.is_valid(batch["target"])).select(["target", "name", "blob"])
        for target, name, blob in zip(*(column.to_pylist() for column in passing.columns), strict=True):
            yield target, pickle.loads(blob) if name == "" else (name, blob)
        rows = batch.filter(compute.is_valid(batch["made"]))
        for edge, head, row, more in zip(*(rows[name].to_pylist() for name in _EVALUATED), strict=True):
            step, diff = head.split(" ")
            waiting.setdefault(edge, []).append(Moved(int(step), int(diff), _with(row, more)))
        for edge in [edge for edge, found in waiting.items() if len(found) >= CHUNK_ROWS]:
            yield from _arrived(work, edge, waiting.pop(edge))
    for edge, found in waiting.items():
        yield from _arrived(work, edge, found)


def _arrived(work: FlowWork, number: int, rows: Sequence[Moved]) -> Iterator[Pair]:
    one = _numbered(work, number)
    return routed(work, one, one.edge.deltas(rows))


_EVALUATED = ("edge", "head", "row", "made")


def _with(row: str, more: str) -> bytes:
    text = row if more == "{}" else more if row == "{}" else f"{row[:-1]},{more[1:]}"
    return text.encode()


def _numbered(work: FlowWork, number: int) -> Numbered:
    first = 0
    for place, one in enumerate(work.flows):
        if number < first + len(one.edges):
            return Numbered(number, place, compiled_edge(one.edges[number - first]))
        first += len(one.edges)
    raise AssertionError(number)


# --- stages


@carrying_errors
def run_level(work: FlowWork, level: int, pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Folds what has come for the stages of a level; passes on what is for deeper ones."""
    mine = {
        stage_name(work.flows[place].name, stage.number): (place, stage)
        for place in work.taking_part
        for stage in work.flows[place].stages
        if stage.level == level
    }
    received: dict[tuple[int, str], list[tuple[int, bytes]]] = {}
    for target, content in pairs:
        stage, _, place = ("", "", "") if target is None or isinstance(content, Written) else content[0].rpartition(".")
        if target is not None and stage in mine:
            received.setdefault((target, stage), []).append((int(place), content[1]))
        else:
            yield target, content
    for (partition, name), blobs in sorted(received.items(), key=itemgetter(0)):
        yield from _StageTask(work, *mine[name], partition).run(blobs)


@dataclass(frozen=True)
class _StageTask:
    """One stage of one flow in one partition."""

    work: FlowWork
    flow: int
    stage: Stage
    partition: int

    @property
    def name(self) -> str:
        return stage_name(self.work.flows[self.flow].name, self.stage.number)

    def run(self, blobs: Sequence[tuple[int, bytes]]) -> Iterator[Pair]:
        """What the stage sends on, and the word that it has applied the tick."""
        tick, layout = self.work.sealed.tick, self.work.layout
        folder = layout.arrangement(self.name, self.partition)
        arrangement = Arrangement.open(folder, f"{layout.name} {self.work.layouts[self.flow]}")
        sent = folder / f"sent-{tick}"
        if arrangement.applied < tick:
            with suppress(AlreadyApplied), arrangement.write(tick) as transaction:
                _keep(sent, self._sending(transaction, blobs))
                reach("stage-sent")
            _forget_others(sent)
        yield from _kept(sent)
        yield self.partition, Written(self.name, self.partition, None, 0, 0)

    def _sending(self, transaction: Transaction, blobs: Sequence[tuple[int, bytes]]) -> Iterator[Pair]:
        outputs = self._folded(transaction, blobs)
        if isinstance(self.stage.operator, Sink):
            yield from self._delivered(sorted(outputs, key=itemgetter(1, 0, 2)))
        else:
            edges = list(edges_of(self.work, f"#{self.stage.number}", self.flow))
            yield from leaving(self.work, edges, (Moved(step, diff, row) for _, step, diff, row in outputs))

    def _folded(self, transaction: Transaction, blobs: Sequence[tuple[int, bytes]]) -> list[Delta]:
        operator = compiled_operator(self.stage.operator)
        inputs: list[list[Delta]] = [[], []]
        for place, blob in blobs:
            inputs[place] += _deltas(blob) if blob else []
        first: list[Delta] = []
        if isinstance(operator, GroupFold):
            is_single = self.work.flows[self.flow].transactionally
            first = operator.initial(transaction, BEFORE_ALL if is_single else self.work.sealed.last_position)
        try:
            return [*first, *operator.fold(transaction, inputs)]
        except (TwoRowsOfOneKey, NotOnlyOne) as error:
            raise _named(self.work.flows[self.flow].name, error) from None
        except TypeOverflowError as error:
            raise _overflow(self.work.flows[self.flow].name, str(error)) from None

    # --- the view itself

    def _delivered(self, deltas: Sequence[Delta]) -> Iterator[Pair]:
        """Writes the view's updates down, and sends them to the views that read it."""
        view, tick, layout = self.work.flows[self.flow].name, self.work.sealed.tick, self.work.layout
        updates = [history.Update(key, step, diff, row) for key, step, diff, row in deltas]
        written = Written(view, self.partition, None, 0, 0)
        if updates and self.work.emitting:
            path = history.tick_file(layout.state, view, tick, layout.name, self.partition)
            history.write(path, history.as_table(updates, tick))
            reach("view-history-written")
            written = Written(view, self.partition, str(path), len(updates), path.stat().st_size)
        yield self.partition, written
        yield from produced(self.work, view, updates)


def produced(work: FlowWork, producer: str, updates: Sequence[history.Update]) -> Iterator[Pair]:
    """A table's or view's updates to the flows that read it: each by itself, or what they are over the whole tick."""
    edges = list(edges_of(work, producer, None))
    single = [one for one in edges if work.flows[one.flow].transactionally]
    whole = [one for one in edges if not work.flows[one.flow].transactionally]
    if single:
        yield from leaving(work, single, (Moved(update.position, update.diff, update.cell) for update in updates))
    if whole:
        last = work.sealed.last_position
        yield from leaving(work, whole, (Moved(last, diff, cell) for diff, cell in _over_the_tick(updates)))


def _over_the_tick(updates: Sequence[history.Update]) -> Iterator[tuple[int, bytes]]:
    for old, new in history.net(updates).values():
        if old != new:
            yield from ((-1, old),) if old is not None else ()
            yield from ((1, new),) if new is not None else ()


def always(work: FlowWork) -> Iterator[Pair]:
    """A group of all rows has a row also where there are none: its stage is asked in every tick."""
    for place in work.taking_part:
        for stage in work.flows[place].stages:
            if isinstance(stage.operator, Group) and not stage.operator.keys:
                target = key_hash(b"") % work.layout.partitions
                yield target, (f"{stage_name(work.flows[place].name, stage.number)}.0", b"")


# --- what a stage has sent, for a task that runs again


def _keep(path: Path, pairs: Iterable[Pair]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            for pair in pairs:
                pickle.dump(pair, file)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise history.not_written(path, error) from error


def _kept(path: Path) -> Iterator[Pair]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


def _forget_others(path: Path) -> None:
    for other in path.parent.glob("sent-*"):
        if other != path:
            other.unlink(missing_ok=True)


# --- stages that have lost their state: filled from the rows that there are


class Source(NamedTuple):
    """A partition of a collection: a table's arrangement, or the share of a view's history that has its keys."""

    collection: str
    partition: int
    files: tuple[str, ...] | None  # of a view


@carrying_errors
def refill(work: FlowWork, loads: Iterable[Sequence[Source]]) -> Iterator[Pair]:
    """Sends the rows of collections, as of the tick, to the flows being filled."""
    for parts in loads:
        for part in parts:
            edges = list(edges_of(work, part.collection, None))
            rows = _rows_at(work, part) if part.files is None else _rows_of(work, part, part.files)
            yield from leaving(work, edges, (Moved(work.sealed.last_position, 1, row) for row in rows))


def _rows_of(work: FlowWork, part: Source, files: Sequence[str]) -> Iterator[bytes]:
    for key, row in history.current_rows(part.collection, files, work.sealed.tick).items():
        if key_hash(key) % work.layout.partitions == part.partition:
            yield row


def _rows_at(work: FlowWork, part: Source) -> Iterator[bytes]:
    """A partition's rows at the tick; what a later one that is under way has changed is taken back."""
    name, tick = work.layout.name, work.sealed.tick
    arrangement = Arrangement.open(work.layout.arrangement(part.collection, part.partition), name)
    before: Mapping[bytes, bytes | None] = {}
    if arrangement.applied > tick:
        path = history.tick_file(work.layout.state, part.collection, tick + 1, name, part.partition)
        updates = history.updates(history.read([str(path)], tick, tick + 1)) if path.exists() else ()
        ordered = sorted((update for _, update in updates), key=itemgetter(0))
        before = {key: _first(list(group)) for key, group in groupby(ordered, key=itemgetter(0))}
    for key, row in arrangement.entries():
        if key not in before:
            yield row
    yield from (row for row in before.values() if row is not None)


def _first(updates: Sequence[history.Update]) -> bytes | None:
    first = min(updates, key=lambda update: (update.position, update.diff))
    return first.cell if first.diff < 0 else None


@carrying_errors
def applied(work: FlowWork, loads: Iterable[Sequence[tuple[str, int, int]]]) -> Iterator[tuple[str, int, int]]:
    """Which tick each stage's partition has applied; stages of flows that are to be filled are emptied."""
    for parts in loads:
        for name, flow, partition in parts:
            layout = f"{work.layout.name} {work.layouts[flow]}"
            arrangement = Arrangement.open(work.layout.arrangement(name, partition), layout)
            if work.filling:
                arrangement.reset()
            yield name, partition, arrangement.applied


# --- errors


def _named(view: str, error: FixConfiguration) -> FixConfiguration:
    return FixConfiguration(f'view "{view}": {error.message}', remedy=error.remedy)


def _overflow(view: str, column: str) -> FixConfiguration:
    return FixConfiguration(
        f'view "{view}": a sum does not fit its type (column {column})',
        remedy="Cast its operand to a wider type in the view (bigint, a decimal of more digits), or correct the row.",
    )
