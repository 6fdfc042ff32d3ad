"""Binding: what a tick reads is fair to every log partition, within its budget, and nothing is read twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.timeline.binding import LogPartition, Offsets, Tick, after, bind, shares

PARTITIONS = [LogPartition(topic, number) for topic in ("lines", "orders") for number in range(3)]
COUNTS = st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 500), max_size=6)
BUDGETS = st.integers(1, 700)


@given(COUNTS, COUNTS, BUDGETS)
def test_a_share_is_never_more_than_there_is_and_all_together_keep_to_the_budget(
    backlog: Offsets, held: Offsets, budget: int
) -> None:
    found = shares(backlog, held, budget)
    assert found.keys() == backlog.keys()
    assert all(0 <= found[one] <= backlog[one] for one in backlog)
    assert sum(found.values()) <= budget
    assert any(found.values()) == any(backlog.values()), "it gets on"


@given(COUNTS, BUDGETS)
def test_partitions_of_which_nothing_is_held_share_in_proportion(backlog: Offsets, budget: int) -> None:
    found, total = shares(backlog, {}, budget), sum(backlog.values())
    for one, count in backlog.items():
        assert abs(found[one] - min(count, count * budget / max(total, 1))) <= 1


def test_a_partition_that_is_ahead_waits_for_the_others() -> None:
    ahead, behind = PARTITIONS[:2]
    assert shares({ahead: 100, behind: 100}, {ahead: 50}, 50)[behind] >= 49


@given(COUNTS, COUNTS, BUDGETS)
def test_tick_by_tick_every_record_is_read_once(ends: Offsets, held: Offsets, budget: int) -> None:
    read: dict[LogPartition, int] = {}
    tick = 0
    while (binding := bind(Tick(tick), read, ends, held, budget)).ranges:
        assert all(one.start == read.get(LogPartition(one.topic, one.partition), 0) for one in binding.ranges)
        read, tick = after(read, binding), tick + 1
    assert read == {one: end for one, end in ends.items() if end}
