"""Small files of old ticks are merged: few files stay, nothing is lost, and no reader finds its file gone."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import SparkSession
from tests import recordings
from tests.pipeline import Bench, bench, write_project

from tidegate.collections import history
from tidegate.pipeline.merging import KEPT_SECONDS, Merging

FAN_IN = 4
COLLECTIONS = ("purchase_orders", "order_lines", "orders_with_lines")


class Clock:
    seconds = 1e9

    def __call__(self) -> float:
        return self.seconds


def merging_of(spark: SparkSession, one: Bench, clock: Clock) -> Merging:
    return Merging(spark.sparkContext, one.catalog, one.project.state, COLLECTIONS, clock, FAN_IN)


def listed(one: Bench) -> dict[str, list[str]]:
    upto = one.ticks.last_tick
    return {name: [file.path for file in one.catalog.files(name, -1, upto)] for name in COLLECTIONS}


def on_disk(folder: Path) -> dict[str, list[str]]:
    root = folder / ".tidegate" / "history"
    return {name: sorted(map(str, (root / name).iterdir())) for name in COLLECTIONS}


def current_rows(paths: list[str], upto: int) -> dict[bytes, bytes]:
    sums = history.RowSums()
    sums.add_updates(history.read(paths, -1, upto))
    return sums.current("orders_with_lines")


def run_and_merge(one: Bench, merging: Merging) -> int:
    """Runs to the end and merges after each tick; how many files the ticks have written."""
    written, seen = set[str](), 0
    while one.step() is not None:
        written |= {path for paths in listed(one).values() for path in paths}
        merging.merge()
        seen += 1
    assert seen > 4 * FAN_IN
    return len(written)


def test_many_ticks_leave_few_files_and_all_that_was_in_them(spark: SparkSession, tmp_path: Path) -> None:
    records, clock = recordings.load("killA.run1", "killA.run2"), Clock()
    recordings.write(tmp_path / "events/all.jsonl.gz", records, 2, None)
    write_project(tmp_path, max_events=70, price="decimal(10,2)")
    with bench(spark, tmp_path) as one:
        merging = merging_of(spark, one, clock)
        written = run_and_merge(one, merging)
        for _ in range(10):
            merging.merge()
        left = listed(one)
        assert sum(map(len, left.values())) < written / 3
        assert all(len(paths) < 3 * FAN_IN for paths in left.values())
        assert [verdict.equal for verdict in one.verdicts()] == [True]
        clock.seconds += KEPT_SECONDS
        merging.merge()
        assert on_disk(tmp_path) == {name: sorted(paths) for name, paths in left.items()}
    shutil.rmtree(tmp_path / ".tidegate" / "arrangements")
    with bench(spark, tmp_path) as again:
        again.run()
        assert again.documents() == recordings.replayed_truth(records)[-1]
        assert [verdict.equal for verdict in again.verdicts()] == [True]


def test_a_reader_that_has_listed_files_before_a_merge_can_read_them_for_a_while(
    spark: SparkSession, tmp_path: Path
) -> None:
    clock = Clock()
    recordings.write(tmp_path / "events/all.jsonl.gz", recordings.load("events_mariadb"), 2, None)
    write_project(tmp_path, max_events=1, prefix="mshop", schema="shop")
    with bench(spark, tmp_path) as one:
        one.run()
        paths, upto = listed(one)["orders_with_lines"], one.ticks.last_tick
        before = current_rows(paths, upto)
        merging = merging_of(spark, one, clock)
        merging.merge()
        assert listed(one)["orders_with_lines"] != paths
        merging_of(spark, one, clock).merge()  # the next run
        clock.seconds += KEPT_SECONDS / 2
        merging.merge()
        assert current_rows(paths, upto) == before
        clock.seconds += KEPT_SECONDS
        merging_of(spark, one, clock)
        assert on_disk(tmp_path) == {name: sorted(paths) for name, paths in listed(one).items()}
        assert current_rows(listed(one)["orders_with_lines"], upto) == before
