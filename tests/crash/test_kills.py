"""kill -9 under load, of every process that takes part: all goes on, and a reader never knows."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.crash.program import Program, Running, program, wait_until
from tests.crash.trade import Reading, Traders, rows_delivered, rows_in_the_shop, write_shop_project

from tidegate.demo.shop import open_shop
from tidegate.embedded.postgres import EmbeddedPostgres

RECOVERY_SECONDS = 120.0


@dataclass
class Scene:
    """A shop in a Postgres, a run that follows it, a reader behind it."""

    server: EmbeddedPostgres
    program: Program
    run: Running
    chance: random.Random

    def pause(self, longest_seconds: float) -> None:
        seconds = self.chance.uniform(0.0, longest_seconds)
        sys.stdout.write(f"{seconds:.3f} s later\n")
        time.sleep(seconds)

    def await_caught_up(self) -> None:
        """What is committed now is delivered."""
        with psycopg.connect(self.server.dsn()) as connection:
            row = connection.execute("SELECT (pg_current_wal_lsn() - '0/0')::bigint").fetchone()
        assert row is not None
        self.run.await_that(lambda: self._delivered(row[0]), f"LSN {row[0]} is delivered", RECOVERY_SECONDS)

    def _delivered(self, lsn: int) -> bool:
        positions = [(one["tick"], one["source_position"]) for one in self.run.events("tick")]
        ticks = [tick for tick, position in positions if position and int(position.split(":")[1]) >= lsn]
        return any(one["tick"] >= ticks[0] for one in self.run.events("delivered")) if ticks else False


@contextmanager
def scene(folder: Path, seed: int) -> Iterator[Scene]:
    """At its end everything is delivered, and equal to the shop's own tables and to what `verify` computes."""
    sys.stdout.write(f"seed {seed}\n")
    server = EmbeddedPostgres(folder / "postgres", settings={"fsync": "off"})
    project = write_shop_project(folder / "project")
    try:
        server.start()
        open_shop(server.dsn(), seed)
        with program(project, {"SHOP_DSN": server.dsn()}) as one, Reading(project / "out.db") as reading:
            with Traders(server.dsn(), seed):
                stage = Scene(server, one, one.run(), random.Random(seed))
                yield stage
            stage.run.interrupt()
            assert stage.run.end() == 0, stage.run.told()
            code, run = one.run_until_idle()
            assert code == 0, run.told()
            assert rows_delivered(project / "out.db") == rows_in_the_shop(server.dsn())
            one.verify()
        reading.assert_nothing_strange()
    finally:
        server.remove()


# --- who is killed


def kill_run(stage: Scene) -> None:
    stage.run.kill()
    stage.run = stage.program.run()


def kill_capture(stage: Scene) -> None:
    """The run starts another."""
    wait_until(lambda: stage.run.capture() is not None, RECOVERY_SECONDS, "there is a capture")
    victim = stage.run.capture()
    assert victim is not None
    kill(victim)


def kill_worker(stage: Scene) -> None:
    """Spark starts another, and the job is repeated."""
    wait_until(lambda: bool(stage.run.workers()), RECOVERY_SECONDS, "there is a worker")
    kill(stage.chance.choice(stage.run.workers()))


def kill_postgres(stage: Scene) -> None:
    stage.server.kill()
    stage.pause(2.0)
    stage.server.start()


def kill(victim: psutil.Process) -> None:
    victim.kill()
    wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, 10, "it is dead")


KILLS: tuple[Callable[[Scene], None], ...] = (kill_worker, kill_capture, kill_postgres, kill_run)
MOMENTS = 10


@pytest.mark.timeout(600)
def test_each_process_may_be_killed_under_load(tmp_path: Path) -> None:
    with scene(tmp_path, 11) as stage:
        stage.run.await_delivery()
        for kill_one in KILLS:
            sys.stdout.write(f"{kill_one.__name__}\n")
            stage.pause(2.0)
            kill_one(stage)
            stage.await_caught_up()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("kill_one", KILLS)
def test_a_process_may_be_killed_at_any_ten_moments(
    tmp_path: Path, kill_one: Callable[[Scene], None], seed: int
) -> None:
    """Most moments are in the midst of the recovery from the kill before; some come when all is well again."""
    with scene(tmp_path, seed) as stage:
        for moment in range(MOMENTS):
            stage.pause(10.0)
            kill_one(stage)
            if moment % 4 == 3:
                stage.await_caught_up()
        stage.await_caught_up()
