"""What every catalog promises: one owner, one binding for each tick, and nothing written by who was fenced off."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.catalog.contract import Catalog, HistoryFile, Seal
from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.errors import Fenced
from tidegate.protocol.messages import START
from tidegate.timeline.binding import Binding, OffsetRange, Tick

Open = Callable[[], Catalog]


def binding(tick: int, end: int = 10) -> Binding:
    return Binding(Tick(tick), (OffsetRange("orders", 0, 0, end),))


def seal(tick: int) -> Seal:
    return Seal(Tick(tick), 0, -1, None, None, None, None, b"")


@pytest.fixture(params=[SqliteCatalog])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens one catalog again and again, as processes do."""
    found: list[Catalog] = []

    def open_one() -> Catalog:
        found.append(request.param(tmp_path / "catalog.db"))
        return found[-1]

    yield open_one
    for one in found:
        one.close()


def test_a_tick_is_bound_once_and_who_comes_second_is_told(opened: Open) -> None:
    catalog = opened()
    catalog.take_over()
    assert catalog.bind(binding(0))
    assert not catalog.bind(binding(0, end=99))
    assert not catalog.bind(binding(2)), "a tick is not left out"
    assert catalog.bind(binding(1))
    assert catalog.bindings(0) == [binding(0), binding(1)]


def test_of_two_that_bind_a_tick_at_the_same_time_one_loses(opened: Open) -> None:
    catalog = opened()
    catalog.take_over()
    start = threading.Barrier(4)

    def bind(end: int) -> bool:
        start.wait()
        return catalog.bind(binding(0, end))

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(bind, range(1, 5)))
    assert sorted(won) == [False, False, False, True]
    assert catalog.bindings(0) == [binding(0, end=1 + won.index(True))]


def test_who_takes_over_fences_the_former_owner_off(opened: Open) -> None:
    former, newer = opened(), opened()
    former.take_over()
    assert former.bind(binding(0))
    newer.take_over()
    for write in (
        lambda: former.bind(binding(1)),
        lambda: former.seal(seal(0)),
        lambda: former.derive(Tick(0), [], []),
        lambda: former.set("waiting", "[]"),
        former.check_owner,
    ):
        with pytest.raises(Fenced, match="another process has taken over"):
            write()
    assert newer.bindings(0) == [binding(0)]
    assert (newer.last_seal(), newer.derived(), newer.setting("waiting")) == (None, -1, None)
    newer.seal(seal(0))
    newer.check_owner()


def test_who_never_took_over_writes_nothing(opened: Open) -> None:
    with pytest.raises(Fenced):
        opened().bind(binding(0))


def derived(catalog: Catalog, ticks: int) -> Catalog:
    """A catalog that has come so far."""
    catalog.take_over()
    for tick in range(ticks):
        catalog.seal(replace(seal(tick), source_position=f"70{tick}:5"))
        catalog.derive(Tick(tick), [], [])
    return catalog


def test_a_checkpoint_says_the_source_position_of_its_tick(opened: Open) -> None:
    catalog = derived(opened(), 2)
    catalog.seal(seal(2))
    found = [catalog.checkpoint_at(tick) for tick in (-1, 0, 1, 2)]
    assert found[0] == START
    assert [one and one.position for one in found[1:]] == ["700:5", "701:5", None]
    assert found[3] is None, "it is sealed, but not derived"


def test_a_tick_is_told_from_that_of_a_copy_which_went_another_way(tmp_path: Path) -> None:
    path, copy = tmp_path / "catalog.db", tmp_path / "copy.db"
    catalog = SqliteCatalog(path)
    derived(catalog, 1).close()
    shutil.copy(path, copy)
    catalogs = [SqliteCatalog(path), SqliteCatalog(copy)]
    for one in catalogs:
        one.take_over()
        one.seal(seal(1))
        one.derive(Tick(1), [], [])
    first, second = ([one.checkpoint_at(tick) for one in catalogs] for tick in (0, 1))
    assert first[0] == first[1]
    assert second[0] != second[1]
    for one in catalogs:
        one.close()


def test_a_catalog_of_the_first_format_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = SqliteCatalog(path)
    derived(catalog, 2).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("ALTER TABLE seals DROP COLUMN mark; PRAGMA user_version = 1")
    catalog = SqliteCatalog(path)
    marks = {one.seal for tick in (0, 1) if (one := catalog.checkpoint_at(tick))}
    assert len(marks) == 2
    assert all(marks)
    derived_again = catalog.derived()
    catalog.close()
    assert derived_again == 1


def test_what_is_listed_twice_is_a_bug_and_not_blamed_on_the_disk(opened: Open) -> None:
    catalog = derived(opened(), 1)
    file = HistoryFile("orders", "0.parquet", 1, 1, 1, 1)
    with pytest.raises(sqlite3.IntegrityError):
        catalog.derive(Tick(1), [file, file], [])
    assert catalog.derived() == 0
