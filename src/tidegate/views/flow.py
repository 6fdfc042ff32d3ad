"""Flow: a view's SQL as a dataflow, checked and typed by Spark, with what the driver needs to run it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from tidegate.errors import FixConfiguration
from tidegate.model.cell import encode_json
from tidegate.views.catalyst import Catalyst, Node, children, expressions, kind, place_of, value_type, walk
from tidegate.views.dataflow import Dataflow, Edge, Evaluate, Pick
from tidegate.views.definition import OutputColumn
from tidegate.views.explaining import explained
from tidegate.views.expressions import ValueType
from tidegate.views.planner import INTERNAL, Computed, Planner
from tidegate.views.query import SourceText

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_UNSTABLE = {
    "CurrentTimestamp": "NOW",
    "Now": "NOW",
    "CurrentTimestampLike": "NOW",
    "CurrentDate": "CURRENT_DATE",
    "CurrentTime": "CURRENT_TIME",
    "LocalTimestamp": "LOCALTIMESTAMP",
    "CurrentUser": "CURRENT_USER",
    "CurrentDatabase": "CURRENT_DATABASE",
    "CurrentCatalog": "CURRENT_CATALOG",
    "CurrentTimeZone": "CURRENT_TIMEZONE",
    "First": "FIRST",
    "Last": "LAST",
    "AnyValue": "ANY_VALUE",
}
_CLOCK = re.compile(r"(now|today|tomorrow|yesterday)\b")
_CLOCK_LITERAL = re.compile(
    r"\b(date|timestamp|timestamp_ltz|timestamp_ntz)\s*'\s*(now|today|tomorrow|yesterday)\b", re.I
)
_KEY = re.compile(r"^\s*--\s*key\s*:\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_STABLE = "Use a column that the application wrote: a view is a function of its tables."
_TRANSACTIONALLY = re.compile(r"((?:\s|--[^\n]*\n|/\*.*?\*/)*select\s+)(transactionally)\b", re.IGNORECASE | re.DOTALL)


class NotUnderstood(FixConfiguration):
    """Spark cannot make sense of a query."""


@dataclass(frozen=True)
class FlowView:
    """A view kept by stages."""

    name: str
    sql: str
    query: str  # the SQL as Spark reads it
    key: tuple[str, ...]
    columns: tuple[OutputColumn, ...]
    types: tuple[ValueType, ...]
    flow: Dataflow
    computed: Mapping[int, Computed]
    levels: Mapping[str, int]  # of what it reads
    collects: bool  # whether arrays in it are in an order that SQL leaves open
    warnings: tuple[str, ...]

    def level_of(self, producer: str) -> int:
        return self.flow.stages[int(producer[1:])].level if producer.startswith("#") else self.levels[producer]

    @property
    def transactionally(self) -> bool:
        return self.flow.transactionally

    @property
    def reads(self) -> Mapping[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for edge in self.flow.edges:
            if not edge.producer.startswith("#"):
                found[edge.producer] = found.get(edge.producer, frozenset()) | _columns_of(edge)
        return found

    def explain(self) -> str:
        return "\n".join(explained(self.name, self.key, self.flow))

    def arranged(self, column: str, value: Any) -> Any:
        return _arranged(value) if self.collects else value

    @property
    def level(self) -> int:
        """How deep the view itself lies."""
        return self.flow.stages[-1].level

    def evaluated(self, edge: Edge) -> Iterator[tuple[Evaluate, Computed]]:
        return ((step, self.computed[step.number]) for step in edge.steps if isinstance(step, Evaluate))


def _columns_of(edge: Edge) -> frozenset[str]:
    first = next(step for step in edge.steps if isinstance(step, Pick))
    return frozenset(old for _, old in first.columns)


def _arranged(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(map(_arranged, value), key=encode_json)
    return {name: _arranged(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def define_flow(
    text: SourceText, catalyst: Catalyst, levels: Mapping[str, int], keys: Mapping[str, tuple[str, ...]]
) -> FlowView:
    """Checks a view's SQL and plans its stages; refuses what cannot be kept, with its place and a remedy."""
    query, transactionally = _plain(text.sql)
    plain = replace(text, sql=query)
    frame = _analysed(plain, catalyst)
    execution = frame._jdf.queryExecution()
    if clock := _CLOCK_LITERAL.search(plain.sql):
        plain.refuse(f"{clock.group()}' gives another result each time", _STABLE, clock.start())
    _refuse_unstable(plain, execution.analyzed())
    planner = Planner(plain, catalyst, levels, keys)
    names = frame.schema.names
    _refuse_twins(plain, names)
    declared = _declared(plain, names)
    optimized = execution.optimizedPlan()
    key = planner.plan(optimized, names, declared)
    flow = renamed(planner.dataflow(text.view, transactionally))
    used = {name: levels[name] for name in flow.sources}
    return FlowView(
        text.view,
        text.sql,
        query,
        key,
        _columns(frame.schema),
        tuple(value_type(one.dataType) for one in frame.schema.fields),
        flow,
        planner.computed,
        used,
        planner.carries_keys,
        tuple(planner.warnings),
    )


def _plain(sql: str) -> tuple[str, bool]:
    """The text without TRANSACTIONALLY; every other word keeps its place."""
    found = _TRANSACTIONALLY.match(sql)
    if not found:
        return sql, False
    return sql[: found.start(2)] + " " * len(found.group(2)) + sql[found.end(2) :], True


def _analysed(text: SourceText, catalyst: Catalyst) -> Any:
    from pyspark.errors import AnalysisException

    try:
        if catalyst.is_command(catalyst.parsed(text.sql)):
            text.refuse("a view is one SELECT, and this is a command", "Write one SELECT a file.")
        return catalyst.sql(text.sql)
    except AnalysisException as error:  # and ParseException
        lines = str(error).strip().splitlines()
        found = re.search(r"line (\d+),? pos(?:ition)? (\d+)", str(error))
        at = text.offset(int(found.group(1)), int(found.group(2)) + 1) if found else 0
        reason = re.sub(r"\s*SQLSTATE: \w+.*$", "", lines[0])
        message = f"{text.place(at)}: Spark refuses the query: {reason}"
        raise NotUnderstood(message, remedy="Correct the SQL (Spark's dialect).") from None


def _refuse_unstable(text: SourceText, plan: Node) -> None:
    for node in walk(plan):
        for whole in expressions(node):
            for part in walk(whole):
                name = _UNSTABLE.get(kind(part))
                if name is None and _is_clock(part):
                    name = str(part.child().value())
                if name is None and not part.deterministic() and not any(map(_is_unstable, children(part))):
                    name = str(part.prettyName()).upper()
                if name is not None:
                    place = place_of(part)
                    text.refuse(
                        f"{name} gives another result each time",
                        _STABLE if name not in ("FIRST", "LAST", "ANY_VALUE") else "Use MIN, MAX, MIN_BY or MAX_BY.",
                        text.offset(*place) if place else 0,
                    )
        for inner in _subplans(node):
            _refuse_unstable(text, inner)


def _is_clock(part: Any) -> bool:
    """Whether a text such as 'now' is read as a date or timestamp."""
    if kind(part) != "Cast" or kind(part.child()) != "Literal":
        return False
    text = str(part.child().value()).strip().lower()
    return bool(_CLOCK.match(text)) and str(part.dataType().simpleString()).startswith(("date", "timestamp"))


def _is_unstable(part: Any) -> bool:
    return not part.deterministic()


def _subplans(node: Node) -> Iterator[Node]:
    """The plans of subqueries in a node's expressions."""
    for whole in expressions(node):
        for part in walk(whole):
            if kind(part) in ("ScalarSubquery", "Exists", "ListQuery", "LateralSubquery"):
                yield part.plan()


def _refuse_twins(text: SourceText, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            text.refuse(f'two columns are named "{name}"', "Give one of them another name with AS.")
        seen.add(name.lower())


def _declared(text: SourceText, names: Sequence[str]) -> tuple[str, ...] | None:
    found = _KEY.search(text.sql)
    if not found:
        return None
    listed = tuple(word.strip().strip("`") for word in found.group(1).split(","))
    known = {name.lower() for name in names}
    for name in listed:
        if name.lower() not in known:
            text.refuse(f'the key names "{name}", which is not selected', "Select it, or leave it out.", found.start(1))
    return listed


def _columns(schema: StructType) -> tuple[OutputColumn, ...]:
    return tuple(
        OutputColumn(
            one.name, value_type(one.dataType).ddl, one.nullable, one.dataType.typeName() in ("array", "struct", "map")
        )
        for one in schema.fields
    )


def renamed(flow: Dataflow) -> Dataflow:
    """The flow with names that depend on its shape alone: Spark numbers columns anew in each session."""
    names: dict[str, str] = {}
    edges = tuple(sorted(flow.edges, key=lambda edge: (edge.stage, edge.input)))
    found: Dataflow = _renamed(replace(flow, edges=edges), names)
    return found


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        return names.setdefault(value, f"${len(names)}") if INTERNAL.fullmatch(value) else value
    if isinstance(value, tuple):
        return tuple(_renamed(part, names) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _renamed(getattr(value, one.name), names) for one in fields(value)})
    return value
