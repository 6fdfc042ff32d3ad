"""Defining: what a project's SQL means over the tables that there are; views may read views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlglot
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from sqlglot import exp
from sqlglot.errors import SqlglotError

from tidegate.errors import FixConfiguration
from tidegate.model.schema import TableSchema
from tidegate.pipeline.project import Project, ViewFile
from tidegate.views.catalyst import Catalyst
from tidegate.views.definition import View, ViewDefinition, define
from tidegate.views.flow import FlowView, NotUnderstood, define_flow
from tidegate.views.query import SourceText

_FIRST_SHAPE_LEVEL = 1


@dataclass(frozen=True)
class Defined:
    """The tables, the views in an order in which each stands behind those that it reads, and Spark's analyzer."""

    tables: tuple[TableSchema, ...]
    views: tuple[View, ...]
    catalyst: Catalyst | None = field(default=None, compare=False)

    @property
    def by_name(self) -> dict[str, TableSchema]:
        return {table.name: table for table in self.tables}

    def before(self, view: View) -> tuple[View, ...]:
        """The views that it may read."""
        return self.views[: self.views.index(view)]

    @property
    def first_shape(self) -> list[ViewDefinition]:
        return [view for view in self.views if isinstance(view, ViewDefinition)]

    @property
    def flows(self) -> list[FlowView]:
        return [view for view in self.views if isinstance(view, FlowView)]


def define_all(project: Project, tables: Sequence[TableSchema], spark: SparkSession) -> Defined:
    """Checks every view; refuses what cannot be kept."""
    _require_own_names(project.views, tables)
    defining = _Defining({table.name: table for table in tables}, spark)
    for view in in_order(project.views):
        defining.add(view)
    return Defined(tuple(tables), tuple(defining.views), defining.catalyst)


def _require_own_names(views: Sequence[ViewFile], tables: Sequence[TableSchema]) -> None:
    """Tables and views share their names' folders and rows of the catalog, and some disks know no upper case."""
    taken = {table.name.lower(): table.name for table in tables}
    for view in views:
        if view.name.lower() in taken:
            raise FixConfiguration(
                f'{view.path}: there is a table "{taken[view.name.lower()]}" already',
                remedy="Save it under another name: a view is called as its file is.",
            )


def in_order(views: Sequence[ViewFile]) -> list[ViewFile]:
    """Views behind the views that they read."""
    left = {view.name.lower(): view for view in views}
    ordered: list[ViewFile] = []
    while left:
        ready = [name for name, view in left.items() if not (_names_in(view.sql) & left.keys()) - {name}]
        if not ready:
            names = ", ".join(sorted(view.name for view in left.values()))
            raise FixConfiguration(
                f"the views {names} read one another in a circle", remedy="Leave one of these references out."
            )
        ordered += [left.pop(name) for name in ready]
    return ordered


def _names_in(sql: str) -> set[str]:
    """What the text may mean by a table's name."""
    try:
        trees = sqlglot.parse(sql, read="spark")
    except SqlglotError:
        return set()
    return {one.name.lower() for tree in trees if tree is not None for one in tree.find_all(exp.Table)}


class _Defining:
    """Defines one view after another."""

    def __init__(self, tables: Mapping[str, TableSchema], spark: SparkSession) -> None:
        self._tables, self._spark = tables, spark
        self._levels = dict.fromkeys(tables, 0)
        self._keys = {name: table.key for name, table in tables.items()}
        self.views: list[View] = []
        self.catalyst: Catalyst | None = None

    def add(self, file: ViewFile) -> None:
        view, level = self._define(file)
        self.views.append(view)
        self._levels[view.name], self._keys[view.name] = level, view.key
        if self.catalyst is not None:
            self.catalyst.register(view.name, _schema(view))

    def _define(self, file: ViewFile) -> tuple[View, int]:
        """As a view of the first shape, which folds whole documents in one stage, if it is one; else as a flow."""
        try:
            return define(file.name, file.sql, file.path, self._tables, self._spark), _FIRST_SHAPE_LEVEL
        except FixConfiguration as refusal:
            text = SourceText(file.name, file.sql, file.path)
            try:
                flow = define_flow(text, self._analyzer(), self._levels, self._keys)
            except NotUnderstood:
                if any(word in refusal.message for word in ("there is no", "syntax error", "is ambiguous")):
                    raise refusal from None  # it knows the nearest name
                raise
            self._require_transactions(text, flow)
            return flow, flow.level

    def _require_transactions(self, text: SourceText, flow: FlowView) -> None:
        """What a view gives a tick at a time cannot be taken apart into transactions again."""
        plain = {view.name for view in self.views if not view.transactionally}
        for name in (name for name in flow.reads if flow.transactionally and name in plain):
            text.refuse(
                f'TRANSACTIONALLY, but the view "{name}" that it reads is not',
                f"Write SELECT TRANSACTIONALLY in {name} as well, or a plain SELECT here.",
            )

    def _analyzer(self) -> Catalyst:
        if self.catalyst is None:
            schemas = {name: StructType.fromDDL(table.ddl) for name, table in self._tables.items()}
            self.catalyst = Catalyst(self._spark, {name: _as_struct(schema) for name, schema in schemas.items()})
            for view in self.views:
                self.catalyst.register(view.name, _schema(view))
        return self.catalyst


def _as_struct(schema: object) -> StructType:
    assert isinstance(schema, StructType)
    return schema


def _schema(view: View) -> StructType:
    columns = (f"`{one.name}` {one.ddl}{'' if one.nullable else ' NOT NULL'}" for one in view.columns)
    return _as_struct(StructType.fromDDL(", ".join(columns)))
