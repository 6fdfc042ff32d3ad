"""Views on Spark: what the kernel folds from changes is what Spark computes from whole tables, tick by tick."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tidegate.errors import FixConfiguration
from tidegate.model.cell import Cell, encode_cell, key_of
from tidegate.model.schema import Column, TableSchema, parse_type
from tidegate.views.arrangement import Arrangement
from tidegate.views.definition import ViewDefinition, define
from tidegate.views.kernel import Change, compiled
from tidegate.views.recompute import canonical_rows, recompute, same

Row = tuple[Any, ...]


def _table(name: str, key: tuple[str, ...], **columns: str) -> TableSchema:
    return TableSchema(name, f"demo.{name}", key, tuple(Column(one, parse_type(kind)) for one, kind in columns.items()))


TABLES = {
    table.name: table
    for table in (
        _table("orders", ("id",), id="int", customer="string", status="string", placed="timestamp"),
        _table("lines", ("id",), id="bigint", order_id="int", item="string", quantity="int", price="decimal(10,2)"),
        _table("payments", ("order_id", "no"), order_id="bigint", no="int", amount="decimal(38,10)", share="double"),
    )
}

VIEWS = {
    "documents": """
        SELECT po.id, po.customer, po.status, SUM(ol.quantity * ol.price) AS total, COUNT(ol.id) AS line_count,
               ARRAY_AGG(STRUCT(ol.id, ol.item, ol.quantity, ol.price)) AS lines
        FROM orders po LEFT JOIN lines ol ON ol.order_id = po.id
        GROUP BY po.id, po.customer, po.status""",
    "single": """
        SELECT order_id, COUNT(*) AS n, SUM(quantity) AS pieces,
               COLLECT_LIST(item) FILTER (WHERE price IS NOT NULL) items,
               COALESCE(SUM(price), 0) - 1.5 AS rest, -COUNT(item) AS minus, ARRAY_AGG(price) prices
        FROM lines GROUP BY order_id""",
    "inner_from_lines": """
        SELECT o.status, o.id AS order_id, COUNT(*) FILTER (WHERE l.item IS NULL AND l.price IS NOT NULL) AS odd,
               SUM(COALESCE(l.quantity, 0.5) + l.price * 2) AS points, 'x' AS mark,
               STRUCT(o.id, COUNT(*) AS n) AS inside
        FROM lines AS l JOIN orders o ON o.id = l.order_id GROUP BY o.status, o.id""",
    "three": """
        SELECT o.id, COUNT(*) AS n, COUNT(l.id) AS lines, SUM(p.amount) AS paid,
               ARRAY_AGG(STRUCT(p.no, p.amount, STRUCT(l.item AS what, p.share) AS deep)) AS pairs,
               SUM(l.id * p.no + COALESCE(l.price, -o.id)) AS mixed
        FROM orders o LEFT JOIN lines l ON l.order_id = o.id LEFT JOIN payments p ON o.id = p.order_id
        GROUP BY o.id""",
    "several_rows": """
        SELECT o.id, l.item, MAX_OF.no AS no, COUNT(*) AS n, SUM(l.price) AS total, o.placed
        FROM orders o JOIN lines l ON l.order_id = o.id LEFT JOIN payments MAX_OF ON MAX_OF.order_id = l.order_id
        GROUP BY o.id, l.item, MAX_OF.no, o.placed""",
}


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """Interprets plans, which for tiny frames is much quicker than to compile them."""
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "1")
    session.conf.set("spark.sql.codegen.wholeStage", "false")
    session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


class Views(list[ViewDefinition]):
    def __repr__(self) -> str:  # hypothesis prints arguments and warns of long ones
        return ", ".join(view.name for view in self)


@pytest.fixture(scope="module")
def views(spark: SparkSession) -> Views:
    return Views(define(name, sql, None, TABLES, spark) for name, sql in VIEWS.items())


@dataclass
class _Folded:
    """One view kept by the kernel, and its rows as a destination would have them."""

    definition: ViewDefinition = field(repr=False)
    arrangement: Arrangement
    rows: dict[bytes, Cell] = field(default_factory=dict)

    def apply(self, tick: int, changed: dict[tuple[str, bytes], tuple[Cell | None, Cell | None]]) -> None:
        view = compiled(self.definition.plan)
        changes: list[Change] = [
            change
            for (table, pk), (old, new) in changed.items()
            for used in view.inputs_of(table)
            for change in used.route(pk, old, new)
        ]
        for key, old, new in view.fold(self.arrangement, tick, changes):
            assert self.rows.get(key) == old != new
            if new is None:
                del self.rows[key]
            else:
                self.rows[key] = new


def _cell(table: str, row: Row) -> Cell:
    columns = TABLES[table].columns
    values = [
        value.quantize(Decimal(1).scaleb(-column.type.scale), context=Context(prec=60))
        if isinstance(value, Decimal)
        else value
        for column, value in zip(columns, row, strict=True)
    ]
    return encode_cell(columns, values)


_KEYS = st.integers(1, 4)
_TEXT = st.sampled_from(["a", "b", 'quoted "\\ é', "null", "", None])
_PRICES = st.sampled_from([None, *map(Decimal, ("0.00", "-0.01", "12.50", "99999999.99", "-99999999.99"))])
_AMOUNTS = st.sampled_from(
    [None, *map(Decimal, ("0E-10", "0.0000000001", "-1.5", "999999999999999999999999999.9999999999"))]
)
_ROWS = {
    "orders": st.tuples(
        _KEYS, _TEXT, _TEXT, st.sampled_from([None, "2024-02-29T10:00:00Z", "1999-12-31T23:59:59.123456Z"])
    ),
    "lines": st.tuples(
        st.integers(1, 9), st.one_of(st.none(), _KEYS), _TEXT, st.sampled_from([None, 0, 3, -7, 2**31 - 1]), _PRICES
    ),
    "payments": st.tuples(_KEYS, st.integers(1, 2), _AMOUNTS, st.sampled_from([None, 0.5, -1e300])),
}
_TICKS = st.lists(
    st.lists(
        st.one_of(
            *(st.tuples(st.just(table), rows) for table, rows in _ROWS.items()),  # insert or update
            *(st.tuples(st.just(table), st.integers(0, 9)) for table in _ROWS),  # delete one of the rows that are there
            st.tuples(st.just("lines"), st.just("truncate")),
        ),
        min_size=1,
        max_size=14,
    ),
    min_size=2,
    max_size=3,
)

State = dict[tuple[str, bytes], Row]


def _play(state: State, tick: list[tuple[str, Any]]) -> dict[tuple[str, bytes], tuple[Cell | None, Cell | None]]:
    """Applies a tick to the tables and returns each changed row's old and new cell."""
    before = dict(state)
    for table, action in tick:
        present = sorted(place for place in state if place[0] == table)
        if action == "truncate":
            for place in present:
                del state[place]
        elif isinstance(action, tuple):
            state[table, key_of(TABLES[table], _cell(table, action))] = action
        elif present:
            del state[present[action % len(present)]]
    touched = {place for place in before.keys() | state.keys() if before.get(place) != state.get(place)}
    return {
        place: (
            _cell(place[0], before[place]) if place in before else None,
            _cell(place[0], state[place]) if place in state else None,
        )
        for place in sorted(touched)
    }


def _frames(spark: SparkSession, state: State) -> dict[str, Any]:
    return {
        name: spark.createDataFrame(
            [row for place, row in state.items() if place[0] == name], table.ddl.replace("timestamp", "string")
        ).selectExpr(*(f"cast(`{c.name}` as {c.type.ddl}) as `{c.name}`" for c in table.columns))
        for name, table in TABLES.items()
    }


@settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(ticks=_TICKS)
def test_after_each_tick_the_folded_views_equal_the_query_over_the_whole_tables(
    session: SparkSession, views: Views, ticks: list[list[tuple[str, Any]]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folded = [_Folded(view, Arrangement.open(Path(folder, view.name), view.plan.layout)) for view in views]
        state: State = {}
        for tick, actions in enumerate(ticks):
            changed = _play(state, actions)
            frames = _frames(session, state)
            for view in folded:
                view.apply(tick, changed)
                _assert_equal(view, dict(canonical_rows(view.definition, recompute(session, view.definition, frames))))
        for view in folded:
            view.arrangement.close()


def _assert_equal(view: _Folded, expected: dict[bytes, Cell]) -> None:
    assert view.rows.keys() == expected.keys(), view.definition.name
    for key, cell in view.rows.items():
        assert same(view.definition, cell, expected[key]), (view.definition.name, cell, expected[key])


def test_the_key_is_the_primary_key_where_it_determines_the_rest(views: Views) -> None:
    keys = {view.name: view.key for view in views}
    assert keys == {
        "documents": ("id",),
        "single": ("order_id",),
        "inner_from_lines": ("order_id",),
        "three": ("id",),
        "several_rows": ("id", "item", "no"),
    }


def test_types_and_names_are_those_of_spark(views: Views) -> None:
    documents = views[0]
    assert [(column.name, column.ddl, column.nested) for column in documents.columns] == [
        ("id", "int", False),
        ("customer", "string", False),
        ("status", "string", False),
        ("total", "decimal(31,2)", False),
        ("line_count", "bigint", False),
        ("lines", "array<struct<`id`:bigint,`item`:string,`quantity`:int,`price`:decimal(10,2)>>", True),
    ]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("SUM(p.amount * p.amount)", "rounded"),
        ("SUM(p.amount + 0.00000000001)", "rounded"),
        ("SUM(p.share)", "SUM of floats"),
        ("ARRAY_AGG(p.share * 2)", "arithmetic on double"),
        ("ARRAY_AGG(1e3)", "floating point literal"),
        ("COALESCE(p.order_id, 'x')", "would convert string to bigint"),
        ("NULL", "NULL alone has no type"),
        ("ARRAY_AGG(STRUCT(p.no AS a, p.amount AS A))", "two fields of a STRUCT"),
        ("COUNT(*) AS n, COUNT(*) AS N", 'two columns are named "N"'),
        ("SUM('x')", "arithmetic on string"),
    ],
)
def test_what_spark_types_as_inexact_or_unclear_is_refused_with_its_place(
    spark: SparkSession, item: str, reason: str
) -> None:
    sql = f"SELECT p.order_id,\n  {item}\nFROM payments p GROUP BY p.order_id"
    with pytest.raises(FixConfiguration, match=reason) as refusal:
        define("sums", sql, Path("views/sums.sql"), TABLES, spark)
    assert refusal.value.message.startswith("views/sums.sql:2:")
    assert refusal.value.remedy


def test_what_only_spark_refuses_keeps_its_place(spark: SparkSession) -> None:
    sql = "SELECT p.order_id,, COUNT(*)\nFROM payments p GROUP BY p.order_id"
    with pytest.raises(FixConfiguration, match=r"views/sums.sql:1:\d+: Spark refuses the query") as refusal:
        define("sums", sql, Path("views/sums.sql"), TABLES, spark)
    assert refusal.value.remedy


def test_two_tables_with_many_rows_for_a_key_draw_a_warning(views: Views) -> None:
    assert [len(view.warnings) for view in views] == [0, 0, 0, 1, 1]
