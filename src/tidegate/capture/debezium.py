"""Reads Debezium's JSON: row events, transaction metadata, notifications. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgspec

from tidegate.capture.values import UNAVAILABLE, DoesNotFit, conversion, wire_type
from tidegate.errors import BadRecord, FixConfiguration, UnknownColumn
from tidegate.model.cell import Cell, encode_json
from tidegate.model.key import KeyBytes, encode_key
from tidegate.model.schema import Column, ColumnType, TableSchema, TimestampUnit, parse_type

COUNTERS_SURVIVE_RESTARTS = (3, 6, 1)
BINLOG = frozenset({"mysql", "mariadb"})


class Op(IntEnum):
    """What a row event does to its key."""

    UPSERT = 0
    DELETE = 1
    TRUNCATE = 2
    PARTIAL = 3  # an upsert with columns that Debezium did not send (unchanged TOAST values)
    MOVED = 4  # the same under another key: the event before it has deleted the row under its former one


class Source(msgspec.Struct, gc=False, rename={"tx_id": "txId"}):
    version: str = ""
    snapshot: str | bool | None = None
    tx_id: int | None = None
    lsn: int | None = None
    file: str | None = None
    pos: int | None = None
    sequence: str | None = None


class _Origin(msgspec.Struct, gc=False):
    connector: str | None = None
    db: str | None = None
    schema: str | None = None
    table: str | None = None


class _FromTable(msgspec.Struct, gc=False):
    source: _Origin


class InTransaction(msgspec.Struct, gc=False):
    id: str
    total_order: int


class Collected(msgspec.Struct, gc=False):
    data_collection: str
    event_count: int


class TransactionEvent(msgspec.Struct, gc=False):
    """BEGIN or END, as the transaction topic carries it."""

    status: str
    id: str
    event_count: int | None = None
    data_collections: list[Collected] | None = None
    ts_ms: int | None = None


class Notification(msgspec.Struct, gc=False):
    type: str
    aggregate_type: str
    additional_data: dict[str, str] | None = None

    @property
    def collections(self) -> frozenset[str]:
        """The tables that the snapshot is taken of; none if this is not said."""
        return frozenset(filter(None, (self.additional_data or {}).get("data_collections", "").split(",")))


class _Wrapped(msgspec.Struct, gc=False):
    """`{"schema": …, "payload": …}`, as the JSON converter writes with schemas enabled."""

    payload: msgspec.Raw
    schema: msgspec.Raw = msgspec.Raw(b"null")


_wrapped = msgspec.json.Decoder(_Wrapped).decode
_transaction_event = msgspec.json.Decoder(TransactionEvent).decode
_notification = msgspec.json.Decoder(Notification).decode
_from_table = msgspec.json.Decoder(_FromTable).decode


def payload(value: bytes) -> bytes:
    """The record without the schema around it, if there is one."""
    if value.startswith((b'{"schema":', b'{"payload":')):
        return bytes(_wrapped(value).payload)
    return value


@dataclass(frozen=True)
class Place:
    """Where a record lies in the log."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}, offset {self.offset}"


def transaction_event(value: bytes, place: Place) -> TransactionEvent:
    try:
        return _transaction_event(payload(value))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRecord(
            f"{place}: not a transaction event: {error}",
            remedy="The transaction topic must hold what Debezium wrote there, and nothing else.",
        ) from None


def notification(value: bytes) -> Notification | None:
    """A notification of the sink channel; None for one of another shape (they only ever help)."""
    try:
        return _notification(payload(value))
    except msgspec.DecodeError:
        return None


def collection_of(value: bytes) -> str | None:
    """The table that a row event tells of, as END names it; None if the event does not say."""
    try:
        source = _from_table(payload(value)).source
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    schema = source.db if source.connector in BINLOG else source.schema
    return f"{schema}.{source.table}" if schema and source.table else None


def check_collection(values: Sequence[bytes | None], collection: str, topic: str, partition: int, first: int) -> None:
    """Refuses a topic whose first row event is of another table than the topic's name says."""
    for offset, value in enumerate(values, first):
        found = collection_of(value) if value is not None else None
        if found is not None and found != collection:
            raise BadRecord(
                f'{Place(topic, partition, offset)}: a row of table "{found}" in the topic of "{collection}":'
                " END counts it by another name than the topic's",
                remedy="Record without routing (no transform that renames topics), one topic for each table, called"
                " PREFIX.schema.table; then begin with a new state folder.",
            )
        if value is not None:
            return


def transaction_group(transaction_id: str) -> str:
    """What all events of one transaction share: the part before the colon on Postgres, the whole id elsewhere."""
    head, colon, tail = transaction_id.partition(":")
    return head if colon and head.isdigit() and tail.isdigit() else transaction_id


def commit_lsn(end_id: str) -> int | None:
    """The LSN in END's id, strictly increasing in commit order; only Postgres has one."""
    head, colon, tail = end_id.partition(":")
    return int(tail) if colon and head.isdigit() and tail.isdigit() else None


def snapshot_group(source: Source) -> str:
    """Names one snapshot generation: all its rows share it, a restarted snapshot has another."""
    if source.lsn is not None:
        return f"snapshot:{source.tx_id}:{source.lsn}"
    return f"snapshot:{source.file}:{source.pos}"


def snapshot_order(group: str) -> tuple[int, int]:
    """A later generation has the greater one: by LSN, or by the binlog's number and the position in it."""
    origin, place = group.removeprefix("snapshot:").rsplit(":", 1)
    number = origin.rpartition(".")[2]
    return (int(number) if snapshot_lsn(group) is None and number.isdigit() else 0), int(place)


def snapshot_lsn(group: str) -> int | None:
    """The LSN that a snapshot was taken at; only Postgres has one."""
    origin, place = group.removeprefix("snapshot:").rsplit(":", 1)
    return int(place) if origin == "None" or origin.isdigit() else None


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


class RowEvents:
    """The row events of one range of a table's topic, column by column."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.orders: list[int] = []
        self.ops: list[int] = []
        self.keys: list[KeyBytes] = []
        self.cells: list[Cell | None] = []
        self.lsns: list[int] = []
        self.has_moved = False  # a row under another key lacks a column
        self.last_snapshot_rows: set[str] = set()  # the groups of those that say so
        self.sequences: dict[str, str] = {}  # of versions that count anew after a restart: what a group's rows share
        self.streamed = False  # a row of the stream was seen, so the snapshot is behind


class RowDecoder:
    """Turns the records of one table's topic into row events; refuses what it cannot read, with the place."""

    def __init__(self, table: TableSchema) -> None:
        self._table = table
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(_envelope_type(table)).decode
        self._after_conversions = [*_conversions(table, table.columns), *_droppings(table.left_out or ())]
        self._before_conversions = _conversions(table, table.key_columns)
        self._after_key = _key_fields(table.columns, table.key)
        self._before_key = _key_fields(table.key_columns, table.key)
        self._version = ""
        self._old_version = False
        self._id = self._group = ""  # of the last record: most follow one of their own transaction

    def decode(self, events: RowEvents, values: Sequence[bytes | None], topic: str, partition: int, first: int) -> None:
        """Appends the events of consecutive records, the first at offset `first`; tombstones are passed over."""
        offset = first
        try:
            for offset, value in enumerate(values, first):
                if value is not None:
                    self._one(events, value, offset)
        except DoesNotFit as error:
            raise self._refusal(str(error), Place(topic, partition, offset), error.remedy) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            place = Place(topic, partition, offset)
            if unknown := _UNKNOWN_FIELD.match(str(error)):
                raise self._unknown_column(unknown.group(1), place) from None
            raise self._refusal(self._explain(str(error)), place) from None

    def _one(self, events: RowEvents, value: bytes, offset: int) -> None:
        event = self._decode(payload(value))
        source, transaction = event.source, event.transaction
        if source.version != self._version:
            self._version, self._old_version = source.version, _loses_count(source.version)
        if transaction is None:
            self._outside_transaction(events, event, offset)
        else:
            if self._old_version:
                self._check_sequence(events, transaction, source)
            if transaction.id != self._id:
                self._id, self._group = transaction.id, transaction_group(transaction.id)
            events.groups.append(self._group)
            events.orders.append(transaction.total_order)
            events.streamed = True
        events.lsns.append(source.lsn or 0)
        self._change(events, event)

    def _outside_transaction(self, events: RowEvents, event: Any, offset: int) -> None:
        source = event.source
        if event.op != "r":
            raise DoesNotFit("it has no transaction metadata: set provide.transaction.metadata=true in the connector")
        if source.snapshot == "incremental":
            raise DoesNotFit("incremental snapshots are not supported: use the connector's initial snapshot")
        group = snapshot_group(source)
        if source.snapshot == "last":
            events.last_snapshot_rows.add(group)
        events.groups.append(group)
        events.orders.append(offset)

    def _change(self, events: RowEvents, event: Any) -> None:
        if event.op in _UPSERTS:
            self._upsert(events, event.op, event.after)
        elif event.op == "d":
            events.ops.append(Op.DELETE)
            events.keys.append(self._deleted_key(event.before))
            events.cells.append(None)
        elif event.op == "t":
            events.ops.append(Op.TRUNCATE)
            events.keys.append(b"")
            events.cells.append(None)
        else:
            raise DoesNotFit(f'the operation "{event.op}" is unknown')

    def _upsert(self, events: RowEvents, op: str, row: Any) -> None:
        if row is None:
            raise DoesNotFit('it has no "after"')
        _convert(row, self._after_conversions)
        cell = encode_json(row)
        partial = _UNAVAILABLE_TEXT in cell and unavailable_columns(cell)
        events.ops.append(Op.UPSERT if not partial else Op.MOVED if op == "c" else Op.PARTIAL)
        events.has_moved = events.has_moved or events.ops[-1] == Op.MOVED
        events.keys.append(encode_key([read(getattr(row, name)) for name, read in self._after_key]))
        events.cells.append(cell)

    def _deleted_key(self, row: Any) -> KeyBytes:
        if row is None or any(getattr(row, name) is msgspec.UNSET for name, _ in self._before_key):
            raise DoesNotFit('"before" lacks the primary key: give the table a primary key or REPLICA IDENTITY FULL')
        _convert(row, self._before_conversions)
        return encode_key([read(getattr(row, name)) for name, read in self._before_key])

    def _check_sequence(self, events: RowEvents, transaction: InTransaction, source: Source) -> None:
        group, previous = transaction_group(transaction.id), (source.sequence or "").split(",")[0]
        if events.sequences.setdefault(group, previous) != previous:
            raise DoesNotFit(
                f"the connector (Debezium {self._version}) was restarted inside transaction {transaction.id} and counts"
                " its rows anew: use Debezium 3.6.1 or later and take a new snapshot"
            )

    def _refusal(self, why: str, place: Place, remedy: str | None = None) -> BadRecord:
        return BadRecord(
            f'{place}: the record does not fit table "{self._table.name}": {why}',
            remedy=(f"{remedy} " if remedy else "") + "Correct the table's key and columns in tidegate.yaml and run"
            " again; or, if the connector or the record is wrong, correct that and begin with a new state folder."
            " Nothing after this record was taken, nothing before it was lost.",
        )

    def _unknown_column(self, column: str, place: Place) -> UnknownColumn:
        return UnknownColumn(
            f'{place}: table "{self._table.name}" has got a column "{column}"',
            remedy="Run again: the table's columns are read from the server at each start.",
            table=self._table.name,
            column=column,
        )

    def _explain(self, error: str) -> str:
        for place, column in enumerate(self._table.columns):
            error = error.replace(f"`c{place}`", f"`{column.name}`")
        if "$.after." in error or "$.before." in error:
            name = error.rsplit(".", 1)[-1].split("[")[0].strip("`")
            declared = {column.name: column.type.ddl for column in self._table.columns}.get(name)
            return f"{error} (declared as {declared})" if declared else error
        return error


_UPSERTS = frozenset("cru")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)` - at `\$\.after`")
_UNAVAILABLE_TEXT = UNAVAILABLE.encode()
_raw_columns = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


_UNAVAILABLE_VALUES = (f'"{UNAVAILABLE}"'.encode(), f'["{UNAVAILABLE}"]'.encode())


def unavailable_columns(cell: Cell) -> tuple[str, ...]:
    """The columns that Debezium did not send because they are unchanged and stored out of line."""
    return tuple(name for name, raw in _raw_columns(cell).items() if bytes(raw) in _UNAVAILABLE_VALUES)


def never_sent(cell: Cell, previous: Cell | None) -> tuple[str, ...]:
    """The columns that neither a partial cell nor the row's previous one has."""
    known = _raw_columns(previous) if previous is not None else {}
    return tuple(name for name in unavailable_columns(cell) if name not in known)


def completed(cell: Cell, previous: Cell) -> Cell:
    """A partial cell, with what was not sent taken from the row's previous cell, which must have it."""
    now, before = _raw_columns(cell), _raw_columns(previous)
    return encode_json({**now, **{name: before[name] for name in unavailable_columns(cell)}})


def _loses_count(version: str) -> bool:
    return bool(version) and version_tuple(version) < COUNTERS_SURVIVE_RESTARTS


def _after_type(table: TableSchema) -> type[msgspec.Struct]:
    """The key must be there; any other column may be NULL, or absent as before an ADD COLUMN."""
    fields: list[Any] = []
    for place, column in enumerate(table.columns):
        wire = wire_type(column.type)
        optional = wire if wire is msgspec.Raw else wire | None
        fields.append((f"c{place}", wire) if column.name in table.key else (f"c{place}", optional, None))
    left_out = table.left_out or ()
    fields += [(f"o{place}", Any, msgspec.UNSET) for place in range(len(left_out))]
    names = {f"o{place}": name for place, name in enumerate(left_out)}
    return _struct("After", fields, table.columns, names, closed=table.left_out is not None)


def _before_type(columns: Sequence[Column]) -> type[msgspec.Struct]:
    """The key columns alone: the others are made up under the default replica identity."""
    fields = [(f"c{place}", _or_unset(wire_type(column.type)), msgspec.UNSET) for place, column in enumerate(columns)]
    return _struct("Before", fields, columns)


def _or_unset(wire: Any) -> Any:
    return wire if wire is msgspec.Raw else wire | msgspec.UnsetType


def _struct(
    name: str,
    fields: list[Any],
    columns: Sequence[Column],
    others: Mapping[str, str] | None = None,
    closed: bool = False,
) -> type[msgspec.Struct]:
    names = {f"c{place}": column.name for place, column in enumerate(columns)} | dict(others or {})
    return msgspec.defstruct(name, fields, rename=names, kw_only=True, gc=False, forbid_unknown_fields=closed)


def _envelope_type(table: TableSchema) -> type[msgspec.Struct]:
    fields: list[Any] = [
        ("op", str),
        ("source", Source),
        ("before", _before_type(table.key_columns) | None, None),
        ("after", _after_type(table) | None, None),
        ("transaction", InTransaction | None, None),
    ]
    return msgspec.defstruct("Envelope", fields, gc=False)


_Converted = tuple[str, str, Callable[[Any], Any]]  # a field, its column, and how its value becomes a cell's


def _conversions(table: TableSchema, columns: Sequence[Column]) -> list[_Converted]:
    found = [
        (f"c{place}", column.name, conversion(column.type, table.decimals, column.unit))
        for place, column in enumerate(columns)
    ]
    return [(field, name, convert) for field, name, convert in found if convert is not None]


def _convert(row: Any, conversions: Sequence[_Converted]) -> None:
    """Gives each value the form that it has in a cell."""
    name = ""
    try:
        for field, name, convert in conversions:  # noqa: B007 (the column is named where one does not fit)
            value = getattr(row, field)
            if value is not None:
                setattr(row, field, convert(value))
    except DoesNotFit as error:
        raise DoesNotFit(f'column "{name}": {error}', error.remedy) from None


def _droppings(left_out: Sequence[str]) -> list[_Converted]:
    """What is left out is unset after it was read: an unset field is not in the cell."""
    return [(f"o{place}", name, lambda _: msgspec.UNSET) for place, name in enumerate(left_out)]


def _key_fields(columns: Sequence[Column], key: Sequence[str]) -> list[tuple[str, Callable[[Any], object]]]:
    places = {column.name: (f"c{place}", column.type.kind) for place, column in enumerate(columns)}
    return [(places[name][0], _key_decimal if places[name][1] == "decimal" else _same) for name in key]


def _same(value: Any) -> object:
    return value


def _key_decimal(value: Any) -> Decimal:
    token = bytes(value)
    if token[:1] in (b"n", b'"'):
        raise DoesNotFit(f"the primary key holds {token.decode()}, which is not a number")
    return Decimal(token.decode())


@lru_cache(maxsize=64)
def row_decoder(table: TableSchema) -> RowDecoder:
    """The decoder of one table, built once in a process."""
    return RowDecoder(table)


_CONNECT_TYPES = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "float32": "float",
    "double": "double",
    "float64": "double",
    "boolean": "boolean",
    "string": "string",
    "bytes": "binary",
}
_LOGICAL_TYPES = {
    "io.debezium.time.Date": "date",
    "io.debezium.time.IsoDate": "date",
    "org.apache.kafka.connect.data.Date": "date",
    "io.debezium.time.Timestamp": "timestamp_ntz",
    "io.debezium.time.MicroTimestamp": "timestamp_ntz",
    "io.debezium.time.NanoTimestamp": "timestamp_ntz",
    "io.debezium.time.IsoTimestamp": "timestamp_ntz",
    "org.apache.kafka.connect.data.Timestamp": "timestamp_ntz",
    "io.debezium.time.ZonedTimestamp": "timestamp",
}


_UNITS: dict[str, TimestampUnit] = {
    "io.debezium.time.Timestamp": "millis",
    "io.debezium.time.MicroTimestamp": "micros",
    "io.debezium.time.NanoTimestamp": "nanos",
    "org.apache.kafka.connect.data.Timestamp": "millis",
}
_Schema = dict[str, Any]


class _UnknownTypeError(Exception):
    """No column can have this type of Kafka Connect; the message is its name."""


def columns_from_schema(table: str, value: bytes) -> tuple[Column, ...] | None:
    """The columns of a row event that carries its schema; None for one that carries none."""
    schema = _schema_of(value)
    after = next((field for field in schema.get("fields", ()) if field.get("field") == "after"), None)
    return tuple(_column(table, field) for field in after["fields"]) if after else None


def key_from_schema(key: bytes) -> tuple[str, ...]:
    """The names of the primary key's columns; none where the record's key carries no schema."""
    return tuple(field["field"] for field in _schema_of(key).get("fields", ()))


def _schema_of(document: bytes) -> _Schema:
    return (msgspec.json.decode(document).get("schema") if document.startswith(b'{"schema"') else None) or {}


def _column(table: str, field: _Schema) -> Column:
    try:
        return Column(field["field"], _connect_type(field), _unit(field))
    except _UnknownTypeError as unknown:
        raise FixConfiguration(
            f'table "{table}": column "{field["field"]}" has the type {unknown}, which Tidegate cannot read',
            remedy=f"Declare tables.{table}.columns and its key in tidegate.yaml without this column; or leave it out"
            " with column.exclude.list in the connector.",
        ) from None


def _unit(field: _Schema) -> TimestampUnit:
    return _unit(field["items"]) if field["type"] == "array" else _UNITS.get(field.get("name") or "", "auto")


def _connect_type(field: _Schema) -> ColumnType:
    name = field.get("name") or ""
    if name == "org.apache.kafka.connect.data.Decimal":
        return _connect_decimal(name, field.get("parameters") or {})
    if field["type"] == "array":
        return ColumnType("array", element=_connect_type(field["items"]))
    kind = _LOGICAL_TYPES.get(name) or _CONNECT_TYPES.get(field["type"])
    if kind is None:
        raise _UnknownTypeError(f"{field['type']} ({name})" if name else field["type"])
    return ColumnType(kind)


def _connect_decimal(name: str, parameters: _Schema) -> ColumnType:
    precision, scale = parameters.get("connect.decimal.precision", "38"), parameters.get("scale", "")
    try:
        return parse_type(f"decimal({precision},{scale})")
    except FixConfiguration:
        raise _UnknownTypeError(f"{name} of precision {precision} and scale {scale}") from None
