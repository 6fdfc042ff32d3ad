"""The project: tidegate.yaml and views/*.sql, read and checked; every mistake names its line and its remedy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.destinations.contract import read_config
from tidegate.destinations.registry import destination
from tidegate.errors import FixConfiguration
from tidegate.model.schema import Column, DecimalForm, TableSchema, TimestampUnit, parse_type

FILE = "tidegate.yaml"
_ENV = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_QUOTE = "Write it in quotes: YAML reads words such as no and on, and numbers, as something else than text."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SparkSettings(_Section):
    master: str = "local[*]"
    conf: dict[str, str] = {}


class FilesSource(_Section):
    """Recorded events: JSON lines {"topic", "partition"?, "key", "value"}, plain or gzip."""

    kind: Literal["files"]
    topic_prefix: str
    path: str
    partitions: int = Field(default=1, ge=1, le=1024)


class PostgresSource(_Section):
    """A Postgres server, followed by an embedded Debezium engine."""

    kind: Literal["postgres"]
    topic_prefix: str = "tidegate"
    dsn: str
    tables: list[str] = Field(min_length=1)
    partitions: int = Field(default=1, ge=1, le=1024)
    slot: str | None = None
    publication: str | None = None


Source = Annotated[FilesSource | PostgresSource, Field(discriminator="kind")]
_KINDS: dict[str, type[_Section]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in (FilesSource, PostgresSource)
}


class TableSettings(_Section):
    """A table whose types the stream does not carry, or whose values need a word of explanation."""

    topic: str | None = None
    key: list[str] | None = Field(default=None, min_length=1)
    columns: dict[str, str] | None = Field(default=None, min_length=1)
    decimals: DecimalForm = "auto"
    timestamps: TimestampUnit = "auto"


class MaterializationSettings(BaseModel):
    """A view kept up to date in a destination; what is not named here belongs to the destination."""

    model_config = ConfigDict(extra="allow", frozen=True)

    view: str
    to: str
    name: str | None = None

    @property
    def known_as(self) -> str:
        return self.name or f"{self.view}-{self.to}"

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TickSettings(_Section):
    every_ms: int = Field(default=100, ge=0, le=3_600_000)
    max_events: int = Field(default=200_000, ge=1)


class ProjectFile(_Section):
    """tidegate.yaml."""

    name: str
    state: str = ".tidegate"
    spark: SparkSettings = SparkSettings()
    source: Source
    tables: dict[str, TableSettings] = {}
    materializations: list[MaterializationSettings] = []
    tick: TickSettings = TickSettings()


@dataclass(frozen=True)
class ViewFile:
    name: str
    path: Path
    sql: str


@dataclass(frozen=True)
class Project:
    """Everything a user has written down, with `${NAME}` replaced from the environment."""

    folder: Path
    file: ProjectFile
    views: tuple[ViewFile, ...]

    @property
    def state(self) -> Path:
        return (self.folder / self.file.state).absolute()

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables as SQL names them, as far as the project file tells."""
        source = self.file.source
        if isinstance(source, PostgresSource):
            return tuple(table.rpartition(".")[2] for table in source.tables)
        return tuple(self.file.tables)


def load(folder: Path) -> Project:
    """Reads the project in a folder; refuses what it does not understand."""
    path = folder / FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FixConfiguration(
            f"{path} cannot be read: {error.strerror}",
            remedy="Go to your project's folder, name it with --project, or start one with `tidegate init`.",
        ) from None
    tree, node = _parse(path, _text(path, raw))
    _check_keys(path, node)
    _Environment(path, node).check(tree)
    project = Project(folder, _validated(path, _resolved(tree), node), _views(folder))
    _check_names(path, project, node)
    return project


def _parse(path: Path, text: str) -> tuple[Any, yaml.Node | None]:
    try:
        return yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise FixConfiguration(
            f"{path}{line}: not YAML: {getattr(error, 'problem', error)}", remedy="Correct the line."
        ) from None


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise FixConfiguration(
            f"{path}:{line}: the byte {raw[error.start]:#04x} is not UTF-8", remedy="Save the file as UTF-8."
        ) from None


def _check_keys(path: Path, node: yaml.Node | None) -> None:
    """Refuses a setting that is given twice: YAML would take the last and forget the others."""
    seen: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if key.value in seen:
            raise FixConfiguration(
                f'{path}:{line}: "{key.value}" is given twice, first in line {seen[key.value]}',
                remedy="Remove one, or put what both hold under one.",
            )
        seen[str(key.value)] = line
        _check_keys(path, value)
    for item in node.value if isinstance(node, yaml.SequenceNode) else ():
        _check_keys(path, item)


def _line(node: yaml.Node | None, location: tuple[Any, ...]) -> int:
    """The line on which a setting stands (or the closest thing around it)."""
    line = node.start_mark.line + 1 if node else 1
    for step in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(step)), None)
            if found is None:
                continue  # a step of the model's, such as the chosen kind of source
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line + 1
    return line


@dataclass(frozen=True)
class _Environment:
    path: Path
    node: yaml.Node | None

    def check(self, tree: Any, location: tuple[Any, ...] = ()) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                self.check(value, (*location, key))
        elif isinstance(tree, list):
            for place, value in enumerate(tree):
                self.check(value, (*location, place))
        elif isinstance(tree, str):
            for name in _ENV.findall(tree):
                if name not in os.environ:
                    raise FixConfiguration(
                        f"{self.path}:{_line(self.node, location)}: the environment has no {name}",
                        remedy=f"Set it: export {name}=…",
                    )


def _resolved(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _resolved(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_resolved(value) for value in tree]
    return _ENV.sub(lambda match: os.environ[match.group(1)], tree) if isinstance(tree, str) else tree


_SAID = {
    "string_type": "has to be text",
    "int_type": "has to be a whole number",
    "int_parsing": "has to be a whole number",
    "int_from_float": "has to be a whole number",
    "literal_error": "has to be one of {expected}",
    "list_type": "has to be a list",
    "dict_type": "has to be a section: settings by name",
    "model_type": "has to be a section: settings by name",
    "model_attributes_type": "has to be a section: settings by name",
    "too_short": "has to have at least one entry",
    "greater_than_equal": "has to be {ge} or more",
    "less_than_equal": "has to be {le} or less",
}


def _validated(path: Path, tree: Any, node: yaml.Node | None) -> ProjectFile:
    try:
        return ProjectFile.model_validate(tree if tree is not None else {})
    except ValidationError as error:
        mistake = error.errors(include_input=False, include_url=False)[0]
    kind, location, told = mistake["type"], mistake["loc"], mistake.get("ctx", {})
    if kind.startswith("union_tag"):
        _refuse_kind(f"{path}:{_line(node, ('source', 'kind'))}", told.get("tag"))
    steps = location[:1] + location[2:] if location[:1] == ("source",) else location  # without the chosen kind
    setting = ".".join(map(str, steps)) or FILE
    place = f"{path}:{_line(node, location)}"
    if kind == "extra_forbidden":
        raise FixConfiguration(f'{place}: unknown setting "{setting}"', remedy=_nearest(location))
    if kind == "missing":
        raise FixConfiguration(f'{place}: "{setting}" is missing', remedy=f"Add `{location[-1]}: …` here.")
    remedy = _QUOTE if kind == "string_type" else "See docs/configuration.md for values."
    said = _SAID.get(kind, mistake["msg"]).format(**told)
    raise FixConfiguration(f'{place}: "{setting}" {said}', remedy=remedy)


def _refuse_kind(place: str, kind: str | None) -> NoReturn:
    known = f"There are: {', '.join(_KINDS)}."
    if kind is None:
        raise FixConfiguration(f'{place}: "source.kind" is missing', remedy=f"Add `kind: …` here. {known}")
    close = difflib.get_close_matches(kind, _KINDS, n=1, cutoff=0.5)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    raise FixConfiguration(f'{place}: there is no source of kind "{kind}"', remedy=hint + known)


def _nearest(location: tuple[Any, ...]) -> str:
    known = _known_settings(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    return f"{hint}Known here: {', '.join(known)}."


def _known_settings(location: tuple[Any, ...]) -> list[str]:
    by_section: dict[str, type[BaseModel]] = {
        "spark": SparkSettings,
        "tables": TableSettings,
        "tick": TickSettings,
        "materializations": MaterializationSettings,
    }
    if not location:
        return list(ProjectFile.model_fields)
    if location[0] == "source":
        return list(_KINDS[location[1]].model_fields)
    return list(by_section[location[0]].model_fields)


def _views(folder: Path) -> tuple[ViewFile, ...]:
    paths = sorted((folder / "views").glob("*.sql"))
    for path in paths:
        if not _NAME.match(path.stem):
            raise FixConfiguration(
                f'{path}: "{path.stem}" cannot be a view\'s name', remedy="Use letters, digits and _ only: my_view.sql."
            )
    return tuple(ViewFile(path.stem, path, _text(path, path.read_bytes())) for path in paths)


def _check_names(path: Path, project: Project, node: yaml.Node | None) -> None:
    views = [view.name for view in project.views]
    if not views:
        raise FixConfiguration(
            f"{project.folder / 'views'} holds no view",
            remedy="Write one SELECT into views/NAME.sql; NAME is the view's name.",
        )
    _check_tables(path, project, node, views)
    seen: set[str] = set()
    for place, one in enumerate(project.file.materializations):
        with _at(path, node, "materializations", place):
            _check_materialization(one, views, seen)


@contextmanager
def _at(path: Path, node: yaml.Node | None, *location: Any) -> Iterator[None]:
    """What is refused inside is refused with the setting's line."""
    try:
        yield
    except FixConfiguration as error:
        raise FixConfiguration(f"{path}:{_line(node, location)}: {error.message}", remedy=error.remedy) from None


def _check_tables(path: Path, project: Project, node: yaml.Node | None, views: list[str]) -> None:
    topics: dict[str, str] = {}
    for name, settings in project.file.tables.items():
        with _at(path, node, "tables", name):
            _check_table(project, name, views, topics)
        for column, text in (settings.columns or {}).items():
            with _at(path, node, "tables", name, "columns", column):
                _check_type(f'table "{name}", column "{column}"', text)
        with _at(path, node, "tables", name, "key"):
            declared_table(project, name)


def _check_table(project: Project, name: str, views: list[str], topics: dict[str, str]) -> None:
    if not _NAME.match(name) or name in views:
        raise FixConfiguration(
            f'"{name}" cannot be a table\'s name',
            remedy="Use letters, digits and _, and a name that no view has.",
        )
    other = topics.setdefault(topic_of(project, name), name)
    if other != name:
        raise FixConfiguration(
            f'table "{name}" has the same topic as table "{other}": {topic_of(project, name)}',
            remedy="Declare each topic once: correct one of the topics, or remove one of the tables.",
        )


def _check_type(whose: str, text: str) -> None:
    try:
        parse_type(text)
    except FixConfiguration as error:
        raise FixConfiguration(f"{whose}: {error.message}", remedy=error.remedy) from None


def _check_materialization(one: MaterializationSettings, views: list[str], seen: set[str]) -> None:
    if one.view not in views:
        close = difflib.get_close_matches(one.view, views, n=1)
        raise FixConfiguration(
            f'there is no view "{one.view}"',
            remedy=f'Did you mean "{close[0]}"?' if close else f"Write views/{one.view}.sql, or name one of {views}.",
        )
    if one.known_as in seen:
        raise FixConfiguration(
            f'two materializations are called "{one.known_as}"', remedy="Give one of them another `name:`."
        )
    seen.add(one.known_as)
    read_config(destination(one.to).config, one.config, f'{one.to} of "{one.known_as}"')


def declared_table(project: Project, name: str) -> TableSchema | None:
    """The table as tidegate.yaml declares it; None if its types are left to be discovered."""
    settings = project.file.tables[name]
    if settings.columns is None:
        return None
    columns = tuple(Column(column, parse_type(text), settings.timestamps) for column, text in settings.columns.items())
    key = tuple(settings.key or ())
    missing = [column for column in key if column not in settings.columns]
    if missing or not key:
        raise FixConfiguration(
            f'table "{name}": the key {list(key)} is not among its columns' if key else f'table "{name}" has no key',
            remedy=f"Set `key: [...]` of tables.{name} in {FILE} to the table's primary key columns.",
        )
    return TableSchema(name, topic_of(project, name), key, columns, settings.decimals)


def topic_of(project: Project, name: str) -> str:
    """Where the changes of a declared table come from."""
    topic = project.file.tables[name].topic or f"{project.file.source.topic_prefix}.public.{name}"
    if not topic.startswith(project.file.source.topic_prefix + "."):
        raise FixConfiguration(
            f'table "{name}": topic "{topic}" does not start with the source\'s topic_prefix'
            f' "{project.file.source.topic_prefix}."',
            remedy=f"Correct tables.{name}.topic or source.topic_prefix in {FILE}.",
        )
    if "." not in topic.removeprefix(project.file.source.topic_prefix + ".").strip("."):
        raise FixConfiguration(
            f'table "{name}": topic "{topic}" is not called PREFIX.schema.table, by which a transaction counts rows',
            remedy=f"Record without routing (no transform that renames topics), and name the table's own topic in"
            f" tables.{name}.topic in {FILE}.",
        )
    return topic
