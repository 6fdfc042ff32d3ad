"""A project in a temporary folder, driven tick by tick in the test's own process on real Spark."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

from pyspark.sql import SparkSession

from tests.recordings import Documents
from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.pipeline.materialize import Materializer
from tidegate.pipeline.project import FilesSource, Project, load
from tidegate.pipeline.runner import Defined, catalog_of, define_all, remember_tables, remember_views, ticks_of
from tidegate.pipeline.sources import FilesFeed
from tidegate.pipeline.ticks import TickDone, Ticks

VIEW = """
SELECT po.id, po.customer, po.order_date, po.status, SUM(ol.quantity * ol.price) AS total, COUNT(ol.id) AS line_count,
       ARRAY_AGG(STRUCT(ol.id, ol.item, ol.quantity, ol.price)) FILTER (WHERE ol.id IS NOT NULL) AS lines
FROM purchase_orders po LEFT JOIN order_lines ol ON ol.order_id = po.id
GROUP BY po.id, po.customer, po.order_date, po.status
"""
PROJECT = """
name: shop
spark: {{master: "local[2]"}}
source: {{kind: files, topic_prefix: {prefix}, path: "events/*.jsonl.gz"}}
tables:
  purchase_orders:
    topic: {topics}.purchase_orders
    key: [id]
    columns: {{id: bigint, customer: bigint, order_date: date, status: string}}
  order_lines:
    topic: {topics}.order_lines
    key: [id]
    columns: {{id: bigint, order_id: bigint, item: string, quantity: int, price: "{price}"}}
materializations:
  - {{view: orders_with_lines, to: sqlite, path: out.db, table: orders_with_lines}}
tick: {{max_events: {max_events}, every_ms: 0}}
"""


def write_project(
    folder: Path,
    *,
    max_events: int = 100_000,
    price: str = "decimal(12,4)",
    prefix: str = "shop",
    schema: str = "public",
) -> Path:
    """The order-with-its-lines project over recorded events."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    (folder / "views" / "orders_with_lines.sql").write_text(VIEW)
    text = PROJECT.format(max_events=max_events, price=price, prefix=prefix, topics=f"{prefix}.{schema}")
    (folder / "tidegate.yaml").write_text(text)
    return folder


class Bench:
    """One life of a run: everything that `tidegate run` has, stepped by hand."""

    def __init__(self, spark: SparkSession, project: Project, partitions: int | None = None) -> None:
        settings = project.file.source
        assert isinstance(settings, FilesSource)
        self.project = project
        self.catalog: SqliteCatalog = catalog_of(project)
        self.catalog.take_over()
        self._feed = FilesFeed(project, settings)
        self._feed.import_once()
        self._feed.check()
        self.defined: Defined = define_all(project, self._feed.tables(), spark)
        remember_tables(self.catalog, self.defined.tables)
        remember_views(self.catalog, self.defined.views)
        self.ticks: Ticks = ticks_of(project, spark, self.catalog, self.defined, partitions)
        self.ticks.recover()
        self.materializer = Materializer(
            project, project.file.materializations[0], self.defined.views[0], self.catalog, lambda _: None
        )

    def step(self) -> TickDone | None:
        """One tick, delivered."""
        done = self.ticks.step()
        self.deliver()
        return done

    def deliver(self) -> None:
        while self.materializer.deliver():
            pass

    def run(self) -> None:
        while self.step() is not None:
            pass
        self.deliver()

    def documents(self) -> Documents:
        """What a reader of the destination sees."""
        return read_documents(self.project.folder / "out.db")

    def close(self) -> None:
        self.materializer.close()
        self.catalog.close()


def read_documents(path: Path) -> Documents:
    if not path.exists():
        return {}
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows = connection.execute(
            "SELECT id, customer, order_date, status, total, line_count, lines FROM orders_with_lines"
        ).fetchall()
    finally:
        connection.close()
    return {
        row[0]: (*row[1:4], None if row[4] is None else Decimal(row[4]), row[5], nested_lines(row[6])) for row in rows
    }


def nested_lines(text: str) -> tuple[tuple[object, ...], ...]:
    nested = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    return tuple(sorted((int(one["id"]), one["item"], int(one["quantity"]), Decimal(one["price"])) for one in nested))


@contextmanager
def bench(spark: SparkSession, folder: Path, partitions: int | None = None) -> Iterator[Bench]:
    one = Bench(spark, load(folder), partitions)
    try:
        yield one
    finally:
        one.close()
