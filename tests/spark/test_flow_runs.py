"""A project's views of all kinds over recorded events: through restarts, lost state, new views and other partitions."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import recordings
from tests.pipeline import VIEW, Bench, bench, write_files
from tests.recordings import Record

from tidegate.errors import FixConfiguration

PROJECT = """
name: shop
spark: {master: "local[2]"}
source: {kind: files, topic_prefix: shop, path: "events/*.jsonl.gz"}
tables:
  purchase_orders:
    topic: shop.public.purchase_orders
    key: [id]
    columns: {id: bigint, customer: bigint, order_date: date, status: string}
  order_lines:
    topic: shop.public.order_lines
    key: [id]
    columns: {id: bigint, order_id: bigint, item: string, quantity: int, price: "decimal(12,4)"}
materializations:
MATERIALIZATIONS
tick: {max_events: 20, every_ms: 0}
"""
VIEWS = {
    "orders_with_lines": VIEW,
    "by_status": """SELECT status, count(*) AS orders, sum(total) AS total, max(line_count) AS longest
        FROM orders_with_lines GROUP BY status""",
    "large": "SELECT TRANSACTIONALLY l.id, upper(l.item) AS item, po.status FROM order_lines l"
    " LEFT JOIN purchase_orders po ON po.id = l.order_id WHERE l.quantity * l.price > 10",
    "totals": "SELECT TRANSACTIONALLY count(*) AS lines, sum(quantity * price) AS total FROM order_lines",
    "dearest": """SELECT order_id, id, price FROM (
        SELECT *, row_number() OVER (PARTITION BY order_id ORDER BY price DESC, id) AS place FROM order_lines)
        WHERE place <= 2""",
}


def records() -> list[Record]:
    """The recommended run without its one long transaction."""
    return [one for one in recordings.load("events_recommended_raw") if not _is_long(one)]


def _is_long(record: Record) -> bool:
    value = json.loads(record["value"] or "{}")
    transaction = value.get("transaction") or (value if record["topic"].endswith(".transaction") else {})
    return str(transaction.get("id", "")).startswith("769:")


def write(folder: Path, *views: str) -> Path:
    listed = "\n".join(f"  - {{view: {name}, to: sqlite, path: out.db, table: {name}}}" for name in views)
    project = PROJECT.replace("MATERIALIZATIONS", listed)
    return write_files(folder, project, **{name: VIEWS[name] for name in views})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    recordings.write(tmp_path / "events/all.jsonl.gz", records(), 2, random.Random(3))
    return write(tmp_path, *VIEWS)


def steps(one: Bench, count: int) -> None:
    for _ in range(count):
        one.step()


def assert_equal(one: Bench) -> None:
    verdicts = one.verdicts()
    assert [(verdict.materialization, verdict.examples) for verdict in verdicts if not verdict.equal] == []


def test_views_of_all_kinds_follow_and_are_equal_after_any_tick(spark: SparkSession, project: Path) -> None:
    with bench(spark, project) as one:
        steps(one, 6)
        assert_equal(one)
        one.run()
        assert_equal(one)


def test_stages_that_are_lost_are_filled_again_and_go_on(spark: SparkSession, project: Path) -> None:
    chance, folder = random.Random(7), project / ".tidegate" / "arrangements"
    with bench(spark, project) as one:
        steps(one, 5)
    for lost in (None, "large#0", "by_status#1", "order_lines"):
        gone = folder if lost is None else chance.choice(list((folder / lost).iterdir()))
        shutil.rmtree(gone)
        with bench(spark, project) as one:
            steps(one, 3)
            assert_equal(one)
    with bench(spark, project) as one:
        one.run()
        assert_equal(one)


def test_another_number_of_partitions_gives_the_same_rows(spark: SparkSession, project: Path) -> None:
    for partitions in (2, 5, 1):
        with bench(spark, project, partitions) as one:
            steps(one, 4)
            assert_equal(one)
    with bench(spark, project, 3) as one:
        one.run()
        assert_equal(one)


def test_a_tick_that_was_cut_off_is_repeated_with_other_views(spark: SparkSession, project: Path) -> None:
    """What a stage has sent before the end was meant for the views that there were."""
    write(project, "orders_with_lines", "large", "dearest")
    (project / "views" / "twice.sql").write_text("-- key: quantity\nSELECT quantity, id FROM order_lines")
    with bench(spark, project) as one, pytest.raises(FixConfiguration, match="two rows have the same key"):
        one.run()
    (project / "views" / "twice.sql").unlink()
    (project / "views" / "another.sql").write_text("SELECT id, lower(item) AS item FROM order_lines WHERE quantity > 1")
    with bench(spark, project) as one:
        one.run()
        assert_equal(one)


def test_a_view_that_is_new_is_filled_from_history_and_follows(spark: SparkSession, project: Path) -> None:
    shutil.rmtree(project / "views")
    write(project, "orders_with_lines", "totals")
    with bench(spark, project) as one:
        steps(one, 6)
    write(project, *VIEWS)
    with bench(spark, project) as one:
        steps(one, 1)
        assert_equal(one)
        one.run()
        assert_equal(one)
