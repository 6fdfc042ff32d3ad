"""What the demo has seen, which promises fell, and how both are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tidegate.demo.comparison import Comparison
from tidegate.demo.reader import Delivery, Reader


@dataclass(frozen=True)
class Interruption:
    """A time in which nothing could arrive: before the first delivery, and from the kill to the next one."""

    begin_seconds: float
    end_seconds: float

    def touches(self, delivery: Delivery) -> bool:
        return delivery.committed_seconds <= self.end_seconds and delivery.seen_seconds >= self.begin_seconds


@dataclass(frozen=True)
class Side:
    """One of the two destinations: what its reader saw, and how it compares with the shop at the end."""

    documents: int
    looks: int
    torn_states: int
    torn_documents: int
    backwards: int
    lost: int
    duplicates: int
    lag_p50_seconds: float | None
    lag_p99_seconds: float | None


@dataclass(frozen=True)
class Outcome:
    transactions: int
    rolled_back: int
    kills: int
    recovery_seconds: float
    verify: str
    tidegate: Side
    usual_way: Side

    def fallen(self) -> list[str]:
        """The promises that did not hold, in words; none if all is well."""
        ours = self.tidegate
        found = [
            (ours.torn_states, f"whole: {ours.torn_states} of {ours.looks} looks saw a state that the shop never had"),
            (ours.backwards, f"once: {ours.backwards} documents went backwards"),
            (ours.duplicates, f"once: {ours.duplicates} duplicates or ghosts"),
            (ours.lost, f"once: {ours.lost} documents are missing or differ from the shop"),
            (self.verify != "equal", f"definite: tidegate verify says {self.verify}"),
            (not (ours.looks and ours.documents and self.transactions), "nothing happened, so nothing was shown"),
        ]
        return [text for fell, text in found if fell]


def side(reader: Reader, comparison: Comparison, interruptions: Sequence[Interruption]) -> Side:
    lags = sorted(
        delivery.lag_seconds
        for delivery in reader.deliveries
        if not any(interruption.touches(delivery) for interruption in interruptions)
    )
    return Side(
        documents=comparison.documents,
        looks=reader.looks,
        torn_states=reader.torn_states,
        torn_documents=reader.torn_documents,
        backwards=reader.backwards,
        lost=comparison.lost,
        duplicates=comparison.duplicates,
        lag_p50_seconds=percentile(lags, 50),
        lag_p99_seconds=percentile(lags, 99),
    )


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least so many percent do not exceed."""
    return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)], 3) if ordered else None


def as_json(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome) | {"fallen": outcome.fallen()}


def show(outcome: Outcome, console: Console) -> None:
    console.print()
    console.print(_table(outcome))
    console.print(
        f"{outcome.transactions:,} transactions committed, {outcome.rolled_back:,} rolled back. Killed "
        f"{'once' if outcome.kills == 1 else f'{outcome.kills} times'} with SIGKILL, delivering again after "
        f"{outcome.recovery_seconds:.1f} s.\nverify: {outcome.verify}"
    )
    for text in outcome.fallen():
        console.print(f"FELL  {text}", style="bold red")
    console.print("Next: docs/getting-started.md builds your own view; docs/how-it-works.md says why this holds.")


def _table(outcome: Outcome) -> Table:
    table = Table(title="What a reader of the destination saw", title_justify="left")
    table.add_column("")
    table.add_column("Tidegate", justify="right")
    table.add_column("the usual way", justify="right")
    for label, field in (
        ("documents at the end", "documents"),
        ("looks", "looks"),
        ("torn states seen", "torn_states"),
        ("torn documents in them", "torn_documents"),
        ("went backwards", "backwards"),
        ("duplicates", "duplicates"),
        ("lost", "lost"),
    ):
        table.add_row(label, *(f"{getattr(one, field):,}" for one in (outcome.tidegate, outcome.usual_way)))
    table.add_row("lag p50 / p99, restarts apart", *map(_lag, (outcome.tidegate, outcome.usual_way)))
    return table


def _lag(one: Side) -> str:
    if one.lag_p50_seconds is None or one.lag_p99_seconds is None:
        return "not measured"
    return f"{one.lag_p50_seconds:.2f} s / {one.lag_p99_seconds:.2f} s"
