"""What a run shows: trouble with a destination or with the source, and the end of it."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from tidegate.cli.show import Lines, LiveTable
from tidegate.pipeline.runner import SOURCE


def shown(live: LiveTable, console: Console) -> str:
    assert isinstance(console.file, StringIO)
    console.file.truncate(0)
    with live:
        pass
    return console.file.getvalue()


def test_the_live_table_has_a_row_for_the_source() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=200)
    live = LiveTable(console, {"orders": "view"})
    live.trouble(SOURCE, "Postgres is away\n  remedy: wait")
    assert "Postgres is away" in shown(live, console)
    live.trouble(SOURCE, None)
    assert "Postgres is away" not in shown(LiveTable(console, {"orders": "view"}), console)


def test_trouble_with_the_source_is_said_once_and_so_is_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(as_json=False)
    for error in (None, "away", "away", None, None):
        lines.trouble(SOURCE, error)
    assert capsys.readouterr().out == "source: away\nsource: is followed again\n"
