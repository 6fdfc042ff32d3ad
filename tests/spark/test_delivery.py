"""What a destination is told of where it is, and that it takes rounds only from the state folder that it belongs to."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.acceptance.test_trouble_outside import event, transaction
from tests.pipeline import Bench, bench, read_rows, write_files

from tidegate.cli.show import Lines
from tidegate.destinations.sqlite import SqliteTransactor
from tidegate.errors import Fenced, FixConfiguration
from tidegate.pipeline import runner
from tidegate.pipeline.project import load
from tidegate.pipeline.status import status_of
from tidegate.protocol.messages import StartCommit, StartedCommit

PROJECT = """
name: shop
source: {kind: files, topic_prefix: shop, path: "events/*.jsonl.gz"}
tables:
  order_lines: {key: [id], columns: {id: bigint, order_id: bigint, quantity: int}}
materializations:
  - {view: counts, to: sqlite, path: out.db, table: counts}
"""
VIEW = "SELECT order_id, COUNT(*) AS n FROM order_lines GROUP BY order_id"
EMPTY = "".join(
    event("shop.transaction", {"id": "701:20", "ts_ms": 1, **said})
    for said in ({"status": "BEGIN"}, {"status": "END", "event_count": 0, "data_collections": []})
)
CHECKPOINT = "SELECT checkpoint FROM tidegate_checkpoints"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project of which one transaction has been delivered."""
    write_files(tmp_path, PROJECT, counts=VIEW)
    (tmp_path / "events").mkdir()
    record(tmp_path, 700, 10)
    return tmp_path


def record(folder: Path, xid: int, first: int, count: int = 2) -> None:
    with gzip.open(folder / "events" / f"{xid}.jsonl.gz", "wt") as file:
        file.writelines(transaction(xid, first, count))


def deliver_all(spark: SparkSession, folder: Path) -> None:
    with bench(spark, folder) as one:
        one.run()


def refused_late(one: Bench, ticks: int) -> str:
    """What is said when the destination is reached only after so many ticks, as if it had been away."""
    for _ in range(ticks):
        assert one.ticks.step()
    with pytest.raises(FixConfiguration) as refused:
        one.deliver()
    return refused.value.message


def checkpoint(folder: Path) -> dict[str, object]:
    ((text,),) = read_rows(folder / "out.db", CHECKPOINT)
    found: dict[str, object] = json.loads(text)
    return found


def test_a_checkpoint_names_the_source_position_up_to_which_all_is_there(spark: SparkSession, folder: Path) -> None:
    deliver_all(spark, folder)
    assert (checkpoint(folder)["tick"], checkpoint(folder)["position"]) == (0, "700:12")
    record(folder, 701, 20)
    deliver_all(spark, folder)
    assert (checkpoint(folder)["tick"], checkpoint(folder)["position"]) == (1, "701:22")


def test_a_new_state_folder_that_reaches_the_destination_late_is_refused(spark: SparkSession, folder: Path) -> None:
    deliver_all(spark, folder)
    shutil.rmtree(folder / ".tidegate")
    (folder / "events" / "700.jsonl.gz").unlink()
    record(folder, 700, 10, 4)
    with bench(spark, folder) as one:
        assert "which is another one than that tick of the state folder" in refused_late(one, 1)
    assert read_rows(folder / "out.db", "SELECT sum(n) FROM counts") == [(2,)]


def test_an_older_copy_that_reaches_the_destination_late_is_refused(spark: SparkSession, folder: Path) -> None:
    deliver_all(spark, folder)
    shutil.copytree(folder / ".tidegate", folder / "older")
    record(folder, 701, 20)
    deliver_all(spark, folder)
    shutil.rmtree(folder / ".tidegate")
    (folder / "older").rename(folder / ".tidegate")
    (folder / "events" / "701.jsonl.gz").unlink()
    record(folder, 702, 30)
    record(folder, 703, 40)
    with bench(spark, folder) as one:
        assert "which is another one than that tick of the state folder" in refused_late(one, 1)


def test_a_checkpoint_of_an_earlier_version_is_taken_and_its_next_round_fills_it(
    spark: SparkSession, folder: Path
) -> None:
    deliver_all(spark, folder)
    with closing(sqlite3.connect(folder / "out.db", isolation_level=None)) as connection:
        connection.execute("UPDATE tidegate_checkpoints SET checkpoint = json_remove(checkpoint, '$.seal')")
    assert "seal" not in checkpoint(folder)
    record(folder, 701, 20)
    deliver_all(spark, folder)
    assert checkpoint(folder)["seal"]


def test_status_shows_what_is_delivered_although_a_tick_has_changed_nothing(spark: SparkSession, folder: Path) -> None:
    deliver_all(spark, folder)
    assert delivered_ticks(folder) == [0]
    (folder / "events" / "701.jsonl.gz").write_bytes(gzip.compress(EMPTY.encode()))
    with bench(spark, folder) as one:
        one.run()
        assert one.catalog.derived() == 1
        assert delivered_ticks(folder) == [1]
        record(folder, 702, 30)
        one.arrive()
        assert one.ticks.step()
        assert delivered_ticks(folder) == [1], "it is derived, but not delivered"
        one.deliver()
    assert delivered_ticks(folder) == [2]


def delivered_ticks(folder: Path) -> list[int]:
    return [one.tick for one in status_of(load(folder)).materializations]


# --- the last round


def test_a_failure_of_the_last_round_after_an_interrupt_is_told(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is held up until the run has been told to stop and another session has taken its fence."""
    began, fenced = threading.Event(), threading.Event()
    commit = SqliteTransactor.start_commit

    def late(transactor: SqliteTransactor, message: StartCommit) -> StartedCommit:
        began.set()
        assert fenced.wait(60)
        return commit(transactor, message)

    monkeypatch.setattr(SqliteTransactor, "start_commit", late)
    monkeypatch.setattr(runner, "session", lambda _: spark)
    monkeypatch.setattr(runner, "stop_session", lambda _: None)
    run = runner.Run(load(folder), Lines(as_json=False), until_idle=False)

    def interrupt() -> None:
        assert began.wait(60)
        run.stop()
        time.sleep(1)  # the loop has seen it, and waits for the round
        with closing(sqlite3.connect(folder / "out.db", isolation_level=None)) as connection:
            connection.execute("UPDATE tidegate_checkpoints SET fence = fence + 1")
        fenced.set()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(Fenced):
        run.run()
    other.join()
