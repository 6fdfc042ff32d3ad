"""How a table follows its row events: in commit order, over its own previous rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tidegate.capture.debezium import Op, completed, never_sent
from tidegate.collections.history import Update
from tidegate.errors import FixConfiguration
from tidegate.model.cell import Cell
from tidegate.model.key import KeyBytes


class Event(NamedTuple):
    """A row event that is sealed: its transaction's position, and its number within it."""

    position: int
    order: int
    op: int
    key: KeyBytes
    cell: Cell | None


class Rows(Protocol):
    """The table's rows before the tick, by key."""

    def getmulti(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]: ...

    def putmulti(self, entries: Iterable[tuple[bytes, bytes]]) -> None: ...

    def deletemulti(self, keys: Iterable[bytes]) -> None: ...


FIRST_ORDER = -1  # of the truncate that a snapshot begins with


def follow(table: str, rows: Rows, events: Sequence[Event]) -> list[Update]:
    """Applies events (in order of position and number) to the rows, and says per transaction what changed.

    A repeated event is passed over. An upsert of a row that is there replaces it, whatever the event calls itself.
    """
    keys = sorted({event.key for event in events if event.op != Op.TRUNCATE})
    before = dict(zip(keys, rows.getmulti(keys), strict=True))
    current: dict[KeyBytes, Cell | None] = dict(before)
    if any(event.op == Op.TRUNCATE for event in events):
        before = {**dict(rows.scan(b"")), **{key: cell for key, cell in before.items() if cell is None}}
        current = dict(before)
    updates: list[Update] = []
    for transaction in _by_transaction(events):
        updates += _transaction(table, current, transaction)
    _store(rows, before, current)
    return updates


def moved_rows(table: str, former: Mapping[KeyBytes, Cell], events: Sequence[Event]) -> dict[tuple[int, int], Cell]:
    """The whole rows of the events (in order) that brought a row under another key, by position and number.

    `former` are the rows before the tick under the keys that `events` take such rows away from.
    """
    current, found = dict(former), dict[tuple[int, int], Cell]()
    last: tuple[int, int, KeyBytes] | None = None
    left: tuple[int, int, Cell | None] | None = None  # the number after that of a delete, and the row it took away
    for position, order, op, key, cell in events:
        if (position, order, key) == last:
            continue
        last = (position, order, key)
        if op == Op.TRUNCATE:
            current.clear()
        elif cell is None:
            left = (position, order + 1, current.pop(key, None))
        elif op == Op.MOVED:
            previous = left[2] if left and left[:2] == (position, order) else None
            found[position, order] = current[key] = _whole(table, cell, previous, position)
        else:
            current[key] = _whole(table, cell, current.get(key), position) if op == Op.PARTIAL else cell
    return found


def _by_transaction(events: Sequence[Event]) -> Iterable[Sequence[Event]]:
    start = 0
    for place in range(1, len(events) + 1):
        if place == len(events) or events[place].position != events[start].position:
            yield events[start:place]
            start = place


def _transaction(table: str, current: dict[KeyBytes, Cell | None], events: Sequence[Event]) -> Iterable[Update]:
    position = events[0].position
    if len(events) == 1 and events[0].op == Op.UPSERT:
        key, cell = events[0].key, events[0].cell
        old = current.get(key)
        current[key] = cell
        return _difference(key, position, old, cell)
    before = _apply(table, current, events)
    return [update for key, old in before.items() for update in _difference(key, position, old, current.get(key))]


def _apply(table: str, current: dict[KeyBytes, Cell | None], events: Sequence[Event]) -> dict[KeyBytes, Cell | None]:
    """Applies one transaction's events; returns the touched rows as they were before it."""
    before: dict[KeyBytes, Cell | None] = {}
    last: tuple[int, KeyBytes] | None = None
    for position, order, op, key, cell in events:
        if (order, key) == last:
            continue
        last = (order, key)
        if op == Op.TRUNCATE:
            for each, old in current.items():
                before.setdefault(each, old)
            current.update(dict.fromkeys(current))
            continue
        old = current.get(key)
        before.setdefault(key, old)
        assert op != Op.MOVED, "it is made whole before it comes to its key's partition"
        current[key] = _whole(table, cell, old, position) if op == Op.PARTIAL else cell
    return before


def _whole(table: str, cell: Cell | None, previous: Cell | None, position: int) -> Cell:
    assert cell is not None
    missing = never_sent(cell, previous)
    if previous is None or missing:
        raise FixConfiguration(
            f'table "{table}", transaction number {position}: the value of {", ".join(missing)} was not sent (it is'
            " stored out of line and unchanged), and no record before it had it",
            remedy=f"ALTER TABLE {table} REPLICA IDENTITY FULL, and take a new snapshot.",
        )
    return completed(cell, previous)


def _difference(key: KeyBytes, position: int, old: Cell | None, new: Cell | None) -> list[Update]:
    if old == new:
        return []
    left = [] if old is None else [Update(key, position, -1, old)]
    return left if new is None else [*left, Update(key, position, 1, new)]


def _store(rows: Rows, before: dict[KeyBytes, Cell | None], current: dict[KeyBytes, Cell | None]) -> None:
    changed = sorted(key for key, cell in current.items() if cell != before.get(key))
    rows.putmulti([(key, cell) for key in changed if (cell := current[key]) is not None])
    rows.deletemulti([key for key in changed if current[key] is None])
