"""What a view's SQL may be is checked without Spark, and each refusal names its place and what to write instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tidegate.errors import FixConfiguration
from tidegate.model.schema import Column, TableSchema, parse_type
from tidegate.views.definition import define
from tidegate.views.query import Query, SourceText, parse, says_the_same

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _table(name: str, key: str, **columns: str) -> TableSchema:
    return TableSchema(name, name, (key,), tuple(Column(one, parse_type(kind)) for one, kind in columns.items()))


TABLES = {
    "orders": _table("orders", "id", id="int", customer="string", status="string", weight="double"),
    "lines": _table("lines", "id", id="bigint", order_id="int", item="string", price="decimal(10,2)"),
    "payments": _table("payments", "id", id="bigint", order_id="bigint", method="string", line_id="bigint"),
}
JOIN = "FROM orders o LEFT JOIN lines l ON l.order_id = o.id"

REFUSED = {
    f"SELECT o.id {JOIN} WHERE o.id > 1 GROUP BY o.id": ("1:66", "WHERE is not supported"),
    f"SELECT o.id {JOIN}\nGROUP BY o.id\nHAVING COUNT(*) > 1": ("3:1", "HAVING is not supported"),
    f"SELECT o.id {JOIN}\nGROUP BY o.id\nORDER BY o.id": ("3:1", "ORDER BY is not supported"),
    f"SELECT o.id {JOIN}\nGROUP BY o.id\n LIMIT 3": ("3:2", "LIMIT is not supported"),
    f"SELECT DISTINCT o.id {JOIN} GROUP BY o.id": ("1:8", "DISTINCT is not supported"),
    f"WITH x AS (SELECT 1) SELECT o.id {JOIN} GROUP BY o.id": ("1:1", "WITH is not supported"),
    f"-- about\nSELECT TRANSACTIONALLY o.id {JOIN} GROUP BY o.id": ("2:8", "TRANSACTIONALLY is not supported"),
    f"-- retain: 30 days\nSELECT o.id {JOIN} GROUP BY o.id": ("1:1", "`retain` is not supported"),
    "SELECT id FROM orders GROUP BY id UNION ALL SELECT id FROM lines GROUP BY id": ("1:8", "this is UNION"),
    "SELECT id FROM orders GROUP BY id;\nSELECT 1": ("2:8", "a second statement"),
    "SELECT id FROM (SELECT id FROM orders) x GROUP BY id": ("1:24", "a subquery or function in FROM"),
    "SELECT id FROM shop.orders GROUP BY id": ("1:16", "named by one word"),
    "SELECT id FROM order GROUP BY id": ("1:16", 'there is no table "order"'),
    "SELECT idd FROM orders GROUP BY id": ("1:8", 'there is no column "idd"'),
    "SELECT x.id FROM orders GROUP BY id": ("1:8", 'there is no table "x" here'),
    f"SELECT id {JOIN} GROUP BY o.id": ("1:8", 'column "id" is ambiguous'),
    "SELECT id FROM orders": ("1:8", "without GROUP BY"),
    "SELECT id FROM orders GROUP BY 1": ("1:32", "GROUP BY takes only columns"),
    "SELECT id AS k FROM orders GROUP BY k": ("1:37", "is a name given in SELECT"),
    "SELECT id FROM orders GROUP BY id WITH ROLLUP": ("1:23", "ROLLUP"),
    "SELECT weight FROM orders GROUP BY weight": ("1:36", "cannot be a key"),
    "SELECT id, status FROM orders GROUP BY id": ("1:12", "neither in GROUP BY nor inside an aggregate"),
    "SELECT * FROM orders GROUP BY id": ("1:8", r"\* is not supported"),
    "SELECT id, MAX(status) FROM orders GROUP BY id": ("1:12", "the aggregate MAX is not supported"),
    "SELECT id, UPPER(status) FROM orders GROUP BY id": ("1:12", "UPPER is not supported"),
    "SELECT id, rand() FROM orders GROUP BY id": ("1:12", "RAND gives another result each time"),
    "SELECT id, now() FROM orders GROUP BY id": ("1:12", "NOW gives another result each time"),
    "SELECT id, COUNT(DISTINCT status) FROM orders GROUP BY id": ("1:12", "DISTINCT in an aggregate"),
    "SELECT id, ARRAY_AGG(status ORDER BY id) FROM orders GROUP BY id": ("1:12", "ORDER BY in an aggregate"),
    "SELECT id, COUNT(id, status) FROM orders GROUP BY id": ("1:12", "takes one value"),
    "SELECT id, COUNT() FROM orders GROUP BY id": ("1:12", "an aggregate of nothing"),
    "SELECT id, SUM(COUNT(id)) FROM orders GROUP BY id": ("1:16", "an aggregate inside an aggregate"),
    "SELECT id, COUNT(*) OVER () FROM orders GROUP BY id": ("1:12", "window functions"),
    "SELECT id, (SELECT 1) FROM orders GROUP BY id": ("1:20", "a subquery is not supported"),
    "SELECT id, id / 2 FROM orders GROUP BY id": ("1:15", r" / is not supported"),
    "SELECT id, (id)||'x' FROM orders GROUP BY id": ("1:16", r" \|\| is not supported"),
    "SELECT id, status like 'x%' FROM orders GROUP BY id": ("1:19", " LIKE is not supported"),
    "SELECT id, CAST(status AS int) FROM orders GROUP BY id": ("1:12", " CAST is not supported"),
    "SELECT id, SUM(cast( (id) AS bigint)) FROM orders GROUP BY id": ("1:16", " CAST is not supported"),
    "SELECT id, CAST(try_cast(id AS int) AS bigint) FROM orders GROUP BY id": ("1:12", " CAST is not supported"),
    "SELECT id, TRY_CAST(id AS bigint) FROM orders GROUP BY id": ("1:12", " TRY_CAST is not supported"),
    "SELECT id, SUM(id::bigint), CAST(id AS int) FROM orders GROUP BY id": ("1:18", " :: is not supported"),
    "SELECT id, CAST(NULL AS bigint) FROM orders GROUP BY id": ("1:12", " CAST is not supported"),
    "SELECT id, DATE '2026-01-05' FROM orders GROUP BY id": ("1:12", " DATE is not supported"),
    "SELECT id, CASE WHEN id = 1 THEN 2 END FROM orders GROUP BY id": ("1:12", " CASE is not supported"),
    "SELECT id, to_date(status) FROM orders GROUP BY id": ("1:12", " TO_DATE is not supported"),
    "SELECT id, COUNT(*) FILTER (WHERE id > 1) FROM orders GROUP BY id": ("1:35", "this condition in FILTER"),
    "SELECT o.id FROM orders o RIGHT JOIN lines l ON l.order_id = o.id GROUP BY o.id": ("1:38", "RIGHT JOIN"),
    "SELECT o.id FROM orders o FULL JOIN lines l ON l.order_id = o.id GROUP BY o.id": ("1:37", "FULL JOIN"),
    "SELECT o.id FROM orders o JOIN lines l USING (id) GROUP BY o.id": ("1:32", "USING is not supported"),
    "SELECT o.id FROM orders o, lines l GROUP BY o.id": ("1:28", "CROSS JOIN"),
    "SELECT o.id FROM orders o JOIN lines l GROUP BY o.id": ("1:32", "without ON|CROSS JOIN"),
    "SELECT o.id FROM orders o JOIN lines l ON l.order_id > o.id GROUP BY o.id": ("1:43", "only equal columns"),
    "SELECT o.id FROM orders o JOIN lines l ON l.item = o.id GROUP BY o.id": ("1:43", "cannot be a shared key"),
    "SELECT o.id FROM orders o JOIN orders o ON o.id = o.id GROUP BY o.id": ("1:32", "two tables are named"),
    f"SELECT o.id {JOIN} JOIN payments p ON p.line_id = l.id GROUP BY o.id": ("1:85", "not in the key that the other"),
    f"SELECT o.id {JOIN} JOIN payments p ON p.order_id = l.order_id GROUP BY o.id": ("1:85", "l may be missing"),
    "SELECT o.status FROM orders o JOIN lines l ON l.order_id = o.id GROUP BY o.status": (
        "1:74",
        "has to contain the key",
    ),
    f"SELECT l.order_id {JOIN} GROUP BY l.order_id": ("1:81", "has to contain the key"),
    f"SELECT o.status {JOIN} GROUP BY o.id, o.status": ("1:8", "o.id belongs to the view's key"),
    "SELECT id FRO orders WHERE": ("1:15", "syntax error at 'orders'"),
    "SELECT id FROM orders\nGROUP BY (id": ("2:", "syntax error"),
    "SELECT 'id FROM orders": ("1:8", "has no end"),
    "SELEC id": ("1:", "a view is one SELECT"),
    "": ("1:1", "this is nothing"),
}


def _refusal(sql: str) -> FixConfiguration:
    with pytest.raises(FixConfiguration) as refusal:
        define("v", sql, Path("views/v.sql"), TABLES, cast("SparkSession", None))  # refused before Spark is asked
    return refusal.value


@pytest.mark.parametrize("sql", REFUSED)
def test_what_is_not_supported_is_refused_without_spark_at_its_place(sql: str) -> None:
    place, reason = REFUSED[sql]
    refusal = _refusal(sql)
    assert re.search(reason, refusal.message), refusal.message
    assert refusal.message.startswith(f"views/v.sql:{place}"), refusal.message
    assert refusal.remedy.endswith((".", "?"))


def test_an_unknown_name_is_answered_with_the_nearest_known() -> None:
    assert _refusal("SELECT custmer FROM orders GROUP BY id").remedy == 'Did you mean "customer"?'
    assert _refusal("SELECT id FROM ordes GROUP BY id").remedy == 'Did you mean "orders"?'
    assert _refusal(f"SELECT id {JOIN} GROUP BY o.id").remedy == "Write o.id or l.id."


def test_tables_on_different_keys_are_joined_by_who_reads_them() -> None:
    remedy = _refusal(f"SELECT o.id {JOIN} JOIN payments p ON p.line_id = l.id GROUP BY o.id").remedy
    assert remedy == (
        "Join every table on the same columns: one shared key. Give a table with another key a view of its own,"
        " without JOIN, and join the two where they are read."
    )


def _parsed(sql: str) -> Query:
    return parse(SourceText("v", sql, None), TABLES)


@pytest.mark.parametrize("on", ["l.order_id = o.id", "o.id = l.order_id", "(O.ID = L.Order_Id)", "order_id = o.id"])
def test_on_may_be_written_either_way_round(on: str) -> None:
    query = _parsed(f"SELECT o.id FROM orders o JOIN lines l ON {on} GROUP BY o.id")
    assert [(used.alias, used.join, used.key) for used in query.inputs] == [
        ("o", "from", ("id",)),
        ("l", "inner", ("order_id",)),
    ]


def test_several_tables_share_one_key() -> None:
    query = _parsed(f"SELECT o.id {JOIN} LEFT OUTER JOIN payments p ON o.id = p.order_id GROUP BY o.id")
    assert [(used.join, used.key) for used in query.inputs] == [
        ("from", ("id",)),
        ("left", ("order_id",)),
        ("left", ("order_id",)),
    ]


def test_a_key_of_several_columns_takes_the_order_of_group_by() -> None:
    on = "p.order_id = l.order_id AND l.id = p.line_id"
    query = _parsed(f"SELECT l.id, l.order_id FROM lines l JOIN payments p ON {on} GROUP BY l.id, l.order_id")
    assert [used.key for used in query.inputs] == [("id", "order_id"), ("line_id", "order_id")]


@pytest.mark.parametrize(
    ("sql", "same"),
    [
        ("select ID,  status\n-- about\nfrom orders group by id, status", False),
        ("select id,  status\n-- about\nfrom orders group by id, status;", True),
        ("SELECT id, status FROM orders GROUP BY status, id", False),
        ("SELECT id, status AS s FROM orders GROUP BY id, status", False),
    ],
)
def test_a_view_is_the_same_if_only_its_layout_differs(sql: str, same: bool) -> None:
    assert says_the_same("SELECT id, status FROM orders GROUP BY id, status", sql) == same


def test_without_a_join_the_key_is_the_primary_key_or_all_grouping_columns() -> None:
    assert _parsed("SELECT status, id FROM orders GROUP BY status, id").inputs[0].key == ("id",)
    assert _parsed("SELECT order_id, item FROM lines GROUP BY item, order_id").inputs[0].key == ("item", "order_id")
