"""Micro benchmark of the views' kernel: microseconds of CPU per routed change and per group of six rows.

Run it with `python bench/kernel.py [groups]`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tidegate.model.cell import Cell, encode_cell, key_of
from tidegate.model.schema import Column as TableColumn
from tidegate.model.schema import TableSchema, parse_type
from tidegate.views import kernel
from tidegate.views.arrangement import Arrangement
from tidegate.views.expressions import Aggregate, Arithmetic, Column, Struct, ValueType, value_type
from tidegate.views.plan import Output, PlanInput, ViewPlan

LINES = 5
_BIGINT = ValueType("bigint")


def _table(name: str, columns: dict[str, str]) -> TableSchema:
    return TableSchema(name, name, ("id",), tuple(TableColumn(key, parse_type(kind)) for key, kind in columns.items()))


ORDERS = _table("purchase_orders", {"id": "int", "customer": "string", "status": "string"})
ORDER_LINES = _table(
    "order_lines", {"id": "bigint", "order_id": "int", "item": "string", "quantity": "int", "price": "decimal(10,2)"}
)


def _column(place: int, name: str) -> Column:
    return Column(place, name, value_type((ORDERS, ORDER_LINES)[place].column(name).type))


def plan() -> ViewPlan:
    """Orders with their lines: the shape that the documentation opens with."""
    amount = Arithmetic("*", _column(1, "quantity"), _column(1, "price"), ValueType("decimal", 21, 2))
    names = ("id", "item", "quantity", "price")
    line = Struct(names, tuple(_column(1, name) for name in names), ValueType("struct"))
    grouping = tuple(_column(0, name) for name in ("id", "customer", "status"))
    return ViewPlan(
        "orders",
        (PlanInput(ORDERS, "po", "from", ("id",)), PlanInput(ORDER_LINES, "ol", "left", ("order_id",))),
        grouping,
        grouping[:1],
        (
            *(Output(column.name, column) for column in grouping),
            Output("total", Aggregate("sum", amount, (), ValueType("decimal", 31, 2))),
            Output("line_count", Aggregate("count", _column(1, "id"), (), _BIGINT)),
            Output("lines", Aggregate("collect", line, (), ValueType("array", element=line.type))),
        ),
    )


Row = tuple[bytes, Cell | None, Cell | None]


def _order(identity: int, status: str) -> Cell:
    return encode_cell(ORDERS.columns, (identity, f"customer {identity % 1000}", status))


def _line(identity: int, quantity: int) -> Cell:
    values = (identity, identity // LINES, f"item {identity % 50}", quantity, 1250 + identity % 7)
    return encode_cell(ORDER_LINES.columns, values).replace(b"}", b".25}")


def _timed(what: str, count: int, action: Callable[[], list[object]]) -> list[object]:
    start = time.process_time()
    result = action()
    print(f"{what:<44}{(time.process_time() - start) / count * 1e6:8.2f} us of CPU each, {count} of them")
    return result


def _tick(view: kernel.CompiledView, arrangement: Arrangement, tick: int, rows: list[list[Row]], what: str) -> None:
    changes: list[kernel.Change] = []
    for used, part in zip(view.inputs, rows, strict=True):

        def route(used: kernel.CompiledInput = used, part: list[Row] = part) -> list[object]:
            return [change for row in part for change in used.route(*row)]

        if part:
            changes += _timed(f"{what}: route {used.table.name}", len(part), route)  # type: ignore[arg-type]
    random.shuffle(changes)
    groups = len({change[0] for change in changes})
    _timed(f"{what}: fold", groups, lambda: list(view.fold(arrangement, tick, changes)))


def main(groups: int) -> None:
    view = kernel.compiled(plan())
    orders = [_order(identity, "new") for identity in range(groups)]
    lines = [_line(identity, 1 + identity % 9) for identity in range(groups * LINES)]
    with tempfile.TemporaryDirectory() as folder:
        arrangement = Arrangement.open(Path(folder), view.plan.layout)
        first: list[list[Row]] = [
            [(key_of(ORDERS, cell), None, cell) for cell in orders],
            [(key_of(ORDER_LINES, cell), None, cell) for cell in lines],
        ]
        _tick(view, arrangement, 0, first, "insert all")
        some = sorted(random.sample(range(groups), groups // 2))
        changed: list[Row] = [
            (key_of(ORDER_LINES, lines[place * LINES]), lines[place * LINES], _line(place * LINES, 77))
            for place in some
        ]
        _tick(view, arrangement, 1, [[], changed], "one line of each of half")
        paid: list[Row] = [(key_of(ORDERS, orders[place]), orders[place], _order(place, "paid")) for place in some]
        _tick(view, arrangement, 2, [paid, []], "half of the orders")
        small = changed[:20]
        _tick(view, arrangement, 3, [[], [(pk, new, old) for pk, old, new in small]], "small tick")
        arrangement.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
