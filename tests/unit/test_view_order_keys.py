"""Order keys: bytes order as Spark orders the values, and are the same for what SQL calls equal."""

from __future__ import annotations

import json
import math
import struct
from base64 import b64encode
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.model.key import encode_key
from tidegate.views.dataflow import Field, KeyColumn, Ordering
from tidegate.views.expressions import ValueType
from tidegate.views.order_keys import group_key, inverted, one_text_a_value, order_key, ordering_key, texts_of

BIGINT, STRING, DOUBLE, TIMESTAMP = (ValueType(kind) for kind in ("bigint", "string", "double", "timestamp"))
DECIMAL = ValueType("decimal", 38, 9)
Sample = tuple[str, Any]  # a JSON text, and a value that Python orders as Spark orders the text's


def _number(value: float) -> Sample:
    text = json.dumps(value) if math.isfinite(value) else json.dumps(str(value).replace("inf", "Infinity"))
    return text.replace('"nan"', '"NaN"'), (1, 0.0) if math.isnan(value) else (0, value + 0.0)


def _single(value: float) -> Sample:
    return _number(value)[0], _number(struct.unpack(">f", struct.pack(">f", value))[0])[1]


def _moment(value: datetime) -> Sample:
    return json.dumps(value.isoformat() + "Z"), value


def _array(samples: list[Sample | None]) -> Sample:
    texts = ["null" if sample is None else sample[0] for sample in samples]
    return f"[{','.join(texts)}]", [(0,) if sample is None else (1, sample[1]) for sample in samples]


def _struct(samples: tuple[Sample | None, ...]) -> Sample:
    texts = [f'"f{place}":{"null" if sample is None else sample[0]}' for place, sample in enumerate(samples)]
    return "{" + ",".join(texts) + "}", _array(list(samples))[1]


_DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=9, min_value=-(10**28), max_value=10**28)
SCALARS: dict[str, st.SearchStrategy[Sample]] = {
    "bigint": st.integers(-(1 << 63), (1 << 63) - 1).map(lambda value: (str(value), value)),
    "int": st.integers(-3, 3).map(lambda value: (str(value), value)),
    "boolean": st.booleans().map(lambda value: (json.dumps(value), value)),
    "decimal": st.one_of(_DECIMALS, st.sampled_from(["0.000000000", "-0.000000001", "1E-9"]).map(Decimal)).map(
        lambda value: (str(value), value)
    ),
    "double": st.one_of(st.floats(), st.sampled_from([0.0, -0.0, math.nan])).map(_number),
    "float": st.one_of(st.floats(width=32), st.sampled_from([0.1, -0.0])).map(_single),
    "string": st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.text("a\x00\xff\U0001f600")).map(
        lambda value: (json.dumps(value, ensure_ascii=len(value) % 2 == 0), value.encode())
    ),
    "binary": st.one_of(st.binary(), st.text("a\x00").map(str.encode)).map(
        lambda value: (json.dumps(b64encode(value).decode()), value)
    ),
    "date": st.dates().map(lambda value: (json.dumps(value.isoformat()), value)),
    "timestamp": st.one_of(st.datetimes(), st.datetimes().map(lambda one: one.replace(microsecond=0))).map(_moment),
    "timestamp_ntz": st.datetimes().map(lambda value: (json.dumps(value.isoformat()), value)),
}


def _type(kind: str) -> ValueType:
    return DECIMAL if kind == "decimal" else ValueType(kind)


def _nested(kind: str) -> tuple[ValueType, st.SearchStrategy[Sample]]:
    array = ValueType("array", element=ValueType("struct", fields=(("f0", _type(kind)), ("f1", STRING))))
    field = st.tuples(st.none() | SCALARS[kind], st.none() | SCALARS["string"]).map(_struct)
    return array, st.lists(st.none() | field, max_size=3).map(_array)


TYPES = {kind: (_type(kind), strategy) for kind, strategy in SCALARS.items()}
TYPES |= {f"array of structs of {kind}": _nested(kind) for kind in ("int", "double", "string", "decimal")}


@pytest.mark.parametrize("name", TYPES)
@given(st.data())
def test_keys_order_as_the_values_do(name: str, data: st.DataObject) -> None:
    type_, samples = TYPES[name]
    key = order_key(type_)
    (left_text, left), (right_text, right) = data.draw(samples), data.draw(samples)
    one, other = key(left_text.encode()), key(right_text.encode())
    assert (one < other, one == other) == (left < right, left == right)
    assert (inverted(one) < inverted(other)) == (left > right)
    assert one == other or not one.startswith(other)
    assert one[:1] == b"\x01"
    assert key(b"null") == b"\x00"


@pytest.mark.parametrize(
    ("type_", "one", "other"),
    [
        (DECIMAL, "1.5", "1.50"),
        (DECIMAL, "0", "-0.00"),
        (DECIMAL, "1E+3", "1000.0"),
        (DOUBLE, "0.0", "-0.0"),
        (DOUBLE, "1", "1e0"),
        (ValueType("float"), "0.1", "0.10000000149011612"),
        (TIMESTAMP, '"2024-05-06T07:08:09Z"', '"2024-05-06T07:08:09.000000Z"'),
        (TIMESTAMP, '"2024-05-06T07:08:09.5Z"', '"2024-05-06 07:08:09.500000"'),
        (STRING, '"\\u00e9/"', '"é\\/"'),
        (ValueType("struct", fields=(("a", DECIMAL), ("b", STRING))), '{"a":1.0,"b":null}', '{"a":1}'),
    ],
)
def test_what_sql_calls_equal_has_one_key(type_: ValueType, one: str, other: str) -> None:
    assert order_key(type_)(one.encode()) == order_key(type_)(other.encode())


@given(SCALARS["decimal"])
@example(("-0.000000001", Decimal("-1E-9")))
@example(("1E+3", Decimal(1000)))
def test_a_decimal_has_the_key_that_it_has_elsewhere(sample: Sample) -> None:
    plain = f"{sample[1]:f}"
    assert order_key(DECIMAL)(plain.encode()) == order_key(DECIMAL)(sample[0].encode()) == encode_key([sample[1]])


def test_years_beyond_four_digits_are_in_order() -> None:
    days = [
        "-20000-01-01",
        "-0004-12-31",
        "0000-01-01",
        date.min.isoformat(),
        "9999-12-31",
        "+10000-01-01",
        "200000-01-01",
    ]
    keys = [order_key(ValueType("date"))(json.dumps(day).encode()) for day in days]
    assert keys == sorted(set(keys))


def test_a_type_tells_whether_equal_values_have_one_text() -> None:
    assert one_text_a_value(ValueType("array", element=DECIMAL))
    assert not one_text_a_value(ValueType("array", element=ValueType("struct", fields=(("a", BIGINT), ("b", DOUBLE)))))


def test_columns_are_read_as_they_are_written() -> None:
    row = '{"a":1.50,"é":{"x": [1, 2]},"b":"q\\n"}'.encode()
    assert texts_of(("é", "b", "missing", "a"))(row) == (b'{"x": [1, 2]}', b'"q\\n"', b"null", b"1.50")
    assert texts_of(("b", "a"))(row) == (b'"q\\n"', b"1.50")
    assert texts_of(("a",))(row) == (b"1.50",)
    assert texts_of(())(row) == ()


def _rank(value: Any, ordering: Ordering) -> tuple[int, Any]:
    null = 1 if ordering.nulls_last != ordering.descending else -1
    return (null, 0) if value is None else (0, value)


def _by_python(rows: list[tuple[Any, ...]], orderings: tuple[Ordering, ...]) -> list[tuple[Any, ...]]:
    for place in reversed(range(len(orderings))):
        ranked = [(_rank(row[place], orderings[place]), row) for row in rows]
        rows = [row for _, row in sorted(ranked, key=lambda pair: pair[0], reverse=orderings[place].descending)]
    return rows


_FLAGS = st.tuples(st.booleans(), st.booleans())


@given(
    st.lists(st.tuples(st.none() | st.integers(-2, 2), st.none() | st.sampled_from(["", "a", "ab", "b"])), unique=True),
    _FLAGS,
    _FLAGS,
)
@example([(None, "a"), (1, None), (1, "a"), (2, "ab")], (True, False), (False, True))
def test_several_columns_order_as_order_by_says(
    rows: list[tuple[Any, ...]], first: tuple[bool, bool], second: tuple[bool, bool]
) -> None:
    orderings = (Ordering(Field("n", BIGINT), *first), Ordering(Field("s", STRING), *second))
    key = ordering_key(orderings, ("s", "n"))

    def row_key(row: tuple[Any, ...]) -> bytes:
        return key((json.dumps(row[1]).encode(), json.dumps(row[0]).encode()))

    assert sorted(rows, key=row_key) == _by_python(rows, orderings)


def test_a_stage_key_is_what_a_key_of_the_same_values_is_elsewhere() -> None:
    key = group_key((KeyColumn(Field("n", BIGINT)), KeyColumn(Field("s", STRING)), KeyColumn(Field("d", DECIMAL))))
    assert key(b'{"d":1.50,"s":"a\\u0000","n":-7,"x":1}') == encode_key([-7, "a\x00", Decimal("1.5")])
    assert group_key(())(b'{"a":1}') == b""


@pytest.mark.parametrize("columns", [("n",), ("s", "n")])
def test_a_null_is_a_key_or_has_no_partner(columns: tuple[str, ...]) -> None:
    types = {"n": BIGINT, "s": STRING}
    matching = group_key([KeyColumn(Field(name, types[name])) for name in columns])
    refusing = group_key([KeyColumn(Field(name, types[name]), null_matches=False) for name in columns])
    assert matching(b'{"n":null,"s":"a"}') == encode_key([{"n": None, "s": "a"}[name] for name in columns])
    assert refusing(b'{"n":null,"s":"a"}') is None
    assert refusing(b'{"n":3,"s":"a"}') == encode_key([{"n": 3, "s": "a"}[name] for name in columns])
