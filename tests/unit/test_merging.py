"""Which files are merged next: whole ticks, oldest first, few files in the long run, none too large."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.catalog.contract import HistoryFile
from tidegate.pipeline.merging import EVERY_TICKS, FAN_IN, LARGEST_BYTES, next_merge


def file(tick: int, partition: int, size_bytes: int, merges: int = 0, last: int | None = None) -> HistoryFile:
    return HistoryFile("orders", f"{tick}-{merges}-{partition}", tick, last or tick, 1, size_bytes, merges)


def merged(files: Sequence[HistoryFile], chosen: Sequence[HistoryFile]) -> list[HistoryFile]:
    size_bytes, rows = sum(one.size_bytes for one in chosen), sum(one.rows for one in chosen)
    first, last, merges = chosen[0].first, chosen[-1].last, chosen[0].merges + 1
    one = HistoryFile("orders", f"{first}-{last}-merged-{merges}", first, last, rows, size_bytes, merges)
    gone = {id(other) for other in chosen}
    return [*(other for other in files if id(other) not in gone), one]


@pytest.mark.parametrize("partitions", [1, 4])
def test_however_many_ticks_there_were_few_files_are_left(partitions: int) -> None:
    """A day of half-second ticks has 172,800; each file lies in the third level or higher after 32,768."""
    files: list[HistoryFile] = []
    for tick in range(36_000):
        files += [file(tick, partition, 3_000) for partition in range(partitions)]
        if tick % EVERY_TICKS == 0:
            while chosen := next_merge(files, FAN_IN):
                files = merged(files, chosen)
            assert len(files) <= partitions * (FAN_IN + EVERY_TICKS) + 3 * FAN_IN
    assert sum(one.rows for one in files) == 36_000 * partitions


@given(
    st.lists(
        st.lists(st.sampled_from([1_000, LARGEST_BYTES // 9, LARGEST_BYTES // 3]), min_size=1, max_size=3),
        max_size=40,
    )
)
def test_a_merge_takes_whole_ticks_and_makes_no_file_that_is_too_large(ticks: list[list[int]]) -> None:
    files = [file(tick, place, size) for tick, sizes in enumerate(ticks) for place, size in enumerate(sizes)]
    rows = len(files)
    while chosen := next_merge(files, 3):
        assert len({one.merges for one in chosen}) == 1
        assert len({one.first for one in chosen}) > 1
        firsts = {one.first for one in chosen}
        assert {one for one in files if one.first in firsts and one.merges == chosen[0].merges} == set(chosen)
        assert sum(one.size_bytes for one in chosen) <= LARGEST_BYTES
        files = merged(files, chosen)
    assert sum(one.rows for one in files) == rows
