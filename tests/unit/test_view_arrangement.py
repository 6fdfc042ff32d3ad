"""Arrangements: a cache that is at a tick, or empty."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.views import arrangement as module
from tidegate.views.arrangement import AlreadyApplied, Arrangement


def _fill(arrangement: Arrangement, tick: int, value: bytes = b"v") -> None:
    with arrangement.write(tick) as transaction:
        transaction.putmulti([(b"a", value), (b"b", value)])


def _everything(arrangement: Arrangement) -> list[tuple[bytes, bytes]]:
    with arrangement.write(1 << 40) as transaction:
        return transaction.scan(b"")


def test_a_new_one_is_empty_and_has_applied_nothing(tmp_path: Path) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    assert arrangement.applied == -1
    assert _everything(arrangement) == []


def test_a_commit_keeps_the_entries_and_the_tick_together(tmp_path: Path) -> None:
    _fill(Arrangement.open(tmp_path, "layout"), 7)
    Arrangement.open(tmp_path, "layout").close()
    again = Arrangement.open(tmp_path, "layout")
    assert again.applied == 7
    assert _everything(again) == [(b"a", b"v"), (b"b", b"v")]


def test_an_error_inside_keeps_nothing(tmp_path: Path) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    _fill(arrangement, 1)
    with pytest.raises(RuntimeError), arrangement.write(2) as transaction:
        transaction.put(b"c", b"lost")
        transaction.delete(b"a")
        raise RuntimeError
    assert arrangement.applied == 1
    assert _everything(arrangement) == [(b"a", b"v"), (b"b", b"v")]


def test_a_tick_that_is_applied_is_refused(tmp_path: Path) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    _fill(arrangement, 3)
    for late in (2, 3):
        with pytest.raises(AlreadyApplied, match="has applied tick 3"):
            _fill(arrangement, late, b"w")
    assert arrangement.applied == 3


def test_a_write_inside_a_write_of_the_same_tick_joins_it(tmp_path: Path) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    with pytest.raises(RuntimeError), arrangement.write(1):
        _fill(arrangement, 1)
        raise RuntimeError
    assert arrangement.applied == -1
    assert _everything(arrangement) == []


def test_reads_see_what_the_transaction_wrote(tmp_path: Path) -> None:
    with Arrangement.open(tmp_path, "layout").write(1) as transaction:
        transaction.putmulti([(b"k1", b"1"), (b"k2", b"2"), (b"l1", b"3")])
        transaction.delete(b"k1")
        transaction.delete(b"never there")
        assert transaction.get(b"k1") is None
        assert transaction.getmulti([b"l1", b"k1", b"k2"]) == [b"3", None, b"2"]
        assert transaction.scan(b"k") == [(b"k2", b"2")]


def test_keys_beyond_lmdbs_limit_work_and_stay_in_order(tmp_path: Path) -> None:
    long = [b"p" * 450 + bytes([rest]) * size for rest in range(5) for size in (28, 29, 30, 61, 62, 900)]
    longest = [b"q" * 2000 + bytes([rest]) for rest in range(9)]
    entries = sorted((key, key[-3:]) for key in [*long, *longest, b"p", b"q"])
    with Arrangement.open(tmp_path, "layout").write(1) as transaction:
        transaction.putmulti(reversed(entries))
        assert transaction.scan(b"") == entries
        assert transaction.scan(b"p" * 450) == [entry for entry in entries if entry[0].startswith(b"p" * 450)]
        assert transaction.scan(b"q" * 2000) == [(key, key[-3:]) for key in longest]
        assert transaction.getmulti([key for key, _ in entries]) == [value for _, value in entries]
        transaction.delete(longest[4])
        assert transaction.get(longest[4]) is None
        assert transaction.get(longest[5]) == longest[5][-3:]


def test_a_walk_meets_what_a_scan_finds_in_the_same_order(tmp_path: Path) -> None:
    keys = [b"p" * 450 + bytes([rest]) * size for rest in range(5) for size in (28, 29, 30, 61, 62, 900)]
    keys += [b"q" * 2000 + bytes([rest]) for rest in range(9)] + [b"p", b"q", b"q" * 478, b"q" * 479 + b"z"]
    with Arrangement.open(tmp_path, "layout").write(1) as transaction:
        assert list(transaction.walk(b"")) == []
        transaction.putmulti([(key, key[-3:]) for key in keys])
        for prefix in (b"", b"p", b"p" * 450, b"q" * 478, b"q" * 479, b"q" * 480, b"q" * 2000, b"z"):
            assert list(transaction.walk(prefix)) == transaction.scan(prefix)


def test_a_walk_that_is_left_early_leaves_room_for_writes(tmp_path: Path) -> None:
    with Arrangement.open(tmp_path, "layout").write(1) as transaction:
        transaction.putmulti([(b"a%03d" % place, b"v") for place in range(500)])
        assert next(transaction.walk(b"a")) == (b"a000", b"v")
        transaction.deletemulti([b"a%03d" % place for place in range(499)])
        transaction.put(b"b", b"w")
        assert [key for key, _ in transaction.walk(b"")] == [b"a499", b"b"]


def test_a_map_that_is_full_grows_and_the_transaction_goes_on(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, "layout", first_map_bytes=1 << 16)
    with arrangement.write(0) as transaction:
        transaction.put(b"first", b"1")
        for place in range(200):
            transaction.put(b"%05d" % place, bytes(4000))
        transaction.delete(b"00007")
        assert transaction.get(b"first") == b"1"
    assert arrangement.applied == 0
    assert len(_everything(arrangement)) == 200


def test_another_layout_finds_it_empty(tmp_path: Path) -> None:
    _fill(Arrangement.open(tmp_path, "old"), 7)
    changed = Arrangement.open(tmp_path, "new")
    assert changed.applied == -1
    assert _everything(changed) == []


def test_after_a_reboot_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    _fill(arrangement, 7)
    arrangement.close()
    monkeypatch.setattr(module, "_boot_id", lambda: "another boot")
    assert Arrangement.open(tmp_path, "layout").applied == -1


@pytest.mark.parametrize("damage", ["garbage", "truncated", "half", "empty"])
def test_a_damaged_file_is_replaced_by_an_empty_one(tmp_path: Path, damage: str) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    with arrangement.write(7) as transaction:
        transaction.putmulti([(b"%06d" % place, bytes(500)) for place in range(1000)])
    arrangement.close()
    file = tmp_path / "data.mdb"
    whole = file.read_bytes()
    file.write_bytes({"garbage": b"?" * 9999, "truncated": whole[:9000], "half": whole[:200_000], "empty": b""}[damage])
    again = Arrangement.open(tmp_path, "layout")
    assert again.applied == -1
    _fill(again, 8)
    assert again.applied == 8


def test_reset_empties_it(tmp_path: Path) -> None:
    arrangement = Arrangement.open(tmp_path, "layout")
    _fill(arrangement, 7)
    arrangement.reset()
    assert arrangement.applied == -1
    _fill(arrangement, 0)
    assert arrangement.applied == 0


_DIES_INSIDE = """
import os, signal, sys
from pathlib import Path
from tidegate.views.arrangement import Arrangement
arrangement = Arrangement.open(Path(sys.argv[1]), "layout")
with arrangement.write(1) as transaction:
    transaction.putmulti([(b"a", b"kept"), (b"b", b"kept")])
with arrangement.write(2) as transaction:
    transaction.putmulti([(b"%06d" % place, bytes(1000)) for place in range(20_000)])
    transaction.put(b"a", b"torn")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_dies_inside_a_write_leaves_the_tick_before(tmp_path: Path) -> None:
    here = Arrangement.open(tmp_path, "layout")  # other processes may have it open
    ended = subprocess.run([sys.executable, "-c", _DIES_INSIDE, str(tmp_path)], check=False, env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    assert here.applied == 1
    assert _everything(here) == [(b"a", b"kept"), (b"b", b"kept")]


_GROWS = """
import sys
from pathlib import Path
from tidegate.views.arrangement import Arrangement
arrangement = Arrangement(Path(sys.argv[1]), "layout", first_map_bytes=1 << 16)
with arrangement.write(1) as transaction:
    transaction.putmulti([(b"%06d" % place, bytes(1000)) for place in range(2000)])
"""


def test_a_map_that_another_process_has_grown_is_adopted(tmp_path: Path) -> None:
    here = Arrangement(tmp_path, "layout", first_map_bytes=1 << 16)
    subprocess.run([sys.executable, "-c", _GROWS, str(tmp_path)], check=True, env=dict(os.environ))
    assert here.applied == 1
    assert len(_everything(here)) == 2000
