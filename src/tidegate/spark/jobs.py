"""Jobs of Spark's that may be repeated at will: our own errors end one, a lost worker or executor does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import SparkContext

from tidegate.errors import DefinitelyNotDone
from tidegate.spark.failures import carried, of_data

if TYPE_CHECKING:
    from pyspark import RDD

ATTEMPTS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Jobs:
    """Runs tasks over loads; what is shuffled goes to one of so many partitions."""

    context: SparkContext
    partitions: int = 1

    @property
    def parallelism(self) -> int:
        return self.context.defaultParallelism

    def run(self, loads: Sequence[Any], first: Callable[..., Any], *shuffled: Callable[..., Any]) -> list[Any]:
        """What `first` gives over the loads, and each further step over the pairs (partition, content) before it."""
        return self.run_through(loads, (first, *shuffled), lambda rdd: rdd)

    def run_through(
        self, loads: Sequence[Any], steps: Sequence[Callable[..., Any]], rest: Callable[[RDD[Any]], RDD[Any]]
    ) -> list[Any]:
        """The same, and then through what `rest` builds."""
        first, *shuffled = steps
        for attempt in range(1, ATTEMPTS + 1):
            try:
                rdd = self.context.parallelize(loads, len(loads)).mapPartitions(first)
                for step in shuffled:
                    rdd = rdd.partitionBy(self.partitions, _identity).mapPartitions(step)
                return rest(rdd).collect()
            except Exception as failure:  # py4j's own errors: Spark says nothing more exact
                error = carried(failure) or of_data(failure)
                if error is not None:
                    raise error from None
                if attempt == ATTEMPTS:
                    raise _failed(failure) from failure
        raise AssertionError("unreachable")


def balanced(items: Sequence[T], weights: Sequence[int], most: int) -> list[list[T]]:
    """The items in at most `most` loads of about the same weight."""
    loads: list[list[T]] = [[] for _ in range(min(most, len(items)))]
    totals = [0] * len(loads)
    for place in sorted(range(len(items)), key=lambda one: -weights[one]):
        lightest = totals.index(min(totals))
        loads[lightest].append(items[place])
        totals[lightest] += weights[place]
    return loads


def _identity(partition: int) -> int:
    return partition


def _failed(failure: Exception) -> DefinitelyNotDone:
    return DefinitelyNotDone(
        f"a Spark job failed {ATTEMPTS} times: {_first_line(failure)}",
        remedy="Look at Spark's log for the cause; then run again. Nothing is lost.",
    )


def _first_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return next((line for line in lines if "Error" in line or "Exception" in line), lines[0] if lines else "")[:300]
