"""The recorded Debezium events, laid out as files that the `files` source reads; and an independent reading of them."""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from tidegate.capture.murmur2 import partition_for

FOLDER = Path(__file__).parent / "fixtures" / "debezium"
UNAVAILABLE = "__debezium_unavailable_value"
Record = dict[str, Any]
Tables = Mapping[str, Mapping[Any, Mapping[str, Any]]]
Documents = dict[int, tuple[Any, ...]]


def load(*names: str) -> list[Record]:
    """The records of recordings, one after another."""
    records: list[Record] = []
    for name in names:
        with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt") as file:
            records += [json.loads(line) for line in file]
    return records


def as_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def write(path: Path, records: Iterable[Record], partitions: int, order: random.Random | None) -> None:
    """Writes the records with a partition each; with `order`, partitions arrive interleaved at random.

    A transaction topic has one partition, and within each partition the records keep their order.
    """
    by_partition: dict[tuple[str, int], list[str]] = {}
    lines: list[str] = []
    for record in records:
        spread = 1 if record["topic"].endswith((".transaction", ".notifications")) else partitions
        partition = partition_for(as_bytes(record["key"]), spread)
        line = json.dumps({**{name: record[name] for name in ("topic", "key", "value")}, "partition": partition})
        by_partition.setdefault((record["topic"], partition), []).append(line)
        lines.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(line + "\n" for line in (shuffled(by_partition, order) if order else lines))


def shuffled(by_partition: Mapping[tuple[str, int], Sequence[str]], order: random.Random) -> list[str]:
    turns = [place for place, lines in by_partition.items() for _ in lines]
    order.shuffle(turns)
    streams = {place: iter(lines) for place, lines in by_partition.items()}
    return [next(streams[place]) for place in turns]


# --- the truth


def documents(orders: Iterable[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]]) -> Documents:
    """The view orders_with_lines over two tables, in plain Python."""
    by_order: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_order.setdefault(line["order_id"], []).append(line)
    return {order["id"]: _document(order, by_order.get(order["id"], [])) for order in orders}


def _document(order: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    total = sum((line["quantity"] * line["price"] for line in lines), Decimal(0)) if lines else None
    nested = tuple(sorted((line["id"], line["item"], line["quantity"], line["price"]) for line in lines))
    return (order["customer"], order["order_date"], order["status"], total, len(lines), nested)


def recorded_truth() -> list[Documents]:
    """The view after each commit of the recommended run, as the database itself had it."""
    states = []
    for entry in load("truth_events_recommended"):
        if "state" in entry:
            orders = [
                {"id": int(row[0]), "customer": int(row[1]), "order_date": row[2], "status": row[3]}
                for row in entry["state"]["purchase_orders"]
            ]
            lines = [
                {
                    "id": int(row[0]),
                    "order_id": int(row[1]),
                    "item": row[2],
                    "quantity": int(row[3]),
                    "price": Decimal(row[4]),
                }
                for row in entry["state"]["order_lines"]
            ]
            states.append(documents(orders, lines))
    return states


def replayed(records: Iterable[Record], names: Sequence[str]) -> list[dict[str, dict[Any, Record]]]:
    """Tables after the last snapshot and after each transaction, from the records alone, in the simplest way.

    One dictionary a table, one pass: the rows of the last snapshot, then the transactions in the order in which the
    transaction topic first names them, each row event once. One that nothing has closed does not count.
    """
    values = [(r["topic"].rsplit(".", 1)[-1], json.loads(as_bytes(r["value"]) or b"")) for r in records if r["value"]]
    rows = [(table, value) for table, value in values if table in names and "op" in value]
    tables: dict[str, dict[Any, Record]] = {name: {} for name in names}
    snapshot = [(table, value) for table, value in rows if value["op"] == "r"]
    last = max((value["source"].get("lsn", 0) for _, value in snapshot), default=0)
    for table, value in snapshot:
        if value["source"].get("lsn", 0) == last:
            _apply(tables[table], value)
    by_transaction: dict[str, dict[int, tuple[str, Record]]] = {}
    for table, value in rows:
        if value["transaction"]:
            events = by_transaction.setdefault(_group(value["transaction"]), {})
            events[value["transaction"]["total_order"]] = (table, value)
    states = [_copy_of(tables)] if snapshot else []
    for group in _closed([value for table, value in values if table == "transaction"]):
        for _, (table, value) in sorted(by_transaction.get(group, {}).items()):
            _apply(tables[table], value)
        states.append(_copy_of(tables))
    return states


def _copy_of(tables: Mapping[str, Mapping[Any, Record]]) -> dict[str, dict[Any, Record]]:
    return {name: dict(rows) for name, rows in tables.items()}


def _group(transaction: Record) -> str:
    return str(transaction["id"]).split(":")[0]


def _closed(events: Sequence[Record]) -> list[str]:
    """Transactions that have an END, or that another one follows."""
    begun = list(dict.fromkeys(map(_group, events)))
    ended = {_group(event) for event in events if event["status"] == "END"}
    return [group for group in begun if group in ended or group != begun[-1]]


def replayed_truth(records: Iterable[Record]) -> list[Documents]:
    """The view after the last snapshot and after each transaction, from the records alone."""
    return [_view(tables) for tables in replayed(records, ("purchase_orders", "order_lines"))]


def _apply(table: dict[Any, dict[str, Any]], value: Any) -> None:
    if value["op"] == "t":
        table.clear()
    elif value["op"] == "d":
        table.pop(value["before"]["id"], None)
    else:
        after, before = value["after"], table.get(value["after"]["id"], {})
        table[after["id"]] = {name: before[name] if one == UNAVAILABLE else one for name, one in after.items()}


def _view(tables: Mapping[str, Mapping[Any, Mapping[str, Any]]]) -> Documents:
    orders = [{**row, "order_date": _date(row["order_date"])} for row in tables["purchase_orders"].values()]
    lines = [{**row, "price": _decimal(row["price"])} for row in tables["order_lines"].values()]
    return documents(orders, lines)


def _date(value: int | str) -> str:
    return str(date(1970, 1, 1) + timedelta(days=value)) if isinstance(value, int) else value.removesuffix("Z")


def _decimal(value: str) -> Decimal:
    try:
        return Decimal(value)
    except ArithmeticError:
        return Decimal(int.from_bytes(base64.b64decode(value), "big", signed=True)) / 100
