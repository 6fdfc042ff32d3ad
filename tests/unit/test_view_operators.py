"""Operators: what they emit, step by step, is the difference of what plain Python computes from all rows."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.views.arrangement import Arrangement, Entry, Transaction
from tidegate.views.dataflow import (
    Aggregate,
    AggregateFunction,
    Delta,
    Field,
    Group,
    Join,
    JoinKind,
    KeyColumn,
    Operator,
    Ordering,
    Relay,
    Sink,
    Top,
)
from tidegate.views.expressions import TypeOverflowError, ValueType
from tidegate.views.operators import GroupFold, NotOnlyOne, TwoRowsOfOneKey, compiled
from tidegate.views.order_keys import group_key

Rows = Counter[bytes]
Tick = dict[int, tuple[list[tuple[bytes, int]], ...]]  # by step: for each input its changes
Expected = Callable[[Operator, list[Rows]], Rows]

BIGINT, STRING, BOOLEAN, DOUBLE = (ValueType(kind) for kind in ("bigint", "string", "boolean", "double"))
TIMESTAMP, DECIMAL, WIDE = ValueType("timestamp"), ValueType("decimal", 20, 2), ValueType("decimal", 38, 2)
K, N, D, F = Field("k", STRING), Field("n", BIGINT), Field("d", DECIMAL), Field("f", DOUBLE)
T, S, B = Field("t", TIMESTAMP), Field("s", STRING), Field("b", BOOLEAN)
LN, RK, RN = Field("ln", BIGINT), Field("rk", STRING), Field("rn", BIGINT)
TEXTS = {
    "k": ['"a"', '"a\\u0000"', f'"{"a" * 700}"', f'"{"a" * 700}b"', "null"],
    "n": ["null", "-1", "2", "9223372036854775807"],
    "d": ["null", "1.50", "-0.25", "99999999999999999.99"],
    "f": ["null", "0.0", "-0.0", '"NaN"', "1.5"],
    "t": ["null", '"2024-05-06T07:08:09Z"', '"2024-05-06T07:08:09.000000Z"', '"2023-05-06T07:08:09.5Z"'],
    "s": ["null", '""', '"é"', f'"{"x" * 600}a"', f'"{"x" * 600}b"', f'"{"x" * 600}"'],
    "b": ["null", "true", "false"],
    "rk": ['"a"', '"a\\u0000"', f'"{"a" * 700}"', f'"{"a" * 700}b"', "null"],
    "rn": ["null", "1", "2"],
    "ln": ["1", "2"],  # else a left and a right row of NULLs, each without a partner, look the same
}
MODEST = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


# --- what is folded


def _text(members: dict[str, str]) -> bytes:
    return ("{" + ",".join(f'"{name}":{text}' for name, text in members.items()) + "}").encode()


def _pools(*inputs: Sequence[Field]) -> st.SearchStrategy[list[list[bytes]]]:
    """For each input a few rows."""

    def row(fields: Sequence[Field], keys: int) -> st.SearchStrategy[bytes]:
        texts = {field.name: TEXTS[field.name][: keys if field.name in ("k", "rk") else None] for field in fields}
        return st.fixed_dictionaries({name: st.sampled_from(some) for name, some in texts.items()}).map(_text)

    def pools(keys: int) -> st.SearchStrategy[list[list[bytes]]]:
        return st.tuples(*(st.lists(row(fields, keys), min_size=1, max_size=7, unique=True) for fields in inputs)).map(
            list
        )

    return st.sampled_from([1, 2, 5]).flatmap(pools)


_CHANGE = st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(-2, 3), st.booleans())
_TICKS = st.lists(st.lists(st.lists(_CHANGE, max_size=6), min_size=1, max_size=3), min_size=1, max_size=4)


def _played(pools: list[list[bytes]], ticks: list[list[list[tuple[int, int, int, bool]]]]) -> Iterator[Tick]:
    """Changes that leave no row fewer than no times at the end of a step; within it they come in any order."""
    current = [Rows() for _ in pools]
    step = 0
    for drawn in ticks:
        tick: Tick = {}
        for changes in drawn:
            step += 3
            tick[step] = tuple([] for _ in pools)
            for which, place, wanted, first in changes:
                rows, pool = current[which % len(pools)], pools[which % len(pools)]
                row = pool[place % len(pool)]
                diff = max(wanted, -rows[row])
                rows[row] += diff
                made = tick[step][which % len(pools)]
                made[0 if first else len(made) : 0] = [(row, diff)] if diff else [(row, 2), (row, -2)]
        yield tick


@contextmanager
def _arrangement(folder: Path) -> Iterator[Arrangement]:
    arrangement = Arrangement(folder, "layout", first_map_bytes=1 << 20)
    try:
        yield arrangement
    finally:
        arrangement.close()


def _check(
    operator: Operator, keys: Sequence[Callable[[bytes], bytes]], ticks: Iterator[Tick], expect: Expected
) -> None:
    """Folds tick by tick, each time with the arrangement opened anew, and compares after each step."""
    current = [Rows() for _ in keys]
    shown = Rows()
    with tempfile.TemporaryDirectory() as folder:
        for number, tick in enumerate(ticks):
            inputs = [
                [Delta(key(row), step, diff, row) for step in reversed(tick) for row, diff in tick[step][place]]
                for place, key in enumerate(keys)
            ]
            with _arrangement(Path(folder)) as arrangement, arrangement.write(number) as transaction:
                outputs = compiled(operator).fold(transaction, inputs)
                kept = {entry[0]: entry[1] for entry in transaction.scan(b"")}
            assert {delta.step for delta in outputs} <= set(tick)
            for step, changes in tick.items():
                for rows, made in zip(current, changes, strict=True):
                    for row, diff in made:
                        rows[row] += diff
                before, shown = shown, expect(operator, [+rows for rows in current])
                difference = Rows(shown)
                difference.subtract(before)
                made = [(delta.row, delta.diff) for delta in outputs if delta.step == step]
                assert sorted(made) == sorted((row, diff) for row, diff in difference.items() if diff)
            if not any(+rows for rows in current):
                assert set(kept) <= {b"h"}


def _key(*fields: Field, null_matches: bool = True, unmatched: bytes = b"\xff") -> Callable[[bytes], bytes]:
    key = group_key([KeyColumn(field, null_matches) for field in fields])
    return lambda row: unmatched + row if (found := key(row)) is None else found


def _raw(row: bytes) -> dict[str, str]:
    """The JSON text of each column, for rows whose columns are scalars."""
    values = json.loads(row, parse_float=_Number, parse_int=_Number)
    return {
        name: str(one) if isinstance(one, _Number) else json.dumps(one, ensure_ascii=False)
        for name, one in values.items()
    }


class _Number(str):
    """A number's text."""


def _value(field: Field, text: str) -> Any:
    """What Python orders as Spark orders the field's values."""
    value = json.loads(text, parse_float=Decimal)
    match field.type.kind:
        case "string":
            return value.encode()
        case "timestamp":
            return value.removesuffix("Z").removesuffix(".000000")
        case "double":
            return (1, 0.0) if isnan(float(value)) else (0, float(value) + 0.0)
    return value


# --- joins

LEFT, RIGHT = (K, LN), (RK, RN)
JOINS: list[JoinKind] = ["inner", "left", "full", "semi", "anti", "exists"]


def _joined(operator: Operator, inputs: list[Rows], null_matches: bool) -> Rows:
    """A NULL in the key has no partner, or every other NULL."""
    assert isinstance(operator, Join)
    lefts, rights = ([(row, _raw(row), n) for row, n in rows.items()] for rows in inputs)
    never = "" if null_matches else "null"
    partners = {row: [(r, n) for r, right, n in rights if right["rk"] == left["k"] != never] for row, left, _ in lefts}
    output = Rows()
    for row, _, n in lefts:
        found = partners[row]
        match operator.kind:
            case "semi" | "anti":
                output[row] += n * (bool(found) == (operator.kind == "semi"))
            case "exists":
                output[row[:-1] + b',"there":' + (b"true}" if found else b"false}")] += n
            case _:
                missing = [] if operator.kind == "inner" else [(b'{"rk":null,"rn":null}', 1)]
                for other, m in found or missing:
                    output[row[:-1] + b"," + other[1:]] += n * m
    if operator.kind == "full":
        met = {other for found in partners.values() for other, _ in found}
        for other, _, m in rights:
            if other not in met:
                output[b'{"k":null,"ln":null,' + other[1:]] += m
    return +output


@pytest.mark.parametrize("kind", JOINS)
@MODEST
@given(_pools(LEFT, RIGHT), _TICKS, st.booleans())
def test_a_join_emits_by_how_much_it_differs(
    kind: JoinKind, pools: list[list[bytes]], ticks: Any, null_matches: bool
) -> None:
    keys = [_key(K, null_matches=null_matches), _key(RK, null_matches=null_matches, unmatched=b"\xfe")]
    operator = Join(kind, LEFT, RIGHT, "there")
    _check(operator, keys, _played(pools, ticks), lambda _, inputs: _joined(operator, inputs, null_matches))


def _partnerless(row: bytes) -> bytes:
    return b"\x01"


@pytest.mark.parametrize("kind", JOINS)
def test_rows_without_columns_can_be_joined(kind: JoinKind) -> None:
    tick: Tick = {1: ([(b"{}", 2)], [(b"{}", 3)]), 2: ([(b"{}", 1)], [(b"{}", -3)])}
    expected: dict[JoinKind, list[tuple[int, int, bytes]]] = {
        "inner": [(1, 6, b"{}"), (2, -6, b"{}")],
        "left": [(1, 6, b"{}"), (2, -3, b"{}")],
        "full": [(1, 6, b"{}"), (2, -3, b"{}")],
        "semi": [(1, 2, b"{}"), (2, -2, b"{}")],
        "anti": [(2, 3, b"{}")],
        "exists": [(1, 2, b'{"there":true}'), (2, 3, b'{"there":false}'), (2, -2, b'{"there":true}')],
    }
    outputs = _once(Join(kind, (), (), "there"), tick, _partnerless, _partnerless)
    assert sorted((delta.step, delta.diff, delta.row) for delta in outputs) == sorted(expected[kind])


def _once(operator: Operator, tick: Tick, *keys: Callable[[bytes], bytes]) -> list[Delta]:
    with (
        tempfile.TemporaryDirectory() as folder,
        _arrangement(Path(folder)) as arrangement,
        arrangement.write(0) as transaction,
    ):
        return compiled(operator).fold(transaction, _inputs(tick, *keys))


def _inputs(tick: Tick, *keys: Callable[[bytes], bytes]) -> list[list[Delta]]:
    return [
        [Delta(key(row), step, diff, row) for step, made in tick.items() for row, diff in made[place]]
        for place, key in enumerate(keys)
    ]


# --- groups


def _aggregate(function: AggregateFunction, *columns: Field, **more: Any) -> Aggregate:
    type_ = {"count": BIGINT, "sum": WIDE}.get(function, columns[0].type if columns else BIGINT)
    if function in ("collect", "set"):
        type_ = ValueType("array", element=type_)
    more = {"output": Field("out", type_)} | more
    return Aggregate(function, columns, **more)


AGGREGATES = {
    "count(*)": _aggregate("count"),
    "count(n, s) where": _aggregate("count", N, S, where="b"),
    "count(distinct d)": _aggregate("count", D, distinct=True),
    "count(distinct t, f)": _aggregate("count", T, F, distinct=True, where="b"),
    "sum(n)": _aggregate("sum", N, output=Field("out", ValueType("decimal", 38, 0))),
    "sum(n) to more places": _aggregate("sum", N),
    "sum(d) where": _aggregate("sum", D, where="b"),
    "sum(distinct d)": _aggregate("sum", D, distinct=True),
    "sum(d) as double": _aggregate("sum", D, output=Field("out", DOUBLE)),
    "min(n)": _aggregate("min", N),
    "max(d)": _aggregate("max", D, where="b"),
    "min(f)": _aggregate("min", F),
    "max(t)": _aggregate("max", T),
    "min(s)": _aggregate("min", S),
    "max(s)": _aggregate("max", S),
    "collect(d)": _aggregate("collect", D),
    "collect(f) where": _aggregate("collect", F, where="b"),
    "collect(s order by n desc)": _aggregate("collect", S, order=(Ordering(N, True, True),)),
    "collect(n order by t nulls last, s)": _aggregate("collect", N, order=(Ordering(T, False, True), Ordering(S))),
    "set(s)": _aggregate("set", S),
    "set(t)": _aggregate("set", T),
    "set(n order by n desc)": _aggregate("set", N, order=(Ordering(N, True),)),
    "set(n order by s)": _aggregate("set", N, order=(Ordering(S),)),
    "greatest_by(s, n)": _aggregate("greatest_by", S, order=(Ordering(N),)),
    "least_by(d, s)": _aggregate("least_by", D, order=(Ordering(S),)),
    "least_by(t, f) where": _aggregate("least_by", T, order=(Ordering(F),), where="b"),
}
GROUPED = (K, N, D, F, T, S, B)
FIELDS = {field.name: field for field in GROUPED}
Members = list[dict[str, str]]  # the rows of a group, each as often as it has copies


def _sorted(rows: Members, orderings: Sequence[Ordering]) -> Members:
    for ordering in reversed(orderings):
        name, null = ordering.field.name, 1 if ordering.nulls_last != ordering.descending else -1
        ranked = [
            ((null,) if row[name] == "null" else (0, _value(ordering.field, row[name])), place, row)
            for place, row in enumerate(reversed(rows) if ordering.descending else rows)
        ]
        rows = [row for _, _, row in sorted(ranked, key=lambda one: one[:2], reverse=ordering.descending)]
    return rows


def _folded(aggregate: Aggregate, rows: Members) -> str:
    """The aggregate's JSON text, by the book."""
    rows = [row for row in rows if aggregate.where is None or row[aggregate.where] == "true"]
    names = [field.name for field in aggregate.columns]
    present = [row for row in rows if all(row[name] != "null" for name in names)]
    if aggregate.function == "count":
        values = [tuple(_value(FIELDS[name], row[name]) for name in names) for row in present]
        return str(len(set(values) if aggregate.distinct else values))
    field = aggregate.columns[0]
    if aggregate.function == "sum":
        numbers = [Decimal(row[field.name]) for row in present]
        return _sum_text(aggregate.output.type, set(numbers) if aggregate.distinct else numbers)
    if aggregate.function in ("collect", "set"):
        ordered = _sorted(sorted(present, key=lambda row: row[field.name]), (*aggregate.order, Ordering(field)))
        texts = [row[field.name] for row in ordered]
        if aggregate.function == "set":
            once = {_value(field, text): text for text in reversed(texts)}
            texts = [text for text in texts if once.pop(_value(field, text), None)]
        return f"[{','.join(texts)}]"
    return _extreme(aggregate, field, rows if aggregate.order else present)


def _sum_text(type_: ValueType, numbers: Any) -> str:
    if not numbers:
        return "null"
    total = sum(numbers, Decimal(0))
    return str(float(total)) if type_.kind == "double" else f"{total:.{type_.scale}f}"


def _extreme(aggregate: Aggregate, field: Field, rows: Members) -> str:
    """The first by rank, then the greatest value, then the first text."""
    down = aggregate.function in ("max", "greatest_by")
    orderings = [Ordering(field, True)]
    if aggregate.order:
        ranked = aggregate.order[0].field
        rows = [row for row in rows if row[ranked.name] != "null"]
        orderings = [Ordering(ranked, down), Ordering(field, True, True)]
    elif not down:
        orderings = [Ordering(field)]
    ordered = _sorted(sorted(rows, key=lambda row: row[field.name]), orderings)
    return ordered[0][field.name] if ordered else "null"


def _grouped(operator: Operator, inputs: list[Rows]) -> Rows:
    assert isinstance(operator, Group)
    groups: dict[str, Members] = {} if operator.keys else {"": []}
    for row, n in inputs[0].items():
        texts = _raw(row)
        groups.setdefault(",".join(texts[field.name] for field in operator.keys), []).extend([texts] * n)
    output = Rows()
    for rows in groups.values():
        members = {field.name: rows[0][field.name] for field in operator.keys}
        output[_text(members | {one.output.name: _folded(one, rows) for one in operator.aggregates})] += 1
    return output


@pytest.mark.parametrize("name", AGGREGATES)
@settings(MODEST, max_examples=15)
@given(_pools(GROUPED), _TICKS)
def test_an_aggregate_emits_by_how_much_it_differs(name: str, pools: list[list[bytes]], ticks: Any) -> None:
    _check(Group((K,), (AGGREGATES[name],)), [_key(K)], _played(pools, ticks), _grouped)


def _all_together(*names: str) -> tuple[Aggregate, ...]:
    return tuple(
        Aggregate(one.function, one.columns, Field(f"out{place}", one.output.type), one.distinct, one.where, one.order)
        for place, one in enumerate(AGGREGATES[name] for name in names or AGGREGATES)
    )


@pytest.mark.parametrize("keys", [(), (K,), (K, N)])
@settings(MODEST, max_examples=15)
@given(_pools(GROUPED), _TICKS)
def test_all_aggregates_go_together(keys: tuple[Field, ...], pools: list[list[bytes]], ticks: Any) -> None:
    operator = Group(keys, _all_together())
    played = list(_played(pools, ticks))
    if not keys:  # before the first row it shows the empty group only if it is asked to
        played.insert(0, {1: ([(pools[0][0], 1)],)})
        played.insert(1, {2: ([(pools[0][0], -1)],)})
    _check(operator, [_key(*keys)], iter(played), _grouped)


@MODEST
@given(_pools((K, N)), _TICKS)
def test_a_group_without_aggregates_shows_each_key_once(pools: list[list[bytes]], ticks: Any) -> None:
    _check(Group((K, N), ()), [_key(K, N)], _played(pools, ticks), _grouped)


def test_the_empty_group_is_shown_once_and_differs_from_then_on() -> None:
    operator = compiled(Group((), _all_together("count(*)", "sum(d) where", "min(n)", "collect(d)")))
    assert isinstance(operator, GroupFold)
    empty, full = b'{"out0":0,"out1":null,"out2":null,"out3":[]}', b'{"out0":1,"out1":1.50,"out2":2,"out3":[1.50]}'
    row = b'{"n":2,"d":1.50,"b":true}'
    with tempfile.TemporaryDirectory() as folder, _arrangement(Path(folder)) as arrangement:
        with arrangement.write(0) as transaction:
            assert operator.initial(transaction, 7) == [Delta(b"", 7, 1, empty)]
            assert operator.initial(transaction, 8) == []
            assert operator.fold(transaction, [[]]) == []
            come = operator.fold(transaction, [[Delta(b"", 9, 1, row)]])
        with arrangement.write(1) as transaction:
            assert operator.initial(transaction, 10) == []
            gone = operator.fold(transaction, [[Delta(b"", 10, -1, row)]])
    assert come == [Delta(b"", 9, -1, empty), Delta(b"", 9, 1, full)]
    assert gone == [Delta(b"", 10, -1, full), Delta(b"", 10, 1, empty)]


def test_the_empty_group_has_no_row_where_there_are_keys() -> None:
    operator = compiled(Group((K,), ()))
    assert isinstance(operator, GroupFold)
    with _transaction() as transaction:
        assert operator.initial(transaction, 1) == []


def test_a_group_keeps_the_first_text_of_its_key_while_it_lasts() -> None:
    whole, fraction = (b'{"t":"2024-05-06T07:08:09%sZ","n":%d}' % pair for pair in ((b"", 1), (b".000000", 2)))
    tick: Tick = {1: ([(whole, 1)],), 2: ([(whole, -1), (fraction, 1)],), 3: ([(fraction, -1)],), 4: ([(fraction, 1)],)}
    outputs = _once(Group((T,), (_aggregate("sum", N, output=Field("out", BIGINT)),)), tick, _key(T))
    assert [(delta.step, delta.diff, delta.row) for delta in outputs] == [
        (1, 1, b'{"t":"2024-05-06T07:08:09Z","out":1}'),
        (2, -1, b'{"t":"2024-05-06T07:08:09Z","out":1}'),
        (2, 1, b'{"t":"2024-05-06T07:08:09Z","out":2}'),
        (3, -1, b'{"t":"2024-05-06T07:08:09Z","out":2}'),
        (4, 1, b'{"t":"2024-05-06T07:08:09.000000Z","out":2}'),
    ]


def test_a_sum_that_does_not_fit_names_its_column() -> None:
    operator = Group((K,), (_aggregate("sum", N, output=Field("total", BIGINT)),))
    rows = [(b'{"k":"a","n":9223372036854775807}', 1), (b'{"k":"a","n":1}', 1)]
    with pytest.raises(TypeOverflowError, match="total"):
        _once(operator, {1: (rows,)}, _key(K))
    assert _once(operator, {1: ([*rows, (b'{"k":"a","n":-1}', 1)],)}, _key(K))


def test_a_sum_beyond_64_bits_is_kept_exactly() -> None:
    operator = Group((K,), (_aggregate("sum", D, output=Field("total", WIDE)),))
    row = b'{"k":"a","d":99999999999999999.99}'
    with tempfile.TemporaryDirectory() as folder, _arrangement(Path(folder)) as arrangement:
        for tick, diff in enumerate((1000, 1, -1000, -1)):
            with arrangement.write(tick) as transaction:
                last = compiled(operator).fold(transaction, [[Delta(b"\x01", tick, diff, row)]])
    assert last == [Delta(b"", 3, -1, b'{"k":"a","total":99999999999999999.99}')]


def test_the_only_value_may_change_but_not_be_two() -> None:
    operator = Group((K,), (_aggregate("only", N),))
    null, one, two = (b'{"k":"a","n":%b}' % text for text in (b"null", b"1", b"2"))
    tick: Tick = {1: ([(null, 2)],), 2: ([(one, 2)],), 3: ([(two, 3), (one, -2)],), 4: ([(two, -3)],)}
    with tempfile.TemporaryDirectory() as folder, _arrangement(Path(folder)) as arrangement:
        outputs = []
        for step, changes in tick.items():
            with arrangement.write(step) as transaction:
                outputs += compiled(operator).fold(transaction, _inputs({step: changes}, _key(K)))
    texts = [delta.row for delta in outputs if delta.diff > 0]
    assert texts == [delta.row for delta in _once(operator, tick, _key(K)) if delta.diff > 0]
    assert texts == [b'{"k":"a","out":null}', b'{"k":"a","out":1}', b'{"k":"a","out":2}', b'{"k":"a","out":null}']
    with pytest.raises(NotOnlyOne, match='column "out" has more than one value: 1 and 2') as caught:
        _once(operator, {1: ([(two, 1), (one, 1)],)}, _key(K))
    assert pickle.loads(pickle.dumps(caught.value)).values == (b"1", b"2")


# --- the first rows


def _first_rows(operator: Operator, inputs: list[Rows]) -> Rows:
    assert isinstance(operator, Top)
    groups: dict[str, list[tuple[bytes, dict[str, str]]]] = {}
    for row, n in sorted(inputs[0].items()):
        groups.setdefault(_raw(row)["k"], []).extend([(row, _raw(row))] * n)
    output = Rows()
    for rows in groups.values():
        ordered = _sorted([texts | {"row": row.decode()} for row, texts in rows], operator.order)
        order = [
            tuple(
                None if one[by.field.name] == "null" else _value(by.field, one[by.field.name]) for by in operator.order
            )
            for one in ordered
        ]
        for index, one in enumerate(ordered):
            rank = order.index(order[index])
            places = {"row_number": index, "rank": rank, "dense_rank": len(set(order[:rank]))}
            place = places[operator.function] + 1
            if operator.limit is None or place <= operator.limit:
                row = one["row"].encode()
                output[row[:-1] + b',"%b":%d}' % (operator.position.encode(), place) if operator.position else row] += 1
    return output


ORDERS = {
    "n": (Ordering(N),),
    "d desc, t": (Ordering(D, True, True), Ordering(T)),
    "s nulls last": (Ordering(S, False, True),),
    "f desc": (Ordering(F, True),),
    "nothing": (),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("function", ["row_number", "rank", "dense_rank"])
@settings(MODEST, max_examples=15)
@given(_pools((K, N, D, F, T, S)), _TICKS, st.sampled_from([1, 2, 3, None]), st.sampled_from(["place", None]))
def test_the_first_rows_differ_as_they_should(
    order: str, function: Any, pools: list[list[bytes]], ticks: Any, limit: int | None, position: str | None
) -> None:
    _check(Top(ORDERS[order], function, limit, position), [_key(K)], _played(pools, ticks), _first_rows)


# --- relay and sink


@MODEST
@given(_pools((K, N)), _TICKS)
def test_a_relay_passes_on_what_does_not_cancel(pools: list[list[bytes]], ticks: Any) -> None:
    _check(Relay(), [_key(K)], _played(pools, ticks), lambda operator, inputs: Rows(inputs[0]))


_STATES = st.lists(
    st.lists(st.dictionaries(st.sampled_from(["k", "k" * 600]), st.none() | st.integers(0, 2)), min_size=1, max_size=3),
    max_size=4,
)


@MODEST
@given(_STATES, st.randoms(use_true_random=False))
def test_a_sink_emits_each_key_whose_row_differs(states: Any, chance: Any) -> None:
    current: dict[str, int | None] = {}
    step = 0
    with tempfile.TemporaryDirectory() as folder, _arrangement(Path(folder)) as arrangement:
        for tick, steps in enumerate(states):
            deltas: list[Delta] = []
            expected: list[Delta] = []
            for wanted in steps:
                step += 1
                for key, new in wanted.items():
                    old, current[key] = current.get(key), new
                    removed = [] if old is None else [Delta(key.encode(), step, -1, b'{"v":%d}' % old)]
                    added = [] if new is None else [Delta(key.encode(), step, 1, b'{"v":%d}' % new)]
                    deltas += [*removed, *added]
                    expected += [*removed, *added] if old != new else []
            chance.shuffle(deltas)
            with arrangement.write(tick) as transaction:
                outputs = compiled(Sink(())).fold(transaction, [deltas])
            assert sorted(outputs, key=lambda one: one[:2]) == sorted(expected, key=lambda one: one[:2])


def test_two_rows_of_one_key_are_refused_with_both() -> None:
    rows = [b'{"id":1,"v":1}', b'{"id":1,"v":2}']
    fold = compiled(Sink(())).fold
    with _transaction() as transaction:
        fold(transaction, [[Delta(b"1", 1, 1, rows[0])]])
        with pytest.raises(TwoRowsOfOneKey, match="with `-- key:`") as caught:
            fold(transaction, [[Delta(b"1", 2, 1, rows[1])]])
        with pytest.raises(TwoRowsOfOneKey):
            fold(transaction, [[Delta(b"1", 2, 1, rows[0])]])
    assert pickle.loads(pickle.dumps(caught.value)).rows == (rows[1], rows[0])


# --- what is refused, and what is read


@contextmanager
def _transaction() -> Iterator[Transaction]:
    with (
        tempfile.TemporaryDirectory() as folder,
        _arrangement(Path(folder)) as arrangement,
        arrangement.write(0) as transaction,
    ):
        yield transaction


MISSING: dict[str, tuple[Operator, bytes]] = {
    "inner": (Join("inner", LEFT, RIGHT), b'{"k":"gone","n":1}'),
    "semi": (Join("semi", LEFT, RIGHT), b'{"k":"gone","n":1}'),
    "count": (Group((K,), (_aggregate("count"),)), b'{"k":"gone"}'),
    "max": (Group((K,), (_aggregate("max", S),)), b'{"k":"a","s":"gone"}'),
    "top": (Top((Ordering(N),), "rank", 3, None), b'{"k":"gone","n":1}'),
    "sink": (Sink(()), b'{"k":"gone"}'),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_row_that_leaves_without_having_come_is_a_bug(name: str) -> None:
    operator, row = MISSING[name]
    with _transaction() as transaction, pytest.raises(AssertionError, match="gone"):
        compiled(operator).fold(transaction, [[Delta(b"\x01", 1, -1, row)], []])


def test_what_a_group_never_had_cannot_empty_it() -> None:
    operator = Group((K,), (_aggregate("sum", N),))
    with pytest.raises(AssertionError, match="0 rows in the group"):
        _once(operator, {1: ([(b'{"k":"a","n":1}', 1), (b'{"k":"a","n":2}', -1)],)}, _key(K))


class Spy(Transaction):
    """Counts the entries that are read."""

    def __init__(self, inner: Transaction) -> None:
        self._inner = inner
        self.read = 0

    def get(self, key: bytes) -> bytes | None:
        self.read += 1
        return self._inner.get(key)

    def getmulti(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.read += len(keys)
        return self._inner.getmulti(keys)

    def scan(self, prefix: bytes) -> list[Entry]:
        found = self._inner.scan(prefix)
        self.read += len(found)
        return found

    def walk(self, prefix: bytes) -> Iterator[Entry]:
        for entry in self._inner.walk(prefix):
            self.read += 1
            yield entry

    def putmulti(self, entries: Any) -> None:
        self._inner.putmulti(entries)

    def deletemulti(self, keys: Any) -> None:
        self._inner.deletemulti(keys)


def _reads(operator: Operator, before: list[list[Delta]], *then: list[list[Delta]]) -> list[int]:
    """How many entries each of some later folds reads."""
    counts = []
    with _transaction() as transaction:
        compiled(operator).fold(transaction, before)
        for inputs in then:
            spy = Spy(transaction)
            compiled(operator).fold(spy, inputs)
            counts.append(spy.read)
    return counts


def _many(size: int = 1000) -> list[Delta]:
    return [Delta(b"\x01", 1, 1, b'{"k":"a","n":%d,"s":"%d","b":true}' % (place, place % 7)) for place in range(size)]


ONE_RIGHT = [Delta(b"\x01", 1, 1, b'{"rk":"a","rn":1}')]
NEW_LEFT = [Delta(b"\x01", 2, 1, b'{"k":"a","n":-1}')]


@pytest.mark.parametrize("kind", JOINS)
def test_a_changed_row_reads_only_its_partners(kind: JoinKind) -> None:
    (count,) = _reads(Join(kind, LEFT, RIGHT, "there"), [_many(), ONE_RIGHT], [NEW_LEFT, []])
    assert count <= 3


def test_one_more_partner_is_of_no_concern_where_only_presence_counts() -> None:
    more = [Delta(b"\x01", 2, 1, b'{"rk":"a","rn":2}')]
    kinds: list[JoinKind] = ["semi", "anti", "exists"]
    for kind in kinds:
        assert _reads(Join(kind, LEFT, RIGHT, "there"), [_many(), ONE_RIGHT], [[], more]) == [1]


def test_a_linear_aggregate_reads_the_head_of_its_group_alone() -> None:
    operator = Group((K,), (_aggregate("count"), _aggregate("sum", N), _aggregate("count", S, where="b")))
    assert _reads(operator, [_many()], [NEW_LEFT]) == [1]


def test_a_distinct_aggregate_reads_the_values_that_change() -> None:
    operator = Group((K,), (_aggregate("count", N, distinct=True),))
    assert _reads(operator, [_many()], [NEW_LEFT]) == [2]


def test_an_extreme_is_looked_for_only_when_it_leaves() -> None:
    operator = Group((K,), (_aggregate("max", N),))
    leave = [[delta._replace(step=2, diff=-1) for delta in _many()[place : place + 1]] for place in (5, 999)]
    assert _reads(operator, [_many()], [NEW_LEFT], [leave[0]], [leave[1]]) == [2, 2, 4]


def test_what_follows_an_extreme_that_leaves_need_not_be_among_what_changes() -> None:
    operator = Group((K,), (_aggregate("min", N),))
    rows = [b'{"k":"a","n":%d}' % place for place in range(4)]
    with _transaction() as transaction:
        compiled(operator).fold(transaction, [[Delta(b"\x01", 1, 1, row) for row in rows]])
        changes = [Delta(b"\x01", 2, -1, rows[0]), Delta(b"\x01", 2, 1, rows[2]), Delta(b"\x01", 3, 1, rows[0])]
        outputs = compiled(operator).fold(transaction, [changes])
    assert [(delta.step, delta.row) for delta in outputs if delta.diff > 0] == [
        (2, b'{"k":"a","out":1}'),
        (3, b'{"k":"a","out":0}'),
    ]


def test_the_first_rows_read_the_limit_and_what_changes() -> None:
    operator = Top((Ordering(N, True),), "row_number", 3, "place")
    leave = [delta._replace(step=2, diff=-1) for delta in _many()[990:]]
    assert _reads(operator, [_many()], [NEW_LEFT])[0] <= 6
    assert _reads(operator, [_many()], [leave])[0] <= 10 + 10 + 4


def test_stage_keys_do_not_share_entries() -> None:
    operator = Join("inner", (N,), (RN,))
    keys = [b"\xff", b"\xffl", b"\xfe", b"\x01" + b"k" * 700, b"\x01" + b"k" * 700 + b"l", b"\x00"]
    lefts = [Delta(key, 1, 1, b'{"n":%d}' % place) for place, key in enumerate(keys)]
    rights = [Delta(key, 2, 1, b'{"rn":%d}' % place) for place, key in enumerate(keys)]
    with _transaction() as transaction:
        assert compiled(operator).fold(transaction, [lefts, []]) == []
        outputs = compiled(operator).fold(transaction, [[], rights])
    assert sorted(delta.row for delta in outputs) == [b'{"n":%d,"rn":%d}' % (place, place) for place in range(6)]
