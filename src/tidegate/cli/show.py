"""What the commands print: a live table on a terminal, plain lines elsewhere, JSON lines where asked for."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tidegate.pipeline.materialize import Delivered
from tidegate.pipeline.runner import SOURCE
from tidegate.pipeline.ticks import TickDone

RATE_SECONDS = 5.0


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, default=_plain) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, (frozenset, set, tuple)):
        return list(value)
    return str(value)


class Lines:
    """A plain line, or a JSON object, for each thing that happens."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._troubles: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def said(self, text: str) -> None:
        self._print({"event": "said", "text": text}, text)

    def ticked(self, done: TickDone) -> None:
        rows = ", ".join(f"{name} {count}" for name, count in sorted(done.rows.items()) if count)
        line = f"tick {done.tick}: {done.events} row events, {done.transactions} transactions"
        line += f" up to {done.source_position}" if done.source_position else ""
        self._print({"event": "tick", **asdict(done)}, line + (f" ({rows})" if rows else ""))

    def delivered(self, round_: Delivered) -> None:
        line = f"{round_.materialization}: tick {round_.tick}, {round_.documents} documents"
        self._print({"event": "delivered", **asdict(round_)}, line)

    def trouble(self, name: str, error: str | None) -> None:
        if self._troubles.get(name) != error:
            self._troubles[name] = error
            over = "is followed again" if name == SOURCE else "delivers again"
            self._print({"event": "trouble", "name": name, "error": error}, f"{name}: {error or over}")

    def _print(self, value: Mapping[str, Any], line: str) -> None:
        with self._lock:
            if self._as_json:
                print_json(value)
            else:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


@dataclass
class _Row:
    kind: str
    tick: int = -1
    position: str = ""
    lag_ms: int | None = None
    trouble: str | None = None
    counts: list[tuple[float, int]] = field(default_factory=list)

    def count(self, now: float, rows: int) -> None:
        self.counts = [one for one in self.counts if one[0] > now - RATE_SECONDS] + [(now, rows)]

    def rate(self, now: float) -> float:
        return sum(rows for at, rows in self.counts if at > now - RATE_SECONDS) / RATE_SECONDS


class LiveTable:
    """One line for the source and for each view and materialization, kept up to date in place."""

    def __init__(self, console: Console, names: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        self._console, self._now = console, now
        self._rows = {name: _Row(kind) for name, kind in {SOURCE: "source", **names}.items()}
        self._commits: dict[int, int | None] = {}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def said(self, text: str) -> None:
        self._console.print(text)

    def ticked(self, done: TickDone) -> None:
        now = self._now()
        for name, row in self._rows.items():
            if row.kind != "materialization":
                row.tick = done.tick
                row.position = done.source_position or row.position
                row.lag_ms = int(now * 1000) - done.commit_ms if done.commit_ms else row.lag_ms
                row.count(now, done.rows.get(name, 0))
        self._commits = {tick: at for tick, at in self._commits.items() if tick > done.tick - 1000}
        self._commits[done.tick] = done.commit_ms

    def delivered(self, round_: Delivered) -> None:
        row, now = self._rows[round_.materialization], self._now()
        commit_ms = self._commits.get(round_.tick)
        row.tick = round_.tick
        row.lag_ms = int(now * 1000) - commit_ms if commit_ms else row.lag_ms
        row.count(now, round_.documents)

    def trouble(self, name: str, error: str | None) -> None:
        self._rows[name].trouble = error

    def _table(self) -> Table:
        table = Table("", "kind", "tick", "source position", "lag", "rows/s", "", box=None, pad_edge=False)
        now = self._now()
        for name, row in self._rows.items():
            lag = "" if row.lag_ms is None else f"{row.lag_ms / 1000:.1f} s"
            tick = "" if row.tick < 0 else str(row.tick)
            trouble = (row.trouble or "").splitlines()[0] if row.trouble else ""
            table.add_row(name, row.kind, tick, row.position, lag, f"{row.rate(now):,.0f}", trouble)
        return table
