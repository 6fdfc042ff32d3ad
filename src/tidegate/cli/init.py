"""`tidegate init`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tidegate.errors import FixConfiguration

_FIRST_PROJECT = Path(__file__).with_name("first_project")
_FILES = ("tidegate.yaml", "views/orders_with_lines.sql", "events/shop.jsonl")
_IGNORED = ".tidegate/\nout.db*\n"


def write_project(folder: Path) -> Iterator[Path]:
    """Writes the files of a first project, which runs as it is; overwrites nothing."""
    files = {name: (_FIRST_PROJECT / name).read_text() for name in _FILES} | {".gitignore": _IGNORED}
    for name in files:
        if (folder / name).exists():
            raise FixConfiguration(f"{folder / name} exists already", remedy="Choose an empty folder with --project.")
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise FixConfiguration(
                f"{path} cannot be written: {error.strerror}", remedy="Choose another folder with --project."
            ) from None
        yield path
