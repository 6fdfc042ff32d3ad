"""`tidegate`: the commands. Exit codes: 0 done, 1 verify found a difference, 2 fix the configuration, 3 try again
later, 4 fenced off by another process, 70 our bug."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidegate import __version__
from tidegate.cli.show import Kind, Lines, LiveTable, print_json
from tidegate.errors import TidegateError

if TYPE_CHECKING:
    from tidegate.pipeline.project import Project

app = typer.Typer(
    help="Follows a database's transactions and delivers SQL views over them, whole and exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ProjectOption = Annotated[Path, typer.Option("--project", help="The project's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

OUR_BUG = 70
DIFFERENT = 1


@contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    """Says what happened and what to do, and ends with the error's exit code."""
    try:
        yield
    except TidegateError as error:
        if as_json:
            print_json({"event": "error", "error": error.message, "remedy": error.remedy, "exit": error.exit_code})
        sys.stderr.write(f"error: {error}\n")
        if error.exit_code == OUR_BUG:
            traceback.print_exc()
        raise typer.Exit(error.exit_code) from None
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Exception:
        traceback.print_exc()
        sys.stderr.write("error: this is a bug in Tidegate; nothing is lost. Please report the lines above.\n")
        raise typer.Exit(OUR_BUG) from None


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tidegate {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def init(project: ProjectOption = Path(), as_json: JsonOption = False) -> None:
    """Start a project: tidegate.yaml and a first view."""
    from tidegate.cli.init import write_project

    with _errors(as_json):
        written = list(write_project(project))
    if as_json:
        print_json({"wrote": written})
    for path in () if as_json else written:
        sys.stdout.write(f"wrote {path}\n")


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long the shop is open.")] = 45.0,
    folder: Annotated[Path | None, typer.Option(help="Work here, and leave everything to look at.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a small shop through the whole pipeline, kill it once, and check every promise."""
    from tidegate.demo.run import run_demo

    with _errors(as_json):
        code = run_demo(seconds, as_json, folder)
    raise typer.Exit(code)


@app.command()
def check(
    project: ProjectOption = Path(),
    explain: Annotated[bool, typer.Option("--explain", help="Show how each view is kept.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the project, its source, its views and its destinations, without changing anything."""
    from tidegate.cli.check import check_project

    with _errors(as_json):
        found = check_project(project)
    if as_json:
        print_json(found)
        return
    for line in found.lines(explain):
        sys.stdout.write(line + "\n")


@app.command()
def run(
    project: ProjectOption = Path(),
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when everything captured is delivered.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow the source, keep the views, deliver them. Ctrl-C ends cleanly; a second one at once, and safely too."""
    from tidegate.pipeline.project import load
    from tidegate.pipeline.runner import Run

    with _errors(as_json):
        loaded = load(project)
        console = Console()
        if as_json or not console.is_terminal:
            _run(Run(loaded, Lines(as_json), until_idle))
        else:
            with LiveTable(console, _names(loaded), shows_lag=loaded.file.source.kind != "files") as live:
                _run(Run(loaded, live, until_idle))


def _names(project: Project) -> dict[Kind, Sequence[str]]:
    return {
        "table": project.table_names,
        "view": [view.name for view in project.views],
        "materialization": [one.known_as for one in project.file.materializations],
    }


def _run(running: Any) -> None:
    asked = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(130)  # at once: what is durable is whole at any moment
        asked = True
        sys.stderr.write("ending after the round under way; once more ends at once\n")
        running.stop()

    with _signals(stop):
        running.run()


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


@app.command()
def status(project: ProjectOption = Path(), as_json: JsonOption = False) -> None:
    """Show how far everything is, and what waits."""
    from tidegate.pipeline.project import load
    from tidegate.pipeline.status import status_of

    with _errors(as_json):
        found = status_of(load(project))
    if as_json:
        print_json(found)
        return
    table = Table("", "kind", "tick", "rows", "files", "bytes", box=None, pad_edge=False)
    for one in found.collections:
        table.add_row(one.name, one.kind, str(one.tick), f"{one.rows:,}", str(one.files), f"{one.size_bytes:,}")
    for two in found.materializations:
        table.add_row(two.name, "materialization", str(two.tick), "", "", "")
    Console().print(table)
    sys.stdout.write(f"sealed up to {found.source_position or 'nothing'} (tick {found.tick})\n")
    for line in found.waiting:
        sys.stdout.write(f"waits: {line}\n")


@app.command()
def verify(project: ProjectOption = Path(), as_json: JsonOption = False) -> None:
    """Recompute each view with Spark at the tick its destination has committed, and compare every row."""
    from tidegate.cli.verify import verify_project

    with _errors(as_json):
        verdicts = verify_project(project)
    if as_json:
        print_json([{**vars(one), "equal": one.equal} for one in verdicts])
    for one in () if as_json else verdicts:
        sys.stdout.write(f"{one.materialization}: {one.said}\n")
        for example in one.examples:
            sys.stdout.write(f"  {example.key}\n    expected {example.expected}\n    found    {example.found}\n")
    raise typer.Exit(0 if all(one.equal for one in verdicts) else DIFFERENT)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
