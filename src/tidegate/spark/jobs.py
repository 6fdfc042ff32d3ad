"""Jobs of Spark's that may be repeated at will: our own errors end one, a lost worker or executor does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext

from tidegate.errors import DefinitelyNotDone
from tidegate.spark.failures import carried

ATTEMPTS = 3


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
        for attempt in range(1, ATTEMPTS + 1):
            try:
                rdd = self.context.parallelize(loads, len(loads)).mapPartitions(first)
                for step in shuffled:
                    rdd = rdd.partitionBy(self.partitions, _identity).mapPartitions(step)
                return rdd.collect()
            except Exception as failure:  # py4j's own errors: Spark says nothing more exact
                error = carried(failure)
                if error is not None:
                    raise error from None
                if attempt == ATTEMPTS:
                    raise _failed(failure) from failure
        raise AssertionError("unreachable")


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
