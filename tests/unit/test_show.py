"""What a run shows: a line for everything that moves, whole names, trouble with its remedy, and the end of it."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from tidegate.cli.show import Kind, Lines, LiveTable
from tidegate.pipeline.materialize import Delivered
from tidegate.pipeline.runner import SOURCE
from tidegate.pipeline.ticks import TickDone

VIEW, COPY = "orders_with_lines", "orders_with_lines-postgres"
NAMES: dict[Kind, list[str]] = {"table": ["purchase_orders"], "view": [VIEW], "materialization": [COPY]}
POSITION = "7071234:98765432"
NOW_SECONDS = 1_700_000_000.0
AWAY = (
    "Postgres at db.example:5432/shop cannot be reached: connection refused\n  remedy: Start the server, or correct it."
)


def narrow() -> Console:
    return Console(width=80, record=True, file=StringIO(), force_terminal=True)


def followed(console: Console, *, shows_lag: bool = True) -> LiveTable:
    """Everything is at tick 1204, committed two seconds ago."""
    live = LiveTable(console, NAMES, shows_lag=shows_lag, now=lambda: NOW_SECONDS)
    rows = {VIEW: 10, "order_lines": 25}
    live.ticked(TickDone(1204, 15, 3, rows, POSITION, int(NOW_SECONDS * 1000) - 2000))
    live.delivered(Delivered(COPY, 1204, 10))
    return live


def screen(live: LiveTable, console: Console) -> list[str]:
    """What stands on the terminal at last."""
    with live:
        console.export_text()  # from here on
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_live_table_has_a_line_for_each_table_view_and_materialization() -> None:
    console = Console(width=100, record=True, file=StringIO(), force_terminal=True)
    assert [line.split() for line in screen(followed(console), console)] == [
        ["tick", "source", "position", "lag", "rows/s", "kind"],
        ["source", "1204", POSITION, "2.0", "s", "3", "source"],
        ["purchase_orders", "1204", POSITION, "2.0", "s", "0", "table"],
        ["order_lines", "1204", POSITION, "2.0", "s", "5", "table"],  # known since its first rows came
        [VIEW, "1204", POSITION, "2.0", "s", "2", "view"],
        [COPY, "1204", POSITION, "2.0", "s", "2", "materialization"],
    ]


def test_on_eighty_columns_all_is_whole_but_the_kind() -> None:
    console = narrow()
    shown = screen(followed(console), console)
    assert max(map(len, shown)) <= 80 and len(shown) == 6
    assert shown[-1].split() == [COPY, "1204", POSITION, "2.0", "s", "2", "materializat…"]


def test_a_materialization_may_be_called_as_its_view() -> None:
    console = narrow()
    live = LiveTable(console, {"view": [VIEW], "materialization": [VIEW]})
    live.delivered(Delivered(VIEW, 7, 1))
    assert [line.split()[:2] for line in screen(live, console)[-2:]] == [[VIEW, "0"], [VIEW, "7"]]


def test_trouble_is_told_once_with_its_remedy_and_leaves_the_table_as_it_is() -> None:
    console = narrow()
    live = LiveTable(console, {**NAMES, "materialization": [COPY, "second"]})
    untroubled = screen(live, console)
    live.trouble(COPY, AWAY)
    live.trouble("second", AWAY)
    shown = screen(live, console)
    assert shown[-len(untroubled) :] == untroubled
    assert " ".join(" ".join(shown[: -len(untroubled)]).split()) == f"{COPY}, second: " + " ".join(AWAY.split())
    live.trouble(COPY, None)
    live.trouble("second", None)
    assert screen(live, console) == untroubled


def test_a_replayed_recording_shows_no_lag() -> None:
    console = narrow()
    shown = screen(followed(console, shows_lag=False), console)
    assert shown[-1].split() == [COPY, "1204", POSITION, "2", "materialization"]
    assert not [line for line in shown if " s " in line]


def test_the_live_table_has_a_row_for_the_source() -> None:
    console = narrow()
    live = LiveTable(console, {"view": ["orders"]})
    live.trouble(SOURCE, "Postgres is away\n  remedy: wait")
    assert screen(live, console)[:2] == ["source: Postgres is away", "  remedy: wait"]
    live.trouble(SOURCE, None)
    assert "Postgres is away" not in " ".join(screen(live, console))


def test_trouble_with_the_source_is_said_once_and_so_is_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(as_json=False)
    for error in (None, "away", "away", None, None):
        lines.trouble(SOURCE, error)
    assert capsys.readouterr().out == "source: away\nsource: is followed again\n"
