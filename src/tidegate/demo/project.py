"""The project folder of the demo: what a user would write."""

from __future__ import annotations

from pathlib import Path

TOPIC_PREFIX = "shop"
VIEW = "orders_with_lines"
STATE = ".tidegate"

PROJECT = f"""\
name: shop
state: {STATE}
spark: {{master: "local[2]"}}
source:
  kind: postgres
  topic_prefix: {TOPIC_PREFIX}
  dsn: "${{SHOP_DSN}}"
  tables: [public.purchase_orders, public.order_lines]
  partitions: 2
materializations:
  - {{view: {VIEW}, to: postgres, dsn: "${{DESTINATION_DSN}}", table: {VIEW}}}
"""

QUERY = """\
SELECT po.id, po.customer, po.order_date, po.status, po.total, po.version,
       ARRAY_AGG(STRUCT(ol.id AS line_id, ol.item, ol.quantity, ol.price)) AS lines,
       SUM(ol.quantity * ol.price) AS lines_total,
       COUNT(ol.id) AS line_count
FROM purchase_orders AS po
LEFT JOIN order_lines AS ol ON ol.order_id = po.id
GROUP BY po.id, po.customer, po.order_date, po.status, po.total, po.version
"""


def write_project(folder: Path, environment: dict[str, str]) -> None:
    """Writes the project, and beside it the two addresses, for whoever wants to look while the demo runs."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    (folder / "tidegate.yaml").write_text(PROJECT)
    (folder / "views" / f"{VIEW}.sql").write_text(QUERY)
    (folder / "environment").write_text("".join(f'{name}="{value}"\n' for name, value in environment.items()))
