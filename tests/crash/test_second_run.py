"""Two runs over one state folder: one of them ends and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.crash.events import MadeUpShop, Recording, record, write_growing_project
from tests.crash.following import Follower, sqlite_reader
from tests.crash.program import Running, program, wait_until
from tests.pipeline import read_rows, write_files

from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.errors import Fenced, FixConfiguration


def ticks(run: Running, kind: str) -> list[int]:
    return [one["tick"] for one in run.events(kind)]


@pytest.mark.timeout(300)
def test_of_two_runs_one_ends_with_code_4_and_writes_nothing(tmp_path: Path) -> None:
    project, shop = write_growing_project(tmp_path, 200), MadeUpShop(3)
    record(project, shop, 10)
    follower = Follower(sqlite_reader(project / "out.db"), shop.states)
    with program(project) as one, follower.following():
        with Recording(project, shop):
            first = one.run()
            first.await_delivery()
            second = one.run()
            wait_until(lambda: not (first.is_running and second.is_running), 60, "one of the two ends")
            fenced, left = (second, first) if first.is_running else (first, second)
            assert fenced.end() == Fenced.exit_code, fenced.told()
            assert "remedy:" in fenced.complaints()
            assert "Traceback" not in fenced.complaints()
            left.await_delivery()
            left.await_delivery()
            left.interrupt()
            assert left.end() == 0, left.told()
        for kind in ("tick", "delivered"):
            assert not set(ticks(fenced, kind)) & set(ticks(left, kind)), f"both wrote: {kind}"
            assert max(ticks(fenced, kind)) < min(ticks(left, kind))
        code, run = one.run_until_idle()
        assert code == 0, run.told()
        one.verify()
    follower.assert_at_the_end()


def refusal(run: Running) -> str:
    """What it said, of a run that was refused."""
    assert run.end() == FixConfiguration.exit_code, run.told()
    return run.complaints()


@pytest.mark.timeout(300)
def test_a_second_run_that_is_refused_leaves_the_first_alone(tmp_path: Path) -> None:
    project, shop = write_growing_project(tmp_path, 200), MadeUpShop(4)
    file, view = project / "tidegate.yaml", project / "views" / "orders_with_lines.sql"
    settings, query = file.read_text(), view.read_text()
    record(project, shop, 10)
    with program(project) as one:
        first = one.run()
        first.await_delivery()
        view.write_text(query.replace("po.status", "po.stat"))
        assert "stat" in refusal(one.run())
        view.write_text(query.replace("ol.quantity * ol.price", "ol.quantity"))
        assert 'view "orders_with_lines" has changed' in refusal(one.run())
        view.write_text(query)
        file.write_text(settings.replace("events/*.jsonl", "event/*.jsonl"))
        assert "no file matches" in refusal(one.run())
        file.write_text(settings.replace("path: out.db", "path: nowhere/out.db"))
        assert "nowhere" in refusal(one.run())
        file.write_text(settings)
        record(project, shop, 1)
        first.await_that(lambda: sqlite_reader(project / "out.db")() == shop.states[-1], "what came is there", 60)
        first.interrupt()
        assert first.end() == 0, first.told()
        one.verify()


@pytest.mark.timeout(300)
def test_a_second_run_waits_for_the_first_to_end_its_tick_however_long_that_takes(tmp_path: Path) -> None:
    project, shop = write_growing_project(tmp_path, 200), MadeUpShop(5)
    record(project, shop, 10)
    follower = Follower(sqlite_reader(project / "out.db"), shop.states)
    with program(project) as one, follower.following():
        first = one.run()
        first.await_delivery()
        with first.held():
            record(project, shop, 3)
            second = one.run()
            second.await_that(lambda: bool(second.events("trouble")), "it says that the log is in use", 90)
            assert "another process writes to the log" in second.events("trouble")[0]["error"]
            assert first.is_running
        assert first.end() == Fenced.exit_code, first.told()
        second.await_that(lambda: bool(sqlite_reader(project / "out.db")() == shop.states[-1]), "it goes on", 60)
        assert second.events("trouble")[-1]["error"] is None
        second.interrupt()
        assert second.end() == 0, second.told()
        one.verify()
    follower.assert_at_the_end()


PROJECT = """
name: two_runs
spark: {master: "local[2]"}
source: {kind: postgres, dsn: "${SHOP_DSN}", tables: [notes]}
materializations:
  - {view: copies, to: sqlite, path: out.db, table: copies}
"""
COPIES = "SELECT n.id, n.text, COUNT(*) AS copies FROM notes n GROUP BY n.id, n.text"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(tmp_path / "postgres", settings={"fsync": "off"})
    postgres.start()
    yield postgres
    postgres.remove()


def note(server: EmbeddedPostgres, number: int) -> None:
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("INSERT INTO notes VALUES (%s, 'noted')", [number])


def notes(project: Path) -> list[int]:
    return [row[0] for row in read_rows(project / "out.db", "SELECT id FROM copies ORDER BY id")]


@pytest.mark.timeout(300)
def test_of_two_runs_that_follow_a_server_one_ends_with_code_4_and_the_other_goes_on(
    tmp_path: Path, server: EmbeddedPostgres
) -> None:
    """The engine of the one has to let go of the log and of the slot before the other's can begin."""
    project = write_files(tmp_path / "project", PROJECT, copies=COPIES)
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("CREATE TABLE notes (id int PRIMARY KEY, text text)")
    note(server, 1)
    with program(project, {"SHOP_DSN": server.dsn()}) as one:
        first = one.run()
        first.await_delivery()
        mistyped = one.run(environment={"SHOP_DSN": server.dsn(password="mistyped")})
        assert "password authentication failed" in refusal(mistyped)
        note(server, 2)
        first.await_that(lambda: notes(project) == [1, 2], "the first one delivers what comes", 60)
        second = one.run()
        wait_until(lambda: not (first.is_running and second.is_running), 90, "one of the two ends")
        fenced, left = (second, first) if first.is_running else (first, second)
        assert fenced.end() == Fenced.exit_code, fenced.told()
        assert "Traceback" not in fenced.complaints()
        note(server, 3)
        wait_until(lambda: notes(project) == [1, 2, 3], 150, "the other one delivers what comes")
        left.interrupt()
        assert left.end() == 0, left.told()
