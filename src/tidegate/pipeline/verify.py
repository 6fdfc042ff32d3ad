"""Reads tables as of a tick on Spark, recomputes views, and compares destinations with them: the oracle, for users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from tidegate.catalog.contract import Catalog
from tidegate.destinations.registry import destination
from tidegate.errors import ProtocolViolation
from tidegate.model.cell import encode_json
from tidegate.model.key import KeyBytes, encode_key
from tidegate.model.schema import TableSchema
from tidegate.pipeline.defining import Defined
from tidegate.protocol.fence import require_not_ahead, require_not_behind
from tidegate.protocol.messages import START, MaterializationSpec
from tidegate.views.definition import View
from tidegate.views.recompute import canonical_rows, recompute, same, with_scales

SHOWN_DIFFERENCES = 10
_HISTORY = "_key BINARY, _tick BIGINT, _position BIGINT, _diff TINYINT, row STRING"


def table_at(spark: SparkSession, catalog: Catalog, table: TableSchema, tick: int) -> DataFrame:
    """The table's rows at a tick, typed."""
    schema = cast(StructType, StructType.fromDDL(table.ddl))
    paths = [one.path for one in catalog.files(table.name, -1, tick)]
    if not paths:
        return spark.createDataFrame([], schema)
    updates = spark.read.schema(_HISTORY).parquet(*paths).where(f.col("_tick") <= tick)
    rows = updates.groupBy("_key", "row").agg(f.sum("_diff").alias("count")).where("count > 0")
    return rows.select(f.from_json("row", schema, {"mode": "FAILFAST"}).alias("row")).select("row.*")


@dataclass(frozen=True)
class Difference:
    """A key whose document is not what the query gives."""

    key: str
    expected: str | None
    found: str | None


@dataclass(frozen=True)
class Verdict:
    """How a destination compares with its view, recomputed by Spark at the tick that the destination has committed."""

    materialization: str
    tick: int
    rows: int
    differences: int
    examples: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return self.differences == 0

    @property
    def said(self) -> str:
        if not self.equal:
            return f"{self.differences} of {self.rows} rows differ (tick {self.tick}, {self.rows} rows)"
        return f"equal (tick {self.tick}, {self.rows} rows)" if self.tick > START.tick else "nothing delivered yet"


def verify(
    spark: SparkSession,
    catalog: Catalog,
    definition: View,
    defined: Defined,
    spec: MaterializationSpec,
    driver_name: str,
) -> Verdict:
    """Compares every row of the destination with the query's, both at the destination's own tick."""
    log = catalog.checkpoint(spec.name)
    with destination(driver_name).snapshot(spec) as snapshot:
        checkpoint = snapshot.checkpoint or START
        require_not_behind(spec.name, log, checkpoint)
        found = dict(_found(definition, spec, snapshot.rows()))
    # Asked again, because a run beside this one may have gone on between the first time and the snapshot.
    log, tick = catalog.checkpoint(spec.name), checkpoint.tick
    require_not_ahead(spec.name, log, checkpoint, catalog.checkpoint_at(tick))
    if tick <= START.tick:
        return _verdict(definition, spec.name, tick, {}, found)
    frames = {table.name: table_at(spark, catalog, table, tick) for table in defined.tables}
    frame = recompute(spark, definition, frames, defined.before(definition))
    expected = _by_key(definition, canonical_rows(definition, frame))
    return _verdict(definition, spec.name, tick, expected, found)


def _by_key(definition: View, rows: Iterator[tuple[KeyBytes, bytes]]) -> dict[KeyBytes, bytes]:
    found: dict[KeyBytes, bytes] = {}
    for key, cell in rows:
        if key in found:
            raise ProtocolViolation(
                f'view "{definition.name}": two rows have the key {_shown_key(definition, cell)}:'
                f" {found[key].decode()} and {cell.decode()}",
                remedy="Correct the key that the view declares; if it declares none, report this bug with the view.",
            )
        found[key] = cell
    return found


def _found(definition: View, spec: MaterializationSpec, rows: Iterator[Any]) -> Iterator[tuple[KeyBytes, bytes]]:
    fields = spec.bindings[0].fields
    for key, values in rows:
        row = {field.name: _cell_value(field.type, value) for field, value in zip(fields, (*key, *values), strict=True)}
        cell = encode_json({column.name: row[column.name] for column in definition.columns})
        yield encode_key(key), with_scales(definition, cell)


def _cell_value(type_: str, value: Any) -> Any:
    return msgspec.Raw(value.encode()) if type_ == "json" and value is not None else value


def _verdict(
    definition: View,
    name: str,
    tick: int,
    expected: Mapping[KeyBytes, bytes],
    found: Mapping[KeyBytes, bytes],
) -> Verdict:
    keys = expected.keys() | found.keys()
    differing = sorted(key for key in keys if not same(definition, expected.get(key), found.get(key)))
    examples = tuple(
        _difference(definition, expected.get(key), found.get(key)) for key in differing[:SHOWN_DIFFERENCES]
    )
    return Verdict(name, tick, len(expected), len(differing), examples)


def _difference(definition: View, expected: bytes | None, found: bytes | None) -> Difference:
    return Difference(_shown_key(definition, expected or found or b"{}"), _shown(expected), _shown(found))


def _shown(cell: bytes | None) -> str | None:
    return None if cell is None else cell.decode()


def _shown_key(definition: View, cell: bytes) -> str:
    row = msgspec.json.decode(cell)
    return ", ".join(f"{name} = {row[name]}" for name in definition.key)
