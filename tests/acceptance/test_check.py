"""What `run` refuses before it starts, `check` refuses too."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.acceptance.test_bad_input import Recorded
from tests.shell import Shell

DESTINATION = "to: sqlite, path: out.db, table: orders_with_lines"


@pytest.fixture
def recorded(tmp_path: Path, shell: Shell) -> Recorded:
    return Recorded(tmp_path / "shop", shell)


def test_a_view_that_has_changed_is_named_before_its_table_is(recorded: Recorded) -> None:
    assert recorded.run().code == 0
    view = recorded.folder / "views" / "orders_with_lines.sql"
    text = view.read_text()
    view.write_text(text.replace("SUM(ol.quantity * ol.price)", "SUM(ol.quantity)"))
    said = recorded.refused("check")
    assert said.startswith('error: view "orders_with_lines" has changed since it was first run\n')
    assert recorded.refused() == said
    view.write_text(text)
    assert recorded("check").code == 0


def test_a_folder_that_is_missing_is_refused(recorded: Recorded) -> None:
    recorded.change("path: out.db", "path: missing/out.db")
    said = (
        'error: SQLite cannot open in "missing/out.db": there is no such folder\n'
        "  remedy: Create its folder, and make it writable for this user.\n"
    )
    assert recorded.refused("check") == said
    assert recorded.refused() == said


def test_a_table_that_lacks_columns_is_refused(recorded: Recorded) -> None:
    with closing(sqlite3.connect(recorded.folder / "out.db")) as connection:
        connection.execute("CREATE TABLE orders_with_lines (id INTEGER NOT NULL PRIMARY KEY)")
    said = recorded.refused("check")
    assert 'cannot take column "customer" (bigint): is missing in a table that Tidegate did not create\n' in said
    assert recorded.refused() == said


def test_two_materializations_of_one_table_are_refused(recorded: Recorded) -> None:
    recorded.change(DESTINATION + "}", DESTINATION + "}\n  - {view: orders_with_lines, name: again, to: sqlite, "
                    "path: ./events/../out.db, table: ORDERS_WITH_LINES}")  # fmt: skip
    said = (
        'error: materializations "orders_with_lines-sqlite" and "again" have the same table: orders_with_lines in'
        " out.db\n  remedy: Give one of them another `table:`.\n"
    )
    assert recorded.refused("check") == said
    assert recorded.refused() == said
    assert not (recorded.folder / "out.db").exists()
    recorded.change("table: ORDERS_WITH_LINES", "table: again")
    recorded.goes_on()
