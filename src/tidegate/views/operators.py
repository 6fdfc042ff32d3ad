"""Operators: what a stage does with the changes of its rows. A fold reads what the arrangement keeps of the keys that
change, and returns by how much the operator's result differs after each step.

An entry's key is the stage key, a tag and what tells the entry from others under that key. Everything is read before
anything is written. Rows are multisets: an entry counts its copies.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol

import msgspec

from tidegate.errors import FixConfiguration
from tidegate.model.cell import encode_json
from tidegate.model.key import KeyBytes
from tidegate.views.arrangement import Entry, Transaction
from tidegate.views.dataflow import Aggregate, Delta, Field, Group, Join, Operator, Ordering, Relay, RowText, Sink, Top
from tidegate.views.expressions import decimal_text, fit, scaled
from tidegate.views.order_keys import (
    NULL_TEXT,
    OrderKey,
    Texts,
    inverted,
    one_text_a_value,
    order_key,
    ordering_key,
    texts_of,
)

Copies = dict[RowText, int]  # how many of each row; of a change, how many more
Changes = dict[KeyBytes, dict[int, Copies]]  # by stage key, then by step
Head = list[Any]  # of a group: its number of rows, its key columns' text, and what each aggregate keeps

_HEAD, _ENTRY, _VIEW_ROW = b"h", b"e", b"v"
_ROWS, _SIZES = (b"l", b"r"), (b"L", b"R")  # of the left and of the right side
_BYTES = [bytes((place,)) for place in range(256)]
_LONG_KEY_BYTES = 128
_HASHED = b"\xfd"  # unmatched keys start with what is greater, all others with less
_COUNTED = b"\x00"  # no JSON text starts so
_PLACE = struct.Struct(">IQ")  # the length of a row's order key, and its copies
_NO_CHANGE: Copies = {}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list).decode


class TwoRowsOfOneKey(FixConfiguration):
    """A view's key is not one: two of its rows have the same."""

    def __init__(self, first: RowText, second: RowText) -> None:
        super().__init__(
            f"two rows have the same key: {_excerpt(first)} and {_excerpt(second)}",
            remedy="Declare a key in which they differ with `-- key:`, or make the query give one row for each key.",
        )
        self.rows = (first, second)

    def __reduce__(self) -> tuple[object, ...]:
        return TwoRowsOfOneKey, self.rows


class NotOnlyOne(FixConfiguration):
    """Where a query promises one value there are two."""

    def __init__(self, column: str, first: bytes, second: bytes) -> None:
        super().__init__(
            f'column "{column}" has more than one value: {_excerpt(first)} and {_excerpt(second)}',
            remedy="Aggregate the values (max, collect_list), or make the subquery give one row.",
        )
        self.column = column
        self.values = (first, second)

    def __reduce__(self) -> tuple[object, ...]:
        return NotOnlyOne, (self.column, *self.values)


class Fold(Protocol):
    """An operator at work."""

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        """Applies the deltas of each input, and returns the operator's own."""


@lru_cache(maxsize=256)
def compiled(operator: Operator) -> Fold:
    """The operator's fold, made once per process."""
    match operator:
        case Join(kind="inner" | "left" | "full"):
            return PairingFold(operator)
        case Join():
            return PresenceFold(operator)
        case Group():
            return GroupFold(operator)
        case Top():
            return TopFold(operator)
        case Relay():
            return RelayFold()
        case Sink():
            return SinkFold()


# --- what all of them share


def _excerpt(text: bytes) -> str:
    return text[:200].decode(errors="replace") + ("…" if len(text) > 200 else "")


def _changes(deltas: Iterable[Delta]) -> Changes:
    """The deltas by key and step, each row once; a change that cancels itself has 0 copies."""
    changes: Changes = {}
    for key, step, diff, row in deltas:
        steps = changes.get(key)
        if steps is None:
            changes[key] = {step: {row: diff}}
        elif (rows := steps.get(step)) is None:
            steps[step] = {row: diff}
        else:
            rows[row] = rows.get(row, 0) + diff
    return changes


def _prefix(key: KeyBytes) -> bytes:
    """Begins the keys of a stage key's entries and of no other's; short, so that entries are stored in order."""
    if len(key) <= _LONG_KEY_BYTES and key < _HASHED:
        return key
    return _HASHED + sha256(key).digest()


def _counted(text: bytes, copies: int) -> bytes:
    return text if copies == 1 else _COUNTED + copies.to_bytes(8, "big") + text


def _uncounted(value: bytes) -> tuple[bytes, int]:
    return (value[9:], int.from_bytes(value[1:9], "big")) if value[:1] == _COUNTED else (value, 1)


def _digest(row: RowText) -> bytes:
    return blake2b(row, digest_size=16).digest()


def _joined(left: RowText, right: RowText) -> RowText:
    if len(right) == 2:
        return left
    return right if len(left) == 2 else left[:-1] + b"," + right[1:]


def _member(name: str) -> bytes:
    return encode_json(name) + b":"


def _null_row(fields: Sequence[Field]) -> RowText:
    return b"{" + b",".join([_member(field.name) + NULL_TEXT for field in fields]) + b"}"


def _deltas(step: int, rows: Mapping[RowText, int]) -> list[Delta]:
    return [Delta(b"", step, copies, row) for row, copies in rows.items() if copies]


def _added(rows: Copies, more: Copies, sign: int = 1) -> None:
    """Adds copies; a row of which none is left goes."""
    for row, copies in more.items():
        total = rows.get(row, 0) + sign * copies
        if total:
            rows[row] = total
        else:
            rows.pop(row, None)


class _Writes:
    """What a fold writes when it has read everything."""

    def __init__(self) -> None:
        self.puts: list[Entry] = []
        self.removals: list[bytes] = []

    def apply(self, transaction: Transaction) -> None:
        transaction.deletemulti(sorted(self.removals))
        transaction.putmulti(sorted(self.puts))


# --- joins


def _keep_rows(transaction: Transaction, tag: bytes, changes: Changes, writes: _Writes) -> None:
    """Counts the copies of each row that changes."""
    entries: dict[bytes, list[Any]] = {}  # the row, then its change in each step
    for key, steps in changes.items():
        prefix = _prefix(key) + tag
        for step in steps if len(steps) == 1 else sorted(steps):
            for row, diff in steps[step].items():
                entries.setdefault(prefix + _digest(row), [row]).append(diff)
    keys = sorted(entries)
    for key, value in zip(keys, transaction.getmulti(keys), strict=True):
        row, *diffs = entries[key]
        found, before = (row, 0) if value is None else _uncounted(value)
        assert found == row, f"{_excerpt(row)} and {_excerpt(found)} have one hash"
        after = before
        for diff in diffs:
            after += diff
            assert after >= 0, f"{after} copies of the row {_excerpt(row)}"
        if after and after != before:
            writes.puts.append((key, _counted(row, after)))
        elif before and not after:
            writes.removals.append(key)


class _Sizes:
    """How many rows one side has under each key."""

    def __init__(self, transaction: Transaction, tag: bytes, keys: Iterable[KeyBytes]) -> None:
        self._keys = {_prefix(key) + tag: key for key in keys}
        stored = sorted(self._keys)
        found = zip(stored, transaction.getmulti(stored), strict=True)
        self._before = {self._keys[key]: int.from_bytes(value or b"", "big") for key, value in found}
        self.now = dict(self._before)

    def keep(self, writes: _Writes) -> None:
        for stored, key in self._keys.items():
            size = self.now[key]
            if size and size != self._before[key]:
                writes.puts.append((stored, size.to_bytes(8, "big")))
            elif self._before[key] and not size:
                writes.removals.append(stored)


def _rows_of(transaction: Transaction, key: KeyBytes, side: int) -> Copies:
    """One side's rows under a key, before the tick."""
    return dict([_uncounted(value) for _, value in transaction.scan(_prefix(key) + _ROWS[side])])


class _Side:
    """One side's rows under one key, as far as the tick needs them."""

    __slots__ = ("rows", "size")

    def __init__(self, rows: Copies | None, size: int | None) -> None:
        self.rows = rows
        self.size = len(rows) if size is None and rows is not None else size or 0

    def change(self, diffs: Copies) -> None:
        self.size += sum(diffs.values())
        if self.rows is not None:
            _added(self.rows, diffs)


class PairingFold:
    """Inner, left and full joins: a changed row meets the other side's rows, and no row of its own."""

    def __init__(self, join: Join) -> None:
        self._extends = (join.kind != "inner", join.kind == "full")  # rows of the left, of the right
        self._counts = (join.kind == "full", join.kind != "inner")
        self._nulls = (_null_row(join.left), _null_row(join.right))

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        changes = (_changes(inputs[0]), _changes(inputs[1]))
        sizes = [_Sizes(transaction, _SIZES[side], changes[side]) if self._counts[side] else None for side in range(2)]
        writes = _Writes()
        for side in range(2):
            _keep_rows(transaction, _ROWS[side], changes[side], writes)
        outputs: list[Delta] = []
        for key in sorted(changes[0].keys() | changes[1].keys()):
            left, right = changes[0].get(key), changes[1].get(key)
            if right is None and left is not None and not self._counts[0]:
                self._meet(left, _rows_of(transaction, key, 1), outputs)
            else:
                self._fold_key(transaction, key, (left or {}, right or {}), sizes, outputs)
        for counted in filter(None, sizes):
            counted.keep(writes)
        writes.apply(transaction)
        return outputs

    def _meet(self, changes: dict[int, Copies], partners: Copies, outputs: list[Delta]) -> None:
        """The usual case: only rows of the left change, and whether the left is empty is of no concern."""
        if not partners:
            if not self._extends[0]:
                return
            partners = {self._nulls[1]: 1}
        tails = [(_joined(b"{ }", other)[2:], copies) for other, copies in partners.items()]
        for step in changes if len(changes) == 1 else sorted(changes):
            for row, diff in changes[step].items():
                if diff and len(row) > 2:
                    start = row[:-1]
                    outputs += [Delta(b"", step, diff * copies, start + tail) for tail, copies in tails]
                elif diff:
                    outputs += [Delta(b"", step, diff * copies, other) for other, copies in partners.items()]

    def _fold_key(
        self,
        transaction: Transaction,
        key: KeyBytes,
        changes: tuple[dict[int, Copies], dict[int, Copies]],
        sizes: Sequence[_Sizes | None],
        outputs: list[Delta],
    ) -> None:
        """Each side's rows are read only if the other side changes."""
        sides = []
        for side, counted in enumerate(sizes):
            rows = _rows_of(transaction, key, side) if changes[1 - side] else None
            sides.append(_Side(rows, counted.now.get(key) if counted else None))
        for step in sorted(changes[0].keys() | changes[1].keys()):
            diffs = (changes[0].get(step, _NO_CHANGE), changes[1].get(step, _NO_CHANGE))
            outputs += _deltas(step, self._step(sides[0], sides[1], diffs))
        for side, counted in enumerate(sizes):
            if counted and changes[side]:
                counted.now[key] = sides[side].size

    def _step(self, left: _Side, right: _Side, diffs: tuple[Copies, Copies]) -> Copies:
        """The delta rule: changes of the left meet the right as it will be, the left as it was those of the right."""
        output: Copies = {}
        before = (left.size > 0, right.size > 0)
        right.change(diffs[1])
        _pair(output, diffs[0], right.rows)
        _pair(output, left.rows, diffs[1])
        left.change(diffs[0])
        if self._extends[0]:
            self._extend(output, 0, left, diffs[0], (before[1], right.size > 0))
        if self._extends[1]:
            self._extend(output, 1, right, diffs[1], (before[0], left.size > 0))
        return output

    def _extend(self, output: Copies, place: int, side: _Side, diffs: Copies, partnered: tuple[bool, bool]) -> None:
        """The rows that had no partner before and those that have none after, with NULLs instead."""
        match partnered:
            case (False, False):
                _add_extended(output, diffs, 1, place, self._nulls)
            case (True, False):
                _add_extended(output, side.rows, 1, place, self._nulls)
            case (False, True):
                _add_extended(output, side.rows, -1, place, self._nulls)
                _add_extended(output, diffs, 1, place, self._nulls)


def _pair(output: Copies, lefts: Copies | None, rights: Copies | None) -> None:
    if not lefts or not rights:
        return
    for left, some in lefts.items():
        for right, more in rights.items():
            row = _joined(left, right)
            output[row] = output.get(row, 0) + some * more


def _add_extended(output: Copies, rows: Copies | None, sign: int, side: int, nulls: tuple[RowText, RowText]) -> None:
    assert rows is not None, "rows that are needed were not read"
    for row, copies in rows.items():
        whole = _joined(nulls[0], row) if side else _joined(row, nulls[1])
        output[whole] = output.get(whole, 0) + sign * copies


class PresenceFold:
    """Semi, anti and exists: of the right only the number of rows counts, and only whether it is 0."""

    def __init__(self, join: Join) -> None:
        self._shown: Callable[[RowText, bool], RowText | None]
        match join.kind:
            case "semi":
                self._shown = lambda row, present: row if present else None
            case "anti":
                self._shown = lambda row, present: None if present else row
            case _:
                flags = (b"{" + _member(join.flag) + b"false}", b"{" + _member(join.flag) + b"true}")
                self._shown = lambda row, present: _joined(row, flags[present])

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        lefts, rights = _changes(inputs[0]), _changes(inputs[1])
        keys = sorted(lefts.keys() | rights.keys())
        sizes = _Sizes(transaction, _SIZES[1], keys)
        writes = _Writes()
        _keep_rows(transaction, _ROWS[0], lefts, writes)
        outputs: list[Delta] = []
        for key in keys:
            track = _track(sizes.now[key], rights.get(key, {}))
            turns = any((before > 0) != (after > 0) for before, after in track.values())
            rows = _rows_of(transaction, key, 0) if turns else None
            self._fold_key(lefts.get(key, {}), track, rows, sizes.now[key], outputs)
            if track:
                sizes.now[key] = track[max(track)][1]
        sizes.keep(writes)
        writes.apply(transaction)
        return outputs

    def _fold_key(
        self,
        lefts: dict[int, Copies],
        track: dict[int, tuple[int, int]],
        rows: Copies | None,
        size: int,
        outputs: list[Delta],
    ) -> None:
        for step in sorted(lefts.keys() | track.keys()):
            before, size = track.get(step, (size, size))
            diffs = lefts.get(step, _NO_CHANGE)
            if rows is not None:
                _added(rows, diffs)
            output: Copies = {}
            if (before > 0) == (size > 0):
                self._add(output, diffs, 1, size > 0)
            else:
                assert rows is not None
                self._add(output, rows, 1, size > 0)
                self._add(output, rows, -1, before > 0)
                self._add(output, diffs, 1, before > 0)
            outputs += _deltas(step, output)

    def _add(self, output: Copies, rows: Copies, sign: int, present: bool) -> None:
        for row, copies in rows.items():
            shown = self._shown(row, present)
            if shown is not None:
                output[shown] = output.get(shown, 0) + sign * copies


def _track(size: int, changes: dict[int, Copies]) -> dict[int, tuple[int, int]]:
    """How many rows there are before and after each step."""
    track = {}
    for step in sorted(changes):
        before, size = size, size + sum(changes[step].values())
        assert size >= 0, f"{size} rows with the key of the row {_excerpt(next(iter(changes[step])))}"
        track[step] = before, size
    return track


# --- groups


class _Aggregation:
    """An aggregate at work: it keeps its state in the group's head, from its place on."""

    fresh: tuple[Any, ...] = (0,)

    def __init__(self, aggregate: Aggregate, names: tuple[str, ...], place: int) -> None:
        self.output = aggregate.output
        self.place = place
        self.columns = [names.index(field.name) for field in aggregate.columns]
        self.where = None if aggregate.where is None else names.index(aggregate.where)
        self.member = _member(aggregate.output.name)

    def counts(self, texts: Texts) -> bool:
        """Whether the row takes part."""
        return self.where is None or texts[self.where] == b"true"

    def text(self, head: Head) -> bytes:
        """The result as JSON text."""
        raise NotImplementedError


class _Linear(_Aggregation):
    """Changes by what a row's change says, whatever else is in the group."""

    def add(self, head: Head, texts: Texts, diff: int) -> None:
        raise NotImplementedError


class _Count(_Linear):
    def add(self, head: Head, texts: Texts, diff: int) -> None:
        for column in self.columns:
            if texts[column] == NULL_TEXT:
                return
        head[self.place] += diff

    def text(self, head: Head) -> bytes:
        return b"%d" % head[self.place]


class _Total:
    """Reads the numbers of a column exactly, and shows their sum."""

    def __init__(self, aggregate: Aggregate) -> None:
        self._input, self._output, self._name = aggregate.columns[0].type, aggregate.output.type, aggregate.output.name
        assert self._input.numeric, f"the sum of {self._input.ddl} is not exact"
        self._factor = 10 ** (self._output.scale - self._input.scale) if self._output.numeric else 1

    def number(self, text: bytes) -> int:
        return scaled(text.decode(), self._input.scale) if self._input.kind == "decimal" else int(text)

    def text(self, count: int, total: int) -> bytes:
        if not count:
            return NULL_TEXT
        if not self._output.numeric:
            return repr(total / 10**self._input.scale).encode()
        result = fit(total * self._factor, *self._output.limits, self._name)
        return decimal_text(result, self._output.scale).encode()


class _Sum(_Linear):
    """Keeps the number of summands, and their sum."""

    fresh = (0, 0)

    def __init__(self, aggregate: Aggregate, names: tuple[str, ...], place: int) -> None:
        super().__init__(aggregate, names, place)
        self._total = _Total(aggregate)
        self._number = self._total.number
        self._column = self.columns[0]

    def add(self, head: Head, texts: Texts, diff: int) -> None:
        text = texts[self._column]
        if text != NULL_TEXT:
            place = self.place
            head[place] += diff
            head[place + 1] += diff * self._number(text)

    def text(self, head: Head) -> bytes:
        return self._total.text(head[self.place], head[self.place + 1])


class _Only(_Linear):
    """Keeps each text with its copies; at the end of a step there is one at most."""

    fresh = ({},)

    def __init__(self, aggregate: Aggregate, names: tuple[str, ...], place: int) -> None:
        super().__init__(aggregate, names, place)
        self._key = order_key(aggregate.columns[0].type)

    def add(self, head: Head, texts: Texts, diff: int) -> None:
        text = texts[self.columns[0]]
        if text != NULL_TEXT:
            head[self.place] = held = dict(head[self.place])
            _added(held, {text: diff})

    def text(self, head: Head) -> bytes:
        assert all(copies > 0 for copies in head[self.place].values()), f"{self.output.name}: {head[self.place]}"
        first, *others = sorted(head[self.place]) or [NULL_TEXT]
        for other in others:
            if self._key(other) != self._key(first):
                raise NotOnlyOne(self.output.name, first, other)
        return bytes(first)


class _Index:
    """The ordered entries of one aggregate of one group: those that the tick touches, the others on disk."""

    def __init__(self, transaction: Transaction, prefix: bytes) -> None:
        self.prefix = prefix
        self.steps: dict[int, dict[OrderKey, int]] = {}
        self.texts: dict[OrderKey, bytes] = {}
        self.found: dict[OrderKey, int] = {}  # the copies before the tick
        self.copies: dict[OrderKey, int] = {}
        self.order: list[OrderKey] = []  # as the aggregate needs it: a heap, or all that are alive
        self.least_on_disk: OrderKey | None = None  # of the untouched, if not in the heap yet: none comes before it
        self._transaction = transaction

    def add(self, step: int, entry: tuple[OrderKey, bytes], diff: int) -> None:
        key, text = entry
        diffs = self.steps.setdefault(step, {})
        diffs[key] = diffs.get(key, 0) + diff
        self.texts.setdefault(key, text)

    def start(self, key: OrderKey, value: bytes | None) -> None:
        """Takes what is stored of a touched entry; of equal values, the first text stays."""
        copies = 0
        if value is not None:
            self.texts[key], copies = _uncounted(value)
        self.found[key] = self.copies[key] = copies

    def settle(self, step: int) -> list[tuple[OrderKey, int]]:
        """Ends a step: which entries appear (1), and which vanish (-1)."""
        turned = []
        for key, diff in self.steps.get(step, {}).items():
            before = self.copies[key]
            self.copies[key] = after = before + diff
            assert after >= 0, f"{after} copies of {_excerpt(self.texts[key])} in a group"
            if (before > 0) != (after > 0):
                turned.append((key, 1 if after else -1))
        return turned

    def first_untouched(self) -> OrderKey | None:
        """The first of the other entries."""
        size = len(self.prefix)
        for key, value in self._transaction.walk(self.prefix):
            if (rest := key[size:]) not in self.found:
                self.texts[rest] = _uncounted(value)[0]
                return rest
        return None

    def read_all(self) -> None:
        """Takes the entries that the tick does not touch, too."""
        size = len(self.prefix)
        for key, value in self._transaction.scan(self.prefix):
            if (rest := key[size:]) not in self.found:
                self.texts[rest], self.copies[rest] = _uncounted(value)

    def keep(self, writes: _Writes) -> None:
        for key, before in self.found.items():
            after = self.copies[key]
            if after and after != before:
                writes.puts.append((self.prefix + key, _counted(self.texts[key], after)))
            elif before and not after:
                writes.removals.append(self.prefix + key)


class _Indexed(_Aggregation):
    """Needs to know how often a value is in the group, or which comes first."""

    def entry(self, texts: Texts) -> tuple[OrderKey, bytes] | None:
        """The row's entry in the index, and the text that it stands for."""
        raise NotImplementedError

    def open(self, head: Head, index: _Index) -> None:
        """Makes ready, before the first step."""

    def settle(self, head: Head, index: _Index, turned: list[tuple[OrderKey, int]]) -> None:
        """Brings the head up to date, after a step."""
        raise NotImplementedError


class _Distinct(_Indexed):
    """Keeps the number of distinct values, and their sum."""

    fresh = (0, 0)

    def __init__(self, aggregate: Aggregate, names: tuple[str, ...], place: int) -> None:
        super().__init__(aggregate, names, place)
        self._keys = [order_key(field.type) for field in aggregate.columns]
        self._total = _Total(aggregate) if aggregate.function == "sum" else None

    def entry(self, texts: Texts) -> tuple[OrderKey, bytes] | None:
        values = [texts[column] for column in self.columns]
        if NULL_TEXT in values:
            return None
        key = b"".join([encode(value) for encode, value in zip(self._keys, values, strict=True)])
        return key, values[0] if self._total else b""

    def settle(self, head: Head, index: _Index, turned: list[tuple[OrderKey, int]]) -> None:
        for key, sign in turned:
            head[self.place] += sign
            if self._total:
                head[self.place + 1] += sign * self._total.number(index.texts[key])

    def text(self, head: Head) -> bytes:
        count, total = head[self.place : self.place + 2]
        return self._total.text(count, total) if self._total else b"%d" % count


class _First(_Indexed):
    """Keeps the first of all entries, and looks for another one only when it goes."""

    fresh = (None,)

    def __init__(self, aggregate: Aggregate, names: tuple[str, ...], place: int) -> None:
        super().__init__(aggregate, names, place)
        ranked = aggregate.order[0].field if aggregate.order else aggregate.columns[0]
        self._ranked = names.index(ranked.name)
        self._descending = aggregate.function in ("max", "greatest_by")
        self._rank = order_key(ranked.type)
        self._value = order_key(aggregate.columns[0].type) if aggregate.order else None
        self._apart = not one_text_a_value(aggregate.columns[0].type)

    def entry(self, texts: Texts) -> tuple[OrderKey, bytes] | None:
        ranked, text = texts[self._ranked], texts[self.columns[0]]
        if ranked == NULL_TEXT:
            return None
        key = inverted(self._rank(ranked)) if self._descending else self._rank(ranked)
        if self._value:
            key += inverted(self._value(text))
        return key + text if self._apart else key, text

    def open(self, head: Head, index: _Index) -> None:
        index.order = [key for key, copies in index.copies.items() if copies]
        if head[self.place]:
            index.least_on_disk, text = head[self.place]
            if index.least_on_disk not in index.copies:
                index.texts[index.least_on_disk] = text
                index.order.append(index.least_on_disk)
        heapify(index.order)

    def settle(self, head: Head, index: _Index, turned: list[tuple[OrderKey, int]]) -> None:
        order = index.order
        for key, sign in turned:
            if sign > 0:
                heappush(order, key)
        self._drop_dead(index)
        if index.least_on_disk is not None and (not order or order[0] > index.least_on_disk):
            index.least_on_disk = None
            if (first := index.first_untouched()) is not None:
                heappush(order, first)
        head[self.place] = [order[0], index.texts[order[0]]] if order else None

    def _drop_dead(self, index: _Index) -> None:
        while index.order and not index.copies.get(index.order[0], 1):
            heappop(index.order)

    def text(self, head: Head) -> bytes:
        held = head[self.place]
        return bytes(held[1]) if held else NULL_TEXT


class _Listing(_Indexed):
    """An array of the values in order; during a tick its text is in the head."""

    fresh = (None,)

    def __init__(self, aggregate: Aggregate, names: tuple[str, ...], place: int) -> None:
        super().__init__(aggregate, names, place)
        field = aggregate.columns[0]
        self._once = aggregate.function == "set"
        self._key = ordering_key((*aggregate.order, Ordering(field)), names)
        self._own_key = order_key(field.type)
        self._apart = not one_text_a_value(field.type)
        self._repeats = self._apart or any(ordering.field != field for ordering in aggregate.order)

    def entry(self, texts: Texts) -> tuple[OrderKey, bytes] | None:
        text = texts[self.columns[0]]
        if text == NULL_TEXT:
            return None
        return self._key(texts) + text if self._apart else self._key(texts), text

    def open(self, head: Head, index: _Index) -> None:
        if head[0]:
            index.read_all()
        index.order = sorted([key for key, copies in index.copies.items() if copies])
        head[self.place] = self._shown(index)

    def settle(self, head: Head, index: _Index, turned: list[tuple[OrderKey, int]]) -> None:
        for key, sign in turned:
            if sign > 0:
                insort(index.order, key)
            else:
                del index.order[bisect_left(index.order, key)]
        head[self.place] = self._shown(index)

    def _shown(self, index: _Index) -> bytes | None:
        if not index.order:
            return None
        if not self._once:
            texts = [text for key in index.order for text in [index.texts[key]] * index.copies[key]]
        else:
            texts = [index.texts[key] for key in index.order]
            if self._repeats:
                first = {self._own_key(text): text for text in reversed(texts)}
                texts = [text for text in texts if first.pop(self._own_key(text), None) is not None]
        return b"[" + b",".join(texts) + b"]"

    def text(self, head: Head) -> bytes:
        return head[self.place] or b"[]"


def _aggregation(aggregate: Aggregate) -> type[_Aggregation]:
    match aggregate.function:
        case "count" | "sum" if aggregate.distinct:
            return _Distinct
        case "count":
            return _Count
        case "sum":
            return _Sum
        case "only":
            return _Only
        case "collect" | "set":
            return _Listing
        case _:
            return _First


def _columns(group: Group) -> tuple[str, ...]:
    """The names of all columns that a group reads, its keys first."""
    names = [field.name for field in group.keys]
    for aggregate in group.aggregates:
        names += [field.name for field in aggregate.columns]
        names += [ordering.field.name for ordering in aggregate.order]
        names += [aggregate.where] if aggregate.where is not None else []
    return tuple(dict.fromkeys(names))


def _packed(head: Head) -> bytes:
    """Numbers beyond 64 bits travel as text; nothing else in a head is text."""
    try:
        return _pack(head)
    except OverflowError:
        return _pack([str(one) if type(one) is int and not -(1 << 63) <= one < 1 << 63 else one for one in head])


def _unpacked(value: bytes) -> Head:
    return [int(one) if type(one) is str else one for one in _unpack(value)]


class GroupFold:
    """One row a group: aggregates change by what changes in the group."""

    def __init__(self, group: Group) -> None:
        names = _columns(group)
        self._texts = texts_of(names)
        self._keys = [_member(field.name) for field in group.keys]
        self._fresh: Head = [0, b""]
        self._parts: list[_Aggregation] = []
        for aggregate in group.aggregates:
            part = _aggregation(aggregate)(aggregate, names, len(self._fresh))
            self._parts.append(part)
            self._fresh += part.fresh
        self._linear = [part for part in self._parts if isinstance(part, _Linear)]
        self._indexed = [part for part in self._parts if isinstance(part, _Indexed)]

    def initial(self, transaction: Transaction, step: int) -> list[Delta]:
        """The row of the empty group, if there are no keys and no row has been emitted yet."""
        if self._keys or transaction.get(_HEAD) is not None:
            return []
        transaction.put(_HEAD, _packed(self._fresh))
        return [Delta(b"", step, 1, self._row(self._fresh))]

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        changes = _changes(inputs[0])
        heads = {_prefix(key) + _HEAD: key for key in changes}
        stored = sorted(heads)
        indexes = self._indexes(transaction, changes) if self._indexed else {}
        writes, outputs = _Writes(), list[Delta]()
        for place, value in zip(stored, transaction.getmulti(stored), strict=True):
            key = heads[place]
            head = self._fold_group(changes[key], value, indexes.get(key, []), outputs)
            if head[0] or not self._keys:
                for part in self._indexed:
                    if isinstance(part, _Listing):
                        head[part.place] = None
                writes.puts.append((place, _packed(head)))
            elif value is not None:
                writes.removals.append(place)
            for index in indexes.get(key, []):
                index.keep(writes)
        writes.apply(transaction)
        return outputs

    def _indexes(self, transaction: Transaction, changes: Changes) -> dict[KeyBytes, list[_Index]]:
        """For each group the entries that the tick touches, in the order of the aggregates."""
        indexes = {}
        touched: dict[bytes, tuple[_Index, OrderKey]] = {}
        for key, steps in changes.items():
            prefix = _prefix(key) + _ENTRY
            indexes[key] = [_Index(transaction, prefix + _BYTES[number]) for number in range(len(self._indexed))]
            self._enter(steps, indexes[key])
            for index in indexes[key]:
                touched.update({index.prefix + entry: (index, entry) for entry in index.texts})
        stored = sorted(touched)
        for place, value in zip(stored, transaction.getmulti(stored), strict=True):
            index, entry = touched[place]
            index.start(entry, value)
        return indexes

    def _enter(self, steps: dict[int, Copies], indexes: list[_Index]) -> None:
        for step, rows in steps.items():
            for row, diff in rows.items():
                texts = self._texts(row)
                for part, index in zip(self._indexed, indexes, strict=True):
                    if part.counts(texts) and (entry := part.entry(texts)) is not None:
                        index.add(step, entry, diff)

    def _fold_group(
        self, changes: dict[int, Copies], stored: bytes | None, indexes: list[_Index], outputs: list[Delta]
    ) -> Head:
        head = self._fresh.copy() if stored is None else _unpacked(stored)
        for part, index in zip(self._indexed, indexes, strict=True):
            part.open(head, index)
        before = None if stored is None else self._row(head)
        for step in changes if len(changes) == 1 else sorted(changes):
            self._step(head, changes[step])
            for part, index in zip(self._indexed, indexes, strict=True):
                part.settle(head, index, index.settle(step))
            self._check(head, changes[step])
            after = self._row(head) if head[0] or not self._keys else None
            if after != before:
                if before is not None:
                    outputs.append(Delta(b"", step, -1, before))
                if after is not None:
                    outputs.append(Delta(b"", step, 1, after))
                before = after
        return head

    def _step(self, head: Head, rows: Copies) -> None:
        if not head[0]:
            head[1] = self._key_members(rows)
        head[0] += sum(rows.values())
        for row, diff in rows.items() if self._linear else ():
            texts = self._texts(row)
            for part in self._linear:
                if part.where is None or part.counts(texts):
                    part.add(head, texts, diff)

    def _key_members(self, rows: Copies) -> bytes:
        """The key columns as the first row of the group has them: they stay so while there is one."""
        first = next((row for row, diff in rows.items() if diff > 0), None)
        if first is None or not self._keys:
            return b""
        return b",".join([name + text for name, text in zip(self._keys, self._texts(first), strict=False)])

    def _check(self, head: Head, rows: Copies) -> None:
        """What has no rows has nothing else either."""
        assert head[0] > 0 or (head[0] == 0 and head[2:] == self._fresh[2:]), (
            f"{head[0]} rows in the group of the row {_excerpt(next(iter(rows)))}"
        )

    def _row(self, head: Head) -> RowText:
        texts = [part.member + part.text(head) for part in self._parts]
        return b"{" + b",".join([head[1], *texts] if head[1] else texts) + b"}"


# --- the first rows of a group


class _Ranked(NamedTuple):
    """A row where it stands among others."""

    order: OrderKey
    row: RowText


_RankedChanges = dict[int, list[tuple[_Ranked, int]]]  # by step


class _Places:
    """Gives places to rows that come in order."""

    def __init__(self, top: Top) -> None:
        self._function = top.function
        self._order: OrderKey | None = None
        self._rows = self._rank = self._dense = 0

    def next(self, order: OrderKey, copies: int) -> int:
        """The place of a row, or of its first copy."""
        if order != self._order:
            self._order, self._rank, self._dense = order, self._rows + 1, self._dense + 1
        first = self._rows + 1
        self._rows += copies
        if self._function == "row_number":
            return first
        return self._rank if self._function == "rank" else self._dense


class TopFold:
    """The first rows of each group: only those are read that can be among them, and those that change."""

    def __init__(self, top: Top) -> None:
        names = tuple(dict.fromkeys(ordering.field.name for ordering in top.order))
        self._top = top
        self._texts = texts_of(names)
        self._order = ordering_key(top.order, names)
        self._member = None if top.position is None else _member(top.position)

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        changes = {key: self._ranked(steps) for key, steps in _changes(inputs[0]).items()}
        outputs: list[Delta] = []
        found = self._found(transaction, changes)
        writes = _Writes()
        for key in sorted(changes):
            before = found[key]
            copies = self._fold_group(transaction, _prefix(key) + _ENTRY, changes[key], before, outputs)
            for ranked, was in before.items():
                place, now = _prefix(key) + _ENTRY + ranked.order + ranked.row, copies[ranked]
                if now and now != was:
                    writes.puts.append((place, _PLACE.pack(len(ranked.order), now)))
                elif was and not now:
                    writes.removals.append(place)
        writes.apply(transaction)
        return outputs

    def _ranked(self, steps: dict[int, Copies]) -> _RankedChanges:
        return {
            step: [(_Ranked(self._order(self._texts(row)), row), diff) for row, diff in rows.items()]
            for step, rows in steps.items()
        }

    def _found(
        self, transaction: Transaction, changes: dict[KeyBytes, _RankedChanges]
    ) -> dict[KeyBytes, dict[_Ranked, int]]:
        """The copies of each row that changes, as they are before."""
        places: dict[bytes, tuple[KeyBytes, _Ranked]] = {}
        for key, steps in changes.items():
            prefix = _prefix(key) + _ENTRY
            for rows in steps.values():
                places.update({prefix + ranked.order + ranked.row: (key, ranked) for ranked, _ in rows})
        stored = sorted(places)
        found: dict[KeyBytes, dict[_Ranked, int]] = {key: {} for key in changes}
        for place, value in zip(stored, transaction.getmulti(stored), strict=True):
            key, ranked = places[place]
            found[key][ranked] = 0 if value is None else _PLACE.unpack(value)[1]
        return found

    def _fold_group(
        self,
        transaction: Transaction,
        prefix: bytes,
        changes: _RankedChanges,
        touched: dict[_Ranked, int],
        outputs: list[Delta],
    ) -> dict[_Ranked, int]:
        """Shows the group after each step; returns the copies of its rows at the end."""
        copies = {**touched, **dict(self._untouched(transaction, prefix, touched))}
        alive = sorted([ranked for ranked, number in copies.items() if number])
        before = self._shown(alive, copies)
        for step in sorted(changes):
            for ranked, diff in changes[step]:
                self._change(alive, copies, ranked, diff)
            after = self._shown(alive, copies)
            difference = dict(after)
            _added(difference, before, -1)
            outputs += _deltas(step, difference)
            before = after
        return copies

    def _change(self, alive: list[_Ranked], copies: dict[_Ranked, int], ranked: _Ranked, diff: int) -> None:
        before = copies[ranked]
        copies[ranked] = after = before + diff
        assert after >= 0, f"{after} copies of the row {_excerpt(ranked.row)}"
        if after and not before:
            insort(alive, ranked)
        elif before and not after:
            del alive[bisect_left(alive, ranked)]

    def _untouched(
        self, transaction: Transaction, prefix: bytes, touched: dict[_Ranked, int]
    ) -> Iterator[tuple[_Ranked, int]]:
        """The other rows that can be shown: those that would be, were all rows that change gone."""
        places, size = _Places(self._top), len(prefix)
        for key, value in transaction.walk(prefix):
            length, copies = _PLACE.unpack(value)
            ranked = _Ranked(key[size : size + length], key[size + length :])
            if ranked in touched:
                continue
            if self._top.limit is not None and places.next(ranked.order, copies) > self._top.limit:
                return
            yield ranked, copies

    def _shown(self, alive: list[_Ranked], copies: dict[_Ranked, int]) -> Copies:
        """The rows with a place within the limit."""
        places, shown, limit = _Places(self._top), Copies(), self._top.limit
        for ranked in alive:
            number = copies[ranked]
            place = places.next(ranked.order, number)
            if limit is not None and place > limit:
                break
            if self._top.function != "row_number":
                shown[self._placed(ranked.row, place)] = number
                continue
            for next_place in range(place, place + number if limit is None else min(place + number, limit + 1)):
                row = self._placed(ranked.row, next_place)
                shown[row] = shown.get(row, 0) + 1
        return shown

    def _placed(self, row: RowText, place: int) -> RowText:
        return row if self._member is None else _joined(row, b"{" + self._member + b"%d}" % place)


# --- relay and sink


class RelayFold:
    """Keeps nothing."""

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        steps: dict[int, Copies] = {}
        for _, step, diff, row in inputs[0]:
            rows = steps.setdefault(step, {})
            rows[row] = rows.get(row, 0) + diff
        return [delta for step in sorted(steps) for delta in _deltas(step, steps[step])]


class SinkFold:
    """Keeps each key's row."""

    def fold(self, transaction: Transaction, inputs: Sequence[Sequence[Delta]]) -> list[Delta]:
        changes = _changes(inputs[0])
        keys = sorted(changes)
        outputs: list[Delta] = []
        writes = _Writes()
        found = transaction.getmulti([_VIEW_ROW + key for key in keys])
        for key, stored in zip(keys, found, strict=True):
            row, steps = stored, changes[key]
            for step in steps if len(steps) == 1 else sorted(steps):
                before, row = row, _after(row, steps[step])
                if row != before:
                    if before is not None:
                        outputs.append(Delta(key, step, -1, before))
                    if row is not None:
                        outputs.append(Delta(key, step, 1, row))
            if row is None and stored is not None:
                writes.removals.append(_VIEW_ROW + key)
            elif row is not None and row != stored:
                writes.puts.append((_VIEW_ROW + key, row))
        writes.apply(transaction)
        return outputs


def _after(row: RowText | None, changes: Copies) -> RowText | None:
    """The one row of a key when a step has ended, or None."""
    copies = changes.copy()
    if row is not None:
        copies[row] = copies.get(row, 0) + 1
    left = None
    for one, number in copies.items():
        if number == 0:
            continue
        assert number > 0, f"{number} copies of the row {_excerpt(one)}"
        if left is not None or number > 1:
            raise TwoRowsOfOneKey(one if left is None else left, one)
        left = one
    return left
