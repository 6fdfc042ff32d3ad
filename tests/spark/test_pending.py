"""What was pending when a run died does not stay for ever, and what is still needed is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.crash.events import MadeUpShop, Record, write_growing_project
from tests.pipeline import bench


def write(project: Path, number: int, records: list[Record]) -> None:
    (project / "events").mkdir(exist_ok=True)
    (project / "events" / f"{number}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def test_what_dead_runs_left_pending_goes_and_a_transaction_that_waits_keeps_its_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, shop = write_growing_project(tmp_path, 1_000), MadeUpShop(6)
    pending, records = project / ".tidegate" / "pending", shop.transactions(3)
    write(project, 1, records[:-1])  # the END of the third is still to come
    with bench(spark, project) as one:
        one.step()
        one.step()
        waiting = {path.name for path in pending.iterdir()}
    assert waiting
    left = {".000000000000-0.arrow.77", ".000000000009-1.arrow.78"}
    for name in left:
        (pending / name).touch()
    real = Path.iterdir
    with monkeypatch.context() as patch, bench(spark, project) as one:
        assert {path.name for path in real(pending)} == waiting
        write(project, 2, records[-1:])
        one.arrive()
        one.run()
        assert one.documents() == shop.states[-1]
        (pending / "000000000000-0.arrow").touch()
        (pending / "lost+found").mkdir()
        # a run that is fenced off removes one of its own between the listing and the removal
        patch.setattr(Path, "iterdir", lambda folder: [*real(folder), folder / "000000000000-8.arrow"])
        one.ticks.recover()
        assert {path.name for path in real(pending)} == {"lost+found"}
