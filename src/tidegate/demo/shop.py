"""A small shop whose every committed transaction keeps an order's total equal to the sum of its lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import psycopg

SCHEMA = """
CREATE TABLE purchase_orders (
  id bigint PRIMARY KEY, customer bigint NOT NULL, order_date date NOT NULL, status text NOT NULL,
  total numeric(12,2) NOT NULL, version int NOT NULL);
CREATE TABLE order_lines (
  id bigint PRIMARY KEY, order_id bigint NOT NULL, item text NOT NULL, quantity int NOT NULL,
  price numeric(10,2) NOT NULL);
CREATE INDEX ON order_lines (order_id);
CREATE SEQUENCE order_ids;
CREATE SEQUENCE line_ids;
ALTER TABLE purchase_orders REPLICA IDENTITY FULL;
ALTER TABLE order_lines REPLICA IDENTITY FULL;
"""

TOTALS = """
UPDATE purchase_orders AS o SET version = version + 1, total = COALESCE(
  (SELECT SUM(quantity * price) FROM order_lines WHERE order_id = o.id), 0)
WHERE id = ANY(%s) RETURNING id, version
"""

ITEMS = ("anchor", "buoy", "chart", "compass", "lantern", "oar", "rope", "sail", "sextant", "winch")
STATES = ("new", "paid", "packed", "sent")
ORDERS_AT_MOST = 300
ORDERS_AT_LEAST = 100

Cursor = psycopg.Cursor[Any]
Versions = dict[int, int]  # by order; a deleted order has none
Transaction = Callable[[Cursor, Random], Versions]


@dataclass(frozen=True)
class Commit:
    """One committed transaction: when it returned, and which version of which orders it left behind."""

    at_seconds: float
    versions: Versions


@dataclass
class Ledger:
    """What the shop has done so far, told by several threads."""

    committed: int = 0
    rolled_back: int = 0
    _new: list[Commit] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, commit: Commit) -> None:
        with self._lock:
            self.committed += 1
            self._new.append(commit)

    def note_rollback(self) -> None:
        with self._lock:
            self.rolled_back += 1

    def take(self) -> list[Commit]:
        """The commits since the last call."""
        with self._lock:
            taken, self._new = self._new, []
        return taken


def open_shop(dsn: str, seed: int, orders: int = ORDERS_AT_LEAST) -> None:
    """Creates the tables and the orders that are there before anybody follows the shop."""
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(SCHEMA)
        place(cursor, Random(seed), orders)


def place(cursor: Cursor, chance: Random, count: int) -> Versions:
    """New orders, each with one to five lines."""
    cursor.execute("SELECT nextval('order_ids') FROM generate_series(1, %s)", [count])
    ids = [row[0] for row in cursor.fetchall()]
    rows = [(one, chance.randint(1, 500), chance.randint(0, 365)) for one in ids]
    cursor.executemany("INSERT INTO purchase_orders VALUES (%s, %s, date '2026-01-01' + %s::int, 'new', 0, 0)", rows)
    for one in ids:
        _add_lines(cursor, chance, one, chance.randint(1, 5))
    return _total(cursor, ids)


def place_some(cursor: Cursor, chance: Random) -> Versions:
    return place(cursor, chance, chance.randint(1, 3))


def change(cursor: Cursor, chance: Random) -> Versions:
    """Up to three orders get a line more, a line less, or other quantities."""
    ids = _lock(cursor, chance.randint(1, 3))
    for one in ids:
        chance.choice((_add_one_line, _drop_a_line, _change_quantities))(cursor, chance, one)
    return _total(cursor, ids)


def advance(cursor: Cursor, chance: Random) -> Versions:
    """One order's status changes, and none of its lines."""
    ids = _lock(cursor, 1)
    cursor.execute("UPDATE purchase_orders SET status = %s WHERE id = ANY(%s)", [chance.choice(STATES), ids])
    return _total(cursor, ids)


def move(cursor: Cursor, chance: Random) -> Versions:
    """A line moves from one order to another: both documents change, or neither."""
    ids = _lock(cursor, 2)
    if len(ids) == 2:
        chance.shuffle(ids)
        cursor.execute(
            "UPDATE order_lines SET order_id = %s WHERE id = (SELECT max(id) FROM order_lines WHERE order_id = %s)", ids
        )
    return _total(cursor, ids)


def remove(cursor: Cursor, chance: Random) -> Versions:
    """Orders go, with all their lines."""
    ids = _lock(cursor, chance.randint(1, 3))
    cursor.execute("DELETE FROM order_lines WHERE order_id = ANY(%s)", [ids])
    cursor.execute("DELETE FROM purchase_orders WHERE id = ANY(%s)", [ids])
    return {}


def _lock(cursor: Cursor, count: int) -> list[int]:
    """Some orders, locked in the order of their ids, so that the shop's threads never wait for each other in a ring."""
    cursor.execute("SELECT id FROM purchase_orders ORDER BY random() LIMIT %s", [count])
    wanted = [row[0] for row in cursor.fetchall()]
    cursor.execute("SELECT id FROM purchase_orders WHERE id = ANY(%s) ORDER BY id FOR UPDATE", [wanted])
    return [row[0] for row in cursor.fetchall()]


def _add_lines(cursor: Cursor, chance: Random, order: int, count: int) -> None:
    rows = [(order, chance.choice(ITEMS), chance.randint(1, 9), chance.randint(100, 9999)) for _ in range(count)]
    cursor.executemany("INSERT INTO order_lines VALUES (nextval('line_ids'), %s, %s, %s, %s / 100.0)", rows)


def _add_one_line(cursor: Cursor, chance: Random, order: int) -> None:
    _add_lines(cursor, chance, order, 1)


def _drop_a_line(cursor: Cursor, chance: Random, order: int) -> None:
    cursor.execute("DELETE FROM order_lines WHERE id = (SELECT min(id) FROM order_lines WHERE order_id = %s)", [order])


def _change_quantities(cursor: Cursor, chance: Random, order: int) -> None:
    cursor.execute(
        "UPDATE order_lines SET quantity = 1 + (quantity + %s) %% 9 WHERE order_id = %s", [chance.randint(0, 7), order]
    )


def _total(cursor: Cursor, orders: list[int]) -> Versions:
    return dict(cursor.execute(TOTALS, [orders]).fetchall())


def next_transaction(chance: Random, orders: int) -> Transaction:
    """What the shop does next; it stays small enough for a reader to look at all of it many times a second."""
    kinds: list[Transaction] = [change, change, change, change, move, move, advance]
    if orders < ORDERS_AT_MOST:
        kinds += [place_some] * 3
    if orders > ORDERS_AT_LEAST // 2:
        kinds += [remove] * 2
    return chance.choice(kinds)


def one_transaction(connection: psycopg.Connection[Any], chance: Random) -> Versions | None:
    """One transaction of the shop; one in ten is rolled back when all its work is done, and gives None."""
    with connection.transaction(), connection.cursor() as cursor:
        counted = cursor.execute("SELECT count(*) FROM purchase_orders").fetchone()
        assert counted is not None
        versions = next_transaction(chance, counted[0])(cursor, chance)
        if chance.random() < 0.1:
            raise psycopg.Rollback
        return versions
    return None


class Shop:
    """Threads that trade, each over its own connection, until the shop closes."""

    def __init__(self, dsn: str, seed: int, threads: int = 3, pause_seconds: float = 0.06) -> None:
        self.ledger = Ledger()
        self.failures: list[BaseException] = []
        self._dsn = dsn
        self._pause_seconds = pause_seconds
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._trade, args=[seed + number]) for number in range(threads)]

    @contextmanager
    def trading(self) -> Iterator[Shop]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """No transaction is under way when this returns."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _trade(self, seed: int) -> None:
        chance = Random(seed)
        try:
            with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None) as connection:
                while not self._closed.wait(chance.expovariate(1 / self._pause_seconds)):
                    self._transact(connection, chance)
        except Exception as error:  # whatever ends it is told to the demo, which ends with it
            self.failures.append(error)

    def _transact(self, connection: psycopg.Connection[Any], chance: Random) -> None:
        versions = one_transaction(connection, chance)
        if versions is None:
            self.ledger.note_rollback()
        else:
            self.ledger.note(Commit(monotonic(), versions))
