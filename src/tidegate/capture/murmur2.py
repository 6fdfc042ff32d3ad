"""The partition of a key, as Kafka's own clients choose it: murmur2 over the raw key bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

_MIX = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF


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


@lru_cache(maxsize=100_000)
def _positive_hash(key: bytes) -> int:
    return murmur2(key) & 0x7FFFFFFF


def partition_for(key: bytes | None, partitions: int) -> int:
    """The partition that Kafka's default partitioner gives this key; 0 for a record without one."""
    if key is None or partitions == 1:
        return 0
    return _positive_hash(key) % partitions


def partitions_for(keys: Sequence[bytes | None], partitions: int) -> list[int]:
    """The same for many keys at once."""
    if partitions == 1:
        return [0] * len(keys)
    return [0 if key is None else _positive_hash(key) % partitions for key in keys]
