"""The demo's own judgement: what its reader counts, how the usual way joins, what is lost, which promise fell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from random import Random

import psycopg
import pytest
from rich.console import Console

from tidegate.demo.comparison import Comparison, compare, difference
from tidegate.demo.reader import Delivery, Document, Reader
from tidegate.demo.report import Interruption, Outcome, as_json, percentile, show, side
from tidegate.demo.shop import Commit, one_transaction, open_shop
from tidegate.demo.usual_way import Change, Join
from tidegate.embedded.postgres import EmbeddedPostgres


def document(order: int = 1, version: int = 1, is_whole: bool = True, lines: tuple[int, ...] = (10,)) -> Document:
    return Document(order, version, is_whole, lines)


def looked(*states: list[Document]) -> Reader:
    reader = Reader()
    for number, state in enumerate(states):
        reader.look(state, float(number))
    return reader


def test_a_reader_counts_states_and_documents_that_are_torn() -> None:
    reader = looked([document(1, is_whole=False, lines=()), document(2, is_whole=False, lines=())], [document(1)])
    assert (reader.looks, reader.torn_states, reader.torn_documents) == (2, 1, 2)


def test_a_reader_sees_a_line_in_two_orders_at_once_as_torn() -> None:
    assert looked([document(1, lines=(7,)), document(2, lines=(7,))]).torn_states == 1


def test_a_reader_sees_a_line_that_was_in_no_order_for_a_while_as_torn() -> None:
    reader = looked([document(1, lines=(7,))], [document(1, 2, lines=())], [document(1, 3, lines=(7,))])
    assert reader.torn_states == 1


def test_a_reader_sees_an_older_version_as_a_step_backwards() -> None:
    assert looked([document(version=2)], [document(version=1)], [document(version=1)]).backwards == 1


def test_a_reader_sees_a_deleted_order_that_returns_as_a_step_backwards() -> None:
    assert looked([document()], [], [document()]).backwards == 1


def test_a_reader_measures_the_time_until_a_version_or_a_later_one_is_seen() -> None:
    reader = Reader()
    reader.expect([Commit(1.0, {1: 1}), Commit(1.5, {1: 2}), Commit(1.6, {1: 3})])
    reader.look([document(version=2)], 3.0)
    reader.look([document(version=3)], 4.0)
    assert [delivery.lag_seconds for delivery in reader.deliveries] == [2.0, 1.5, pytest.approx(2.4)]


def line(number: int, order: int, quantity: int = 1) -> dict[str, object]:
    return {"id": number, "order_id": order, "item": "rope", "quantity": quantity, "price": "2.50"}


def order(number: int, version: int = 1) -> dict[str, object]:
    rest = {"customer": 5, "order_date": "2026-01-01", "status": "new", "total": "2.50", "version": version}
    return {"id": number, **rest}


def lines_of(join: Join, number: int) -> list[int]:
    columns = join.document(number)
    assert columns is not None
    return [one["line_id"] for one in columns[-1].obj]


def test_the_usual_way_joins_rows_in_whatever_order_they_come() -> None:
    join = Join()
    assert join.take("order_lines", Change("c", None, line(10, 1))) == {1}
    assert join.document(1) is None
    assert join.take("purchase_orders", Change("c", None, order(1))) == {1}
    assert lines_of(join, 1) == [10]


def test_the_usual_way_follows_a_move_and_a_delete() -> None:
    join = Join()
    for number in (1, 2):
        join.take("purchase_orders", Change("c", None, order(number)))
    join.take("order_lines", Change("c", None, line(10, 1)))
    assert join.take("order_lines", Change("u", line(10, 1), line(10, 2))) == {1, 2}
    assert (lines_of(join, 1), lines_of(join, 2)) == ([], [10])
    join.take("order_lines", Change("d", line(10, 2), None))
    assert lines_of(join, 2) == []
    assert join.take("purchase_orders", Change("d", order(2), None)) == {2}
    assert join.document(2) is None


def test_a_missing_and_a_changed_document_are_lost() -> None:
    truth = [(1, "new", 10), (1, "new", 11), (2, "new", 12), (3, "new", None)]
    assert difference(truth, [(1, "new", 10), (3, "new", None)]) == Comparison(2, lost=2, duplicates=0)


def test_a_doubled_document_and_a_ghost_are_duplicates() -> None:
    truth = [(1, "new", 10)]
    assert difference(truth, [(1, "new", 10), (1, "new", 10), (2, "new", 12)]) == Comparison(2, lost=0, duplicates=2)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([], 50) is None
    assert percentile([1.0], 99) == 1.0
    assert percentile([float(number) for number in range(1, 101)], 99) == 99.0


def outcome(reader: Reader, comparison: Comparison, verify: str = "equal") -> Outcome:
    usual = side(looked([document(is_whole=False)]), Comparison(1, 0, 0), [])
    return Outcome(3, 1, 1, 6.5, verify, side(reader, comparison, []), usual)


def test_no_promise_fell_when_only_the_usual_way_was_torn() -> None:
    assert outcome(looked([document()]), Comparison(1, 0, 0)).fallen() == []


@pytest.mark.parametrize(
    ("reader", "comparison", "verify", "promise"),
    [
        (looked([document(is_whole=False)]), Comparison(1, 0, 0), "equal", "whole"),
        (looked([document(version=2)], [document(version=1)]), Comparison(1, 0, 0), "equal", "backwards"),
        (looked([document()]), Comparison(1, 1, 0), "equal", "missing"),
        (looked([document()]), Comparison(1, 0, 1), "equal", "duplicates"),
        (looked([document()]), Comparison(1, 0, 0), "different", "verify"),
        (Reader(), Comparison(0, 0, 0), "equal", "nothing"),
    ],
)
def test_a_promise_that_fell_is_named(reader: Reader, comparison: Comparison, verify: str, promise: str) -> None:
    fallen = outcome(reader, comparison, verify).fallen()
    assert len(fallen) == 1
    assert promise in fallen[0]


def test_the_report_shows_both_ways_side_by_side_and_is_json() -> None:
    seen = outcome(looked([document()]), Comparison(1, 0, 0))
    text = StringIO()
    show(seen, Console(file=text, width=100))
    assert "the usual way" in text.getvalue()
    assert "verify: equal" in text.getvalue()
    assert json.loads(json.dumps(as_json(seen)))["fallen"] == []


def test_the_restart_is_kept_apart_from_the_lag() -> None:
    reader = looked([document()])
    reader.deliveries = [Delivery(1.0, 1.5), Delivery(9.0, 16.0), Delivery(20.0, 20.25)]
    assert side(reader, Comparison(1, 0, 0), [Interruption(10.0, 15.0)]).lag_p99_seconds == 0.5


@pytest.fixture(scope="module")
def shop_dsn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    postgres = EmbeddedPostgres(Path(tmp_path_factory.mktemp("shop")) / "postgres")
    postgres.start()
    try:
        yield postgres.dsn()
    finally:
        postgres.remove()


GOOD_VIEW = """
CREATE VIEW documents AS SELECT o.*, (SELECT jsonb_agg(jsonb_build_object(
  'line_id', l.id, 'item', item, 'quantity', quantity, 'price', price)) FROM order_lines l
  WHERE order_id = o.id) AS lines
FROM purchase_orders o
"""


def test_every_committed_transaction_of_the_shop_keeps_each_total_equal_to_its_lines(shop_dsn: str) -> None:
    open_shop(shop_dsn, seed=1, orders=20)
    chance = Random(1)
    wrong = """SELECT count(*) FROM purchase_orders o WHERE total <>
      (SELECT COALESCE(SUM(quantity * price), 0) FROM order_lines WHERE order_id = o.id)"""
    with psycopg.connect(shop_dsn, autocommit=True, prepare_threshold=None) as connection:
        results = [one_transaction(connection, chance) for _ in range(100)]
        assert connection.execute(wrong).fetchone() == (0,)
        connection.execute(GOOD_VIEW)
    assert None in results
    assert compare(shop_dsn, shop_dsn, "documents").lost == 0
