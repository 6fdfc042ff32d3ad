"""Planner: what Spark made of a view's SQL becomes a dataflow; what cannot be kept is refused with its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

from tidegate.views import facts as known
from tidegate.views.catalyst import (
    Catalyst,
    Expr,
    Node,
    attributes_in,
    children,
    conjuncts,
    expressions,
    field_of,
    is_attribute,
    is_summable,
    items,
    kind,
    name_of,
    place_of,
    python_type,
    unaliased,
    value_type,
    walk,
)
from tidegate.views.dataflow import (
    Aggregate,
    AggregateFunction,
    Dataflow,
    Edge,
    EdgeStep,
    Evaluate,
    Field,
    Group,
    Join,
    JoinKind,
    KeyColumn,
    Operator,
    Ordering,
    Pick,
    Present,
    Relay,
    Repeat,
    Sink,
    Stage,
    Top,
    Unnest,
)
from tidegate.views.expressions import ValueType
from tidegate.views.facts import Dependency, Facts
from tidegate.views.order_keys import order_key
from tidegate.views.query import SourceText

INTERNAL = re.compile(r"\$[km]?\d[\d_]*")  # columns of rows that are under way, and of no table
_ANOTHER_WAY = "Write it with joins, GROUP BY, UNION, EXISTS, or ROW_NUMBER() … <= k."


@dataclass(frozen=True)
class Computed:
    """What Spark computes where an edge has an Evaluate: over the attributes, if all conditions hold, the columns."""

    attributes: tuple[Expr, ...]
    conditions: tuple[Expr, ...]
    columns: tuple[tuple[str, Expr], ...]


@dataclass(frozen=True)
class Branch:
    """A producer's rows, and what is made of them: conditions and columns over its attributes."""

    producer: str
    attributes: tuple[Expr, ...]
    columns: Mapping[str, Expr]
    conditions: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class Stream:
    """What a node of Spark's plan puts out: the union of its branches."""

    branches: tuple[Branch, ...]
    attributes: Mapping[str, Expr]
    facts: Facts
    pairs: frozenset[tuple[str, str]] = frozenset()  # keys that a full join has equated, where neither is missing

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(map(field_of, self.attributes.values()))


@dataclass
class Planner:
    """Walks Spark's optimized plan of one view and notes stages, edges, and what Spark computes on the way."""

    text: SourceText
    catalyst: Catalyst
    levels: Mapping[str, int]  # how deep each table (0) and view lies
    keys: Mapping[str, tuple[str, ...]]
    edges: list[Edge] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    computed: dict[int, Computed] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    carries_keys: bool = False

    # --- the whole

    def plan(self, optimized: Node, names: Sequence[str], declared: Sequence[str] | None) -> tuple[str, ...]:
        """Notes everything up to the sink; returns the view's key."""
        self.carries_keys = any(kind(part) in ("CollectList", "CollectSet") for part in _all_expressions(optimized))
        stream = self.visit(optimized)
        outputs = dict(zip((name_of(one) for one in items(optimized.output())), names, strict=True))
        key = self._key(stream, outputs, declared, optimized)
        self._sink(stream, outputs, key)
        return tuple(outputs[column] for column in key)

    def _key(
        self, stream: Stream, outputs: Mapping[str, str], declared: Sequence[str] | None, node: Node
    ) -> tuple[str, ...]:
        if declared is not None:
            by_name = {name.lower(): column for column, name in outputs.items()}
            return tuple(by_name[name.lower()] for name in declared)
        nullable = [column for column in outputs if stream.attributes[column].nullable()]
        inside = {column for key in stream.facts.keys for column in key}
        least = [column for column in outputs if column not in inside]
        found = stream.facts.key_within(list(outputs), least=[*nullable, *least] if not inside else least)
        if found is None:
            self.refuse(
                "nothing in the select list tells the view's rows apart",
                "Select the primary keys of the joined tables, use GROUP BY or DISTINCT, or declare"
                " `-- key: a, b` on top of the file.",
                node,
            )
        return found

    def _sink(self, stream: Stream, outputs: Mapping[str, str], key: Sequence[str]) -> None:
        fields = {column: replace(field_of(stream.attributes[column]), name=name) for column, name in outputs.items()}
        renamed = replace(
            stream,
            branches=tuple(
                replace(one, columns={name: one.columns[column] for column, name in outputs.items()})
                for one in stream.branches
            ),
        )
        number = self._stage(Sink(tuple(fields.values())), [stream])
        parts = tuple(KeyColumn(fields[column]) for column in key)
        for branch in renamed.branches:
            self._edge(branch, number, 0, tuple(fields.values()), parts)

    def refuse(self, reason: str, remedy: str, at: Any) -> NoReturn:
        place = next((found for node in _outward(at) if (found := place_of(node))), None)
        offset = self.text.offset(*place) if place else 0
        self.text.refuse(reason, remedy, offset)

    # --- nodes

    def visit(self, node: Node) -> Stream:
        visitor = _VISITORS.get(kind(node))
        if visitor is None:
            what = _REFUSED.get(kind(node), (f"{kind(node)} is not supported", _ANOTHER_WAY))
            self.refuse(*what, node)
        return visitor(self, node)

    def leaf(self, node: Node) -> Stream:
        name = self.catalyst.table_of(node)
        for one in items(node.output()):
            if INTERNAL.fullmatch(str(one.name())):
                self.refuse(f'the column name "{one.name()}" is used inside', "Rename the column.", node)
        attributes = {name_of(one): one for one in items(node.output())}
        by_name = {str(one.name()): column for column, one in attributes.items()}
        key = [by_name[column] for column in self.keys[name]]
        branch = Branch(name, tuple(attributes.values()), attributes)
        return Stream((branch,), attributes, known.of_table(key, attributes))

    def project(self, node: Node) -> Stream:
        return self._projected(self.visit(node.child()), items(node.projectList()))

    def _projected(self, stream: Stream, listed: Sequence[Expr]) -> Stream:
        stream, listed = self._with_subqueries(stream, listed)
        attributes = {name_of(one): _known(stream, one) for one in listed}
        wanted = {name_of(one): unaliased(one) for one in listed}
        for column in self._carried(stream):
            wanted.setdefault(column, stream.attributes[column])
            attributes.setdefault(column, stream.attributes[column])
        branches = tuple(
            replace(one, columns={name: self._over(one, value) for name, value in wanted.items()})
            for one in stream.branches
        )
        facts = stream.facts.knowing(*(more for name, value in wanted.items() for more in _computed(name, value)))
        facts = facts.knowing(*(more for name, value in wanted.items() for more in _coalesced(stream, name, value)))
        return Stream(branches, attributes, facts, stream.pairs)

    def _carried(self, stream: Stream) -> Iterable[str]:
        """Columns that put the elements of arrays in order further on."""
        if not self.carries_keys or not stream.facts.keys:
            return ()
        return [column for column in sorted(stream.facts.keys[0]) if column in stream.attributes]

    def _over(self, branch: Branch, expression: Expr) -> Expr:
        """The expression over the producer's own attributes."""

        def instead(part: Expr) -> Expr | None:
            return branch.columns[name_of(part)] if is_attribute(part) else None

        return self.catalyst.replaced(expression, instead)

    def filter(self, node: Node) -> Stream:
        conditions = [one for one in conjuncts(node.condition()) if not _is_limit_of(one, node.child())]
        stream = self._filtered(self.visit(node.child()), conditions)
        present = {name_of(one.child()) for one in conditions if _is_presence(one)}
        attributes = {
            name: one.withNullability(False) if name in present else one for name, one in stream.attributes.items()
        }
        return replace(stream, attributes=attributes)

    def _filtered(self, stream: Stream, conditions: Sequence[Expr]) -> Stream:
        stream, conditions = self._with_subqueries(stream, conditions)
        branches = tuple(
            replace(one, conditions=(*one.conditions, *(self._over(one, condition) for condition in conditions)))
            for one in stream.branches
        )
        return replace(stream, branches=branches)

    def union(self, node: Node) -> Stream:
        output = items(node.output())
        names = [name_of(one) for one in output]
        branches: list[Branch] = []
        for child in children(node):
            stream = self.visit(child)
            old = [name_of(one) for one in items(child.output())]
            branches += [
                replace(one, columns={new: one.columns[was] for new, was in zip(names, old, strict=True)})
                for one in stream.branches
            ]
        return Stream(tuple(branches), dict(zip(names, output, strict=True)), Facts())

    def expand(self, node: Node) -> Stream:
        stream = self.visit(node.child())
        output = items(node.output())
        names = [name_of(one) for one in output]
        rows = [items(row) for row in items(node.projections())]
        stream, values = self._with_subqueries(stream, [value for row in rows for value in row])
        size = len(names)
        branches = tuple(
            replace(one, columns={name: self._over(one, values[place * size + at]) for at, name in enumerate(names)})
            for place in range(len(rows))
            for one in stream.branches
        )
        return Stream(branches, dict(zip(names, output, strict=True)), Facts())

    def nothing(self, node: Node) -> Stream:
        if kind(node) == "LocalRelation" and not node.data().isEmpty():
            self.refuse("rows that stand in the query are not supported", "Put them into a table and join it.", node)
        attributes = {name_of(one): one for one in items(node.output())}
        return Stream((), attributes, Facts((frozenset(),)))

    # --- subqueries that give one value

    def _with_subqueries(self, stream: Stream, listed: Sequence[Expr]) -> tuple[Stream, Sequence[Expr]]:
        found = {int(one.exprId().id()): one for whole in listed for one in walk(whole) if _is_subquery(one)}
        if not found:
            return stream, listed
        values: dict[int, Expr] = {}
        for identity, subquery in found.items():
            plan = subquery.plan()
            if plan.maxRows().isEmpty() or int(plan.maxRows().get()) > 1:
                self.refuse("a subquery that may give several rows", "Aggregate in it, or join its table.", subquery)
            inner = self.visit(plan)
            value = items(plan.output())[0]
            fresh = self.catalyst.alias(value).toAttribute()
            inner = self._projected(inner, [self.catalyst.alias(value, like=fresh)])
            stream = self._join("left", stream, inner, [])
            values[identity] = fresh

        def instead(part: Expr) -> Expr | None:
            return values[int(part.exprId().id())] if _is_subquery(part) else None

        return stream, [self.catalyst.replaced(one, instead) for one in listed]

    # --- joins

    def join(self, node: Node) -> Stream:
        how = str(node.joinType().sql()) if kind(node.joinType()) != "ExistenceJoin" else "EXISTS"
        if how not in _JOINS:
            self.refuse(f"{how} JOIN is not supported", _ANOTHER_WAY, node)
        left, right = self.visit(node.left()), self.visit(node.right())
        swapped = how == "RIGHT OUTER"
        if swapped:
            left, right = right, left
        condition = [] if node.condition().isEmpty() else conjuncts(node.condition().get())
        equal, rest = _split(condition, left, right)
        left, right, equal = self._computed_keys(left, right, equal)
        alone = (node.left() if swapped else node.right()).maxRows()
        single = not alone.isEmpty() and int(alone.get()) <= 1
        if not equal and not single and not (how == "INNER" and _is_single(node.left())):
            self._refuse_unbound(node, rest)
        flag = node.joinType().exists() if how == "EXISTS" else None
        return self._joined(_JOINS[how], left, right, equal, rest, flag)

    def _computed_keys(
        self, left: Stream, right: Stream, equal: Sequence[tuple[Expr, Expr, bool]]
    ) -> tuple[Stream, Stream, list[tuple[Expr, Expr, bool]]]:
        """Keys in which a subquery stands become columns."""
        found = []
        for pair in equal:
            keys = list(pair[:2])
            if any(map(_is_subquery, walk(pair[0]))):
                left, keys[:1] = self._with_columns(left, keys[:1])
            if any(map(_is_subquery, walk(pair[1]))):
                right, keys[1:] = self._with_columns(right, keys[1:])
            found.append((keys[0], keys[1], pair[2]))
        return left, right, found

    def _refuse_unbound(self, node: Node, rest: Sequence[Expr]) -> NoReturn:
        if any(kind(part) == "Or" for one in rest for part in walk(one)) and kind(node.joinType()) == "LeftAnti":
            self.refuse("NOT IN over columns that may be NULL", "Write NOT EXISTS (… WHERE a.x = b.y).", node)
        self.refuse(
            "a join without an equality: each row would meet all rows",
            "Add a condition a.x = b.y to the join; other conditions may stand beside it.",
            rest[0] if rest else node,
        )

    def _joined(
        self,
        how: JoinKind,
        left: Stream,
        right: Stream,
        equal: Sequence[tuple[Expr, Expr, bool]],
        rest: Sequence[Expr],
        flag: Expr | None,
    ) -> Stream:
        if not rest:
            return self._join(how, left, right, equal, flag)
        pairs = self._filtered(self._join("inner", left, right, equal), rest)
        if how == "inner":
            return pairs
        if how in ("semi", "anti", "exists"):
            return self._partnered(how, left, pairs, flag)
        alone = [self._partnered("anti", left, pairs, None)]
        if how == "full":
            alone.append(self._partnered("anti", right, pairs, None))
        missing = {column: self._null(one) for one in (left, right) for column, one in one.attributes.items()}
        branches = [*pairs.branches]
        for one in alone:
            branches += [
                replace(branch, columns={column: branch.columns.get(column, null) for column, null in missing.items()})
                for branch in one.branches
            ]
        attributes = {**_optional(left if how == "full" else None, left), **_optional(right, right)}
        return Stream(tuple(branches), attributes, _outer_facts(how, left, right, (), exact=False))

    def _null(self, attribute: Expr) -> Expr:
        return self.catalyst.null(attribute.dataType())

    def _partnered(self, how: JoinKind, rows: Stream, pairs: Stream, flag: Expr | None) -> Stream:
        """Rows that are, or are not, in a pair: by their key, or else by all that they are."""
        inside = replace(pairs, attributes=rows.attributes)
        key = next((key for key in rows.facts.keys if key <= rows.attributes.keys()), None)
        same = [(one, one, True) for name, one in rows.attributes.items() if key is None or name in key]
        return self._join(how, rows, inside, same, flag)

    def _join(
        self,
        how: JoinKind,
        left: Stream,
        right: Stream,
        equal: Sequence[tuple[Expr, Expr, bool]],
        flag: Expr | None = None,
    ) -> Stream:
        name = name_of(flag) if flag is not None else ""
        number = self._stage(Join(how, left.fields, right.fields, name), [left, right])
        for place, stream in enumerate((left, right)):
            wanted = [(pair[place], pair[2]) for pair in equal]
            unmatched = (how in ("left", "full", "anti", "exists") and place == 0) or how == "full"
            self._edges(stream, number, place, wanted, unmatched)
        return _join_result(how, number, left, right, equal, flag)

    # --- aggregates

    def aggregate(self, node: Node) -> Stream:
        stream = self.visit(node.child())
        grouping = [_known(stream, one) for one in items(node.groupingExpressions())]
        outputs = items(node.aggregateExpressions())
        made = _Aggregates(self, stream)
        results = [(call, made.result(call)) for call in _distinct_calls(outputs)]
        keys = list({name_of(one): one for one in grouping}.values())
        operator = Group(tuple(map(field_of, keys)), tuple(made.aggregates))
        number = self._stage(operator, [stream])
        self._edges(made.stream, number, 0, [(one, True) for one in keys], unmatched=True)
        attributes = {name_of(one): one for one in (*keys, *made.attributes)}
        branch = Branch(f"#{number}", tuple(attributes.values()), attributes)
        facts = known.grouped(stream.facts, [name_of(one) for one in keys], attributes)
        grouped = Stream((branch,), attributes, facts)

        def instead(part: Expr) -> Expr | None:
            if kind(part) != "AggregateExpression":
                return None
            return next(result for call, result in results if part.semanticEquals(call))

        return self._projected(grouped, [self.catalyst.replaced(one, instead) for one in outputs])

    # --- the first rows

    def limit(self, node: Node) -> Stream:
        count, below, projects = int(node.limitExpr().value()), node.child().child(), []
        while kind(below) == "Project":
            projects.append(below)
            below = below.child()
        if kind(below) != "Sort":
            self.refuse("LIMIT without ORDER BY gives other rows each time", "Add ORDER BY.", node)
        stream = self._top(self.visit(below.child()), [], items(below.order()), "row_number", count, None)
        for one in reversed(projects):
            stream = self._projected(stream, items(one.projectList()))
        return stream

    def window(self, node: Node) -> Stream:
        below, limit = node.child(), None
        if kind(below) == "WindowGroupLimit":
            if len(items(node.windowExpressions())) == 1:  # with several, it is that of one of them
                limit = int(below.limit())
            below = below.child()
        stream = self.visit(below)
        for one in items(node.windowExpressions()):
            function = _WINDOWS.get(kind(unaliased(one).windowFunction()))
            if function is None:
                self.refuse("this window function is not supported", _WINDOW_REMEDY, one)
            partition = items(node.partitionSpec())
            if limit is None and not partition:
                self.refuse("a window over all rows", "Add PARTITION BY, or keep the first k: … <= k.", one)
            stream = self._top(stream, partition, items(node.orderSpec()), function, limit, one.toAttribute())
        return stream

    def _top(
        self,
        stream: Stream,
        partition: Sequence[Expr],
        order: Sequence[Expr],
        function: str,
        limit: int | None,
        position: Expr | None,
    ) -> Stream:
        stream, columns = self._with_columns(stream, [one.child() for one in order])
        orderings = tuple(
            Ordering(
                field_of(column), str(one.direction().sql()) == "DESC", str(one.nullOrdering().sql()) == "NULLS LAST"
            )
            for one, column in zip(order, columns, strict=True)
        )
        self._require_comparable((one.field.type for one in orderings), order[0])
        name = name_of(position) if position is not None else None
        number = self._stage(Top(orderings, cast(Any, function), limit, name), [stream])
        self._edges(stream, number, 0, [(one, True) for one in partition], unmatched=True)
        attributes = dict(stream.attributes) | ({name: position} if name else {})
        facts = stream.facts
        if name and function == "row_number" and all(map(is_attribute, partition)):
            place = frozenset((*(name_of(one) for one in partition), name))
            facts = facts.with_keys(*facts.keys, place)
        return Stream((Branch(f"#{number}", tuple(attributes.values()), attributes),), attributes, facts)

    def _with_columns(self, stream: Stream, wanted: Sequence[Expr]) -> tuple[Stream, list[Expr]]:
        """The stream with a column for each expression that is none already."""
        new = [one if is_attribute(one) else self.catalyst.alias(one) for one in wanted]
        more = [one for one in new if not is_attribute(one)]
        if more:
            stream = self._projected(stream, [*stream.attributes.values(), *more])
        return stream, [_attribute(one) for one in new]

    # --- generators

    def generate(self, node: Node) -> Stream:
        stream = self.visit(node.child())
        generator, made = node.generator(), items(node.generatorOutput())
        dropped = set(items(node.unrequiredChildIndex()))
        kept = [one for place, one in enumerate(items(node.child().output())) if place not in dropped]
        if kind(generator) == "ReplicateRows":
            return self._repeated(stream, kept, children(generator), made)
        if kind(generator) not in ("Explode", "PosExplode", "Inline"):
            self.refuse(f"{generator.prettyName()} is not supported", "Use explode, posexplode or inline.", node)
        array = generator.child()
        elements: list[str | None] = [None]
        if python_type(array.dataType()).typeName() == "map":
            array = self.catalyst.entries(array)
            elements = ["key", "value"]
        elif kind(generator) == "Inline":
            elements = [part.name for part in python_type(array.dataType()).elementType.fields]  # type: ignore[attr-defined]
        column = self.catalyst.alias(array)
        positioned = kind(generator) == "PosExplode"
        names = [name_of(one) for one in made]
        step = Unnest(
            name_of(column),
            names[0] if positioned else None,
            tuple(zip(names[positioned:], elements, strict=True)),
            bool(node.outer()),
        )
        attributes = {name_of(one): one for one in (*kept, *made)}
        keys = tuple(key | {names[0]} for key in stream.facts.keys) if positioned else ()
        wide = self._projected(stream, [*kept, column])
        return self._relayed(wide, step, attributes, stream.facts.with_keys(*keys))

    def _repeated(self, stream: Stream, kept: Sequence[Expr], given: Sequence[Expr], made: Sequence[Expr]) -> Stream:
        count = self.catalyst.alias(given[0])
        listed = [self.catalyst.alias(value, like=one) for value, one in zip(given[1:], made, strict=True)]
        attributes = {name_of(one): one for one in (*kept, *made)}
        wide = self._projected(stream, [*kept, *listed, count])
        return self._relayed(wide, Repeat(name_of(count)), attributes, Facts())

    def _relayed(self, stream: Stream, step: EdgeStep, attributes: Mapping[str, Expr], facts: Facts) -> Stream:
        number = self._stage(Relay(), [stream])
        for branch in stream.branches:
            self._edge(branch, number, 0, stream.fields, (), step)
        for column in self._carried(stream):
            attributes = {**attributes, column: stream.attributes[column]}
        return Stream((Branch(f"#{number}", tuple(attributes.values()), attributes),), attributes, facts)

    # --- stages and edges

    def _stage(self, operator: Operator, producers: Sequence[Stream]) -> int:
        deep = [self._level(branch.producer) for stream in producers for branch in stream.branches]
        self.stages.append(Stage(len(self.stages), 1 + max(deep, default=0), operator))
        return len(self.stages) - 1

    def _level(self, producer: str) -> int:
        return self.stages[int(producer[1:])].level if producer.startswith("#") else self.levels[producer]

    def _edges(self, stream: Stream, stage: int, place: int, key: Sequence[tuple[Expr, bool]], unmatched: bool) -> None:
        """The stream's rows, and what of the key is not one of their columns, to an input of a stage."""
        for branch in stream.branches:
            columns = {name: branch.columns[name] for name in stream.attributes}
            parts = []
            for number, (one, null_matches) in enumerate(key):
                name = name_of(one) if is_attribute(one) else f"$k{stage}_{place}_{number}"
                columns.setdefault(name, self._over(branch, one))
                self._require_comparable([value_type(python_type(one.dataType()))], one)
                parts.append(KeyColumn(Field(name, value_type(python_type(one.dataType()))), null_matches))
            sent = replace(branch, columns=columns)
            fields = [*stream.fields, *(part.field for part in parts if part.field.name not in stream.attributes)]
            self._edge(sent, stage, place, fields, tuple(parts), unmatched=unmatched)

    def _edge(
        self,
        branch: Branch,
        stage: int,
        place: int,
        fields: Sequence[Field],
        key: tuple[KeyColumn, ...],
        *last: EdgeStep,
        unmatched: bool = True,
    ) -> None:
        steps = (*self._steps(branch, fields), *last)
        self.edges.append(Edge(branch.producer, steps, stage, place, key, unmatched))

    def _steps(self, branch: Branch, fields: Sequence[Field]) -> Iterable[EdgeStep]:
        columns = {one.name: branch.columns[one.name] for one in fields}
        own = {name_of(one): self._named(branch, one) for one in branch.attributes}
        present = tuple(own[name_of(one.child())] for one in branch.conditions if _is_presence(one))
        if present:
            yield Present(tuple(dict.fromkeys(present)))
        conditions = tuple(one for one in branch.conditions if not _is_presence(one))
        under = {name: name if INTERNAL.fullmatch(name) else f"$m{place}" for place, name in enumerate(columns)}
        made = tuple((name, value) for name, value in columns.items() if not is_attribute(value))
        if conditions or made:
            kept = [*attributes_in(*conditions, *(value for _, value in made)), *filter(is_attribute, columns.values())]
            needed = dict.fromkeys(own[name_of(one)] for one in kept)
            yield Pick(tuple((name, name) for name in needed))
            outputs = {one.name: replace(one, name=under[one.name]) for one in fields}
            yield self._evaluate(conditions, made, outputs, own)
        yield Pick(tuple((name, own[name_of(v)] if is_attribute(v) else under[name]) for name, v in columns.items()))

    def _named(self, branch: Branch, attribute: Expr) -> str:
        """How the producer calls a column: tables and views by their own names."""
        return name_of(attribute) if branch.producer.startswith("#") else str(attribute.name())

    def _evaluate(
        self,
        conditions: tuple[Expr, ...],
        made: tuple[tuple[str, Expr], ...],
        fields: Mapping[str, Field],
        own: Mapping[str, str],
    ) -> Evaluate:
        wholes = (*conditions, *(value for _, value in made))
        used = attributes_in(*wholes)
        self._refuse_what_spark_cannot_read(wholes, used)
        number = len(self.computed)
        self.computed[number] = Computed(tuple(used), conditions, made)
        inputs = tuple(replace(field_of(one), name=own[name_of(one)]) for one in used)
        outputs = tuple(fields[name] for name, _ in made)
        shown = (*(str(one.sql()) for one in conditions), *(_shown(name, value) for name, value in made))
        return Evaluate(number, inputs, outputs, shown)

    def _refuse_what_spark_cannot_read(self, wholes: Sequence[Expr], used: Sequence[Expr]) -> None:
        for part in (part for whole in wholes for part in walk(whole)):
            if "Subquery" in kind(part) or kind(part) in ("Exists", "ListQuery", "PythonUDF"):
                self.refuse("a subquery is not supported here", "Join its table instead.", part)
        for one in used:
            type_ = field_of(one).type.kind
            if type_.startswith("map<") and not type_.startswith("map<string,"):
                self.refuse(f"{type_} cannot be computed with", "Use a map whose keys are text.", one)

    def _require_comparable(self, types: Iterable[ValueType], at: Any) -> None:
        for type_ in types:
            try:
                order_key(type_)
            except KeyError:
                remedy = "Cast it to a type that has an order: a number, text, a date or a timestamp."
                self.refuse(f"values of type {type_.ddl} cannot be compared", remedy, at)

    def dataflow(self, name: str, transactionally: bool) -> Dataflow:
        return Dataflow(name, tuple(self.edges), tuple(self.stages), transactionally)


@dataclass
class _Aggregates:
    """The aggregates of one group, and the columns that they need."""

    planner: Planner
    stream: Stream
    aggregates: list[Aggregate] = field(default_factory=list)
    attributes: list[Expr] = field(default_factory=list)

    def result(self, call: Expr) -> Expr:
        """What stands for a call in the expressions around it."""
        function = call.aggregateFunction()
        where = None if call.filter().isEmpty() else field_of(self._column(call.filter().get())).name
        if kind(function) == "Average":
            return self._average(call, function, where)
        made = _AGGREGATES.get(kind(function))
        if made is None or (kind(function) == "First" and not function.ignoreNulls()):
            what = str(function.prettyName()).upper()
            self.planner.refuse(f"the aggregate {what} is not supported", _AGGREGATES_REMEDY, call)
        if str(call.sql()).lower().startswith("try_"):
            self.planner.refuse(
                f"{call.sql()} is not supported", "Use the function without TRY_, and a wide type.", call
            )
        columns = [one for one in children(function) if kind(function) != "Count" or not _is_something(one)]
        return self._aggregate(call, made, columns, function.dataType(), where)

    def _aggregate(
        self, call: Expr, made: AggregateFunction, inputs: Sequence[Expr], type_: Any, where: str | None
    ) -> Expr:
        columns = [self._column(one) for one in inputs]
        fields = tuple(map(field_of, columns))
        if made == "sum" and not is_summable(fields[0].type):
            remedy = "Make the column a decimal, or cast it to one in the view: SUM(CAST(x AS decimal(38,10)))."
            self.planner.refuse(f"SUM of {fields[0].type.ddl} depends on the order of the rows", remedy, call)
        order: tuple[Ordering, ...] = ()
        if made not in ("count", "sum") or call.isDistinct():
            self.planner._require_comparable((field.type for field in fields), call)
        if made in ("greatest_by", "least_by"):
            fields, order = fields[:1], (Ordering(fields[1]),)
        elif made in ("collect", "set"):
            order = self._order()
        attribute = self.planner.catalyst.result(type_)
        output = Field(name_of(attribute), value_type(python_type(type_)), made not in ("count", "collect", "set"))
        self.aggregates.append(Aggregate(made, fields, output, bool(call.isDistinct()), where, order))
        self.attributes.append(attribute)
        return attribute

    def _average(self, call: Expr, function: Expr, where: str | None) -> Expr:
        """Spark's own way from sum and count to the average."""
        total, count = items(function.aggBufferAttributes())
        if not is_summable(value_type(python_type(function.child().dataType()))):
            remedy = "Make the column a decimal, or cast it to one in the view: AVG(CAST(x AS decimal(38,10)))."
            self.planner.refuse("AVG of floating point numbers depends on the order of the rows", remedy, call)
        parts = {
            name_of(total): self._aggregate(call, "sum", [function.child()], total.dataType(), where),
            name_of(count): self._aggregate(call, "count", [function.child()], count.dataType(), where),
        }

        def instead(part: Expr) -> Expr | None:
            return parts.get(name_of(part)) if is_attribute(part) else None

        return self.planner.catalyst.replaced(function.evaluateExpression(), instead)

    def _column(self, expression: Expr) -> Expr:
        self.stream, (column,) = self.planner._with_columns(self.stream, [expression])
        return column

    def _order(self) -> tuple[Ordering, ...]:
        """In the order of the rows' key, where it is known."""
        keys = self.stream.facts.keys
        columns = self.stream.attributes
        if not keys or not all(column in columns for column in keys[0]):
            return ()
        return tuple(Ordering(field_of(columns[column])) for column in columns if column in keys[0])


# --- small questions about Spark's trees


def _shown(name: str, value: Expr) -> str:
    """Columns that are under way have other names in each session."""
    return str(value.sql()) if INTERNAL.fullmatch(name) else f"{name} = {value.sql()}"


def _all_expressions(plan: Node) -> Iterable[Expr]:
    for node in walk(plan):
        for whole in expressions(node):
            yield from walk(whole)


def _outward(node: Any) -> Iterable[Any]:
    """The node, then what it consists of."""
    yield from walk(node)
    if hasattr(node, "expressions") and kind(node) not in _EXPRESSIONLESS:
        for whole in expressions(node):
            yield from walk(whole)


_EXPRESSIONLESS = ("AttributeReference", "Literal")


def _attribute(expression: Expr) -> Expr:
    return expression if is_attribute(expression) else expression.toAttribute()


def _known(stream: Stream, expression: Expr) -> Expr:
    """The attribute that a column is, with what is known of its NULLs."""
    of = unaliased(expression)
    if not is_attribute(of):
        return expression.toAttribute()
    known_of = stream.attributes[name_of(of)]
    return known_of if is_attribute(expression) else expression.toAttribute().withNullability(known_of.nullable())


def _is_subquery(expression: Expr) -> bool:
    return kind(expression) == "ScalarSubquery"


def _is_something(expression: Expr) -> bool:
    """Whether it is a literal that is not NULL: COUNT need not look at it."""
    return kind(expression) == "Literal" and expression.value() is not None


def _is_presence(condition: Expr) -> bool:
    return kind(condition) == "IsNotNull" and is_attribute(condition.child())


def _is_single(plan: Node) -> bool:
    rows = plan.maxRows()
    return not rows.isEmpty() and int(rows.get()) <= 1


def _distinct_calls(outputs: Sequence[Expr]) -> list[Expr]:
    found: list[Expr] = []
    for part in (part for whole in outputs for part in walk(whole) if kind(part) == "AggregateExpression"):
        if not any(part.semanticEquals(one) for one in found):
            found.append(part)
    return found


def _is_limit_of(condition: Expr, child: Node) -> bool:
    """Whether the window below lets through no other rows anyway."""
    if kind(child) != "Window" or kind(child.child()) != "WindowGroupLimit" or items(child.windowExpressions())[1:]:
        return False
    if kind(condition) not in ("LessThanOrEqual", "LessThan", "EqualTo"):
        return False
    left, right, limit = condition.left(), condition.right(), int(child.child().limit())
    if not is_attribute(left) or kind(right) != "Literal":
        return False
    if name_of(left) != name_of(items(child.windowExpressions())[0]):
        return False
    bound = int(right.value())
    return (kind(condition), bound) in (("LessThanOrEqual", limit), ("LessThan", limit + 1), ("EqualTo", 1)) and (
        kind(condition) != "EqualTo" or limit == 1
    )


def _split(conditions: Sequence[Expr], left: Stream, right: Stream) -> tuple[list[tuple[Expr, Expr, bool]], list[Expr]]:
    """Equalities of one side with the other (and whether NULL equals NULL), and all other conditions."""
    equal: list[tuple[Expr, Expr, bool]] = []
    rest: list[Expr] = []
    for one in conditions:
        pair = _equality(one, left, right)
        if pair is None:
            rest.append(one)
        else:
            equal.append((*pair, kind(one) == "EqualNullSafe"))
    return equal, rest


def _equality(condition: Expr, left: Stream, right: Stream) -> tuple[Expr, Expr] | None:
    """The sides of an equality, the left stream's first."""
    if kind(condition) not in ("EqualTo", "EqualNullSafe"):
        return None
    one, other = condition.left(), condition.right()
    if _within(one, left) and _within(other, right):
        return one, other
    if _within(one, right) and _within(other, left):
        return other, one
    return None


def _within(expression: Expr, stream: Stream) -> bool:
    used = attributes_in(expression)
    return bool(used) and all(name_of(one) in stream.attributes for one in used)


def _computed(name: str, value: Expr) -> Iterable[Dependency]:
    if is_attribute(value):
        return known.equal(name, name_of(value)) if name_of(value) != name else ()
    return (Dependency(frozenset(map(name_of, attributes_in(value))), frozenset((name,))),)


def _coalesced(stream: Stream, name: str, value: Expr) -> Iterable[Dependency]:
    """Of a full join's two keys, the one that is there: it tells which of them are."""
    if kind(value) != "Coalesce":
        return
    parts = children(value)
    if len(parts) == 2 and all(map(is_attribute, parts)):
        one, other = map(name_of, parts)
        if (one, other) in stream.pairs or (other, one) in stream.pairs:
            yield Dependency(frozenset((name,)), frozenset((one, other)))


def _optional(missing: Stream | None, stream: Stream) -> Mapping[str, Expr]:
    if missing is None:
        return stream.attributes
    return {name: one.withNullability(True) for name, one in stream.attributes.items()}


def _join_result(
    how: JoinKind,
    number: int,
    left: Stream,
    right: Stream,
    equal: Sequence[tuple[Expr, Expr, bool]],
    flag: Expr | None,
) -> Stream:
    attributes = dict(_optional(left if how == "full" else None, left))
    names = tuple((name_of(a), name_of(b)) for a, b, safe in equal if is_attribute(a) and is_attribute(b) and not safe)
    exact = len(names) == len(equal)
    pairs: frozenset[tuple[str, str]] = frozenset()
    if how in ("semi", "anti", "exists"):
        facts, pairs = left.facts, left.pairs
        if flag is not None:
            attributes[name_of(flag)] = flag
            facts = facts.knowing(*(Dependency(key, frozenset((name_of(flag),))) for key in facts.keys))
    else:
        attributes |= _optional(None if how == "inner" else right, right)
        facts = _outer_facts(how, left, right, names, exact)
        pairs = frozenset(names) if how == "full" and len(equal) == 1 else frozenset()
    branch = Branch(f"#{number}", tuple(attributes.values()), attributes)
    return Stream((branch,), attributes, facts, pairs)


def _outer_facts(how: JoinKind, left: Stream, right: Stream, names: Sequence[tuple[str, str]], exact: bool) -> Facts:
    if how == "inner":
        return known.joined(left.facts, right.facts, *(one for a, b in names for one in known.equal(a, b)))
    more: list[Dependency] = []
    if how == "left" and exact:
        more = [Dependency(frozenset(a for a, _ in names), frozenset(b for _, b in names))]
    rows = known.where_present(right.facts, _never_null(right))
    if how == "full":
        never = _never_null(left) | _never_null(right)
        return known.either(known.where_present(left.facts, _never_null(left)), rows, never)
    return known.joined(left.facts, rows, *more)


def _never_null(stream: Stream) -> known.Columns:
    present = (name for name, one in stream.attributes.items() if not one.nullable())
    return stream.facts.also_called(present)


_JOINS: dict[str, JoinKind] = {
    "INNER": "inner",
    "CROSS": "inner",
    "LEFT OUTER": "left",
    "RIGHT OUTER": "left",
    "FULL OUTER": "full",
    "LEFT SEMI": "semi",
    "LEFT ANTI": "anti",
    "EXISTS": "exists",
}
_AGGREGATES: dict[str, AggregateFunction] = {
    "Count": "count",
    "Sum": "sum",
    "Min": "min",
    "Max": "max",
    "CollectList": "collect",
    "CollectSet": "set",
    "MaxBy": "greatest_by",
    "MinBy": "least_by",
    "First": "only",
}
_AGGREGATES_REMEDY = (
    "Use SUM, COUNT, AVG, MIN, MAX, MAX_BY, MIN_BY, BOOL_AND, BOOL_OR, ARRAY_AGG, COLLECT_LIST or COLLECT_SET."
)
_WINDOWS = {"RowNumber": "row_number", "Rank": "rank", "DenseRank": "dense_rank"}
_WINDOW_REMEDY = "Use ROW_NUMBER, RANK or DENSE_RANK; for a total over a partition join it with its GROUP BY."
_REFUSED = {
    "Sort": ("ORDER BY without LIMIT: a view is a set of rows", "Leave it out; order where the destination is read."),
    "LocalLimit": ("LIMIT without ORDER BY gives other rows each time", "Add ORDER BY."),
    "Offset": ("OFFSET is not supported", "Use ROW_NUMBER() and a condition on it."),
    "Sample": ("TABLESAMPLE gives other rows each time", "Leave it out, or filter by a hash of the key."),
    "Range": ("a query without a table", "Name a table of tidegate.yaml in FROM."),
    "OneRowRelation": ("a query without a table", "Name a table of tidegate.yaml in FROM."),
}
_VISITORS: dict[str, Callable[[Planner, Node], Stream]] = {
    "LogicalRDD": Planner.leaf,
    "Project": Planner.project,
    "Filter": Planner.filter,
    "Union": Planner.union,
    "Expand": Planner.expand,
    "LocalRelation": Planner.nothing,
    "Join": Planner.join,
    "Aggregate": Planner.aggregate,
    "GlobalLimit": Planner.limit,
    "Window": Planner.window,
    "Generate": Planner.generate,
}
