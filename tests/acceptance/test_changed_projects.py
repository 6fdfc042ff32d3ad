"""A project that is changed between two runs: what history can follow goes on, the rest is refused before it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.acceptance.test_bad_input import Recorded
from tests.shell import Shell

ANEW = "begin with a new state folder (`state:`) and new destination tables.\n"


@pytest.fixture
def begun(tmp_path: Path, shell: Shell) -> Recorded:
    """The first project after its first three transactions; the others are still to come."""
    recorded = Recorded(tmp_path / "shop", shell)
    recorded.second.unlink()
    assert recorded.run().code == 0
    return recorded


def go_on(recorded: Recorded) -> None:
    recorded.write(recorded.second, recorded.rest)
    recorded.goes_on()


def test_a_table_that_is_declared_late_is_refused_if_it_has_had_records(begun: Recorded) -> None:
    order = json.loads(next(line for line in begun.lines if '"shop.public.purchase_orders"' in line))
    passed_over = json.dumps({**order, "topic": "shop.public.returns"})
    begun.write(begun.folder / "events" / "0.jsonl", [passed_over])
    assert begun.run().code == 0
    begun.change("  order_lines: {", "  returns: {key: [id], columns: {id: bigint}}\n  order_lines: {")
    assert begun.refused() == (
        'error: table "returns" was not there when the state folder was begun, and its topic shop.public.returns has'
        f" 1 records that no tick has read with their transactions\n  remedy: Take the table out again, or {ANEW}"
    )
    begun.change("  returns: {key: [id], columns: {id: bigint}}\n", "")
    go_on(begun)


def test_a_table_that_is_declared_before_its_first_record_is_taken(begun: Recorded) -> None:
    begun.change("  order_lines: {", "  returns: {key: [id], columns: {id: bigint}}\n  order_lines: {")
    go_on(begun)


def test_a_column_that_is_declared_late_is_refused_if_records_that_were_read_have_it(begun: Recorded) -> None:
    begun.change(", item: string", "")
    view = begun.folder / "views" / "orders_with_lines.sql"
    text = view.read_text()
    view.write_text(text.replace(", ol.item", ""))
    begun.change("table: orders_with_lines", "table: again, name: again")
    shutil.rmtree(begun.folder / ".tidegate")
    assert begun.run().code == 0
    begun.change("order_id: bigint", "order_id: bigint, item: string")
    assert begun.refused() == (
        'error: table "order_lines": the column "item" is new here, but records that were read before hold it'
        f" (topic shop.public.order_lines, partition 0)\n  remedy: Take the column out again, or {ANEW}"
    )


def test_a_view_that_was_away_for_a_while_is_refused(begun: Recorded) -> None:
    counts = begun.folder / "views" / "counts.sql"
    counts.write_text("SELECT order_id, COUNT(*) AS n FROM order_lines GROUP BY order_id")
    assert begun.run().code == 0
    counts.unlink()
    assert begun.run().code == 0
    counts.write_text("SELECT order_id, COUNT(*) AS n FROM order_lines GROUP BY order_id")
    assert begun.refused() == (
        'error: view "counts" was taken out of the project and is put back: it lacks what happened in between\n'
        f"  remedy: Save it under another name (a new view is filled from history), or {ANEW}"
    )
    counts.rename(counts.with_name("counts_again.sql"))
    go_on(begun)


def test_a_name_stays_that_of_a_table_or_of_a_view(begun: Recorded) -> None:
    begun.change("  order_lines: {", "  returns: {key: [id], columns: {id: bigint}}\n  order_lines: {")
    assert begun.run().code == 0
    begun.change("  returns: {key: [id], columns: {id: bigint}}\n", "")
    view = begun.folder / "views" / "returns.sql"
    view.write_text("SELECT order_id, COUNT(*) AS n FROM order_lines GROUP BY order_id")
    said = (
        'error: "returns" was the name of a table when the state folder was begun\n'
        f"  remedy: Use another name, or {ANEW}"
    )
    assert begun.refused("check") == said
    assert begun.refused() == said
    view.unlink()
    go_on(begun)


def test_a_view_that_is_changed_is_refused_and_one_that_is_written_otherwise_is_not(begun: Recorded) -> None:
    view = begun.folder / "views" / "orders_with_lines.sql"
    text = view.read_text()
    view.write_text(text.replace("SUM(ol.quantity * ol.price)", "SUM(ol.quantity)"))
    assert begun.refused().startswith('error: view "orders_with_lines" has changed since it was first run\n')
    view.write_text("-- as it was\n" + text.replace("SELECT", "select"))
    go_on(begun)


def test_a_state_folder_may_be_moved(begun: Recorded) -> None:
    begun.folder = begun.folder.rename(begun.folder.with_name("moved"))
    begun.second = begun.folder / "events" / "2.jsonl"
    go_on(begun)
