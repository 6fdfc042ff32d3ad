"""Brings a view's updates to a destination: what is new since its own checkpoint, a key at most once, in one round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidegate.catalog.contract import Catalog
from tidegate.collections import history
from tidegate.destinations.contract import Destination
from tidegate.destinations.registry import destination
from tidegate.errors import DefinitelyNotDone, FixConfiguration, MaybeDone, TidegateError
from tidegate.model.cell import python_type
from tidegate.model.key import KeyBytes
from tidegate.model.schema import parse_type
from tidegate.pipeline.project import MaterializationSettings, Project
from tidegate.protocol.messages import (
    Apply,
    BindingSpec,
    FieldSpec,
    MaterializationSpec,
    RuntimeCheckpoint,
    Store,
    Validate,
)
from tidegate.protocol.session import Session
from tidegate.views.definition import OutputColumn, View

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Delivered:
    """A round that has arrived."""

    materialization: str
    tick: int
    documents: int


class Documents:
    """Reads a view's cells as the key and values of its stores."""

    def __init__(self, definition: View) -> None:
        columns = {column.name: column for column in definition.columns}
        self.key = tuple(_field(columns[name]) for name in definition.key)
        self.values = tuple(_field(column) for column in definition.columns if column.name not in definition.key)
        names = [field.name for field in (*self.key, *self.values)]
        fields = [(f"c{place}", _wire(columns[name])) for place, name in enumerate(names)]
        renamed = {f"c{place}": name for place, name in enumerate(names)}
        self._read = msgspec.json.Decoder(msgspec.defstruct("Document", fields, rename=renamed, gc=False)).decode
        self._nested = [columns[name].nested for name in names]

    def store(self, cell: bytes, *, exists: bool, delete: bool) -> Store:
        values = msgspec.structs.astuple(self._read(cell))
        if any(self._nested):
            values = tuple(
                _json_text(value) if nested else value for value, nested in zip(values, self._nested, strict=True)
            )
        split = len(self.key)
        return Store(0, values[:split], values[split:], cell, exists, delete)


def _field(column: OutputColumn) -> FieldSpec:
    return FieldSpec(column.name, "json" if column.nested else column.ddl, column.nullable)


def _wire(column: OutputColumn) -> Any:
    return msgspec.Raw if column.nested else python_type(parse_type(column.ddl)) | None


def _json_text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode()
    return None if text == "null" else text


def stores(documents: Documents, paths: Sequence[str], after: int, upto: int) -> Iterator[Store]:
    """One store a key: its last row after `after` up to `upto`; nothing for a row that came and went in between."""
    first: dict[KeyBytes, int] = {}
    last: dict[KeyBytes, tuple[int, bytes]] = {}
    for _, update in history.updates(history.read(paths, after, upto)):
        first.setdefault(update.key, update.diff)
        last[update.key] = (update.diff, update.cell)
    for key, (diff, cell) in last.items():
        exists = first[key] < 0
        if diff > 0 or exists:
            yield documents.store(cell, exists=exists, delete=diff < 0)


def specification(project: Project, settings: MaterializationSettings, definition: View) -> MaterializationSpec:
    """What the driver is told; relative paths are meant from the project's folder."""
    config = dict(settings.config)
    if isinstance(config.get("path"), str):
        config["path"] = str((project.folder / config["path"]).absolute())
    documents = Documents(definition)
    binding = BindingSpec(definition.name, {}, documents.key, documents.values)
    return MaterializationSpec(settings.known_as, (binding,), config)


def prepare(driver: Destination, spec: MaterializationSpec) -> None:
    """Asks the destination whether it can take the view, then lets it create what it needs."""
    check_fields(driver, spec)
    driver.apply(Apply(spec, version="1"))


def check_destination(project: Project, settings: MaterializationSettings, definition: View) -> Destination:
    """The driver, once it is known that its destination can take the view; creates nothing."""
    driver = destination(settings.to)
    check_fields(driver, specification(project, settings, definition))
    return driver


def check_fields(driver: Destination, spec: MaterializationSpec) -> None:
    """Refuses a column that the destination cannot take; creates nothing."""
    answer = driver.validate(Validate(spec))
    for binding, opinion in zip(spec.bindings, answer.bindings, strict=True):
        for field in binding.fields:
            constraint = opinion.constraints.get(field.name)
            if constraint is None or constraint.kind in ("incompatible", "fieldForbidden"):
                raise FixConfiguration(
                    f'materialization "{spec.name}": {driver.name} cannot take column "{field.name}" ({field.type})'
                    + (f": {constraint.reason}" if constraint and constraint.reason else ""),
                    remedy="Name another `table`, or alter the column there; or leave it out: write another view"
                    " without it, and deliver that to a table of its own.",
                )


def require_own_places(materializations: Iterable[tuple[Destination, MaterializationSpec]]) -> None:
    """Refuses two that would write into one table: each would take the other's rows for its own."""
    owners: dict[tuple[str, ...], str] = {}
    for driver, spec in materializations:
        for place in driver.places(spec):
            owner = owners.setdefault((driver.name, *place), spec.name)
            if owner != spec.name:
                raise FixConfiguration(
                    f'materializations "{owner}" and "{spec.name}" have the same table: {place[-1]} in {place[0]}',
                    remedy="Give one of them another `table:`.",
                )


class Materializer:
    """Keeps one view up to date in one destination, in a thread of its own, until it is stopped."""

    def __init__(
        self,
        project: Project,
        settings: MaterializationSettings,
        definition: View,
        catalog: Catalog,
        delivered: Callable[[Delivered], None],
    ) -> None:
        self.name = settings.known_as
        self.spec = specification(project, settings, definition)
        self.trouble: TidegateError | None = None  # what keeps it from delivering just now
        self.failure: BaseException | None = None  # what has ended it
        self.driver = destination(settings.to)
        self._documents, self._view = Documents(definition), definition.name
        self._catalog, self._delivered = catalog, delivered
        self._session: Session | None = None
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"materialize {self.name}", daemon=True)
        self.tick = -1

    def start(self) -> None:
        """Prepares the destination; what is wrong there for good is raised here."""
        try:
            self._open()
        except (DefinitelyNotDone, MaybeDone) as error:
            self.trouble = error
        self._thread.start()

    def _open(self) -> None:
        prepare(self.driver, self.spec)
        self._session = Session.open(self.driver.open, self.spec, self._catalog)
        self.tick = self._session.checkpoint.tick if self._session.checkpoint else -1

    def wake(self) -> None:
        """There is a newer tick."""
        self._wake.set()

    def stop(self) -> None:
        """Ends after the round under way."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.close()

    def close(self) -> None:
        """Lets go of the destination; everything committed is in place when this returns."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def _work(self) -> None:
        delay_seconds = FIRST_RETRY_SECONDS
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                try:
                    while self.deliver() and not self._stopping.is_set():
                        delay_seconds = FIRST_RETRY_SECONDS
                except (DefinitelyNotDone, MaybeDone) as error:
                    self.trouble, self._session = error, None
                    self._stopping.wait(delay_seconds)
                    delay_seconds = min(2 * delay_seconds, LONGEST_RETRY_SECONDS)
                    continue
                self._wake.wait()
        except BaseException as failure:
            self._session, self.failure = None, failure

    def deliver(self) -> bool:
        """One round up to the newest tick; False if there is nothing new."""
        if self._session is None:
            self._open()
        assert self._session is not None
        upto = self._catalog.derived()
        if upto <= self.tick:
            self.trouble = None
            return False
        paths = [str(Path(one.path)) for one in self._catalog.files(self._view, self.tick, upto)]
        count = 0
        if paths:
            found = list(stores(self._documents, paths, self.tick, upto))
            count = len(found)
            self._session.run_round(found, self._checkpoint_at(upto))
        self.tick, self.trouble = upto, None
        self._delivered(Delivered(self.name, upto, count))
        return True

    def _checkpoint_at(self, tick: int) -> RuntimeCheckpoint:
        found = self._catalog.checkpoint_at(tick)
        assert found is not None, tick  # it is derived
        return found
