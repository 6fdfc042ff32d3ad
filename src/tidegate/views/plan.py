"""Plan: a view as one stage of pure data, which workers compile and `explain` prints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tidegate.model.schema import TableSchema
from tidegate.views.expressions import (
    Aggregate,
    Arithmetic,
    Coalesce,
    Column,
    Constant,
    Expression,
    Negative,
    NullTest,
    Struct,
    columns_in,
    walk,
)

JoinKind = Literal["from", "inner", "left"]
Form = Literal["text", "number", "fragment", "flag"]
FORMS: dict[str, Form] = {"sum": "number", "count": "flag", "collect": "fragment"}
_KERNEL = 1  # another number empties every arrangement: raise it when contributions or keys are laid out anew


@dataclass(frozen=True)
class PlanInput:
    """One use of a table: how it joins, and by which of its columns; all inputs share the key, column by column."""

    table: TableSchema
    alias: str
    join: JoinKind
    key: tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """A column of the view."""

    name: str
    expression: Expression


@dataclass(frozen=True)
class Slot:
    """A value computed from one input's row alone, when the row is routed; None where a condition does not hold."""

    input: int
    form: Form
    expression: Expression
    conditions: tuple[NullTest, ...] = ()
    column: str = ""  # the output column that an overflow names


@dataclass(frozen=True)
class ViewPlan:
    """One stage: its inputs by their shared key, its groups, its outputs."""

    name: str
    inputs: tuple[PlanInput, ...]
    grouping: tuple[Column, ...]
    key: tuple[Column, ...]  # the shared key's columns first, in their order; then what tells apart rows of one group
    outputs: tuple[Output, ...]

    @property
    def one_row_per_group(self) -> bool:
        """Whether the shared key alone is the view's key."""
        return len(self.key) == len(self.inputs[0].key)

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        """For each input, the columns that the view reads."""
        columns = columns_in(*self.key, *(output.expression for output in self.outputs))
        return tuple(
            tuple(dict.fromkeys((*used.key, *(column.name for column in columns if column.input == place))))
            for place, used in enumerate(self.inputs)
        )

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """What rows contribute, ordered by input."""
        found = dict.fromkeys(self._slots())
        return tuple(sorted(found, key=lambda slot: slot.input))

    def _slots(self) -> Iterator[Slot]:
        for column in self.key:
            yield Slot(column.input, "text", column)
        for output in self.outputs:
            for column in columns_in(*outside_aggregates(output.expression)):
                yield Slot(column.input, "text", column)
            for node in walk(output.expression):
                if isinstance(node, Aggregate):
                    yield from slots_of(node, output.name)

    @property
    def layout(self) -> str:
        """Names the meaning of this stage's stored bytes; a column that the view does not read changes nothing."""
        narrowed = zip(self.inputs, self.needed, strict=True)
        inputs = tuple(replace(used, table=used.table.only(needed)) for used, needed in narrowed)
        return hashlib.sha256(repr((_KERNEL, replace(self, inputs=inputs))).encode()).hexdigest()

    def explain(self) -> str:
        """The plan as a readable tree."""
        return "\n".join(_explained(self))


def outside_aggregates(expression: Expression) -> tuple[Expression, ...]:
    """The parts of an expression that read grouping columns."""
    if isinstance(expression, Aggregate):
        return ()
    if isinstance(expression, Column):
        return (expression,)
    if isinstance(expression, (Coalesce, Struct)):
        return tuple(part for operand in expression.operands for part in outside_aggregates(operand))
    if isinstance(expression, Arithmetic):
        return (*outside_aggregates(expression.left), *outside_aggregates(expression.right))
    return outside_aggregates(expression.operand) if isinstance(expression, Negative) else ()


def slots_of(aggregate: Aggregate, column: str) -> tuple[Slot, ...]:
    """One slot if a single input has all that the aggregate needs, else one for each of its columns."""
    used = columns_in(aggregate)
    inputs = {leaf.input for leaf in used}
    if len(inputs) == 1:
        return (Slot(inputs.pop(), FORMS[aggregate.function], aggregate.operand, aggregate.conditions, column),)
    return tuple(Slot(leaf.input, "text", leaf) for leaf in used)


def _explained(plan: ViewPlan) -> Iterator[str]:
    yield f"view {plan.name}"
    yield f"  key {', '.join(shown(column, plan) for column in plan.key)}"
    yield f"  group by {', '.join(shown(column, plan) for column in plan.grouping)}"
    for output in plan.outputs:
        yield f"  {output.name} = {shown(output.expression, plan)} : {output.expression.type.ddl}"
    shared = ", ".join(shown(column, plan) for column in plan.key[: len(plan.inputs[0].key)])
    yield f"  stage by {shared}: {'one row' if plan.one_row_per_group else 'several rows'} a group"
    for used, needed in zip(plan.inputs, plan.needed, strict=True):
        yield f"    {used.join} {used.table.name} {used.alias} by {', '.join(used.key)}; reads {', '.join(needed)}"


def shown(expression: Expression, plan: ViewPlan) -> str:
    """An expression as SQL, for people."""
    match expression:
        case Column():
            return f"{plan.inputs[expression.input].alias}.{expression.name}"
        case Constant():
            return expression.text
        case Arithmetic():
            return f"({shown(expression.left, plan)} {expression.operator} {shown(expression.right, plan)})"
        case Negative():
            return f"-{shown(expression.operand, plan)}"
        case Coalesce():
            return f"coalesce({', '.join(shown(operand, plan) for operand in expression.operands)})"
        case Struct():
            return f"struct({', '.join(shown(operand, plan) for operand in expression.operands)})"
        case Aggregate():
            return f"{expression.function}({shown(expression.operand, plan)}){_filter(expression, plan)}"


def _filter(aggregate: Aggregate, plan: ViewPlan) -> str:
    tests = (f"{shown(test.operand, plan)} is {'' if test.wants_null else 'not '}null" for test in aggregate.conditions)
    return f" where {' and '.join(tests)}" if aggregate.conditions else ""
