"""What every catalog promises: one owner, one binding for each tick, and nothing written by who was fenced off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.catalog.contract import Catalog, Seal
from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.errors import Fenced
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
