"""A cell: one row as canonical JSON text, typed by its table's schema.

Numbers, booleans and NULL are themselves, decimals are numbers with exactly their scale, dates and timestamps are ISO
text (timestamp with Z, timestamp_ntz without), binary is base64, NaN and the infinities are strings. The same row has
the same cell, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

from tidegate.model.key import KeyBytes, encode_key
from tidegate.model.schema import Column, ColumnType, TableSchema

Cell = bytes
_NULL = msgspec.Raw(b"null")
encode_json = msgspec.json.Encoder(decimal_format="number").encode


def python_type(column_type: ColumnType) -> Any:
    """The type as which a cell's value is decoded."""
    if column_type.kind in ("tinyint", "smallint", "int", "bigint"):
        return int
    if column_type.kind in ("float", "double"):
        return float | str
    if column_type.element:
        return list[python_type(column_type.element) | None]  # type: ignore[misc]
    return {"boolean": bool, "decimal": Decimal}.get(column_type.kind, str)


@lru_cache(maxsize=256)
def row_decoder(columns: tuple[Column, ...]) -> msgspec.json.Decoder[Any]:
    """Decodes cells into structs with one attribute a column, `c0`, `c1`, … in the order given; absent is NULL."""
    fields = [(f"c{place}", python_type(column.type) | None, None) for place, column in enumerate(columns)]
    names = {f"c{place}": column.name for place, column in enumerate(columns)}
    return msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=names, gc=False))


def raw_decoder(names: Sequence[str]) -> Callable[[Cell], Any]:
    """Decodes a cell into the JSON texts of the named columns, `c0`, `c1`, …, unread; what is absent is NULL."""
    fields = [(f"c{place}", msgspec.Raw, _NULL) for place in range(len(names))]
    renamed = {f"c{place}": name for place, name in enumerate(names)}
    return msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=renamed, gc=False)).decode


def decode_values(columns: tuple[Column, ...], cell: Cell) -> tuple[object, ...]:
    """The given columns of a cell, as Python values."""
    row = row_decoder(columns).decode(cell)
    return tuple(getattr(row, name) for name in row.__struct_fields__)


def key_of(table: TableSchema, cell: Cell) -> KeyBytes:
    return encode_key(decode_values(table.key_columns, cell))


def encode_cell(columns: Sequence[Column], values: Sequence[object]) -> Cell:
    """The cell of a row whose values are already in cell form."""
    return encode_json({column.name: value for column, value in zip(columns, values, strict=True)})
