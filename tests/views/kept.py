"""Views kept by dataflows over tables that a test changes, and Spark's own answer to compare with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial, reduce
from pathlib import Path
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from tidegate.collections import history
from tidegate.model.cell import encode_json
from tidegate.model.key import encode_key
from tidegate.pipeline import flow_tasks
from tidegate.pipeline.flows import Flows
from tidegate.pipeline.work import Derivation, FlowWork, Layout, Sealed, Written
from tidegate.spark.jobs import Jobs
from tidegate.views.catalyst import Catalyst
from tidegate.views.flow import FlowView, define_flow
from tidegate.views.query import SourceText

Row = Mapping[str, Any]
Tables = Mapping[str, Mapping[bytes, Row]]
Change = tuple[str, Row | None, Row | None]  # table, old row, new row


def fed(work: FlowWork, loads: Iterable[Sequence[tuple[str, list[history.Update]]]]) -> Iterator[Any]:
    """What the tables send in a tick."""
    for place, tables in enumerate(loads):
        if place == 0:
            yield from flow_tasks.always(work)
        for table, updates in tables:
            yield from flow_tasks.produced(work, table, updates)


@dataclass
class Kept:
    """A project's views, stepped by hand."""

    spark: SparkSession
    state: Path
    tables: Mapping[str, str]
    keys: Mapping[str, tuple[str, ...]]
    sql: Mapping[str, str]
    partitions: int = 2
    tick: int = 0
    position: int = 0
    rows: dict[str, dict[bytes, Row]] = field(default_factory=dict)
    views: dict[str, FlowView] = field(default_factory=dict)
    states: dict[int, Tables] = field(default_factory=dict)  # the tables after each transaction of the last tick

    def __post_init__(self) -> None:
        schemas = {name: schema_of(ddl) for name, ddl in self.tables.items()}
        catalyst = Catalyst(self.spark, schemas)
        levels = dict.fromkeys(self.tables, 0)
        for name, sql in self.sql.items():
            self.views[name] = define_flow(SourceText(name, sql, None), catalyst, levels, self.keys)
        self.flows = Flows(self.spark, catalyst, Layout(self.state, self.partitions), list(self.views.values()))
        self.rows = {name: {} for name in self.tables}

    def commit(self, *transactions: Sequence[Change]) -> None:
        """One tick of so many transactions."""
        updates: dict[str, list[history.Update]] = {}
        self.states = {}
        for changes in transactions:
            for table, old, new in changes:
                updates.setdefault(table, []).extend(self._updates(table, old, new))
            self.states[self.position] = {name: dict(rows) for name, rows in self.rows.items()}
            self.position += 1
        self.tick += 1
        sealed = Sealed(self.tick, (), self.position - 1)
        work = self.flows.work(sealed)
        jobs = Jobs(self.spark.sparkContext, self.partitions)
        loads = [list(updates.items())]
        chain = partial(self.flows.chain, Derivation(work.layout, sealed, (), (), work))
        found = jobs.run_through(loads, [partial(fed, work)], chain)
        assert all(isinstance(one, Written) for _, one in found), found

    def _updates(self, table: str, old: Row | None, new: Row | None) -> Iterator[history.Update]:
        for row, diff in ((old, -1), (new, 1)):
            if row is not None:
                key = encode_key([row[name] for name in self.keys[table]])
                if diff > 0:
                    self.rows[table][key] = row
                else:
                    assert self.rows[table].pop(key) == row
                yield history.Update(key, self.position, diff, encode_json(dict(row)))

    def found(self, view: str, position: int | None = None) -> list[str]:
        """The view's rows by its history, now or after a transaction."""
        paths = [str(path) for path in sorted(history.folder_of(self.state, view).glob("*.parquet"))]
        rows: Counter[bytes] = Counter()
        for _, update in history.updates(history.read(paths, -1, self.tick)):
            if position is None or update.position <= position:
                rows[update.cell] += update.diff
        assert not rows or set(rows.values()) <= {0, 1}, rows
        return sorted(comparable(json.loads(cell, parse_float=Decimal)) for cell, copies in rows.items() if copies)

    def expected(self, tables: Tables) -> dict[str, list[str]]:
        """What Spark says of each view over such tables."""
        self._show(tables)
        texts = [
            self.spark.sql(view.query).select(
                f.lit(name).alias("view"), f.to_json(f.struct("*"), {"ignoreNullFields": "false"}).alias("text")
            )
            for name, view in self.views.items()
        ]
        rows: dict[str, list[str]] = {name: [] for name in self.views}
        for row in reduce(DataFrame.unionAll, texts).collect():
            rows[row.view].append(comparable(json.loads(row.text, parse_float=Decimal)))
        return {name: sorted(found) for name, found in rows.items()}

    def _show(self, tables: Tables) -> None:
        """Tables for Spark to query."""
        for name, ddl in self.tables.items():
            lines = [(encode_json(dict(row)).decode(),) for row in tables[name].values()]
            row = f.from_json("line", schema_of(ddl), {"mode": "FAILFAST"})
            frame = self.spark.createDataFrame(lines, "line string").select(row.alias("row")).select("row.*")
            frame.createOrReplaceTempView(f"`{name}`")

    def assert_as_spark_says(self) -> None:
        for name, rows in self.expected(self.rows).items():
            assert self.found(name) == rows, f"view {name} after tick {self.tick}"

    def assert_as_spark_says_after_each_transaction(self) -> None:
        """Of the last tick."""
        for position, tables in self.states.items():
            for name, rows in self.expected(tables).items():
                assert self.found(name, position) == rows, f"view {name} after transaction {position}"


def schema_of(ddl: str) -> StructType:
    return cast(StructType, StructType.fromDDL(ddl))


def comparable(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Arrays without order, numbers and moments by value."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return sorted((_plain(inner) for inner in value), key=lambda one: json.dumps(one, sort_keys=True))
    if isinstance(value, (Decimal, float, int)) and not isinstance(value, bool):
        return repr(float(value)) if abs(Decimal(value)) > 10**15 else str(Decimal(value).normalize() + 0)
    if isinstance(value, str) and value[10:11] == "T" and value[4:5] == "-":
        return value.rstrip("Z").partition(".")[0] + "." + value.rstrip("Z").partition(".")[2].rstrip("0")
    return value
