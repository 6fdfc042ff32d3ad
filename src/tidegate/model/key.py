"""Keys as bytes: injective, and ordered as the values are (NULL first)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal

KeyBytes = bytes
KeyEncoder = Callable[[Sequence[object]], KeyBytes]

_INT = struct.Struct(">BQ")
_FLOAT = struct.Struct(">d")
_NULL, _VALUE = 0, 1
_OFFSET = 1 << 63


def _text(raw: bytes) -> bytes:
    return b"\x01" + raw.replace(b"\x00", b"\x00\xff") + b"\x00\x00"


def _float(value: float) -> bytes:
    bits = struct.unpack(">Q", _FLOAT.pack(value + 0.0))[0]
    return _INT.pack(_VALUE, bits ^ (_OFFSET if bits < _OFFSET else (1 << 64) - 1))


def _decimal(value: Decimal) -> bytes:
    if not value:
        return b"\x01\x01"
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    while digits[-1] == 0:  # normalize() would round to the context's precision
        digits, exponent = digits[:-1], exponent + 1
    body = struct.pack(">i", len(digits) + exponent + (1 << 20)) + bytes(digit + 1 for digit in digits) + b"\x00"
    return b"\x01\x00" + bytes(255 - byte for byte in body) if sign else b"\x01\x02" + body


def encode_value(value: object) -> bytes:
    """One column of a key. Never a prefix of another value of the same column type."""
    if value is None:
        return b"\x00"
    if isinstance(value, int):  # and bool
        return _INT.pack(_VALUE, value + _OFFSET)
    if isinstance(value, str):
        return _text(value.encode())
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, datetime):
        return _text(value.isoformat().encode())
    assert isinstance(value, date), type(value)
    return _INT.pack(_VALUE, value.toordinal() + _OFFSET)


def encode_integer(value: int) -> KeyBytes:
    """A key of one integer column."""
    return _INT.pack(_VALUE, value + _OFFSET)


def encode_key(values: Sequence[object]) -> KeyBytes:
    """All columns of a key, one after another."""
    if len(values) == 1 and type(values[0]) is int:
        return encode_integer(values[0])
    return b"".join(map(encode_value, values))


def key_hash(key: KeyBytes) -> int:
    """32 bits: decides a key's partition and its split."""
    return zlib.crc32(key)
