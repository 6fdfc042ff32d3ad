"""Types, columns and tables, as Spark names them."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from tidegate.errors import FixConfiguration

SCALARS = (
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "string",
    "binary",
    "date",
    "timestamp",
    "timestamp_ntz",
)
INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_ALIASES = {
    "integer": "int",
    "long": "bigint",
    "short": "smallint",
    "byte": "tinyint",
    "bool": "boolean",
    "real": "float",
    "text": "string",
    "varchar": "string",
    "bytes": "binary",
    "numeric": "decimal",
    "dec": "decimal",
}
_DECIMAL = re.compile(r"decimal\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)$")
_ARRAY = re.compile(r"array\s*<(.+)>$")

DecimalForm = Literal["auto", "text", "base64"]
TimestampUnit = Literal["auto", "millis", "micros", "nanos"]


@dataclass(frozen=True)
class ColumnType:
    """A scalar type, a decimal with precision and scale, or an array of one of these."""

    kind: str
    precision: int = 0
    scale: int = 0
    element: ColumnType | None = None

    @property
    def ddl(self) -> str:
        if self.kind == "decimal":
            return f"decimal({self.precision},{self.scale})"
        return f"array<{self.element.ddl}>" if self.element else self.kind


def parse_type(text: str) -> ColumnType:
    """Reads a type as Spark's DDL writes it; refuses what a source column cannot be."""
    word = text.strip().lower()
    if array := _ARRAY.match(word):
        return ColumnType("array", element=parse_type(array.group(1)))
    for alias, name in _ALIASES.items():
        if word == alias or word.startswith(alias + "("):
            word = name + word[len(alias) :] if name == "decimal" else name
            break
    if word == "decimal":
        return ColumnType("decimal", 10, 0)
    if number := _DECIMAL.match(word):
        return _decimal(text, int(number.group(1)), int(number.group(2) or 0))
    if word in SCALARS:
        return ColumnType(word)
    raise FixConfiguration(
        f'"{text}" is not a column type', remedy=f"Use one of {', '.join(SCALARS)}, decimal(p,s) or array<...>."
    )


def _decimal(text: str, precision: int, scale: int) -> ColumnType:
    if not (1 <= precision <= 38 and scale <= precision):
        raise FixConfiguration(
            f'"{text}" is out of range', remedy="A decimal has 1 to 38 digits, its scale at most as many."
        )
    return ColumnType("decimal", precision, scale)


@dataclass(frozen=True)
class Column:
    """A column, and what an integer counts that stands for its timestamp."""

    name: str
    type: ColumnType
    unit: TimestampUnit = "auto"

    @property
    def is_moment(self) -> bool:
        return (self.type.element or self.type).kind in ("timestamp", "timestamp_ntz")


@dataclass(frozen=True)
class TableSchema:
    """A table of the source: where its changes come from, its columns, and which of them are its primary key."""

    name: str
    topic: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    decimals: DecimalForm = "auto"  # how its records write a decimal as text
    left_out: tuple[str, ...] | None = None  # what else its records have; None: anything, and nobody asks

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(self.column(name) for name in self.key)

    def only(self, names: Container[str]) -> TableSchema:
        """The table without its other columns, key columns excepted; the rest in the order of their names."""
        wanted = (column for column in self.columns if column.name in names or column.name in self.key)
        return TableSchema(self.name, self.topic, self.key, tuple(sorted(wanted, key=lambda column: column.name)))

    @property
    def ddl(self) -> str:
        return ", ".join(
            f"`{column.name}` {column.type.ddl}{' NOT NULL' if column.name in self.key else ''}"
            for column in self.columns
        )
