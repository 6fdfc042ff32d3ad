"""The simplest correct script for the same job, one thread and nothing durable: the figure to compare with.

It follows the transaction events, takes as many rows of each table as END counts, and writes each touched order with
its lines once per transaction, as JSON. `python bench/plain.py EVENTS.jsonl OUT.jsonl` prints {"seconds", "events"}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

decode, encode = msgspec.json.decode, msgspec.json.encode
TOPICS = {"shop.public.purchase_orders": "orders", "shop.public.order_lines": "lines", "shop.transaction": "ends"}


def split(events: Path, folder: Path) -> None:
    """One file of values a topic, as the script reads them."""
    files = {topic: (folder / f"{name}.jsonl").open("wb", buffering=1 << 20) for topic, name in TOPICS.items()}
    with events.open("rb", buffering=1 << 20) as lines:
        for line in lines:
            topic = line[10 : line.index(b'"', 10)].decode()
            files[topic].write(line[line.index(b'"value":') + 8 : -2] + b"\n")
    for file in files.values():
        file.close()


def documents(folder: Path) -> Iterator[tuple[int, bytes]]:
    """Row events taken, and a line of output, for each order that a transaction touched."""
    sources = {name: (folder / f"{name}.jsonl").open("rb", buffering=1 << 20) for name in ("orders", "lines")}
    orders: dict[int, tuple[object, ...]] = {}
    lines: dict[int, dict[int, tuple[object, ...]]] = {}
    with (folder / "ends.jsonl").open("rb", buffering=1 << 20) as ends:
        for event in ends:
            if b'"END"' not in event:
                continue
            touched: dict[int, None] = {}
            taken = 0
            for collected in decode(event)["data_collections"]:
                count = collected["event_count"]
                taken += count
                if collected["data_collection"].endswith("purchase_orders"):
                    for _ in range(count):
                        row = decode(next(sources["orders"]))["after"]
                        orders[row["id"]] = (row["order_date"], row["purchaser_id"], row["total"])
                        touched[row["id"]] = None
                else:
                    for _ in range(count):
                        row = decode(next(sources["lines"]))["after"]
                        line = (row["id"], row["product_id"], row["quantity"], row["price"])
                        lines.setdefault(row["order_id"], {})[row["id"]] = line
                        touched[row["order_id"]] = None
            for key in touched:
                yield taken, encode((key, *orders[key], list(lines[key].values()))) + b"\n"
                taken = 0


def main() -> None:
    events, out = Path(sys.argv[1]), Path(sys.argv[2])
    if not (out.parent / "ends.jsonl").exists():
        split(events, out.parent)
    began, taken = time.monotonic(), 0
    with out.open("wb", buffering=1 << 20) as file:
        for count, line in documents(out.parent):
            taken += count
            file.write(line)
    sys.stdout.write(json.dumps({"seconds": round(time.monotonic() - began, 3), "events": taken}) + "\n")


if __name__ == "__main__":
    main()
