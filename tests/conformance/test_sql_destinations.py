"""Checks and scenarios for every destination that keeps rows, checkpoint and fence in one transaction."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tidegate.destinations.contract import Destination, canonical_value
from tidegate.destinations.registry import destination
from tidegate.destinations.sqlite import SqliteConfig, _sorted
from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.errors import DefinitelyNotDone, Fenced, FixConfiguration, MaybeDone
from tidegate.pipeline.materialize import check_fields
from tidegate.protocol.fence import Fence
from tidegate.protocol.messages import (
    ALL_KEYS,
    Apply,
    BindingSpec,
    FieldSpec,
    KeyRange,
    Load,
    MaterializationSpec,
    RuntimeCheckpoint,
    Spec,
    Store,
    Validate,
)
from tidegate.protocol.session import RecoveryLog, Session
from tidegate.testing.memory import MemoryDestination, MemoryRecoveryLog, MemoryServer

KEY = (FieldSpec("id", "bigint", nullable=False),)
VALUES = (FieldSpec("customer", "string"), FieldSpec("lines", "json"))
LOWER, UPPER = KeyRange(0, 0x7FFFFFFF), KeyRange(0x80000000, 0xFFFFFFFF)


opened_sessions: list[Session] = []


@pytest.fixture(autouse=True)
def _closes_what_a_scenario_left_open() -> Iterator[None]:
    yield
    for session in opened_sessions:
        session._transactor.close()
    opened_sessions.clear()


@dataclass
class Place:
    """A destination with a place of its own for one test."""

    destination: Destination
    config: dict[str, Any]
    memory: MemoryServer | None = None
    log: RecoveryLog = field(default_factory=MemoryRecoveryLog)

    @property
    def name(self) -> str:
        return self.destination.name

    def spec(
        self,
        key: tuple[FieldSpec, ...] = KEY,
        values: tuple[FieldSpec, ...] = VALUES,
        tables: Iterable[str] = ("orders",),
        name: str = "m",
    ) -> MaterializationSpec:
        bindings = tuple(BindingSpec(table, {"table": table}, key, values) for table in tables)
        return MaterializationSpec(name, bindings, self.config)

    def applied(self, *arguments: Any, **named: Any) -> MaterializationSpec:
        spec = self.spec(*arguments, **named)
        self.destination.apply(Apply(spec, "1"))
        return spec

    def open(
        self, spec: MaterializationSpec, key_range: KeyRange = ALL_KEYS, log: RecoveryLog | None = None
    ) -> Session:
        session = Session.open(self.destination.open, spec, log or self.log, key_range=key_range)
        opened_sessions.append(session)
        return session

    def rows(self, spec: MaterializationSpec, binding: int = 0) -> dict[Any, Any]:
        with self.destination.snapshot(spec) as snapshot:
            return dict(snapshot.rows(binding))

    def tick(self, spec: MaterializationSpec) -> int | None:
        with self.destination.snapshot(spec) as snapshot:
            return snapshot.checkpoint.tick if snapshot.checkpoint else None

    def execute(self, statement: str) -> None:
        if self.name == "sqlite":
            connection = sqlite3.connect(self.config["path"], isolation_level=None)
            connection.execute(statement)
            connection.close()
        else:
            with psycopg.connect(self.config["dsn"], autocommit=True) as server:
                server.execute(f"SET search_path = {self.config['schema']}".encode())
                server.execute(statement.encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), settings={"max_prepared_transactions": "0"})
    postgres.start()
    yield postgres
    postgres.remove()


_schemas = iter(range(1_000_000))


def postgres_place(server: EmbeddedPostgres) -> Place:
    return Place(destination("postgres"), {"dsn": server.dsn(), "schema": f"s{next(_schemas)}"})


def sqlite_place(folder: Path) -> Place:
    return Place(destination("sqlite"), {"path": str(folder / "out.db")})


def memory_place() -> Place:
    memory = MemoryServer()
    return Place(MemoryDestination(memory), {}, memory)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return memory_place()
    if request.param == "sqlite":
        return sqlite_place(tmp_path)
    return postgres_place(request.getfixturevalue("server"))


@pytest.fixture(params=["sqlite", "postgres"])
def sql_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return sqlite_place(tmp_path) if request.param == "sqlite" else postgres_place(request.getfixturevalue("server"))


def put(number: int, *values: Any, exists: bool = False, binding: int = 0) -> Store:
    return Store(binding, (number,), values or (f"c{number}", "[]"), exists=exists)


def remove(number: int, exists: bool = True) -> Store:
    return Store(0, (number,), (None, None), exists=exists, delete=True)


def at(tick: int) -> RuntimeCheckpoint:
    return RuntimeCheckpoint(tick, f"position {tick}")


# --- checks


def test_rows_are_inserted_updated_and_deleted(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        assert session.checkpoint is None
        session.run_round([put(1), put(2), put(3)], at(1))
        session.run_round([put(2, "new", '[{"a":1}]', exists=True), remove(3)], at(2))
    assert place.rows(spec) == {(1,): ("c1", "[]"), (2,): ("new", '[{"a":1}]')}
    assert place.tick(spec) == 2


def test_a_delete_of_what_is_not_there_changes_nothing(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([put(1), remove(7, exists=False), remove(8)], at(1))
    assert set(place.rows(spec)) == {(1,)}


def test_a_deleted_key_may_come_back(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([put(1, "old", "[]")], at(1))
        session.run_round([remove(1)], at(2))
        assert place.rows(spec) == {}
        session.run_round([put(1, "again", "[]")], at(3))
    assert place.rows(spec) == {(1,): ("again", "[]")}


def test_a_changed_key_moves_its_row_at_once(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([put(1, "same", "[]")], at(1))
        session.run_round([put(2, "same", "[]"), remove(1)], at(2))
    assert place.rows(spec) == {(2,): ("same", "[]")}


def test_an_empty_round_moves_the_checkpoint(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([], at(5))
    with place.open(spec) as session:
        assert session.checkpoint == RuntimeCheckpoint(5, "position 5", 1)


def test_long_text_arrives_whole(place: Place) -> None:
    spec = place.applied()
    text = "tide ✓ \\ \t\n'\"%s " * 20_000
    with place.open(spec) as session:
        session.run_round([put(1, text, json.dumps([text]))], at(1))
    ((customer, lines),) = place.rows(spec).values()
    assert customer == text
    assert json.loads(lines) == [text]


def test_a_huge_round_arrives_whole(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round((put(number) for number in range(50_000)), at(1))
        session.run_round((remove(number) for number in range(0, 50_000, 2)), at(2))
        session.run_round((put(number, "x", "{}") for number in range(50_000, 100_001)), at(3))
    rows = place.rows(spec)
    assert len(rows) == 75_001
    assert rows[(1,)] == ("c1", "[]")


def test_many_tiny_rounds_follow_each_other(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        for tick in range(1, 101):
            session.run_round([put(tick % 7, str(tick), "[]", exists=tick > 7)], at(tick))
    assert {int(customer) for customer, _ in place.rows(spec).values()} == set(range(94, 101))


def test_compound_keys_do_not_run_together(place: Place) -> None:
    key = (FieldSpec("a", "string", nullable=False), FieldSpec("b", "string", nullable=False))
    spec = place.applied(key, (FieldSpec("v", "int"),))
    keys = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "B")]
    with place.open(spec) as session:
        session.run_round([Store(0, key, (place,)) for place, key in enumerate(keys)], at(1))
        session.run_round([Store(0, ("ab", ""), (None,), exists=True, delete=True)], at(2))
    assert place.rows(spec) == {("a", "b"): (0,), ("", "ab"): (2,), ("a", "B"): (3,)}


def test_null_in_a_key_is_a_value_like_any_other(place: Place) -> None:
    key = (FieldSpec("a", "int"), FieldSpec("b", "string"))
    spec = place.applied(key, (FieldSpec("v", "int"),))
    keys: list[tuple[Any, ...]] = [(None, "x"), (None, None), (1, None), (1, "x")]
    with place.open(spec) as session:
        session.run_round([Store(0, key, (0,)) for key in keys], at(1))
        session.run_round([Store(0, key, (1,), exists=True) for key in keys], at(2))
        session.run_round([Store(0, (None, None), (None,), exists=True, delete=True)], at(3))
        session.run_round([Store(0, (number, None), (2,)) for number in range(2, 400)], at(4))
    rows = place.rows(spec)
    assert len(rows) == 3 + 398
    assert rows[(None, "x")] == (1,)


def test_a_view_without_a_key_has_one_row(place: Place) -> None:
    spec = place.applied((), (FieldSpec("total", "decimal(20,2)"),))
    with place.open(spec) as session:
        session.run_round([Store(0, (), (Decimal("1.50"),))], at(1))
        session.run_round([Store(0, (), (Decimal("2.50"),), exists=True)], at(2))
    assert place.rows(spec) == {(): (Decimal("2.5"),)}


TYPES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127],
    "smallint": [-32768, 32767],
    "int": [-(2**31), 2**31 - 1],
    "bigint": [-(2**63), 2**63 - 1],
    "float": [0.5, "NaN"],
    "double": [0.1, 1e300, "NaN", "Infinity", "-Infinity", -0.0],
    "decimal(38,2)": [Decimal("12345678901234567890123456789012345.67"), Decimal("-0.01"), Decimal("5.00")],
    "string": ["", "å✓😀", "null", "\\N", "%s", "NaN"],
    "binary": ["", "AP8B"],
    "date": ["2024-02-29", "0001-01-01", "9999-12-31"],
    "timestamp": ["2024-02-29T12:34:56.789012Z", "1960-01-01T00:00:00Z", "2024-01-01T00:00:00.100000Z"],
    "timestamp_ntz": ["2024-02-29T12:34:56.789012", "1960-01-01T00:00:00"],
    "json": ['{"b":[1,2.50,null,"x"],"a":{"c":1e2}}', "[]", '"text"', "123", "null", "true"],
}


@pytest.mark.parametrize("direct", [True, False], ids=["few", "many"])
def test_every_type_comes_back_as_it_was(place: Place, direct: bool) -> None:
    fields = tuple(FieldSpec(f"v {kind}", kind) for kind in TYPES)
    spec = place.applied(values=fields)
    longest = max(map(len, TYPES.values()))
    wanted = [tuple(cells[row] if row < len(cells) else None for cells in TYPES.values()) for row in range(longest + 1)]
    copies = 1 if direct else 50
    stores = [Store(0, (number,), wanted[number % len(wanted)]) for number in range(len(wanted) * copies)]
    with place.open(spec) as session:
        session.run_round(stores, at(1))
    expected = [tuple(map(canonical_value, fields, cells)) for cells in wanted]
    rows = place.rows(spec)
    assert len(rows) == len(stores)
    assert all(rows[store.key] == expected[store.key[0] % len(wanted)] for store in stores)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "json"])
def test_every_scalar_type_may_be_a_key(place: Place, kind: str) -> None:
    spec = place.applied((FieldSpec("k", kind, nullable=False),), (FieldSpec("v", "int"),))
    keys = [cell for cell in TYPES[kind] if cell != -0.0 or kind == "string"]
    with place.open(spec) as session:
        session.run_round([Store(0, (cell,), (1,)) for cell in keys], at(1))
        session.run_round([Store(0, (cell,), (2,), exists=True) for cell in keys], at(2))
        assert set(place.rows(spec).values()) == {(2,)}
        assert len(place.rows(spec)) == len(keys)
        session.run_round([Store(0, (cell,), (None,), exists=True, delete=True) for cell in keys], at(3))
    assert place.rows(spec) == {}


def test_several_bindings_appear_together(place: Place) -> None:
    spec = place.applied(tables=("orders", "returns"))
    with place.open(spec) as session:
        session.run_round([put(1), put(1, "r", "[]", binding=1), put(2)], at(1))
    assert set(place.rows(spec, 0)) == {(1,), (2,)}
    assert place.rows(spec, 1) == {(1,): ("r", "[]")}


def test_loads_answer_what_exists_and_stores_may_be_made_of_it(place: Place) -> None:
    spec = place.applied(values=(FieldSpec("count", "int"), FieldSpec("lines", "json")))
    with place.open(spec) as session:
        for tick in range(1, 4):
            count_up(session, tick, [1, 2] if tick > 1 else [1])
    assert place.rows(spec) == {(1,): (3, "[]"), (2,): (2, "[]")}


def count_up(session: Session, tick: int, keys: list[int]) -> None:
    """A round that is not idempotent: each key's count is loaded and stored plus one."""
    counts: dict[int, int] = {}

    def stores() -> Iterator[Store]:
        for key in keys:
            yield Store(0, (key,), (counts.get(key, 0) + 1, "[]"), exists=key in counts)

    def loaded(document: Any) -> None:
        read = json.loads(document.doc)
        counts[read["id"]] = read["count"]

    session.run_round(stores(), at(tick), [Load(0, (key,)) for key in keys], loaded)


def test_splits_write_their_ranges_and_become_one_again(place: Place) -> None:
    spec = place.applied()
    place.open(spec).close()
    with place.open(spec, LOWER) as lower, place.open(spec, UPPER) as upper:
        lower.run_round([put(1)], at(1))
        upper.run_round([put(2)], at(1))
        lower.run_round([put(3)], at(2))
        with pytest.raises(FixConfiguration, match="different ticks"):
            place.open(spec)
        upper.run_round([put(4)], at(2))
    with place.open(spec) as whole:
        assert whole.checkpoint is not None and whole.checkpoint.tick == 2
    assert len(place.rows(spec)) == 4


def test_every_destination_describes_its_configuration(place: Place) -> None:
    described = place.destination.spec(Spec())
    assert described.config_schema and described.resource_schema


def test_apply_is_idempotent_and_validate_creates_nothing(place: Place) -> None:
    spec = place.spec()
    (opinion,) = place.destination.validate(Validate(spec)).bindings
    assert {name: constraint.kind for name, constraint in opinion.constraints.items()} == {
        "id": "locationRequired",
        "customer": "fieldOptional",
        "lines": "fieldOptional",
    }
    if place.name == "sqlite":
        assert not Path(place.config["path"]).exists()
    assert place.destination.apply(Apply(spec, "1"))
    again = place.destination.apply(Apply(spec, "1"))
    assert again.action_description == ""


def test_a_new_column_is_added_and_old_rows_have_null_in_it(sql_place: Place) -> None:
    spec = sql_place.applied()
    with sql_place.open(spec) as session:
        session.run_round([put(1)], at(1))
    wider = sql_place.spec(values=(*VALUES, FieldSpec("total", "decimal(10,2)")))
    applied = sql_place.destination.apply(Apply(wider, "2", spec))
    assert "ADD COLUMN" in applied.action_description
    with sql_place.open(wider) as session:
        session.run_round([put(2, "c2", "[]", Decimal("1.00"))], at(2))
    assert sql_place.rows(wider) == {(1,): ("c1", "[]", None), (2,): ("c2", "[]", Decimal(1))}


def test_a_changed_type_is_refused(sql_place: Place) -> None:
    spec = sql_place.applied()
    sql_place.open(spec).close()
    changed = sql_place.spec(values=(FieldSpec("customer", "bigint"), FieldSpec("lines", "json")))
    (opinion,) = sql_place.destination.validate(Validate(changed, spec)).bindings
    assert opinion.constraints["customer"].kind == "incompatible"
    with pytest.raises(FixConfiguration, match="customer") as refused:
        sql_place.destination.apply(Apply(changed, "2", spec))
    assert refused.value.remedy == (
        "Name another `table` and give the materialization a new name, which builds it anew; or alter the table there."
    )
    with pytest.raises(FixConfiguration, match='cannot take column "customer"') as unfit:
        check_fields(sql_place.destination, changed)
    assert unfit.value.remedy == (
        "Name another `table`, or alter the column there; or leave it out: write another view without it,"
        " and deliver that to a table of its own."
    )


def test_a_changed_key_type_or_key_is_refused(sql_place: Place) -> None:
    spec = sql_place.applied()
    wider = sql_place.spec(key=(*KEY, FieldSpec("line", "int", nullable=False)))
    with pytest.raises(FixConfiguration, match="primary key"):
        sql_place.destination.apply(Apply(wider, "2", spec))


def test_a_table_of_somebody_else_is_refused(sql_place: Place) -> None:
    sql_place.applied(name="first", tables=("other",))
    sql_place.execute('CREATE TABLE orders ("id" bigint PRIMARY KEY, "note" text NOT NULL)')
    with pytest.raises(FixConfiguration, match="orders"):
        sql_place.destination.validate(Validate(sql_place.spec()))
    with pytest.raises(FixConfiguration, match="orders"):
        sql_place.applied()


def test_a_table_of_somebody_else_that_lacks_columns_is_refused_and_may_lack_them_if_it_is_ours(
    sql_place: Place,
) -> None:
    kind = "INTEGER" if sql_place.name == "sqlite" else "bigint"
    narrow = sql_place.spec(values=VALUES[:1])
    sql_place.applied(name="first", tables=("other",))
    sql_place.execute(f'CREATE TABLE orders ("id" {kind} NOT NULL PRIMARY KEY, "customer" text)')
    (opinion,) = sql_place.destination.validate(Validate(sql_place.spec())).bindings
    assert opinion.constraints["lines"].kind == "incompatible"
    with pytest.raises(FixConfiguration, match='"lines" is missing in a table that Tidegate did not create'):
        sql_place.applied()
    sql_place.destination.apply(Apply(narrow, "1"))
    sql_place.open(narrow).close()
    (opinion,) = sql_place.destination.validate(Validate(sql_place.spec())).bindings
    assert opinion.constraints["lines"].kind == "fieldOptional"
    assert "ADD COLUMN" in sql_place.destination.apply(Apply(sql_place.spec(), "2")).action_description


def test_a_materialization_that_was_never_opened_holds_nothing(sql_place: Place) -> None:
    spec = sql_place.spec()
    assert (sql_place.tick(spec), sql_place.rows(spec)) == (None, {})
    first = sql_place.applied(name="first", tables=("other",))
    sql_place.open(first).close()
    assert (sql_place.tick(spec), sql_place.rows(spec)) == (None, {})


def test_places_are_equal_only_for_one_and_the_same_table(place: Place, tmp_path: Path) -> None:
    places = place.destination.places(place.spec(tables=("orders", "returns")))
    assert len(set(places)) == 2
    assert place.destination.places(place.spec(tables=("orders",))) == places[:1]
    if place.name == "sqlite":
        elsewhere = MaterializationSpec("m", place.spec().bindings, {"path": str(tmp_path / "x" / ".." / "out.db")})
        assert place.destination.places(elsewhere) == places[:1]
    if place.name == "postgres":
        elsewhere = MaterializationSpec("m", place.spec().bindings, place.config | {"schema": "another"})
        assert place.destination.places(elsewhere) != places[:1]


def test_a_table_with_rows_that_another_materialization_wrote_is_refused(sql_place: Place) -> None:
    spec = sql_place.applied(name="first")
    with sql_place.open(spec) as session:
        session.run_round([put(1)], at(1))
    with pytest.raises(FixConfiguration, match="has rows"):
        sql_place.destination.validate(Validate(sql_place.spec(name="second")))
    with pytest.raises(FixConfiguration, match="has rows"):
        sql_place.applied(name="second")


def test_names_are_quoted(sql_place: Place) -> None:
    key = (FieldSpec('we"ird %s', "string", nullable=False),)
    spec = sql_place.applied(key, (FieldSpec("select", "int"), FieldSpec("x; DROP", "int")), tables=('or"ders %',))
    with sql_place.open(spec) as session:
        session.run_round((Store(0, (f"k{number}",), (1, 2)) for number in range(300)), at(1))
        session.run_round((Store(0, (f"k{number}",), (), exists=True, delete=True) for number in range(1, 300)), at(2))
    assert sql_place.rows(spec) == {("k0",): (1, 2)}


def test_delta_updates_are_refused(sql_place: Place) -> None:
    spec = sql_place.spec()
    bindings = (BindingSpec("orders", {"table": "orders"}, KEY, VALUES, delta_updates=True),)
    with pytest.raises(FixConfiguration, match="delta updates"):
        sql_place.destination.apply(Apply(MaterializationSpec("m", bindings, spec.config), "1"))


def test_an_unknown_setting_is_named(sql_place: Place) -> None:
    spec = MaterializationSpec("m", sql_place.spec().bindings, sql_place.config | {"tabel": "x"})
    with pytest.raises(FixConfiguration, match="tabel") as raised:
        sql_place.destination.apply(Apply(spec, "1"))
    assert "timeout_seconds" in raised.value.remedy


def test_an_unknown_destination_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(FixConfiguration) as raised:
        destination("postgress")
    assert '"postgres"' in raised.value.remedy


# --- what a reader sees


def test_a_reader_only_ever_sees_whole_rounds(place: Place) -> None:
    """Each round rewrites all rows, so a torn one would show two ticks."""
    spec = place.applied()
    stop, seen, wrong = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            with place.destination.snapshot(spec) as snapshot:
                tick = snapshot.checkpoint.tick if snapshot.checkpoint else 0
                rows = {(customer, key) for key, (customer, _) in snapshot.rows()}
            seen.add(tick)
            if rows != {(str(tick), (number,)) for number in range(400 if tick % 2 else 40) if tick}:
                wrong.append((tick, len(rows)))

    reader = threading.Thread(target=read)
    with place.open(spec) as session:
        reader.start()
        for tick in range(1, 41):
            deletes = [remove(number) for number in range(40, 400)] if tick % 2 == 0 else []
            stores = [put(number, str(tick), "[]") for number in range(400 if tick % 2 else 40)]
            session.run_round(deletes + stores, at(tick))
    stop.set()
    reader.join(30)
    assert not wrong
    assert len(seen) > 1


# --- scenarios: killed


@dataclass
class FileRecoveryLog(MemoryRecoveryLog):
    """A recovery log that outlives its process."""

    path: Path = Path()

    @classmethod
    def at(cls, path: Path) -> FileRecoveryLog:
        log = cls(path=path)
        if path.exists():
            log.rows, log.states = pickle.loads(path.read_bytes())
        return log

    def open(self, materialization: str, key_range: KeyRange) -> Any:
        recovered = super().open(materialization, key_range)
        self._keep()
        return recovered

    def commit(
        self,
        materialization: str,
        key_range: KeyRange,
        fence: Fence,
        checkpoint: RuntimeCheckpoint,
        updates: Any,
    ) -> None:
        super().commit(materialization, key_range, fence, checkpoint, updates)
        self._keep()

    def _keep(self) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_bytes(pickle.dumps((self.rows, self.states)))
        beside.replace(self.path)


COUNTED = (FieldSpec("count", "int"), FieldSpec("lines", "json"))
LAST_TICK = 4


def keys_of(tick: int) -> list[int]:
    return [0, tick, tick + 1]


def counted_until(tick: int) -> dict[Any, Any]:
    keys = [key for done in range(1, tick + 1) for key in keys_of(done)]
    return {(key,): (keys.count(key), "[]") for key in keys}


def count_to_the_end(place: Place) -> None:
    spec = place.applied(values=COUNTED)
    with place.open(spec) as session:
        first = session.checkpoint.tick + 1 if session.checkpoint else 1
        for tick in range(first, LAST_TICK + 1):
            count_up(session, tick, keys_of(tick))


def count_in_a_process(place: Place, log: Path, crash_at: str) -> int:
    done = subprocess.run(
        [sys.executable, __file__, place.name, json.dumps(place.config), str(log)],
        env=os.environ | {"TIDEGATE_CRASH_AT": crash_at},
        timeout=60,
        check=False,
    )
    return done.returncode


@pytest.mark.parametrize("visit", [1, 2])
@pytest.mark.parametrize(
    ("point", "committed_rounds"), [("stored", 0), ("destination-committed", 1), ("log-committed", 1)]
)
def test_a_killed_round_is_done_once(
    sql_place: Place, tmp_path: Path, point: str, visit: int, committed_rounds: int
) -> None:
    log = tmp_path / "log"
    assert count_in_a_process(sql_place, log, f"{point}:{visit}") == -signal.SIGKILL
    spec = sql_place.spec(values=COUNTED)
    committed = visit - 1 + committed_rounds
    assert sql_place.tick(spec) == (committed or None)
    assert sql_place.rows(spec) == counted_until(committed)
    # Killed again at its first round after the restart, and then left alone.
    assert count_in_a_process(sql_place, log, f"{point}:1") == -signal.SIGKILL
    sql_place.log = FileRecoveryLog.at(log)
    count_to_the_end(sql_place)
    assert sql_place.tick(spec) == LAST_TICK
    assert sql_place.rows(spec) == counted_until(LAST_TICK)


# --- scenarios: zombies


@dataclass
class PausingLog(MemoryRecoveryLog):
    """A recovery log in which something happens before the next commit."""

    before_commit: Callable[[], None] | None = None

    def commit(
        self, materialization: str, key_range: KeyRange, fence: Fence, checkpoint: RuntimeCheckpoint, updates: Any
    ) -> None:
        pause, self.before_commit = self.before_commit, None
        if pause:
            pause()
        super().commit(materialization, key_range, fence, checkpoint, updates)


@pytest.mark.parametrize("finished", [False, True], ids=["opened", "finished"])
@pytest.mark.parametrize("size", [10, 500])
def test_a_zombie_that_wakes_before_its_commit_changes_nothing(place: Place, finished: bool, size: int) -> None:
    spec = place.applied()
    zombie = place.open(spec)
    zombie.run_round([put(0)], at(1))
    successors = []

    def stores() -> Iterator[Store]:
        yield from (put(number, "zombie", "[]") for number in range(size))
        successor = place.open(spec)  # while the zombie sleeps
        successors.append(successor)
        if finished:
            successor.run_round([put(5, "successor", "[]")], at(2))
            successor.close()

    with pytest.raises(Fenced):
        zombie.run_round(stores(), at(2))
    if not finished:
        successors[0].run_round([put(5, "successor", "[]")], at(2))
        successors[0].close()
    assert place.rows(spec) == {(0,): ("c0", "[]"), (5,): ("successor", "[]")}
    assert place.tick(spec) == 2


@pytest.mark.parametrize("finished", [False, True], ids=["opened", "finished"])
def test_a_zombie_that_wakes_after_its_commit_leaves_the_recovery_log_alone(place: Place, finished: bool) -> None:
    log = PausingLog()
    spec = place.applied()
    zombie = place.open(spec, log=log)
    successors = []

    def succeed() -> None:
        successor = place.open(spec, log=log)
        assert successor.checkpoint is not None and successor.checkpoint.tick == 1
        successors.append(successor)
        if finished:
            successor.run_round([put(2)], at(2))

    log.before_commit = succeed
    with pytest.raises(Fenced):
        zombie.run_round([put(1)], at(1))
    successors[0].run_round([put(3)], at(3))
    assert set(place.rows(spec)) == {(1,), (2,), (3,)} if finished else {(1,), (3,)}
    assert log.rows["m"][ALL_KEYS].checkpoint.tick == 3


def test_a_zombie_of_another_range_is_fenced_off_too(place: Place) -> None:
    spec = place.applied()
    whole = place.open(spec)
    parts = [place.open(spec, LOWER, MemoryRecoveryLog()), place.open(spec, UPPER, MemoryRecoveryLog())]
    with pytest.raises(Fenced):
        whole.run_round([put(1)], at(1))
    for number, part in enumerate(parts):
        part.run_round([put(number + 2)], at(1))
    assert set(place.rows(spec)) == {(2,), (3,)}


def test_of_many_sessions_that_open_at_once_one_lives(place: Place) -> None:
    spec = place.applied()
    outcomes: list[str] = []

    def race(number: int) -> None:
        try:
            session = place.open(spec, log=MemoryRecoveryLog())
            session.run_round([put(number)], at(session.checkpoint.tick + 1 if session.checkpoint else 1))
            outcomes.append(f"wrote {number}")
        except Fenced:
            outcomes.append("fenced")
        except FixConfiguration:  # others have finished rounds already
            outcomes.append("late")

    threads = [threading.Thread(target=race, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    written = {f"wrote {key[0]}" for key in place.rows(spec)}
    assert len(outcomes) == 6
    assert written == {outcome for outcome in outcomes if outcome.startswith("wrote")}


# --- scenarios: things get lost


def test_a_lost_fence_row_is_refused(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([put(1)], at(57))
    if place.memory:
        place.memory.fences.clear()
    else:
        place.execute("DELETE FROM tidegate_checkpoints")
        with pytest.raises(FixConfiguration, match="has rows"):
            place.applied()
    for _ in range(2):
        with pytest.raises(FixConfiguration, match="57"):
            place.open(spec)


def test_a_destination_restored_from_a_backup_is_refused(place: Place, tmp_path: Path) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([put(1)], at(1))
    backup = backed_up(place, tmp_path)
    with place.open(spec) as session:
        session.run_round([put(2)], at(2))
        session.run_round([put(3)], at(3))
    backup()
    with pytest.raises(FixConfiguration, match="restored from a backup"):
        place.open(spec)


def backed_up(place: Place, folder: Path) -> Callable[[], None]:
    """A backup of the destination as it is now; calling it restores it."""
    if place.memory:
        memory = place.memory
        fences = copy.deepcopy(memory.fences)
        return lambda: memory.fences.update(fences)
    if place.name == "sqlite":
        kept = shutil.copy(place.config["path"], folder / "backup.db")

        def restore() -> None:
            for end in ("-wal", "-shm"):
                Path(place.config["path"] + end).unlink(missing_ok=True)
            shutil.copy(kept, place.config["path"])

        return restore
    place.execute("CREATE TABLE backup AS SELECT * FROM tidegate_checkpoints")
    return lambda: place.execute("UPDATE tidegate_checkpoints SET checkpoint = (SELECT checkpoint FROM backup)")


def test_a_lost_recovery_log_is_refused(place: Place) -> None:
    spec = place.applied()
    with place.open(spec) as session:
        session.run_round([put(1)], at(1))
        session.run_round([put(2)], at(2))
    with pytest.raises(FixConfiguration, match="catalog was lost"):
        place.open(spec, log=MemoryRecoveryLog())


# --- scenarios: the reply is lost, the server hangs


class Proxy:
    """Stands between a session and Postgres, and can lose a COMMIT, lose its reply, or fall silent."""

    def __init__(self, port: int) -> None:
        self.fault = ""
        self._port = port
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                upstream = socket.create_connection(("127.0.0.1", self._port), timeout=20)
                self._sockets += [client, upstream]
                for source, target in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        from_client = source.getsockname()[1] == self.port
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                if self.fault == "hang" or (self.fault == "lost" and not from_client):
                    if self.fault == "lost":
                        break
                    continue
                if from_client and b"COMMIT\0" in chunk and self.fault in ("lose COMMIT", "lose reply"):
                    if self.fault == "lose COMMIT":
                        break
                    self.fault = "lost"
                target.sendall(chunk)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            end.close()


@pytest.fixture
def proxy(server: EmbeddedPostgres) -> Iterator[Proxy]:
    between = Proxy(server.port)
    yield between
    between.close()


def proxied(server: EmbeddedPostgres, proxy: Proxy, **config: Any) -> Place:
    place = postgres_place(server)
    dsn = place.config["dsn"].replace(f":{server.port}/", f":{proxy.port}/")
    return Place(place.destination, {**place.config, "dsn": dsn, **config})


@pytest.mark.parametrize(("fault", "tick"), [("lose reply", 2), ("lose COMMIT", 1)])
def test_after_a_lost_reply_a_new_session_tells_the_truth(
    server: EmbeddedPostgres, proxy: Proxy, fault: str, tick: int
) -> None:
    place = proxied(server, proxy)
    spec = place.applied()
    session = place.open(spec)
    session.run_round([put(1)], at(1))
    proxy.fault = fault
    with pytest.raises(MaybeDone):
        session.run_round([put(2)], at(2))
    proxy.fault = ""
    with place.open(spec) as session:
        assert session.checkpoint is not None and session.checkpoint.tick == tick
        session.run_round([put(3)], at(3))
    assert len(place.rows(spec)) == tick + 1


def test_after_a_lost_reply_of_the_memory_server_too() -> None:
    place = memory_place()
    spec = place.applied()
    assert place.memory
    session = place.open(spec)
    place.memory.loses_next_reply = True
    with pytest.raises(MaybeDone):
        session.run_round([put(1)], at(1))
    with place.open(spec) as session:
        assert session.checkpoint is not None and session.checkpoint.tick == 1


def test_a_server_that_falls_silent_is_given_up(server: EmbeddedPostgres, proxy: Proxy) -> None:
    place = proxied(server, proxy, timeout_seconds=0.5)
    spec = place.applied()
    session = place.open(spec)
    proxy.fault = "hang"
    with pytest.raises(DefinitelyNotDone):
        session.run_round([put(1)], at(1))
    proxy.fault = ""
    with place.open(spec) as session:
        session.run_round([put(1)], at(1))
    assert len(place.rows(spec)) == 1


# --- scenarios: the operator's mistakes and the world's


def test_a_wrong_password_is_not_tried_again_and_not_printed(server: EmbeddedPostgres) -> None:
    place = postgres_place(server)
    place.config["dsn"] = server.dsn(password="hunter2")
    with pytest.raises(FixConfiguration, match="password authentication failed") as raised:
        place.applied()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("dsn", ["postgresql://u:hunter2@[broken/x", "host = hunter2 password"])
def test_an_unreadable_dsn_is_not_printed(server: EmbeddedPostgres, dsn: str) -> None:
    place = postgres_place(server)
    place.config["dsn"] = dsn
    with pytest.raises(FixConfiguration, match="dsn") as raised:
        place.applied()
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_missing_database_is_named(server: EmbeddedPostgres) -> None:
    place = postgres_place(server)
    place.config["dsn"] = server.dsn(database="nowhere")
    with pytest.raises(FixConfiguration, match="nowhere"):
        place.applied()


def test_a_server_that_was_down_goes_on(server: EmbeddedPostgres) -> None:
    place = postgres_place(server)
    spec = place.applied()
    session = place.open(spec)
    session.run_round([put(1)], at(1))
    server.kill()
    try:
        with pytest.raises(DefinitelyNotDone):
            session.run_round([put(2)], at(2))
        with pytest.raises(DefinitelyNotDone, match="cannot be reached"):
            place.open(spec)
    finally:
        server.start()
    with place.open(spec) as session:
        assert session.checkpoint is not None and session.checkpoint.tick == 1
        session.run_round([put(2)], at(2))
    assert len(place.rows(spec)) == 2


def test_a_lock_of_somebody_else_is_waited_for_no_longer_than_allowed(server: EmbeddedPostgres) -> None:
    place = postgres_place(server)
    place.config["timeout_seconds"] = 0.3
    spec = place.applied()
    session = place.open(spec)
    with psycopg.connect(server.dsn()) as other:
        other.execute(f"LOCK TABLE {place.config['schema']}.orders".encode())
        with pytest.raises(DefinitelyNotDone):
            session.run_round([put(1)], at(1))
        other.rollback()
    with place.open(spec) as session:
        session.run_round([put(1)], at(1))


def test_a_locked_file_is_waited_for_no_longer_than_allowed(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    place.config["timeout_seconds"] = 0.1
    spec = place.applied()
    session = place.open(spec)
    other = sqlite3.connect(place.config["path"], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DefinitelyNotDone, match="locked"):
        session.run_round([put(1)], at(1))
    other.close()
    with place.open(spec) as session:
        session.run_round([put(1)], at(1))


def test_a_full_disk_leaves_the_last_round(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    spec = place.applied()
    session = place.open(spec)
    session.run_round([put(1)], at(1))
    session._transactor._connection.execute("PRAGMA max_page_count = 20")  # type: ignore[attr-defined]
    with pytest.raises(DefinitelyNotDone, match="full"):
        session.run_round([put(2, "x" * 200_000, "[]")], at(2))
    assert set(place.rows(spec)) == {(1,)}
    with place.open(spec) as session:
        session.run_round([put(2)], at(2))


def test_a_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FixConfiguration, match="unable to open"):
        sqlite_place(tmp_path / "missing").applied()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.db").write_text("Not a database at all, but long enough to have a header. " * 10)
    with pytest.raises(FixConfiguration, match="not a database"):
        sqlite_place(tmp_path).applied()


def test_a_read_only_file_is_refused(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    place.applied()
    reader = sqlite3.connect(f"file:{place.config['path']}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError) as raised:
        reader.execute("CREATE TABLE x (a)")
    reader.close()
    assert isinstance(_sorted(raised.value, SqliteConfig("out.db"), "apply"), FixConfiguration)


@pytest.mark.parametrize("size", [1, 500])
def test_a_value_that_postgres_cannot_hold_is_refused_and_changes_nothing(server: EmbeddedPostgres, size: int) -> None:
    place = postgres_place(server)
    spec = place.applied()
    session = place.open(spec)
    with pytest.raises(FixConfiguration) as raised:
        session.run_round([put(number, "a\0b", "[]") for number in range(size)], at(1))
    assert raised.value.remedy == (
        "Leave its column out: write another view without it, and deliver that to a table of its own."
    )
    assert place.rows(spec) == {}
    with place.open(spec) as again:
        again.run_round([put(1)], at(1))


def test_a_user_without_privileges_is_told_what_to_grant(server: EmbeddedPostgres) -> None:
    place = postgres_place(server)
    with psycopg.connect(server.dsn(), autocommit=True) as owner:
        owner.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    place.config["dsn"] = server.dsn(user="guest", password="guest")
    place.config["schema"] = "public"
    with pytest.raises(FixConfiguration, match="permission denied") as raised:
        place.applied()
    assert "Grant" in raised.value.remedy


if __name__ == "__main__":
    name, config, log_path = sys.argv[1:]
    count_to_the_end(Place(destination(name), json.loads(config), log=FileRecoveryLog.at(Path(log_path))))
