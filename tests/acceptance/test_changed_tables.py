"""Tables of a followed Postgres change while a run goes on: columns come, go, and are of kinds that have no text."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.crash.program import Program, program

from tidegate.embedded.postgres import EmbeddedPostgres

PROJECT = """
name: changing
source: {kind: postgres, topic_prefix: shop, dsn: "${SHOP_DSN}", tables: [items]}
materializations:
  - {view: things, to: sqlite, path: out.db, table: things}
"""
THINGS = "SELECT id, name, COUNT(*) AS copies FROM items GROUP BY id, name"
ADDED = "SELECT id, name, note, size, COUNT(*) AS copies FROM items GROUP BY id, name, note, size"
TABLE = """
CREATE TABLE items (
  id int PRIMARY KEY, name text, at point, doubled int GENERATED ALWAYS AS (id * 2) STORED, flag bit(1)
)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path / "postgres", settings={"fsync": "off"}) as running:
        with psycopg.connect(running.dsn(), autocommit=True) as connection:
            connection.execute(TABLE.encode())
            connection.execute("ALTER TABLE items REPLICA IDENTITY FULL")
            connection.execute("INSERT INTO items (id, name, at, flag) VALUES (1, 'one', '(1,2)', B'1')")
        yield running


def project(folder: Path) -> Path:
    (folder / "views").mkdir(parents=True)
    (folder / "views" / "things.sql").write_text(THINGS)
    (folder / "tidegate.yaml").write_text(PROJECT)
    return folder


def execute(server: EmbeddedPostgres, *statements: str) -> None:
    """All in one transaction."""
    with psycopg.connect(server.dsn(), prepare_threshold=None) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{folder / 'out.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def await_things(one: Program, running: Any, *wanted: tuple[int, str]) -> None:
    def arrived() -> bool:
        return bool(running.events("delivered")) and rows(
            one.project, "SELECT id, name FROM things ORDER BY id"
        ) == list(wanted)

    running.await_that(arrived, f"{wanted} arrived", 90)


@pytest.mark.timeout(300)
def test_a_column_that_comes_or_goes_while_a_run_goes_on_is_followed_from_its_first_row_on(
    tmp_path: Path, server: EmbeddedPostgres
) -> None:
    with program(project(tmp_path / "project"), {"SHOP_DSN": server.dsn()}) as one:
        running = one.run()
        await_things(one, running, (1, "one"))
        execute(server, "ALTER TABLE items ADD COLUMN note text, ADD COLUMN size numeric(6,2)")
        execute(server, "INSERT INTO items (id, name, note, size) VALUES (2, 'two', 'second', 2.5)")
        await_things(one, running, (1, "one"), (2, "two"))
        passing = "ALTER TABLE items ADD COLUMN passing point"
        execute(server, passing, "INSERT INTO items (id, name, passing) VALUES (3, 'three', '(3,3)')")
        execute(server, "ALTER TABLE items DROP COLUMN passing, DROP COLUMN size")
        execute(server, "INSERT INTO items (id, name, note) VALUES (4, 'four', 'fourth')")
        await_things(one, running, (1, "one"), (2, "two"), (3, "three"), (4, "four"))
        running.interrupt()
        assert running.end() == 0, running.told()
        notes = [event["text"] for event in running.events("said")]
        assert 'note: table "items" has a new column: note string' in notes
        one.verify()

        (one.project / "views" / "added.sql").write_text(ADDED)
        with (one.project / "tidegate.yaml").open("a") as file:
            file.write("  - {view: added, to: sqlite, path: out.db, table: added}\n")
        code, again = one.run_until_idle()
        assert code == 0, again.told()
        assert rows(one.project, "SELECT id, note, size FROM added ORDER BY id") == [
            (1, None, None),
            (2, "second", "2.50"),
            (3, None, None),
            (4, "fourth", None),
        ]
        one.verify()


def test_check_says_which_columns_of_a_table_are_left_out(tmp_path: Path, server: EmbeddedPostgres) -> None:
    with program(project(tmp_path / "project"), {"SHOP_DSN": server.dsn()}) as one:
        found = json.loads(one.ask("check", "--json"))
    assert found["tables"][0]["columns"] == {"id": "int", "name": "string", "flag": "boolean"}
    assert any('"items": left out: at, doubled (generated' in warning for warning in found["warnings"])
