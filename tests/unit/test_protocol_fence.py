"""Who may write, and from where it goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import FixConfiguration
from tidegate.protocol.fence import Fence, FenceRow, agreed_checkpoint, checkpoint_over, plan_open
from tidegate.protocol.messages import ALL_KEYS, START, KeyRange, RuntimeCheckpoint

HALF = 0x80000000
LOWER, UPPER = KeyRange(0, HALF - 1), KeyRange(HALF, 0xFFFFFFFF)
BOUNDS = st.sampled_from([0, 1, 5, HALF - 1, HALF, HALF + 1, 0xFFFFFFFE, 0xFFFFFFFF])
RANGES = st.tuples(BOUNDS, BOUNDS).map(lambda ends: KeyRange(min(ends), max(ends)))


def row(key_range: KeyRange, tick: int, fence: int = 1) -> FenceRow:
    return FenceRow(key_range, Fence(fence), RuntimeCheckpoint(tick, round=tick))


def test_a_brand_new_row_says_start_from_zero() -> None:
    plan = plan_open([], ALL_KEYS)
    assert plan.rows == (plan.mine,)
    assert plan.mine.checkpoint == START


def test_opening_again_raises_the_fence_and_keeps_the_checkpoint() -> None:
    plan = plan_open([row(ALL_KEYS, 7, fence=3)], ALL_KEYS)
    assert (plan.mine.fence, plan.mine.checkpoint.tick) == (4, 7)


def test_a_part_inherits_the_checkpoint_of_the_whole_and_fences_it_off() -> None:
    plan = plan_open([row(ALL_KEYS, 7, fence=3)], LOWER)
    assert plan.mine.checkpoint.tick == 7
    assert {(changed.key_range, changed.fence) for changed in plan.rows} == {(ALL_KEYS, 4), (LOWER, 4)}


def test_the_other_half_is_left_alone() -> None:
    plan = plan_open([row(LOWER, 7), row(UPPER, 9)], LOWER)
    assert [changed.key_range for changed in plan.rows] == [LOWER]


def test_the_whole_after_its_parts_goes_on_where_they_are_and_not_where_it_was() -> None:
    assert checkpoint_over([row(ALL_KEYS, 7), row(LOWER, 9), row(UPPER, 9)], ALL_KEYS).tick == 9


def test_a_part_after_the_whole_goes_on_where_the_whole_is() -> None:
    assert checkpoint_over([row(ALL_KEYS, 30), row(LOWER, 9), row(UPPER, 9)], LOWER).tick == 30


@pytest.mark.parametrize("rows", [[row(LOWER, 8), row(UPPER, 9)], [row(LOWER, 8)], [row(ALL_KEYS, 7), row(LOWER, 9)]])
def test_parts_at_different_ticks_do_not_become_one(rows: list[FenceRow]) -> None:
    with pytest.raises(FixConfiguration, match="different ticks"):
        plan_open(rows, ALL_KEYS)


@given(st.lists(st.tuples(RANGES, st.integers(0, 3)), max_size=12))
def test_there_are_never_two_live_fences_for_overlapping_ranges(opens: list[tuple[KeyRange, int]]) -> None:
    rows: dict[KeyRange, FenceRow] = {}
    sessions: list[FenceRow] = []
    for wanted, _ in opens:
        try:
            plan = plan_open(list(rows.values()), wanted)
        except FixConfiguration:
            continue
        rows |= {changed.key_range: changed for changed in plan.rows}
        sessions.append(plan.mine)
        live = [mine for mine in sessions if rows[mine.key_range].fence == mine.fence]
        assert plan.mine in live
        overlaps = [(a, b) for a in live for b in live if a is not b and a.key_range.overlaps(b.key_range)]
        assert not overlaps


@given(st.lists(st.tuples(RANGES, st.integers(1, 3)), max_size=12))
def test_no_key_ever_moves_backward(opens: list[tuple[KeyRange, int]]) -> None:
    rows: dict[KeyRange, FenceRow] = {}
    delivered = dict.fromkeys([0, 1, 5, HALF - 1, HALF, HALF + 1, 0xFFFFFFFE, 0xFFFFFFFF], START.tick)
    for wanted, ticks in opens:
        try:
            plan = plan_open(list(rows.values()), wanted)
        except FixConfiguration:
            continue
        inside = [key for key in delivered if key in wanted]
        assert {delivered[key] for key in inside} == {plan.mine.checkpoint.tick}
        tick = plan.mine.checkpoint.tick + ticks
        rows |= {changed.key_range: changed for changed in plan.rows}
        rows[wanted] = row(wanted, tick, plan.mine.fence)
        delivered |= dict.fromkeys(inside, tick)


def at(tick: int, round_: int, seal: str | None = "ours") -> RuntimeCheckpoint:
    return RuntimeCheckpoint(tick, f"position {tick}", round_, seal)


def agreed(log: RuntimeCheckpoint, destination: RuntimeCheckpoint) -> RuntimeCheckpoint:
    """What is agreed on in a state folder that has sealed every tick itself."""
    return agreed_checkpoint("m", log, destination, at(destination.tick, 0))


def test_a_destination_that_is_one_round_ahead_wins() -> None:
    assert agreed(at(57, 7), at(60, 8)) == at(60, 8)
    assert agreed(START, at(3, 1)) == at(3, 1)
    assert agreed(START, START) == START


@pytest.mark.parametrize("found", [START, at(56, 6)])
def test_a_lost_or_restored_row_is_refused_with_a_remedy(found: RuntimeCheckpoint) -> None:
    with pytest.raises(FixConfiguration, match="restored from a backup") as raised:
        agreed(at(57, 7), found)
    assert "new name" in raised.value.remedy


def test_a_lost_recovery_log_is_refused() -> None:
    with pytest.raises(FixConfiguration, match="knows of no round"):
        agreed(START, at(57, 7))


@pytest.mark.parametrize("log", [START, at(3, 1)])
def test_a_destination_at_a_tick_that_is_not_reached_here_is_refused(log: RuntimeCheckpoint) -> None:
    with pytest.raises(FixConfiguration, match="which the state folder has not reached"):
        agreed_checkpoint("m", log, at(57, log.round + 1), None)


@pytest.mark.parametrize("log", [START, at(3, 1), at(57, 2)])
def test_a_destination_at_a_tick_that_was_sealed_elsewhere_is_refused(log: RuntimeCheckpoint) -> None:
    with pytest.raises(FixConfiguration, match="another one than that tick"):
        agreed_checkpoint("m", log, at(57, 2, "theirs"), at(57, 0))


def test_what_an_earlier_version_has_delivered_is_taken_as_ours() -> None:
    assert agreed(START, at(57, 1, None)).seal is None
