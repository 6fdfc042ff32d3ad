"""What databases that speak SQL share: tables, statements, rows, and the checkpoint's table. Pure: it runs nothing."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tidegate.destinations.contract import Row, canonical_value, read_config
from tidegate.errors import Fenced, FixConfiguration
from tidegate.model.cell import encode_json
from tidegate.model.key import encode_key
from tidegate.model.schema import parse_type
from tidegate.protocol.fence import Fence, FenceRow
from tidegate.protocol.messages import (
    BindingSpec,
    Constraint,
    FieldSpec,
    KeyRange,
    MaterializationSpec,
    RuntimeCheckpoint,
    Store,
    ValidatedBinding,
)

KEY_COLUMN = "_tidegate_key"  # the primary key where the view's own key can be NULL or has no column
CHECKPOINTS = "tidegate_checkpoints"
LEAVE_OUT = "Leave its column out: write another view without it, and deliver that to a table of its own."
Encoder = Callable[[Any], Any]


@dataclass(frozen=True)
class Dialect:
    """In what two databases differ."""

    placeholder: str
    types: dict[str, str]  # by kind of column; decimal's has places for precision and scale
    encoders: dict[str, Encoder]
    decoders: dict[str, Encoder]
    as_text: frozenset[str] = frozenset()  # kinds that are read as text
    longest_name_bytes: int = 1_000_000

    def sql_type(self, field: FieldSpec) -> str:
        kind = kind_of(field)
        if kind != "decimal":
            return self.types[kind]
        column = parse_type(field.type)
        return self.types[kind].format(column.precision, column.scale)

    def quote(self, name: str) -> str:
        if not name or "\0" in name or len(name.encode()) > self.longest_name_bytes:
            raise FixConfiguration(
                f'"{name}" cannot be the name of a table or column there',
                remedy=f"Give it another name, of 1 to {self.longest_name_bytes} bytes: `AS` in the view's SQL.",
            )
        quoted = '"' + name.replace('"', '""') + '"'
        return quoted.replace("%", "%%") if self.placeholder == "%s" else quoted


def kind_of(field: FieldSpec) -> str:
    """A scalar's kind; anything nested is json."""
    if field.type == "json" or field.type.startswith(("array", "struct", "map")):
        return "json"
    return parse_type(field.type).kind


def decode_binary(text: str) -> bytes:
    return base64.b64decode(text)


def encode_binary(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@dataclass(frozen=True)
class FoundColumn:
    """A column of a table that exists already."""

    name: str
    sql_type: str
    must_be_given: bool
    in_key: bool


class Table:
    """One binding's table: its columns, its statements, and how cells become its rows."""

    def __init__(self, binding: BindingSpec, path: tuple[str, ...], dialect: Dialect) -> None:
        self.binding = binding
        self.path = path
        self.name = ".".join(map(dialect.quote, path))
        self._dialect = dialect
        self._own_key = not binding.key or any(field.nullable for field in binding.key)
        columns = {KEY_COLUMN: dialect.types["string"]} if self._own_key else {}
        self.columns = columns | {field.name: dialect.sql_type(field) for field in binding.fields}
        self.key = (KEY_COLUMN,) if self._own_key else tuple(field.name for field in binding.key)
        self._encoders = _per_field(binding.fields, dialect.encoders)
        self._key_encoders = _per_field(binding.key, dialect.encoders)
        self._decoders = _per_field(binding.fields, dialect.decoders)
        self._write_statements()

    def _write_statements(self) -> None:
        quote, placeholder = self._dialect.quote, self._dialect.placeholder
        self.column_list = ", ".join(map(quote, self.columns))
        self.key_list = ", ".join(map(quote, self.key))
        definitions = ", ".join(self._definition(name) for name in self.columns)
        self.create = f"CREATE TABLE {self.name} ({definitions}, PRIMARY KEY ({self.key_list}))"
        self.insert = f"INSERT INTO {self.name} ({self.column_list})"
        changed = ", ".join(f"{quote(field.name)} = excluded.{quote(field.name)}" for field in self.binding.values)
        self.on_conflict = f"ON CONFLICT ({self.key_list}) DO " + (f"UPDATE SET {changed}" if changed else "NOTHING")
        self.upsert = f"{self.insert} VALUES ({', '.join([placeholder] * len(self.columns))}) {self.on_conflict}"
        has_key = " AND ".join(f"{quote(name)} = {placeholder}" for name in self.key)
        self.delete = f"DELETE FROM {self.name} WHERE {has_key}"
        self.select_all = f"SELECT {', '.join(map(self._selected, self.binding.fields))} FROM {self.name}"
        self.select_one = f"{self.select_all} WHERE {has_key}"
        self.has_rows = f"SELECT EXISTS (SELECT 1 FROM {self.name})"

    def _definition(self, name: str) -> str:
        return f"{self._dialect.quote(name)} {self.columns[name]}" + (" NOT NULL" if name in self.key else "")

    def _selected(self, field: FieldSpec) -> str:
        name = self._dialect.quote(field.name)
        return f"CAST({name} AS text)" if kind_of(field) in self._dialect.as_text else name

    def add_column(self, name: str) -> str:
        return f"ALTER TABLE {self.name} ADD COLUMN {self._definition(name)}"

    def rows(self, stores: Sequence[Store]) -> Iterable[tuple[Any, ...]]:
        """What the upserts take."""
        rows = _encoded([store.key + store.values for store in stores], self._encoders)
        if not self._own_key:
            return rows
        return ((encode_key(store.key).hex(), *row) for store, row in zip(stores, rows, strict=True))

    def key_rows(self, keys: Sequence[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        """What deletes, or selects of one row, take."""
        if self._own_key:
            return [(encode_key(key).hex(),) for key in keys]
        return _encoded(keys, self._key_encoders)

    def cells(self, row: Sequence[Any]) -> Row:
        """A selected row's key and values, canonical."""
        (raw,) = _encoded([tuple(row)], self._decoders)
        cells = tuple(map(canonical_value, self.binding.fields, raw))
        width = len(self.binding.key)
        return cells[:width], cells[width:]

    def document(self, row: Sequence[Any]) -> bytes:
        """A selected row as a JSON document."""
        key, values = self.cells(row)
        pairs = zip(self.binding.fields, key + values, strict=True)
        return encode_json({field.name: _in_document(field, value) for field, value in pairs})


def _in_document(field: FieldSpec, value: Any) -> Any:
    return msgspec.Raw(value.encode()) if kind_of(field) == "json" and value is not None else value


def _per_field(fields: Sequence[FieldSpec], conversions: dict[str, Encoder]) -> tuple[tuple[int, Encoder], ...]:
    found = ((place, conversions.get(kind_of(field))) for place, field in enumerate(fields))
    return tuple((place, conversion) for place, conversion in found if conversion)


def _encoded(
    rows: Sequence[tuple[Any, ...]], conversions: tuple[tuple[int, Encoder], ...]
) -> Iterable[tuple[Any, ...]]:
    """Column by column, which is twice as fast as row by row."""
    if not conversions or not rows:
        return rows
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    for place, convert in conversions:
        columns[place] = [None if cell is None else convert(cell) for cell in columns[place]]
    return zip(*columns, strict=True)


class TableResource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a binding goes: its table; else the configuration's, else the one with the collection's name."""

    table: str | None = None


def tables_of(
    materialization: MaterializationSpec, dialect: Dialect, schema: tuple[str, ...] = ()
) -> tuple[Table, ...]:
    """One table a binding; refuses what a database's table cannot be."""
    tables = tuple(_table(materialization, binding, dialect, schema) for binding in materialization.bindings)
    if len({table.path for table in tables}) < len(tables):
        raise FixConfiguration(
            f'two bindings of "{materialization.name}" have the same table', remedy="Give each its own `table`."
        )
    return tables


def _table(
    materialization: MaterializationSpec, binding: BindingSpec, dialect: Dialect, schema: tuple[str, ...]
) -> Table:
    resource: TableResource = read_config(TableResource, binding.resource, f'binding "{binding.collection}"')
    name = resource.table or materialization.config.get("table") or binding.collection
    if binding.delta_updates:
        raise FixConfiguration(
            f'table "{name}" holds one row a key and cannot take delta updates',
            remedy="Remove the setting for delta updates, or use a destination that appends.",
        )
    names = [field.name for field in binding.fields]
    if len(set(names)) < len(names) or KEY_COLUMN in names or name == CHECKPOINTS:
        raise FixConfiguration(
            f'table "{name}": a column stands there twice, or a name of Tidegate\'s own is used',
            remedy=f"Rename the column in the view's SQL; {KEY_COLUMN} and {CHECKPOINTS} are taken.",
        )
    return Table(binding, (*schema, name), dialect)


def opinion(table: Table, found: Sequence[FoundColumn], *, ours: bool, has_rows: bool) -> ValidatedBinding:
    """What this destination would do with each field of a binding; refuses what is wrong with the table itself."""
    wrong = mismatches(table, found, ours=ours) if found else {}
    fields = {field.name for field in table.binding.fields}
    require_fit(table, {name: reason for name, reason in wrong.items() if name not in fields})
    require_own_rows(table, ours=ours, has_rows=has_rows and not wrong)
    keys = {field.name for field in table.binding.key}
    constraints = {
        field.name: Constraint("incompatible", wrong[field.name])
        if field.name in wrong
        else Constraint("locationRequired" if field.name in keys else "fieldOptional")
        for field in table.binding.fields
    }
    return ValidatedBinding(constraints, table.path, delta_updates=False)


def mismatches(table: Table, found: Sequence[FoundColumn], *, ours: bool) -> dict[str, str]:
    """Why a table that exists cannot take the binding, by column."""
    wrong = {
        column.name: f"is {column.sql_type}, but the view needs {table.columns[column.name]}"
        for column in found
        if column.sql_type != table.columns.get(column.name, column.sql_type)
    }
    for column in found:
        if column.must_be_given and column.name not in table.columns:
            wrong[column.name] = "must not be NULL and has no default, but the view does not have it"
        if column.in_key != (column.name in table.key):
            wrong[column.name] = f"belongs to another primary key than ({table.key_list})"
    names = {column.name for column in found}
    wrong |= {name: "is missing, and belongs to the primary key" for name in table.key if name not in names}
    foreign = () if ours else (name for name in table.columns if name not in names)
    return wrong | dict.fromkeys(foreign, "is missing in a table that Tidegate did not create")


def require_fit(table: Table, wrong: dict[str, str]) -> None:
    """Refuses a table with such columns."""
    if wrong:
        told = "; ".join(f'column "{name}" {reason}' for name, reason in wrong.items())
        raise FixConfiguration(
            f"table {table.name}: {told}",
            remedy="Name another `table` and give the materialization a new name, which builds it anew; "
            "or alter the table there.",
        )


def require_own_rows(table: Table, *, ours: bool, has_rows: bool) -> None:
    """Refuses a table that somebody else has filled."""
    if has_rows and not ours:
        raise FixConfiguration(
            f"table {table.name} has rows, but {CHECKPOINTS} knows nothing of the materialization that should own it",
            remedy=f"Restore the row in {CHECKPOINTS} from a backup; "
            "or empty the table and give the materialization a new name, which builds it anew.",
        )


def changes(table: Table, found: Sequence[FoundColumn], *, ours: bool, has_rows: bool) -> tuple[str, ...]:
    """The statements that make the table fit; refuses one that is somebody else's or has changed its types."""
    if not found:
        return (table.create,)
    require_fit(table, mismatches(table, found, ours=ours))
    require_own_rows(table, ours=ours, has_rows=has_rows)
    names = {column.name for column in found}
    return tuple(table.add_column(name) for name in table.columns if name not in names)


class Checkpoints:
    """The table of fences and checkpoints: its statements and rows."""

    def __init__(self, materialization: str, dialect: Dialect, schema: tuple[str, ...], json_type: str) -> None:
        self.materialization = materialization
        self.name = ".".join(map(dialect.quote, (*schema, CHECKPOINTS)))
        one = dialect.placeholder
        self.create = (
            f"CREATE TABLE IF NOT EXISTS {self.name} (materialization text NOT NULL, key_begin bigint NOT NULL, "
            f"key_end bigint NOT NULL, fence bigint NOT NULL, checkpoint {json_type} NOT NULL, "
            "PRIMARY KEY (materialization, key_begin, key_end))"
        )
        self.select = (
            f"SELECT key_begin, key_end, fence, CAST(checkpoint AS text) FROM {self.name} WHERE materialization = {one}"
        )
        self.put = (
            f"INSERT INTO {self.name} (materialization, key_begin, key_end, fence, checkpoint) "
            f"VALUES ({', '.join([one] * 5)}) ON CONFLICT (materialization, key_begin, key_end) "
            "DO UPDATE SET fence = excluded.fence, checkpoint = excluded.checkpoint"
        )
        self.commit = (
            f"UPDATE {self.name} SET checkpoint = {one} "
            f"WHERE materialization = {one} AND key_begin = {one} AND key_end = {one} AND fence = {one}"
        )

    def fence_rows(self, selected: Iterable[Sequence[Any]]) -> list[FenceRow]:
        return [
            FenceRow(KeyRange(begin, end), Fence(fence), msgspec.json.decode(checkpoint, type=RuntimeCheckpoint))
            for begin, end, fence, checkpoint in selected
        ]

    def put_row(self, row: FenceRow) -> tuple[Any, ...]:
        key_range = row.key_range
        return self.materialization, key_range.begin, key_range.end, row.fence, _text(row.checkpoint)

    def commit_row(self, mine: FenceRow, checkpoint: RuntimeCheckpoint) -> tuple[Any, ...]:
        return _text(checkpoint), self.materialization, mine.key_range.begin, mine.key_range.end, mine.fence

    def fenced(self, mine: FenceRow) -> Fenced:
        return Fenced(
            f'another session has taken over "{self.materialization}", key range {mine.key_range.text}',
            remedy="Nothing was changed. Run one `tidegate run` for a project; stop this one or the other.",
        )


def _text(checkpoint: RuntimeCheckpoint) -> str:
    return msgspec.json.encode(checkpoint).decode()


@dataclass(frozen=True)
class Changes:
    """The stores of one binding, sorted by what is to be done."""

    upserts: list[Store]
    deletes: list[tuple[Any, ...]]


def changes_by_binding(stores: Iterable[Store]) -> dict[int, Changes]:
    """A delete of what never existed is nothing."""
    found: dict[int, Changes] = defaultdict(lambda: Changes([], []))
    for store in stores:
        if not store.delete:
            found[store.binding].upserts.append(store)
        elif store.exists:
            found[store.binding].deletes.append(store.key)
    return found
