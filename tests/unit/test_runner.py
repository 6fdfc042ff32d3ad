"""When a run until idle may end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tests.pipeline import write_files

from tidegate.capture.sealing import Waiting
from tidegate.pipeline.project import load
from tidegate.pipeline.runner import Run, Watcher
from tidegate.pipeline.ticks import TickDone


class Anything:
    """Takes every call and says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Feed(Anything):
    """All is captured, and a look over the files is under way now and then."""

    captured, trouble = True, None

    def __init__(self) -> None:
        self._looks = iter([False, False, True, False])

    @property
    def log_is_filled(self) -> bool:
        return next(self._looks, True)


class Waits:
    """Ticks of which one waits until the log is filled, and has been read through."""

    def __init__(self) -> None:
        self.pending = [Waiting("0-1-7", "orders", None, 1)]

    def step(self, *, log_is_filled: bool) -> TickDone | None:
        if not log_is_filled or not self.pending:
            return None
        self.pending.clear()
        return TickDone(0, 0, 1, {}, None, None)

    def waiting(self) -> list[Waiting]:
        return self.pending


def test_a_run_until_idle_does_not_end_while_a_look_over_the_files_is_under_way(tmp_path: Path) -> None:
    text = "name: shop\nsource: {kind: files, topic_prefix: shop, path: all.jsonl}\ntick: {every_ms: 0}\n"
    project = load(write_files(tmp_path, text, v="SELECT id FROM orders"))
    run, ticks = Run(project, cast(Watcher, Anything()), until_idle=True), Waits()
    nothing, feed, waits = (cast(Any, one) for one in (Anything(), Feed(), ticks))
    run._loop(nothing, feed, waits, nothing)
    assert ticks.pending == []
