"""Ctrl-C, twice, SIGTERM, and a second run: each ends a run as it should, says so in a line, and leaves all whole."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.crash.events import MadeUpShop, Recording, record, write_growing_project
from tests.crash.following import Follower, sqlite_reader
from tests.crash.program import Program, Running, program, wait_until

INTERRUPTED = 130
ENDING = "ending after the round under way; once more ends at once\n"


@dataclass(frozen=True)
class Scene:
    """A recording that grows all the while, and a reader of the destination."""

    program: Program
    shop: MadeUpShop
    follower: Follower


@contextmanager
def scene(folder: Path, seed: int) -> Iterator[Scene]:
    """At its end all that was recorded has arrived, `verify` says equal, and the reader has seen nothing strange."""
    project, shop = write_growing_project(folder, 200), MadeUpShop(seed)
    record(project, shop, 40)
    follower = Follower(sqlite_reader(project / "out.db"), shop.states)
    with program(project) as one, follower.following():
        with Recording(project, shop):
            yield Scene(one, shop, follower)
        code, run = one.run_until_idle()
        assert code == 0, run.told()
        one.verify()
    follower.assert_at_the_end()


def assert_said_in_a_line(run: Running, expected: str) -> None:
    assert run.complaints() == expected
    run.await_nothing_left()
    assert run.complaints() == expected, "what was left of it wrote after it had ended"


@pytest.mark.timeout(300)
def test_one_interrupt_or_sigterm_ends_cleanly_and_two_end_at_once(tmp_path: Path) -> None:
    with scene(tmp_path, 1) as stage:
        run = stage.program.run()
        run.await_delivery()
        run.interrupt()
        assert run.end() == 0
        assert_said_in_a_line(run, ENDING)

        run = stage.program.run()
        run.await_delivery()
        run.terminate()
        assert run.end() == 0
        assert_said_in_a_line(run, ENDING)

        run = stage.program.run()
        run.await_delivery()
        run.interrupt()
        wait_until(lambda: run.complaints() == ENDING, 5, "the first was heard")
        run.interrupt()
        assert run.end(5) in (0, INTERRUPTED)
        assert_said_in_a_line(run, ENDING)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 4))
def test_an_interrupt_at_any_moment_ends_cleanly(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with scene(tmp_path, seed) as stage:
        for _ in range(10):
            seconds, times = chance.uniform(1.5, 12.0), chance.randint(1, 2)
            run = stage.program.run()
            time.sleep(seconds)
            run.interrupt()
            wait_until(lambda run=run: run.complaints() == ENDING, 5, f"heard after {seconds:.2f} s")  # type: ignore[misc]
            if times == 2:
                run.interrupt()
            assert run.end() in (0, INTERRUPTED)[:times], (seconds, run.told())
            assert_said_in_a_line(run, ENDING)
