"""Query: a view's SQL text, parsed and held to the supported shape; every refusal names its place and what to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, TokenError

from tidegate.errors import FixConfiguration
from tidegate.model.schema import INTEGERS, TableSchema
from tidegate.views.expressions import Column, value_type
from tidegate.views.plan import JoinKind, PlanInput

_CLAUSES = {
    "with_": ("WITH", "Write the query over the tables themselves."),
    "distinct": ("DISTINCT", "Use GROUP BY over the same columns."),
    "laterals": ("LATERAL VIEW", "Select the array itself; the destination's side can unnest it."),
    "where": ("WHERE", "Count or sum with FILTER (WHERE x IS NOT NULL), or filter where the destination is read."),
    "having": ("HAVING", "Leave it out and filter where the destination is read."),
    "qualify": ("QUALIFY", "Leave it out and filter where the destination is read."),
    "windows": ("WINDOW", "Use aggregates over GROUP BY."),
    "order": ("ORDER BY", "Leave it out: a view is a set of rows; order them where the destination is read."),
    "sort": ("SORT BY", "Leave it out: a view is a set of rows."),
    "cluster": ("CLUSTER BY", "Leave it out: a view is a set of rows."),
    "distribute": ("DISTRIBUTE BY", "Leave it out: a view is a set of rows."),
    "limit": ("LIMIT", "Leave it out and limit where the destination is read."),
    "offset": ("OFFSET", "Leave it out and skip rows where the destination is read."),
}
_ONE_SELECT = "Write one SELECT over one table, or over tables joined on one shared key, with GROUP BY that key."

_CAST_BEFORE = re.compile(r"\b((?:try_)?cast)\s*\((?:[\s(]|(?:try_)?cast\s*\()*$|\b(date|timestamp\w*)\s*$", re.I)
_CAST_AFTER = re.compile(r"(::|\b(?:try_)?cast\b)", re.I)
_OPERATOR = re.compile(r"[\s)]*([^\s()]+)[\s(]*")


@dataclass(frozen=True)
class SourceText:
    """A view's SQL and where it is kept, to name places in it."""

    view: str
    sql: str
    path: Path | None

    def refuse(self, reason: str, remedy: str, at: exp.Expr | int | None = None) -> NoReturn:
        """Raises FixConfiguration with file, line and column."""
        offset = at if isinstance(at, int) else self._word_from(offset_of(at))
        raise FixConfiguration(f"{self.place(offset)}: {reason}", remedy=remedy)

    def _word_from(self, offset: int) -> int:
        return offset + len(self.sql[offset:]) - len(self.sql[offset:].lstrip(", \t\r\n"))

    def word(self, node: exp.Expr) -> tuple[str, int]:
        """A function or operator as it is written, and where it stands: the parser gives some of them other names."""
        if "start" in node.meta:
            return self.sql[node.meta["start"] : node.meta["end"] + 1], int(node.meta["start"])
        first, found = self._word_from(offset_of(node)), None
        if isinstance(node, exp.Cast):
            found = _CAST_BEFORE.search(self.sql, 0, first) or _CAST_AFTER.search(self.sql, first)
        elif isinstance(node, exp.Binary):
            operands = offset_of(node.left), offset_of(node.right)
            ends = [part.meta["end"] + 1 for part in node.left.walk() if "end" in part.meta]
            found = _OPERATOR.fullmatch(self.sql, max(ends, default=0), max(operands))
        elif isinstance(node, exp.Func):
            return node.sql_name(), self.keyword(node.sql_name(), first)
        return (found[found.lastindex or 0], found.start(found.lastindex or 0)) if found else (node.key, first)

    def place(self, offset: int) -> str:
        before = self.sql[:offset]
        line, column = before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1
        return f"{self.path or f'view {self.view}'}:{line}:{column}"

    def offset(self, line: int, column: int) -> int:
        """The offset of a line and column, both from 1."""
        lines = self.sql.splitlines(keepends=True)
        return sum(map(len, lines[: line - 1])) + max(column - 1, 0)

    def keyword(self, word: str, before: int) -> int:
        """Where the last such word before an offset stands."""
        found = [match.start() for match in re.finditer(rf"\b{word.split()[0]}\b", self.sql, re.IGNORECASE)]
        return max((place for place in found if place <= before), default=before)


def offset_of(node: exp.Expr | None) -> int:
    """Where the first word of a node stands; the parser keeps no place for NULL, TRUE and FALSE: what precedes them."""
    if node is None:
        return 0
    places = [part.meta["start"] for part in node.walk() if "start" in part.meta]
    if places or node.parent is None:
        return int(min(places, default=0))
    index = node.index or 0
    before = node.parent.expressions[:index] if node.arg_key == "expressions" else []
    ends = [part.meta["end"] + 1 for earlier in before for part in earlier.walk() if "end" in part.meta]
    return int(max(ends)) if ends else offset_of(node.parent)


@dataclass(frozen=True)
class Query:
    """The checked shape: inputs, grouping columns, and the select list still as SQL nodes."""

    text: SourceText
    tree: exp.Select
    inputs: tuple[PlanInput, ...]
    grouping: tuple[Column, ...]

    def resolve(self, node: exp.Column) -> Column:
        return resolve(self.text, self.inputs, node)


def parse(text: SourceText, tables: Mapping[str, TableSchema]) -> Query:
    """Parses and checks everything that needs no Spark, except expressions."""
    tree = _select(text)
    _refuse_clauses(text, tree)
    inputs = _inputs(text, tree, tables)
    grouping = _grouping(text, tree, inputs)
    return Query(text, tree, _ordered_keys(inputs, grouping), grouping)


def _select(text: SourceText) -> exp.Select:
    if retain := re.search(r"--\s*retain\s*:", text.sql):
        text.refuse("`retain` is not supported yet", "Remove the line; the view keeps all rows.", retain.start())
    if word := re.match(r"(?:\s|--[^\n]*\n)*select\s+(transactionally)\b", text.sql, re.IGNORECASE):
        text.refuse("TRANSACTIONALLY is not supported yet", "Write a plain SELECT: it is just as whole.", word.start(1))
    statements = [statement for statement in _statements(text) if statement is not None]
    if len(statements) > 1:
        text.refuse("a view is one SELECT, and here is a second statement", "Keep one SELECT a file.", statements[1])
    if not statements:
        text.refuse("a view is one SELECT, and this is nothing", _ONE_SELECT)
    if not isinstance(statements[0], exp.Select):
        kind = type(statements[0]).__name__.upper()
        named = kind if isinstance(statements[0], exp.SetOperation) else "something else"
        text.refuse(f"a view is one SELECT, and this is {named}", _ONE_SELECT, statements[0])
    return statements[0]


def says_the_same(before: str, now: str) -> bool:
    """Whether two texts are one query but for comments, white space and how words are written."""
    return before == now or _normal(before) == _normal(now)


def _normal(sql: str) -> list[str]:
    trees = sqlglot.parse(sql, read="spark")
    return [tree.sql(dialect="spark", comments=False) for tree in trees if tree is not None]


def _statements(text: SourceText) -> Sequence[exp.Expr | None]:
    try:
        return sqlglot.parse(text.sql, read="spark")
    except ParseError as error:
        first = error.errors[0] if error.errors else {}
        word = first.get("highlight") or ""
        at = text.offset(first.get("line") or 1, (first.get("col") or 1) - max(len(word) - 1, 0))
        text.refuse(f"syntax error at {word!r}: {first.get('description')}", "Correct the SQL (Spark's dialect).", at)
    except TokenError:
        at = max(text.sql.rfind(quote) for quote in "'\"`")
        text.refuse("syntax error: a quote or comment has no end", "Close it.", max(at, 0))


def _refuse_clauses(text: SourceText, tree: exp.Select) -> None:
    for name, value in tree.args.items():
        if not value or name in ("expressions", "from_", "joins", "group"):
            continue
        word, remedy = _CLAUSES.get(name, (name.strip("_").upper(), _ONE_SELECT))
        nodes = [node for node in (value if isinstance(value, list) else [value]) if isinstance(node, exp.Expr)]
        after = [offset_of(node) for node in nodes if any("start" in part.meta for part in node.walk())]
        text.refuse(f"{word} is not supported yet", remedy, text.keyword(word, min(after, default=len(text.sql))))


def _inputs(text: SourceText, tree: exp.Select, tables: Mapping[str, TableSchema]) -> tuple[PlanInput, ...]:
    source = tree.args.get("from_")
    if source is None:
        text.refuse("the query reads no table", _ONE_SELECT)
    inputs = [_input(text, source.this, tables, "from")]
    classes: list[list[Column]] = []  # for each column of the shared key, the columns that equal it in every joined row
    for join in tree.args.get("joins") or []:
        used = _input(text, join.this, tables, _join_kind(text, join))
        if used.alias.lower() in (other.alias.lower() for other in inputs):
            text.refuse(f'two tables are named "{used.alias}"', "Give one of them an alias.", join.this)
        inputs.append(used)
        _equate(text, tuple(inputs), join, classes)
    if len(inputs) == 1:
        return tuple(inputs)
    names = [tuple(next(c.name for c in same if c.input == place) for same in classes) for place in range(len(inputs))]
    return tuple(PlanInput(i.table, i.alias, i.join, key) for i, key in zip(inputs, names, strict=True))


def _input(text: SourceText, node: exp.Expr, tables: Mapping[str, TableSchema], kind: JoinKind) -> PlanInput:
    if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
        text.refuse("a subquery or function in FROM is not supported yet", "Name a table of tidegate.yaml.", node)
    extra = [name for name, value in node.args.items() if value and name not in ("this", "alias")]
    if extra or node.args.get("joins"):
        text.refuse("a table is named by one word, without options", "Write the name it has in tidegate.yaml.", node)
    alias = node.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        text.refuse("an alias with column names is not supported", "Give the alias alone.", node)
    known = {name.lower(): table for name, table in tables.items()}
    if (table := known.get(node.name.lower())) is None:
        text.refuse(f'there is no table "{node.name}"', _nearest(node.name, tables), node)
    return PlanInput(table, node.alias_or_name, kind, ())


def _join_kind(text: SourceText, join: exp.Join) -> JoinKind:
    word = " ".join(part for part in (join.method, join.side, join.kind) if part)
    if word in ("", "INNER") and not join.args.get("using"):
        return "inner"
    if word in ("LEFT", "LEFT OUTER") and not join.args.get("using"):
        return "left"
    if join.args.get("using"):
        return text.refuse("USING is not supported yet", "Write ON a.column = b.column.", join)
    remedy = "Swap the tables and write LEFT JOIN." if "RIGHT" in word else "Write JOIN or LEFT JOIN with ON."
    return text.refuse(f"{word} JOIN is not supported yet", remedy, join)


def _equate(text: SourceText, inputs: tuple[PlanInput, ...], join: exp.Join, classes: list[list[Column]]) -> None:
    """Takes a join's equalities into the shared key."""
    condition = join.args.get("on")
    if condition is None or isinstance(condition, exp.Boolean):
        text.refuse("a JOIN without ON is not supported", "Write ON with the key of both tables.", join)
    pairs = [_pair(text, inputs, part) for part in conjuncts(condition)]
    first = not classes
    for old, new in pairs:
        if first:
            classes.append([old])
        _add(text, inputs, classes, old, new, condition)
    if any(same[-1].input != len(inputs) - 1 for same in classes):
        text.refuse("this JOIN uses only a part of the key that the others share", _SHARED, condition)


_SHARED = (
    "Join every table on the same columns: one shared key. Give a table with another key a view of its own,"
    " without JOIN, and join the two where they are read."
)


def _add(
    text: SourceText,
    inputs: tuple[PlanInput, ...],
    classes: list[list[Column]],
    old: Column,
    new: Column,
    at: exp.Expr,
) -> None:
    same = next((same for same in classes if any((c.input, c.name) == (old.input, old.name) for c in same)), None)
    if same is None:
        text.refuse(f'"{old.name}" is not in the key that the other joins share', _SHARED, at)
    if inputs[old.input].join == "left":
        first = next(column for column in same if column.input == 0)
        remedy = f"Compare with {inputs[0].alias}.{first.name} instead."
        text.refuse(f"{inputs[old.input].alias} may be missing in a row, so nothing can join on it", remedy, at)
    if same[-1].input == new.input:
        text.refuse(f'"{same[0].name}" is compared with two columns of one table', "Compare it with one.", at)
    if not _comparable(old, new):
        reason = f"{old.name} is {old.type.ddl} and {new.name} is {new.type.ddl}"
        text.refuse(
            f"{reason}: they cannot be a shared key", "Give both columns one type, neither float nor array.", at
        )
    same.append(new)


def _comparable(left: Column, right: Column) -> bool:
    if left.type.kind in ("float", "double", "array"):
        return False
    return left.type.kind == right.type.kind or (left.type.kind in INTEGERS and right.type.kind in INTEGERS)


def conjuncts(node: exp.Expr) -> Iterable[exp.Expr]:
    """The conditions that AND connects."""
    node = node.unnest()
    if isinstance(node, exp.And):
        yield from conjuncts(node.this)
        yield from conjuncts(node.expression)
    else:
        yield node


def _pair(text: SourceText, inputs: tuple[PlanInput, ...], node: exp.Expr) -> tuple[Column, Column]:
    """The two columns of an equality, that of the newest input second."""
    sides = (node.this.unnest(), node.expression.unnest()) if isinstance(node, exp.EQ) else ()
    if len(sides) != 2 or not all(isinstance(side, exp.Column) for side in sides):
        text.refuse("ON takes only equal columns", "Write ON a.x = b.y, several of them with AND.", node)
    left, right = (resolve(text, inputs, side) for side in sides)
    newest = len(inputs) - 1
    if (left.input == newest) == (right.input == newest):
        text.refuse(f"ON has to compare {inputs[newest].alias} with a table before it", _SHARED, node)
    return (left, right) if right.input == newest else (right, left)


def resolve(text: SourceText, inputs: tuple[PlanInput, ...], node: exp.Column) -> Column:
    """The column that a name means; unknown and ambiguous names are refused."""
    if node.args.get("db") or isinstance(node.this, exp.Star):
        text.refuse(f'"{node.sql(dialect="spark")}" is not a column', "Name single columns as alias.column.", node)
    owners = [place for place, used in enumerate(inputs) if node.table.lower() in ("", used.alias.lower())]
    if not owners:
        text.refuse(f'there is no table "{node.table}" here', _nearest(node.table, [i.alias for i in inputs]), node)
    found = [
        (place, column)
        for place in owners
        for column in inputs[place].table.columns
        if column.name.lower() == node.name.lower()
    ]
    if not found:
        known = [column.name for place in owners for column in inputs[place].table.columns]
        text.refuse(f'there is no column "{node.name}"', _nearest(node.name, known), node)
    if len(found) > 1:
        choices = " or ".join(f"{inputs[place].alias}.{column.name}" for place, column in found)
        text.refuse(f'the column "{node.name}" is ambiguous', f"Write {choices}.", node)
    place, column = found[0]
    return Column(place, column.name, value_type(column.type))


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    close = difflib.get_close_matches(name.lower(), [one.lower() for one in names], 1, 0.5)
    if close:
        return f'Did you mean "{next(one for one in names if one.lower() == close[0])}"?'
    return f"Known are: {', '.join(names) or 'none'}."


def _grouping(text: SourceText, tree: exp.Select, inputs: tuple[PlanInput, ...]) -> tuple[Column, ...]:
    group = tree.args.get("group")
    if group is None:
        text.refuse("a view without GROUP BY is not supported yet", "Add GROUP BY with the table's primary key.", tree)
    if any(value for name, value in group.args.items() if name != "expressions"):
        at = text.keyword("GROUP", len(text.sql))
        text.refuse("ROLLUP, CUBE, GROUPING SETS and GROUP BY ALL are not supported", "List the columns.", at)
    aliases = {node.alias.lower() for node in tree.expressions if isinstance(node, exp.Alias)}
    columns = [_grouping_column(text, inputs, node, aliases) for node in group.expressions]
    return tuple(dict.fromkeys(columns))


def _grouping_column(text: SourceText, inputs: tuple[PlanInput, ...], node: exp.Expr, aliases: set[str]) -> Column:
    if not isinstance(node, exp.Column):
        text.refuse("GROUP BY takes only columns", "Write the column's name, not a number or an expression.", node)
    names = {column.name.lower() for used in inputs for column in used.table.columns}
    if not node.table and node.name.lower() in aliases - names:
        text.refuse(f'"{node.name}" is a name given in SELECT', "Group by the column itself.", node)
    column = resolve(text, inputs, node)
    if column.type.kind in ("float", "double", "array"):
        remedy = "Group by a column of another type; decimal, say."
        text.refuse(f'"{column.name}" is {column.type.ddl}, which cannot be a key', remedy, node)
    return column


def _ordered_keys(inputs: tuple[PlanInput, ...], grouping: tuple[Column, ...]) -> tuple[PlanInput, ...]:
    """The inputs with their keys in the order of GROUP BY; without a join the key is the primary key, or all."""
    if len(inputs) == 1:
        names = tuple(column.name for column in grouping)
        table = inputs[0].table
        key = tuple(name for name in names if name in table.key) if set(table.key) <= set(names) else names
        return (PlanInput(table, inputs[0].alias, "from", key),)
    order = {(column.input, column.name): place for place, column in reversed(list(enumerate(grouping)))}
    size = len(inputs[0].key)
    rank = [min(order.get((p, i.key[c]), len(order) + c) for p, i in enumerate(inputs)) for c in range(size)]
    wanted = sorted(range(size), key=rank.__getitem__)
    return tuple(PlanInput(i.table, i.alias, i.join, tuple(i.key[c] for c in wanted)) for i in inputs)
