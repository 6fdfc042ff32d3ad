"""Which files are merged next: whole ticks, oldest first, few files in the long run, none too large."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.catalog.contract import HistoryFile
from tidegate.pipeline.merging import EVERY_TICKS, FAN_IN, LARGEST_BYTES, LARGEST_UNPACKED_BYTES, next_merge


def file(tick: int, partition: int, size_bytes: int, merges: int = 0, last: int | None = None) -> HistoryFile:
    return HistoryFile("orders", f"{tick}-{merges}-{partition}", tick, last or tick, 1, size_bytes, merges)


def merged(files: Sequence[HistoryFile], chosen: Sequence[HistoryFile]) -> list[HistoryFile]:
    size_bytes, rows = sum(one.size_bytes for one in chosen), sum(one.rows for one in chosen)
    first, last, merges = chosen[0].first, chosen[-1].last, chosen[0].merges + 1
    one = HistoryFile("orders", f"{first}-{last}-merged-{merges}", first, last, rows, size_bytes, merges)
    gone = {id(other) for other in chosen}
    return [*(other for other in files if id(other) not in gone), one]


def tenfold(one: HistoryFile) -> int:
    return 10 * one.size_bytes


@pytest.mark.parametrize("partitions", [1, 4])
def test_however_many_ticks_there_were_few_files_are_left(partitions: int) -> None:
    """A day of half-second ticks has 172,800; each file lies in the third level or higher after 32,768."""
    files: list[HistoryFile] = []
    for tick in range(36_000):
        files += [file(tick, partition, 3_000) for partition in range(partitions)]
        if tick % EVERY_TICKS == 0:
            while chosen := next_merge(files, tenfold, FAN_IN):
                files = merged(files, chosen)
            assert len(files) <= partitions * (FAN_IN + EVERY_TICKS) + 3 * FAN_IN
    assert sum(one.rows for one in files) == 36_000 * partitions


@given(
    st.lists(
        st.lists(st.sampled_from([1_000, LARGEST_BYTES // 9, LARGEST_BYTES // 3]), min_size=1, max_size=3),
        max_size=40,
    ),
    st.sampled_from([1, 3, 40]),
)
def test_a_merge_takes_whole_ticks_and_makes_no_file_that_is_too_large(ticks: list[list[int]], ratio: int) -> None:
    files = [file(tick, place, size) for tick, sizes in enumerate(ticks) for place, size in enumerate(sizes)]
    rows = len(files)
    while chosen := next_merge(files, lambda one: ratio * one.size_bytes, 3):
        assert len({one.merges for one in chosen}) == 1
        assert len({one.first for one in chosen}) > 1
        firsts = {one.first for one in chosen}
        assert {one for one in files if one.first in firsts and one.merges == chosen[0].merges} == set(chosen)
        size_bytes = sum(one.size_bytes for one in chosen)
        assert size_bytes <= LARGEST_BYTES
        assert ratio * size_bytes <= LARGEST_UNPACKED_BYTES
        files = merged(files, chosen)
    assert sum(one.rows for one in files) == rows


def test_small_files_that_are_large_unpacked_are_left_as_they_are() -> None:
    files = [file(tick, 0, 1_000) for tick in range(2 * FAN_IN)]
    assert next_merge(files, lambda _: LARGEST_UNPACKED_BYTES // 2, FAN_IN) == []
    assert next_merge(files, lambda _: LARGEST_UNPACKED_BYTES // 5, FAN_IN) == files[:5]
