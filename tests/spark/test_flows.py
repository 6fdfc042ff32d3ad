"""Views kept by stages: after every tick, or every transaction, they are what Spark says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.views import shop
from tests.views.kept import Kept

from tidegate.errors import FixConfiguration

FOLDER = Path(__file__).parent.parent / "fixtures" / "views"
SQL = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.sql"))}
PARTITIONS = (1, 3, 8)
SHARES = 4


def kept(spark: SparkSession, state: Path, sql: dict[str, str], partitions: int) -> Kept:
    return Kept(spark, state, shop.TABLES, shop.KEYS, sql, partitions)


def play(one: Kept, chance: random.Random, ticks: int) -> None:
    for _ in range(ticks):
        one.commit(*shop.transactions(chance, one))
        one.assert_as_spark_says()


@pytest.mark.parametrize("share", range(SHARES))
def test_after_each_tick_a_view_is_what_spark_says(spark: SparkSession, tmp_path: Path, share: int) -> None:
    chance = random.Random(random.randrange(2**32))
    sql = dict(list(SQL.items())[share::SHARES])
    play(kept(spark, tmp_path, sql, PARTITIONS[share % len(PARTITIONS)]), chance, ticks=5)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("partitions", PARTITIONS)
def test_after_many_ticks_all_views_are_what_spark_says(spark: SparkSession, tmp_path: Path, partitions: int) -> None:
    play(kept(spark, tmp_path, SQL, partitions), random.Random(random.randrange(2**32)), ticks=60)


TRANSACTIONALLY = ("sums", "left", "full_with_conditions", "latest", "ctes", "global", "distinct", "sums_of_sums")


def test_after_each_transaction_a_transactional_view_is_what_spark_says(spark: SparkSession, tmp_path: Path) -> None:
    """A tick holds several of them, which touch the same keys."""
    chance = random.Random(random.randrange(2**32))
    sql = {name: _transactionally(SQL[name]) for name in TRANSACTIONALLY}
    one = kept(spark, tmp_path, sql, 2)
    assert all(view.transactionally for view in one.views.values())
    for _ in range(3):
        one.commit(*shop.transactions(chance, one, most=5))
        one.assert_as_spark_says_after_each_transaction()


def _transactionally(sql: str) -> str:
    """The word belongs to the first SELECT of the file."""
    if sql.startswith("WITH"):
        return f"SELECT TRANSACTIONALLY * FROM (\n{sql})"
    return sql.replace("SELECT", "SELECT TRANSACTIONALLY", 1)


def test_a_plain_view_skips_what_a_tick_undoes(spark: SparkSession, tmp_path: Path) -> None:
    plain, each = "SELECT id, name FROM customers", "SELECT TRANSACTIONALLY id, name FROM customers"
    one = kept(spark, tmp_path, {"plain": plain, "each": each}, 2)
    row = {"id": 1, "name": "x", "vip": None}
    one.commit([("customers", None, row)], [("customers", row, None)])
    assert not list((tmp_path / "history" / "plain").glob("*"))
    assert [len(one.found("each", position)) for position in (0, 1)] == [1, 0]


def test_two_rows_of_a_declared_key_stop_the_view_with_both(spark: SparkSession, tmp_path: Path) -> None:
    one = kept(spark, tmp_path, {"named": "-- key: name\nSELECT name, id FROM customers"}, 2)
    rows = [{"id": place, "name": "x", "vip": None} for place in (1, 2)]
    with pytest.raises(FixConfiguration, match=r'view "named": two rows have the same key: .*"id":1.*"id":2'):
        one.commit([("customers", None, row) for row in rows])


def test_what_spark_cannot_compute_is_told_and_lost_nothing(spark: SparkSession, tmp_path: Path) -> None:
    one = kept(spark, tmp_path, {"shares": "SELECT id, 100 / quantity AS share FROM order_lines"}, 2)
    line = {"id": 1, "order_id": 1, "product": 1, "item": "x", "quantity": 0, "price": None}
    with pytest.raises(FixConfiguration, match="an expression of a view for a row: Division by zero"):
        one.commit([("order_lines", None, line)])
