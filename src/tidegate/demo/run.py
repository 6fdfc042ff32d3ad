"""Plays the demo: sets the stage, lets the shop trade, kills the pipeline once, and judges what was seen."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psycopg
from rich.console import Console

from tidegate.demo.comparison import compare
from tidegate.demo.pipeline import Pipeline
from tidegate.demo.project import STATE, TOPIC_PREFIX, VIEW, write_project
from tidegate.demo.reader import Watch
from tidegate.demo.report import Interruption, Outcome, as_json, show, side
from tidegate.demo.shop import Shop, open_shop
from tidegate.demo.usual_way import UsualWay
from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.errors import DefinitelyNotDone, FixConfiguration

SEED = 7
START_SECONDS = 180.0
STOP_SECONDS = 90.0
PROGRESS_SECONDS = 5.0
PULSE_SECONDS = 0.05


@dataclass
class Stage:
    """All that runs during the demo."""

    console: Console
    shop_dsn: str
    destination_dsn: str
    pipeline: Pipeline
    shop: Shop
    usual_way: UsualWay
    ours: Watch
    theirs: Watch
    began_seconds: float
    interruptions: list[Interruption] = field(default_factory=list)

    def pulse(self) -> None:
        """Hands the shop's commits to both readers, and raises what went wrong in any part."""
        commits = self.shop.ledger.take()
        for watch in (self.ours, self.theirs):
            watch.expect(commits)
        self.pipeline.check()
        for part in (self.shop, self.usual_way, self.ours, self.theirs):
            if part.failures:
                raise part.failures[0]

    def wait(self, done: Callable[[], bool], timeout_seconds: float) -> bool:
        """Keeps the demo's pulse until it is done, or until the time is over; says which."""
        deadline = time.monotonic() + timeout_seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            self.pulse()
            time.sleep(PULSE_SECONDS)
        return True

    def say(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.began_seconds:5.1f} s  {text}", highlight=False)


def run_demo(seconds: float, json_output: bool, folder: Path | None) -> int:
    """Plays the demo with a shop that trades for so long after the first delivery; 1 if a promise fell."""
    console = Console(stderr=json_output, soft_wrap=True)
    try:
        with _end_on_sigterm(), _work_folder(folder, console) as work:
            outcome = _play(work.path, seconds, console)
            _tell(outcome, json_output, console)
            work.keep |= bool(outcome.fallen())
    except KeyboardInterrupt:
        console.print("Stopped; every process of the demo has ended.")
        return 130
    return 1 if outcome.fallen() else 0


def _play(folder: Path, seconds: float, console: Console) -> Outcome:
    with ExitStack() as stack:
        stage = _set_up(stack, folder, console)
        _trade(stage, seconds)
        _come_to_rest(stage)
        return _judge(stage)


def _set_up(stack: ExitStack, folder: Path, console: Console) -> Stage:
    """Starts everything but the pipeline; the stack ends it all, the databases last."""
    began = time.monotonic()
    postgres = EmbeddedPostgres(folder / "postgres")
    stack.callback(postgres.remove)
    postgres.start()
    shop_dsn, destination_dsn = (_create_database(postgres, name) for name in ("shop", "destination"))
    open_shop(shop_dsn, SEED)
    environment = {"SHOP_DSN": shop_dsn, "DESTINATION_DSN": destination_dsn}
    write_project(folder, environment)
    pipeline = Pipeline(folder, environment)
    stack.callback(pipeline.close)
    shop, usual_way = Shop(shop_dsn, SEED), UsualWay(destination_dsn, folder / STATE / "log", TOPIC_PREFIX)
    ours, theirs = Watch(destination_dsn, VIEW), Watch(destination_dsn, "usual_way")
    for part in (usual_way.following(), ours.watching(), theirs.watching(), shop.trading()):
        stack.enter_context(part)
    return Stage(console, shop_dsn, destination_dsn, pipeline, shop, usual_way, ours, theirs, began)


def _create_database(postgres: EmbeddedPostgres, name: str) -> str:
    with psycopg.connect(postgres.dsn(database="postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return postgres.dsn(database=name)


def _trade(stage: Stage, seconds: float) -> None:
    stage.say("A shop trades in Postgres; a pipeline follows it into a second database. Starting Spark and Debezium.")
    begin = time.monotonic()
    stage.pipeline.start()
    if not stage.wait(stage.ours.first_document.is_set, START_SECONDS):
        raise _too_late("the first document did not arrive")
    _note_interruption(stage, begin)
    stage.say("The first documents are there. A reader looks at them twenty times a second.")
    _watch_for(stage, seconds / 2)
    _kill_and_start(stage)
    _watch_for(stage, seconds / 2)
    stage.shop.close()


def _kill_and_start(stage: Stage) -> None:
    killed = time.monotonic()
    stage.pipeline.kill()
    stage.say("kill -9 to the pipeline, in the middle of its work. The shop goes on. Starting it again.")
    stage.pipeline.start()
    reader = stage.ours.reader
    stage.wait(lambda: False, 0.5)  # what the dead process had sent may still be committed by the destination
    restarted = time.monotonic()
    if not stage.wait(lambda: reader.last_change_seconds > restarted, START_SECONDS):
        raise _too_late("nothing was delivered after the restart")
    _note_interruption(stage, killed)
    stage.say(f"Delivering again, {stage.interruptions[-1].end_seconds - killed:.1f} s after the kill.")


def _note_interruption(stage: Stage, begin: float) -> None:
    stage.interruptions.append(Interruption(begin, time.monotonic()))


def _watch_for(stage: Stage, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        stage.wait(lambda: False, min(left, PROGRESS_SECONDS))
        ours, theirs = stage.ours.reader, stage.theirs.reader
        stage.say(
            f"{stage.shop.ledger.committed:,} transactions, {ours.documents} documents; torn states seen: "
            f"Tidegate {ours.torn_states}, the usual way {theirs.torn_states}"
        )


def _come_to_rest(stage: Stage) -> None:
    """Everything that was captured is delivered, both ways, and both readers have seen the last state."""
    stage.say("The shop has closed. Delivering the rest.")
    stage.pulse()
    stopping = time.monotonic()
    stage.pipeline.stop(STOP_SECONDS)
    stage.pipeline.finish(STOP_SECONDS)
    _note_interruption(stage, stopping)
    if not stage.wait(stage.usual_way.is_idle, STOP_SECONDS):
        raise _too_late("the usual way did not come to its end")
    stage.usual_way.stop()
    for watch in (stage.ours, stage.theirs):
        looks = watch.reader.looks
        stage.wait(lambda watch=watch, looks=looks: watch.reader.looks > looks + 1, STOP_SECONDS)  # type: ignore[misc]


def _judge(stage: Stage) -> Outcome:
    stage.say("Verifying: Spark recomputes the view and compares it with the destination.")
    verify = stage.pipeline.verify(STOP_SECONDS)
    ours, theirs = (compare(stage.shop_dsn, stage.destination_dsn, table) for table in (VIEW, "usual_way"))
    for watch in (stage.ours, stage.theirs):
        watch.stop()
    _start, restart, _end = stage.interruptions
    return Outcome(
        transactions=stage.shop.ledger.committed,
        rolled_back=stage.shop.ledger.rolled_back,
        kills=1,
        recovery_seconds=round(restart.end_seconds - restart.begin_seconds, 3),
        verify=verify,
        tidegate=side(stage.ours.reader, ours, stage.interruptions),
        usual_way=side(stage.theirs.reader, theirs, stage.interruptions),
    )


def _tell(outcome: Outcome, json_output: bool, console: Console) -> None:
    if json_output:
        json.dump(as_json(outcome), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(outcome, console)


def _too_late(what: str) -> DefinitelyNotDone:
    return DefinitelyNotDone(what + " in time", remedy="Read run.log in the demo's folder; is the machine very busy?")


@dataclass
class WorkFolder:
    """Where the project and the logs are; removed at the end unless it is to be kept."""

    path: Path
    keep: bool


@contextmanager
def _work_folder(given: Path | None, console: Console) -> Iterator[WorkFolder]:
    """The folder that was asked for, or a temporary one that stays only if something went wrong."""
    work = WorkFolder(given.absolute() if given else Path(tempfile.mkdtemp(prefix="tidegate-demo-")), given is not None)
    if work.path.exists() and any(work.path.iterdir()):
        raise FixConfiguration(f"the folder {given} is not empty", remedy="Name a new folder for the demo.")
    work.path.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    except Exception:
        work.keep = True
        raise
    finally:
        if work.keep:
            console.print(f"The project and the logs are in {work.path}", highlight=False)
        else:
            shutil.rmtree(work.path, ignore_errors=True)


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: everything that it started is stopped first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
