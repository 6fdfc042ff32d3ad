"""How a value of Debezium's JSON becomes a value of a cell. Pure; each function refuses what does not fit its type."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec

from tidegate.model.schema import INTEGERS, ColumnType

UNAVAILABLE = "__debezium_unavailable_value"
Conversion = Callable[[Any], Any]

_NO_NUMBER = (b"null", f'"{UNAVAILABLE}"'.encode())
_UNAVAILABLE_BASE64 = base64.b64encode(UNAVAILABLE.encode()).decode()
_NUMBER = re.compile(r"([+-]?)0*(\d*)(?:\.(\d+))?$")
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}$")
_NOT_NUMBERS = {"nan": "NaN", "infinity": "Infinity", "-infinity": "-Infinity", "inf": "Infinity", "-inf": "-Infinity"}


class DoesNotFit(ValueError):
    """The value cannot be a value of the declared type; the message says why."""


def wire_type(column_type: ColumnType) -> Any:
    """The type as which msgspec reads the value out of Debezium's JSON."""
    kind = column_type.kind
    if kind in INTEGERS:
        bits = INTEGERS[kind]
        return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]
    if column_type.element:
        return list[wire_type(column_type.element) | None]  # type: ignore[misc]
    if kind == "decimal":
        return msgspec.Raw
    by_kind = {"boolean": bool, "string": str, "float": float | str, "double": float | str, "binary": str}
    return by_kind.get(kind, int | str)


def conversion(column_type: ColumnType) -> Conversion | None:
    """What to do with a value after it was read; None where it already is a cell's value."""
    if column_type.element:
        element = conversion(column_type.element)
        return partial(_each, element) if element else None
    if column_type.kind == "decimal":
        return partial(_decimal, column_type.precision, column_type.scale)
    return _CONVERSIONS.get(column_type.kind)


def _each(element: Conversion, values: list[Any]) -> list[Any]:
    return [None if value is None else element(value) for value in values]


def _decimal(precision: int, scale: int, raw: msgspec.Raw) -> msgspec.Raw:
    token = bytes(raw)
    return raw if token in _NO_NUMBER else _decimal_number(token, precision, scale)


@lru_cache(maxsize=1 << 16)
def _decimal_number(token: bytes, precision: int, scale: int) -> msgspec.Raw:
    text = token.decode()
    quoted = text.startswith('"')
    body = text[1:-1] if quoted else text
    if quoted and _looks_like_base64(body, scale):
        body = str(Decimal(int.from_bytes(_base64(body), "big", signed=True)).scaleb(-scale))
    return msgspec.Raw(_fixed_point(body, precision, scale).encode())


def _looks_like_base64(text: str, scale: int) -> bool:
    if not _NUMBER.match(text) or text in ("", "+", "-"):
        return True
    if scale and "." not in text and len(text) % 4 == 0 and text[0] != "-":
        raise DoesNotFit(
            f'"{text}" may be a number or the base64 of one: set decimal.handling.mode=string in Debezium'
            " and declare the scale that the database has"
        )
    return False


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DoesNotFit(f'"{text}" is neither a number nor base64') from None


def _fixed_point(text: str, precision: int, scale: int) -> str:
    """The number with exactly `scale` digits behind the point; refuses to round."""
    match = _NUMBER.match(text) or _NUMBER.match(_plain(text))
    assert match
    sign, whole, fraction = match.group(1), match.group(2), match.group(3) or ""
    if len(fraction) > scale and fraction[scale:].strip("0"):
        raise DoesNotFit(f"{text} has more than {scale} digits behind the point")
    if len(whole) > precision - scale:
        raise DoesNotFit(f"{text} has more than {precision - scale} digits before the point")
    digits = fraction[:scale].ljust(scale, "0")
    number = (whole or "0") + ("." + digits if scale else "")
    return "-" + number if sign == "-" and number.strip("0.") else number


def _plain(text: str) -> str:
    try:
        number = Decimal(text)
    except ArithmeticError:
        raise DoesNotFit(f'"{text}" is not a number') from None
    if not number.is_finite():
        raise DoesNotFit(f"{text} cannot be stored in a decimal")
    return f"{number:f}"


@lru_cache(maxsize=1 << 14)
def _date(value: int | str) -> str:
    try:
        if isinstance(value, int):
            return date.fromordinal(_EPOCH_ORDINAL + value).isoformat()
        day = value.removesuffix("Z")
        if _DAY.match(day):
            return date.fromisoformat(day).isoformat()
    except (ValueError, OverflowError):
        pass
    raise DoesNotFit(f"{value!r} is not a date between the years 1 and 9999")


def _moment(value: int | str) -> datetime:
    """Milli-, micro- or nanoseconds since 1970 by size (good for 1973 to 5138), or ISO text."""
    try:
        if isinstance(value, int):
            size = abs(value)
            micros = value * 1000 if size < 10**14 else value if size < 10**17 else value // 1000
            return _EPOCH + timedelta(microseconds=micros)
        moment = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        raise DoesNotFit(f"{value!r} is not a timestamp between the years 1 and 9999") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _timestamp(value: int | str) -> str:
    return _moment(value).isoformat().replace("+00:00", "Z")


def _timestamp_ntz(value: int | str) -> str:
    return _moment(value).replace(tzinfo=None).isoformat()


def _double(value: float | str) -> float | str:
    if isinstance(value, float):
        return value
    if value.lower() not in _NOT_NUMBERS:
        raise DoesNotFit(f"{value!r} is not a number")
    return _NOT_NUMBERS[value.lower()]


def _binary(value: str) -> str:
    if value == _UNAVAILABLE_BASE64:
        return UNAVAILABLE
    return base64.b64encode(_base64(value)).decode()


_CONVERSIONS: dict[str, Conversion] = {
    "date": _date,
    "timestamp": _timestamp,
    "timestamp_ntz": _timestamp_ntz,
    "float": _double,
    "double": _double,
    "binary": _binary,
}


def is_base64_number(value: object) -> bool:
    """Whether a decimal column's value is Debezium's base64 of the unscaled number, beyond doubt."""
    return isinstance(value, str) and bool(value) and not _NUMBER.match(value) and value.lower() not in _NOT_NUMBERS
