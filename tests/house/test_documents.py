"""What the documents show exists: commands, options, targets, files and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tests.house.repository import ROOT, documents

from tidegate.pipeline.project import (
    FilesSource,
    MaterializationSettings,
    PostgresSource,
    ProjectFile,
    SparkSettings,
    TableSettings,
    TickSettings,
)

SHELL_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:make|tidegate) [^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def commands(document: Path) -> Iterator[str]:
    """Every shell command that a document shows, from blocks and from running text."""
    text = document.read_text()
    for block in SHELL_BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line.strip().removeprefix("$ ").split(" #")[0].strip() for line in lines)
    yield from INLINE.findall(ANY_BLOCK.sub("", text))


def shown(program: str) -> list[tuple[str, list[str]]]:
    found = []
    for document in documents():
        for command in commands(document):
            words = shlex.split(command.split("|")[0]) if command.split(" ")[0].endswith(program) else []
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and Path(words[0]).name == program:
                found.append((f"{document.relative_to(ROOT)}: {command}", words[1:]))
    return found


def test_the_readme_shows_the_two_commands() -> None:
    readme = list(commands(ROOT / "README.md"))
    assert "make demo" in readme
    assert "make test" in readme


def test_every_make_target_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = [
        place
        for place, words in shown("make")
        if not {word for word in words if "=" not in word and word != "-j"} <= targets
    ]
    assert not wrong, "\n".join(wrong)


def test_every_tidegate_command_and_option_shown_exists() -> None:
    group = typer.main.get_command(import_module("tidegate.cli.main").app)
    wrong = [f"{place}: {fault}" for place, words in shown("tidegate") if (fault := fault_in(group, words))]
    assert not wrong, "\n".join(wrong)


def fault_in(group: Any, words: list[str]) -> str:
    """What is wrong with the words behind `tidegate`, or nothing."""
    options = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
    while words and words[0].startswith("-"):
        if words.pop(0).split("=")[0] not in options | {"--help"}:
            return "no such option"
    if not words:
        return ""
    command = getattr(group, "commands", {}).get(words[0])
    if command is None:
        return f"no command {words[0]}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.split("=")[0] for word in words[1:] if word.startswith("-")} - known - {"--help"}
    return f"no option {sorted(unknown)}" if unknown else ""


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return plain.replace(" ", "-")


def anchors(document: Path) -> set[str]:
    return {slug(heading) for heading in HEADING.findall(ANY_BLOCK.sub("", document.read_text()))}


def test_relative_links_resolve() -> None:
    wrong = []
    for document in documents():
        for link in LINK.findall(ANY_BLOCK.sub("", document.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{document.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


SETTINGS: dict[str, type[BaseModel]] = {
    "The project": ProjectFile,
    "Spark": SparkSettings,
    "Source files": FilesSource,
    "Source postgres": PostgresSource,
    "Tables": TableSettings,
    "Materializations": MaterializationSettings,
    "Tick": TickSettings,
}


def settings_shown(section: str) -> dict[str, str]:
    """The settings in one section of the configuration page, each with its default as it stands there."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|\n]*\|([^|\n]*)\|", body, re.MULTILINE)
    return {name: default.strip().strip("`") for name, default in rows}


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return ""
    return "none" if field.default is None else str(field.default)


@pytest.mark.parametrize("section", SETTINGS)
def test_every_setting_is_documented_with_its_default(section: str) -> None:
    fields = SETTINGS[section].model_fields
    assert settings_shown(section) == {name: default_of(field) for name, field in fields.items()}
