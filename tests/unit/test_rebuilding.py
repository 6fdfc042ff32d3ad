"""Lost arrangements are filled from history: as the tables were at the tick, however the files are cut."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark import SparkContext

from tidegate.catalog.contract import HistoryFile
from tidegate.collections import history
from tidegate.collections.history import Update
from tidegate.errors import FixConfiguration
from tidegate.model.cell import Cell, encode_cell, key_of
from tidegate.model.key import key_hash
from tidegate.model.schema import Column as TableColumn
from tidegate.model.schema import TableSchema, parse_type
from tidegate.pipeline import rebuilding, tasks
from tidegate.pipeline.rebuilding import rebuild
from tidegate.pipeline.work import Derivation, Layout, Rebuild, Sealed, ViewWork, Written
from tidegate.spark.failures import TaskError, carried
from tidegate.spark.jobs import Jobs
from tidegate.views.arrangement import Arrangement
from tidegate.views.expressions import Aggregate, Column, ValueType
from tidegate.views.kernel import compiled
from tidegate.views.plan import Output, PlanInput, ViewPlan

TICKS = 12
PARTITIONS = 3


def _table(name: str, *columns: str) -> TableSchema:
    return TableSchema(name, name, ("id",), tuple(TableColumn(one, parse_type("bigint")) for one in columns))


ORDERS, LINES = _table("orders", "id", "customer"), _table("lines", "id", "order_id", "quantity")
BIGINT = ValueType("bigint")
PLAN = ViewPlan(
    "documents",
    (PlanInput(ORDERS, "o", "from", ("id",)), PlanInput(LINES, "l", "left", ("order_id",))),
    (Column(0, "id", BIGINT), Column(0, "customer", BIGINT)),
    (Column(0, "id", BIGINT),),
    (
        Output("id", Column(0, "id", BIGINT)),
        Output("customer", Column(0, "customer", BIGINT)),
        Output("lines", Aggregate("collect", Column(1, "quantity", BIGINT), (), ValueType("array", element=BIGINT))),
    ),
)


@dataclass(frozen=True)
class JobsHere(Jobs):
    """Runs everything in this process; what is shuffled arrives in any order; the last step may fail at first."""

    context: SparkContext = field(default=cast(SparkContext, None))
    failures: list[str] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def parallelism(self) -> int:
        return 2

    def run(self, loads: Sequence[Any], first: Callable[..., Any], *shuffled: Callable[..., Any]) -> list[Any]:
        try:
            found = [one for load in loads for one in first(iter([load]))]
            for step in shuffled:
                self.chance.shuffle(found)
                found = [one for place in range(self.partitions) for one in step(self._arriving(found, place))]
        except TaskError as failure:
            raise carried(failure) or failure from None
        if shuffled and self.failures:
            self.failures.pop()
            return self.run(loads, first, *shuffled)
        return found

    @staticmethod
    def _arriving(found: Sequence[Any], place: int) -> Iterator[Any]:
        return (one for one in found if one[0] == place)


class Trade:
    """Orders and lines that come, change and go; each tick written by another number of partitions, some merged."""

    def __init__(self, state: Path, seed: int) -> None:
        self.chance, self.state = random.Random(seed), state
        self.rows: dict[str, dict[bytes, Cell]] = {"orders": {}, "lines": {}}
        self.files: list[HistoryFile] = []
        for tick in range(TICKS):
            for table in (ORDERS, LINES):
                self._write(table.name, tick, self._changed(table))
        for name in self.rows:
            self._merge(name, {1, 2, 3, 7})  # 4 to 6 lie between, as large ticks do
        self.chance.shuffle(self.files)

    def _changed(self, table: TableSchema) -> list[Update]:
        rows, found = self.rows[table.name], []
        for position in range(20):
            cell = encode_cell(table.columns, [self.chance.randrange(9) for _ in table.columns])
            key = key_of(table, cell)
            old, new = rows.pop(key, None), cell if self.chance.random() < 0.8 else None
            if new is not None:
                rows[key] = new
            if old != new:
                found += [Update(key, position, diff, one) for diff, one in ((-1, old), (1, new)) if one is not None]
        return found

    def _write(self, name: str, tick: int, updates: Sequence[Update]) -> None:
        partitions = self.chance.randint(1, 3)
        for partition in range(partitions):
            path = history.tick_file(self.state, name, tick, str(partitions), partition)
            mine = [one for one in updates if key_hash(one.key) % partitions == partition]
            history.write(path, history.as_table(mine, tick))
            self.files.append(HistoryFile(name, str(path), tick, tick, len(mine), path.stat().st_size))

    def _merge(self, name: str, ticks: set[int]) -> None:
        chosen = [one for one in self.files if one.collection == name and one.first in ticks]
        merged = str(history.folder_of(self.state, name) / "merged.parquet")
        ((_, rows, size_bytes),) = tasks.merge([(merged, tuple(one.path for one in chosen))])
        self.files = [one for one in self.files if one not in chosen]
        self.files.append(HistoryFile(name, merged, min(ticks), max(ticks), rows, size_bytes, 1))

    @property
    def work(self) -> Derivation:
        sealed = Sealed(TICKS - 1, (), 0)
        return Derivation(Layout(self.state, PARTITIONS), sealed, (ORDERS, LINES), (ViewWork("documents", PLAN),))

    def parts(self, *, emit: bool = False) -> list[Rebuild]:
        names = [(name, emit and name == "documents") for name in ("orders", "lines", "documents")]
        return [Rebuild(name, place, TICKS - 1, new) for name, new in names for place in range(PARTITIONS)]

    def rebuild(self, jobs: Jobs | None = None, *, emit: bool = False) -> list[Written]:
        return rebuild(jobs or JobsHere(partitions=PARTITIONS), self.work, self.parts(emit=emit), self.files)

    def arrangement(self, name: str, partition: int) -> Arrangement:
        layout = tasks.view_layout(self.work, name) if name == "documents" else self.work.layout.name
        return Arrangement.open(self.work.layout.arrangement(name, partition), layout)

    def entries(self, name: str) -> dict[bytes, bytes]:
        """What lies in the arrangements of a collection; each entry in the partition of its key."""
        found: dict[bytes, bytes] = {}
        for partition in range(PARTITIONS):
            arrangement = self.arrangement(name, partition)
            assert arrangement.applied == TICKS - 1
            with pytest.raises(Looked), arrangement.write(TICKS) as transaction:
                found |= transaction.scan(b"")
                raise Looked
        return found

    def folded(self, folder: Path) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """The entries and the documents of the view, folded at once from the tables' last rows."""
        arrangement, view = Arrangement.open(folder, "any"), compiled(PLAN)
        changes = [
            change
            for name, rows in self.rows.items()
            for used in view.inputs_of(name)
            for key, cell in rows.items()
            for change in used.route(key, None, cell)
        ]
        with arrangement.write(0) as transaction:
            outputs = view.fold(arrangement, 0, changes)
            return dict(transaction.scan(b"")), {key: new for key, _, new in outputs if new is not None}


class Looked(Exception):
    """Ends a write that was begun to look only."""


def names_of(written: Sequence[Written]) -> list[tuple[str, int]]:
    return sorted((one.collection, one.partition) for one in written)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_what_was_lost_is_filled_as_of_the_tick_whatever_files_a_keys_updates_lie_in(
    tmp_path: Path, seed: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BATCH_BYTES", piece_bytes)
    monkeypatch.setattr(rebuilding, "_BLOB_BYTES", piece_bytes)
    trade = Trade(tmp_path / "state", seed)
    written = trade.rebuild()
    assert names_of(written) == sorted((one.collection, one.partition) for one in trade.parts())
    assert {one.path for one in written} == {None}
    assert trade.entries("orders") == trade.rows["orders"]
    assert trade.entries("lines") == trade.rows["lines"]
    assert trade.entries("documents") == trade.folded(tmp_path / "expected")[0]
    assert trade.rebuild() == []


def test_each_file_is_read_once_and_none_for_what_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trade, read = Trade(tmp_path, 1), Counter[str]()
    batches = history.batches

    def counted(path: str, after: int, upto: int) -> Iterator[pa.Table]:
        read[path] += 1
        return batches(path, after, upto)

    monkeypatch.setattr(history, "batches", counted)
    trade.rebuild()
    assert read == {file.path: 1 for file in trade.files}
    read.clear()
    trade.rebuild()
    assert not read
    trade.arrangement("lines", 1).reset()
    assert names_of(trade.rebuild()) == [("lines", 1)]
    assert read == {file.path: 1 for file in trade.files if file.collection == "lines"}
    assert trade.entries("lines") == trade.rows["lines"]


def test_what_an_attempt_has_filled_before_it_failed_is_told_by_the_next_one(tmp_path: Path) -> None:
    trade = Trade(tmp_path, 2)
    written = trade.rebuild(JobsHere(partitions=PARTITIONS, failures=["a worker is lost"]), emit=True)
    assert names_of(written) == sorted((one.collection, one.partition) for one in trade.parts())


def test_what_a_new_view_puts_out_becomes_its_history_and_nothing_else_does(tmp_path: Path) -> None:
    trade = Trade(tmp_path / "state", 1)
    left = [
        history.tick_file(trade.state, "documents", TICKS - 1, trade.work.layout.name, partition)
        for partition in range(PARTITIONS)
    ]
    for path in left:  # by a run that was cut off before it listed them
        history.write(path, history.as_table([Update(b"old", 0, 1, b"{}")], TICKS - 1))
    found = [one.path for one in trade.rebuild(emit=True) if one.path]
    sums = history.RowSums()
    sums.add_updates(history.read(found, -1, TICKS))
    assert sums.current("documents") == trade.folded(tmp_path / "expected")[1]
    assert sorted(found) == sorted(str(path) for path in left if path.exists())


def test_a_history_that_lacks_a_file_is_refused_by_name(tmp_path: Path) -> None:
    trade = Trade(tmp_path, 1)
    merged = next(one for one in trade.files if one.merges and one.collection == "lines")
    trade.files.remove(merged)
    with pytest.raises(FixConfiguration, match='history of "lines" contradicts itself'):
        trade.rebuild()
