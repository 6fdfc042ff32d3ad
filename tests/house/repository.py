"""The repository as the house tests read it: its modules, parsed, and its documents."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file: its dotted name without `tidegate.`, where it lies, and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    def place(self, node: ast.expr | ast.stmt) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@cache
def source_modules() -> tuple[Module, ...]:
    return tuple(_module(path) for path in sorted((SOURCE / "tidegate").rglob("*.py")))


def _module(path: Path) -> Module:
    parts = path.relative_to(SOURCE / "tidegate").with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    return Module(name, path, ast.parse(path.read_text(), str(path)))


def trees_of_tests(*folders: str) -> Iterator[ast.Module]:
    for folder in folders:
        for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
            yield ast.parse(path.read_text(), str(path))


def imported(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that this one imports, wherever in it the import stands."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.place(node)}: a relative import"
            yield node.module or "", node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def called_name(call: ast.Call) -> str:
    """The last name of what is called: `reach` for both `reach(...)` and `crash_points.reach(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
