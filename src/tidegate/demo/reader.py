"""A reader of the destination who looks many times a second and counts what the shop never had."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from tidegate.demo.shop import Commit

# One statement, so one snapshot: each document with the sum that its own lines make, and the ids of these lines.
LOOK = sql.SQL(
    """
SELECT d.id, d.version, d.total = s.total, s.lines
FROM {} AS d CROSS JOIN LATERAL (
  SELECT COALESCE(SUM(quantity * price), 0) AS total, COALESCE(array_agg(line_id), '{{}}') AS lines
  FROM jsonb_to_recordset(d.lines) AS l(line_id bigint, quantity int, price numeric) WHERE line_id IS NOT NULL) AS s
"""
)


class Document(NamedTuple):
    id: int
    version: int
    is_whole: bool
    lines: Sequence[int]


class Delivery(NamedTuple):
    """When an order's version was committed in the shop, and when a reader first saw it or a later one."""

    committed_seconds: float
    seen_seconds: float

    @property
    def lag_seconds(self) -> float:
        return self.seen_seconds - self.committed_seconds


@dataclass
class Reader:
    """What one reader has seen so far. A document or a line that had gone never comes back in the shop."""

    looks: int = 0
    torn_states: int = 0
    torn_documents: int = 0
    backwards: int = 0
    documents: int = 0
    last_change_seconds: float = 0.0
    deliveries: list[Delivery] = field(default_factory=list)
    _versions: dict[int, int] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _lines: set[int] = field(default_factory=set)
    _gone_lines: set[int] = field(default_factory=set)
    _awaited: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def look(self, documents: Sequence[Document], at_seconds: float) -> None:
        """Judges one state of the destination against what a reader may rely on."""
        self.looks += 1
        torn = sum(not document.is_whole for document in documents) + self._misplaced_lines(documents)
        self.torn_documents += torn
        self.torn_states += torn > 0
        self._follow({document.id: document.version for document in documents}, at_seconds)

    def expect(self, commits: Iterable[Commit]) -> None:
        """Orders' versions that are committed in the shop and have to arrive."""
        for commit in commits:
            for order, version in commit.versions.items():
                self._awaited.setdefault(order, []).append((version, commit.at_seconds))

    def _misplaced_lines(self, documents: Sequence[Document]) -> int:
        """Lines in two documents at once, and lines that were in none for a while: halves of a move."""
        count = Counter(line for document in documents for line in document.lines)
        doubled = sum(times > 1 for times in count.values())
        returned = len(self._gone_lines & count.keys())
        self._gone_lines = (self._gone_lines | (self._lines - count.keys())) - count.keys()
        self._lines = set(count)
        return doubled + returned

    def _follow(self, versions: dict[int, int], at_seconds: float) -> None:
        for order, version in versions.items():
            self.backwards += order in self._gone or version < self._versions.get(order, 0)
            self._arrive(order, version, at_seconds)
        if versions != self._versions:
            self.last_change_seconds = at_seconds
        self._gone = (self._gone | (self._versions.keys() - versions.keys())) - versions.keys()
        self._versions, self.documents = versions, len(versions)

    def _arrive(self, order: int, version: int, at_seconds: float) -> None:
        awaited = self._awaited.get(order)
        if not awaited:
            return
        self.deliveries += [Delivery(when, at_seconds) for wanted, when in awaited if wanted <= version]
        self._awaited[order] = [(wanted, when) for wanted, when in awaited if wanted > version]


class Watch:
    """A thread that looks at one table until it is told to stop."""

    def __init__(self, dsn: str, table: str, pause_seconds: float = 0.05) -> None:
        self.reader = Reader()
        self.failures: list[BaseException] = []
        self.first_document = threading.Event()
        self._dsn, self._table, self._pause_seconds = dsn, table, pause_seconds
        self._commits: list[Commit] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        self._thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def expect(self, commits: Iterable[Commit]) -> None:
        with self._lock:
            self._commits += commits

    def _watch(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None) as connection:
                while not self._stopped.wait(self._pause_seconds):
                    self._look(connection)
        except Exception as error:  # whatever ends it is told to the demo, which ends with it
            self.failures.append(error)

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        if not _exists(connection, self._table):
            return
        with self._lock:
            commits, self._commits = self._commits, []
        self.reader.expect(commits)
        rows = connection.execute(LOOK.format(sql.Identifier(self._table))).fetchall()
        self.reader.look([Document(*row) for row in rows], monotonic())
        if rows:
            self.first_document.set()


def _exists(connection: psycopg.Connection[Any], table: str) -> bool:
    row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone()
    return row is not None and bool(row[0])
