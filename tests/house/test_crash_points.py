"""Each crash point stands somewhere in the source and is played by some test."""

from __future__ import annotations

import re

import pytest
from tests.house.repository import called_name, calls, source_modules, strings, trees_of_tests

from tidegate.crash_points import CRASH_POINTS

PLAYED_IN = ("crash", "conformance", "acceptance")


def reached() -> list[tuple[str, list[str]]]:
    """Where reach() is called, and the points that the call can name."""
    found = []
    for module in source_modules():
        for call in calls(module.tree):
            if called_name(call) == "reach":
                found.append((module.place(call), [text for argument in call.args for text in strings(argument)]))
    return found


def test_a_crash_point_is_named_where_it_is_reached() -> None:
    wrong = [place for place, names in reached() if not names or not set(names) <= set(CRASH_POINTS)]
    assert not wrong


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_declared_crash_point_is_reached(point: str) -> None:
    assert any(point in names for _, names in reached())


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_declared_crash_point_is_played(point: str) -> None:
    named = re.compile(rf"(?<![\w-]){re.escape(point)}(?![\w-])")
    assert any(named.search(text) for tree in trees_of_tests(*PLAYED_IN) for text in strings(tree))
