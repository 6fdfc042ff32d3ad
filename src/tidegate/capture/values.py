"""How a value of Debezium's JSON becomes a value of a cell. Pure; each function refuses what does not fit its type."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec

from tidegate.model.schema import INTEGERS, ColumnType, DecimalForm, TimestampUnit

UNAVAILABLE = "__debezium_unavailable_value"
Conversion = Callable[[Any], Any]

_NO_NUMBER = (b"null", f'"{UNAVAILABLE}"'.encode())
_UNAVAILABLE_BASE64 = base64.b64encode(UNAVAILABLE.encode()).decode()
_UNAVAILABLE_NUMBERS = list(UNAVAILABLE.encode())  # so an unchanged int[] or bigint[] comes
_UNAVAILABLE_ARRAYS = (
    [UNAVAILABLE],
    _UNAVAILABLE_NUMBERS,
    [msgspec.Raw(b"%d" % number) for number in _UNAVAILABLE_NUMBERS],
)
_NUMBER = re.compile(r"([+-]?)(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,9}))?")
_GREATEST_EXPONENT = 1_000
_LONGEST_UNSCALED_BYTES = 16  # of 38 digits
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_NOT_NUMBERS = {"nan": "NaN", "infinity": "Infinity", "-infinity": "-Infinity", "inf": "Infinity", "-inf": "-Infinity"}


class DoesNotFit(ValueError):
    """The value cannot be a value of the declared type; the message says why, and the remedy what helps best."""

    def __init__(self, why: str, remedy: str | None = None) -> None:
        super().__init__(why)
        self.remedy = remedy


def wire_type(column_type: ColumnType) -> Any:
    """The type as which msgspec reads the value out of Debezium's JSON."""
    kind = column_type.kind
    if kind in INTEGERS:
        bits = INTEGERS[kind]
        return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]
    if column_type.element:
        element = wire_type(column_type.element)
        return list[element if element is msgspec.Raw else element | None]  # type: ignore[misc]
    if kind == "decimal":
        return msgspec.Raw
    by_kind = {"boolean": bool, "string": str, "float": float | str, "double": float | str, "binary": str}
    return by_kind.get(kind, int | str)


def conversion(
    column_type: ColumnType, decimals: DecimalForm = "auto", unit: TimestampUnit = "auto"
) -> Conversion | None:
    """What to do with a value after it was read; None where it already is a cell's value."""
    kind = column_type.kind
    if column_type.element:
        return partial(_array, conversion(column_type.element, decimals, unit))
    if kind == "decimal":
        return partial(_decimal, column_type.precision, column_type.scale, decimals)
    if kind in _MOMENTS:
        return partial(_MOMENTS[kind], unit)
    return _CONVERSIONS.get(kind)


def _array(element: Conversion | None, values: list[Any]) -> list[Any]:
    """An array that was not sent becomes one of the placeholder alone, whatever its elements' type."""
    if values in _UNAVAILABLE_ARRAYS:
        return [UNAVAILABLE]
    return [None if value is None else element(value) for value in values] if element else values


# --- decimals


def _decimal(precision: int, scale: int, form: DecimalForm, raw: msgspec.Raw) -> msgspec.Raw:
    token = bytes(raw)
    return raw if token in _NO_NUMBER else _decimal_number(token, precision, scale, form)


@lru_cache(maxsize=1 << 16)
def _decimal_number(token: bytes, precision: int, scale: int, form: DecimalForm) -> msgspec.Raw:
    text = token.decode()
    if text.startswith('"'):
        text = msgspec.json.decode(token)
        if _is_base64(text, form):
            text = _unscaled(text, scale)
    return msgspec.Raw(_fixed_point(text, precision, scale).encode())


def _is_base64(text: str, form: DecimalForm) -> bool:
    if not text:
        raise DoesNotFit('"" is not a number')
    if form != "auto":
        return form == "base64"
    if text.lower() in _NOT_NUMBERS:
        return False
    is_number = bool(_NUMBER.fullmatch(text))
    if is_number and _BASE64.fullmatch(text):
        raise DoesNotFit(
            f'"{text}" may be a number or the base64 of one',
            remedy="Set `decimals: text` or `decimals: base64` for this table in tidegate.yaml, as the connector's"
            " decimal.handling.mode is `string` or `precise`.",
        )
    return not is_number and bool(_BASE64.fullmatch(text))


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DoesNotFit(f'"{text}" is not base64') from None


def _unscaled(text: str, scale: int) -> str:
    """The number that Debezium's base64 stands for, as text with its point."""
    raw = _base64(text)
    if len(raw) > _LONGEST_UNSCALED_BYTES:
        raise DoesNotFit(f'"{text}" is the base64 of a number of more than 38 digits')
    return f"{int.from_bytes(raw, 'big', signed=True)}e-{scale}"


def _fixed_point(text: str, precision: int, scale: int) -> str:
    """The number with exactly `scale` digits behind the point; refuses to round."""
    sign, whole, fraction = _digits(text)
    if fraction[scale:].strip("0"):
        raise DoesNotFit(f"{text} has more than {scale} digits behind the point")
    if len(whole) > precision - scale:
        raise DoesNotFit(f"{text} has more than {precision - scale} digits before the point")
    digits = fraction[:scale].ljust(scale, "0")
    number = (whole or "0") + ("." + digits if scale else "")
    return "-" + number if sign == "-" and number.strip("0.") else number


def _digits(text: str) -> tuple[str, str, str]:
    """A number's sign, and its digits before and behind the point."""
    match = _NUMBER.fullmatch(text)
    if not match:
        what = "cannot be stored in a decimal" if text.lower() in _NOT_NUMBERS else "is not a number"
        raise DoesNotFit(f'"{text}" {what}')
    sign, whole, fraction, exponent = match.groups(default="")
    if exponent:
        whole, fraction = _shifted(text, whole, fraction, int(exponent))
    return sign, whole.lstrip("0"), fraction


def _shifted(text: str, whole: str, fraction: str, exponent: int) -> tuple[str, str]:
    if abs(exponent) > _GREATEST_EXPONENT:
        raise DoesNotFit(f"{text} is out of range")
    if exponent > 0:
        fraction = fraction.ljust(exponent, "0")
        return whole + fraction[:exponent], fraction[exponent:]
    whole = whole.rjust(-exponent, "0")
    place = len(whole) + exponent
    return whole[:place], whole[place:] + fraction


# --- moments


@lru_cache(maxsize=1 << 14)
def _date(value: int | str) -> str:
    try:
        if isinstance(value, int):
            return date.fromordinal(_EPOCH_ORDINAL + value).isoformat()
        day = value.removesuffix("Z")
        if _DAY.fullmatch(day):
            return date.fromisoformat(day).isoformat()
    except (ValueError, OverflowError):
        pass
    raise DoesNotFit(f"{value!r} is not a date between the years 1 and 9999")


def _moment(unit: TimestampUnit, value: int | str) -> datetime:
    """ISO text, or so many of the unit since 1970."""
    try:
        if isinstance(value, int):
            return _EPOCH + timedelta(microseconds=_micros(unit, value))
        moment = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        raise DoesNotFit(f"{value!r} is not a timestamp between the years 1 and 9999") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _micros(unit: TimestampUnit, value: int) -> int:
    """A unit that nobody told is guessed by size: right for milliseconds up to 5138, and from 1973 on for others."""
    if unit == "auto":
        size = abs(value)
        unit = "millis" if size < 10**14 else "micros" if size < 10**17 else "nanos"
    return value * 1000 if unit == "millis" else value if unit == "micros" else value // 1000


def _timestamp(unit: TimestampUnit, value: int | str) -> str:
    return _moment(unit, value).isoformat().replace("+00:00", "Z")


def _timestamp_ntz(unit: TimestampUnit, value: int | str) -> str:
    return _moment(unit, value).replace(tzinfo=None).isoformat()


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


_CONVERSIONS: dict[str, Conversion] = {"date": _date, "float": _double, "double": _double, "binary": _binary}
_MOMENTS: dict[str, Callable[[TimestampUnit, int | str], str]] = {
    "timestamp": _timestamp,
    "timestamp_ntz": _timestamp_ntz,
}


def is_base64_number(value: object) -> bool:
    """Whether a decimal column's value is Debezium's base64 of the unscaled number, beyond doubt."""
    if not isinstance(value, str) or value.lower() in _NOT_NUMBERS:
        return False
    return bool(value) and bool(_BASE64.fullmatch(value)) and not _NUMBER.fullmatch(value)
