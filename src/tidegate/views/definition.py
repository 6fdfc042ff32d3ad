"""Definition: a view's SQL, checked and typed by Spark's own analyzer, as a plan that workers can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from sqlglot import exp

from tidegate.model.cell import encode_json
from tidegate.model.schema import TableSchema
from tidegate.views.catalyst import value_type
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
    ValueType,
    decimal_text,
    scaled,
    walk,
)
from tidegate.views.plan import Output, PlanInput, ViewPlan
from tidegate.views.query import Query, SourceText, conjuncts, parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType, StructType

TypeOf = Callable[[exp.Expr, bool], ValueType]

_VOID = ValueType("void")
_OPERATORS: dict[type[exp.Expr], Literal["+", "-", "*"]] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*"}
_AGGREGATES = "Use SUM, COUNT, ARRAY_AGG or COLLECT_LIST."
_FUNCTIONS = "Use columns, literals, + - *, COALESCE and STRUCT; compute the rest where the destination is read."
_UNSTABLE = {"rand", "randn", "random", "randstr", "uniform", "uuid", "shuffle", "now", "curdate", "localtimestamp"}
_UNSTABLE |= {"current_timestamp", "current_date", "current_time", "current_user", "input_file_name"}
_UNSTABLE |= {"monotonically_increasing_id", "spark_partition_id", "unix_timestamp"}
_MANY_ROWS = "several joined tables may have many rows for one key: SUM and COUNT see every combination of them"


@dataclass(frozen=True)
class OutputColumn:
    """A column of the view as destinations see it."""

    name: str
    ddl: str
    nullable: bool
    nested: bool


class View(Protocol):
    """A view that can be kept, in whatever way."""

    @property
    def name(self) -> str: ...

    @property
    def sql(self) -> str: ...

    @property
    def query(self) -> str:
        """The SQL as Spark reads it."""

    @property
    def key(self) -> tuple[str, ...]: ...

    @property
    def columns(self) -> tuple[OutputColumn, ...]: ...

    @property
    def types(self) -> tuple[ValueType, ...]:
        """Of the columns."""

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def transactionally(self) -> bool:
        """Whether each transaction's result is given by itself."""

    @property
    def reads(self) -> Mapping[str, frozenset[str]]:
        """The columns that it reads of each table and view."""

    def explain(self) -> str:
        """How it is kept, as a readable tree."""

    def arranged(self, column: str, value: Any) -> Any:
        """A column's value with arrays whose order SQL leaves open in one order."""


@dataclass(frozen=True)
class ViewDefinition:
    """A view of the first shape: its key, its columns and its plan of one stage."""

    name: str
    sql: str
    key: tuple[str, ...]
    columns: tuple[OutputColumn, ...]
    plan: ViewPlan
    warnings: tuple[str, ...]

    @property
    def query(self) -> str:
        return self.sql

    @property
    def transactionally(self) -> bool:
        return False

    @property
    def types(self) -> tuple[ValueType, ...]:
        return tuple(output.expression.type for output in self.plan.outputs)

    @property
    def reads(self) -> Mapping[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for used, needed in zip(self.plan.inputs, self.plan.needed, strict=True):
            found[used.table.name] = found.get(used.table.name, frozenset()) | frozenset(needed)
        return found

    def explain(self) -> str:
        return self.plan.explain()

    def arranged(self, column: str, value: Any) -> Any:
        expression = next(output.expression for output in self.plan.outputs if output.name == column)
        return _arranged(value, expression)


def _arranged(value: Any, expression: Expression) -> Any:
    """Arrays that ARRAY_AGG made have no order; a column's own arrays do."""
    if value is None:
        return None
    if isinstance(expression, Aggregate) and expression.function == "collect":
        return sorted(value, key=encode_json)
    if isinstance(expression, Coalesce):
        collects = next((part for part in expression.operands if _collects(part)), expression.operands[0])
        return _arranged(value, collects)
    if isinstance(expression, Struct):
        parts = zip(value.items(), expression.operands, strict=True)
        return {name: _arranged(inner, operand) for (name, inner), operand in parts}
    return value


def _collects(expression: Expression) -> bool:
    return isinstance(expression, Aggregate) and expression.function == "collect"


def define(
    name: str, sql: str, path: Path | None, tables: Mapping[str, TableSchema], spark: SparkSession
) -> ViewDefinition:
    """Checks a view's SQL and compiles it; refuses what cannot be kept exactly, with its place and a remedy."""
    query = parse(SourceText(name, sql, path), tables)
    wanted = _Wanted()
    for node in query.tree.expressions:
        _Builder(query, wanted, "").build(node)
    key, positions = _key(query)
    schema, types = _analyse(query, wanted.nodes, tables, spark)
    outputs = tuple(
        Output(field.name, _output(query, types, node, field.name))
        for node, field in zip(query.tree.expressions, schema.fields, strict=True)
    )
    _check_outputs(query, outputs, schema)
    columns = tuple(
        OutputColumn(field.name, value_type(field.dataType).ddl, field.nullable, _nested(field.dataType))
        for field in schema.fields
    )
    plan = ViewPlan(name, query.inputs, query.grouping, key, outputs)
    names = tuple(columns[position].name for position in positions)
    return ViewDefinition(name, sql, names, columns, plan, _warnings(query.inputs))


class _Wanted:
    """Notes which expressions Spark has to type; until it has, they are void."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, bool], exp.Expr] = {}

    def __call__(self, node: exp.Expr, per_row: bool) -> ValueType:
        self.nodes[node.sql(dialect="spark"), per_row] = node
        return _VOID


@dataclass(frozen=True)
class _Builder:
    """Turns SQL nodes into expressions and refuses what is not supported or not exact."""

    query: Query
    type_of: TypeOf
    column: str
    per_row: bool = False  # inside an aggregate

    def build(self, node: exp.Expr) -> Expression:
        node = node.unalias().unnest()
        if isinstance(node, exp.Column):
            return self._column(node)
        if isinstance(node, (exp.Literal, exp.Null, exp.Boolean)):
            return self._constant(node)
        if type(node) in _OPERATORS:
            return self._arithmetic(node)
        if isinstance(node, exp.Neg):
            return self._negative(node)
        if isinstance(node, exp.Coalesce):
            return self._coalesce(node)
        if isinstance(node, exp.Struct):
            return self._struct(node)
        if isinstance(node, (exp.Filter, exp.AggFunc)):
            return self._aggregate(node)
        return self._refuse_other(node)

    def _refuse(self, reason: str, remedy: str, node: exp.Expr) -> NoReturn:
        self.query.text.refuse(reason, remedy, node)

    def _type(self, node: exp.Expr) -> ValueType:
        return self.type_of(node, self.per_row)

    def _column(self, node: exp.Column) -> Column:
        column = self.query.resolve(node)
        if not self.per_row and column not in self.query.grouping:
            reason = f'"{node.sql(dialect="spark")}" is neither in GROUP BY nor inside an aggregate'
            self._refuse(reason, "Add it to GROUP BY, or aggregate it.", node)
        return column

    def _constant(self, node: exp.Expr) -> Constant:
        type_ = self._type(node)
        if isinstance(node, exp.Null):
            return Constant("null", _VOID)
        if isinstance(node, exp.Boolean):
            return Constant("true" if node.this else "false", type_)
        if node.is_string:
            if "\\" in self.query.text.sql:
                self._refuse("a backslash in the SQL is not supported with text literals", "Leave it out.", node)
            return Constant(encode_json(node.this).decode(), type_)
        if type_.kind in ("float", "double"):
            self._refuse("a floating point literal is not exact", "Write it without an exponent.", node)
        scale = type_.scale if type_.numeric else 0
        return Constant(decimal_text(scaled(node.this, scale), scale) if type_.numeric else node.this, type_)

    def _arithmetic(self, node: exp.Expr) -> Expression:
        left, right, type_ = self.build(node.this), self.build(node.expression), self._type(node)
        self._numbers(node, left, right)
        operator = _OPERATORS[type(node)]
        scales = left.type.scale, right.type.scale
        self._exact(node, type_, sum(scales) if operator == "*" else max(scales))
        return Arithmetic(operator, left, right, type_)

    def _negative(self, node: exp.Neg) -> Expression:
        operand, type_ = self.build(node.this), self._type(node)
        self._numbers(node, operand)
        return Negative(operand, type_)

    def _numbers(self, node: exp.Expr, *operands: Expression) -> None:
        for operand in operands:
            if operand.type != _VOID and not operand.type.numeric:
                remedy = "Use integer and decimal columns; floats round differently in another order."
                self._refuse(f"arithmetic on {operand.type.ddl} is not supported", remedy, node)

    def _exact(self, node: exp.Expr, type_: ValueType, scale: int) -> None:
        if type_.numeric and type_.scale < scale:
            remedy = "Use columns of fewer digits, so that the result has less than 38."
            self._refuse(f"{type_.ddl} cannot hold this result exactly, it would be rounded", remedy, node)

    def _coalesce(self, node: exp.Coalesce) -> Expression:
        operands = tuple(self.build(part) for part in (node.this, *node.expressions))
        type_ = self._type(node)
        self._exact(node, type_, max(operand.type.scale for operand in operands))
        for operand in operands:
            same = operand.type.ddl == type_.ddl or operand.type == _VOID or type_ == _VOID
            if not same and not (operand.type.numeric and type_.numeric):
                reason = f"COALESCE would convert {operand.type.ddl} to {type_.ddl}"
                self._refuse(reason, "Give all its operands one type.", node)
        return Coalesce(operands, type_)

    def _struct(self, node: exp.Struct) -> Expression:
        parts = [part.expression if isinstance(part, exp.PropertyEQ) else part for part in node.expressions]
        operands, type_ = tuple(self.build(part) for part in parts), self._type(node)
        names = tuple(name for name, _ in type_.fields) or tuple(f"{place}" for place in range(len(operands)))
        if len({name.lower() for name in names}) < len(names):
            self._refuse("two fields of a STRUCT have one name", "Give one of them another with AS.", node)
        return Struct(names, operands, type_)

    def _aggregate(self, node: exp.Expr) -> Expression:
        if self.per_row:
            self._refuse("an aggregate inside an aggregate", "Aggregate once.", node)
        call, tests = (node.this, self._tests(node)) if isinstance(node, exp.Filter) else (node, ())
        inner = _Builder(self.query, self.type_of, self.column, per_row=True)
        inner._refuse_modifiers(call)
        if call.this is None:
            self._refuse("an aggregate of nothing", "Write COUNT(*), or name a column.", call)
        if isinstance(call, exp.Count):
            operand: Expression = Constant("1", ValueType("int"))
            if not isinstance(call.this, exp.Star):
                operand = inner.build(call.this)
            return Aggregate("count", operand, tests, self._type(node))
        if isinstance(call, exp.Sum):
            return self._sum(node, inner.build(call.this), tests)
        if isinstance(call, exp.ArrayAgg):
            return Aggregate("collect", inner.build(call.this), tests, self._type(node))
        return self._refuse_other(call)

    def _sum(self, node: exp.Expr, operand: Expression, tests: tuple[NullTest, ...]) -> Expression:
        if operand.type.kind in ("float", "double"):
            remedy = "Make the column a decimal in tidegate.yaml, or collect the numbers with ARRAY_AGG."
            self._refuse("SUM of floats depends on the order of the rows", remedy, node)
        self._numbers(node, operand)
        type_ = self._type(node)
        self._exact(node, type_, operand.type.scale)
        return Aggregate("sum", operand, tests, type_)

    def _refuse_modifiers(self, call: exp.Expr) -> None:
        inside = call.this
        if isinstance(inside, exp.Distinct):
            self._refuse("DISTINCT in an aggregate is not supported yet", "Leave DISTINCT out.", call)
        if isinstance(inside, exp.Order):
            remedy = "Leave ORDER BY out: the elements are in the order of the rows' primary keys."
            self._refuse("ORDER BY in an aggregate is not supported yet", remedy, call)
        if call.expressions:
            self._refuse("an aggregate takes one value", "Aggregate each value by itself.", call)

    def _tests(self, node: exp.Filter) -> tuple[NullTest, ...]:
        inner = _Builder(self.query, self.type_of, self.column, per_row=True)
        return tuple(inner._test(part) for part in conjuncts(node.expression.this))

    def _test(self, node: exp.Expr) -> NullTest:
        node = node.unnest()
        negated = isinstance(node, exp.Not)
        inside = node.this.unnest() if negated else node
        if not isinstance(inside, exp.Is) or not isinstance(inside.expression, exp.Null):
            remedy = "Write FILTER (WHERE x IS NOT NULL) or FILTER (WHERE x IS NULL)."
            self._refuse("this condition in FILTER is not supported yet", remedy, node)
        return NullTest(self.build(inside.this), wants_null=not negated)

    def _refuse_other(self, node: exp.Expr) -> NoReturn:
        written, place = self.query.text.word(node)
        called = written.upper()
        if called.lower() in _UNSTABLE:
            remedy = "Use a column that the application wrote: a view is a function of its tables."
            self._refuse(f"{called} gives another result each time", remedy, node)
        if isinstance(node, exp.Window):
            self._refuse("window functions are not supported yet", "Use aggregates over GROUP BY.", node)
        if isinstance(node, (exp.Subquery, exp.Exists, exp.Select)):
            self._refuse("a subquery is not supported yet", "Join its table on the shared key.", node)
        if isinstance(node, exp.Star):
            self._refuse("* is not supported yet", "Name the columns.", node)
        if isinstance(node, exp.AggFunc):
            self._refuse(f"the aggregate {called} is not supported yet", _AGGREGATES, node)
        self.query.text.refuse(f"{called} is not supported yet", _FUNCTIONS, place)


def _output(query: Query, types: Mapping[tuple[str, bool], ValueType], node: exp.Expr, name: str) -> Expression:
    return _Builder(query, lambda part, per_row: types[part.sql(dialect="spark"), per_row], name).build(node)


def _key(query: Query) -> tuple[tuple[Column, ...], tuple[int, ...]]:
    """The view's key and where it stands in the select list: the shared key, then what tells apart a group's rows."""
    nodes = [node.unalias().unnest() for node in query.tree.expressions]
    selected = {
        query.resolve(node): place for place, node in reversed(list(enumerate(nodes))) if type(node) is exp.Column
    }
    shared = tuple(_shared(query, selected, place) for place in range(len(query.inputs[0].key)))
    rest = tuple(column for place in range(len(query.inputs)) for column in _distinguishing(query, place))
    key = tuple(dict.fromkeys((*shared, *rest)))
    for column in key:
        if column not in selected:
            name = f"{query.inputs[column.input].alias}.{column.name}"
            query.text.refuse(
                f"{name} belongs to the view's key and is not selected", f"Add {name} to the SELECT list.", query.tree
            )
    return key, tuple(selected[column] for column in key)


def _shared(query: Query, selected: Mapping[Column, int], place: int) -> Column:
    """The grouping column that stands for one column of the shared key."""
    columns = [
        column
        for column in query.grouping
        if query.inputs[column.input].join != "left" and query.inputs[column.input].key[place] == column.name
    ]
    if not columns:
        first = query.inputs[0]
        remedy = f"Add {first.alias}.{first.key[place]} to GROUP BY and to the SELECT list."
        query.text.refuse(
            "GROUP BY has to contain the key that the tables are joined on", remedy, query.tree.args["group"]
        )
    return next((column for column in columns if column in selected), columns[0])


def _distinguishing(query: Query, place: int) -> tuple[Column, ...]:
    """The grouping columns of one input that tell apart rows within a group of the shared key."""
    used = query.inputs[place]
    grouped = tuple(column for column in query.grouping if column.input == place and column.name not in used.key)
    if set(used.table.key) <= set(used.key):
        return ()  # one row at most
    names = {column.name for column in grouped} | set(used.key)
    if set(used.table.key) <= names:
        return tuple(column for column in grouped if column.name in used.table.key)
    return grouped


def _warnings(inputs: tuple[PlanInput, ...]) -> tuple[str, ...]:
    many = [used.alias for used in inputs if not set(used.table.key) <= set(used.key)]
    return (f"{', '.join(many)}: {_MANY_ROWS}",) if len(many) > 1 else ()


def _analyse(
    query: Query,
    nodes: Mapping[tuple[str, bool], exp.Expr],
    tables: Mapping[str, TableSchema],
    spark: SparkSession,
) -> tuple[StructType, dict[tuple[str, bool], ValueType]]:
    """The query's schema and the type of every expression in it, from Spark over empty tables."""
    session = spark.newSession()
    for table_name, table in tables.items():
        session.createDataFrame([], table.ddl).createOrReplaceTempView(f"`{table_name}`")
    schema = _schema(query, session, query.text.sql)
    types: dict[tuple[str, bool], ValueType] = {}
    for per_row in (True, False):
        keys = [key for key in nodes if key[1] == per_row]
        if keys:
            found = _schema(query, session, _probe(query, [key[0] for key in keys], per_row))
            types |= {key: value_type(field.dataType) for key, field in zip(keys, found.fields, strict=True)}
    return schema, types


def _probe(query: Query, expressions: Iterable[str], per_row: bool) -> str:
    items = ", ".join(f"{sql} AS x{place}" for place, sql in enumerate(expressions))
    source = " ".join(
        part.sql(dialect="spark") for part in (query.tree.args["from_"], *(query.tree.args.get("joins") or []))
    )
    group = "" if per_row else query.tree.args["group"].sql(dialect="spark")
    return f"SELECT {items} {source} {group}"


def _schema(query: Query, session: SparkSession, sql: str) -> StructType:
    from pyspark.errors import AnalysisException

    try:
        return session.sql(sql).schema
    except AnalysisException as error:  # and ParseException
        reason = re.sub(r"\s*SQLSTATE: .*", "", str(error).strip().split("\n", 1)[0])  # and the place, which we name
        found = re.search(r"line (\d+),? pos(?:ition)? (\d+)", str(error))
        at = query.text.offset(int(found.group(1)), int(found.group(2)) + 1) if found and sql == query.text.sql else 0
        query.text.refuse(f"Spark refuses the query: {reason}", "Correct the SQL (Spark's dialect).", at)


def _check_outputs(query: Query, outputs: tuple[Output, ...], schema: StructType) -> None:
    seen: set[str] = set()
    for output, field, node in zip(outputs, schema.fields, query.tree.expressions, strict=True):
        if output.name.lower() in seen:
            query.text.refuse(f'two columns are named "{output.name}"', "Give one of them another name with AS.", node)
        seen.add(output.name.lower())
        if any(part.type == _VOID for part in _values(output.expression)):
            query.text.refuse("NULL alone has no type", "Leave it out.", node)
        analysed = value_type(field.dataType).ddl
        if output.expression.type.ddl != analysed:
            reason = f'"{output.name}" is {analysed} to Spark and {output.expression.type.ddl} to Tidegate'
            query.text.refuse(reason, "Please report this query; write the expression in another way.", node)


def _values(expression: Expression) -> Iterable[Expression]:
    """The parts of an expression whose values are seen."""
    nulls = [part for node in walk(expression) if isinstance(node, Coalesce) for part in node.operands]
    return [part for part in walk(expression) if not any(part is null for null in nulls)]


def _nested(data_type: DataType) -> bool:
    return data_type.typeName() in ("array", "struct", "map")
