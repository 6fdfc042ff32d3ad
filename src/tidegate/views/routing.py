"""Routing: takes a producer's rows along an edge, in whatever task they are, up to the stage's key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from tidegate.model.cell import encode_json, raw_decoder
from tidegate.views.dataflow import Delta, Edge, EdgeStep, Evaluate, Pick, Present, Repeat, RowText, Unnest
from tidegate.views.order_keys import group_key

_UNMATCHED = (b"\xff", b"\xfe")  # what the key of a row without a partner begins with, by the stage's input
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_raw_elements = msgspec.json.Decoder(list[msgspec.Raw] | None).decode
_NULL = msgspec.Raw(b"null")


class Moved(NamedTuple):
    """So many copies of a row enter or leave, not yet under a key."""

    step: int
    diff: int
    row: RowText


Rows = Iterable[Moved]
Transform = Callable[[Rows], Rows]


@lru_cache(maxsize=1024)
def compiled(edge: Edge) -> CompiledEdge:
    return CompiledEdge(edge)


class CompiledEdge:
    """An edge's steps as functions: those before Spark evaluates, those after, and the key."""

    def __init__(self, edge: Edge) -> None:
        places = [place for place, step in enumerate(edge.steps) if isinstance(step, Evaluate)]
        assert len(places) <= 1
        self.edge = edge
        self.evaluate = edge.steps[places[0]] if places else None
        cut = places[0] if places else 0
        self._before = [_transform(step) for step in edge.steps[:cut]]
        self._after = [_transform(step) for step in edge.steps[cut + len(places) :]]
        self._key = group_key(edge.key)

    def before(self, rows: Rows) -> Rows:
        """What Spark evaluates; only where there is something to evaluate."""
        return _through(self._before, rows)

    def deltas(self, rows: Rows) -> Iterator[Delta]:
        """The rows, evaluated if need be, under the stage's key."""
        key_of, unmatched, mark = self._key, self.edge.unmatched, _UNMATCHED[min(self.edge.input, 1)]
        for step, diff, row in _through(self._after, rows):
            key = key_of(row)
            if key is None:
                if not unmatched:
                    continue
                key = mark + blake2b(row, digest_size=16).digest()
            yield Delta(key, step, diff, row)


def _through(transforms: Sequence[Transform], rows: Rows) -> Rows:
    for transform in transforms:
        rows = transform(rows)
    return rows


def _transform(step: EdgeStep) -> Transform:
    match step:
        case Pick():
            return _pick(step)
        case Present():
            return _present(step)
        case Unnest():
            return _unnest(step)
        case Repeat():
            return _repeat(step)
        case Evaluate():
            raise AssertionError("Spark evaluates")


def _pick(step: Pick) -> Transform:
    decode = raw_decoder(list(dict.fromkeys(old for _, old in step.columns)))
    places = {old: place for place, old in enumerate(dict.fromkeys(old for _, old in step.columns))}
    names = [encode_json(new).replace(b"%", b"%%") for new, _ in step.columns]
    form = b"{" + b",".join(name + b":%b" for name in names) + b"}"
    values = ", ".join(f"row.c{places[old]}" for _, old in step.columns)
    namespace: dict[str, Any] = {"form": form}
    exec(f"def render(row):\n    return form % ({values}{',' if values else ''})\n", namespace)
    render = namespace["render"]
    return lambda rows: (Moved(moved.step, moved.diff, render(decode(moved.row))) for moved in rows)


def _present(step: Present) -> Transform:
    decode = raw_decoder(step.columns)
    namespace: dict[str, Any] = {}
    tests = " and ".join(f"bytes(row.c{place}) != b'null'" for place in range(len(step.columns)))
    exec(f"def present(row):\n    return {tests}\n", namespace)
    present = namespace["present"]
    return lambda rows: (moved for moved in rows if present(decode(moved.row)))


def _unnest(step: Unnest) -> Transform:
    def elements(row: RowText) -> Iterator[RowText]:
        fields = _raw_fields(row)
        found = _raw_elements(fields.pop(step.array))
        for place, element in enumerate(found or ()):
            yield encode_json({**fields, **_placed(step, place), **_parts(step, element)})
        if not found and step.outer:
            yield encode_json({**fields, **_placed(step, None), **{name: None for name, _ in step.elements}})

    return lambda rows: (Moved(moved.step, moved.diff, element) for moved in rows for element in elements(moved.row))


def _placed(step: Unnest, place: int | None) -> dict[str, Any]:
    return {} if step.position is None else {step.position: place}


def _parts(step: Unnest, element: msgspec.Raw) -> dict[str, Any]:
    if all(part is None for _, part in step.elements):
        return {step.elements[0][0]: element}
    fields = _raw_fields(element) if bytes(element) != b"null" else {}
    return {name: fields.get(part or "", _NULL) for name, part in step.elements}


def _repeat(step: Repeat) -> Transform:
    def repeated(rows: Rows) -> Iterator[Moved]:
        for moved in rows:
            fields = _raw_fields(moved.row)
            count = int(bytes(fields.pop(step.count)))
            if count > 0:
                yield Moved(moved.step, moved.diff * count, encode_json(fields))

    return repeated
