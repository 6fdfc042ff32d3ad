"""Dataflow: a view as pure data. Rows flow along edges into stages; a stage keeps what it has seen by one key.

A row on an edge is a JSON object whose columns have names that are unique within the view (`$12`): two rows are joined
by joining their texts. A row moves as a delta: (key, step, diff, row), diff being the number of copies that enter
(more than 0) or leave (less). All deltas of one step belong together: a step is one source transaction where the view
is TRANSACTIONALLY, else one tick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tidegate.views.expressions import ValueType

RowText = bytes
KeyBytes = bytes


class Delta(NamedTuple):
    """So many copies of a row enter or leave, under the stage's key."""

    key: KeyBytes
    step: int
    diff: int
    row: RowText


@dataclass(frozen=True)
class Field:
    """A column of a row on an edge."""

    name: str
    type: ValueType
    nullable: bool = True


@dataclass(frozen=True)
class Ordering:
    """A column to order by."""

    field: Field
    descending: bool = False
    nulls_last: bool = False


# --- steps along an edge


@dataclass(frozen=True)
class Pick:
    """Columns under new names, their texts untouched; all others are dropped."""

    columns: tuple[tuple[str, str], ...]  # new name, old name


@dataclass(frozen=True)
class Present:
    """Only rows in which none of the columns is NULL."""

    columns: tuple[str, ...]


@dataclass(frozen=True)
class Evaluate:
    """Expressions and filters that Spark computes, a row at a time; the driver knows them by number."""

    number: int
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Unnest:
    """A row for each element of an array (already computed), which is dropped; of structs, a column for each field."""

    array: str
    position: str | None  # the name of a column for the element's place, from 0
    elements: tuple[tuple[str, str | None], ...]  # new column; the element's field, or None for the element itself
    outer: bool  # a row of NULLs where the array is empty or NULL


@dataclass(frozen=True)
class Repeat:
    """As many copies of a row as an integer column of it says."""

    count: str


EdgeStep = Pick | Present | Evaluate | Unnest | Repeat


@dataclass(frozen=True)
class KeyColumn:
    """A part of a stage's key."""

    field: Field
    null_matches: bool = True  # else a row in which it is NULL has no partner in the stage


@dataclass(frozen=True)
class Edge:
    """How the rows of a producer come to an input of a stage: at most one step is an Evaluate."""

    producer: str  # a table or view by name, or a stage as "#3"
    steps: tuple[EdgeStep, ...]
    stage: int
    input: int
    key: tuple[KeyColumn, ...]
    unmatched: bool = True  # whether a row that has no partner is sent at all


# --- stages

JoinKind = Literal["inner", "left", "full", "semi", "anti", "exists"]
AggregateFunction = Literal["count", "sum", "min", "max", "collect", "set", "greatest_by", "least_by", "only"]


@dataclass(frozen=True)
class Join:
    """Rows of input 0 with their partners of input 1 under the same key.

    inner, left, full: both rows' columns (NULLs for a missing one). semi, anti: rows of input 0 that have a partner, or
    none. exists: rows of input 0 with one more column, whether there is a partner.
    """

    kind: JoinKind
    left: tuple[Field, ...]
    right: tuple[Field, ...]
    flag: str = ""


@dataclass(frozen=True)
class Aggregate:
    """One result over the rows of a group.

    count: rows in which no column is NULL (of no columns: all). sum: of integers or decimals. min, max: least and
    greatest. collect, set: an array of what is not NULL, in the order of `order`, of a set once each. greatest_by,
    least_by: the column of the row in which the first of `order` is greatest, or least. only: the one value that is not
    NULL. `where` names a boolean column: only rows in which it is true count.
    """

    function: AggregateFunction
    columns: tuple[Field, ...]
    output: Field
    distinct: bool = False
    where: str | None = None
    order: tuple[Ordering, ...] = ()


@dataclass(frozen=True)
class Group:
    """One row a group: its key columns, then its aggregates. Without key columns there is always one row."""

    keys: tuple[Field, ...]
    aggregates: tuple[Aggregate, ...]


@dataclass(frozen=True)
class Top:
    """The first rows of each group, with their place from 1 on; `limit` None: all of them."""

    order: tuple[Ordering, ...]
    function: Literal["row_number", "rank", "dense_rank"]
    limit: int | None
    position: str | None  # the name of the column for the place


@dataclass(frozen=True)
class Relay:
    """Passes rows on: two steps of Spark's follow one another."""


@dataclass(frozen=True)
class Sink:
    """The view itself: at most one row a key, kept to tell old from new; its columns are the view's own."""

    fields: tuple[Field, ...]


Operator = Join | Group | Top | Relay | Sink


@dataclass(frozen=True)
class Stage:
    """An operator, and how deep it lies: every producer of its edges lies less deep."""

    number: int
    level: int
    operator: Operator


@dataclass(frozen=True)
class Dataflow:
    """A view: the last stage is its sink."""

    name: str
    edges: tuple[Edge, ...]
    stages: tuple[Stage, ...]
    transactionally: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The tables and views that it reads."""
        return tuple(dict.fromkeys(edge.producer for edge in self.edges if not edge.producer.startswith("#")))

    def edges_of(self, producer: str) -> Iterator[Edge]:
        return (edge for edge in self.edges if edge.producer == producer)
