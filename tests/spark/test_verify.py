"""`verify` says equal for whatever form a destination gives a value, and for nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from bench import workload
from pyspark.sql import SparkSession
from tests.pipeline import Bench, bench

from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.pipeline.verify import Verdict, verify


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path_factory.mktemp("destination")) as running:
        yield running


PROJECT = """
name: shop
source: {{kind: files, topic_prefix: shop, path: "events/*.jsonl"}}
tables:
  purchase_orders: {{key: [id], columns: {{id: bigint, order_date: date, total: bigint}}}}
  order_lines: {{key: [id], columns: {{id: bigint, order_id: bigint, quantity: int, price: "decimal(10,2)"}}}}
materializations:
  - {{view: orders_with_lines, {destination}}}
"""
VIEW = """
SELECT po.id, po.order_date, SUM(ol.quantity * ol.price) AS total, COUNT(ol.id) AS line_count,
       ARRAY_AGG(STRUCT(ol.id AS line_id, ol.quantity, ol.price)) FILTER (WHERE ol.id IS NOT NULL) AS lines
FROM purchase_orders po LEFT JOIN order_lines ol ON ol.order_id = po.id
GROUP BY po.id, po.order_date
"""


def delivered(spark: SparkSession, folder: Path, destination: str) -> Path:
    workload.write(folder / "events" / "shop.jsonl", workload.Workload(orders=20, updates=40))
    (folder / "views").mkdir()
    (folder / "views" / "orders_with_lines.sql").write_text(VIEW)
    (folder / "tidegate.yaml").write_text(PROJECT.format(destination=destination))
    with bench(spark, folder) as one:
        one.run()
    return folder


def verdict(spark: SparkSession, folder: Path) -> Verdict:
    with bench(spark, folder) as one:
        return verdict_of(spark, one)


def verdict_of(spark: SparkSession, one: Bench) -> Verdict:
    settings = one.project.file.materializations[0]
    return verify(spark, one.catalog, one.defined.views[0], one.defined, one.materializer.spec, settings.to)


def test_a_delivered_view_is_equal_in_sqlite_until_a_row_is_changed_by_hand(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = delivered(spark, tmp_path, "to: sqlite, path: out.db, table: orders_with_lines")
    whole = verdict(spark, folder)
    assert whole.equal
    assert whole.rows == 20
    with sqlite3.connect(folder / "out.db") as connection:
        connection.execute("UPDATE orders_with_lines SET lines = replace(lines, '.00', '.01') WHERE id IN (3, 7)")
    connection.close()
    torn = verdict(spark, folder)
    assert [one.key for one in torn.examples] == ["id = 3", "id = 7"]
    assert torn.differences == 2
    assert ".01" in str(torn.examples[0].found)
    assert ".01" not in str(torn.examples[0].expected)


def test_numbers_within_documents_are_equal_by_value_in_postgres(
    spark: SparkSession, tmp_path: Path, server: EmbeddedPostgres
) -> None:
    folder = delivered(spark, tmp_path, f'to: postgres, dsn: "{server.dsn()}", table: orders_with_lines')
    assert verdict(spark, folder).equal
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("DELETE FROM orders_with_lines WHERE id = (SELECT min(id) FROM orders_with_lines)")
    lost = verdict(spark, folder)
    assert lost.differences == 1
    assert lost.examples[0].found is None
