"""A destination and a recovery log in memory, as strict as the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, ClassVar

import msgspec

from tidegate.destinations.contract import Answer, Capabilities, Pattern, Row, canonical_value
from tidegate.errors import DefinitelyNotDone, Fenced, FixConfiguration, MaybeDone, ProtocolViolation
from tidegate.model.cell import encode_json
from tidegate.model.key import KeyBytes, encode_key
from tidegate.protocol.fence import Fence, FenceRow, checkpoint_over, plan_open
from tidegate.protocol.messages import (
    ALL_KEYS,
    START,
    Acknowledge,
    Acknowledged,
    Applied,
    Apply,
    BindingSpec,
    Constraint,
    Described,
    Flush,
    Flushed,
    KeyRange,
    Load,
    Loaded,
    MaterializationSpec,
    Open,
    Opened,
    RuntimeCheckpoint,
    Spec,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
    Validate,
    Validated,
    ValidatedBinding,
)
from tidegate.protocol.patch import apply_updates
from tidegate.protocol.session import Recovered

Table = dict[KeyBytes, Row]


@dataclass
class MemoryServer:
    """What outlives a session: tables, and the fences with their checkpoints. Faults are switched on by a test."""

    tables: dict[tuple[str, str], Table] = field(default_factory=dict)
    fences: dict[str, dict[KeyRange, FenceRow]] = field(default_factory=dict)
    lock: RLock = field(default_factory=RLock)
    down: bool = False
    loses_next_reply: bool = False

    def check(self) -> None:
        if self.down:
            raise DefinitelyNotDone("the memory server is down", remedy="Set `down` to False.")


class MemoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It has no settings."""


class MemoryDestination:
    """Tables in memory."""

    name: ClassVar[str] = "memory"
    capabilities: ClassVar[Capabilities] = Capabilities(
        pattern=Pattern.DESTINATION_AUTHORITATIVE,
        atomic_rounds=True,
        atomic_across_splits=False,
        standard_updates=True,
        delta_updates=False,
        promise="whole source transactions, exactly once, until the process ends",
    )
    config: ClassVar[type[msgspec.Struct]] = MemoryConfig

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server or MemoryServer()

    def spec(self, message: Spec) -> Described:
        return Described(
            msgspec.json.schema(MemoryConfig), {"type": "object", "required": ["table"]}, "docs/destinations.md"
        )

    def validate(self, message: Validate) -> Validated:
        self.server.check()
        return Validated(tuple(map(_opinion, message.materialization.bindings)))

    def apply(self, message: Apply) -> Applied:
        with self.server.lock:
            self.server.check()
            materialization = message.materialization
            for binding in materialization.bindings:
                self.server.tables.setdefault((materialization.name, _table_name(binding)), {})
        return Applied("")

    def open(self, message: Open) -> MemoryTransactor:
        with self.server.lock:
            self.server.check()
            known = self.server.fences.setdefault(message.materialization.name, {})
            plan = plan_open(list(known.values()), message.key_range)
            known.update({row.key_range: row for row in plan.rows})
        return MemoryTransactor(self.server, message.materialization, plan.mine)

    def places(self, materialization: MaterializationSpec) -> tuple[tuple[str, ...], ...]:
        return tuple((materialization.name, _table_name(binding)) for binding in materialization.bindings)

    @contextmanager
    def snapshot(self, materialization: MaterializationSpec) -> Iterator[MemorySnapshot]:
        with self.server.lock:
            self.server.check()
            rows = list(self.server.fences.get(materialization.name, {}).values())
            copies = [dict(_table(self.server, materialization, binding)) for binding in materialization.bindings]
            snapshot = MemorySnapshot(checkpoint_over(rows, ALL_KEYS), materialization, copies)
        yield snapshot


class MemoryTransactor:
    """One session: documents wait, then all of a round appear under the server's lock."""

    def __init__(self, server: MemoryServer, materialization: MaterializationSpec, mine: FenceRow) -> None:
        self.opened = Opened(mine.checkpoint)
        self._server = server
        self._materialization = materialization
        self._mine = mine
        self._loads: list[Load] = []
        self._stores: dict[tuple[int, KeyBytes], Store] = {}

    def acknowledge(self, message: Acknowledge) -> Future[Acknowledged]:
        done: Future[Acknowledged] = Future()
        done.set_result(Acknowledged())
        return done

    def load(self, loads: Sequence[Load], answer: Answer) -> None:
        self._loads.extend(loads)

    def flush(self, message: Flush, answer: Answer) -> Flushed:
        with self._server.lock:
            self._server.check()
            for load in self._loads:
                binding = self._materialization.bindings[load.binding]
                row = _table(self._server, self._materialization, binding).get(encode_key(load.key))
                if row is not None:
                    answer(Loaded(load.binding, _document(binding, row)))
        self._loads.clear()
        return Flushed()

    def store(self, stores: Sequence[Store]) -> None:
        for store in stores:
            place = store.binding, encode_key(store.key)
            if place in self._stores:
                raise ProtocolViolation(
                    f"key {store.key} of binding {store.binding} was stored twice in one round",
                    remedy="This is a bug in the runtime: it must reduce by key. Please report it.",
                )
            self._stores[place] = store

    def start_commit(self, message: StartCommit) -> StartedCommit:
        with self._server.lock:
            self._server.check()
            known = self._server.fences.get(self._materialization.name, {})
            row = known.get(self._mine.key_range)
            if row is None or row.fence != self._mine.fence:
                raise Fenced("another session has taken over", remedy="Nothing was changed. Run one of them.")
            self._write()
            known[row.key_range] = replace(row, checkpoint=message.runtime_checkpoint)
            if self._server.loses_next_reply:
                self._server.loses_next_reply = False
                raise MaybeDone("the memory server's reply was lost", remedy="Open a new session.")
        return StartedCommit()

    def close(self) -> None:
        self._stores.clear()

    def _write(self) -> None:
        for (binding, key), store in self._stores.items():
            table = _table(self._server, self._materialization, self._materialization.bindings[binding])
            if store.delete:
                table.pop(key, None)
            else:
                table[key] = (store.key, store.values)
        self._stores.clear()


class MemorySnapshot:
    """A copy of the tables."""

    def __init__(
        self, checkpoint: RuntimeCheckpoint, materialization: MaterializationSpec, tables: list[Table]
    ) -> None:
        self.checkpoint = None if checkpoint.tick <= START.tick else checkpoint
        self._materialization = materialization
        self._tables = tables

    def rows(self, binding: int = 0) -> Iterator[Row]:
        spec = self._materialization.bindings[binding]
        for key, values in self._tables[binding].values():
            yield tuple(map(canonical_value, spec.key, key)), tuple(map(canonical_value, spec.values, values))


def _opinion(binding: BindingSpec) -> ValidatedBinding:
    keys = {name.name: Constraint("locationRequired") for name in binding.key}
    values = {name.name: Constraint("fieldOptional") for name in binding.values}
    return ValidatedBinding(keys | values, (_table_name(binding),), delta_updates=False)


def _table_name(binding: BindingSpec) -> str:
    name = binding.resource.get("table")
    if not isinstance(name, str):
        raise FixConfiguration(f'binding "{binding.collection}" names no table', remedy="Add `table: <name>`.")
    return name


def _table(server: MemoryServer, materialization: MaterializationSpec, binding: BindingSpec) -> Table:
    table = server.tables.get((materialization.name, _table_name(binding)))
    if table is None:
        raise FixConfiguration(f'table "{_table_name(binding)}" does not exist', remedy="Send apply first.")
    return table


def _document(binding: BindingSpec, row: Row) -> bytes:
    return encode_json({spec.name: value for spec, value in zip(binding.fields, row[0] + row[1], strict=True)})


@dataclass
class MemoryRecoveryLog:
    """A recovery log that lasts as long as the process."""

    rows: dict[str, dict[KeyRange, FenceRow]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)

    def open(self, materialization: str, key_range: KeyRange) -> Recovered:
        known = self.rows.setdefault(materialization, {})
        plan = plan_open(list(known.values()), key_range)
        known.update({row.key_range: row for row in plan.rows})
        return Recovered(plan.mine.fence, plan.mine.checkpoint, self.states.get(materialization))

    def commit(
        self,
        materialization: str,
        key_range: KeyRange,
        fence: Fence,
        checkpoint: RuntimeCheckpoint,
        updates: Sequence[StateUpdate],
    ) -> None:
        row = self.rows[materialization][key_range]
        if row.fence != fence:
            raise Fenced("another session writes this range's recovery log", remedy="Run one of them.")
        self.rows[materialization][key_range] = replace(row, checkpoint=checkpoint)
        self.states[materialization] = apply_updates(self.states.get(materialization), updates)

    def checkpoint_at(self, tick: int) -> RuntimeCheckpoint:
        """Every tick is there: a memory has one past."""
        return RuntimeCheckpoint(tick)
