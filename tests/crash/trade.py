"""A shop that trades in a real Postgres whatever happens to it, and a reader of what arrives in SQLite."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing, suppress
from decimal import Decimal
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import psycopg

from tidegate.demo.project import PROJECT, QUERY, VIEW
from tidegate.demo.reader import Document, Reader
from tidegate.demo.shop import one_transaction

Row = tuple[int, int, Decimal, tuple[int, ...]]  # order, version, total, its lines' ids
TO_POSTGRES = f'to: postgres, dsn: "${{DESTINATION_DSN}}", table: {VIEW}'
TO_SQLITE = f"to: sqlite, path: out.db, table: {VIEW}"
IN_THE_SHOP = """
SELECT o.id, o.version, o.total, COALESCE(array_agg(l.id ORDER BY l.id) FILTER (WHERE l.id IS NOT NULL), '{}')
FROM purchase_orders o LEFT JOIN order_lines l ON l.order_id = o.id GROUP BY o.id
"""


def write_shop_project(folder: Path) -> Path:
    """The demo's project, into SQLite: what the reader reads does not depend on any server."""
    assert TO_POSTGRES in PROJECT
    (folder / "views").mkdir(parents=True)
    (folder / "tidegate.yaml").write_text(PROJECT.replace(TO_POSTGRES, TO_SQLITE))
    (folder / "views" / f"{VIEW}.sql").write_text(QUERY)
    return folder


class Traders:
    """Concurrent connections that commit one transaction after another, and come back when the server does."""

    def __init__(self, dsn: str, seed: int, count: int = 3, pause_seconds: float = 0.15) -> None:
        self._dsn, self._pause_seconds = dsn, pause_seconds
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._trade, args=[Random(seed + one)]) for one in range(count)]

    def __enter__(self) -> Traders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _trade(self, chance: Random) -> None:
        while not self._stopping.is_set():
            with (
                suppress(psycopg.OperationalError, psycopg.InterfaceError),
                psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None) as connection,
            ):
                while not self._stopping.wait(chance.expovariate(1 / self._pause_seconds)):
                    one_transaction(connection, chance)
            self._stopping.wait(0.1)


def rows_in_the_shop(dsn: str) -> set[Row]:
    with psycopg.connect(dsn) as connection:
        return {(row[0], row[1], row[2], tuple(row[3])) for row in connection.execute(IN_THE_SHOP).fetchall()}


def rows_delivered(path: Path) -> set[Row]:
    return {(row[0], row[1], Decimal(row[2]), _line_ids(row[3])) for row in _look(path)}


def documents_delivered(path: Path) -> list[Document]:
    return [Document(row[0], row[1], Decimal(row[2]) == _sum(row[3]), _line_ids(row[3])) for row in _look(path)]


def _look(path: Path) -> list[tuple[Any, ...]]:
    """What a reader finds, in one snapshot; nothing before there is a table."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute(f"SELECT id, version, total, lines FROM {VIEW}").fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error) or "unable to open" in str(error):
                return []
            raise


def _lines(text: str) -> list[dict[str, Decimal]]:
    """The lines of a document; of an order without any, ARRAY_AGG gives one of NULLs."""
    nested = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    return [one for one in nested if one["line_id"] is not None]


def _line_ids(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(one["line_id"]) for one in _lines(text)))


def _sum(text: str) -> Decimal:
    return sum((one["quantity"] * Decimal(one["price"]) for one in _lines(text)), Decimal(0))


class Reading:
    """A thread that looks at the destination all the time, and counts what the shop never had."""

    def __init__(self, path: Path) -> None:
        self.reader = Reader()
        self.failures: list[Exception] = []
        self._path = path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            while not self._stopped.is_set():
                self.reader.look(documents_delivered(self._path), monotonic())
                sleep(0.05)
        except Exception as error:
            self.failures.append(error)

    def assert_nothing_strange(self) -> None:
        assert not self.failures, self.failures[0]
        reader = self.reader
        assert reader.looks > 20
        assert (reader.torn_states, reader.backwards) == (0, 0), reader
