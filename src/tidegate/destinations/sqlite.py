"""SQLite: rows, checkpoint and fence in one transaction of a database file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tidegate.destinations.contract import Answer, Capabilities, Nothing, Pattern, Row, read_config
from tidegate.destinations.sql_store import (
    CHECKPOINTS,
    LEAVE_OUT,
    Checkpoints,
    Dialect,
    FoundColumn,
    Table,
    TableResource,
    changes,
    changes_by_binding,
    decode_binary,
    encode_binary,
    opinion,
    tables_of,
)
from tidegate.errors import DefinitelyNotDone, FixConfiguration, MaybeDone, TidegateError
from tidegate.protocol.fence import FenceRow, checkpoint_over, plan_open
from tidegate.protocol.messages import (
    ALL_KEYS,
    START,
    Acknowledge,
    Acknowledged,
    Applied,
    Apply,
    Described,
    Flush,
    Flushed,
    Load,
    Loaded,
    MaterializationSpec,
    Open,
    Opened,
    RuntimeCheckpoint,
    Spec,
    StartCommit,
    StartedCommit,
    Store,
    Validate,
    Validated,
    ValidatedBinding,
)

# A round up to this size holds the database's one write lock only while it commits.
BUFFERED_STORES = 50_000


def _double(value: float | str) -> float | str:
    number = float(value)
    return number if number == number else "NaN"  # SQLite would make it NULL


DIALECT = Dialect(
    placeholder="?",
    types={
        "boolean": "BOOLEAN INTEGER",
        **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "INTEGER"),
        **dict.fromkeys(("float", "double"), "REAL"),
        "decimal": "DECIMAL TEXT({},{})",
        "string": "TEXT",
        "binary": "BLOB",
        "date": "DATE TEXT",
        "timestamp": "TIMESTAMP TEXT",
        "timestamp_ntz": "TIMESTAMP_NTZ TEXT",
        "json": "JSON TEXT",
    },
    encoders={"decimal": "{:f}".format, "binary": decode_binary, "float": _double, "double": _double},
    decoders={"boolean": bool, "binary": encode_binary},
)


class SqliteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The database file, and how long to wait for its lock."""

    path: str
    table: str | None = None
    timeout_seconds: float = 30.0


class SqliteDestination:
    """Tables of an SQLite file."""

    name: ClassVar[str] = "sqlite"
    capabilities: ClassVar[Capabilities] = Capabilities(
        pattern=Pattern.DESTINATION_AUTHORITATIVE,
        atomic_rounds=True,
        atomic_across_splits=False,
        standard_updates=True,
        delta_updates=False,
        promise="whole source transactions, exactly once",
    )
    config: ClassVar[type[msgspec.Struct]] = SqliteConfig

    def spec(self, message: Spec) -> Described:
        return Described(
            msgspec.json.schema(SqliteConfig), msgspec.json.schema(TableResource), "docs/destinations.md#sqlite"
        )

    def validate(self, message: Validate) -> Validated:
        config, tables, checkpoints = _plan(message.materialization)
        if not Path(config.path).exists():
            _require_folder(config)
            return Validated(tuple(opinion(table, (), ours=True, has_rows=False) for table in tables))
        with _connected(config) as connection, _errors_of(config, "look at the tables"):
            ours = message.last is not None or (_is_prepared(connection) and _is_known(connection, checkpoints))
            return Validated(tuple(_opinion(connection, table, ours) for table in tables))

    def apply(self, message: Apply) -> Applied:
        config, tables, checkpoints = _plan(message.materialization)
        with _connected(config) as connection, _transaction(connection, config, "apply"):
            connection.execute(checkpoints.create)
            ours = message.last is not None or _is_known(connection, checkpoints)
            statements = [change for table in tables for change in _changes(connection, table, ours)]
            for statement in statements:
                connection.execute(statement)
        return Applied("\n".join(statements))

    def open(self, message: Open) -> SqliteTransactor:
        config, tables, checkpoints = _plan(message.materialization)
        connection = _connect(config)
        try:
            with _transaction(connection, config, "open"):
                selected = connection.execute(checkpoints.select, (checkpoints.materialization,)).fetchall()
                plan = plan_open(checkpoints.fence_rows(selected), message.key_range)
                connection.executemany(checkpoints.put, map(checkpoints.put_row, plan.rows))
        except BaseException:
            connection.close()
            raise
        return SqliteTransactor(connection, config, tables, checkpoints, plan.mine)

    def places(self, materialization: MaterializationSpec) -> tuple[tuple[str, ...], ...]:
        config, tables, _ = _plan(materialization)
        return tuple((str(Path(config.path).resolve()), table.path[-1].lower()) for table in tables)

    @contextmanager
    def snapshot(self, materialization: MaterializationSpec) -> Iterator[SqliteSnapshot | Nothing]:
        config, tables, checkpoints = _plan(materialization)
        if not Path(config.path).exists():
            yield Nothing()
            return
        with _connected(config, "rw") as connection, _errors_of(config, "read"):
            connection.execute("BEGIN")
            if not (_is_prepared(connection) and _is_known(connection, checkpoints)):
                yield Nothing()
                return
            selected = connection.execute(checkpoints.select, (checkpoints.materialization,)).fetchall()
            checkpoint = checkpoint_over(checkpoints.fence_rows(selected), ALL_KEYS)
            yield SqliteSnapshot(connection, tables, checkpoint)


class SqliteTransactor:
    """One session: documents wait in memory, then all of a round becomes one transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        config: SqliteConfig,
        tables: tuple[Table, ...],
        checkpoints: Checkpoints,
        mine: FenceRow,
    ) -> None:
        self.opened = Opened(mine.checkpoint)
        self._connection = connection
        self._config = config
        self._tables = tables
        self._checkpoints = checkpoints
        self._mine = mine
        self._loads: list[Load] = []
        self._stores: list[Store] = []

    def acknowledge(self, message: Acknowledge) -> Future[Acknowledged]:
        done: Future[Acknowledged] = Future()
        done.set_result(Acknowledged())  # the round was committed before StartedCommit
        return done

    def load(self, loads: Sequence[Load], answer: Answer) -> None:
        self._loads.extend(loads)

    def flush(self, message: Flush, answer: Answer) -> Flushed:
        with _errors_of(self._config, "load"):
            for binding, table in enumerate(self._tables):
                for key in table.key_rows([load.key for load in self._loads if load.binding == binding]):
                    for row in self._connection.execute(table.select_one, key):
                        answer(Loaded(binding, table.document(row)))
        self._loads.clear()
        return Flushed()

    def store(self, stores: Sequence[Store]) -> None:
        self._stores.extend(stores)
        if len(self._stores) >= BUFFERED_STORES:
            with _errors_of(self._config, "store"):
                self._write()

    def start_commit(self, message: StartCommit) -> StartedCommit:
        with _errors_of(self._config, "store"):
            self._write()
            committed = self._checkpoints.commit_row(self._mine, message.runtime_checkpoint)
            if self._connection.execute(self._checkpoints.commit, committed).rowcount != 1:
                self._connection.execute("ROLLBACK")
                raise self._checkpoints.fenced(self._mine)
        with _errors_of(self._config, "commit"):
            self._connection.execute("COMMIT")
        return StartedCommit()

    def close(self) -> None:
        self._connection.close()

    def _write(self) -> None:
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        for binding, wanted in changes_by_binding(self._stores).items():
            table = self._tables[binding]
            self._connection.executemany(table.delete, table.key_rows(wanted.deletes))
            self._connection.executemany(table.upsert, table.rows(wanted.upserts))
        self._stores.clear()


class SqliteSnapshot:
    """What one read transaction sees."""

    def __init__(
        self, connection: sqlite3.Connection, tables: tuple[Table, ...], checkpoint: RuntimeCheckpoint
    ) -> None:
        self.checkpoint = None if checkpoint.tick <= START.tick else checkpoint
        self._connection = connection
        self._tables = tables

    def rows(self, binding: int = 0) -> Iterator[Row]:
        table = self._tables[binding]
        return map(table.cells, self._connection.execute(table.select_all))


def _plan(materialization: MaterializationSpec) -> tuple[SqliteConfig, tuple[Table, ...], Checkpoints]:
    config: SqliteConfig = read_config(SqliteConfig, materialization.config, f'sqlite of "{materialization.name}"')
    checkpoints = Checkpoints(materialization.name, DIALECT, (), "TEXT")
    return config, tables_of(materialization, DIALECT), checkpoints


def _is_prepared(connection: sqlite3.Connection) -> bool:
    """Whether any materialization has been applied here."""
    query = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = ?)"
    return bool(connection.execute(query, (CHECKPOINTS,)).fetchone() == (1,))


def _is_known(connection: sqlite3.Connection, checkpoints: Checkpoints) -> bool:
    """Whether this materialization was opened here before: its table is then its own."""
    return connection.execute(checkpoints.select, (checkpoints.materialization,)).fetchone() is not None


def _opinion(connection: sqlite3.Connection, table: Table, ours: bool) -> ValidatedBinding:
    found = _found_columns(connection, table)
    return opinion(table, found, ours=ours, has_rows=_has_rows(connection, table, found))


def _changes(connection: sqlite3.Connection, table: Table, ours: bool) -> tuple[str, ...]:
    found = _found_columns(connection, table)
    return changes(table, found, ours=ours, has_rows=_has_rows(connection, table, found))


def _has_rows(connection: sqlite3.Connection, table: Table, found: Sequence[FoundColumn]) -> bool:
    return bool(found) and connection.execute(table.has_rows).fetchone() == (1,)


def _found_columns(connection: sqlite3.Connection, table: Table) -> list[FoundColumn]:
    selected = connection.execute(
        'SELECT name, type, "notnull" AND dflt_value IS NULL, pk FROM pragma_table_xinfo(?) WHERE hidden = 0',
        (table.path[-1],),
    )
    return [FoundColumn(name, kind, bool(required), bool(key)) for name, kind, required, key in selected]


def _require_folder(config: SqliteConfig) -> None:
    if not Path(config.path).parent.is_dir():
        raise FixConfiguration(
            f'SQLite cannot open in "{config.path}": there is no such folder', remedy=_FIX[sqlite3.SQLITE_CANTOPEN]
        )


def _connect(config: SqliteConfig, mode: str = "rwc") -> sqlite3.Connection:
    """A connection that waits for locks no longer than it should, and whose commits survive a power failure."""
    with _errors_of(config, "open"):
        uri = f"{Path(config.path).absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(
            uri, timeout=config.timeout_seconds, isolation_level=None, check_same_thread=False, uri=True
        )
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "cache_size = -65536"):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def _connected(config: SqliteConfig, mode: str = "rwc") -> Iterator[sqlite3.Connection]:
    connection = _connect(config, mode)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _transaction(connection: sqlite3.Connection, config: SqliteConfig, doing: str) -> Iterator[None]:
    """Everything inside, or nothing: closing an uncommitted connection rolls it back."""
    with _errors_of(config, doing):
        connection.execute("BEGIN IMMEDIATE")
        yield
    with _errors_of(config, "commit"):
        connection.execute("COMMIT")


@contextmanager
def _errors_of(config: SqliteConfig, doing: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _sorted(error, config, doing) from error


_TRY_AGAIN = {
    sqlite3.SQLITE_BUSY: "Another program holds its write lock: let it commit, or raise `timeout_seconds`.",
    sqlite3.SQLITE_LOCKED: "Another program holds its write lock: let it commit, or raise `timeout_seconds`.",
    sqlite3.SQLITE_FULL: "Free some space on the disk (or raise max_page_count), then start again.",
    sqlite3.SQLITE_NOMEM: "Free some memory, then start again.",
    sqlite3.SQLITE_INTERRUPT: "Start again.",
}
_FIX = {
    sqlite3.SQLITE_READONLY: "Make the file and its folder writable for this user.",
    sqlite3.SQLITE_PERM: "Make the file and its folder writable for this user.",
    sqlite3.SQLITE_CANTOPEN: "Create its folder, and make it writable for this user.",
    sqlite3.SQLITE_NOTADB: "`path` must name an SQLite database, or no file yet.",
    sqlite3.SQLITE_CORRUPT: "Restore the file from a backup, or name a new one.",
    sqlite3.SQLITE_CONSTRAINT: "A constraint or trigger of the table refuses a row of the view: remove it.",
    sqlite3.SQLITE_ERROR: "The tables are not as Tidegate left them: restore them, or name a new file.",
    sqlite3.SQLITE_TOOBIG: LEAVE_OUT,
}


def _sorted(error: sqlite3.Error, config: SqliteConfig, doing: str) -> TidegateError:
    """What an error of SQLite means for the round; of a commit only a refused lock or a full disk is certain."""
    code: Any = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    message = f'SQLite cannot {doing} in "{config.path}": {error}'
    if primary in _TRY_AGAIN:
        return DefinitelyNotDone(message, remedy=_TRY_AGAIN[primary])
    if doing == "commit":
        return MaybeDone(message, remedy="Open a new session: it finds out whether the round was committed.")
    if primary in _FIX:
        return FixConfiguration(message, remedy=_FIX[primary])
    return DefinitelyNotDone(message, remedy="Start again; if it comes again, check the disk.")
