"""`tidegate verify`."""

from __future__ import annotations

from pathlib import Path

from tidegate.errors import FixConfiguration
from tidegate.pipeline.defining import define_all
from tidegate.pipeline.known import remembered_tables
from tidegate.pipeline.materialize import specification
from tidegate.pipeline.project import load
from tidegate.pipeline.runner import catalog_of, session
from tidegate.pipeline.verify import Verdict, verify
from tidegate.spark.session import stop_session


def verify_project(folder: Path) -> list[Verdict]:
    """A verdict for each materialization; takes no fence, so a run may go on beside it."""
    project = load(folder)
    if not (project.state / "catalog.db").exists():
        raise FixConfiguration(f"{project.state} holds no state yet", remedy="Run `tidegate run` first.")
    catalog = catalog_of(project)
    tables = remembered_tables(catalog)
    spark = session(project)
    try:
        defined = define_all(project, tables, spark)
        views = {view.name: view for view in defined.views}
        return [
            verify(
                spark,
                catalog,
                views[settings.view],
                defined,
                specification(project, settings, views[settings.view]),
                settings.to,
            )
            for settings in project.file.materializations
        ]
    finally:
        stop_session(spark)
        catalog.close()
