"""A table's rows follow its events; a value that was never sent is never made up."""

from __future__ import annotations

import pytest

from tidegate.capture.debezium import Op
from tidegate.capture.values import UNAVAILABLE
from tidegate.collections.tables import Event, Rows, follow, moved_rows
from tidegate.errors import FixConfiguration

PARTIAL = f'{{"id":1,"a":2,"b":"{UNAVAILABLE}"}}'.encode()


class Memory(Rows):
    """Rows in a dictionary."""

    def __init__(self, **rows: bytes) -> None:
        self.rows = {key.encode(): cell for key, cell in rows.items()}

    def getmulti(self, keys):  # type: ignore[no-untyped-def]
        return [self.rows.get(key) for key in keys]

    def scan(self, prefix):  # type: ignore[no-untyped-def]
        return sorted(self.rows.items())

    def putmulti(self, entries):  # type: ignore[no-untyped-def]
        self.rows.update(entries)

    def deletemulti(self, keys):  # type: ignore[no-untyped-def]
        for key in keys:
            self.rows.pop(key)


def test_a_row_that_comes_in_part_is_completed_from_its_previous_cell() -> None:
    rows = Memory(k=b'{"id":1,"a":1,"b":"large"}')
    follow("t", rows, [Event(5, 1, Op.PARTIAL, b"k", PARTIAL)])
    assert rows.rows == {b"k": b'{"id":1,"a":2,"b":"large"}'}


@pytest.mark.parametrize("rows", [Memory(), Memory(k=b'{"id":1,"a":1}')])
def test_a_value_that_no_record_held_is_refused_also_if_its_column_was_declared_later(rows: Memory) -> None:
    with pytest.raises(FixConfiguration) as refused:
        follow("t", rows, [Event(5, 1, Op.PARTIAL, b"k", PARTIAL)])
    assert refused.value.message == (
        'table "t", transaction number 5: the value of b was not sent (it is stored out of line and unchanged), and no'
        " record before it had it"
    )
    assert "REPLICA IDENTITY FULL" in refused.value.remedy


# --- a row under another key, without its large value


def moved(position: int, order: int, former: bytes, key: bytes, number: int) -> list[Event]:
    """A primary-key update, as Debezium tells it."""
    cell = f'{{"id":{number},"a":2,"b":"{UNAVAILABLE}"}}'.encode()
    return [Event(position, order, Op.DELETE, former, None), Event(position, order + 1, Op.MOVED, key, cell)]


def test_a_row_under_another_key_is_completed_from_the_row_under_its_former_key() -> None:
    former = {b"k": b'{"id":1,"a":1,"b":"large"}'}
    assert moved_rows("t", former, moved(5, 3, b"k", b"l", 2)) == {(5, 4): b'{"id":2,"a":2,"b":"large"}'}


def test_it_may_move_on_and_on_and_its_events_may_come_twice() -> None:
    first, partial = Event(4, 1, Op.UPSERT, b"k", b'{"id":1,"a":1,"b":"old"}'), Event(5, 1, Op.PARTIAL, b"k", PARTIAL)
    steps = [first, partial, *moved(5, 2, b"k", b"l", 2), *moved(5, 4, b"l", b"m", 3), *moved(6, 1, b"m", b"k", 1)]
    assert moved_rows("t", {}, [one for one in steps for _ in range(2)]) == {
        (5, 3): b'{"id":2,"a":2,"b":"old"}',
        (5, 5): b'{"id":3,"a":2,"b":"old"}',
        (6, 2): b'{"id":1,"a":2,"b":"old"}',
    }


@pytest.mark.parametrize(
    "before",
    [
        [Event(5, 1, Op.DELETE, b"k", None)],
        [Event(4, 2, Op.DELETE, b"k", None)],
        [Event(5, 1, Op.TRUNCATE, b"", None), Event(5, 2, Op.DELETE, b"k", None)],
    ],
)
def test_only_the_row_that_the_event_before_it_deleted_is_its_former_one(before: list[Event]) -> None:
    former = {b"k": b'{"id":1,"a":1,"b":"large"}'}
    with pytest.raises(FixConfiguration, match="the value of b was not sent"):
        moved_rows("t", former, [*before, moved(5, 2, b"", b"l", 2)[1]])
