"""A shop's tables, and random transactions on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from random import Random
from typing import Any

from tests.views.kept import Change, Kept, Row

from tidegate.model.key import encode_key

TABLES = {
    "customers": "id bigint not null, name string, vip boolean",
    "products": "id bigint not null, name string, price decimal(12,4)",
    "purchase_orders": "id bigint not null, customer bigint, order_date date, status string",
    "order_lines": "id bigint not null, order_id bigint, product bigint, item string, quantity int,"
    " price decimal(10,2)",
    "readings": "id bigint not null, at timestamp, tags array<string>, ratio double, flag boolean",
}
KEYS = dict.fromkeys(TABLES, ("id",))
FEW = 6  # ids are few, so that rows meet

Values = Callable[[Random], Any]
_COLUMNS: Mapping[str, Mapping[str, Values]] = {
    "customers": {"name": lambda r: r.choice(["x", "y", "new"]), "vip": lambda r: r.random() < 0.5},
    "products": {"name": lambda r: r.choice("abc"), "price": lambda r: Decimal(r.randrange(-999999, 999999)) / 10000},
    "purchase_orders": {
        "customer": lambda r: r.randrange(FEW),
        "order_date": lambda r: f"2020-01-{r.randrange(1, 5):02}",
        "status": lambda r: r.choice(["x", "y", "new", ""]),
    },
    "order_lines": {
        "order_id": lambda r: r.randrange(FEW),
        "product": lambda r: r.randrange(FEW),
        "item": lambda r: r.choice(["a b", "b", "a a", 'ä\t"q"\n']),
        "quantity": lambda r: r.randrange(-2, 5),
        "price": lambda r: Decimal(r.choice([0, 1, 150, 9999999999, -250])) / 100,
    },
    "readings": {
        "at": lambda r: f"2020-01-01T0{r.randrange(10)}:00:0{r.randrange(10)}{r.choice(['', '.500000'])}Z",
        "tags": lambda r: [r.choice(["a", "b", None]) for _ in range(r.randrange(3))],
        "ratio": lambda r: r.choice([0.1, -0.0, 1e300, "NaN", 2.5]),
        "flag": lambda r: r.random() < 0.5,
    },
}


def row(chance: Random, table: str, identity: int) -> Row:
    values = {name: None if chance.random() < 0.15 else made(chance) for name, made in _COLUMNS[table].items()}
    return {"id": identity, **values}


def transactions(chance: Random, kept: Kept, most: int = 4) -> list[list[Change]]:
    """Some transactions, each a few inserts, updates and deletes."""
    shadow = {table: dict(rows) for table, rows in kept.rows.items()}
    return [
        [_change(chance, shadow) for _ in range(chance.randrange(1, 6))] for _ in range(chance.randrange(1, most + 1))
    ]


def _change(chance: Random, shadow: dict[str, dict[bytes, Row]]) -> Change:
    table, identity = chance.choice(list(TABLES)), chance.randrange(FEW)
    key = encode_key([identity])
    old = shadow[table].pop(key, None)
    if old is not None and chance.random() < 0.35:
        return table, old, None
    new = shadow[table][key] = row(chance, table, identity)
    return table, old, new
