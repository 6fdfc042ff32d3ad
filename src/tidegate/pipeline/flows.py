"""Flows: drives the dataflows of a run, tick by tick: which tasks follow one another, and where Spark evaluates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.pipeline import flow_tasks
from tidegate.pipeline.flow_tasks import stage_name
from tidegate.pipeline.tasks import fold_level
from tidegate.pipeline.work import Derivation, FlowWork, Layout, Sealed, Written
from tidegate.spark.jobs import Jobs, balanced
from tidegate.views.catalyst import Catalyst
from tidegate.views.evaluation import Evaluated, Pass
from tidegate.views.flow import FlowView

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

_ANY = -1  # the level of whatever is no stage: tables, and views of any level
_KERNEL = 1  # another number empties every stage: raise it when stages are laid out anew


class Flows:
    """The dataflows of a project, as steps behind the tables' own."""

    def __init__(self, spark: SparkSession, catalyst: Catalyst, layout: Layout, views: Sequence[FlowView]) -> None:
        self._layout, self._partitions = layout, layout.partitions
        self.views = tuple(views)
        layouts = tuple(map(layout_of, views))
        self._blank = FlowWork(layout, Sealed(-1, (), 0), tuple(view.flow for view in views), layouts)
        self.levels = max((stage.level for view in views for stage in view.flow.stages), default=0)
        self._passes = _passes(spark, catalyst, self._blank, views)

    def work(self, sealed: Sealed, filling: Sequence[str] = (), emitting: bool = True) -> FlowWork:
        return replace(self._blank, sealed=sealed, filling=tuple(filling), emitting=emitting)

    def chain(self, work: Derivation, pairs: RDD[Any], begun_at: int = 0) -> RDD[Any]:
        """All levels behind what the tables send, or, in a refill, tables and views of any level."""
        assert work.flows is not None
        asked = list(flow_tasks.always(work.flows))
        if asked:
            pairs = pairs.union(pairs.context.parallelize(asked, 1))
        for level in range(1, self.levels + 1):
            pairs = self._evaluated(work.flows, begun_at if level == 1 else level - 1, pairs)
            pairs = pairs.partitionBy(self._partitions, _same).mapPartitions(partial(fold_level, work, level))
        return pairs

    def _evaluated(self, work: FlowWork, level: int, pairs: RDD[Any]) -> RDD[Any]:
        if level not in self._passes:
            return pairs
        made = self._passes[level].run(pairs.mapPartitions(flow_tasks.carried))
        return made.mapPartitions(partial(flow_tasks.made, work))

    # --- state that is not where it should be

    def stages(self) -> list[tuple[str, int]]:
        """Each stage's name, and its flow's place."""
        return [
            (stage_name(view.flow.name, stage.number), place)
            for place, view in enumerate(self.views)
            for stage in view.flow.stages
        ]

    @property
    def digest(self) -> str:
        """Names the flows as they work together: what a stage has sent is of use to the same ones only."""
        return hashlib.sha256(repr([(view.name, layout_of(view)) for view in self.views]).encode()).hexdigest()

    def reset(self, jobs: Jobs) -> None:
        """Empties all stages."""
        self._applied(jobs, self.work(self._blank.sealed, [view.name for view in self.views]), self.stages())

    def lost(self, jobs: Jobs, expected: Callable[[str, int], int], upto: int) -> list[str]:
        """The views of which a stage's partition has not applied what is expected of it, producers first."""
        found = self._applied(jobs, self._blank, self.stages())
        lost = {
            name.rpartition("#")[0]
            for name, partition, applied in found
            if not expected(name, partition) <= applied <= upto
        }
        return [view.name for view in self.views if view.name in lost]

    def _applied(self, jobs: Jobs, work: FlowWork, stages: Sequence[tuple[str, int]]) -> list[tuple[str, int, int]]:
        parts = [(name, flow, number) for name, flow in stages for number in range(self._partitions)]
        return jobs.run(balanced(parts, [1] * len(parts), jobs.parallelism), partial(flow_tasks.applied, work))

    def refill(
        self, jobs: Jobs, view: str, derived: int, files: Callable[[str], tuple[str, ...] | None], emitting: bool
    ) -> list[Written]:
        """Empties a view's stages and fills them with the rows that its tables and views have at a tick."""
        place = next(place for place, one in enumerate(self.views) if one.name == view)
        work = self.work(Sealed(derived, (), 0), [view], emitting)
        self._applied(jobs, work, [(name, flow) for name, flow in self.stages() if flow == place])
        parts = [
            flow_tasks.Source(source, number, files(source))
            for source in self.views[place].flow.sources
            for number in range(self._partitions)
        ]
        loads = balanced(parts, [1] * len(parts), jobs.parallelism)
        derivation = Derivation(self._layout, work.sealed, (), (), work)
        found = jobs.run_through(
            loads, [partial(flow_tasks.refill, work)], partial(self.chain, derivation, begun_at=_ANY)
        )
        return [written for _, written in found]


def _same(partition: int) -> int:
    return partition


def layout_of(view: FlowView) -> str:
    """Names the meaning of a flow's stored bytes."""
    return hashlib.sha256(repr((_KERNEL, view.sql, view.flow)).encode()).hexdigest()


def _passes(spark: SparkSession, catalyst: Catalyst, work: FlowWork, views: Sequence[FlowView]) -> Mapping[int, Pass]:
    """By the level of the producers, what Spark evaluates behind it."""
    levels: dict[int, list[Evaluated]] = {}
    number = 0
    for view in views:
        for edge in view.flow.edges:
            for step, computed in view.evaluated(edge):
                levels.setdefault(view.level_of(edge.producer), []).append(Evaluated(number, step, computed))
                if not edge.producer.startswith("#"):
                    levels.setdefault(_ANY, []).append(Evaluated(number, step, computed))
            number += 1
    assert number == sum(len(flow.edges) for flow in work.flows)
    return {level: Pass(spark, catalyst, parts) for level, parts in levels.items()}
