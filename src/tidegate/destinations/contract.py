"""What every destination is: its capabilities as data, its calls, and how its rows are compared."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar, Protocol

import msgspec

from tidegate.errors import FixConfiguration
from tidegate.protocol.messages import (
    Applied,
    Apply,
    Described,
    FieldSpec,
    MaterializationSpec,
    Open,
    RuntimeCheckpoint,
    Spec,
    Validate,
    Validated,
)
from tidegate.protocol.session import Answer, Transactor

__all__ = [
    "Answer",
    "Capabilities",
    "Destination",
    "Nothing",
    "Pattern",
    "Row",
    "Snapshot",
    "Transactor",
    "canonical_value",
    "read_config",
]

Row = tuple[tuple[Any, ...], tuple[Any, ...]]  # the key and the values, in cell form


class Pattern(Enum):
    """Who holds the truth, as PROTOCOL numbers it."""

    DESTINATION_AUTHORITATIVE = 1
    RECOVERY_LOG_PLAIN_STORE = 2
    RECOVERY_LOG_IDEMPOTENT_APPLY = 3
    PUSH_ONLY = 4


@dataclass(frozen=True)
class Capabilities:
    """What a reader and the runtime may rely on; the suite, the documents and the command line are driven by it."""

    pattern: Pattern
    atomic_rounds: bool
    atomic_across_splits: bool
    standard_updates: bool
    delta_updates: bool
    promise: str


class Snapshot(Protocol):
    """One consistent state of a materialization, as a reader of the destination sees it."""

    @property
    def checkpoint(self) -> RuntimeCheckpoint | None:
        """Up to where it is committed; None: nothing was ever committed."""

    def rows(self, binding: int = 0) -> Iterator[Row]:
        """All rows of a binding, in no order, every value canonical."""


class Nothing:
    """What a reader sees of a materialization that has never been opened there."""

    checkpoint: ClassVar[None] = None

    def rows(self, binding: int = 0) -> Iterator[Row]:
        return iter(())


class Destination(Protocol):
    """One kind of outside system. It keeps nothing itself: the configuration comes with each message."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    config: ClassVar[type[msgspec.Struct]]  # its settings, which are checked before anything starts

    def spec(self, message: Spec) -> Described:
        """The JSON Schemas of its configuration and of a binding's resource."""

    def validate(self, message: Validate) -> Validated:
        """What it would do with each field; creates nothing."""

    def apply(self, message: Apply) -> Applied:
        """Creates and alters what the materialization needs; idempotent."""

    def open(self, message: Open) -> Transactor:
        """Takes the fence of the key range."""

    def places(self, materialization: MaterializationSpec) -> tuple[tuple[str, ...], ...]:
        """Where the rows of each binding go; two that are equal are one and the same. Asks nobody."""

    def snapshot(self, materialization: MaterializationSpec) -> AbstractContextManager[Snapshot]:
        """Rows and checkpoint of one moment, for comparing."""


def canonical_value(field: FieldSpec, value: Any) -> Any:
    """The one form of equal values: apply it to both sides before comparing cells with a destination's rows."""
    if value is None:
        return None
    if field.type == "json" or field.type.startswith(("array", "struct", "map")):
        return _canonical_json(value)
    if field.type.startswith("decimal"):
        return Decimal(value)
    canonical = {"timestamp": _timestamp, "timestamp_ntz": _timestamp_ntz, "date": _date}.get(field.type)
    if canonical is not None:
        return canonical(value)
    return _float(value) if field.type in ("float", "double") else value


def _canonical_json(text: str) -> str:
    document = json.loads(text, parse_float=_plain_number)
    return _sorted_json(document).decode()


_sorted_json = msgspec.json.Encoder(decimal_format="number", order="sorted").encode


def _plain_number(text: str) -> int | Decimal:
    """Numbers that are equal become the same text: 1.50 and 15e-1 are 1.5, 2.0 is 2."""
    number = Decimal(text)
    whole = number.to_integral_value()
    if number == whole:
        return int(whole)
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    while digits[-1] == 0:  # normalize() would round to the context's precision
        digits, exponent = digits[:-1], exponent + 1
    return Decimal((sign, digits, exponent))


def _timestamp(text: str) -> str:
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _timestamp_ntz(text: str) -> str:
    return datetime.fromisoformat(text).replace(tzinfo=None).isoformat()


def _date(text: str) -> str:
    return date.fromisoformat(text).isoformat()


def _float(value: float | str) -> float | str:
    number = float(value)
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    return number


_WORDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}


def read_config(kind: type[Any], given: dict[str, Any], whose: str) -> Any:
    """The typed configuration, or which setting is wrong."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    remedy = f"Known here: {', '.join(fields)}."
    for name in given:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f'Did you mean "{close[0]}"? ' if close else ""
            raise FixConfiguration(f'{whose}: unknown setting "{name}"', remedy=hint + remedy)
    for name, field in fields.items():
        if field.required and name not in given:
            raise FixConfiguration(f'{whose}: "{name}" is missing', remedy=f"Add `{name}: …` here. {remedy}")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise FixConfiguration(f"{whose}: {_in_plain_words(str(error))}", remedy=remedy) from None


def _in_plain_words(error: str) -> str:
    found = re.fullmatch(r"Expected `(\w+).*`, got .* - at `\$\.(\w+)`", error)
    return f'"{found[2]}" has to be {_WORDS.get(found[1], found[1])}' if found else error
