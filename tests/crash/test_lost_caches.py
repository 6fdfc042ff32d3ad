"""Arrangements and pending files are caches: whatever becomes of them between two runs, the result is the same."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.crash.events import MadeUpShop, record, write_growing_project
from tests.crash.following import Follower, sqlite_reader
from tests.crash.program import program

STATE = ".tidegate"


def files_of(project: Path, folder: str) -> list[Path]:
    found = [path for path in (project / STATE / folder).rglob("*") if path.is_file()]
    assert found, f"{folder} holds nothing that could be lost"
    return sorted(found)


def arrangements_lost(project: Path, chance: random.Random) -> None:
    shutil.rmtree(project / STATE / "arrangements")


def one_arrangement_lost(project: Path, chance: random.Random) -> None:
    shutil.rmtree(chance.choice(files_of(project, "arrangements")).parent)


def arrangements_overwritten(project: Path, chance: random.Random) -> None:
    for path in files_of(project, "arrangements"):
        path.write_bytes(chance.randbytes(path.stat().st_size))


def rows_overwritten(project: Path, chance: random.Random) -> None:
    for path in files_of(project, "arrangements"):
        if path.name == "data.mdb":
            path.write_bytes(chance.randbytes(path.stat().st_size))


def arrangements_cut(project: Path, chance: random.Random) -> None:
    for path in files_of(project, "arrangements"):
        os.truncate(path, path.stat().st_size // 2)


def arrangements_emptied(project: Path, chance: random.Random) -> None:
    for path in files_of(project, "arrangements"):
        os.truncate(path, 0)


def pending_lost(project: Path, chance: random.Random) -> None:
    files_of(project, "pending")
    shutil.rmtree(project / STATE / "pending")


def pending_overwritten(project: Path, chance: random.Random) -> None:
    for path in files_of(project, "pending"):
        path.write_bytes(chance.randbytes(100))


LOSSES: tuple[Callable[[Path, random.Random], None], ...] = (
    arrangements_lost,
    pending_overwritten,
    arrangements_overwritten,
    rows_overwritten,
    pending_lost,
    arrangements_cut,
    one_arrangement_lost,
    arrangements_emptied,
)


@pytest.mark.timeout(400)
def test_caches_that_are_lost_or_damaged_between_runs_are_built_again(tmp_path: Path) -> None:
    chance, project, shop = random.Random(5), write_growing_project(tmp_path, 40), MadeUpShop(5)
    follower = Follower(sqlite_reader(project / "out.db"), shop.states)
    with program(project) as one, follower.following():
        for loss in LOSSES:
            record(project, shop, 10)
            code, run = one.run_until_idle(crash_at="sealed:2")  # rows are pending, a tick is not derived
            assert code < 0, run.told()
            loss(project, chance)
        code, run = one.run_until_idle()
        assert code == 0, run.told()
        one.verify()
    follower.assert_at_the_end()
