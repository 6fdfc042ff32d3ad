"""`status`: how far everything is, read from the catalog beside a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.capture.sealing import Waiting
from tidegate.catalog.contract import Catalog
from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.errors import FixConfiguration
from tidegate.pipeline.project import MaterializationSettings, Project


@dataclass(frozen=True)
class CollectionStatus:
    name: str
    kind: str
    tick: int
    rows: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class MaterializationStatus:
    name: str
    tick: int


@dataclass(frozen=True)
class Status:
    """Everything at one moment; `rows` are rows of history (updates)."""

    tick: int
    source_position: str | None
    commit_ms: int | None
    collections: tuple[CollectionStatus, ...]
    materializations: tuple[MaterializationStatus, ...]
    waiting: tuple[str, ...]


def status_of(project: Project) -> Status:
    path = project.state / "catalog.db"
    if not path.exists():
        raise FixConfiguration(f"{project.state} holds no state yet", remedy="Run `tidegate run` first.")
    catalog = SqliteCatalog(path)
    try:
        return _status(project, catalog)
    finally:
        catalog.close()


def _status(project: Project, catalog: Catalog) -> Status:
    seal, derived = catalog.last_seal(), catalog.derived()
    tables = [name.removeprefix("table:") for name in catalog.settings("table:")]
    views = [view.name for view in project.views]
    return Status(
        tick=derived,
        source_position=seal.source_position if seal else None,
        commit_ms=seal.commit_ms if seal else None,
        collections=tuple(
            _collection(catalog, name, kind, derived)
            for names, kind in ((tables, "table"), (views, "view"))
            for name in names
        ),
        materializations=tuple(
            MaterializationStatus(one.known_as, _delivered(catalog, one, derived))
            for one in project.file.materializations
        ),
        waiting=tuple(str(one) for one in _waiting(catalog)),
    )


def _delivered(catalog: Catalog, one: MaterializationSettings, derived: int) -> int:
    """Up to which tick all is there: a tick that changes nothing in the view needs no round."""
    tick = catalog.checkpoint(one.known_as).tick
    if catalog.setting(f"view:{one.view}") is None:
        return tick
    waiting = catalog.files(one.view, tick, derived)
    return max(tick, min((file.first for file in waiting), default=derived + 1) - 1)


def _collection(catalog: Catalog, name: str, kind: str, derived: int) -> CollectionStatus:
    files = catalog.files(name, -1, derived)
    rows, size_bytes = sum(one.rows for one in files), sum(one.size_bytes for one in files)
    return CollectionStatus(name, kind, derived, rows, len(files), size_bytes)


def _waiting(catalog: Catalog) -> Sequence[Waiting]:
    return [Waiting(**one) for one in json.loads(catalog.setting("waiting") or "[]")]
