"""A shop's change events, made up transaction by transaction, and the states that its database went through."""

from __future__ import annotations

import json
import random
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.pipeline import write_project
from tests.recordings import Documents, documents

Row = dict[str, Any]
Record = dict[str, Any]
KEPT_ORDERS = 12


class MadeUpShop:
    """Orders with their lines; no two states are the same, since each transaction names itself in an order."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._tables: dict[str, dict[int, Row]] = {"purchase_orders": {}, "order_lines": {}}
        self._rows: list[tuple[str, str, Row | None, Row | None]] = []
        self._number = self._next_id = 0
        self.states: list[Documents] = [{}]

    def transactions(self, count: int) -> list[Record]:
        """The records of so many more transactions, in the order in which Debezium sends them."""
        return [record for _ in range(count) for record in self._transaction()]

    def _transaction(self) -> list[Record]:
        self._number += 1
        self._rows = []
        orders = sorted(self._tables["purchase_orders"])
        if len(orders) > KEPT_ORDERS:
            self._remove(orders[0])
        if len(orders) < 2 or self._chance.random() < 0.4:
            self._place()
        else:
            self._change(self._chance.sample(orders[-2:], 2))
        self.states.append(self._state())
        return self._records()

    def _place(self) -> None:
        order = self._new_id()
        row = {"id": order, "customer": self._chance.randint(1, 9), "order_date": "2026-01-02Z"}
        self._write("purchase_orders", {**row, "status": f"placed {self._number}"})
        for _ in range(self._chance.randint(0, 4)):
            self._add_line(order)

    def _change(self, orders: list[int]) -> None:
        """One order gets a line, and a line of it moves to the other: both documents change, or neither."""
        self._add_line(orders[0])
        moved = next(line for line in self._tables["order_lines"].values() if line["order_id"] == orders[0])
        self._write("order_lines", {**moved, "order_id": orders[1]})
        self._write(
            "purchase_orders", {**self._tables["purchase_orders"][orders[0]], "status": f"changed {self._number}"}
        )

    def _remove(self, order: int) -> None:
        for line in [one for one in self._tables["order_lines"].values() if one["order_id"] == order]:
            self._delete("order_lines", line["id"])
        self._delete("purchase_orders", order)

    def _add_line(self, order: int) -> None:
        cents, quantity = self._chance.randint(1, 9999), self._chance.randint(1, 9)
        price = f"{cents // 100}.{cents % 100:02}"
        row = {"id": self._new_id(), "order_id": order, "item": f"item {cents % 7}"}
        self._write("order_lines", {**row, "quantity": quantity, "price": price})

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _write(self, table: str, row: Row) -> None:
        before = self._tables[table].get(row["id"])
        self._rows.append(("u" if before else "c", table, before, row))
        self._tables[table][row["id"]] = row

    def _delete(self, table: str, key: int) -> None:
        self._rows.append(("d", table, self._tables[table].pop(key), None))

    def _state(self) -> Documents:
        orders = [{**one, "order_date": one["order_date"][:-1]} for one in self._tables["purchase_orders"].values()]
        lines = [{**one, "price": Decimal(one["price"])} for one in self._tables["order_lines"].values()]
        return documents(orders, lines)

    def _records(self) -> list[Record]:
        xid, lsn = 1000 + self._number, 1_000_000 + 1_000 * self._number
        begin = {"status": "BEGIN", "id": f"{xid}:{lsn}", "event_count": None, "data_collections": None}
        counts = {table: sum(1 for row in self._rows if row[1] == table) for table in self._tables}
        collections = [
            {"data_collection": f"public.{name}", "event_count": count} for name, count in counts.items() if count
        ]
        count = len(self._rows)
        end = {"status": "END", "id": f"{xid}:{lsn + 900}", "event_count": count, "data_collections": collections}
        rows = [self._row_record(xid, lsn + order, order) for order in range(1, count + 1)]
        return [_transaction_record(begin, lsn), *rows, _transaction_record(end, lsn)]

    def _row_record(self, xid: int, lsn: int, order: int) -> Record:
        op, table, before, after = self._rows[order - 1]
        value = {
            "before": before,
            "after": after,
            "source": {"connector": "postgresql", "txId": xid, "lsn": lsn, "snapshot": "false", "table": table},
            "transaction": {"id": f"{xid}:{lsn}", "total_order": order, "data_collection_order": order},
            "op": op,
            "ts_ms": lsn,
        }
        key = (after or before or {})["id"]
        return {
            "topic": f"shop.public.{table}",
            "key": json.dumps({"id": key}),
            "value": json.dumps(value),
        }


def _transaction_record(value: Row, ts_ms: int) -> Record:
    key = json.dumps({"id": value["id"]})
    return {"topic": "shop.transaction", "key": key, "value": json.dumps({**value, "ts_ms": ts_ms})}


def write_growing_project(folder: Path, max_events: int) -> Path:
    """The order-with-its-lines project, over a recording that `record` adds to."""
    write_project(folder, max_events=max_events)
    file = folder / "tidegate.yaml"
    file.write_text(file.read_text().replace("*.jsonl.gz", "*.jsonl"))
    return folder


def record(project: Path, shop: MadeUpShop, transactions: int) -> None:
    """Adds transactions to the project's recording, as a program that is still recording does."""
    path = project / "events" / "all.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) + "\n" for one in shop.transactions(transactions)]
    with path.open("a") as file:
        file.write("".join(lines))


class Recording:
    """A thread that adds a transaction again and again, until it is told to stop."""

    def __init__(self, project: Path, shop: MadeUpShop, pause_seconds: float = 0.2) -> None:
        self._project, self._shop, self._pause_seconds = project, shop, pause_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Recording:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopping.wait(self._pause_seconds):
            record(self._project, self._shop, 1)
