"""Destinations by name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import cast

from tidegate.destinations.contract import Destination
from tidegate.errors import FixConfiguration


@dataclass(frozen=True)
class Entry:
    """Where a destination's class is, and which extra brings its client library."""

    module: str
    class_name: str
    extra: str | None = None


ENTRIES = {
    "postgres": Entry("tidegate.destinations.postgres", "PostgresDestination", "postgres"),
    "sqlite": Entry("tidegate.destinations.sqlite", "SqliteDestination"),
}


def destination(name: str) -> Destination:
    """The destination of that name, or what to write or install instead."""
    entry = ENTRIES.get(name)
    if entry is None:
        near = get_close_matches(name, ENTRIES, 1, 0.5)
        hint = f'Did you mean "{near[0]}"? ' if near else ""
        raise FixConfiguration(
            f'there is no destination "{name}"', remedy=f"{hint}There are: {', '.join(sorted(ENTRIES))}."
        )
    return load(name, entry)


def load(name: str, entry: Entry) -> Destination:
    """Imports the destination; only its own client library can be missing."""
    try:
        module = import_module(entry.module)
    except ImportError as error:
        if entry.extra is None or (error.name or "").startswith("tidegate"):
            raise
        raise FixConfiguration(
            f'destination "{name}" needs {error.name or "a library"}, which is not installed: {error}',
            remedy=f'Install it: pip install "tidegate[{entry.extra}]".',
        ) from error
    return cast(Destination, getattr(module, entry.class_name)())
