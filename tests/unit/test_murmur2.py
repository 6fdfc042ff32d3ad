import pytest

from tidegate.capture.murmur2 import murmur2, partition_for, partitions_for

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
