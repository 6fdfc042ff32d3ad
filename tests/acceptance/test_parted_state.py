"""A state folder and a destination that no longer belong together, because one was lost or set back: refused, whatever
came since, and never passed over in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.acceptance.test_bad_input import Recorded
from tests.shell import Shell

KEPT_REMEDY = (
    "Bring the newest copy of the state folder back, or give the materialization a new name and an empty table.\n"
)
LOST_REMEDY = (
    "Restore a backup of the destination that is not older than the recovery log,"
    " or give the materialization a new name and an empty table, which builds it anew.\n"
)


@pytest.fixture
def begun(tmp_path: Path, shell: Shell) -> Recorded:
    """The first project after its first three transactions; the others are still to come."""
    recorded = Recorded(tmp_path / "shop", shell)
    recorded.second.unlink()
    assert recorded.run().code == 0
    return recorded


def test_a_state_folder_that_is_lost_is_refused_although_the_destination_is_one_round_ahead(begun: Recorded) -> None:
    before = begun.documents()
    state = begun.folder / ".tidegate"
    state.rename(begun.folder / "away")
    begun.write(begun.second, begun.rest)
    said = (
        'error: materialization "orders_with_lines-sqlite": the destination is at tick 0 (round 1), which the state'
        " folder has not reached (the recovery log knows of no round): the catalog was lost, an older copy of it was"
        f" put back, or another project writes under this name\n  remedy: {KEPT_REMEDY}"
    )
    for _ in range(2):
        assert begun.refused() == said
    assert begun.documents() == before
    shutil.rmtree(state)
    (begun.folder / "away").rename(state)
    begun.goes_on()


def test_an_older_copy_of_the_state_folder_is_refused_although_its_next_tick_has_the_same_number(
    begun: Recorded,
) -> None:
    state, older, newest = (begun.folder / name for name in (".tidegate", "older", "newest"))
    shutil.copytree(state, older)
    begun.write(begun.second, begun.rest[:4])
    assert begun.run().code == 0
    state.rename(newest)
    older.rename(state)
    assert "which the state folder has not reached (the recovery log is at tick 0 (round 1))" in begun.refused()
    shutil.rmtree(state)
    newest.rename(state)
    begun.write(begun.folder / "events" / "3.jsonl", begun.rest[4:])
    begun.goes_on()


def test_a_destination_that_is_lost_is_no_equal_one(begun: Recorded) -> None:
    for path in begun.folder.glob("out.db*"):
        path.unlink()
    said = (
        'error: materialization "orders_with_lines-sqlite": the destination knows of no round, but the recovery log is'
        " at tick 0 (round 1): its row in tidegate_checkpoints was lost, or it was restored from a backup\n"
        f"  remedy: {LOST_REMEDY}"
    )
    assert begun.refused("verify") == said
    assert begun.refused() == said
    assert begun.refused("verify") == said


def test_verify_says_so_where_nothing_is_delivered_yet(begun: Recorded) -> None:
    first = "  - {view: orders_with_lines, to: sqlite, path: out.db, table: orders_with_lines}\n"
    later = "  - {view: orders_with_lines, to: sqlite, path: %s, table: later, name: %s}\n"
    begun.change(first, first + later % ("out.db", "beside") + later % ("other.db", "elsewhere"))
    done = begun("verify")
    assert done.code == 0, done.err
    assert done.out == (
        "orders_with_lines-sqlite: equal (tick 0, 2 rows)\n"
        "beside: nothing delivered yet\n"
        "elsewhere: nothing delivered yet\n"
    )
