"""Every error that Tidegate raises on purpose tells its reader what to do."""

from __future__ import annotations

import ast

from tests.house.repository import Module, called_name, calls, source_modules


def error_classes() -> set[str]:
    """TidegateError and all that inherit from it, by name, in whatever module."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for module in source_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"TidegateError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def own_initializer(module: Module) -> set[str]:
    """Errors with an __init__ of their own, which hand the remedy to super() themselves."""
    return {
        node.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in node.body)
    } & error_classes()


def has_remedy(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "remedy"]
    if not given:
        return False
    if isinstance(given[0], ast.Constant):
        return isinstance(given[0].value, str) and bool(given[0].value.strip())
    return not (isinstance(given[0], ast.JoinedStr) and not given[0].values)


def test_every_error_is_raised_with_a_remedy() -> None:
    inits = set().union(*(own_initializer(module) for module in source_modules())) - {"TidegateError"}
    plain = error_classes() - inits
    wrong = [
        f"{module.place(call)}: {called_name(call)}"
        for module in source_modules()
        for call in calls(module.tree)
        if called_name(call) in plain and not has_remedy(call)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_error_with_its_own_initializer_hands_a_remedy_on() -> None:
    wrong = []
    for module in source_modules():
        for name in own_initializer(module) - {"TidegateError"}:
            definition = next(
                node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef) and node.name == name
            )
            handed = [call for call in calls(definition) if called_name(call) == "__init__"]
            if not handed or not all(map(has_remedy, handed)):
                wrong.append(f"{module.place(definition)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_no_tidegate_error_is_raised_without_being_told_what_happened() -> None:
    wrong = [
        module.place(node)
        for module in source_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in error_classes()
    ]
    assert not wrong
