"""Postgres: rows, checkpoint and fence in one transaction of a schema."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tidegate.destinations.contract import Answer, Capabilities, Nothing, Pattern, Row, read_config
from tidegate.destinations.sql_store import (
    LEAVE_OUT,
    Changes,
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

# Fewer stores go straight into the table, more of them by COPY through a temporary one.
DIRECT_STORES = 100
CONNECT_TIMEOUT_SECONDS = 10
IDLE_TIMEOUT_SECONDS = 60
LOCK_TIMEOUT_SECONDS = 30.0
SNAPSHOT_ROWS = 10_000

Connection = psycopg.Connection[tuple[Any, ...]]

DIALECT = Dialect(
    placeholder="%s",
    types={
        "boolean": "boolean",
        "tinyint": "smallint",
        "smallint": "smallint",
        "int": "integer",
        "bigint": "bigint",
        "float": "real",
        "double": "double precision",
        "decimal": "numeric({},{})",
        "string": "text",
        "binary": "bytea",
        "date": "date",
        "timestamp": "timestamp with time zone",
        "timestamp_ntz": "timestamp without time zone",
        "json": "jsonb",
    },
    encoders={"binary": decode_binary},
    decoders={"binary": encode_binary},
    as_text=frozenset({"date", "timestamp", "timestamp_ntz", "json"}),
    longest_name_bytes=63,
)


class PostgresConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server, the schema of all tables, and how long one statement may take."""

    dsn: str
    schema: str = "public"
    table: str | None = None
    timeout_seconds: float = 600.0


class PostgresDestination:
    """Tables of a Postgres schema."""

    name: ClassVar[str] = "postgres"
    capabilities: ClassVar[Capabilities] = Capabilities(
        pattern=Pattern.DESTINATION_AUTHORITATIVE,
        atomic_rounds=True,
        atomic_across_splits=False,
        standard_updates=True,
        delta_updates=False,
        promise="whole source transactions, exactly once",
    )
    config: ClassVar[type[msgspec.Struct]] = PostgresConfig

    def spec(self, message: Spec) -> Described:
        return Described(
            msgspec.json.schema(PostgresConfig), msgspec.json.schema(TableResource), "docs/destinations.md#postgres"
        )

    def validate(self, message: Validate) -> Validated:
        config, tables, checkpoints = _plan(message.materialization)
        with _connected(config) as connection, _errors_of(connection, config, "look at the tables"):
            known = _is_prepared(connection, checkpoints) and _is_known(connection, checkpoints)
            ours = message.last is not None or known
            return Validated(tuple(_opinion(connection, table, ours) for table in tables))

    def apply(self, message: Apply) -> Applied:
        config, tables, checkpoints = _plan(message.materialization)
        with _connected(config) as connection, _transaction(connection, config, "apply"):
            _lock(connection, "tidegate apply")
            _create_schema(connection, config.schema)
            connection.execute(checkpoints.create, ())
            ours = message.last is not None or _is_known(connection, checkpoints)
            statements = [change for table in tables for change in _changes(connection, table, ours)]
            for statement in statements:
                connection.execute(statement, ())
        return Applied("\n".join(statements).replace("%%", "%"))

    def open(self, message: Open) -> PostgresTransactor:
        config, tables, checkpoints = _plan(message.materialization)
        connection = _connect(config)
        try:
            with _transaction(connection, config, "open"):
                # Two sessions that open overlapping ranges at once would not see each other's new rows.
                _lock(connection, f"tidegate open {checkpoints.materialization}")
                selected = connection.execute(f"{checkpoints.select} FOR UPDATE", (checkpoints.materialization,))
                plan = plan_open(checkpoints.fence_rows(selected), message.key_range)
                connection.cursor().executemany(checkpoints.put, list(map(checkpoints.put_row, plan.rows)))
        except BaseException:
            connection.close()
            raise
        return PostgresTransactor(connection, config, tables, checkpoints, plan.mine)

    def places(self, materialization: MaterializationSpec) -> tuple[tuple[str, ...], ...]:
        config, tables, _ = _plan(materialization)
        _given(config)
        return tuple((_place(config), *table.path) for table in tables)

    @contextmanager
    def snapshot(self, materialization: MaterializationSpec) -> Iterator[PostgresSnapshot | Nothing]:
        config, tables, checkpoints = _plan(materialization)
        with _connected(config) as connection, _errors_of(connection, config, "read", deadline=False):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # the reader sets the pace
            if not (_is_prepared(connection, checkpoints) and _is_known(connection, checkpoints)):
                yield Nothing()
                return
            selected = connection.execute(checkpoints.select, (checkpoints.materialization,)).fetchall()
            checkpoint = checkpoint_over(checkpoints.fence_rows(selected), ALL_KEYS)
            yield PostgresSnapshot(connection, tables, checkpoint)


class PostgresTransactor:
    """One session: documents wait in memory or in temporary tables, then all of a round becomes one transaction."""

    def __init__(
        self,
        connection: Connection,
        config: PostgresConfig,
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
        self._created: set[int] = set()  # bindings whose temporary table exists
        self._staged: set[int] = set()  # those whose temporary table has rows of this round

    def acknowledge(self, message: Acknowledge) -> Future[Acknowledged]:
        done: Future[Acknowledged] = Future()
        done.set_result(Acknowledged())  # the round was committed before StartedCommit
        return done

    def load(self, loads: Sequence[Load], answer: Answer) -> None:
        self._loads.extend(loads)

    def flush(self, message: Flush, answer: Answer) -> Flushed:
        with _errors_of(self._connection, self._config, "load"):
            for binding, table in enumerate(self._tables):
                keys = table.key_rows([load.key for load in self._loads if load.binding == binding])
                for row in _rows_of_keys(self._connection, table, list(keys)):
                    answer(Loaded(binding, table.document(row)))
        self._loads.clear()
        return Flushed()

    def store(self, stores: Sequence[Store]) -> None:
        self._stores.extend(stores)
        if len(self._stores) > DIRECT_STORES:
            with _errors_of(self._connection, self._config, "store"):
                self._stage()

    def start_commit(self, message: StartCommit) -> StartedCommit:
        with _errors_of(self._connection, self._config, "store"):
            if self._staged:
                self._stage()
            self._connection.execute("BEGIN")
            self._write()
            committed = self._checkpoints.commit_row(self._mine, message.runtime_checkpoint)
            if self._connection.execute(self._checkpoints.commit, committed).rowcount != 1:
                self._connection.execute("ROLLBACK")
                raise self._checkpoints.fenced(self._mine)
        _commit(self._connection, self._config)
        self._staged.clear()
        return StartedCommit()

    def close(self) -> None:
        self._connection.close()

    def _stage(self) -> None:
        """Copies what waits into temporary tables; no lock that another session could wait for is taken."""
        for binding, wanted in changes_by_binding(self._stores).items():
            table, stage = self._tables[binding], _stage_name(binding)
            if binding not in self._staged:
                self._connection.execute(
                    f"TRUNCATE {stage}" if binding in self._created else _create_stage(table, stage), ()
                )
                self._created.add(binding)
            _copy(self._connection, table, stage, wanted)
            self._staged.add(binding)
        self._stores.clear()

    def _write(self) -> None:
        for binding in sorted(self._staged):
            for statement in _from_stage(self._tables[binding], _stage_name(binding)):
                self._connection.execute(statement, ())
        for binding, wanted in changes_by_binding(self._stores).items():
            table = self._tables[binding]
            with self._connection.cursor() as cursor:
                cursor.executemany(table.delete, list(table.key_rows(wanted.deletes)))
                cursor.executemany(table.upsert, list(table.rows(wanted.upserts)))
        self._stores.clear()


class PostgresSnapshot:
    """What one read-only transaction sees."""

    def __init__(self, connection: Connection, tables: tuple[Table, ...], checkpoint: RuntimeCheckpoint) -> None:
        self.checkpoint = None if checkpoint.tick <= START.tick else checkpoint
        self._connection = connection
        self._tables = tables

    def rows(self, binding: int = 0) -> Iterator[Row]:
        table = self._tables[binding]
        with self._connection.cursor(name=f"tidegate_{binding}") as cursor:
            cursor.itersize = SNAPSHOT_ROWS
            yield from map(table.cells, cursor.execute(table.select_all, ()))


def _plan(materialization: MaterializationSpec) -> tuple[PostgresConfig, tuple[Table, ...], Checkpoints]:
    config: PostgresConfig = read_config(
        PostgresConfig, materialization.config, f'postgres of "{materialization.name}"'
    )
    checkpoints = Checkpoints(materialization.name, DIALECT, (config.schema,), "jsonb")
    return config, tables_of(materialization, DIALECT, (config.schema,)), checkpoints


def _is_prepared(connection: Connection, checkpoints: Checkpoints) -> bool:
    """Whether any materialization has been applied here."""
    name = checkpoints.name.replace("%%", "%")
    return connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone() == (True,)


def _is_known(connection: Connection, checkpoints: Checkpoints) -> bool:
    """Whether this materialization was opened here before: its table is then its own."""
    return connection.execute(checkpoints.select, (checkpoints.materialization,)).fetchone() is not None


def _opinion(connection: Connection, table: Table, ours: bool) -> ValidatedBinding:
    found = _found_columns(connection, table)
    return opinion(table, found, ours=ours, has_rows=_has_rows(connection, table, found))


def _changes(connection: Connection, table: Table, ours: bool) -> tuple[str, ...]:
    found = _found_columns(connection, table)
    return changes(table, found, ours=ours, has_rows=_has_rows(connection, table, found))


def _has_rows(connection: Connection, table: Table, found: Sequence[FoundColumn]) -> bool:
    return bool(found) and connection.execute(table.has_rows, ()).fetchone() == (True,)


_COLUMNS = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod),
           a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', coalesce(a.attnum = ANY (i.indkey::int2[]), false)
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
    WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""


def _found_columns(connection: Connection, table: Table) -> list[FoundColumn]:
    return [FoundColumn(*row) for row in connection.execute(_COLUMNS, table.path)]


def _create_schema(connection: Connection, schema: str) -> None:
    """Asks first: even IF NOT EXISTS needs a privilege that the user may not have."""
    found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone()
    if found is None:
        connection.execute(f"CREATE SCHEMA {DIALECT.quote(schema)}", ())


def _lock(connection: Connection, name: str) -> None:
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))


def _rows_of_keys(connection: Connection, table: Table, keys: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    if not keys:
        return
    with connection.cursor() as cursor:
        cursor.executemany(table.select_one, keys, returning=True)
        for result in cursor.results():
            yield from result


def _stage_name(binding: int) -> str:
    return f"pg_temp._tidegate_stage_{binding}"


_DELETED = '"_tidegate_deleted"'


def _create_stage(table: Table, stage: str) -> str:
    columns = f"SELECT {table.column_list}, false AS {_DELETED} FROM {table.name}"
    return f"CREATE TEMPORARY TABLE {stage.removeprefix('pg_temp.')} AS {columns} WITH NO DATA"


def _copy(connection: Connection, table: Table, stage: str, wanted: Changes) -> None:
    _copy_rows(connection, stage, table.column_list, ((*row, False) for row in table.rows(wanted.upserts)))
    _copy_rows(connection, stage, table.key_list, ((*row, True) for row in table.key_rows(wanted.deletes)))


def _copy_rows(connection: Connection, stage: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
    statement = f"COPY {stage} ({columns}, {_DELETED}) FROM STDIN".replace("%%", "%")  # it takes no parameters
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _from_stage(table: Table, stage: str) -> tuple[str, ...]:
    same_key = " AND ".join(f"t.{DIALECT.quote(name)} = s.{DIALECT.quote(name)}" for name in table.key)
    return (
        f"DELETE FROM {table.name} t USING {stage} s WHERE s.{_DELETED} AND {same_key}",
        f"{table.insert} SELECT {table.column_list} FROM {stage} WHERE NOT {_DELETED} {table.on_conflict}",
    )


def _given(config: PostgresConfig) -> dict[str, Any]:
    """What `dsn` says, part by part."""
    try:
        return conninfo_to_dict(config.dsn)
    except psycopg.ProgrammingError:
        raise FixConfiguration(
            "`dsn` cannot be read",  # the driver's own message would quote it, password and all
            remedy="Write it as postgresql://user:password@host:port/database.",
        ) from None


def _connect(config: PostgresConfig) -> Connection:
    """A connection on which every wait has an end, and whose commits survive a power failure."""
    given = _given(config)
    try:
        connection: Connection = psycopg.connect(
            config.dsn,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=given.get("connect_timeout", CONNECT_TIMEOUT_SECONDS),
            application_name=given.get("application_name", "tidegate"),
        )
    except psycopg.Error as error:
        raise _unreachable(error, config) from None
    with _errors_of(connection, config, "open"):
        connection.execute(_SETTINGS, (f"{config.timeout_seconds}s", f"{_lock_timeout(config)}s"))
    return connection


_SETTINGS = f"""
    SELECT set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false),
           set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT_SECONDS}s', false),
           set_config('TimeZone', 'UTC', false), set_config('DateStyle', 'ISO', false),
           CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END
"""


def _lock_timeout(config: PostgresConfig) -> float:
    return min(LOCK_TIMEOUT_SECONDS, config.timeout_seconds)


@contextmanager
def _connected(config: PostgresConfig) -> Iterator[Connection]:
    connection = _connect(config)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _transaction(connection: Connection, config: PostgresConfig, doing: str) -> Iterator[None]:
    """Everything inside, or nothing: closing an uncommitted connection rolls it back."""
    with _errors_of(connection, config, doing):
        connection.execute("BEGIN")
        yield
    _commit(connection, config)


def _commit(connection: Connection, config: PostgresConfig) -> None:
    with _errors_of(connection, config, "commit"):
        answer = connection.execute("COMMIT").statusmessage
    assert answer == "COMMIT", answer  # a transaction that had failed would answer ROLLBACK


@contextmanager
def _errors_of(connection: Connection, config: PostgresConfig, doing: str, deadline: bool = True) -> Iterator[None]:
    """Sorts errors, and cuts the connection if the server has not answered well after its own timeout."""
    cut = threading.Timer(config.timeout_seconds * 1.1 + 1, _cut, (connection,))
    cut.daemon = True
    if deadline:
        cut.start()
    try:
        yield
    except psycopg.Error as error:
        raise _sorted(error, config, doing) from error
    finally:
        cut.cancel()


def _cut(connection: Connection) -> None:
    """Whoever waits for the server gets an error now."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


_REFUSED_LOGIN = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "could not translate")


def _unreachable(error: psycopg.Error, config: PostgresConfig) -> TidegateError:
    """A failed connect: the server may come back, but a wrong password stays wrong."""
    text = str(error)
    message = f"Postgres at {_place(config)} cannot be reached: {text.strip()}"
    if any(words in text for words in _REFUSED_LOGIN) or ("does not exist" in text and "FATAL" in text):
        return FixConfiguration(message, remedy="Correct user, password, host or database in `dsn`.")
    return DefinitelyNotDone(message, remedy="Start the server, or correct host and port in `dsn`; then start again.")


def _place(config: PostgresConfig) -> str:
    """Where the server is, without any secret."""
    given = conninfo_to_dict(config.dsn)
    return f"{given.get('host', 'localhost')}:{given.get('port', 5432)}/{given.get('dbname', '')}"


# Classes of SQLSTATE after which the same may succeed: connection, rollback, resources, in use, operator, system.
_TRY_AGAIN = ("08", "40", "53", "55", "57", "58")


def _sorted(error: psycopg.Error, config: PostgresConfig, doing: str) -> TidegateError:
    """What an error of Postgres means for the round; of a commit nothing is certain."""
    told = error.diag.message_primary or str(error).strip()
    message = f"Postgres at {_place(config)} cannot {doing}: {told}"
    if doing == "commit":
        return MaybeDone(message, remedy="Open a new session: it finds out whether the round was committed.")
    if isinstance(error, psycopg.DataError) and error.sqlstate is None:
        return FixConfiguration(message, remedy=LEAVE_OUT)
    if error.sqlstate is None or error.sqlstate.startswith(_TRY_AGAIN):
        return DefinitelyNotDone(message, remedy="Start again. If it was a lock or a timeout: see who holds it.")
    return FixConfiguration(message, remedy=f"Nothing was written. {_remedy(error.sqlstate)}")


def _remedy(sqlstate: str) -> str:
    return {
        "42501": "Grant the user CREATE on the schema and ownership of its tables.",
        "42P01": "A table is missing: restore it, or run `tidegate run`, which creates it.",
    }.get(sqlstate, f"If it is a constraint or a trigger, remove it. If Postgres cannot hold a value: {LEAVE_OUT}")
