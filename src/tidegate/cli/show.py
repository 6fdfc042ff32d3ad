"""What the commands print: a live table on a terminal, plain lines elsewhere, JSON lines where asked for."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidegate.pipeline.materialize import Delivered
from tidegate.pipeline.runner import SOURCE
from tidegate.pipeline.ticks import TickDone

RATE_SECONDS = 5.0
Kind = Literal["source", "table", "view", "materialization"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order of the stream


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
    """A line for the source and for each table, view and materialization, kept up to date in place; trouble and its
    remedy stand above. `shows_lag` is for a source that lives: the past of a recording is no lag."""

    def __init__(
        self,
        console: Console,
        names: Mapping[Kind, Sequence[str]],
        *,
        shows_lag: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._console, self._shows_lag, self._now = console, shows_lag, now
        self._rows = {
            (kind, name): _Row() for kind in KINDS for name in ((SOURCE,) if kind == "source" else names.get(kind, ()))
        }
        self._ticks: dict[int, TickDone] = {}
        self._live = Live(get_renderable=self._shown, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def said(self, text: str) -> None:
        self._console.print(text)

    def ticked(self, done: TickDone) -> None:
        self._ticks = {tick: one for tick, one in self._ticks.items() if tick > done.tick - 1000} | {done.tick: done}
        self._move(self._rows["source", SOURCE], done.tick, done.events)
        new = [name for name in done.rows if not {("table", name), ("view", name)} & self._rows.keys()]
        self._rows = self._rows | {("table", name): _Row() for name in new}  # another thread reads the former
        for (kind, name), row in self._rows.items():
            if kind in ("table", "view"):
                self._move(row, done.tick, done.rows.get(name, 0))

    def delivered(self, round_: Delivered) -> None:
        self._move(self._rows["materialization", round_.materialization], round_.tick, round_.documents)

    def _move(self, row: _Row, tick: int, count: int) -> None:
        now, done = self._now(), self._ticks.get(tick)
        row.tick = tick
        row.count(now, count)
        if done is not None:
            row.position = done.source_position or row.position
            row.lag_ms = int(now * 1000) - done.commit_ms if done.commit_ms and self._shows_lag else row.lag_ms

    def trouble(self, name: str, error: str | None) -> None:
        self._rows["source" if name == SOURCE else "materialization", name].trouble = error

    def _shown(self) -> Group:
        return Group(*self._troubles(), self._table())

    def _troubles(self) -> list[Text]:
        """Each trouble once, with all whom it keeps, and its remedy."""
        kept: dict[str, list[str]] = {}
        for (_, name), row in self._rows.items():
            if row.trouble:
                kept.setdefault(row.trouble, []).append(name)
        return [Text(f"{', '.join(names)}: {trouble}", style="bold") for trouble, names in kept.items()]

    def _table(self) -> Table:
        table, now = Table(box=None, pad_edge=False), self._now()
        table.add_column("", no_wrap=True, min_width=max(len(name) for _, name in self._rows))
        for title in ("tick", "source position", "lag", "rows/s"):
            table.add_column(title, no_wrap=True, justify="left" if title == "source position" else "right")
        table.add_column("kind")  # the one that gives way where there is no room
        for (kind, name), row in sorted(self._rows.items(), key=lambda one: KINDS.index(one[0][0])):
            lag = "" if row.lag_ms is None else f"{row.lag_ms / 1000:.1f} s"
            tick = "" if row.tick < 0 else str(row.tick)
            last = Text(kind, no_wrap=True, overflow="ellipsis")
            table.add_row(Text(name), tick, Text(row.position), lag, f"{row.rate(now):,.0f}", last)
        return table
