"""`tidegate check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidegate.capture.log import LogReader
from tidegate.catalog.contract import Catalog
from tidegate.destinations.registry import destination
from tidegate.model.schema import TableSchema
from tidegate.pipeline.defining import Defined, define_all
from tidegate.pipeline.known import check_known, with_remembered
from tidegate.pipeline.materialize import check_fields, require_own_places, specification
from tidegate.pipeline.project import Project, load
from tidegate.pipeline.runner import catalog_of, session
from tidegate.pipeline.sources import check_source
from tidegate.spark.session import stop_session


@dataclass(frozen=True)
class TableFound:
    name: str
    topic: str
    key: tuple[str, ...]
    columns: dict[str, str]


@dataclass(frozen=True)
class ViewFound:
    name: str
    key: tuple[str, ...]
    columns: dict[str, str]
    plan: str


@dataclass(frozen=True)
class MaterializationFound:
    name: str
    view: str
    to: str
    promise: str


@dataclass(frozen=True)
class Found:
    """What a project means, and what its user should know."""

    tables: tuple[TableFound, ...]
    views: tuple[ViewFound, ...]
    materializations: tuple[MaterializationFound, ...]
    warnings: tuple[str, ...]

    def lines(self, explain: bool) -> Iterator[str]:
        for table in self.tables:
            yield f"table {table.name} (key {', '.join(table.key)}) from {table.topic}"
        for view in self.views:
            yield f"view {view.name} (key {', '.join(view.key)}): " + ", ".join(
                f"{name} {ddl}" for name, ddl in view.columns.items()
            )
            if explain:
                yield from (f"  {line}" for line in view.plan.splitlines())
        for one in self.materializations:
            yield f"materialization {one.name}: {one.view} to {one.to}: {one.promise}"
        for warning in self.warnings:
            yield f"warning: {warning}"
        yield "ok"


def check_project(folder: Path) -> Found:
    """Refuses what `run` would refuse before it starts; writes nothing, neither here nor there."""
    project = load(folder)
    tables, warnings = check_source(project)
    defined = _defined(project, tables)
    return Found(
        tables=tuple(_table(table) for table in tables),
        views=tuple(
            ViewFound(view.name, view.key, {one.name: one.ddl for one in view.columns}, view.explain())
            for view in defined.views
        ),
        materializations=_materializations(project, defined),
        warnings=(*warnings, *(warning for view in defined.views for warning in view.warnings)),
    )


def _defined(project: Project, tables: Sequence[TableSchema]) -> Defined:
    """What the SQL means, if the state folder can follow it."""
    spark = session(project)
    try:
        with _catalog(project) as catalog:
            if catalog is None:
                return define_all(project, tables, spark)
            defined = define_all(project, with_remembered(catalog, tables), spark)
            check_known(catalog, LogReader(project.state / "log"), defined.tables, defined.views)
            return defined
    finally:
        stop_session(spark)


@contextmanager
def _catalog(project: Project) -> Iterator[Catalog | None]:
    """The state folder's, if there is one."""
    if not (project.state / "catalog.db").exists():
        yield None
        return
    catalog = catalog_of(project)
    try:
        yield catalog
    finally:
        catalog.close()


def _materializations(project: Project, defined: Defined) -> tuple[MaterializationFound, ...]:
    views = {view.name: view for view in defined.views}
    named = [
        (settings, destination(settings.to), specification(project, settings, views[settings.view]))
        for settings in project.file.materializations
    ]
    require_own_places((driver, spec) for _, driver, spec in named)
    for _, driver, spec in named:
        check_fields(driver, spec)
    return tuple(
        MaterializationFound(settings.known_as, settings.view, settings.to, driver.capabilities.promise)
        for settings, driver, _ in named
    )


def _table(table: TableSchema) -> TableFound:
    return TableFound(table.name, table.topic, table.key, {one.name: one.type.ddl for one in table.columns})
