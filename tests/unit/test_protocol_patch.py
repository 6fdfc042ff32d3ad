"""RFC 7396, and which part of the state a split may write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.protocol.messages import KeyRange, StateUpdate
from tidegate.protocol.patch import apply_updates, below_range, merge_patch, stays_below_range

# The table in appendix A of RFC 7396, and the example of its section 3.
EXAMPLES: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    (
        {
            "title": "Goodbye!",
            "author": {"givenName": "John", "familyName": "Doe"},
            "tags": ["example"],
            "content": "x",
        },
        {"title": "Hello!", "phoneNumber": "+01-123", "author": {"familyName": None}, "tags": ["sample"]},
        {
            "title": "Hello!",
            "author": {"givenName": "John"},
            "tags": ["sample"],
            "content": "x",
            "phoneNumber": "+01-123",
        },
    ),
]
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@pytest.mark.parametrize(("target", "patch", "expected"), EXAMPLES)
def test_a_patch_does_what_the_rfc_shows(target: Any, patch: Any, expected: Any) -> None:
    assert merge_patch(target, patch) == expected


@given(JSON, JSON)
def test_a_patch_is_idempotent_and_changes_neither_side(target: Any, patch: Any) -> None:
    before = copy.deepcopy((target, patch))
    once = merge_patch(target, patch)
    assert (target, patch) == before
    assert merge_patch(once, patch) == once


def test_updates_apply_in_their_order() -> None:
    updates = [StateUpdate({"a": 1}), StateUpdate({"a": {"b": 2}}), StateUpdate({"x": 1}, merge_patch=False)]
    assert apply_updates({"a": {"c": 3}}, updates[:2]) == {"a": {"b": 2}}
    assert apply_updates({"a": {"c": 3}}, updates) == {"x": 1}


def test_a_split_writes_below_its_own_range_only() -> None:
    mine, other = KeyRange(0, 0x7FFFFFFF), KeyRange(0x80000000, 0xFFFFFFFF)
    update = below_range(mine, "orders", {"files": ["a"]})
    assert update.updated == {"00000000-7fffffff": {"orders": {"files": ["a"]}}}
    assert stays_below_range(update, mine)
    assert not stays_below_range(update, other)
    assert not stays_below_range(StateUpdate({}, merge_patch=False), mine)
    assert not stays_below_range(StateUpdate(None), mine)
