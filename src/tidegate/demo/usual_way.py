"""The usual way: the same change events joined per topic, without regard to transactions.

This stands for what an ordinary stream join does with Debezium's topics, whether a stream processor or forty lines of
somebody's own code: it polls each topic in turn, keeps the rows of both sides, joins again what a batch has touched,
and upserts the joined documents. It is done well: nothing is lost or doubled, since documents and offsets are
committed together, a batch at a time; deletes and moves are followed; there is no artificial delay, and every batch
takes all that is there (up to a consumer's usual 500 records a partition). What it does not know is which events of
the two topics belong together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from psycopg.types.json import Jsonb

from tidegate.capture.debezium import payload
from tidegate.capture.log import LogReader

MAX_POLL_RECORDS = 500
Row = dict[str, Any]

SCHEMA = """
CREATE TABLE usual_way (
  id bigint PRIMARY KEY, customer bigint, order_date date, status text, total numeric(12,2), version int, lines jsonb);
CREATE TABLE usual_way_offsets (topic text, partition int, next bigint, PRIMARY KEY (topic, partition));
"""

UPSERT = """
INSERT INTO usual_way VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET
  customer = excluded.customer, order_date = excluded.order_date, status = excluded.status, total = excluded.total,
  version = excluded.version, lines = excluded.lines
"""

OFFSET = "INSERT INTO usual_way_offsets VALUES (%s, %s, %s) ON CONFLICT (topic, partition) DO UPDATE SET next = %s"


class Change(msgspec.Struct):
    """A row event, as far as a join needs it."""

    op: str
    before: Row | None = None
    after: Row | None = None


_decode = msgspec.json.Decoder(Change).decode


class Join:
    """Both sides of the join, and the documents that it makes of them."""

    def __init__(self) -> None:
        self._orders: dict[int, Row] = {}
        self._lines: dict[int, Row] = {}
        self._lines_of: dict[int, dict[int, Row]] = {}

    def take(self, table: str, change: Change) -> set[int]:
        """Applies one event; returns the orders whose documents it touches."""
        row = change.after or change.before
        if row is None:
            return set()
        return self._take_order(row["id"], change) if table == "purchase_orders" else self._take_line(row["id"], change)

    def document(self, order: int) -> list[Any] | None:
        """The document's columns, or None if there is no such order."""
        row = self._orders.get(order)
        if row is None:
            return None
        lines = [
            {"line_id": line["id"], "item": line["item"], "quantity": line["quantity"], "price": line["price"]}
            for line in self._lines_of.get(order, {}).values()
        ]
        columns = ("id", "customer", "order_date", "status", "total", "version")
        return [*(row[column] for column in columns), Jsonb(lines)]

    def _take_order(self, order: int, change: Change) -> set[int]:
        if change.after is None:
            self._orders.pop(order, None)
        else:
            self._orders[order] = change.after
        return {order}

    def _take_line(self, line: int, change: Change) -> set[int]:
        old = self._lines.pop(line, None)
        touched = {row["order_id"] for row in (old, change.after) if row is not None}
        if old is not None:
            self._lines_of[old["order_id"]].pop(line, None)
        if change.after is not None:
            self._lines[line] = change.after
            self._lines_of.setdefault(change.after["order_id"], {})[line] = change.after
        return touched


class UsualWay:
    """A thread that follows the captured topics and writes the table `usual_way`."""

    def __init__(self, dsn: str, log: Path, topic_prefix: str, pause_seconds: float = 0.05) -> None:
        self.failures: list[BaseException] = []
        self._dsn, self._pause_seconds = dsn, pause_seconds
        self._log = LogReader(log)
        self._topics = [(f"{topic_prefix}.public.{table}", table) for table in ("purchase_orders", "order_lines")]
        self._names = {topic for topic, _ in self._topics}
        self._offsets: dict[tuple[str, int], int] = {}
        self._join = Join()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    @contextmanager
    def following(self) -> Iterator[UsualWay]:
        with psycopg.connect(self._dsn) as connection:
            connection.execute(SCHEMA)
        self._thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def is_idle(self) -> bool:
        """Whether everything captured so far has been taken."""
        return all(end <= self._next(place) for place, end in self._log.ends().items() if place[0] in self._names)

    def _follow(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None) as connection:
                while not self._stopped.is_set():
                    polled = [self._poll(connection, topic, table) for topic, table in self._topics]
                    if not any(polled):
                        self._stopped.wait(self._pause_seconds)
        except Exception as error:  # whatever ends it is told to the demo, which ends with it
            self.failures.append(error)

    def _poll(self, connection: psycopg.Connection[Any], topic: str, table: str) -> bool:
        """One batch of one topic: its events, the documents they touch and the offsets, in one transaction."""
        places = [place for place, end in self._log.ends().items() if place[0] == topic and end > self._next(place)]
        touched = {order for place in places for order in self._take(place, table)}
        if not places:
            return False
        with connection.transaction(), connection.cursor() as cursor:
            self._write(cursor, touched)
            cursor.executemany(OFFSET, [[*place, self._next(place), self._next(place)] for place in places])
        return True

    def _take(self, place: tuple[str, int], table: str) -> set[int]:
        start = self._next(place)
        end = min(self._log.ends()[place], start + MAX_POLL_RECORDS)
        self._offsets[place] = end
        values = [value for batch in self._log.read(*place, start, end) for value in batch.column("value").to_pylist()]
        return {order for value in values if value for order in self._join.take(table, _decode(payload(value)))}

    def _write(self, cursor: psycopg.Cursor[Any], orders: set[int]) -> None:
        documents = {order: self._join.document(order) for order in sorted(orders)}
        cursor.executemany(UPSERT, [document for document in documents.values() if document])
        gone = [order for order, document in documents.items() if document is None]
        cursor.execute("DELETE FROM usual_way WHERE id = ANY(%s)", [gone])

    def _next(self, place: tuple[str, int]) -> int:
        return self._offsets.get(place, 0)
