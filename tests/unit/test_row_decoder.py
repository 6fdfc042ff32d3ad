"""Each value of Debezium's JSON becomes exactly the declared type's value, or is refused; so with events."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from tests import recordings

from tidegate.capture.debezium import (
    Notification,
    Op,
    Place,
    RowDecoder,
    RowEvents,
    completed,
    notification,
    transaction_event,
    unavailable_columns,
)
from tidegate.capture.values import UNAVAILABLE
from tidegate.errors import BadRecord
from tidegate.model.key import encode_key
from tidegate.model.schema import Column, DecimalForm, TableSchema, TimestampUnit, parse_type

SOURCE = {"version": "3.6.3.Final", "lsn": 10, "txId": 7}


def table_of(type_: str, decimals: DecimalForm = "auto", unit: TimestampUnit = "auto") -> TableSchema:
    columns = (Column("id", parse_type("bigint")), Column("v", parse_type(type_), unit))
    return TableSchema("t", "s.public.t", ("id",), columns, decimals)


def event(op: str = "c", order: int = 1, **fields: Any) -> dict[str, Any]:
    transaction = {"id": "7:10", "total_order": order}
    return {"before": None, "after": None, "source": SOURCE, "op": op, "transaction": transaction, **fields}


def decoded(table: TableSchema, *records: Any) -> RowEvents:
    events = RowEvents()
    values = [json.dumps(one).encode() if isinstance(one, dict) else one for one in records]
    RowDecoder(table).decode(events, values, table.topic, 0, 0)
    return events


def cell(table: TableSchema, token: str) -> bytes:
    """The cell of a row whose column `v` stands in the record as this text of JSON."""
    record = json.dumps(event(after={"id": 1, "v": "HERE"})).replace('"HERE"', token)
    found = decoded(table, record.encode()).cells[0]
    assert found is not None
    return found


def value(token: str, type_: str, decimals: DecimalForm = "auto", unit: TimestampUnit = "auto") -> str:
    text = cell(table_of(type_, decimals, unit), token).decode()
    assert text.startswith('{"id":1,"v":')
    return text.removeprefix('{"id":1,"v":').removesuffix("}")


def refusal(
    token: str, type_: str, decimals: DecimalForm = "auto", unit: TimestampUnit = "auto", key: bool = False
) -> BadRecord:
    table = table_of(type_, decimals, unit)
    if key:
        table = replace(table, key=("v",))
    with pytest.raises(BadRecord) as refused:
        cell(table, token)
    return refused.value


def unscaled(number: int) -> str:
    length = (number.bit_length() + 8) // 8
    return json.dumps(base64.b64encode(number.to_bytes(length, "big", signed=True)).decode())


# --- decimals


@pytest.mark.parametrize(
    ("token", "type_", "expected"),
    [
        ('"12.5"', "decimal(10,2)", "12.50"),
        ("12.5", "decimal(10,2)", "12.50"),
        ("12", "decimal(10,2)", "12.00"),
        ("0012", "decimal(10,2)", None),
        ('"0012.50"', "decimal(10,2)", "12.50"),
        ('"-.5"', "decimal(10,2)", "-0.50"),
        ('"-0.00"', "decimal(10,2)", "0.00"),
        ('"+7"', "decimal(10,2)", "7.00"),
        ('"5."', "decimal(10,2)", "5.00"),
        ('"1.2300"', "decimal(10,2)", "1.23"),
        ('"1.5E+3"', "decimal(10,2)", "1500.00"),
        ('"1e-2"', "decimal(10,2)", "0.01"),
        ('"-12.5e-1"', "decimal(10,2)", "-1.25"),
        ("1.5e3", "decimal(10,0)", "1500"),
        ('"0E-18"', "decimal(10,2)", "0.00"),
        ('"0E+20"', "decimal(10,2)", "0.00"),
        ("null", "decimal(10,2)", "null"),
        ('"99999999999999999999999999999999999999"', "decimal(38,0)", "9" * 38),
        ('"0.99999999999999999999999999999999999999"', "decimal(38,38)", "0." + "9" * 38),
    ],
)
def test_a_number_keeps_every_digit_and_has_its_scale(token: str, type_: str, expected: str | None) -> None:
    if expected is None:
        assert "malformed" in refusal(token, type_).message
    else:
        assert value(token, type_) == expected


@pytest.mark.parametrize(
    ("number", "type_", "expected"),
    [
        (1050, "decimal(10,2)", "10.50"),
        (-1, "decimal(10,2)", "-0.01"),
        (0, "decimal(10,2)", "0.00"),
        (10**29 + 123, "decimal(38,4)", "10000000000000000000000000.0123"),
        (-(10**38) + 1, "decimal(38,10)", "-" + "9" * 28 + "." + "9" * 10),
        (10**37 + 7, "decimal(38,0)", f"{10**37 + 7}"),
    ],
)
@pytest.mark.parametrize("form", ["auto", "base64"])
def test_base64_of_the_unscaled_number_is_read_to_the_last_digit(
    number: int, type_: str, expected: str, form: DecimalForm
) -> None:
    assert value(unscaled(number), type_, form) == expected


@pytest.mark.parametrize(
    "text", ["", "NaN", "NAN", "Infinity", "-Infinity", "abc", "12,5", "1.2.3", ".", "-", "1e", "١٢", "12\\n", " 12"]
)
@pytest.mark.parametrize("form", ["auto", "text"])
def test_text_that_is_no_number_is_refused_by_name(text: str, form: DecimalForm) -> None:
    error = refusal(f'"{text}"', "decimal(10,2)", form)
    assert 'column "v": "' + text.replace("\\n", "\n") + '"' in error.message


@pytest.mark.parametrize("token", ["true", "{}", "[1]"])
def test_json_that_is_no_number_is_refused(token: str) -> None:
    assert "is not a number" in refusal(token, "decimal(10,2)").message


@pytest.mark.parametrize(
    ("token", "form", "why"),
    [
        ('"1.005"', "auto", "1.005 has more than 2 digits behind the point"),
        ("1e-3", "auto", "1e-3 has more than 2 digits behind the point"),
        ('"123456789"', "auto", "123456789 has more than 8 digits before the point"),
        ('"1E+400"', "text", "1E+400 has more than 8 digits before the point"),
        ('"1E+999999999"', "text", "1E+999999999 is out of range"),
        ('"12.50"', "base64", '"12.50" is not base64'),
        ('"AAA"', "base64", '"AAA" is not base64'),
        ('"AQ="', "auto", '"AQ=" is not a number'),
        (unscaled(10**60), "base64", "more than 38 digits"),
        (unscaled(10**10), "base64", "has more than 8 digits before the point"),
    ],
)
def test_a_number_that_does_not_fit_is_refused_not_rounded(token: str, form: DecimalForm, why: str) -> None:
    assert why in refusal(token, "decimal(10,2)", form).message


@pytest.mark.parametrize("text", ["1000", "12345678", "1E+4", "+123"])
@pytest.mark.parametrize("type_", ["decimal(20,0)", "decimal(20,2)"])
def test_what_may_be_a_number_or_base64_is_refused_with_the_setting_that_tells(text: str, type_: str) -> None:
    error = refusal(f'"{text}"', type_)
    assert f'"{text}" may be a number or the base64 of one' in error.message
    assert error.remedy.startswith("Set `decimals: text` or `decimals: base64` for this table in tidegate.yaml")


def test_with_the_setting_nothing_is_guessed() -> None:
    assert value('"1000"', "decimal(20,2)", "text") == "1000.00"
    assert value('"1E+4"', "decimal(20,0)", "text") == "10000"
    assert value('"1000"', "decimal(20,0)", "base64") == str(
        int.from_bytes(base64.b64decode("1000"), "big", signed=True)
    )
    assert value("1000", "decimal(20,0)", "base64") == "1000"
    assert value('"AP8="', "decimal(20,0)", "base64") == "255"


@pytest.mark.parametrize("token", ["null", f'"{UNAVAILABLE}"'])
def test_a_decimal_key_without_a_number_is_refused(token: str) -> None:
    assert "the primary key holds" in refusal(token, "decimal(10,2)", key=True).message


# --- moments and days


@pytest.mark.parametrize(
    ("token", "unit", "expected"),
    [
        ("1795031445232", "auto", "2026-11-18T19:50:45.232000"),
        ("1795031445232043", "auto", "2026-11-18T19:50:45.232043"),
        ("1795031445232043999", "auto", "2026-11-18T19:50:45.232043"),
        ("31536000000000", "micros", "1971-01-01T00:00:00"),
        ("31536000000", "millis", "1971-01-01T00:00:00"),
        ("31536000000000000", "nanos", "1971-01-01T00:00:00"),
        ("-1", "micros", "1969-12-31T23:59:59.999999"),
        ("-1", "nanos", "1969-12-31T23:59:59.999999"),
        ('"2026-11-18T10:11:12.123456Z"', "auto", "2026-11-18T10:11:12.123456"),
        ('"2026-11-18T10:11:12.123Z"', "micros", "2026-11-18T10:11:12.123000"),
        ('"2026-11-18T10:11:12+02:00"', "auto", "2026-11-18T08:11:12"),
        ('"2026-11-18T10:11:12"', "auto", "2026-11-18T10:11:12"),
    ],
)
def test_a_timestamp_is_iso_text_or_so_many_of_its_unit(token: str, unit: TimestampUnit, expected: str) -> None:
    assert value(token, "timestamp_ntz", unit=unit) == f'"{expected}"'
    assert value(token, "timestamp", unit=unit) == f'"{expected}Z"'
    assert value(f"[{token},null]", "array<timestamp>", unit=unit) == f'["{expected}Z",null]'


@pytest.mark.parametrize("token", ['"+294247-01-10T04:00:25.2Z"', '"yesterday"', '""', "9999999999999999999"])
@pytest.mark.parametrize("type_", ["timestamp", "timestamp_ntz"])
def test_what_is_no_timestamp_of_the_years_1_to_9999_is_refused(token: str, type_: str) -> None:
    assert "is not a timestamp between the years 1 and 9999" in refusal(token, type_, unit="millis").message


def test_a_date_is_days_or_iso_text() -> None:
    assert value("0", "date") == '"1970-01-01"'
    assert value("-719162", "date") == '"0001-01-01"'
    assert value('"2026-11-18Z"', "date") == value('"2026-11-18"', "date") == '"2026-11-18"'
    for token in ('"-5877611-06-21Z"', "99999999", '"20261118"', '"2026-02-30"'):
        assert "is not a date between the years 1 and 9999" in refusal(token, "date").message


# --- the other types


def test_integers_that_do_not_fit_their_width_are_refused() -> None:
    for type_, bits in (("tinyint", 8), ("smallint", 16), ("int", 32), ("bigint", 64)):
        greatest = 2 ** (bits - 1) - 1
        assert value(f"{greatest}", type_) == f"{greatest}"
        assert value(f"{-greatest - 1}", type_) == f"{-greatest - 1}"
        for beyond in (greatest + 1, -greatest - 2):
            assert f"declared as {type_}" in refusal(f"{beyond}", type_).message
    assert "declared as int" in refusal('"7"', "int").message
    assert "declared as int" in refusal("7.5", "int").message


def test_floats_know_infinity_and_what_is_no_number() -> None:
    assert value("1.5", "double") == "1.5"
    assert value("2", "float") == "2.0"
    for text in ("NaN", "Infinity", "-Infinity"):
        assert value(f'"{text}"', "double") == f'"{text}"'
    assert "'much' is not a number" in refusal('"much"', "double").message


def test_binary_is_strict_base64() -> None:
    assert value('"3q2+7w=="', "binary") == '"3q2+7w=="'
    assert value('""', "binary") == '""'
    assert '"3q2-7w==" is not base64' in refusal('"3q2-7w=="', "binary").message


def test_arrays_keep_their_nulls() -> None:
    assert value("[1,null,3]", "array<int>") == "[1,null,3]"
    assert value("[]", "array<int>") == "[]"
    assert value("null", "array<int>") == "null"
    assert value('["a",null]', "array<string>") == '["a",null]'
    assert value('["1.5",null,2]', "array<decimal(10,2)>") == "[1.50,null,2.00]"
    assert value('[0,null,"2026-11-18"]', "array<date>") == '["1970-01-01",null,"2026-11-18"]'
    assert "has more than 2 digits behind the point" in refusal('["1.555"]', "array<decimal(10,2)>").message
    assert "declared as array<int>" in refusal('["x"]', "array<int>").message


# --- values that were not sent


@pytest.mark.parametrize(
    ("token", "type_", "previous"),
    [
        (f'"{UNAVAILABLE}"', "string", '"large"'),
        (f'"{UNAVAILABLE}"', "decimal(10,2)", "1.50"),
        (json.dumps(base64.b64encode(UNAVAILABLE.encode()).decode()), "binary", '"AAAA"'),
        (f'["{UNAVAILABLE}"]', "array<string>", '["a",null]'),
        (f'["{UNAVAILABLE}"]', "array<binary>", '["AAAA"]'),
        (f'["{UNAVAILABLE}"]', "array<decimal(10,2)>", "[1.50]"),
        (json.dumps(list(UNAVAILABLE.encode())), "array<int>", "[1,2]"),
        (json.dumps(list(UNAVAILABLE.encode())), "array<bigint>", "[1,2]"),
        (json.dumps(list(UNAVAILABLE.encode())), "array<date>", '["1970-01-01"]'),
        (json.dumps(list(UNAVAILABLE.encode())), "array<decimal(20,0)>", "[1]"),
    ],
)
def test_an_unchanged_large_value_is_taken_from_the_row_before(token: str, type_: str, previous: str) -> None:
    table = table_of(type_)
    record = json.dumps(event("u", after={"id": 1, "v": "HERE"})).replace('"HERE"', token)
    events = decoded(table, record.encode())
    assert events.ops == [Op.PARTIAL]
    now = events.cells[0]
    assert now is not None
    assert unavailable_columns(now) == ("v",)
    assert completed(now, f'{{"id":1,"v":{previous}}}'.encode()) == f'{{"id":1,"v":{previous}}}'.encode()


def test_a_new_row_without_its_large_value_is_one_that_has_come_under_another_key() -> None:
    """An INSERT sends every value: only an UPDATE of the primary key sends such a row, behind a delete."""
    events = decoded(table_of("string"), event("c", after={"id": 1, "v": UNAVAILABLE}))
    assert (events.ops, events.has_moved) == ([Op.MOVED], True)
    assert not decoded(table_of("string"), event("u", after={"id": 1, "v": UNAVAILABLE})).has_moved


def test_a_text_that_only_speaks_of_the_placeholder_is_a_value() -> None:
    events = decoded(table_of("string"), event(after={"id": 1, "v": f"see {UNAVAILABLE}"}))
    assert events.ops == [Op.UPSERT]


# --- events


def test_records_with_and_without_a_schema_around_them_are_the_same() -> None:
    plain = event(after={"id": 1, "v": "a"})
    wrapped = {"schema": {"type": "struct", "fields": []}, "payload": plain}
    events = decoded(table_of("string"), plain, wrapped, {"schema": None, "payload": plain}, {"payload": plain})
    assert events.cells == [b'{"id":1,"v":"a"}'] * 4
    assert events.keys == [encode_key([1])] * 4


def test_end_and_notifications_are_read_with_a_schema_around_them() -> None:
    collected = [{"data_collection": "public.t", "event_count": 2}]
    payload = {"status": "END", "id": "7:10", "event_count": 2, "data_collections": collected}
    plain, wrapped = (json.dumps(one).encode() for one in (payload, {"schema": {"type": "struct"}, "payload": payload}))
    place = Place("s.transaction", 0, 0)
    assert transaction_event(wrapped, place) == transaction_event(plain, place)
    said = {"type": "COMPLETED", "aggregate_type": "Initial Snapshot"}
    told = notification(json.dumps({"schema": {"type": "struct"}, "payload": said}).encode())
    assert told == Notification("COMPLETED", "Initial Snapshot")


def refused_event(record: dict[str, Any]) -> str:
    with pytest.raises(BadRecord) as refused:
        decoded(table_of("string"), record)
    assert refused.value.message.startswith("topic s.public.t, partition 0, offset 0: ")
    return refused.value.message


def test_an_incremental_snapshot_is_refused() -> None:
    record = event("r", after={"id": 1}, transaction=None, source={**SOURCE, "snapshot": "incremental"})
    assert "incremental snapshots are not supported" in refused_event(record)


def test_an_unknown_operation_is_refused() -> None:
    assert 'the operation "m" is unknown' in refused_event(event("m", after={"id": 1}))


def test_a_row_without_a_transaction_is_refused() -> None:
    assert "set provide.transaction.metadata=true" in refused_event(event(after={"id": 1}, transaction=None))


@pytest.mark.parametrize("before", [None, {}, {"v": "a"}])
def test_a_delete_that_does_not_tell_its_key_is_refused(before: dict[str, Any] | None) -> None:
    assert '"before" lacks the primary key' in refused_event(event("d", before=before))


def test_an_upsert_without_its_row_is_refused() -> None:
    assert 'it has no "after"' in refused_event(event("u"))


def test_deletes_truncates_and_tombstones_are_told_apart() -> None:
    events = decoded(table_of("string"), event("d", before={"id": 3}), None, event("t", 2))
    assert events.ops == [Op.DELETE, Op.TRUNCATE]
    assert events.keys == [encode_key([3]), b""]


def restarted(version: str) -> list[dict[str, Any]]:
    sequences = ('["10","20"]', '["15","20"]')
    return [
        event(order=order, after={"id": order}, source={**SOURCE, "version": version, "sequence": sequence})
        for order, sequence in enumerate(sequences, 1)
    ]


def test_a_version_that_counts_anew_after_a_restart_is_refused_when_it_does() -> None:
    with pytest.raises(BadRecord, match=r"offset 1: .*Debezium 3\.6\.0\.Final\) was restarted inside transaction 7:10"):
        decoded(table_of("string"), *restarted("3.6.0.Final"))
    assert decoded(table_of("string"), *restarted("3.6.1.Final")).orders == [1, 2]


# --- the recorded table of every type

TYPES = {
    "id": "bigint",
    "n": "decimal(38,9)",
    "n2": "decimal(10,6)",
    "d": "date",
    "t": "string",
    "ts": "timestamp_ntz",
    "tstz": "timestamp",
    "ts3": "timestamp_ntz",
    "b": "binary",
    "j": "string",
    "u": "string",
    "arr": "array<int>",
    "f8": "double",
    "f4": "float",
    "bo": "boolean",
    "m": "decimal(10,2)",
    "iv": "string",
    "ch": "string",
    "sm": "smallint",
}


def types_demo(**changed: str) -> TableSchema:
    columns = tuple(Column(name, parse_type(text)) for name, text in {**TYPES, **changed}.items())
    return TableSchema("types_demo", "shop.public.types_demo", ("id",), columns)


def recorded_types() -> list[bytes]:
    records = recordings.load("events_recommended_raw")
    return [record["value"].encode() for record in records if record["topic"] == "shop.public.types_demo"]


def test_the_recorded_row_of_every_type_is_read() -> None:
    first = recorded_types()[0]
    assert decoded(types_demo(), first).cells == [
        b'{"id":1,"n":12345678901234567890.123456789,"n2":1.500000,"d":"2026-11-18","t":"10:11:12.123456Z",'
        b'"ts":"2026-11-18T10:11:12.123456","tstz":"2026-11-18T08:11:12.123456Z","ts3":"2026-11-18T10:11:12.123000",'
        b'"b":"3q2+7w==","j":"{\\"a\\": 1}","u":"00000000-0000-0000-0000-000000000001","arr":[1,2,null],"f8":1.5,'
        b'"f4":2.5,"bo":true,"m":12.34,"iv":"P0Y0M1DT2H3M0S","ch":"ab   ","sm":7}'
    ]


def test_the_recorded_rows_of_extreme_values_are_refused_by_name_or_read_as_text() -> None:
    _, infinite, not_a_number = recorded_types()
    with pytest.raises(BadRecord, match=r'column "d": \'-5877611-06-21Z\' is not a date'):
        decoded(types_demo(), infinite)
    with pytest.raises(BadRecord, match=r'column "ts": \'\+294247-01-10T04:00:25.2Z\' is not a timestamp'):
        decoded(types_demo(d="string"), infinite)
    with pytest.raises(BadRecord, match='column "n": "NAN" cannot be stored in a decimal'):
        decoded(types_demo(), not_a_number)
    cells = decoded(types_demo(n="string", d="string", ts="string"), *recorded_types()).cells
    assert [json.loads(cell or b"")["n"] for cell in cells] == ["12345678901234567890.123456789", "-0.000001", "NAN"]
    assert [json.loads(cell or b"")["f8"] for cell in cells] == [1.5, 1.5, "Infinity"]
