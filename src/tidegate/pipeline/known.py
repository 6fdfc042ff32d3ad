"""What a state folder was begun with must still mean the same: what history could not follow is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from tidegate.capture.debezium import payload
from tidegate.capture.log import LogReader
from tidegate.catalog.contract import Catalog
from tidegate.errors import FixConfiguration
from tidegate.model.schema import Column, TableSchema, parse_type
from tidegate.timeline.binding import LogPartition
from tidegate.views.definition import View
from tidegate.views.query import says_the_same

_IN_USE = "in-use"
_ANEW = "begin with a new state folder (`state:`) and new destination tables"
_INSTEAD = {"table": "Leave it out", "view": "Save it under another name (a new view is filled from history)"}


class _Envelope(msgspec.Struct):
    after: dict[str, msgspec.Raw] | None = None


_envelope = msgspec.json.Decoder(_Envelope).decode


def remember(catalog: Catalog, log: LogReader, tables: Sequence[TableSchema], views: Sequence[View]) -> None:
    """Keeps what the tables and views are, once it is known that history can follow them."""
    check_known(catalog, log, tables, views)
    for table in tables:
        catalog.set(f"table:{table.name}", _text_of_table(table))
    for view in views:
        catalog.set(f"view:{view.name}", _text_of_view(view))
    catalog.set(_IN_USE, json.dumps([*(f"table:{one.name}" for one in tables), *(f"view:{one.name}" for one in views)]))


def check_known(catalog: Catalog, log: LogReader, tables: Sequence[TableSchema], views: Sequence[View]) -> None:
    """Refuses what has changed since something was sealed and cannot be followed; writes nothing."""
    if catalog.last_seal() is None:
        return
    before = {table.name: table for table in remembered_tables(catalog)}
    for table in tables:
        if table.name in before:
            _require_compatible(before[table.name], table)
            _require_unread_columns(log, catalog.positions(), before[table.name], table)
        else:
            _require_no_records(log, table)
    for view in views:
        _require_same_query(catalog.setting(f"view:{view.name}"), view)
    _require_used_all_the_time(catalog, tables, views)
    _require_one_kind(catalog, tables, views)


def remembered_tables(catalog: Catalog) -> tuple[TableSchema, ...]:
    return tuple(_table_of(text) for text in catalog.settings("table:").values())


def _text_of_table(table: TableSchema) -> str:
    columns = {column.name: column.type.ddl for column in table.columns}
    return json.dumps({"name": table.name, "topic": table.topic, "key": table.key, "columns": columns})


def _table_of(text: str) -> TableSchema:
    found = json.loads(text)
    columns = tuple(Column(name, parse_type(ddl)) for name, ddl in found["columns"].items())
    return TableSchema(found["name"], found["topic"], tuple(found["key"]), columns)


def _text_of_view(view: View) -> str:
    return json.dumps({"sql": view.sql, "columns": {column.name: column.ddl for column in view.columns}})


# --- what cannot be followed


def _require_compatible(known: TableSchema, now: TableSchema) -> None:
    before = {column.name: column.type.ddl for column in known.columns}
    after = {column.name: column.type.ddl for column in now.columns}
    changed = [name for name in before if after.get(name) != before[name]]
    if known.key != now.key or known.topic != now.topic or changed:
        what = f"column {changed[0]}" if changed else "its key or topic"
        raise FixConfiguration(
            f'table "{now.name}" has changed ({what}) since the state folder was begun',
            remedy=f"Undo the change, or {_ANEW}.",
        )


def _require_no_records(log: LogReader, table: TableSchema) -> None:
    """Transactions that are sealed would lack the new table's rows."""
    count = sum(end for (topic, _), end in log.ends().items() if topic == table.topic)
    if count:
        raise FixConfiguration(
            f'table "{table.name}" was not there when the state folder was begun, and its topic {table.topic} has'
            f" {count} records that no tick has read with their transactions",
            remedy=f"Take the table out again, or {_ANEW}.",
        )


def _require_unread_columns(
    log: LogReader, positions: Mapping[LogPartition, int], known: TableSchema, now: TableSchema
) -> None:
    """A declared table's records are read without columns that are not declared: what those held is gone."""
    names = {column.name for column in now.columns} - {column.name for column in known.columns}
    if now.left_out is not None or not names:
        return
    for place, end in positions.items():
        if place.topic == now.topic and (found := _read_with(log, place, end, names)):
            raise FixConfiguration(
                f'table "{now.name}": the column "{found}" is new here, but records that were read before hold it'
                f" (topic {place.topic}, partition {place.partition})",
                remedy=f"Take the column out again, or {_ANEW}.",
            )


def _read_with(log: LogReader, place: LogPartition, end: int, names: set[str]) -> str | None:
    """One of the columns that a record before `end` has."""
    quoted = [json.dumps(name).encode() for name in names]
    for batch in log.read(place.topic, place.partition, 0, end):
        for value in batch.column(1).to_pylist():
            if value is not None and any(one in value for one in quoted):
                found = names & (_envelope(payload(value)).after or {}).keys()
                if found:
                    return min(found)
    return None


def _require_same_query(known: str | None, view: View) -> None:
    if known is None:
        return
    before, now = json.loads(known), json.loads(_text_of_view(view))
    if not says_the_same(before["sql"], now["sql"]) or before["columns"] != now["columns"]:
        raise FixConfiguration(
            f'view "{view.name}" has changed since it was first run',
            remedy="Undo the change, or save it under another name (a new view is filled from history).",
        )


def _require_used_all_the_time(catalog: Catalog, tables: Sequence[TableSchema], views: Sequence[View]) -> None:
    """What was taken out and is put back has missed what happened in between."""
    in_use = set(json.loads(catalog.setting(_IN_USE) or "[]"))
    names = [("table", one.name) for one in tables] + [("view", one.name) for one in views]
    for kind, name in names:
        if catalog.setting(f"{kind}:{name}") is not None and f"{kind}:{name}" not in in_use:
            raise FixConfiguration(
                f'{kind} "{name}" was taken out of the project and is put back: it lacks what happened in between',
                remedy=f"{_INSTEAD[kind]}, or {_ANEW}.",
            )


def _require_one_kind(catalog: Catalog, tables: Sequence[TableSchema], views: Sequence[View]) -> None:
    """A name's history is that of what had it first."""
    named = [("view", one.name) for one in tables] + [("table", one.name) for one in views]
    for former, name in named:
        if catalog.setting(f"{former}:{name}") is not None:
            raise FixConfiguration(
                f'"{name}" was the name of a {former} when the state folder was begun',
                remedy=f"Use another name, or {_ANEW}.",
            )


# --- what the server's tables are now


def with_remembered(catalog: Catalog, tables: Sequence[TableSchema]) -> tuple[TableSchema, ...]:
    """Tables as the server has them, with columns that they had before: older records still have those."""
    before = {table.name: table for table in remembered_tables(catalog)}
    return tuple(_united(table, before.get(table.name)) for table in tables)


def _united(now: TableSchema, before: TableSchema | None) -> TableSchema:
    if before is None or now.left_out is None:
        return now
    gone = tuple(column for column in before.columns if column.name not in {one.name for one in now.columns})
    left_out = tuple(name for name in now.left_out if name not in {column.name for column in gone})
    return replace(now, columns=(*now.columns, *gone), left_out=left_out)


def news(
    catalog: Catalog, found: Sequence[TableSchema], tables: Sequence[TableSchema], views: Sequence[View]
) -> Iterator[str]:
    """Which columns are new, and which are read by views although the server has them no longer."""
    before = {table.name: table for table in remembered_tables(catalog)}
    there = {table.name: {column.name for column in table.columns} for table in found}
    for table in tables:
        known = {column.name for column in before.get(table.name, table).columns}
        for column in table.columns:
            if column.name not in known:
                yield f'table "{table.name}" has a new column: {column.name} {column.type.ddl}'
    for view in views:
        for table_name, needed in view.reads.items():
            for name in sorted(needed - there.get(table_name, needed)):
                yield (
                    f'view "{view.name}" reads the column "{name}", which table "{table_name}" has no longer:'
                    " it is NULL in every row written from now on"
                )
