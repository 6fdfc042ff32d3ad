"""`run`: one process drives capture, ticks and materializations until it is told to stop, or until all is delivered."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from pyspark.sql import SparkSession

from tidegate.capture.log import LogReader
from tidegate.catalog.contract import Catalog
from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.destinations.registry import destination
from tidegate.errors import DefinitelyNotDone, FixConfiguration, MaybeDone, TidegateError, UnknownColumn
from tidegate.model.schema import TableSchema
from tidegate.pipeline.defining import Defined, define_all
from tidegate.pipeline.flows import Flows
from tidegate.pipeline.known import check_known, news, remember, with_remembered
from tidegate.pipeline.materialize import (
    Delivered,
    Materializer,
    check_destination,
    require_own_places,
    specification,
)
from tidegate.pipeline.merging import Merging
from tidegate.pipeline.project import Project
from tidegate.pipeline.sources import Source, source
from tidegate.pipeline.ticks import SourceTopics, TickDone, Ticks
from tidegate.pipeline.work import Layout, ViewWork
from tidegate.spark.session import spark_session, stop_session

IDLE_SECONDS = 0.05
OWNER_CHECK_SECONDS = 0.5
STUCK_SECONDS = 30.0
PATIENCE_SECONDS = 60.0
SOURCE = "source"  # what the watcher knows the feed by


class Watcher(Protocol):
    """Whoever shows what the run does."""

    def said(self, text: str) -> None: ...

    def ticked(self, done: TickDone) -> None: ...

    def delivered(self, round_: Delivered) -> None: ...

    def trouble(self, name: str, error: str | None) -> None: ...


def session(project: Project) -> SparkSession:
    return spark_session(project.file.spark.conf, project.file.spark.master)


def catalog_of(project: Project) -> SqliteCatalog:
    return SqliteCatalog(project.state / "catalog.db")


def ticks_of(
    project: Project, spark: SparkSession, catalog: Catalog, defined: Defined, partitions: int | None = None
) -> Ticks:
    context = spark.sparkContext
    layout = Layout(project.state, partitions or context.defaultParallelism)
    return Ticks(
        context,
        catalog,
        layout,
        SourceTopics(project.file.source.topic_prefix),
        defined.tables,
        [ViewWork(view.name, view.plan) for view in defined.first_shape],
        project.file.tick.max_events,
        Flows(spark, defined.catalyst, layout, defined.flows) if defined.catalyst and defined.flows else None,
    )


@dataclass(frozen=True)
class Pipeline:
    """Asks what the tables look like, and asks again when a record shows that they have changed."""

    project: Project
    catalog: Catalog
    feed: Source
    spark: SparkSession
    watcher: Watcher

    def check(self) -> None:
        """Refuses what would be refused later; changes nothing."""
        refusal: FixConfiguration | None = None
        for found in self.feed.tables_ahead():
            try:
                self._check_with(found)
                return
            except FixConfiguration as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _check_with(self, found: Sequence[TableSchema]) -> None:
        defined = define_all(self.project, with_remembered(self.catalog, found), self.spark)
        check_known(self.catalog, LogReader(self.project.state / "log"), defined.tables, defined.views)
        views = {view.name: view for view in defined.views}
        wanted = self.project.file.materializations
        require_own_places((destination(one.to), specification(self.project, one, views[one.view])) for one in wanted)
        for settings in wanted:
            with suppress(DefinitelyNotDone, MaybeDone):  # a destination that is away is waited for
                check_destination(self.project, settings, views[settings.view])

    def begin(self) -> tuple[Defined, Ticks]:
        """Everything is where the catalog says it is, over the tables as they are now."""
        while True:
            found = self.feed.tables()
            defined = define_all(self.project, with_remembered(self.catalog, found), self.spark)
            for note in news(self.catalog, found, defined.tables, defined.views):
                self.watcher.said(f"note: {note}")
            remember(self.catalog, LogReader(self.project.state / "log"), defined.tables, defined.views)
            ticks = ticks_of(self.project, self.spark, self.catalog, defined)
            try:
                ticks.recover()
            except UnknownColumn as error:
                self.feed.met(error.table, error.column)
            else:
                return defined, ticks


class Patience:
    """How long a run that is to end by itself goes on trying to deliver; None: without end."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._since: dict[str, float] = {}
        self._latest: dict[str, TidegateError] = {}

    def check(self, name: str, trouble: TidegateError | None, now: float) -> None:
        """Raises when another try has failed and the time since the first of them is over."""
        if trouble is None:
            self._since.pop(name, None)
            return
        waited = now - self._since.setdefault(name, now)
        is_another, self._latest[name] = trouble is not self._latest.get(name), trouble
        if self._seconds is not None and is_another and waited >= self._seconds:
            raise DefinitelyNotDone(
                f'"{name}" could not deliver for {self._seconds:.0f} seconds: {trouble.message}',
                remedy=f"{trouble.remedy} It goes on where it stopped.",
            )


# --- the run


class Run:
    """Everything that works together while `tidegate run` runs."""

    def __init__(
        self, project: Project, watcher: Watcher, until_idle: bool, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._project, self._watcher, self._until_idle = project, watcher, until_idle
        self._patience = Patience(patience_seconds if until_idle else None)
        self._stopping = threading.Event()
        self._materializers: list[Materializer] = []
        self._last_owner_check = 0.0
        self._waiting_since: float | None = None
        self._waiting_shown = ""

    def stop(self) -> None:
        """Ends after the tick and the rounds under way."""
        self._stopping.set()

    def run(self) -> None:
        """Returns when stopped, or when all that was captured is delivered; raises what ends it earlier."""
        with ExitStack() as stack:
            catalog = stack.enter_context(_closing(catalog_of(self._project)))
            feed = source(self._project, is_live=not self._until_idle)
            pipeline = stack.enter_context(self._checked(catalog, feed))
            stack.enter_context(owned(catalog))  # not before: a run that is refused leaves the one that goes on alone
            stack.callback(feed.stop)
            feed.start()
            if not self._await_tables(catalog, feed):
                return
            defined, begun = pipeline.begin()
            ticks: Ticks | None = begun
            stack.callback(self._stop_materializers)
            self._start_materializers(catalog, defined)
            stack.callback(feed.stop)  # before all else: a run that has taken over waits for the log
            _search_cycles_less_often()
            self._watcher.said("ready")
            merging = self._merging(pipeline.spark, catalog, defined)
            while ticks is not None:
                ticks = self._loop_until_a_new_column(catalog, feed, ticks, merging, pipeline)
            feed.stop()
            self._stop_materializers()
            self._raise_failure()  # of the last round

    @contextmanager
    def _checked(self, catalog: Catalog, feed: Source) -> Iterator[Pipeline]:
        """All is there to begin with, and nothing is changed yet."""
        for warning in feed.look():
            self._watcher.said(f"note: {warning}")
        spark = session(self._project)
        try:
            pipeline = Pipeline(self._project, catalog, feed, spark, self._watcher)
            pipeline.check()
            yield pipeline
        finally:
            stop_session(spark)

    def _await_tables(self, catalog: Catalog, feed: Source) -> bool:
        """False if it is stopped before the first records tell what the tables are."""
        while not feed.tables_are_known:
            if self._stopping.wait(IDLE_SECONDS):
                return False
            self._check(catalog, feed, time.monotonic())
        return True

    def _loop_until_a_new_column(
        self, catalog: Catalog, feed: Source, ticks: Ticks, merging: Merging, pipeline: Pipeline
    ) -> Ticks | None:
        """None when all is done; else ticks that know the column."""
        try:
            self._loop(catalog, feed, ticks, merging)
        except UnknownColumn as error:
            feed.met(error.table, error.column)
            begun = pipeline.begin()[1]
            self._wake_materializers()  # the tick that was repeated may be the last one for long
            return begun
        return None

    def _merging(self, spark: SparkSession, catalog: Catalog, defined: Defined) -> Merging:
        names = [*(table.name for table in defined.tables), *(view.name for view in defined.views)]
        return Merging(spark.sparkContext, catalog, self._project.state, names)

    def _start_materializers(self, catalog: Catalog, defined: Defined) -> None:
        views = {view.name: view for view in defined.views}
        found = [
            Materializer(self._project, settings, views[settings.view], catalog, self._watcher.delivered)
            for settings in self._project.file.materializations
        ]
        require_own_places((one.driver, one.spec) for one in found)
        for one in found:
            self._materializers.append(one)
            one.start()

    def _wake_materializers(self) -> None:
        for one in self._materializers:
            one.wake()

    def _stop_materializers(self) -> None:
        for one in self._materializers:
            one.stop()

    def _loop(self, catalog: Catalog, feed: Source, ticks: Ticks, merging: Merging) -> None:
        every_seconds = self._project.file.tick.every_ms / 1000
        while not self._stopping.is_set():
            began = time.monotonic()
            self._check(catalog, feed, began)
            captured = self._until_idle and feed.captured  # asked before looking at the log
            filled = feed.log_is_filled
            done = ticks.step(log_is_filled=filled)
            self._show_waiting(catalog, ticks)
            if done is not None:
                self._watcher.ticked(done)
                self._wake_materializers()
                merging.after_tick(done.tick)
                self._stopping.wait(max(0.0, every_seconds - (time.monotonic() - began)))
            elif captured and filled and self._is_delivered(catalog) and self._may_end(ticks):
                return
            else:
                self._stopping.wait(IDLE_SECONDS)

    def _check(self, catalog: Catalog, feed: Source, now: float) -> None:
        feed.check()
        self._watcher.trouble(SOURCE, feed.trouble)
        if now - self._last_owner_check >= OWNER_CHECK_SECONDS:
            catalog.check_owner()
            self._last_owner_check = now
        self._raise_failure()
        for one in self._materializers:
            trouble = one.trouble
            self._watcher.trouble(one.name, str(trouble) if trouble else None)
            self._patience.check(one.name, trouble, now)

    def _raise_failure(self) -> None:
        for one in self._materializers:
            if one.failure is not None:
                raise one.failure

    def _is_delivered(self, catalog: Catalog) -> bool:
        derived = catalog.derived()
        return all(one.tick >= derived for one in self._materializers)

    def _show_waiting(self, catalog: Catalog, ticks: Ticks) -> None:
        """What cannot be sealed is kept where `status` finds it."""
        text = json.dumps([asdict(one) for one in ticks.waiting()])
        if text != self._waiting_shown:
            catalog.set("waiting", text)
            self._waiting_shown, self._waiting_since = text, time.monotonic()

    def _may_end(self, ticks: Ticks) -> bool:
        """All is delivered, unless a transaction is not whole: that is an error where no more can come."""
        waiting = ticks.waiting()
        if not waiting:
            return True
        is_final = self._project.file.source.kind == "files"
        since = self._waiting_since or 0.0
        if not is_final and time.monotonic() - since < STUCK_SECONDS:
            return False
        raise DefinitelyNotDone(
            "not all that was captured can be delivered:\n  " + "\n  ".join(str(one) for one in waiting),
            remedy="The rest of these transactions is missing in the source's topics: add the records, or take a new"
            " snapshot. All transactions before them are delivered.",
        )


def _search_cycles_less_often() -> None:
    """A large tick keeps a million small objects: to look through them for cycles took a third of its time."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


@contextmanager
def owned(catalog: Catalog) -> Iterator[None]:
    """Takes over; a run that another one has taken over from says so, whatever it has stumbled over since."""
    catalog.take_over()
    try:
        yield
    except Exception:
        with suppress(DefinitelyNotDone):
            catalog.check_owner()
        raise


@contextmanager
def _closing(catalog: SqliteCatalog) -> Iterator[SqliteCatalog]:
    try:
        yield catalog
    finally:
        catalog.close()
