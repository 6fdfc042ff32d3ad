"""Functions fit the eye, and nothing is left for later."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.repository import ROOT, Function, Module, documents, source_modules

LONGEST_LINES = 40
USUAL_LINES = 25
USUAL_SHARE = 0.9

# A ratchet: a function that is longer, how long it is today, and why. An entry may shrink or go; none is added lightly.
LONG: dict[str, tuple[int, str]] = {}


def functions() -> Iterator[tuple[Module, Function]]:
    for module in source_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                yield module, node


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_a_function_fits_the_eye() -> None:
    wrong = []
    for module, function in functions():
        longest, _ = LONG.get(f"{module.name}.{function.name}", (LONGEST_LINES, ""))
        if lines_of(function) > longest:
            wrong.append(f"{module.place(function)}: {function.name} has {lines_of(function)} lines")
    assert not wrong, "\n".join(wrong)


def test_the_list_of_long_functions_only_shrinks() -> None:
    actual = {f"{module.name}.{function.name}": lines_of(function) for module, function in functions()}
    for name, (lines, reason) in LONG.items():
        assert reason
        assert actual.get(name) == lines, f"{name} has {actual.get(name)} lines, the list says {lines}: mend the list"
        assert lines > LONGEST_LINES, f"{name} fits now: take it off the list"


def test_nine_functions_in_ten_are_short() -> None:
    lengths = [lines_of(function) for _, function in functions()]
    short = sum(length < USUAL_LINES for length in lengths)
    assert short >= USUAL_SHARE * len(lengths), f"{short} of {len(lengths)}"


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    wrong = [
        f"{module.path.relative_to(ROOT)}:{number}"
        for module in source_modules()
        for number, line in enumerate(module.path.read_text().splitlines(), 1)
        if later.search(line)
    ]
    assert not wrong


def test_no_path_of_a_machine_is_named() -> None:
    folder = re.compile(r"(?<![\w.}$/-])/(tmp|work|root|home)(?=[/\s\"'`)]|$)")
    texts = [*(module.path for module in source_modules()), *documents(), ROOT / "Makefile", ROOT / "pyproject.toml"]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if folder.search(line)
    ]
    assert not wrong, "\n".join(wrong)
