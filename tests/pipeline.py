"""A project in a temporary folder, driven tick by tick in the test's own process on real Spark."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.recordings import Documents
from tidegate.capture.log import LogReader
from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.pipeline.defining import Defined, define_all
from tidegate.pipeline.known import remember
from tidegate.pipeline.materialize import Materializer
from tidegate.pipeline.project import FilesSource, Project, load
from tidegate.pipeline.runner import catalog_of, ticks_of
from tidegate.pipeline.sources import FilesFeed
from tidegate.pipeline.ticks import TickDone, Ticks
from tidegate.pipeline.verify import Verdict, verify

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
    text = PROJECT.format(max_events=max_events, price=price, prefix=prefix, topics=f"{prefix}.{schema}")
    return write_files(folder, text, orders_with_lines=VIEW)


def write_files(folder: Path, project: str, **views: str) -> Path:
    """A project of any kind; `views` holds the SQL by name."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    for name, sql in views.items():
        (folder / "views" / f"{name}.sql").write_text(sql)
    (folder / "tidegate.yaml").write_text(project)
    return folder


class Bench:
    """One life of a run: everything that `tidegate run` has, stepped by hand."""

    def __init__(self, spark: SparkSession, project: Project, partitions: int | None = None) -> None:
        settings = project.file.source
        assert isinstance(settings, FilesSource)
        self.project, self._spark = project, spark
        self.catalog: SqliteCatalog = catalog_of(project)
        self.catalog.take_over()
        self._feed = FilesFeed(project, settings)
        self._feed.import_once()
        self._feed.check()
        self.defined: Defined = define_all(project, self._feed.tables(), spark)
        remember(self.catalog, LogReader(project.state / "log"), self.defined.tables, self.defined.views)
        self.ticks: Ticks = ticks_of(project, spark, self.catalog, self.defined, partitions)
        self.ticks.recover()
        self._views = {view.name: view for view in self.defined.views}
        self.materializers = [
            Materializer(project, one, self._views[one.view], self.catalog, lambda _: None)
            for one in project.file.materializations
        ]

    @property
    def materializer(self) -> Materializer:
        return self.materializers[0]

    def arrive(self) -> None:
        """Takes the recorded events that have come since."""
        self._feed.import_once()

    def step(self) -> TickDone | None:
        """One tick, delivered."""
        done = self.ticks.step()
        self.deliver()
        return done

    def deliver(self) -> None:
        for one in self.materializers:
            while one.deliver():
                pass

    def run(self) -> None:
        while self.step() is not None:
            pass
        self.deliver()

    def documents(self) -> Documents:
        """What a reader of the destination sees."""
        return read_documents(self.project.folder / "out.db")

    def verdicts(self) -> list[Verdict]:
        """What `tidegate verify` says of each materialization."""
        named = zip(self.project.file.materializations, self.materializers, strict=True)
        return [
            verify(self._spark, self.catalog, self._views[one.view], self.defined, running.spec, one.to)
            for one, running in named
        ]

    def close(self) -> None:
        for one in self.materializers:
            one.close()
        self.catalog.close()


def read_rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    """What a reader of a SQLite destination gets; nothing before its first tick."""
    if not path.exists():
        return []
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def read_documents(path: Path) -> Documents:
    columns = "id, customer, order_date, status, total, line_count, lines"
    rows = read_rows(path, f"SELECT {columns} FROM orders_with_lines")
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
