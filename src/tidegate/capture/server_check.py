"""Whether a Postgres server can be captured, found out before anything is started; and what its tables look like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.capture.engine import CaptureSettings, has_whole_snapshot, qualified, topic_of
from tidegate.errors import DefinitelyNotDone, FixConfiguration, TidegateError
from tidegate.model.schema import Column, ColumnType, TableSchema

if TYPE_CHECKING:
    import psycopg

OLDEST_VERSION = 14
UNBOUNDED_DECIMAL = ColumnType("decimal", 38, 18)
_CONNECT_SECONDS = 10
_STATEMENT_MILLISECONDS = 15_000
_KEPT_IN_TOPICS = re.compile(r"[A-Za-z0-9_.-]+")
_FILES = ("sslrootcert", "sslcert", "sslkey", "passfile")
_IDENTITIES = {"d": "DEFAULT", "n": "NOTHING", "f": "FULL", "i": "INDEX"}
_SCALARS = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "int",
    "int8": "bigint",
    "oid": "bigint",
    "float4": "float",
    "float8": "double",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
    "bytea": "binary",
}
_WITHOUT_TEXT = {"bit", "varbit", "point", "geometry", "geography", "hstore", "vector", "halfvec", "sparsevec"}


@dataclass(frozen=True)
class ServerFacts:
    """What was found: the version, each table's replica identity, and what the user should know."""

    version: int
    replica_identity: dict[str, str]
    warnings: tuple[str, ...] = field(default=())


def check_server(dsn: str, tables: Sequence[str], slot: str, publication: str, *, known: bool = False) -> ServerFacts:
    """Refuses a server, a role or a table that cannot be captured; `known`: this capture has made its slot before."""
    _check_names(tables)
    server_parts(dsn)
    with connected(dsn) as connection:
        version = _check_version(connection)
        _check_wal_level(connection)
        _check_role(connection)
        identities = {table: _check_table(connection, table) for table in tables}
        _check_publication(connection, publication, tables)
        partitioned = [table for table in tables if _find_table(connection, table)["relkind"] == "p"]
        _check_published(connection, publication, version, partitioned)
        _check_slot(connection, slot, known)
        partial = [table for table, identity in identities.items() if identity != "FULL"]
        warnings = [warning for table in partial for warning in _identity_warnings(connection, table)]
        warnings += map(_partition_warning, partitioned)
    return ServerFacts(version, identities, tuple(warnings))


def discover(dsn: str, tables: Sequence[str], topic_prefix: str = "tidegate") -> list[TableSchema]:
    """The tables' columns and keys out of the server's catalog; a numeric without bounds becomes decimal(38,18)."""
    with connected(dsn) as connection:
        return [_discover_table(connection, table, topic_prefix) for table in tables]


def free_slot(settings: CaptureSettings) -> None:
    """Ends what is left of a former capture on the slot, and drops the slot unless a finished snapshot needs it.

    A slot that is older than the snapshot tears it: so a snapshot that starts again starts with a new slot.
    """
    with connected(settings.dsn) as connection:
        found = connection.execute(_SLOT, {"slot": settings.slot}).fetchone()
        if found is None and has_whole_snapshot(settings):
            raise FixConfiguration(
                f"the replication slot {settings.slot} is gone, and with it the changes since the last capture",
                remedy=f"Remove {settings.state} and the collections: a new snapshot is taken then.",
            )
        if found is not None and has_whole_snapshot(settings):
            _check_not_lost(settings, found["wal_status"])
            connection.execute(_END_CAPTURE, {"slot": settings.slot})
        elif found is not None:
            drop_slot(connection, settings.slot)


def drop_slot(connection: psycopg.Connection[dict[str, Any]], slot: str) -> None:
    """The slot is gone, also if a dead capture's session still held it."""
    connection.execute(_END_CAPTURE, {"slot": slot})
    connection.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [slot]
    )


@contextmanager
def connected(dsn: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    """A session with deadlines; what fails is an error of ours, which never holds the password."""
    import psycopg
    from psycopg.rows import dict_row

    try:
        options = f"-c statement_timeout={_STATEMENT_MILLISECONDS}"
        with psycopg.connect(
            dsn, autocommit=True, connect_timeout=_CONNECT_SECONDS, row_factory=dict_row, options=options
        ) as connection:
            yield connection
    except psycopg.Error as error:
        raise _explained(error, dsn) from None


def server_parts(dsn: str) -> dict[str, str]:
    """Where the server is and who logs in, as the driver found out: from the dsn, the environment, a passfile."""
    _check_host(conninfo_parts(dsn).get("host", ""))
    with connected(dsn) as connection:
        info = connection.info
        parts = info.get_parameters()
        _check_host(info.host)
        if parts.get("sslrootcert") == "system":
            raise FixConfiguration(
                "sslrootcert=system is known to libpq, not to Debezium",
                remedy="Name the file with the certificates instead: sslrootcert=/etc/ssl/certs/ca-certificates.crt.",
            )
        found = {"host": info.host, "port": str(info.port), "user": info.user, "dbname": info.dbname}
        return {**parts, **found, "password": info.password}


def _check_host(host: str) -> None:
    if host.startswith(("/", "@")):
        raise FixConfiguration(
            f"the source's host is a socket ({host}): Debezium reaches a server by TCP only",
            remedy="Write host=127.0.0.1 and a port in the source's dsn, and let the server listen there.",
        )


def with_absolute_files(dsn: str) -> str:
    """The same address, for a process that works in another folder."""
    from psycopg.conninfo import make_conninfo

    parts = conninfo_parts(dsn)
    named = {name: parts[name] for name in _FILES if parts.get(name, "system") != "system"}
    return make_conninfo(dsn, **{name: str(Path(path).absolute()) for name, path in named.items()}) if named else dsn


def conninfo_parts(dsn: str) -> dict[str, str]:
    """The parts of a connection string or URL."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.Error:
        raise FixConfiguration(
            "the source's dsn cannot be read", remedy="Write postgresql://user:password@host:5432/database."
        ) from None


def _explained(error: psycopg.Error, dsn: str) -> TidegateError:
    parts = conninfo_parts(dsn)
    where = f"{parts.get('host', 'localhost')}:{parts.get('port', '5432')}"
    text = _without_password(str(error).strip(), parts)
    if "authentication failed" in text or "no password supplied" in text or "no pg_hba.conf entry" in text:
        return FixConfiguration(
            f"Postgres at {where} does not let {parts.get('user', 'this user')} in: {text}",
            remedy="Correct user and password in the source's dsn, or the server's pg_hba.conf.",
        )
    if 'database "' in text and "does not exist" in text:
        return FixConfiguration(
            f"Postgres at {where}: {text}", remedy="Correct the database's name in the source's dsn."
        )
    if error.sqlstate and error.sqlstate.startswith("42"):
        return FixConfiguration(f"Postgres at {where} refuses: {text}", remedy="Grant the role what it lacks.")
    return DefinitelyNotDone(
        f"Postgres at {where} cannot be reached: {text}", remedy="Is the server up, and host and port right? Try again."
    )


def _without_password(text: str, parts: dict[str, str]) -> str:
    password = parts.get("password", "")
    return text.replace(f":{password}@", ":***@") if password else text


_SLOT = "SELECT active_pid, wal_status FROM pg_replication_slots WHERE slot_name = %(slot)s"
_END_CAPTURE = """
SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots
WHERE slot_name = %(slot)s AND active_pid IS NOT NULL
"""


def _one(connection: psycopg.Connection[dict[str, Any]], query: str, **values: object) -> dict[str, Any] | None:
    return connection.execute(query, values).fetchone()


def _check_version(connection: psycopg.Connection[dict[str, Any]]) -> int:
    version = connection.info.server_version // 10_000
    if version < OLDEST_VERSION:
        raise FixConfiguration(
            f"Postgres {version} is too old: logical messages come through pgoutput from {OLDEST_VERSION} on",
            remedy=f"Upgrade the server to {OLDEST_VERSION} or later.",
        )
    return version


def _check_wal_level(connection: psycopg.Connection[dict[str, Any]]) -> None:
    row = _one(connection, "SHOW wal_level")
    assert row is not None
    if row["wal_level"] != "logical":
        raise FixConfiguration(
            f"the server's wal_level is {row['wal_level']}: it does not write what a capture reads",
            remedy="Run ALTER SYSTEM SET wal_level = 'logical'; then restart the server.",
        )


_ROLE = "SELECT rolname, rolreplication OR rolsuper AS may FROM pg_roles WHERE rolname = current_user"


def _check_role(connection: psycopg.Connection[dict[str, Any]]) -> None:
    row = _one(connection, _ROLE)
    assert row is not None
    if not row["may"]:
        raise FixConfiguration(
            f'the role "{row["rolname"]}" may not replicate',
            remedy=f'Run ALTER ROLE "{row["rolname"]}" WITH REPLICATION; as a superuser.',
        )


_TABLE = """
SELECT c.oid, c.relkind, c.relreplident,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisprimary) AS logs_key,
       has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE') AS may_read,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary) AS has_key
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(name)s AND c.relkind IN ('r', 'p')
"""


_LEAVES = """
SELECT c.relreplident,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisprimary) AS logs_key
FROM pg_partition_tree(%(oid)s) t JOIN pg_class c ON c.oid = t.relid WHERE t.isleaf AND c.relkind = 'r'
"""


def _find_table(connection: psycopg.Connection[dict[str, Any]], table: str) -> dict[str, Any]:
    schema, name = qualified(table)
    found = _one(connection, _TABLE, schema=schema, name=name)
    if found is None:
        raise FixConfiguration(
            f'there is no table "{schema}.{name}" in database "{connection.info.dbname}"',
            remedy="Correct the name (with its schema, in the right case), or the database in the dsn.",
        )
    if not found["has_key"]:
        raise FixConfiguration(
            f'table "{schema}.{name}" has no primary key',
            remedy=f'Add one: ALTER TABLE "{schema}"."{name}" ADD PRIMARY KEY (...).',
        )
    return found


def _check_table(connection: psycopg.Connection[dict[str, Any]], table: str) -> str:
    """The table's replica identity."""
    found = _find_table(connection, table)
    if not found["may_read"]:
        schema, name = qualified(table)
        raise FixConfiguration(
            f'the role "{connection.info.user}" may not read table "{schema}.{name}"',
            remedy=f'Run GRANT USAGE ON SCHEMA "{schema}" TO "{connection.info.user}"; '
            f'GRANT SELECT ON "{schema}"."{name}" TO "{connection.info.user}";',
        )
    leaves = connection.execute(_LEAVES, {"oid": found["oid"]}).fetchall() if found["relkind"] == "p" else []
    for part in leaves or [found]:
        _check_identity(table, _IDENTITIES[part["relreplident"]], part["logs_key"])
    identities = {_IDENTITIES[part["relreplident"]] for part in leaves or [found]}
    return "FULL" if identities == {"FULL"} else min(identities - {"FULL"})


def _check_identity(table: str, identity: str, logs_key: bool) -> None:
    """Without the old key a publication makes the table's own updates fail; another index does not tell the key."""
    schema, name = qualified(table)
    what = "NOTHING: once it is published, every UPDATE and DELETE on it fails"
    if identity == "INDEX":
        what = "USING INDEX, and not that of the primary key: a deleted row's key is not logged"
    if identity == "NOTHING" or (identity == "INDEX" and not logs_key):
        raise FixConfiguration(
            f'table "{schema}.{name}" has REPLICA IDENTITY {what}',
            remedy=f'Run ALTER TABLE "{schema}"."{name}" REPLICA IDENTITY FULL;',
        )


def _check_names(tables: Sequence[str]) -> None:
    """A view names a table by its last part, and a topic takes not all characters."""
    seen: dict[str, str] = {}
    for schema, name in map(qualified, tables):
        table = f"{schema}.{name}"
        if not _KEPT_IN_TOPICS.fullmatch(table):
            raise FixConfiguration(
                f'table "{table}" has a character in its name that Debezium replaces in the names of topics',
                remedy="Rename the table or its schema: letters, digits, _ and - stay as they are.",
            )
        if name in seen:
            raise FixConfiguration(
                f'tables "{seen[name]}" and "{table}" have the same name: a view could not tell them apart',
                remedy="Capture one of them, or rename one; two projects may capture one each.",
            )
        seen[name] = table


def _partition_warning(table: str) -> str:
    return (
        f'table "{".".join(qualified(table))}" is partitioned: to truncate, detach or drop a partition is not in the'
        " stream, its rows stay in the views. DELETE them first."
    )


_ARRAYS = """
SELECT a.attname FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped AND t.typcategory = 'A' AND a.attstorage <> 'p'
ORDER BY a.attnum
"""


def _identity_warnings(connection: psycopg.Connection[dict[str, Any]], table: str) -> Iterator[str]:
    schema, name = qualified(table)
    remedy = f'Run ALTER TABLE "{schema}"."{name}" REPLICA IDENTITY FULL;'
    yield (
        f'table "{schema}.{name}" does not log its previous rows: columns of unchanged large values come without their '
        f"value. {remedy}"
    )
    oid = _find_table(connection, table)["oid"]
    for row in connection.execute(_ARRAYS, {"oid": oid}).fetchall():
        yield (
            f'table "{schema}.{name}", column "{row["attname"]}": a large array that an update leaves as it was'
            f" comes as a placeholder and is taken for the value. {remedy}"
        )


_PUBLICATION_RIGHTS = """
SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS is_superuser,
       has_database_privilege(current_database(), 'CREATE') AS may_create,
       (SELECT pg_has_role(pubowner, 'USAGE') FROM pg_publication WHERE pubname = %(publication)s) AS owns_publication
"""
_OWNS = """
SELECT pg_has_role(c.relowner, 'USAGE') AS owns FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(name)s
"""


def _check_publication(connection: psycopg.Connection[dict[str, Any]], publication: str, tables: Sequence[str]) -> None:
    rights = _one(connection, _PUBLICATION_RIGHTS, publication=publication)
    assert rights is not None
    if rights["is_superuser"]:
        return
    role = connection.info.user
    if rights["owns_publication"] is None and not rights["may_create"]:
        raise FixConfiguration(
            f'the role "{role}" may not create the publication "{publication}"',
            remedy=f'Run GRANT CREATE ON DATABASE "{connection.info.dbname}" TO "{role}";',
        )
    if rights["owns_publication"] is False:
        raise FixConfiguration(
            f'the publication "{publication}" belongs to another role',
            remedy=f'Run ALTER PUBLICATION "{publication}" OWNER TO "{role}"; or choose another name.',
        )
    for schema, name in map(qualified, tables):
        owned = _one(connection, _OWNS, schema=schema, name=name)
        if owned is None or not owned["owns"]:
            raise FixConfiguration(
                f'the role "{role}" does not own table "{schema}.{name}", so it cannot put it into a publication',
                remedy=f'Run ALTER TABLE "{schema}"."{name}" OWNER TO a role that "{role}" is a member of.',
            )


_PUBLISHED = """
SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AS all_changes, pubviaroot FROM pg_publication
WHERE pubname = %(publication)s
"""
_NARROWED = """
SELECT c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
JOIN pg_class c ON c.oid = r.prrelid
WHERE p.pubname = %(publication)s AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)
"""


def _check_published(
    connection: psycopg.Connection[dict[str, Any]], publication: str, version: int, partitioned: Sequence[str]
) -> None:
    """A publication that is there already passes on every change, whole."""
    found = _one(connection, _PUBLISHED, publication=publication)
    if found is not None and not found["all_changes"]:
        raise FixConfiguration(
            f'the publication "{publication}" leaves out changes: it must publish insert, update, delete and truncate',
            remedy=f"Run ALTER PUBLICATION \"{publication}\" SET (publish = 'insert, update, delete, truncate');"
            " then start with a new state folder.",
        )
    if found is not None and partitioned and not found["pubviaroot"]:
        raise FixConfiguration(
            f'the publication "{publication}" publishes partitions by themselves, and "{partitioned[0]}" has some',
            remedy=f'Run ALTER PUBLICATION "{publication}" SET (publish_via_partition_root = true);'
            " then start with a new state folder.",
        )
    narrowed = _one(connection, _NARROWED, publication=publication) if version >= 15 else None
    if narrowed is not None:
        raise FixConfiguration(
            f'the publication "{publication}" has a row filter or a column list for table "{narrowed["relname"]}"',
            remedy=f'Choose another publication, or run DROP PUBLICATION "{publication}"; it is made anew then.',
        )


_SLOTS = """
SELECT (SELECT setting::int FROM pg_settings WHERE name = 'max_replication_slots') AS most,
       (SELECT count(*) FROM pg_replication_slots) AS used,
       (SELECT count(*) FROM pg_replication_slots WHERE slot_name = %(slot)s) AS same
"""


def _check_slot(connection: psycopg.Connection[dict[str, Any]], slot: str, known: bool) -> None:
    row = _one(connection, _SLOTS, slot=slot)
    assert row is not None
    if row["same"] and not known:
        raise FixConfiguration(
            f'a replication slot "{slot}" exists already and was not made by this capture: its snapshot would be torn',
            remedy=f"Choose another slot, or, if nobody needs it, run SELECT pg_drop_replication_slot('{slot}');",
        )
    if not row["same"] and row["used"] >= row["most"]:
        raise FixConfiguration(
            f"all {row['most']} replication slots of the server are taken",
            remedy="Drop one that nobody needs, or raise max_replication_slots and restart the server.",
        )


def _check_not_lost(settings: CaptureSettings, wal_status: str | None) -> None:
    if wal_status == "lost":
        raise FixConfiguration(
            f"the server has thrown away changes that the slot {settings.slot} still needed",
            remedy=f"Raise max_slot_wal_keep_size, drop the slot, remove {settings.state}, and start again.",
        )


_COLUMNS = """
SELECT a.attname, a.atttypmod, a.attgenerated::text AS generated, t.typname, t.typtype, t.typcategory,
       e.typname AS element, e.typtype AS element_typtype, b.typname AS base, t.typtypmod,
       array_position(i.indkey::int2[], a.attnum) AS key_place
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
LEFT JOIN pg_type b ON b.oid = t.typbasetype AND t.typtype = 'd'
LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""


def _discover_table(connection: psycopg.Connection[dict[str, Any]], table: str, topic_prefix: str) -> TableSchema:
    rows = connection.execute(_COLUMNS, {"oid": _find_table(connection, table)["oid"]}).fetchall()
    columns = tuple(Column(row["attname"], _column_type(row)) for row in rows if not _is_left_out(row))
    left_out = tuple(str(row["attname"]) for row in rows if _is_left_out(row))
    in_key = sorted((row for row in rows if row["key_place"] is not None), key=lambda row: row["key_place"])
    key = tuple(str(row["attname"]) for row in in_key)
    return TableSchema(qualified(table)[1], topic_of(topic_prefix, table), key, columns, left_out=left_out)


def _is_left_out(row: dict[str, Any]) -> bool:
    """Generated columns are in snapshots and not in the stream; of some types no text is sent."""
    name = row["element"] or row["base"] or row["typname"]
    is_flag = name == "bit" and row["atttypmod"] == 1 and not row["element"]
    return bool(row["generated"]) or (name in _WITHOUT_TEXT and not is_flag)


def _column_type(row: dict[str, Any]) -> ColumnType:
    if row["element"]:
        return ColumnType("array", element=_scalar(row["element"], row["atttypmod"]))
    if row["base"]:
        return _scalar(row["base"], row["typtypmod"])
    return _scalar(row["typname"], row["atttypmod"])


def _scalar(name: str, modifier: int) -> ColumnType:
    """A type of Postgres as one of ours; whatever has no counterpart comes as text."""
    if name == "numeric":
        return _decimal(modifier)
    if name == "bit":
        return ColumnType("boolean")
    return ColumnType(_SCALARS.get(name, "string"))


def _decimal(modifier: int) -> ColumnType:
    if modifier < 4:
        return UNBOUNDED_DECIMAL
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, ((modifier - 4) & 0x7FF ^ 1024) - 1024
    if not 0 <= scale <= precision <= 38:
        return ColumnType("string")
    return ColumnType("decimal", precision, scale)
