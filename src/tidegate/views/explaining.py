"""Explaining: a dataflow as a readable tree, from the view down to its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidegate.views.dataflow import Dataflow, Edge, Evaluate, Group, Join, Operator, Relay, Sink, Top


def explained(name: str, key: Sequence[str], flow: Dataflow) -> Iterator[str]:
    """One line a stage and an input."""
    how = ", each transaction by itself" if flow.transactionally else ""
    yield f"view {name}: key {', '.join(key) or '(one row)'}{how}"
    yield from _stage(flow, flow.stages[-1].number, "  ")


def _stage(flow: Dataflow, number: int, indent: str) -> Iterator[str]:
    yield f"{indent}{_shown(flow.stages[number].operator)}"
    for edge in flow.edges:
        if edge.stage == number:
            yield from _edge(flow, edge, indent + "  ")


def _edge(flow: Dataflow, edge: Edge, indent: str) -> Iterator[str]:
    computed = [text for step in edge.steps if isinstance(step, Evaluate) for text in step.shown]
    key = ", ".join(column.field.name for column in edge.key) or "one group"
    source = "" if edge.producer.startswith("#") else edge.producer
    yield f"{indent}by {key}{': ' if source else ''}{source}"
    yield from (f"{indent}  computes {text}" for text in computed)
    if edge.producer.startswith("#"):
        yield from _stage(flow, int(edge.producer[1:]), indent + "  ")


def _shown(operator: Operator) -> str:
    match operator:
        case Join():
            return f"{operator.kind} join; keeps the rows of both sides by their key"
        case Group():
            made = ", ".join(
                f"{one.output.name} = {one.function}({'distinct ' if one.distinct else ''}"
                f"{', '.join(field.name for field in one.columns) or '*'})"
                for one in operator.aggregates
            )
            return f"group: {made or 'each once'}; keeps {_kept(operator)}"
        case Top():
            most = f"first {operator.limit}" if operator.limit is not None else "all"
            return f"{operator.function}, {most}; keeps the rows in their order"
        case Relay():
            return "rows out of rows; keeps nothing"
        case Sink():
            return "the view's rows by their key"


def _kept(group: Group) -> str:
    listed = {"min", "max", "collect", "set", "greatest_by", "least_by"}
    if any(one.function in listed or one.distinct for one in group.aggregates):
        return "a result and the values in their order, a group"
    return "a result a group"
