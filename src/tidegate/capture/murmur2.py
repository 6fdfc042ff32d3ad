"""The partition of a key, as Kafka's own clients choose it: murmur2 over the raw key bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

_MIX = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF
_MIX_COLUMN = pa.scalar(_MIX, pa.uint32())
_WORTHWHILE = 64  # keys, from which on a column beats a loop


def murmur2(key: bytes) -> int:
    """Kafka's 32 bit hash of these bytes, unsigned."""
    whole = len(key) & ~3
    mixed = (_SEED ^ len(key)) & _MASK
    for word in struct.unpack_from(f"<{whole // 4}I", key):
        spread = word * _MIX & _MASK
        mixed = mixed * _MIX & _MASK ^ ((spread ^ spread >> 24) * _MIX & _MASK)
    if rest := key[whole:]:
        mixed = (mixed ^ int.from_bytes(rest, "little")) * _MIX & _MASK
    mixed = (mixed ^ mixed >> 13) * _MIX & _MASK
    return mixed ^ mixed >> 15


def partition_for(key: bytes | None, partitions: int) -> int:
    """The partition that Kafka's default partitioner gives this key; 0 for a record without one."""
    if key is None or partitions == 1:
        return 0
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partitions_for(keys: Sequence[bytes | None], partitions: int) -> list[int]:
    """The same for many keys at once; those of one length are hashed together."""
    chosen = [0] * len(keys)
    if partitions == 1:
        return chosen
    by_length: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        if key is not None:
            by_length.setdefault(len(key), []).append(place)
    for length, places in by_length.items():
        together = [keys[place] or b"" for place in places]
        hashes = murmur2_of_many(together, length) if len(together) >= _WORTHWHILE else map(murmur2, together)
        for place, hashed in zip(places, hashes, strict=True):
            chosen[place] = (hashed & 0x7FFFFFFF) % partitions
    return chosen


def murmur2_of_many(keys: Sequence[bytes], length: int) -> list[int]:
    """The hashes of keys that all have this length: each step is one operation on a column of words."""
    text = b"".join(keys)
    mixed = pa.repeat(pa.scalar((_SEED ^ length) & _MASK, pa.uint32()), len(keys))
    for at in range(0, length & ~3, 4):
        word = pc.multiply(_word_column(text, length, at, 4), _MIX_COLUMN)
        word = pc.multiply(_fold(word, 24), _MIX_COLUMN)
        mixed = pc.bit_wise_xor(pc.multiply(mixed, _MIX_COLUMN), word)
    if rest := length & 3:
        mixed = pc.multiply(pc.bit_wise_xor(mixed, _word_column(text, length, length - rest, rest)), _MIX_COLUMN)
    mixed = pc.multiply(_fold(mixed, 13), _MIX_COLUMN)
    hashes: list[int] = _fold(mixed, 15).to_pylist()
    return hashes


def _fold(words: pa.Array, bits: int) -> pa.Array:
    return pc.bit_wise_xor(words, pc.shift_right(words, pa.scalar(bits, pa.uint32())))


def _word_column(text: bytes, length: int, at: int, width: int) -> pa.Array:
    """The little-endian words that stand at this byte of each key."""
    count = len(text) // length
    words = bytearray(4 * count)
    for byte in range(width):
        words[byte::4] = text[at + byte :: length]
    return pa.Array.from_buffers(pa.uint32(), count, [None, pa.py_buffer(words)])
