"""Order keys: a column's JSON text as bytes that order as Spark orders its values, the same for what SQL calls equal.

Each starts with 0 for NULL or 1 for a value, and none is the beginning of another one of its type: keys of several
columns may be joined, and a descending column's bytes inverted.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache

import msgspec
from msgspec.structs import astuple

from tidegate.model.cell import raw_decoder
from tidegate.model.key import KeyBytes, encode_integer, encode_value
from tidegate.model.schema import INTEGERS
from tidegate.views.dataflow import KeyColumn, Ordering, RowText
from tidegate.views.expressions import ValueType

OrderKey = bytes
Texts = tuple[bytes, ...]  # the JSON texts of some columns of a row
Encode = Callable[[bytes], OrderKey]

NULL_TEXT = b"null"
_NULL, _NULL_AT_THE_END, _VALUE = b"\x00", b"\x02", b"\x01"
_END, _MORE = b"\x00", b"\x01"  # of an array
_INVERTED = bytes(range(255, -1, -1))
_DIGITS = bytes.maketrans(b"0123456789", bytes(range(1, 11)))
_MAGNITUDE, _MAGNITUDE_OFFSET = struct.Struct(">i"), 1 << 20
_SINGLE = struct.Struct(">f")
_EXTENDED_YEAR = re.compile(r"([+-]?)(\d+)(.*)", re.DOTALL)
_YEARS = 1_000_000
_string = msgspec.json.Decoder(str).decode
_number = msgspec.json.Decoder(float | str).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode

# Of an SQL-equal value of these there may be several texts (0.0 and -0.0, a fraction of zeros or none).
_SEVERAL_TEXTS = frozenset(("float", "double", "timestamp", "timestamp_ntz"))


def inverted(key: OrderKey) -> OrderKey:
    """The key that orders the other way round."""
    return key.translate(_INVERTED)


def one_text_a_value(type_: ValueType) -> bool:
    """Whether equal values of the type always have the same JSON text."""
    inner = [*(field for _, field in type_.fields), *([type_.element] if type_.element else [])]
    return type_.kind not in _SEVERAL_TEXTS and all(map(one_text_a_value, inner))


@lru_cache(maxsize=1024)
def texts_of(columns: tuple[str, ...]) -> Callable[[RowText], Texts]:
    """Reads the JSON texts of a row's columns, in the order given, without looking into them; absent is NULL."""
    decode = raw_decoder(columns)
    if not columns:
        return lambda row: ()
    if len(columns) == 1:
        return lambda row: (bytes(decode(row).c0),)
    if len(columns) == 2:
        return lambda row: (bytes((texts := decode(row)).c0), bytes(texts.c1))
    return lambda row: tuple(map(bytes, astuple(decode(row))))


@lru_cache(maxsize=1024)
def order_key(type_: ValueType) -> Encode:
    """The function from a JSON text of the type to its order key."""
    encode = _value_key(type_)
    return lambda text: _NULL if text == NULL_TEXT else encode(text)


def _value_key(type_: ValueType) -> Encode:
    """The same for texts that are not NULL."""
    if type_.kind in INTEGERS:
        return _integer_key
    if type_.kind == "array":
        return _array_key(type_)
    return _struct_key(type_) if type_.kind == "struct" else _SCALAR_KEYS[type_.kind]


def _integer_key(text: bytes) -> OrderKey:
    return encode_integer(int(text))


def _boolean_key(text: bytes) -> OrderKey:
    return encode_integer(text == b"true")


def _decimal_key(text: bytes) -> OrderKey:
    """What `encode_value` gives for the same decimal, several times as fast."""
    if b"E" in text or b"e" in text:
        return encode_value(Decimal(text.decode()))
    whole, _, fraction = text.lstrip(b"-").partition(b".")
    digits = (whole + fraction).lstrip(b"0")
    if not digits:
        return b"\x01\x01"
    size = _MAGNITUDE.pack(len(digits) - len(fraction) + _MAGNITUDE_OFFSET)
    body = size + digits.rstrip(b"0").translate(_DIGITS) + b"\x00"
    return b"\x01\x00" + inverted(body) if text[:1] == b"-" else b"\x01\x02" + body


def _double_key(text: bytes) -> OrderKey:
    return encode_value(float(_number(text)))


def _float_key(text: bytes) -> OrderKey:
    """Of 32 bits, however many digits are written."""
    single: float = _SINGLE.unpack(_SINGLE.pack(float(_number(text))))[0]
    return encode_value(single)


def _string_key(text: bytes) -> OrderKey:
    plain = text[1:-1] if b"\\" not in text else _string(text).encode()
    return b"\x01" + plain.replace(b"\x00", b"\x00\xff") + b"\x00\x00"


def _binary_key(text: bytes) -> OrderKey:
    return encode_value(b64decode(_string(text)))


def _date_key(text: bytes) -> OrderKey:
    return encode_value(_ordered_year(text[1:-1].decode()))


def _timestamp_key(text: bytes) -> OrderKey:
    moment = text[1:-1].decode().removesuffix("Z").replace(" ", "T")
    return encode_value(_ordered_year(moment.rstrip("0").removesuffix(".") if "." in moment else moment))


def _ordered_year(text: str) -> str:
    """A date as text that orders as the days do, also beyond the years with four digits."""
    if text[4:5] == "-" and text[:4].isdigit():
        return text
    found = _EXTENDED_YEAR.fullmatch(text)
    assert found, text
    sign, year, rest = found.groups()
    return f"-{_YEARS - int(year):06}{rest}" if sign == "-" else f":{int(year):06}{rest}"


def _array_key(type_: ValueType) -> Encode:
    assert type_.element, type_
    encode = order_key(type_.element)
    return lambda text: _VALUE + b"".join([_MORE + encode(bytes(one)) for one in _elements(text)]) + _END


def _struct_key(type_: ValueType) -> Encode:
    texts = texts_of(tuple(name for name, _ in type_.fields))
    encoders = [order_key(field) for _, field in type_.fields]
    return lambda text: _VALUE + b"".join([encode(one) for encode, one in zip(encoders, texts(text), strict=True)])


_SCALAR_KEYS: dict[str, Encode] = {
    "boolean": _boolean_key,
    "decimal": _decimal_key,
    "double": _double_key,
    "float": _float_key,
    "string": _string_key,
    "binary": _binary_key,
    "date": _date_key,
    "timestamp": _timestamp_key,
    "timestamp_ntz": _timestamp_key,
    "void": lambda text: _NULL,
}


def ordering_key(orderings: Sequence[Ordering], columns: Sequence[str]) -> Callable[[Texts], OrderKey]:
    """The function from the texts of a row's columns to the bytes by which ORDER BY orders it."""
    parts = [(columns.index(ordering.field.name), _ordering_part(ordering)) for ordering in orderings]
    if len(parts) == 1:
        place, encode = parts[0]
        return lambda texts: encode(texts[place])
    return lambda texts: b"".join([encode(texts[place]) for place, encode in parts])


def _ordering_part(ordering: Ordering) -> Encode:
    """An inverted NULL would come last, and one that is not comes first."""
    encode = order_key(ordering.field.type)
    if ordering.descending:
        null = inverted(_NULL) if ordering.nulls_last else _NULL
        return lambda text: null if text == NULL_TEXT else inverted(encode(text))
    if ordering.nulls_last:
        return lambda text: _NULL_AT_THE_END if text == NULL_TEXT else encode(text)
    return encode


def group_key(key_columns: Sequence[KeyColumn]) -> Callable[[RowText], KeyBytes | None]:
    """The function from a row to its key in a stage; None if it has no partner there."""
    texts = texts_of(tuple(column.field.name for column in key_columns))
    if len(key_columns) == 1:
        return _single_key(key_columns[0], texts)
    encoders = [order_key(column.field.type) for column in key_columns]
    refusing = [place for place, column in enumerate(key_columns) if not column.null_matches]

    def key(row: RowText) -> KeyBytes | None:
        found = texts(row)
        for place in refusing:
            if found[place] == NULL_TEXT:
                return None
        return b"".join([encode(text) for encode, text in zip(encoders, found, strict=True)])

    return key


def _single_key(column: KeyColumn, texts: Callable[[RowText], Texts]) -> Callable[[RowText], KeyBytes | None]:
    encode = _value_key(column.field.type)
    null = _NULL if column.null_matches else None

    def key(row: RowText) -> KeyBytes | None:
        text = texts(row)[0]
        return null if text == NULL_TEXT else encode(text)

    return key
