"""What cannot be kept is refused by place, with what to write instead."""

from __future__ import annotations

from typing import cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from tests.views import shop

from tidegate.errors import FixConfiguration
from tidegate.views.catalyst import Catalyst
from tidegate.views.flow import FlowView, define_flow
from tidegate.views.query import SourceText


@pytest.fixture(scope="module")
def catalyst(spark: SparkSession) -> Catalyst:
    return Catalyst(spark, {name: cast(StructType, StructType.fromDDL(ddl)) for name, ddl in shop.TABLES.items()})


def defined(catalyst: Catalyst, sql: str) -> FlowView:
    return define_flow(SourceText("v", sql, None), catalyst, dict.fromkeys(shop.TABLES, 0), shop.KEYS)


REFUSED = {
    "SELECT id,\n  now() AS t FROM customers": ("2:3: NOW gives another result each time", "a column that the app"),
    "SELECT id, rand() AS r FROM customers": ("1:12: RAND gives another result each time", "a column that the app"),
    "SELECT id FROM customers WHERE uuid() > name": ("1:32: UUID gives another result", "a column that the app"),
    "SELECT name, first(id) AS i FROM customers GROUP BY name": ("1:14: FIRST gives another", "MIN, MAX"),
    "SELECT a.id, b.id AS other FROM customers a CROSS JOIN products b": ("a join without an equality", "a.x = b.y"),
    "SELECT a.id, b.id AS other FROM customers a JOIN products b ON a.id < b.id": ("without an equality", "a.x = b.y"),
    "SELECT id FROM customers WHERE id NOT IN (SELECT customer FROM purchase_orders)": ("NOT IN over", "NOT EXISTS"),
    "SELECT name FROM customers": ("nothing in the select list tells the view's rows apart", "-- key: a, b"),
    "-- key: ident\nSELECT id FROM customers": ('1:9: the key names "ident", which is not selected', "Select it"),
    "SELECT id, name AS ID FROM customers": ('two columns are named "ID"', "another name with AS"),
    "SELECT id FROM customers LIMIT 3": ("LIMIT without ORDER BY", "Add ORDER BY"),
    "SELECT id FROM customers ORDER BY id": ("ORDER BY without LIMIT", "Leave it out"),
    "SELECT id, sum(ratio) AS s FROM readings GROUP BY id": ("SUM of double depends on the order", "decimal"),
    "SELECT name, percentile(id, 0.5) AS p FROM customers GROUP BY name": ("1:14: the aggregate PERCENTILE", "Use SUM"),
    "SELECT id, sum(id) OVER (ORDER BY id) AS s FROM customers": (
        "this window function is not supported",
        "ROW_NUMBER",
    ),
    "SELECT id, row_number() OVER (ORDER BY id) AS n FROM customers": ("a window over all rows", "PARTITION BY"),
    "SELECT id, nme FROM customers": ("Spark refuses the query", "Correct the SQL"),
    "SELEC id FROM customers": ("Spark refuses the query", "Correct the SQL"),
    "DROP TABLE customers": ("a view is one SELECT, and this is a command", "one SELECT a file"),
    "SELECT id FROM readings WHERE at > TIMESTAMP 'now'": (
        "1:36: TIMESTAMP 'now' gives another",
        "a column that the app",
    ),
    "SELECT id FROM readings WHERE at > CAST('today' AS TIMESTAMP)": ("today gives another", "a column that the app"),
    "SELECT flag, max(at - TIMESTAMP '2020-01-01') AS m FROM readings GROUP BY flag": ("cannot be compared", "Cast it"),
    "SELECT name, try_sum(id) AS s FROM customers GROUP BY name": ("try_sum(customers.id) is not", "without TRY_"),
    "SELECT name, max_by(map(id, vip), id)[1] AS m FROM customers GROUP BY name": ("values of type map", "Cast it"),
    "SELECT 1 AS one": ("a query without a table", "Name a table"),
}


@pytest.mark.parametrize("sql", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_place(catalyst: Catalyst, sql: str) -> None:
    reason, remedy = REFUSED[sql]
    with pytest.raises(FixConfiguration) as refused:
        defined(catalyst, sql)
    assert reason in refused.value.message, refused.value.message
    assert refused.value.message.startswith("view v:")
    assert remedy in refused.value.remedy, refused.value.remedy


KEYS = {
    "SELECT l.id, c.name FROM order_lines l JOIN purchase_orders po ON po.id = l.order_id"
    " JOIN customers c ON c.id = po.customer": ("id",),
    "SELECT po.id, po.status, l.id AS line FROM purchase_orders po LEFT JOIN order_lines l ON l.order_id = po.id": (
        "id",
        "line",
    ),
    "SELECT status, customer, count(*) AS n FROM purchase_orders GROUP BY customer, status": ("status", "customer"),
    "SELECT po.id, po.status, count(*) AS n FROM purchase_orders po GROUP BY po.status, po.id": ("id",),
    "SELECT DISTINCT name, vip FROM customers": ("name", "vip"),
    "SELECT count(*) AS n FROM customers": (),
    "-- key: name\nSELECT name FROM customers": ("name",),
}


@pytest.mark.parametrize("sql", KEYS)
def test_the_key_is_inferred(catalyst: Catalyst, sql: str) -> None:
    assert defined(catalyst, sql).key == KEYS[sql]


def test_the_plan_has_the_same_names_in_each_session(spark: SparkSession, catalyst: Catalyst) -> None:
    """Else a restart would fill every stage again."""
    sql = (
        "SELECT c.name, count(*) AS n, max(po.id + 1) AS m FROM customers c JOIN purchase_orders po"
        " ON po.customer = c.id GROUP BY c.name"
    )
    first = defined(catalyst, sql)
    again = Catalyst(spark, {name: cast(StructType, StructType.fromDDL(ddl)) for name, ddl in shop.TABLES.items()})
    assert defined(again, sql).flow == first.flow
