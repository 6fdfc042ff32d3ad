"""Expressions over rows and aggregates: plain values, and the Python source that computes them exactly.

A number is an integer scaled by its type's scale; everything else is its JSON text; NULL is None (in JSON text "null").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Context, Decimal
from itertools import count
from typing import Any, Literal

from tidegate.model.cell import encode_json
from tidegate.model.schema import INTEGERS, ColumnType

_EXACT = Context(prec=200)


@dataclass(frozen=True)
class ValueType:
    """A type of Spark: a scalar, a decimal, an array or a struct."""

    kind: str
    precision: int = 0
    scale: int = 0
    element: ValueType | None = None
    fields: tuple[tuple[str, ValueType], ...] = ()

    @property
    def numeric(self) -> bool:
        """Whether we compute with it: integers and decimals, never floats."""
        return self.kind == "decimal" or self.kind in INTEGERS

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest scaled value."""
        if self.kind == "decimal":
            return 1 - 10**self.precision, 10**self.precision - 1
        return -(1 << (INTEGERS[self.kind] - 1)), (1 << (INTEGERS[self.kind] - 1)) - 1

    @property
    def ddl(self) -> str:
        if self.kind == "decimal":
            return f"decimal({self.precision},{self.scale})"
        if self.kind == "struct":
            return f"struct<{','.join(f'`{name}`:{type_.ddl}' for name, type_ in self.fields)}>"
        return f"array<{self.element.ddl}>" if self.element else self.kind


def value_type(column_type: ColumnType) -> ValueType:
    element = value_type(column_type.element) if column_type.element else None
    return ValueType(column_type.kind, column_type.precision, column_type.scale, element)


@dataclass(frozen=True)
class Column:
    """A column of one input."""

    input: int
    name: str
    type: ValueType


@dataclass(frozen=True)
class Constant:
    """A literal, as JSON text."""

    text: str
    type: ValueType


@dataclass(frozen=True)
class Arithmetic:
    """`+`, `-` or `*`; NULL if either side is."""

    operator: Literal["+", "-", "*"]
    left: Expression
    right: Expression
    type: ValueType


@dataclass(frozen=True)
class Negative:
    operand: Expression
    type: ValueType


@dataclass(frozen=True)
class Coalesce:
    """The first operand that is not NULL."""

    operands: tuple[Expression, ...]
    type: ValueType


@dataclass(frozen=True)
class Struct:
    """Never NULL itself, even if all its fields are."""

    names: tuple[str, ...]
    operands: tuple[Expression, ...]
    type: ValueType


@dataclass(frozen=True)
class NullTest:
    """`operand IS NULL` if wants_null, else `operand IS NOT NULL`."""

    operand: Expression
    wants_null: bool


@dataclass(frozen=True)
class Aggregate:
    """SUM, COUNT or ARRAY_AGG over the rows of a group for which all conditions hold."""

    function: Literal["sum", "count", "collect"]
    operand: Expression
    conditions: tuple[NullTest, ...]
    type: ValueType


Expression = Column | Constant | Arithmetic | Negative | Coalesce | Struct | Aggregate


def children(expression: Expression) -> tuple[Expression, ...]:
    if isinstance(expression, Arithmetic):
        return (expression.left, expression.right)
    if isinstance(expression, (Coalesce, Struct)):
        return expression.operands
    if isinstance(expression, Negative):
        return (expression.operand,)
    if isinstance(expression, Aggregate):
        return (expression.operand, *(test.operand for test in expression.conditions))
    return ()


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and everything in it."""
    yield expression
    for child in children(expression):
        yield from walk(child)


def columns_in(*expressions: Expression) -> tuple[Column, ...]:
    """Each column once, in the order of first use."""
    found = (node for expression in expressions for node in walk(expression))
    return tuple(dict.fromkeys(node for node in found if isinstance(node, Column)))


class TypeOverflowError(Exception):
    """A result does not fit its type; carries the name of the output column."""


def fit(value: int, low: int, high: int, column: str) -> int:
    if low <= value <= high:
        return value
    raise TypeOverflowError(column)


def scaled(text: str, scale: int) -> int:
    """The integer that a decimal's JSON text is at a scale; refuses to lose a digit."""
    whole, _, fraction = text.partition(".")
    if len(fraction) == scale:
        try:
            return int(whole + fraction)
        except ValueError:  # an exponent
            pass
    exact = Decimal(text).scaleb(scale, _EXACT)
    assert exact == exact.to_integral_value(), f"{text} has more than {scale} decimal places"
    return int(exact)


def decimal_text(value: int, scale: int) -> str:
    """The JSON text of a decimal: the same as `str` of Python's Decimal with that scale."""
    if scale == 0:
        return str(value)
    size = abs(value)
    if scale > 6 and size < 10 ** (scale - 6):
        return str(Decimal(value).scaleb(-scale, _EXACT))
    whole, fraction = divmod(size, 10**scale)
    return f"{'-' if value < 0 else ''}{whole}.{fraction:0{scale}d}"


def total(values: list[Any]) -> int | None:
    """The sum of numbers, of which those beyond 64 bits may be text; None of nothing."""
    if not values:
        return None
    try:
        return int(sum(values))
    except TypeError:
        return sum(map(int, values))


def checked_total(values: list[Any], low: int, high: int, column: str) -> int | None:
    result = total(values)
    return None if result is None else fit(result, low, high, column)


NAMESPACE: dict[str, object] = {
    "fit": fit,
    "scaled": scaled,
    "decimal_text": decimal_text,
    "checked_total": checked_total,
}


@dataclass
class Emitter:
    """Writes Python source for expressions over one row, whose columns' texts and whose aggregates have names."""

    column: str  # the output column that an overflow names
    text_of: Callable[[Column], str]
    name_of: Callable[[Aggregate], str] = lambda aggregate: ""
    number_of: Callable[[Column], str | None] = lambda column: None
    _names: Iterator[int] = field(default_factory=count)

    def _fresh(self) -> str:
        return f"v{next(self._names)}"

    def value(self, expression: Expression) -> str:
        """Source of the scaled integer, or of the JSON text; None for NULL."""
        match expression:
            case Column():
                return self._column(expression)
            case Constant(text=text, type=type_):
                return _constant(text, type_)
            case Aggregate():
                return self.name_of(expression)
            case Struct():
                return self.text(expression)
            case Coalesce(operands=operands, type=type_):
                return self._coalesce([self._rescaled(operand, type_) for operand in operands])
            case Negative(operand=operand, type=type_):
                name = self._fresh()
                result = self._checked(f"-{name}", type_)
                return f"(None if ({name} := {self.value(operand)}) is None else {result})"
            case Arithmetic():
                return self._arithmetic(expression)

    def text(self, expression: Expression) -> str:
        """Source of the JSON text; "null" for NULL."""
        if isinstance(expression, Column):
            return self.text_of(expression)
        if isinstance(expression, Constant):
            return repr(expression.text)
        if isinstance(expression, Struct):
            return template(expression.names, [self.text(operand) for operand in expression.operands])
        name = self._fresh()
        return f"('null' if ({name} := {self.value(expression)}) is None else {_shown(name, expression.type)})"

    def fragment(self, expression: Expression) -> str:
        """Source of the JSON text; None for NULL."""
        if isinstance(expression, Column):
            return f"(None if {self.text_of(expression)} == 'null' else {self.text_of(expression)})"
        if isinstance(expression, Struct):
            return self.text(expression)
        name = self._fresh()
        return f"(None if ({name} := {self.value(expression)}) is None else {_shown(name, expression.type)})"

    def test(self, condition: NullTest) -> str:
        if isinstance(condition.operand, Constant):  # Python warns of `1 is None`
            return str((condition.operand.text == "null") == condition.wants_null)
        return f"({self.value(condition.operand)} is {'' if condition.wants_null else 'not '}None)"

    def _column(self, column: Column) -> str:
        text = self.text_of(column)
        if not column.type.numeric:
            return f"(None if {text} == 'null' else {text})"
        return self.number_of(column) or f"(None if {text} == 'null' else {parsed(text, column.type)})"

    def _coalesce(self, sources: list[str]) -> str:
        if len(sources) == 1:
            return sources[0]
        name = self._fresh()
        return f"({name} if ({name} := {sources[0]}) is not None else {self._coalesce(sources[1:])})"

    def _rescaled(self, operand: Expression, type_: ValueType) -> str:
        source, digits = self.value(operand), type_.scale - operand.type.scale
        if not type_.numeric or operand.type.kind == "void":
            return source
        name = self._fresh()
        result = self._checked(f"{name} * {10**digits}" if digits else name, type_)
        return source if result == name else f"(None if ({name} := {source}) is None else {result})"

    def _arithmetic(self, node: Arithmetic) -> str:
        left, right = self._fresh(), self._fresh()
        scale = max(node.left.type.scale, node.right.type.scale)
        shift = (0, 0) if node.operator == "*" else (scale - node.left.type.scale, scale - node.right.type.scale)
        operands = [
            f"{name} * {10**digits}" if digits else name for name, digits in zip((left, right), shift, strict=True)
        ]
        result = self._checked(f"{operands[0]} {node.operator} {operands[1]}", node.type)
        tests = f"({left} := {self.value(node.left)}) is None or ({right} := {self.value(node.right)}) is None"
        return f"(None if {tests} else {result})"

    def _checked(self, source: str, type_: ValueType) -> str:
        """Below 38 digits Spark's decimal types are wide enough for every result of their operands."""
        if type_.kind == "decimal" and type_.precision < 38:
            return source
        if source.isidentifier() and type_.kind in INTEGERS:  # widened, not computed
            return source
        low, high = type_.limits
        return f"fit({source}, {low}, {high}, {self.column!r})"


def parsed(text: str, type_: ValueType) -> str:
    """Source that reads a number from JSON text that is not "null"."""
    return f"scaled({text}, {type_.scale})" if type_.kind == "decimal" else f"int({text})"


def _shown(name: str, type_: ValueType) -> str:
    if type_.kind == "decimal":
        return f"decimal_text({name}, {type_.scale})"
    return f"str({name})" if type_.kind in INTEGERS else name


def _constant(text: str, type_: ValueType) -> str:
    if text == "null":
        return "None"
    return str(scaled(text, type_.scale)) if type_.numeric else repr(text)


def template(names: tuple[str, ...], sources: list[str]) -> str:
    """Source of a JSON object's text."""
    keys = [encode_json(name).decode().replace("%", "%%") for name in names]
    form = "{" + ",".join(f"{key}:%s" for key in keys) + "}"
    return f"({form!r} % ({', '.join(sources)},))"
