"""What `verify` holds to be the same row."""

from __future__ import annotations

import pytest

from tidegate.model.schema import Column as TableColumn
from tidegate.model.schema import TableSchema, parse_type
from tidegate.views.definition import OutputColumn, ViewDefinition
from tidegate.views.expressions import Aggregate, Column, Struct, ValueType
from tidegate.views.plan import Output, PlanInput, ViewPlan
from tidegate.views.recompute import same, with_scales

LINES = TableSchema("lines", "lines", ("id",), (TableColumn("id", parse_type("int")),))
PRICE = ValueType("decimal", 10, 2)
LINE = ValueType("struct", fields=(("price", PRICE), ("n", ValueType("int"))))
ID = Column(0, "id", ValueType("int"))
ARRAY = Aggregate(
    "collect",
    Struct(("price", "n"), (Column(0, "price", PRICE), Column(0, "n", ValueType("int"))), LINE),
    (),
    ValueType("array", element=LINE),
)
PLAN = ViewPlan(
    "v", (PlanInput(LINES, "l", "from", ("id",)),), (ID,), (ID,), (Output("id", ID), Output("lines", ARRAY))
)
COLUMNS = (OutputColumn("id", "int", False, False), OutputColumn("lines", ARRAY.type.ddl, False, True))
VIEW = ViewDefinition("v", "", ("id",), COLUMNS, PLAN, ())
EXPECTED = b'{"id":1,"lines":[{"price":4.50,"n":2},{"price":11.00,"n":3}]}'


def test_a_document_may_lose_zeros_behind_the_point_and_the_order_of_its_fields() -> None:
    found = b'{"id":1,"lines":[{"n":3,"price":11},{"n":2,"price":4.5}]}'
    assert same(VIEW, EXPECTED, with_scales(VIEW, found))


@pytest.mark.parametrize("line", ['{"n":2}', '{"price":4.50,"n":2,"more":1}', "7", "null"])
def test_a_document_with_other_fields_is_another_document(line: str) -> None:
    found = b'{"id":1,"lines":[%s,{"price":11.00,"n":3}]}' % line.encode()
    assert not same(VIEW, EXPECTED, with_scales(VIEW, found))


@pytest.mark.parametrize("price", ["4.51", "4.505", "45", "4.5000000000000000000000000000000000000001", "null"])
def test_a_document_with_another_number_is_another_document(price: str) -> None:
    found = b'{"id":1,"lines":[{"price":%s,"n":2},{"price":11.00,"n":3}]}' % price.encode()
    assert not same(VIEW, EXPECTED, with_scales(VIEW, found))
