"""What recorded events tell of tables: types and keys from their schemas, and mistakes before anything runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate.capture import server_check
from tidegate.capture.debezium import RowEvents, row_decoder
from tidegate.capture.files import FilesImport, ImportResult
from tidegate.capture.log import LogReader, LogWriter
from tidegate.errors import BadRecord, FixConfiguration, UnknownColumn
from tidegate.model.key import encode_key
from tidegate.model.schema import Column, TableSchema, parse_type
from tidegate.pipeline import sources
from tidegate.pipeline.project import FilesSource, Project, load
from tidegate.pipeline.sources import FilesFeed, check_source, source

TOPIC = "shop.public.items"
Json = dict[str, Any]


def project_of(folder: Path, items: str = "{}", prefix: str = "shop") -> Project:
    (folder / "views").mkdir(parents=True, exist_ok=True)
    (folder / "events").mkdir(exist_ok=True)
    (folder / "views" / "v.sql").write_text("SELECT id FROM items")
    (folder / "tidegate.yaml").write_text(
        f'name: shop\nsource: {{kind: files, topic_prefix: {prefix}, path: "events/*.jsonl"}}\n'
        f"tables: {{items: {items}}}\n"
    )
    return load(folder)


def write(project: Project, *records: Json) -> None:
    text = "".join(json.dumps({"topic": TOPIC, **record}) + "\n" for record in records)
    (project.folder / "events" / "1.jsonl").write_text(text)


def event(after: Json, op: str = "c") -> Json:
    transaction = {"id": "7:10", "total_order": 1}
    return {"after": after, "op": op, "source": {"version": "3.6.3.Final"}, "transaction": transaction}


def field(name: str, type_: str = "int64", logical: str | None = None, **more: Any) -> Json:
    return {"field": name, "type": type_, **({"name": logical} if logical else {}), **more}


def wrapped(fields: list[Json], after: Json) -> Json:
    schema = {"type": "struct", "fields": [field("after", "struct", fields=fields), field("op", "string")]}
    return {"schema": schema, "payload": event(after)}


def key_of(*names: str, **values: Any) -> Json:
    return {"schema": {"type": "struct", "fields": [field(name) for name in names]}, "payload": values}


def found(project: Project) -> TableSchema:
    settings = project.file.source
    assert isinstance(settings, FilesSource)
    feed = FilesFeed(project, settings)
    feed.import_once()
    return feed.tables()[0]


def refusal(project: Project) -> FixConfiguration:
    with pytest.raises(FixConfiguration) as refused:
        check_source(project)
    return refused.value


# --- types and keys that the records tell

FIELDS = [
    field("id"),
    field("price", "bytes", "org.apache.kafka.connect.data.Decimal", parameters={"scale": "2"}),
    field("made", "int64", "io.debezium.time.MicroTimestamp"),
    field("seen", "array", items={"type": "int64", "name": "io.debezium.time.Timestamp"}),
    field("tags", "array", items={"type": "string"}),
]
AFTER = {"id": 1, "price": "AQI=", "made": 31536000000000, "seen": [31536000000], "tags": ["a"]}


def test_types_units_and_the_key_come_from_the_schema_and_every_row_is_its_own(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    records = [{"key": key_of("id", id=n), "value": wrapped(FIELDS, {**AFTER, "id": n})} for n in (1, 2)]
    write(project, *records)
    table = found(project)
    assert table.key == ("id",)
    assert {one.name: one.type.ddl for one in table.columns} == {
        "id": "bigint",
        "price": "decimal(38,2)",
        "made": "timestamp_ntz",
        "seen": "array<timestamp_ntz>",
        "tags": "array<string>",
    }
    events = RowEvents()
    for batch in LogReader(project.state / "log").read(TOPIC, 0, 0, 2):
        row_decoder(table).decode(events, batch.column(1).to_pylist(), TOPIC, 0, 0)
    assert events.keys == [encode_key([1]), encode_key([2])]
    assert events.cells[0] == (
        b'{"id":1,"price":2.58,"made":"1971-01-01T00:00:00","seen":["1971-01-01T00:00:00"],"tags":["a"]}'
    )
    (warning,) = check_source(project)[1]
    assert 'column "price" comes as base64' in warning


def test_a_decimal_by_its_schema_is_base64_also_where_it_looks_like_a_number(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    write(project, {"key": key_of("id"), "value": wrapped(FIELDS, {**AFTER, "price": "1000"})})
    check_source(project)
    assert found(project).decimals == "base64"
    assert found(project_of(tmp_path, "{decimals: text}")).decimals == "text"


def test_the_setting_of_a_unit_is_stronger_than_the_schema(tmp_path: Path) -> None:
    project = project_of(tmp_path, "{timestamps: nanos}")
    write(project, {"key": key_of("id"), "value": wrapped(FIELDS, AFTER)})
    assert {column.unit for column in found(project).columns} == {"nanos"}


def test_a_first_record_without_a_key_is_passed_over(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    value = wrapped(FIELDS, AFTER)
    write(
        project, {"key": None, "value": value}, {"key": {"id": 1}, "value": None}, {"key": key_of("id"), "value": value}
    )
    assert found(project).key == ("id",)


@pytest.mark.parametrize("key", [None, {"id": 1}])
def test_a_table_without_a_key_is_refused_until_it_is_declared(tmp_path: Path, key: Json | None) -> None:
    project = project_of(tmp_path)
    write(project, {"key": key, "value": wrapped(FIELDS, AFTER)})
    error = refusal(project)
    assert error.message == 'the key of table "items" is not known: no record has a key with a schema'
    assert error.remedy == "Set tables.items.key in tidegate.yaml to the table's primary key columns."
    assert found(project_of(tmp_path, "{key: [id]}")).key == ("id",)


def test_a_key_that_is_not_among_the_columns_is_refused(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    write(project, {"key": key_of("number"), "value": wrapped(FIELDS, AFTER)})
    assert refusal(project).message == (
        'table "items": the key column number is not among its columns id, price, made, seen, tags'
    )


UNREADABLE = [
    (field("odd", "array", items={"type": "struct", "fields": []}), "struct"),
    (field("odd", "map"), "map"),
    (field("odd", "struct", "io.debezium.data.VariableScaleDecimal"), "struct (io.debezium.data.VariableScaleDecimal)"),
    (
        field("odd", "bytes", "org.apache.kafka.connect.data.Decimal", parameters={"scale": "50"}),
        "org.apache.kafka.connect.data.Decimal of precision 38 and scale 50",
    ),
]


@pytest.mark.parametrize(("odd", "type_"), UNREADABLE)
def test_a_type_that_cannot_be_read_is_refused_with_its_table_and_column(tmp_path: Path, odd: Json, type_: str) -> None:
    project = project_of(tmp_path)
    write(project, {"key": key_of("id"), "value": wrapped([field("id"), odd], {"id": 1, "odd": None})})
    error = refusal(project)
    assert error.message == f'table "items": column "odd" has the type {type_}, which Tidegate cannot read'
    assert "tables.items.columns" in error.remedy
    project = project_of(tmp_path, "{key: [id], columns: {id: bigint}}")
    assert check_source(project)[1] == ()


# --- what `check` warns of

DECLARED = '{key: [id], columns: {id: bigint, made: timestamp, quantity: int, price: "decimal(10,2)"}}'


def test_a_column_that_no_record_has_is_said_with_the_nearest_that_they_have(tmp_path: Path) -> None:
    project = project_of(tmp_path, DECLARED)
    write(project, {"value": event({"id": 1, "made": None, "quantty": 2, "price": "1.5"})})
    assert check_source(project)[1] == (
        'table "items": no record has the column "quantity", so it is NULL; did you mean "quantty"?',
    )


def test_a_guessed_unit_is_said_with_the_column(tmp_path: Path) -> None:
    project = project_of(tmp_path, DECLARED)
    write(project, {"value": event({"id": 1, "made": 1795031445232, "quantity": 2, "price": "1.5"})})
    (warning,) = check_source(project)[1]
    assert warning.startswith('table "items": column "made" comes as integers, and whether they are ')
    assert "set tables.items.timestamps" in warning
    assert check_source(project_of(tmp_path, DECLARED.replace("{key", "{timestamps: millis, key", 1)))[1] == ()


def test_decimals_that_come_as_base64_are_said(tmp_path: Path) -> None:
    project = project_of(tmp_path, DECLARED)
    write(project, {"value": event({"id": 1, "made": None, "quantity": 2, "price": "AQI="})})
    (warning,) = check_source(project)[1]
    assert warning.startswith('table "items": column "price" comes as base64 of the unscaled number')


# --- topics


def started(project: Project, *, is_live: bool = True) -> FilesFeed:
    feed = source(project, is_live=is_live)
    assert isinstance(feed, FilesFeed)
    feed.start()
    return feed


def awaited(feed: FilesFeed, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        feed.check()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_prefix_that_no_topic_has_is_refused_by_check_and_by_run(tmp_path: Path) -> None:
    project = project_of(tmp_path, DECLARED, "shopp")
    write(project, {"value": event({"id": 1})})
    error = refusal(project)
    assert error.message == 'no record has a topic that begins with "shopp."; there are shop.public.items'
    assert (
        error.remedy
        == 'Did you mean "shop"? Set source.topic_prefix in tidegate.yaml to the connector\'s topic.prefix.'
    )
    feed = started(project)
    with pytest.raises(FixConfiguration) as refused:
        awaited(feed, lambda: feed.captured)
    feed.stop()
    assert refused.value.message == error.message


def test_a_recording_that_holds_only_a_heartbeat_so_far_is_no_mistake(tmp_path: Path) -> None:
    project = project_of(tmp_path, DECLARED)
    write(project, {"topic": "__debezium-heartbeat.shop", "value": {"ts_ms": 1}})
    assert check_source(project)[1] == (f'table "items": no record has the topic "{TOPIC}" yet',)


@pytest.mark.parametrize("topic", [TOPIC, "shop.transaction"])
def test_a_topic_that_is_compacted_is_refused_if_it_is_read(tmp_path: Path, topic: str) -> None:
    project = project_of(tmp_path, DECLARED)
    compacted = {"config": {"cleanup.policy": "compact"}}
    write(project, {"topic": "shop.public.others", **compacted}, {"topic": topic, **compacted})
    assert f"topic {topic} has cleanup.policy=compact" in refusal(project).message
    write(project, {"topic": "shop.public.others", **compacted})
    check_source(project)


def test_a_live_feed_awaits_the_rest_of_a_line_and_one_until_idle_refuses_it(tmp_path: Path) -> None:
    project = project_of(tmp_path, DECLARED)
    write(project, {"value": event({"id": 1})})
    file = project.folder / "events" / "1.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:30])
    reader = LogReader(project.state / "log")
    feed = started(project)
    awaited(feed, lambda: feed.log_is_filled)
    assert reader.ends() == {(TOPIC, 0): 1}
    file.write_text(whole + whole)
    awaited(feed, lambda: reader.ends() == {(TOPIC, 0): 2})
    feed.stop()
    file.write_text(whole + whole + whole[:30])
    feed = started(project, is_live=False)
    with pytest.raises(BadRecord, match="line 3: Input data was truncated"):
        awaited(feed, lambda: feed.captured)
    feed.stop()
    with pytest.raises(BadRecord, match="line 3: Input data was truncated"):
        check_source(project)


def test_while_a_look_is_under_way_the_log_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later file may have brought a transaction's BEGIN, and not its rows yet."""
    may_end, look = threading.Event(), FilesImport.look

    def held_up(self: FilesImport, writer: LogWriter) -> ImportResult:
        result = look(self, writer)
        assert may_end.wait(20)
        return result

    monkeypatch.setattr(sources, "LOOK_AGAIN_SECONDS", 0.01)
    project = project_of(tmp_path, DECLARED)
    write(project, {"value": event({"id": 1})})
    feed = started(project)
    awaited(feed, lambda: feed.log_is_filled)
    monkeypatch.setattr(FilesImport, "look", held_up)
    awaited(feed, lambda: not feed.log_is_filled)
    assert feed.captured
    may_end.set()
    awaited(feed, lambda: feed.log_is_filled)


# --- before the start, and beside another run


def names_ahead(project: Project) -> list[list[str]]:
    return [[column.name for column in table.columns] for (table,) in source(project, is_live=True).tables_ahead()]


def test_before_the_start_tables_are_what_is_declared_or_what_the_log_and_the_files_tell(tmp_path: Path) -> None:
    assert names_ahead(project_of(tmp_path, DECLARED)) == [["id", "made", "quantity", "price"]]
    project = project_of(tmp_path)
    write(project, {"key": key_of("id", id=1), "value": wrapped([field("id")], {"id": 1})})
    assert names_ahead(project) == []
    found(project)
    (tmp_path / "events" / "1.jsonl").rename(tmp_path / "events" / "0.jsonl")
    write(project, {"key": key_of("id", id=2), "value": wrapped([field("id"), field("note", "string")], {"id": 2})})
    assert names_ahead(project) == [["id"], ["id", "note"]]
    assert LogReader(project.state / "log").ends() == {(TOPIC, 0): 1}


def test_a_pattern_that_no_file_matches_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(FixConfiguration, match="no file matches"):
        source(project_of(tmp_path, DECLARED), is_live=True).look()


def test_a_feed_waits_for_the_log_and_says_so_until_the_other_run_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOCK_WAIT_SECONDS", 0.05)
    project = project_of(tmp_path)
    write(project, {"key": key_of("id", id=1), "value": wrapped([field("id")], {"id": 1})})
    with LogWriter(project.state / "log"):
        feed = started(project)
        awaited(feed, lambda: "another process writes to the log" in (feed.trouble or ""))
        assert not feed.tables_are_known
    awaited(feed, lambda: feed.tables_are_known)
    assert feed.trouble is None
    feed.stop()


# --- tables of a server


def test_tables_of_a_postgres_source_send_decimals_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("id", parse_type("int")), Column("price", parse_type("decimal(10,0)")))
    names = ("items", "others")
    discovered = [TableSchema(name, f"tidegate.public.{name}", ("id",), columns) for name in names]
    monkeypatch.setattr(server_check, "discover", lambda dsn, tables, topic_prefix: discovered)
    project_of(tmp_path)
    (tmp_path / "tidegate.yaml").write_text(
        "name: shop\nsource: {kind: postgres, dsn: here, tables: [items, others]}\n"
        'tables: {items: {key: [id], columns: {id: int, price: "decimal(10,0)"}}}\n'
    )
    tables = source(load(tmp_path), is_live=True).tables()
    assert [table.decimals for table in tables] == ["text", "text"]
    for table in tables:
        events = RowEvents()
        row_decoder(table).decode(events, [json.dumps(event({"id": 1, "price": "1000"})).encode()], "t", 0, 0)
        assert events.cells == [b'{"id":1,"price":1000}']


# --- columns that come later


def test_a_column_that_the_newest_record_has_is_known(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    old, new = (
        wrapped([field("id")], {"id": 1}),
        wrapped([field("id"), field("note", "string")], {"id": 2, "note": "x"}),
    )
    write(project, {"key": key_of("id", id=1), "value": old}, {"key": key_of("id", id=2), "value": new})
    assert [column.name for column in found(project).columns] == ["id", "note"]


def test_a_column_that_only_a_record_in_between_has_is_met_and_then_known(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    old, new = (
        wrapped([field("id")], {"id": 1}),
        wrapped([field("id"), field("note", "string")], {"id": 2, "note": "x"}),
    )
    records = [{"key": key_of("id", id=one), "value": value} for one, value in enumerate([old, new, *[old] * 3])]
    write(project, *records)
    settings = project.file.source
    assert isinstance(settings, FilesSource)
    feed = FilesFeed(project, settings)
    feed.import_once()
    table = feed.tables()[0]
    values = [json.dumps(record["value"]).encode() for record in records]
    with pytest.raises(UnknownColumn, match='table "items" has got a column "note"') as met:
        row_decoder(table).decode(RowEvents(), values, TOPIC, 0, 0)
    feed.met(met.value.table, met.value.column)
    events = RowEvents()
    row_decoder(feed.tables()[0]).decode(events, values, TOPIC, 0, 0)
    assert events.cells[:2] == [b'{"id":1,"note":null}', b'{"id":2,"note":"x"}']
    assert check_source(project)[0][0].columns == feed.tables()[0].columns
