"""For one tick: which offsets of each log partition it reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

Tick = NewType("Tick", int)
NO_TICK = Tick(-1)


@dataclass(frozen=True, order=True)
class LogPartition:
    topic: str
    partition: int


@dataclass(frozen=True)
class OffsetRange:
    """The offsets `start` to `end - 1` of one partition."""

    topic: str
    partition: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}, offsets {self.start} to {self.end - 1}"


@dataclass(frozen=True)
class Binding:
    """What one tick reads; written down before anything is read, never changed."""

    tick: Tick
    ranges: tuple[OffsetRange, ...]


Offsets = Mapping[LogPartition, int]


def shares(
    backlog: Mapping[LogPartition, int], held: Mapping[LogPartition, int], budget: int
) -> dict[LogPartition, int]:
    """How many records to read of each partition: in proportion to its backlog, less what is read and still pending.

    A partition that is ahead of the others thus waits for them; what it leaves is shared out again.
    """
    if sum(backlog.values()) <= budget:
        return dict(backlog)
    taken = _proportional(backlog, held, budget)
    left = budget - sum(taken.values())
    rest = {partition: count - taken[partition] for partition, count in backlog.items()}
    behind = {partition: count if not held.get(partition) else 0 for partition, count in rest.items()}
    more = _proportional(behind if any(behind.values()) else rest, {}, left)
    return {partition: taken[partition] + more[partition] for partition in backlog}


def _proportional(
    backlog: Mapping[LogPartition, int], held: Mapping[LogPartition, int], budget: int
) -> dict[LogPartition, int]:
    total = sum(backlog.values())
    if not total or budget <= 0:
        return dict.fromkeys(backlog, 0)
    exact = {partition: min(count, count * budget / total) for partition, count in backlog.items()}
    taken = {partition: max(0, int(wish) - held.get(partition, 0)) for partition, wish in exact.items()}
    for partition in sorted(exact, key=lambda one: (held.get(one, 0), int(exact[one]) - exact[one], one)):
        if sum(taken.values()) < budget and taken[partition] < backlog[partition]:
            taken[partition] += 1
    return taken


def bind(tick: Tick, read: Offsets, ends: Offsets, held: Mapping[LogPartition, int], budget: int) -> Binding:
    """The next tick's ranges: from where the last one stopped, at most `budget` records in all."""
    backlog = {partition: end - read.get(partition, 0) for partition, end in ends.items()}
    chosen = shares({partition: count for partition, count in backlog.items() if count > 0}, held, budget)
    ranges = tuple(
        OffsetRange(one.topic, one.partition, read.get(one, 0), read.get(one, 0) + count)
        for one, count in sorted(chosen.items())
        if count
    )
    return Binding(tick, ranges)


def after(read: Offsets, binding: Binding) -> dict[LogPartition, int]:
    """Where reading goes on after this binding."""
    return {**read, **{LogPartition(one.topic, one.partition): one.end for one in binding.ranges}}


def rewound(read: Offsets, bindings: Sequence[Binding]) -> dict[LogPartition, int]:
    """Where reading stood before the first of these bindings, the newest ones that there are."""
    found = dict(read)
    for one in (one for binding in reversed(bindings) for one in binding.ranges):
        found[LogPartition(one.topic, one.partition)] = one.start
    return {partition: start for partition, start in found.items() if start}


class Barrier:
    """Knows since which tick's facts everything in the log has been read.

    At each bind it is told the log's ends. Once reading has passed the ends that were seen at the bind of tick b, all
    that was in the log when the facts of tick b - 1 were known has been read.
    """

    def __init__(self) -> None:
        self._target: tuple[int, Offsets] | None = None
        self.read_all_since = -1

    def bound(
        self, tick: Tick, ends: Offsets | None, read: Offsets, exempt: Callable[[LogPartition], bool] = lambda _: False
    ) -> None:
        """`ends` is None while the log is still being filled with what was there before (an import).

        A partition that is exempt is known to hold nothing more of what is waited for.
        """
        if self._target is None and ends is not None:
            self._target = (tick - 1, dict(ends))
        if self._target and all(exempt(one) or read.get(one, 0) >= end for one, end in self._target[1].items()):
            self.read_all_since = self._target[0]
            self._target = None
