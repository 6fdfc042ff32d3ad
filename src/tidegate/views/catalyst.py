"""Catalyst: Spark's own parser, analyzer and optimizer read a view's SQL; here their result is taken apart.

Nothing about names, types or the meaning of SQL is decided by us: what Spark has made of the query (a tree of Project,
Filter, Join, Aggregate, …) is what we keep up to date, and its expressions are run by Spark again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidegate.model.schema import INTEGERS
from tidegate.views.dataflow import Field
from tidegate.views.expressions import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

Node = Any  # a LogicalPlan of the JVM's
Expr = Any  # an Expression of the JVM's

_CATALYST = "org.apache.spark.sql.catalyst"
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.cbo.enabled": "false",
    "spark.sql.optimizer.runtime.bloomFilter.enabled": "false",
    "spark.sql.optimizer.windowGroupLimitThreshold": "2147483647",
    "spark.sql.optimizer.excludedRules": ",".join(
        f"{_CATALYST}.optimizer.{rule}" for rule in ("MergeScalarSubqueries", "MergeSubplans")
    ),
}


def items(sequence: Any) -> list[Any]:
    """A Scala sequence as a list."""
    return [sequence.apply(place) for place in range(sequence.size())]


def kind(node: Any) -> str:
    """The name of a node's class."""
    return str(node.getClass().getSimpleName()).rstrip("$")


def children(node: Any) -> list[Any]:
    return items(node.children())


def expressions(plan: Node) -> list[Expr]:
    return items(plan.expressions())


def walk(node: Any) -> Iterator[Any]:
    """The node and all below it."""
    yield node
    for child in children(node):
        yield from walk(child)


def name_of(attribute: Expr) -> str:
    """The column's name within a dataflow."""
    return f"${attribute.exprId().id()}"


def place_of(node: Any) -> tuple[int, int] | None:
    """Line and column of a node in the SQL, both from 1."""
    origin = node.origin()
    if origin.line().isEmpty() or origin.startPosition().isEmpty():
        return None
    return int(origin.line().get()), int(origin.startPosition().get()) + 1


def value_type(data_type: DataType) -> ValueType:
    """Spark's type as ours."""
    from pyspark.sql.types import ArrayType, DecimalType, StructType

    if isinstance(data_type, DecimalType):
        return ValueType("decimal", data_type.precision, data_type.scale)
    if isinstance(data_type, ArrayType):
        return ValueType("array", element=value_type(data_type.elementType))
    if isinstance(data_type, StructType):
        return ValueType("struct", fields=tuple((field.name, value_type(field.dataType)) for field in data_type.fields))
    return ValueType(data_type.simpleString())


def python_type(jvm_type: Any) -> DataType:
    """A type of the JVM's as PySpark has it."""
    from pyspark.sql.types import _parse_datatype_json_string

    return _parse_datatype_json_string(jvm_type.json())  # type: ignore[no-any-return,unused-ignore]


def field_of(attribute: Expr) -> Field:
    return Field(name_of(attribute), value_type(python_type(attribute.dataType())), bool(attribute.nullable()))


class Catalyst:
    """Spark's analyzer over empty tables, and the few ways in which its trees are put together anew."""

    def __init__(self, spark: SparkSession, tables: Mapping[str, StructType]) -> None:
        self._session = spark.newSession()
        for name, value in _SETTINGS.items():
            self._session.conf.set(name, value)
        self._tables: dict[int, str] = {}
        for name, schema in tables.items():
            self.register(name, schema)
        self.jvm: Any = spark._jvm
        self._expressions = getattr(self.jvm, f"{_CATALYST}.expressions")
        self._literals = getattr(getattr(self._expressions, "Literal$"), "MODULE$")

    def register(self, name: str, schema: StructType) -> None:
        """Lets SQL name a table or view."""
        empty = self._session.createDataFrame(self._session.sparkContext.emptyRDD(), schema)
        self._tables[empty._jdf.queryExecution().analyzed().rdd().id()] = name
        empty.createOrReplaceTempView(f"`{name}`")

    def sql(self, text: str) -> DataFrame:
        return self._session.sql(text)

    def parsed(self, text: str) -> Node:
        return self._session._jsparkSession.sessionState().sqlParser().parsePlan(text)

    def is_command(self, plan: Node) -> bool:
        command = self.jvm.java.lang.Class.forName(f"{_CATALYST}.plans.logical.Command")
        return bool(command.isInstance(plan))

    def table_of(self, leaf: Node) -> str:
        """The name of the table or view that a leaf stands for."""
        return self._tables[leaf.rdd().id()]

    def sequence(self, parts: Sequence[Any]) -> Any:
        """A list as a Scala sequence."""
        return self.jvm.org.apache.spark.api.python.PythonUtils.toSeq(list(parts))

    def alias(self, expression: Expr, name: str = "x", like: Expr | None = None) -> Expr:
        """The expression under a name; with the identity of another attribute, if given."""
        none = self.jvm.scala.Option.empty()
        nothing = self.sequence([])
        identity = self._expressions.NamedExpression.newExprId() if like is None else like.exprId()
        return self._expressions.Alias(expression, name, identity, nothing, none, nothing)

    def null(self, data_type: Any) -> Expr:
        return self._literals.create(None, data_type)

    def result(self, data_type: Any) -> Expr:
        """A new column that may be NULL."""
        return self.alias(self.null(data_type)).toAttribute()

    def entries(self, map_: Expr) -> Expr:
        """A map as an array of structs of key and value."""
        return self._expressions.MapEntries(map_)

    def field(self, struct: Expr, place: int, name: str) -> Expr:
        return self._expressions.GetStructField(struct, place, self.jvm.scala.Option.apply(name))

    def is_number(self, expression: Expr, number: int) -> Expr:
        return self._expressions.EqualTo(expression, self._literals.apply(number))

    def when(self, condition: Expr, then: Expr, otherwise: Expr) -> Expr:
        return self._expressions.If(condition, then, otherwise)

    def to_json(self, names: Sequence[str], values: Sequence[Expr], options: Mapping[str, str]) -> Expr:
        """An object of the values as JSON text."""
        literal = self._literals.apply
        parts = [part for name, value in zip(names, values, strict=True) for part in (literal(name), value)]
        struct = self._expressions.CreateNamedStruct(self.sequence(parts))
        written = self.jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(dict(options))
        return self._expressions.StructsToJson(written, struct, self.jvm.scala.Option.apply("UTC"))

    def conjunction(self, conditions: Sequence[Expr]) -> Expr:
        whole = conditions[0]
        for one in conditions[1:]:
            whole = self._expressions.And(whole, one)
        return whole

    def replaced(self, expression: Expr, found: Callable[[Expr], Expr | None]) -> Expr:
        """The expression with parts replaced, from the top down; what was put in is not looked into."""
        instead = found(expression)
        if instead is not None:
            return instead
        below = children(expression)
        if not below:
            return expression
        now = [self.replaced(child, found) for child in below]
        if all(new is old for new, old in zip(now, below, strict=True)):
            return expression
        return expression.withNewChildren(self.sequence(now))


def is_attribute(expression: Expr) -> bool:
    return kind(expression) == "AttributeReference"


def attributes_in(*wholes: Expr) -> list[Expr]:
    """Each attribute once, in the order of first use."""
    found: dict[str, Expr] = {}
    for whole in wholes:
        for node in walk(whole):
            if is_attribute(node):
                found.setdefault(name_of(node), node)
    return list(found.values())


def conjuncts(expression: Expr) -> list[Expr]:
    """The conditions that AND connects."""
    if kind(expression) == "And":
        return [*conjuncts(expression.left()), *conjuncts(expression.right())]
    return [expression]


def unaliased(expression: Expr) -> Expr:
    return expression.child() if kind(expression) == "Alias" else expression


def is_summable(type_: ValueType) -> bool:
    return type_.kind == "decimal" or type_.kind in INTEGERS
