"""`tidegate check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidegate.destinations.registry import destination
from tidegate.model.schema import TableSchema
from tidegate.pipeline.defining import define_all
from tidegate.pipeline.materialize import check_fields, specification
from tidegate.pipeline.project import load
from tidegate.pipeline.runner import session
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
    spark = session(project)
    try:
        defined = define_all(project, tables, spark)
    finally:
        stop_session(spark)
    views = {view.name: view for view in defined.views}
    found = []
    for settings in project.file.materializations:
        driver = destination(settings.to)
        check_fields(driver, specification(project, settings, views[settings.view]))
        found.append(MaterializationFound(settings.known_as, settings.view, settings.to, driver.capabilities.promise))
    return Found(
        tables=tuple(_table(table) for table in tables),
        views=tuple(
            ViewFound(view.name, view.key, {one.name: one.ddl for one in view.columns}, view.explain())
            for view in defined.views
        ),
        materializations=tuple(found),
        warnings=(*warnings, *(warning for view in defined.views for warning in view.warnings)),
    )


def _table(table: TableSchema) -> TableFound:
    return TableFound(table.name, table.topic, table.key, {one.name: one.type.ddl for one in table.columns})
