"""A shop's orders and lines as Debezium events: whole transactions, the same for the same seed.

First an insert of each order with its lines, then updates of an order and some of its lines. Every transaction keeps
`total` of the order equal to the sum of quantity * price of its lines, and changes it.

Write the events with `python bench/workload.py FILE.jsonl [orders updates]`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "shop"
FIRST_COMMIT_MS = 1_790_000_000_000
STREETS = ("Oak Avenue", "Main Street", "Elm Street", "Maple Drive", "Cedar Lane", "Station Road", "High Street")
LSN_STEP = 160


@dataclass(frozen=True)
class Workload:
    """How much of it; the defaults are 1,200,000 row events in 300,000 transactions."""

    orders: int = 100_000
    lines: int = 5
    updates: int = 200_000
    updated_lines: int = 2
    seed: int = 42

    @property
    def row_events(self) -> int:
        return self.orders * (1 + self.lines) + self.updates * (1 + self.updated_lines)


@dataclass(frozen=True)
class Line:
    id: int
    order_id: int
    product_id: int
    quantity: int
    price: int

    @property
    def amount(self) -> int:
        return self.quantity * self.price

    @property
    def json(self) -> str:
        return (
            f'{{"id":{self.id},"order_id":{self.order_id},"product_id":{self.product_id},'
            f'"quantity":{self.quantity},"price":{self.price}}}'
        )


@dataclass(frozen=True)
class Order:
    id: int
    order_date: int
    purchaser_id: int
    shipping_address: str
    total: int

    @property
    def json(self) -> str:
        return (
            f'{{"id":{self.id},"order_date":{self.order_date},"purchaser_id":{self.purchaser_id},'
            f'"shipping_address":"{self.shipping_address}","total":{self.total}}}'
        )


@dataclass(frozen=True)
class Transaction:
    """Rows before and after; before is None for an insert."""

    order: tuple[Order | None, Order]
    lines: tuple[tuple[Line | None, Line], ...]


def transactions(workload: Workload) -> Iterator[Transaction]:
    """In the order of their commits."""
    chance = random.Random(workload.seed)
    orders: list[Order] = []
    lines: list[list[Line]] = []
    for number in range(1, workload.orders + 1):
        first = (number - 1) * workload.lines + 1
        lines.append([_new_line(chance, first + place, number) for place in range(workload.lines)])
        orders.append(_new_order(chance, number, lines[-1]))
        yield Transaction((None, orders[-1]), tuple((None, line) for line in lines[-1]))
    for _ in range(workload.updates):
        at = chance.randrange(workload.orders)
        before, old = orders[at], lines[at]
        changed = {
            place: _changed_line(chance, old[place]) for place in chance.sample(range(len(old)), workload.updated_lines)
        }
        lines[at] = [changed.get(place, line) for place, line in enumerate(old)]
        total = sum(line.amount for line in lines[at])
        orders[at] = Order(before.id, before.order_date, before.purchaser_id, before.shipping_address, total)
        yield Transaction((before, orders[at]), tuple((old[place], line) for place, line in changed.items()))


def _new_line(chance: random.Random, number: int, order_id: int) -> Line:
    return Line(number, order_id, chance.randint(1, 5000), chance.randint(1, 9), chance.randint(100, 9999))


def _new_order(chance: random.Random, number: int, lines: list[Line]) -> Order:
    address = f"{chance.randint(1, 999)} {chance.choice(STREETS)}, {chance.randint(10_000, 98_999)}"
    total = sum(line.amount for line in lines)
    return Order(number, 20_400 + chance.randrange(300), chance.randint(1, 20_000), address, total)


def _changed_line(chance: random.Random, line: Line) -> Line:
    """Another amount, always a larger one: no transaction leaves the order's total as it was."""
    return Line(line.id, line.order_id, line.product_id, line.quantity, line.price + chance.randint(1, 99))


def records(workload: Workload) -> Iterator[str]:
    """Lines for a `files` source: per transaction BEGIN, its rows, END."""
    lsn, previous = 24_000_000, 23_999_000
    for number, one in enumerate(transactions(workload)):
        xid, commit_ms, rows = 1001 + number, FIRST_COMMIT_MS + 3 * number, 1 + len(one.lines)
        commit = lsn + LSN_STEP * rows + 48
        head = _Head(xid, f"{xid}:{commit}", commit_ms, previous, "c" if one.order[0] is None else "u")
        yield _boundary(head, "BEGIN", "null", "null")
        yield _row(head, "purchase_orders", one.order, lsn + LSN_STEP, 1, 1)
        for place, change in enumerate(one.lines, 1):
            yield _row(head, "order_lines", change, lsn + LSN_STEP * (place + 1), place + 1, place)
        counts = (("purchase_orders", 1), ("order_lines", rows - 1))
        collected = ",".join(f'{{"data_collection":"public.{name}","event_count":{n}}}' for name, n in counts)
        yield _boundary(head, "END", str(rows), f"[{collected}]")
        previous = lsn = commit


@dataclass(frozen=True)
class _Head:
    xid: int
    id: str
    commit_ms: int
    previous_commit: int
    operation: str


def _boundary(head: _Head, status: str, count: str, collections: str) -> str:
    return (
        f'{{"topic":"{PREFIX}.transaction","key":{{"id":"{head.id}"}},"value":{{"status":"{status}","id":"{head.id}",'
        f'"event_count":{count},"data_collections":{collections},"ts_ms":{head.commit_ms}}}}}\n'
    )


def _row(
    head: _Head, table: str, change: tuple[Order | Line | None, Order | Line], lsn: int, total_order: int, place: int
) -> str:
    """As the Postgres connector sends it: `sequence` holds the commit before this one."""
    before, after = change
    old, ts = before.json if before else "null", head.commit_ms
    return (
        f'{{"topic":"{PREFIX}.public.{table}","key":{{"id":{after.id}}},"value":{{"before":{old},'
        f'"after":{after.json},"source":{{"version":"3.6.3.Final","connector":"postgresql","name":"{PREFIX}",'
        f'"ts_ms":{ts},"snapshot":"false","db":"shop","sequence":"[\\"{head.previous_commit}\\",\\"{lsn}\\"]",'
        f'"ts_us":{ts}123,"ts_ns":{ts}123000,"schema":"public","table":"{table}","txId":{head.xid},"lsn":{lsn},'
        f'"xmin":null}},"transaction":{{"id":"{head.id}","total_order":{total_order},"data_collection_order":{place}}},'
        f'"op":"{head.operation}","ts_ms":{ts + 41},"ts_us":{ts + 41}077,"ts_ns":{ts + 41}077512}}}}\n'
    )


def write(path: Path, workload: Workload) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1 << 20) as file:
        file.writelines(records(workload))


if __name__ == "__main__":
    counts = [int(word) for word in sys.argv[2:4]] or [100_000, 200_000]
    write(Path(sys.argv[1]), Workload(orders=counts[0], updates=counts[-1]))
