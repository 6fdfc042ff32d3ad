"""Recorded Debezium events, replayed: every state a reader can see is one that the database had, in order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import recordings
from tests.pipeline import Bench, bench, write_project
from tests.recordings import Documents


def assert_follows(one: Bench, truth: Sequence[Documents]) -> int:
    """Runs to the end; returns how many different states of the truth were seen on the way."""
    at, seen = -1, set[int]()
    while True:
        done = one.step()
        state = one.documents()
        if state or at >= 0:
            found = next((place for place in range(max(at, 0), len(truth)) if truth[place] == state), None)
            assert found is not None, f"after tick {done} the destination holds a state that never was after {at}"
            at = found
            seen.add(at)
        if done is None:
            break
    assert one.documents() == truth[-1]
    assert not one.ticks.waiting()
    return len(seen)


@pytest.mark.parametrize("partitions", [1, 2, 7])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_a_reader_sees_only_states_that_the_database_had_in_order(
    spark: SparkSession, tmp_path: Path, partitions: int, shuffle: bool
) -> None:
    order = random.Random(partitions) if shuffle else None
    recordings.write(tmp_path / "events/all.jsonl.gz", recordings.load("events_recommended_raw"), partitions, order)
    with bench(spark, write_project(tmp_path, max_events=10)) as one:
        assert assert_follows(one, recordings.recorded_truth()) > 3


def test_one_tick_of_everything_gives_the_last_state(spark: SparkSession, tmp_path: Path) -> None:
    recordings.write(tmp_path / "events/all.jsonl.gz", recordings.load("events_recommended_raw"), 7, random.Random(1))
    with bench(spark, write_project(tmp_path)) as one:
        assert_follows(one, recordings.recorded_truth())
