"""What `run` refuses before it starts, `check` refuses too."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from tests.acceptance.test_bad_input import Recorded
from tests.pipeline import write_files
from tests.shell import Shell

from tidegate.embedded.postgres import EmbeddedPostgres

DESTINATION = "to: sqlite, path: out.db, table: orders_with_lines"
OWN_NAME = "Save it under another name: a view is called as its file is"


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


def test_a_view_with_the_name_of_a_declared_table_is_refused_however_it_is_written(recorded: Recorded) -> None:
    (recorded.folder / "views" / "Order_Lines.sql").write_text(
        "SELECT order_id, COUNT(*) AS n FROM order_lines GROUP BY order_id"
    )
    said = f'error: views/Order_Lines.sql: there is a table "order_lines" already\n  remedy: {OWN_NAME}.\n'
    assert recorded.refused("check") == said
    assert recorded.refused() == said
    (recorded.folder / "views" / "Order_Lines.sql").unlink()
    recorded.goes_on()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path / "postgres", settings={"fsync": "off"}) as running:
        with psycopg.connect(running.dsn()) as connection:
            connection.execute("CREATE TABLE notes (id int PRIMARY KEY, text text)")
            connection.execute("INSERT INTO notes VALUES (1, 'first')")
        yield running


@pytest.mark.timeout(240)
def test_a_view_with_the_name_of_a_captured_table_is_refused(
    tmp_path: Path, shell: Shell, server: EmbeddedPostgres
) -> None:
    project = "name: away\nsource: {kind: postgres, dsn: '${SHOP_DSN}', tables: [notes]}\n"
    folder = write_files(
        tmp_path / "shop", project, notes="SELECT id, text, COUNT(*) AS n FROM notes GROUP BY id, text"
    )
    for words in (["check"], ["run", "--until-idle"]):
        refused = shell(*words, "--project", folder, SHOP_DSN=server.dsn())
        assert refused.code == 2, refused.err
        assert refused.err.endswith(f'views/notes.sql: there is a table "notes" already\n  remedy: {OWN_NAME}.\n')
