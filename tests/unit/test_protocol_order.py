"""Which message may follow which."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ProtocolViolation
from tidegate.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    Request,
    Response,
    StartCommit,
    StartedCommit,
    Store,
)
from tidegate.protocol.order import NEXT, End, Phase, next_phase

KINDS: list[type[Any]] = [*get_args(Request), *get_args(Response), End]
ROUND = [Acknowledge, Acknowledged, Load, Loaded, Flush, Loaded, Flushed, Store, StartCommit, StartedCommit]


def walk(*messages: type[Any]) -> Phase:
    phase = Phase.NEW
    for message in messages:
        phase = next_phase(phase, message)
    return phase


def test_two_rounds_follow_each_other() -> None:
    assert walk(Open, Opened, *ROUND, *ROUND, Acknowledge, Acknowledged, End) is Phase.CLOSED


def test_a_round_without_loads_and_stores_is_a_round() -> None:
    assert walk(Open, Opened, Acknowledge, Acknowledged, Flush, Flushed, StartCommit, StartedCommit) is Phase.COMMITTED


def test_loads_need_not_wait_for_acknowledged() -> None:
    assert walk(Open, Opened, Acknowledge, Load, Loaded, Load, Acknowledged, Load, Flush) is Phase.FLUSHING


def test_flush_waits_for_acknowledged() -> None:
    with pytest.raises(ProtocolViolation, match="Flush came out of turn"):
        walk(Open, Opened, Acknowledge, Load, Flush)


def test_nothing_is_loaded_after_flushed() -> None:
    with pytest.raises(ProtocolViolation, match="Loaded came out of turn"):
        walk(Open, Opened, Acknowledge, Acknowledged, Load, Flush, Flushed, Loaded)


def test_the_first_exchange_after_open_is_acknowledge() -> None:
    with pytest.raises(ProtocolViolation):
        walk(Open, Opened, Load)


@pytest.mark.parametrize("inside", range(3, len(ROUND)))
def test_the_end_inside_a_round_is_a_violation(inside: int) -> None:
    with pytest.raises(ProtocolViolation, match="End came out of turn"):
        walk(Open, Opened, *ROUND[:inside], End)


@given(st.sampled_from(list(Phase)), st.sampled_from(KINDS))
def test_whatever_the_table_does_not_name_is_a_violation(phase: Phase, message: type[Any]) -> None:
    if message in NEXT[phase]:
        assert next_phase(phase, message) is NEXT[phase][message]
        return
    with pytest.raises(ProtocolViolation) as raised:
        next_phase(phase, message)
    assert raised.value.remedy


@given(st.lists(st.sampled_from(KINDS), max_size=30))
def test_no_stream_stores_without_open_and_flushed(messages: list[type[Any]]) -> None:
    phase, before = Phase.NEW, []
    for message in messages:
        try:
            phase = next_phase(phase, message)
        except ProtocolViolation:
            return
        before.append(message)
        if message is Store:
            assert Open in before and Flushed in before


def test_every_message_has_a_place_in_the_table() -> None:
    named = {message for nexts in NEXT.values() for message in nexts}
    assert named == set(KINDS)
