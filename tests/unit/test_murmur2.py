import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.capture.murmur2 import murmur2, murmur2_of_many, partition_for, partitions_for

# The vectors of Kafka's own UtilsTest, as signed 32 bit numbers.
KAFKA_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize(("key", "hashed"), KAFKA_VECTORS)
def test_a_key_hashes_as_in_kafka(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed & 0xFFFFFFFF


@pytest.mark.parametrize(("key", "hashed"), KAFKA_VECTORS)
def test_a_key_lies_in_the_partition_that_kafka_chooses(key: bytes, hashed: int) -> None:
    assert partition_for(key, 7) == (hashed & 0x7FFFFFFF) % 7
    assert partitions_for([key, None, key], 7) == [partition_for(key, 7), 0, partition_for(key, 7)]


def test_a_record_without_a_key_lies_in_the_first_partition() -> None:
    assert partition_for(None, 5) == 0
    assert partitions_for([b"x", None], 1) == [0, 0]


@given(length=st.integers(1, 30), seeds=st.lists(st.binary(min_size=30, max_size=30), min_size=1, max_size=80))
def test_many_keys_at_once_hash_as_each_alone(length: int, seeds: list[bytes]) -> None:
    keys = [seed[:length] for seed in seeds]
    assert murmur2_of_many(keys, length) == list(map(murmur2, keys))
    assert partitions_for(keys * 2, 7) == [partition_for(key, 7) for key in keys * 2]
