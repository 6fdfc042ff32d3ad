"""What Spark's tasks are told, and what they answer: plain values that travel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.model.schema import TableSchema
from tidegate.timeline.binding import OffsetRange
from tidegate.views.dataflow import Dataflow
from tidegate.views.plan import ViewPlan


@dataclass(frozen=True)
class Layout:
    """Where state lies, and over how many partitions keys are spread."""

    state: Path
    partitions: int

    @property
    def name(self) -> str:
        return str(self.partitions)

    @property
    def log(self) -> Path:
        return self.state / "log"

    def pending(self, tick: int, chunk: int) -> Path:
        return self.state / "pending" / f"{tick:012d}-{chunk}.arrow"

    def arrangement(self, collection: str, partition: int) -> Path:
        return self.state / "arrangements" / collection / f"{partition}-of-{self.partitions}"


@dataclass(frozen=True)
class Chunk:
    """A part of one tick's binding that one task reads, of one table's topic."""

    tick: int
    number: int
    table: TableSchema
    collection: str  # the table as END names it
    range: OffsetRange


@dataclass(frozen=True)
class Ingested:
    """What reading one chunk has shown; `ranges` is an Arrow blob of (group, first, last, lsn, sequence)."""

    chunk: Chunk
    rows: int
    ranges: bytes
    last_snapshot_rows: tuple[str, ...]  # the generations whose last row was seen
    streamed: bool
    has_moved: bool = False  # rows under another key came without all of their columns


@dataclass(frozen=True)
class Pending:
    """Files of one table's pending rows that one task reads together.

    `history` is given where rows have moved to another key and lack columns that the row under their former key has:
    then all of the tick's files are here, and all of the table's history before it.
    """

    table: str
    paths: tuple[str, ...]
    history: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Sealed:
    """What a tick seals: the positions of its snapshots, and of its last transaction."""

    tick: int
    snapshots: tuple[int, ...]
    last_position: int


@dataclass(frozen=True)
class ViewWork:
    name: str
    plan: ViewPlan


@dataclass(frozen=True)
class FlowWork:
    """The dataflows of a run, and the tick that they are brought to."""

    layout: Layout
    sealed: Sealed
    flows: tuple[Dataflow, ...]
    layouts: tuple[str, ...]  # of each flow: names the meaning of its stages' stored bytes
    filling: tuple[str, ...] = ()  # only these flows take part, and what their sinks put out is not history
    emitting: bool = True

    @property
    def taking_part(self) -> tuple[int, ...]:
        every = range(len(self.flows))
        return tuple(place for place in every if not self.filling or self.flows[place].name in self.filling)


@dataclass(frozen=True)
class Derivation:
    """What the tasks of one tick's derivation need to know."""

    layout: Layout
    sealed: Sealed
    tables: tuple[TableSchema, ...]
    views: tuple[ViewWork, ...]
    flows: FlowWork | None = None


@dataclass(frozen=True)
class Written:
    """A partition has applied a tick; `path` is None where nothing changed."""

    collection: str
    partition: int
    path: str | None
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class Rebuild:
    """A partition of an arrangement to check: it must have applied `expected`; else it is filled as of the tick."""

    collection: str
    partition: int
    expected: int
    emit: bool = False  # the view is new: what it puts out becomes its history
