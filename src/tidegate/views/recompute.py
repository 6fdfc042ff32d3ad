"""Recompute: the oracle. The user's query by Spark over whole tables, and its rows as cells to compare with."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from struct import Struct as PackedBytes
from typing import TYPE_CHECKING, Any

from tidegate.model.cell import Cell, encode_json
from tidegate.model.key import KeyBytes, encode_key
from tidegate.views.definition import View
from tidegate.views.expressions import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EXACT = Context(prec=200)
_SINGLE = PackedBytes("f")


class _OtherFields(Exception):
    """A document has not the fields that its type has."""


def recompute(
    spark: SparkSession, definition: View, tables: Mapping[str, DataFrame], views: Iterable[View] = ()
) -> DataFrame:
    """The view's query, untouched, over whole tables and the views before it."""
    for name, frame in tables.items():
        frame.createOrReplaceTempView(f"`{name}`")
    for view in views:
        spark.sql(view.query).createOrReplaceTempView(f"`{view.name}`")
    return spark.sql(definition.query)


def canonical_rows(definition: View, frame: DataFrame) -> Iterator[tuple[KeyBytes, Cell]]:
    """Each row as its key and its cell, arrays that SQL leaves unordered in one order; all pass the driver."""
    table = frame.toArrow()
    names, types = [column.name for column in definition.columns], definition.types
    positions = [names.index(name) for name in definition.key]
    for batch in table.to_batches():
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row = [_cell_form(value, type_) for value, type_ in zip(values, types, strict=True)]
            cell = encode_json(dict(zip(names, row, strict=True)))
            yield encode_key([row[position] for position in positions]), canonical(definition, cell)


def canonical(definition: View, cell: Cell) -> Cell:
    """The cell with arrays whose order SQL leaves open in one order."""
    values = _decoded(cell)
    for column in definition.columns:
        values[column.name] = definition.arranged(column.name, values[column.name])
    return encode_json(values)


def same(definition: View, left: Cell | None, right: Cell | None) -> bool:
    """Whether two cells hold one row: decimals with their scale, floats by value, arrays in any order SQL allows."""
    if left is None or right is None:
        return left is right
    try:
        return _comparable(definition, left) == _comparable(definition, right)
    except _OtherFields:
        return False


def with_scales(definition: View, cell: Cell) -> Cell:
    """The cell with every decimal in its type's scale: in a document that a destination returns, 4.50 may be 4.5."""
    values = _decoded(cell)
    for column, type_ in zip(definition.columns, definition.types, strict=True):
        with suppress(_OtherFields):  # as it is: `same` will find the difference
            values[column.name] = _mapped(values[column.name], type_, _scaled)
    return encode_json(values)


def _scaled(value: Any, type_: ValueType) -> Any:
    if type_.kind != "decimal":
        return value
    number = Decimal(value)
    scaled = number.quantize(Decimal(1).scaleb(-type_.scale), context=_EXACT)
    return scaled if scaled == number else number  # a digit too many is a difference


def _comparable(definition: View, cell: Cell) -> dict[str, Any]:
    values = _decoded(cell)
    for column, type_ in zip(definition.columns, definition.types, strict=True):
        values[column.name] = definition.arranged(column.name, _by_value(values[column.name], type_))
    return values


def _decoded(cell: Cell) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(cell, parse_float=Decimal)
    return values


def _mapped(value: Any, type_: ValueType, leaf: Callable[[Any, ValueType], Any]) -> Any:
    if value is None:
        return None
    if type_.element:
        return [_mapped(item, type_.element, leaf) for item in value]
    if type_.fields:
        if not isinstance(value, dict) or value.keys() != {name for name, _ in type_.fields}:
            raise _OtherFields
        return {name: _mapped(value[name], inner, leaf) for name, inner in type_.fields}
    return leaf(value, type_)


def _cell_form(value: Any, type_: ValueType) -> Any:
    """A value of Arrow as it stands in cells."""
    return _mapped(value, type_, _leaf)


def _leaf(value: Any, type_: ValueType) -> Any:
    if isinstance(value, float) and value - value != 0:
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime):
        text = (value.astimezone(UTC) if value.tzinfo else value).replace(tzinfo=None).isoformat()
        return text + "Z" if type_.kind == "timestamp" else text
    if isinstance(value, date):
        return value.isoformat()
    if type_.kind.startswith("map<") and isinstance(value, list):
        return {name if isinstance(name, str) else encode_json(name).decode(): inner for name, inner in value}
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _by_value(value: Any, type_: ValueType) -> Any:
    """Equal values become equal, and only these."""
    return _mapped(value, type_, _compared)


def _compared(value: Any, type_: ValueType) -> Any:
    if type_.kind == "decimal":
        return str(value if isinstance(value, Decimal) else Decimal(value))
    if type_.kind in ("float", "double") and not isinstance(value, str):
        return (_SINGLE.unpack(_SINGLE.pack(value))[0] if type_.kind == "float" else float(value)) + 0.0
    return datetime.fromisoformat(value).isoformat() if type_.kind in ("timestamp", "timestamp_ntz") else value
