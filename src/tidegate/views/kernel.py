"""Kernel: the fold inside a partition. Routes a row's change to its group, and recomputes each affected group once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from tidegate.errors import FixConfiguration
from tidegate.model.cell import Cell, python_type, raw_decoder
from tidegate.model.key import KeyBytes, encode_integer, encode_key
from tidegate.model.schema import Column as SchemaColumn
from tidegate.views.arrangement import Arrangement, Transaction
from tidegate.views.expressions import (
    NAMESPACE,
    Aggregate,
    Column,
    Emitter,
    NullTest,
    TypeOverflowError,
    parsed,
    template,
    walk,
)
from tidegate.views.plan import FORMS, PlanInput, Slot, ViewPlan, slots_of

Change = tuple[KeyBytes, int, bytes, bytes | None]  # group key, input, primary key, contribution (None: the row leaves)
OutputUpdate = tuple[KeyBytes, Cell | None, Cell | None]  # key, old, new
Row = tuple[Any, ...]
Writes = list[tuple[bytes, bytes | None]]  # None: remove

_OUTPUT = 255  # where the previous output lies among a group's inputs
_OUTPUT_BYTE = bytes((_OUTPUT,))
_BYTES = [bytes((place,)) for place in range(256)]
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple).decode


@lru_cache(maxsize=64)
def compiled(plan: ViewPlan) -> CompiledView:
    """The view's functions, made once per process."""
    return CompiledView(plan)


def _packed(values: Row) -> bytes:
    try:
        return _pack(values)
    except OverflowError:
        return _pack(tuple(map(_within_64_bits, values)))


def _within_64_bits(value: Any) -> Any:
    """Larger numbers travel as text."""
    return str(value) if type(value) is int and not -(1 << 63) <= value < 1 << 64 else value


def _function(name: str, source: str) -> Callable[..., Any]:
    """Compiles generated source: every name in it is ours, every literal a repr."""
    namespace = dict(NAMESPACE)
    exec(compile(source, f"<tidegate view: {name}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]  # type: ignore[assignment]
    return function


def _group_key(used: PlanInput, needed: tuple[str, ...]) -> Callable[[Any], KeyBytes | None]:
    """Reads the group's key from a decoded row; None if the row can have no partner: a part of its key is NULL."""
    keeps_null_keys = used.join == "from"
    if len(used.key) == 1 and python_type(used.table.column(used.key[0]).type) is int:
        column = f"c{needed.index(used.key[0])}"
        null = encode_key([None]) if keeps_null_keys else None

        def integer_key(row: Any) -> KeyBytes | None:
            text: bytes = bytes(getattr(row, column))
            return null if text == b"null" else encode_integer(int(text))

        return integer_key
    readers = [_key_reader(used.table.column(name)) for name in used.key]
    texts = _function("key_texts", _key_texts_source(used.key, needed))

    def any_key(row: Any) -> KeyBytes | None:
        key = [read(text) for read, text in zip(readers, texts(row), strict=True)]
        return encode_key(key) if keeps_null_keys or None not in key else None

    return any_key


def _key_reader(column: SchemaColumn) -> Callable[[str], object]:
    """Reads a key column's JSON text as the value that `encode_key` takes."""
    if python_type(column.type) is int:
        return lambda text: None if text == "null" else int(text)
    decode = msgspec.json.Decoder(python_type(column.type) | None).decode
    return lambda text: decode(text.encode())


class CompiledInput:
    """One input of a view: turns changes of its table's rows into changes of groups."""

    def __init__(self, view: str, place: int, used: PlanInput, needed: tuple[str, ...], slots: Sequence[Slot]) -> None:
        self.view = view
        self.place = place
        self.table = used.table
        self._decode = raw_decoder(needed)
        self._contribute = _function("contribute", _contribute_source(needed, slots))
        self._group_key = _group_key(used, needed)

    @property
    def null_row(self) -> Row:
        """What a LEFT JOIN sees where nothing matches."""
        row: Row = self._contribute(self._decode(b"{}"))
        return row

    def route(self, pk: bytes, old: Cell | None, new: Cell | None) -> list[Change]:
        """The changes of groups that one row's change makes: none, one, or a leaving and an arriving one."""
        before = None if old is None else self._placed(old)
        after = None if new is None else self._placed(new)
        if before == after:
            return []
        changes: list[Change] = []
        if before is not None and (after is None or after[0] != before[0]):
            changes.append((before[0], self.place, pk, None))
        if after is not None:
            changes.append((after[0], self.place, pk, after[1]))
        return changes

    def _placed(self, cell: Cell) -> tuple[KeyBytes, bytes] | None:
        row = self._decode(cell)
        key = self._group_key(row)
        if key is None:
            return None
        try:
            return key, _packed(self._contribute(row))
        except TypeOverflowError as overflow:
            raise _too_large(self.view, str(overflow), f"the row {_excerpt(cell)} of {self.table.name}") from None


def _excerpt(cell: Cell) -> str:
    text = cell.decode()
    return text if len(text) <= 200 else text[:200] + "…"


def _too_large(view: str, column: str, place: str) -> FixConfiguration:
    return FixConfiguration(
        f'view "{view}": column "{column}" does not fit its type, at {place}',
        remedy="Widen the source column (bigint, or a decimal of more digits), or correct the row; then run again.",
    )


def _key_texts_source(key: tuple[str, ...], needed: tuple[str, ...]) -> str:
    texts = (f"str(row.c{needed.index(name)}, 'utf-8')" for name in key)
    return f"def key_texts(row):\n    return ({', '.join(texts)},)\n"


class _RowNames:
    """Names the locals that hold a row's columns, and remembers which are needed."""

    def __init__(self, needed: tuple[str, ...]) -> None:
        self._needed = needed
        self.texts: set[int] = set()
        self.numbers: dict[int, Column] = {}

    def text(self, column: Column) -> str:
        index = self._needed.index(column.name)
        self.texts.add(index)
        return f"t{index}"

    def number(self, column: Column) -> str:
        index = self._needed.index(column.name)
        self.texts.add(index)
        self.numbers[index] = column
        return f"n{index}"

    def lines(self) -> Iterator[str]:
        for index in sorted(self.texts):
            yield f"    t{index} = str(row.c{index}, 'utf-8')"
        for index, column in sorted(self.numbers.items()):
            yield f"    n{index} = None if t{index} == 'null' else {parsed(f't{index}', column.type)}"


def _contribute_source(needed: tuple[str, ...], slots: Sequence[Slot]) -> str:
    """Source of the function from a decoded row to its slots."""
    names = _RowNames(needed)
    values = [_slot_source(slot, Emitter(slot.column, names.text, number_of=names.number)) for slot in slots]
    body = "".join(f"{value}, " for value in values)
    return "\n".join(["def contribute(row):", *names.lines(), f"    return ({body})", ""])


def _slot_source(slot: Slot, emitter: Emitter) -> str:
    if slot.form == "flag":
        tests = (*slot.conditions, NullTest(slot.expression, wants_null=False))
        return f"int({' and '.join(map(emitter.test, tests))})"
    write = {"text": emitter.text, "number": emitter.value, "fragment": emitter.fragment}[slot.form]
    source = write(slot.expression)
    if slot.conditions:
        return f"({source} if {' and '.join(map(emitter.test, slot.conditions))} else None)"
    return source


class CompiledView:
    """A view's functions in one process: its inputs route, `fold` keeps the groups."""

    def __init__(self, plan: ViewPlan) -> None:
        self.plan = plan
        self.inputs = [
            CompiledInput(
                plan.name, place, used, plan.needed[place], [slot for slot in plan.slots if slot.input == place]
            )
            for place, used in enumerate(plan.inputs)
        ]
        self._instead = [
            [self.inputs[place].null_row] if used.join == "left" else [] for place, used in enumerate(plan.inputs)
        ]
        self._finish = _function("finish", _finish_source(plan))
        self._key_slots = [plan.slots.index(Slot(column.input, "text", column)) for column in plan.key]
        self._key_readers = [_key_reader(plan.inputs[column.input].table.column(column.name)) for column in plan.key]

    def inputs_of(self, table: str) -> list[CompiledInput]:
        """The inputs that a table's changes go to."""
        return [used for used in self.inputs if used.table.name == table]

    def fold(self, arrangement: Arrangement, tick: int, changes: Sequence[Change]) -> list[OutputUpdate]:
        """Applies a tick's changes and returns the view's rows that really changed, in the order of their groups.

        Inside an open `arrangement.write(tick)` it takes part in that transaction, else it commits its own.
        """
        with arrangement.write(tick) as transaction:
            _apply(transaction, changes)
            updates: list[OutputUpdate] = []
            writes: Writes = []
            for group in sorted({change[0] for change in changes}):
                self._refold(group, transaction.scan(group), updates, writes)
            _write(transaction, writes)
        return updates

    def _refold(
        self, group: KeyBytes, entries: list[tuple[bytes, bytes]], updates: list[OutputUpdate], writes: Writes
    ) -> None:
        """Compares a group's rows as they are now with those that it had."""
        size, inputs, before = len(group), [[] for _ in self.inputs], {}  # type: ignore[var-annotated]
        for key, value in entries:
            place = key[size]
            if place == _OUTPUT:
                before[key[size + 1 :]] = value
            else:
                inputs[place].append(_unpack(value))
        after = self._outputs(self._joined(inputs))
        for rest in sorted({*before, *after}):
            old, new = before.get(rest), after.get(rest)
            if old != new:
                updates.append((rest or group, old, new))
                writes.append((group + _OUTPUT_BYTE + rest, new))

    def _joined(self, inputs: list[list[Row]]) -> list[Row]:
        """Each combination of one row of each input, in the order of their primary keys."""
        joined: list[Row] = [()]
        for rows, instead in zip(inputs, self._instead, strict=True):
            present = rows or instead
            if len(joined) == 1:
                head = joined[0]
                joined = [head + row for row in present] if head else present
            else:
                joined = [left + row for left in joined for row in present]
            if not joined:
                return joined
        return joined

    def _outputs(self, joined: list[Row]) -> dict[bytes, Cell]:
        """The group's rows of the view, by what follows the shared key in their key (all of it; or nothing, if one)."""
        if not joined:
            return {}
        if self.plan.one_row_per_group:
            return {b"": self._cell(joined)}
        groups: dict[Row, list[Row]] = {}
        for row in joined:
            groups.setdefault(tuple([row[slot] for slot in self._key_slots]), []).append(row)
        return {self._key_bytes(texts): self._cell(rows) for texts, rows in groups.items()}

    def _key_bytes(self, texts: Row) -> KeyBytes:
        return encode_key([read(text) for read, text in zip(self._key_readers, texts, strict=True)])

    def _cell(self, rows: list[Row]) -> Cell:
        try:
            text: str = self._finish(rows)
        except TypeOverflowError as overflow:
            names = [column.name for column in self.plan.key]
            key = ", ".join(f"{name} = {rows[0][slot]}" for name, slot in zip(names, self._key_slots, strict=True))
            raise _too_large(self.plan.name, str(overflow), f"the key {key}") from None
        return text.encode()


def _apply(transaction: Transaction, changes: Sequence[Change]) -> None:
    """The last change of a row counts."""
    latest = {group + _BYTES[place] + pk: contribution for group, place, pk, contribution in changes}
    _write(transaction, sorted(latest.items()))


def _write(transaction: Transaction, entries: Writes) -> None:
    transaction.deletemulti([key for key, value in entries if value is None])
    transaction.putmulti([(key, value) for key, value in entries if value is not None])


def _finish_source(plan: ViewPlan) -> str:
    """Source of the function from a group's joined rows to its cell."""
    slots = {slot: position for position, slot in enumerate(plan.slots)}
    lines: list[str] = []
    sources: list[str] = []
    for output in plan.outputs:
        names: dict[Aggregate, str] = {}
        for node in dict.fromkeys(walk(output.expression)):
            if isinstance(node, Aggregate):
                names[node] = f"a{len(lines)}"
                lines.append(f"    {names[node]} = {_aggregate_source(node, output.name, slots)}")
        emitter = Emitter(output.name, _column_of("r", slots), names.__getitem__)
        sources.append(emitter.text(output.expression))
    document = template(tuple(output.name for output in plan.outputs), sources)
    return "\n".join(["def finish(rows):", "    r = rows[0]", *lines, f"    return {document}", ""])


def _column_of(row: str, slots: dict[Slot, int]) -> Callable[[Column], str]:
    return lambda column: f"{row}[{slots[Slot(column.input, 'text', column)]}]"


def _aggregate_source(aggregate: Aggregate, column: str, slots: dict[Slot, int]) -> str:
    used = slots_of(aggregate, column)
    if len(used) == 1:
        element = f"x[{slots[used[0]]}]"
    else:  # several inputs, or none
        emitter = Emitter(column, _column_of("x", slots))
        element = _slot_source(Slot(0, FORMS[aggregate.function], aggregate.operand, aggregate.conditions), emitter)
    if aggregate.function == "count":
        return f"sum([{element} for x in rows])"
    present = f"[y for x in rows if (y := {element}) is not None]"
    if aggregate.function == "collect":
        return f"'[' + ','.join({present}) + ']'"
    low, high = aggregate.type.limits
    return f"checked_total({present}, {low}, {high}, {column!r})"
