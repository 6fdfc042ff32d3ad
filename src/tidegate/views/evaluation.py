"""Evaluation: Spark computes what edges need, all of a boundary's in one pass over blobs of rows, in the JVM.

A pass is built once. For each tick only its leaf is exchanged, because to plan it anew would cost more than to run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.views.catalyst import Catalyst, Expr, Node, children, items, kind
from tidegate.views.dataflow import Evaluate
from tidegate.views.planner import Computed

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

CARRIED = (
    "target INT, name STRING, blob BINARY, edge INT, lines STRING"  # a blob that is on its way, or rows of an edge
)
_MADE = pa.schema(
    [
        ("target", pa.int32()),
        ("name", pa.string()),
        ("blob", pa.binary()),
        ("edge", pa.int32()),
        ("head", pa.string()),
        ("row", pa.string()),
        ("made", pa.string()),
    ]
)
_READ = {"mode": "FAILFAST"}
_MOMENT = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
_WRITE = {"ignoreNullFields": "false", "timestampFormat": f"{_MOMENT}'Z'", "timestampNTZFormat": _MOMENT}


@dataclass(frozen=True)
class Evaluated:
    """What Spark computes on one edge: the driver's expressions, and the columns as the rows call them."""

    edge: int
    step: Evaluate
    computed: Computed


class Pass:
    """The expressions of some edges as one projection, ready for each tick's rows."""

    def __init__(self, spark: SparkSession, catalyst: Catalyst, parts: Sequence[Evaluated]) -> None:
        self._spark, self._catalyst = spark, catalyst
        self._jvm = catalyst.jvm
        self._logical = self._jvm.org.apache.spark.sql.catalyst.plans.logical
        template = self._parsed(spark.createDataFrame(spark.sparkContext.emptyRDD(), CARRIED), parts)
        plan = template._jdf.queryExecution().analyzed()
        columns = items(plan.output())
        made = catalyst.alias(self._made(columns[3], columns[6:], parts), "made")
        self._plan = self._logical.Project(catalyst.sequence([*columns[:6], made]), plan)
        self._leaf = _leaf(plan)

    def run(self, rows: RDD[tuple[Any, ...]]) -> RDD[bytes]:
        """Batches of the rows with what is made of them, for `evaluated_batch` to read: `made` is NULL where a
        condition does not hold."""
        from pyspark import RDD
        from pyspark.serializers import NoOpSerializer

        leaf = self._spark.createDataFrame(rows, CARRIED, verifySchema=False)._jdf.queryExecution().analyzed()
        renamed = [
            self._catalyst.alias(new, str(old.name()), like=old)
            for new, old in zip(items(leaf.output()), items(self._leaf.output()), strict=True)
        ]
        fresh = self._logical.Project(self._catalyst.sequence(renamed), leaf)
        plan = _exchanged(self._catalyst, self._plan, fresh)
        frame = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._spark._jsparkSession, plan)
        return RDD(frame.toArrowBatchRdd().toJavaRDD(), self._spark.sparkContext, NoOpSerializer())

    @staticmethod
    def _parsed(frame: DataFrame, parts: Sequence[Evaluated]) -> DataFrame:
        """One column `row`, and for each edge its parsed row."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import StructField, StructType

        lines = frame.select("target", "name", "blob", "edge", f.explode_outer(f.split("lines", "\n")).alias("line"))
        cut = lines.select("target", "name", "blob", "edge", f.split("line", "\t", 2).alias("parts"))
        rows = cut.select(
            "target", "name", "blob", "edge", f.col("parts")[0].alias("head"), f.col("parts")[1].alias("row")
        )
        parsed = []
        for one in parts:
            fields = zip(one.step.inputs, one.computed.attributes, strict=True)
            schema = StructType([StructField(field.name, _type(attribute), True) for field, attribute in fields])
            whole = f.from_json("row", schema, _READ) if schema.fields else f.lit(None).cast("struct<x:int>")
            parsed.append(f.when(f.col("edge") == one.edge, whole).alias(f"r{one.edge}"))
        return rows.select("target", "name", "blob", "edge", "head", "row", *parsed)

    def _made(self, edge: Expr, parsed: Sequence[Expr], parts: Sequence[Evaluated]) -> Expr:
        """For the rows of each edge, what is to be computed of them as JSON."""
        whole = self._nothing()
        for one, row in zip(parts, parsed, strict=True):
            whole = self._catalyst.when(self._catalyst.is_number(edge, one.edge), self._text(one, row), whole)
        return whole

    def _nothing(self) -> Expr:
        return self._catalyst.null(self._jvm.org.apache.spark.sql.types.DataTypes.StringType)

    def _text(self, one: Evaluated, row: Expr) -> Expr:
        places = {id_of(attribute): place for place, attribute in enumerate(one.computed.attributes)}
        names = [field.name for field in one.step.inputs]

        def instead(part: Expr) -> Expr | None:
            if kind(part) != "AttributeReference":
                return None
            place = places[id_of(part)]
            return self._catalyst.field(row, place, names[place])

        values = [self._catalyst.replaced(value, instead) for _, value in one.computed.columns]
        text = self._catalyst.to_json([field.name for field in one.step.outputs], values, _WRITE)
        if not one.computed.conditions:
            return text
        conditions = [self._catalyst.replaced(condition, instead) for condition in one.computed.conditions]
        return self._catalyst.when(self._catalyst.conjunction(conditions), text, self._nothing())


def evaluated_batch(batch: bytes) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(batch), _MADE)


def id_of(attribute: Expr) -> int:
    return int(attribute.exprId().id())


def _type(attribute: Expr) -> Any:
    from tidegate.views.catalyst import python_type

    return python_type(attribute.dataType())


def _leaf(plan: Node) -> Node:
    while below := children(plan):
        (plan,) = below
    return plan


def _exchanged(catalyst: Catalyst, plan: Node, leaf: Node) -> Node:
    below = children(plan)
    if not below:
        return leaf
    return plan.withNewChildren(catalyst.sequence([_exchanged(catalyst, below[0], leaf)]))
