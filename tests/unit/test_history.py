"""History files: read whole or a piece at a time, whatever their size, and summed up to the rows that are current."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidegate.collections import history
from tidegate.collections.history import RowSums, Update
from tidegate.errors import FixConfiguration
from tidegate.pipeline import tasks

CHAIN = [
    Update(b"a", 0, 1, b'{"v":1}'),
    Update(b"b", 0, 1, b'{"v":1}'),
    Update(b"a", 1, -1, b'{"v":1}'),
    Update(b"a", 1, 1, b'{"v":2}'),
    Update(b"b", 2, -1, b'{"v":1}'),
    Update(b"a", 3, -1, b'{"v":2}'),
    Update(b"a", 3, 1, b'{"v":1}'),
]


def file_of(folder: Path, tick: int, *updates: Update) -> str:
    path = folder / f"{tick}.parquet"
    history.write(path, history.as_table(updates, tick))
    return str(path)


def current(*updates: Update) -> dict[bytes, bytes]:
    sums = RowSums()
    sums.add((one.key, one.cell, one.diff) for one in updates)
    return sums.current("orders")


# --- reading


def test_what_is_read_may_be_larger_than_two_gib_and_what_is_written_stays_as_it_was(tmp_path: Path) -> None:
    path = file_of(tmp_path, 3, *CHAIN)
    table = history.read([path], -1, 3)
    assert (table.schema.field("row").type, table.schema.field("_key").type) == (pa.large_string(), pa.large_binary())
    assert {update for _, update in history.updates(table)} == set(CHAIN)
    assert history.read([], -1, 3).schema == table.schema
    ((merged, rows, _),) = tasks.merge([(str(tmp_path / "merged.parquet"), (path,))])
    assert rows == len(CHAIN)
    assert pq.read_schema(merged).remove_metadata() == history.SCHEMA


@pytest.mark.slow
def test_more_than_two_gib_of_text_are_read_in_order(tmp_path: Path) -> None:
    text = b'"%s"' % (b"x" * (64 << 20))
    paths = [file_of(tmp_path, tick, *(Update(b"%d" % one, 0, 1, text) for one in range(11))) for tick in (2, 1, 0)]
    table = history.read(paths, -1, 2)
    assert table["_tick"].to_pylist() == [0] * 11 + [1] * 11 + [2] * 11
    assert table["row"].nbytes > 2 << 30


def test_a_large_file_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    chance = random.Random(3)
    wanted = [Update(b"%d" % one, one, 1, chance.randbytes(500).hex().encode()) for one in range(200)]
    path = file_of(tmp_path, 7, *wanted)
    pieces = list(history.batches(path, -1, 7, batch_bytes=20_000))
    assert len(pieces) > 5
    assert max(piece.nbytes for piece in pieces) < 40_000
    assert [update for piece in pieces for _, update in history.updates(piece)] == wanted
    assert sum(piece.num_rows for piece in history.batches(path, 7, 9)) == 0
    assert history.unpacked_bytes(path) > 200_000


def test_a_file_that_cannot_be_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing else")
    for path in (str(broken), str(tmp_path / "gone.parquet")):
        with pytest.raises(FixConfiguration, match=path) as refused:
            history.read([path], -1, 0)
        assert "backup" in refused.value.remedy
        with pytest.raises(FixConfiguration, match=path):
            history.unpacked_bytes(path)


# --- current rows


def test_the_current_rows_are_the_same_in_whatever_order_the_updates_come() -> None:
    for seed in range(20):
        shuffled = random.Random(seed).sample(CHAIN, len(CHAIN))
        assert current(*shuffled) == {b"a": b'{"v":1}'}


def test_parts_that_were_summed_up_apart_give_the_same() -> None:
    for cut in range(len(CHAIN)):
        whole = RowSums()
        for part in (CHAIN[cut:], CHAIN[:cut]):
            sums = RowSums()
            sums.add((one.key, one.cell, one.diff) for one in part)
            whole.add(sums.taken())
            assert sums.size_bytes == 0 and not list(sums.taken())
        assert whole.current("orders") == {b"a": b'{"v":1}'}


def test_rows_that_have_come_and_gone_take_no_room() -> None:
    sums = RowSums()
    sums.add([(b"a", b"0", 1)])
    before = sums.size_bytes
    for version in range(1000):
        sums.add([(b"a", b"%d" % version, -1), (b"a", b"%d" % (version + 1), 1)])
    assert before < sums.size_bytes < before + 10


@pytest.mark.parametrize(
    "wrong",
    [
        [Update(b"a", 0, -1, b"1")],
        [Update(b"a", 0, 1, b"1"), Update(b"a", 1, -1, b"2")],
        [Update(b"a", 0, 1, b"1"), Update(b"a", 1, 1, b"1")],
        [Update(b"a", 0, 1, b"1"), Update(b"a", 1, 1, b"2")],
        [Update(b"a", 0, 1, b"1"), Update(b"a", 1, -1, b"2"), Update(b"a", 1, 1, b"3")],
    ],
    ids=["left_before_it_came", "left_as_another", "came_twice", "came_where_one_was", "replaced_another"],
)
def test_a_history_that_contradicts_itself_is_refused(wrong: list[Update]) -> None:
    with pytest.raises(FixConfiguration, match='history of "orders" contradicts itself') as refused:
        current(*wrong, Update(b"b", 0, 1, b"9"))
    assert "backup" in refused.value.remedy
