"""The kernel: what it folds from changes is what a plain loop over all rows computes."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import FixConfiguration
from tidegate.model.cell import Cell, encode_cell, key_of
from tidegate.model.key import encode_key
from tidegate.model.schema import Column as TableColumn
from tidegate.model.schema import TableSchema, parse_type
from tidegate.views.arrangement import Arrangement
from tidegate.views.expressions import (
    Aggregate,
    Arithmetic,
    Column,
    NullTest,
    Struct,
    ValueType,
    decimal_text,
    scaled,
    value_type,
)
from tidegate.views.kernel import Change, CompiledView, OutputUpdate, compiled
from tidegate.views.plan import JoinKind, Output, PlanInput, ViewPlan


def _table(name: str, **columns: str) -> TableSchema:
    return TableSchema(name, name, ("id",), tuple(TableColumn(one, parse_type(kind)) for one, kind in columns.items()))


ORDERS = _table("orders", id="int", customer="string")
LINES = _table("lines", id="bigint", order_id="int", quantity="int", price="decimal(10,2)")
BIGINT = ValueType("bigint")


def _column(place: int, name: str) -> Column:
    return Column(place, name, value_type((ORDERS, LINES)[place].column(name).type))


def _plan(join: JoinKind = "left", key: tuple[Column, ...] | None = None, total_precision: int = 31) -> ViewPlan:
    amount = Arithmetic("*", _column(1, "quantity"), _column(1, "price"), ValueType("decimal", 21, 2))
    line = Struct(("id", "price"), (_column(1, "id"), _column(1, "price")), ValueType("struct"))
    priced = (NullTest(_column(1, "price"), wants_null=False),)
    grouping = key or (_column(0, "id"), _column(0, "customer"))
    return ViewPlan(
        "documents",
        (PlanInput(ORDERS, "o", "from", ("id",)), PlanInput(LINES, "l", join, ("order_id",))),
        grouping,
        key or grouping[:1],
        (
            *(Output(column.name, column) for column in grouping),
            Output("total", Aggregate("sum", amount, (), ValueType("decimal", total_precision, 2))),
            Output("n", Aggregate("count", _column(1, "id"), (), BIGINT)),
            Output("lines", Aggregate("collect", line, priced, ValueType("array", element=line.type))),
        ),
    )


def _order(identity: int, customer: str | None) -> Cell:
    return encode_cell(ORDERS.columns, (identity, customer))


def _line(identity: int, order: int | None, quantity: int | None, price: str | None) -> Cell:
    return encode_cell(LINES.columns, (identity, order, quantity, None if price is None else Decimal(price)))


class Kept:
    """A view, the rows of its tables, and its own rows as updates have left them."""

    def __init__(self, plan: ViewPlan, folder: Path) -> None:
        self.view: CompiledView = compiled(plan)
        self.arrangement = Arrangement.open(folder, plan.layout)
        self.tables: dict[str, dict[bytes, Cell]] = {"orders": {}, "lines": {}}
        self.rows: dict[bytes, Cell] = {}
        self.tick = 0

    def change(self, *rows: tuple[TableSchema, Cell]) -> list[OutputUpdate]:
        """Inserts or updates the rows in one tick."""
        return self.replace({(table.name, key_of(table, cell)): cell for table, cell in rows})

    def replace(self, rows: Mapping[tuple[str, bytes], Cell | None]) -> list[OutputUpdate]:
        changes: list[Change] = []
        for (table, pk), new in rows.items():
            old = self.tables[table].pop(pk, None)
            if new is not None:
                self.tables[table][pk] = new
            changes += [change for used in self.view.inputs_of(table) for change in used.route(pk, old, new)]
        self.tick += 1
        updates = self.view.fold(self.arrangement, self.tick, changes)
        for key, before, after in updates:
            assert self.rows.pop(key, None) == before != after
            if after is not None:
                self.rows[key] = after
        return updates


def _expected(tables: dict[str, dict[bytes, Cell]], optional: bool) -> dict[bytes, str]:
    """The reference: two loops and Python's own decimals."""
    read = [json.loads(cell, parse_float=Decimal) for _, cell in sorted(tables["lines"].items())]
    expected = {}
    for cell in tables["orders"].values():
        order = json.loads(cell)
        mine = [line for line in read if line["order_id"] == order["id"]]
        if not mine and not optional:
            continue
        amounts = [line["quantity"] * line["price"] for line in mine if None not in (line["quantity"], line["price"])]
        lines = [f'{{"id":{line["id"]},"price":{line["price"]}}}' for line in mine if line["price"] is not None]
        total = sum(amounts) if amounts else "null"
        expected[encode_key((order["id"],))] = (
            f'{{"id":{order["id"]},"customer":{json.dumps(order["customer"])},"total":{total},'
            f'"n":{len(mine)},"lines":[{",".join(lines)}]}}'
        )
    return expected


_IDS = st.integers(1, 3)
_LINE = st.builds(
    _line,
    st.integers(1, 5),
    st.none() | _IDS,
    st.sampled_from([None, 0, 2, -(2**31)]),
    st.sampled_from([None, "0.00", "-0.01", "12.50", "99999999.99"]),
)
_ROWS = st.one_of(
    st.builds(_order, _IDS, st.sampled_from([None, "ann", "null"])).map(lambda cell: (ORDERS, cell, True)),
    _LINE.map(lambda cell: (LINES, cell, True)),
    _LINE.map(lambda cell: (LINES, cell, False)),
    st.builds(_order, _IDS, st.none()).map(lambda cell: (ORDERS, cell, False)),
)


@settings(max_examples=60, deadline=None)
@given(ticks=st.lists(st.lists(_ROWS, max_size=8), max_size=5), join=st.sampled_from(["left", "inner"]))
def test_any_history_leaves_what_a_loop_over_all_rows_computes(
    ticks: list[list[tuple[TableSchema, Cell, bool]]], join: JoinKind
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(_plan(join), Path(folder))
        for tick in ticks:
            kept.replace({(table.name, key_of(table, cell)): cell if stays else None for table, cell, stays in tick})
            found = {key: cell.decode() for key, cell in kept.rows.items()}
            assert found == _expected(kept.tables, optional=join == "left")
        kept.arrangement.close()


def test_a_change_of_the_join_key_leaves_one_group_and_arrives_in_another(tmp_path: Path) -> None:
    kept = Kept(_plan(), tmp_path)
    kept.change((ORDERS, _order(1, "ann")), (ORDERS, _order(2, "bob")), (LINES, _line(7, 1, 1, "1.00")))
    updates = kept.change((LINES, _line(7, 2, 1, "1.00")))
    assert [json.loads(new or b"{}")["n"] for _, _, new in updates] == [0, 1]


def test_a_change_that_the_view_does_not_read_routes_nothing() -> None:
    used = compiled(_plan()).inputs_of("lines")[0]
    old, new = _line(7, 1, 2, "1.00"), _line(7, 1, 2, "1.00")[:-1] + b',"note":"x"}'
    assert used.route(b"pk", old, new) == []
    assert used.route(b"pk", _line(7, None, 2, "1.00"), None) == []


def test_rows_that_come_out_as_they_were_are_not_emitted(tmp_path: Path) -> None:
    kept = Kept(_plan(), tmp_path)
    kept.change((ORDERS, _order(1, "ann")), (LINES, _line(7, 1, 4, "1.00")))
    assert kept.change((LINES, _line(7, 1, 1, "4.00")))  # the element changes
    assert len(kept.change((ORDERS, _order(1, "eve")))) == 1
    assert kept.change((ORDERS, _order(1, "eve"))) == []


def test_a_group_of_several_rows_gives_each_its_own_key(tmp_path: Path) -> None:
    kept = Kept(_plan(key=(_column(0, "id"), _column(1, "quantity"))), tmp_path)
    kept.change((ORDERS, _order(1, "ann")), (LINES, _line(7, 1, 4, "1.00")), (LINES, _line(8, 1, None, "1.00")))
    assert sorted(kept.rows) == [encode_key((1, None)), encode_key((1, 4))]
    kept.change((LINES, _line(8, 1, 4, "2.50")))
    assert [json.loads(cell)["lines"] for cell in kept.rows.values()] == [
        [{"id": 7, "price": 1}, {"id": 8, "price": 2.5}]
    ]


def test_a_sum_beyond_its_type_names_view_column_and_key(tmp_path: Path) -> None:
    kept = Kept(_plan(total_precision=5), tmp_path)
    with pytest.raises(FixConfiguration, match=r'view "documents": column "total" .* key id = 1') as error:
        kept.change((ORDERS, _order(1, "ann")), (LINES, _line(7, 1, 1, "1000.00")))
    assert error.value.remedy
    assert kept.arrangement.applied == -1


def test_a_fold_inside_an_open_write_is_committed_with_it(tmp_path: Path) -> None:
    view = compiled(_plan())
    arrangement = Arrangement.open(tmp_path, view.plan.layout)
    cell = _order(1, "ann")
    changes = view.inputs_of("orders")[0].route(key_of(ORDERS, cell), None, cell)
    with pytest.raises(RuntimeError), arrangement.write(5):
        assert len(view.fold(arrangement, 5, changes)) == 1
        raise RuntimeError  # as if the history file could not be written
    assert arrangement.applied == -1
    assert len(view.fold(arrangement, 5, changes)) == 1
    assert arrangement.applied == 5


def test_a_plan_travels_and_explains_itself() -> None:
    plan = _plan()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert compiled(pickle.loads(pickle.dumps(plan))) is compiled(plan)
    assert plan.layout != _plan("inner").layout
    assert "left lines l by order_id; reads order_id, quantity, price, id" in plan.explain()


@given(st.integers(-(10**38), 10**38), st.integers(0, 38))
def test_decimals_are_written_as_python_writes_them_and_read_back(value: int, scale: int) -> None:
    text = decimal_text(value, scale)
    sign, digits, _ = Decimal(value).as_tuple()
    assert text == str(Decimal((sign, digits, -scale)))
    assert scaled(text, scale) == value


def test_a_decimal_with_too_many_places_is_never_cut() -> None:
    with pytest.raises(AssertionError):
        scaled("1.005", 2)
    values: list[Any] = [scaled("1", 2), scaled("1.5", 2), scaled("1E+1", 2)]
    assert values == [100, 150, 1000]
