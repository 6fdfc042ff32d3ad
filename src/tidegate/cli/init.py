"""`tidegate init`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tidegate.errors import FixConfiguration

_PROJECT = """\
name: shop
state: .tidegate                  # catalog, history, arrangements, embedded log
spark: {master: "local[*]"}

# Follow a Postgres server with the embedded Debezium engine; the environment has the secret.
source:
  kind: postgres
  topic_prefix: shop
  dsn: "${SHOP_DSN}"
  tables: [public.purchase_orders, public.order_lines]

# Or replay recorded events, with the types declared:
# source: {kind: files, topic_prefix: shop, path: "events/*.jsonl.gz"}
# tables:
#   purchase_orders: {key: [id], columns: {id: bigint, customer: bigint, status: string}}
#   order_lines: {key: [id], columns: {id: bigint, order_id: bigint, quantity: int, price: "decimal(10,2)"}}

materializations:
  - {view: orders_with_lines, to: sqlite, path: out.db, table: orders_with_lines}
"""
_VIEW = """\
-- One SELECT a file; the file's name is the view's name.
SELECT po.id, po.customer, po.status,
       SUM(ol.quantity * ol.price) AS total,
       ARRAY_AGG(STRUCT(ol.id, ol.quantity, ol.price)) FILTER (WHERE ol.id IS NOT NULL) AS lines
FROM purchase_orders po LEFT JOIN order_lines ol ON ol.order_id = po.id
GROUP BY po.id, po.customer, po.status
"""


def write_project(folder: Path) -> Iterator[Path]:
    """Writes the files of a first project; overwrites nothing."""
    files = {"tidegate.yaml": _PROJECT, "views/orders_with_lines.sql": _VIEW, ".gitignore": ".tidegate/\nout.db*\n"}
    for name in files:
        if (folder / name).exists():
            raise FixConfiguration(f"{folder / name} exists already", remedy="Choose an empty folder with --project.")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        yield path
