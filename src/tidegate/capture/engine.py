"""What Debezium's engine is told, and the files that it keeps in the capture's state folder: plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidegate.errors import FixConfiguration

MESSAGE_PREFIX = "tidegate"
HEARTBEAT_TOPICS = "__debezium-heartbeat."
_SETTINGS_FILE = "capture.json"


@dataclass(frozen=True)
class CaptureSettings:
    """Which tables of which server are captured, and where to; the dsn is a secret."""

    dsn: str
    tables: tuple[str, ...]
    topic_prefix: str
    partitions: int
    state: Path
    slot: str
    publication: str

    @property
    def log_root(self) -> Path:
        return self.state / "log"

    @property
    def offsets(self) -> Path:
        """The source's position as Debezium writes it; a kill may tear it."""
        return self.state / "offsets"

    @property
    def kept_offsets(self) -> Path:
        """The last whole copy of it, which every start begins from."""
        return self.state / "offsets.kept"

    @property
    def transaction_topic(self) -> str:
        return f"{self.topic_prefix}.transaction"

    @property
    def notification_topic(self) -> str:
        return f"{self.topic_prefix}.notifications"

    @property
    def message_topic(self) -> str:
        return f"{self.topic_prefix}.message"

    @property
    def qualified_tables(self) -> tuple[tuple[str, str], ...]:
        return tuple(map(qualified, self.tables))

    @property
    def topics(self) -> dict[str, int]:
        """Every topic that is known before the first record, with its number of partitions."""
        rows = {topic_of(self.topic_prefix, table): self.partitions for table in self.tables}
        return rows | {self.transaction_topic: 1, self.notification_topic: 1, self.message_topic: 1}


class _Remembered(msgspec.Struct, frozen=True):
    tables: tuple[str, ...]
    topic_prefix: str
    partitions: int
    slot: str
    publication: str


def qualified(table: str) -> tuple[str, str]:
    """Schema and name of a table; `orders` means `public.orders`."""
    schema, _, name = table.rpartition(".")
    return schema or "public", name


def topic_of(topic_prefix: str, table: str) -> str:
    return ".".join((topic_prefix, *qualified(table)))


def is_known(settings: CaptureSettings) -> bool:
    """Whether this state folder has captured before; refuses settings other than it began with."""
    path = settings.state / _SETTINGS_FILE
    if not path.exists():
        return False
    before, now = msgspec.json.decode(path.read_bytes(), type=_Remembered), _remembered(settings)
    changed = [name for name in now.__struct_fields__ if getattr(now, name) != getattr(before, name)]
    if changed:
        raise FixConfiguration(
            f"the capture in {settings.state} began with another setting of {', '.join(changed)}: "
            + ", ".join(str(getattr(before, name)) for name in changed),
            remedy="Set it back, or give a new state folder, slot and publication: a new snapshot is taken then.",
        )
    return True


def remember(settings: CaptureSettings) -> None:
    """From now on the slot and the publication of these names are this state folder's own."""
    settings.state.mkdir(parents=True, exist_ok=True)
    draft = settings.state / f"{_SETTINGS_FILE}.draft"
    draft.write_bytes(msgspec.json.encode(_remembered(settings)))
    draft.replace(settings.state / _SETTINGS_FILE)


def _remembered(settings: CaptureSettings) -> _Remembered:
    tables = tuple(sorted(".".join(pair) for pair in settings.qualified_tables))
    return _Remembered(tables, settings.topic_prefix, settings.partitions, settings.slot, settings.publication)


def has_whole_snapshot(settings: CaptureSettings) -> bool:
    """Whether the stored position lies behind a finished snapshot: from there the slot must never be made anew."""
    position = settings.kept_offsets.read_bytes() if settings.kept_offsets.exists() else b""
    return b'"lsn":' in position and b'"snapshot_completed":false' not in position


def connector_properties(settings: CaptureSettings, server: dict[str, str]) -> dict[str, str]:
    """Debezium's settings; `server` has the parts of the dsn (host, user, sslmode, …)."""
    return {
        "name": "tidegate",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "topic.prefix": settings.topic_prefix,
        "slot.name": settings.slot,
        "publication.name": settings.publication,
        "table.include.list": ",".join(r"\.".join(map(re.escape, pair)) for pair in settings.qualified_tables),
        "notification.sink.topic.name": settings.notification_topic,
        "offset.storage.file.filename": str(settings.offsets),
        **_server_properties(server),
        **_FIXED_PROPERTIES,
    }


def _server_properties(server: dict[str, str]) -> dict[str, str]:
    return {
        "database.hostname": server.get("host", "localhost"),
        "database.port": server.get("port", "5432"),
        "database.user": server.get("user", "postgres"),
        "database.password": server.get("password", ""),
        "database.dbname": server.get("dbname", server.get("user", "postgres")),
        "database.sslmode": server.get("sslmode", "prefer"),
        **{f"database.{name}": server[name] for name in _SSL_FILES if server.get(name)},
    }


_SSL_FILES = ("sslrootcert", "sslcert", "sslkey", "sslpassword")
_FIXED_PROPERTIES = {
    "plugin.name": "pgoutput",
    "publication.autocreate.mode": "filtered",
    "publish.via.partition.root": "true",  # a partitioned table has one topic, and END counts its rows by one name
    "provide.transaction.metadata": "true",
    "skipped.operations": "none",
    "decimal.handling.mode": "string",
    "time.precision.mode": "isostring",
    "interval.handling.mode": "string",
    "heartbeat.interval.ms": "1000",
    "notification.enabled.channels": "sink",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
    "offset.flush.interval.ms": "0",
    "errors.max.retries": "0",  # the supervisor starts the engine again, with a delay of its own
    "slot.max.retries": "1",
    "slot.retry.delay.ms": "500",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "max.queue.size.in.bytes": str(64 * 1024 * 1024),
    "poll.interval.ms": "20",
}

LOG4J_PROPERTIES = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {path}
appender.file.filePattern = {path}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %c{{1}} %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
"""
