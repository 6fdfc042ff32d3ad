"""A table's rows follow its events; a value that was never sent is never made up."""

from __future__ import annotations

import pytest

from tidegate.capture.debezium import Op
from tidegate.capture.values import UNAVAILABLE
from tidegate.collections.tables import Event, Rows, follow
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
