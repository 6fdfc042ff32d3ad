"""Driver state: RFC 7396 merge patches, and the part of the state that a split may write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidegate.protocol.messages import KeyRange, StateUpdate


def merge_patch(target: Any, patch: Any) -> Any:
    """The target with the patch applied, as RFC 7396 says; neither is changed."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def apply_updates(state: Any, updates: Iterable[StateUpdate]) -> Any:
    """The state after all updates, in their order. (Merge patches do not combine into one.)"""
    for update in updates:
        state = merge_patch(state, update.updated) if update.merge_patch else update.updated
    return state


def below_range(key_range: KeyRange, binding_key: str, value: Any) -> StateUpdate:
    """A patch that writes where this split, for this binding, may write."""
    return StateUpdate({key_range.text: {binding_key: value}})


def stays_below_range(update: StateUpdate, key_range: KeyRange) -> bool:
    """Whether the update leaves the other splits' state alone."""
    return update.merge_patch and isinstance(update.updated, dict) and set(update.updated) <= {key_range.text}
