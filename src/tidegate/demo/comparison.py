"""The destination compared with the shop itself, by plain SQL on both: nothing of Tidegate takes part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

IN_THE_SHOP = sql.SQL(
    """
SELECT o.id, o.customer, o.order_date, o.status, o.total, o.version, l.id, l.item, l.quantity, l.price
FROM purchase_orders AS o LEFT JOIN order_lines AS l ON l.order_id = o.id
"""
)

IN_THE_DESTINATION = sql.SQL(
    """
SELECT d.id, d.customer, d.order_date, d.status, d.total, d.version, l.line_id, l.item, l.quantity, l.price
FROM {} AS d LEFT JOIN LATERAL jsonb_to_recordset(d.lines)
  AS l(line_id bigint, item text, quantity int, price numeric) ON l.line_id IS NOT NULL
"""
)

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Comparison:
    """How a destination differs from the shop when both are at rest."""

    documents: int
    lost: int  # documents that are missing, or are not what the shop holds
    duplicates: int  # documents or lines that are there more than once, or that the shop does not hold


def compare(shop_dsn: str, destination_dsn: str, table: str) -> Comparison:
    with psycopg.connect(shop_dsn) as shop, psycopg.connect(destination_dsn) as destination:
        truth = shop.execute(IN_THE_SHOP).fetchall()
        found = destination.execute(IN_THE_DESTINATION.format(sql.Identifier(table))).fetchall()
    return difference(truth, found)


def difference(truth: Iterable[Row], found: Iterable[Row]) -> Comparison:
    """Both are rows of an order and one of its lines each."""
    ours, theirs = Counter(found), Counter(truth)
    orders = {row[0] for row in theirs}
    lost = {row[0] for row in theirs - ours}
    extra = Counter({row: times for row, times in (ours - theirs).items() if row in theirs or row[0] not in orders})
    return Comparison(len({row[0] for row in ours}), len(lost), extra.total())
