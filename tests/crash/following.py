"""A reader of a destination beside the program: what it sees is a state of the truth, and never an older one."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
from tests.pipeline import nested_lines, read_documents
from tests.recordings import Documents

Read = Callable[[], Documents | None]


class Follower:
    """Looks again and again, whatever happens to the program meanwhile."""

    def __init__(self, read: Read, truth: Sequence[Documents], pause_seconds: float = 0.02) -> None:
        self._read, self._truth, self._pause_seconds = read, truth, pause_seconds
        self._at = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: set[int] = set()
        self.wrong: list[str] = []

    def _watch(self) -> None:
        try:
            while not self._stopped.is_set() and not self.wrong:
                self.look()
                self._stopped.wait(self._pause_seconds)
        except Exception as error:
            self.wrong.append(repr(error))

    def look(self) -> None:
        state = self._read()
        if state is None:
            return
        found = next((place for place in range(self._at, len(self._truth)) if self._truth[place] == state), None)
        if found is None:
            was = state in self._truth
            self.wrong.append(f"after state {self._at}: " + ("an older state" if was else f"never a state: {state}"))
        else:
            self._at = found
            self.seen.add(found)

    @contextmanager
    def following(self) -> Iterator[Follower]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join()

    def assert_at_the_end(self) -> None:
        """It has seen only the truth's states, in order, and the last is there now."""
        assert not self.wrong, self.wrong[0]
        self.look()
        assert not self.wrong, self.wrong[0]
        assert self._at == len(self._truth) - 1, f"at state {self._at} of {len(self._truth) - 1}"


def sqlite_reader(path: Path) -> Read:
    """The documents in a SQLite file; None before there is a table."""

    def read() -> Documents | None:
        try:
            return read_documents(path) if path.exists() else None
        except sqlite3.OperationalError as error:
            if "no such table" in str(error) or "unable to open" in str(error):
                return None
            raise

    return read


def postgres_reader(dsn: str) -> Read:
    """The documents in a Postgres table; None before there is one."""
    columns = "id, customer, order_date::text, status, total, line_count, lines::text"

    def read() -> Documents | None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            try:
                rows = connection.execute(f"SELECT {columns} FROM orders_with_lines").fetchall()
            except psycopg.errors.UndefinedTable:
                return None
        return {row[0]: (*row[1:6], nested_lines(row[6])) for row in rows}

    return read
