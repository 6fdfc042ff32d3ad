"""The embedded log: what was synced is there, in order and whole, whatever happened in between."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.capture import log as log_module
from tidegate.capture.log import LogInUse, LogReader, LogWriter, Record
from tidegate.errors import BadRecord, DefinitelyNotDone, FixConfiguration

RECORDS: list[Record] = [(b"k1", b"v1"), (None, b"v2"), (b"k3", None), (b"", b"")]


def records_of(reader: LogReader, topic: str, partition: int, start: int = 0, end: int | None = None) -> list[Record]:
    last = reader.ends()[(topic, partition)] if end is None else end
    return [
        (key, value)
        for batch in reader.read(topic, partition, start, last)
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
    ]


def only_segment(root: Path) -> Path:
    return next(root.glob("topics/*/*/*.seg"))


def test_what_was_synced_is_read_back(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.append("shop.public.orders", 1, RECORDS)
        writer.sync()
    reader = LogReader(tmp_path)
    assert records_of(reader, "shop.public.orders", 1) == RECORDS
    assert reader.topics() == {"shop.public.orders": 2}
    assert reader.ends() == {("shop.public.orders", 0): 0, ("shop.public.orders", 1): 4}


def test_what_was_not_synced_is_neither_seen_nor_kept(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, RECORDS)
        assert reader.ends() == {}
        writer.sync()
        writer.append("t", 0, RECORDS)
        assert reader.ends() == {("t", 0): 4}
    with LogWriter(tmp_path) as writer:
        assert writer.ends() == {("t", 0): 4}


def test_any_range_is_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_FRAMES", 2)
    numbered: list[Record] = [(None, b"%d" % number) for number in range(20)]
    with LogWriter(tmp_path) as writer:
        for first in range(0, 20, 3):
            writer.append("t", 0, numbered[first : first + 3])
            writer.sync()
    reader = LogReader(tmp_path)
    for start in range(21):
        for end in range(start, 21):
            assert records_of(reader, "t", 0, start, end) == numbered[start:end]


def test_a_range_that_is_not_there_is_refused_by_its_place(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, RECORDS)
        writer.sync()
    with pytest.raises(BadRecord, match="t/0: offsets 0 to 5"):
        LogReader(tmp_path).read("t", 0, 0, 5)
    with pytest.raises(BadRecord, match="u/0"):
        LogReader(tmp_path).read("u", 0, 0, 1)


def test_a_second_writer_is_told_to_wait_until_the_first_has_ended(tmp_path: Path) -> None:
    with LogWriter(tmp_path):
        with pytest.raises(LogInUse):
            LogWriter(tmp_path)
        with pytest.raises(LogInUse):
            LogWriter(tmp_path, wait_seconds=0.05)
    LogWriter(tmp_path, wait_seconds=1).close()


@pytest.mark.parametrize("topic", ["..", ".", "a/b", "ümlaut topic", "__debezium-heartbeat.shop", "%2E", "a%2Fb"])
def test_every_topic_has_a_folder_of_its_own(tmp_path: Path, topic: str) -> None:
    with LogWriter(tmp_path) as writer:
        for name in (topic, "other"):
            writer.append(name, 0, [(None, name.encode())])
        writer.sync()
    assert records_of(LogReader(tmp_path), topic, 0) == [(None, topic.encode())]
    assert all(path.is_relative_to(tmp_path / "topics") for path in tmp_path.rglob("*.seg"))


@pytest.mark.parametrize("topic", ["", "x" * 300])
def test_a_topic_that_cannot_be_a_folder_is_refused(tmp_path: Path, topic: str) -> None:
    with LogWriter(tmp_path) as writer, pytest.raises(FixConfiguration):
        writer.append(topic, 0, RECORDS)


def test_a_group_larger_than_a_frame_is_split_and_read_back(tmp_path: Path) -> None:
    large: list[Record] = [(None, os.urandom(5_000_000)) for _ in range(9)]
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, large)
        writer.sync()
    assert records_of(LogReader(tmp_path), "t", 0) == large
    assert len(list(LogReader(tmp_path).read("t", 0, 0, 9))) > 1


def test_segments_below_an_offset_are_forgotten_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_FRAMES", 1)
    with LogWriter(tmp_path) as writer:
        for number in range(4):
            writer.append("t", 0, [(None, b"%d" % number)] * 2)
            writer.sync()
        writer.forget_before({("t", 0): 5})
        assert LogReader(tmp_path).starts() == {("t", 0): 4}
        assert len(list(tmp_path.rglob("*.seg"))) == 2
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, [(None, b"new")])
        writer.sync()
    reader = LogReader(tmp_path)
    assert [value for _, value in records_of(reader, "t", 0, 4)] == [b"2", b"2", b"3", b"3", b"new"]
    with pytest.raises(BadRecord):
        reader.read("t", 0, 3, 5)


def test_damage_below_the_durable_end_is_named_by_every_reader(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, RECORDS * 50)
        writer.sync()
    path = only_segment(tmp_path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(BadRecord, match=path.name):
            records_of(LogReader(tmp_path), "t", 0)


@pytest.mark.parametrize("harm", ["shorter", "missing", "header"])
def test_a_writer_refuses_a_log_that_has_lost_durable_records(tmp_path: Path, harm: str) -> None:
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, RECORDS)
        writer.sync()
    path = only_segment(tmp_path)
    whole = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if harm == "shorter" else b"X" + whole[1:])
    with pytest.raises(BadRecord, match=path.name):
        LogWriter(tmp_path)


Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2)),
        st.tuples(st.just("sync"), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("tear"), st.integers(1, 200)),
    ),
    max_size=30,
)


class Model:
    """The log beside a plain list of what must be in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer = LogWriter(root)
        self.durable: dict[int, list[Record]] = {0: [], 1: [], 2: []}
        self.pending: dict[int, list[Record]] = {0: [], 1: [], 2: []}
        self.counter = 0

    def append(self, partition: int) -> None:
        records: list[Record] = [(b"%d" % partition, b"%d" % (self.counter + step)) for step in range(partition + 1)]
        self.counter += len(records)
        self.writer.append("t", partition, records)
        self.pending[partition] += records

    def sync(self, _: int) -> None:
        self.writer.sync()
        self.durable = {partition: self.durable[partition] + self.pending[partition] for partition in self.durable}
        self.pending = {0: [], 1: [], 2: []}

    def reopen(self, _: int) -> None:
        self.writer.close()
        self.pending = {0: [], 1: [], 2: []}
        self.writer = LogWriter(self.root)

    def tear(self, torn_bytes: int) -> None:
        """As if the process had died while it wrote frames: any number of their bytes is in the files."""
        for path in list(self.root.rglob("*.seg")):
            with path.open("ab") as file:
                file.write(path.read_bytes()[:torn_bytes])
            torn = path.with_name(f"{10**6:020d}.seg")
            torn.write_bytes(b"TGL1" * (torn_bytes // 4))
        self.reopen(0)

    def check(self) -> None:
        reader = LogReader(self.root)
        for partition, records in self.durable.items():
            if reader.ends().get(("t", partition), 0) or records:
                assert records_of(reader, "t", partition) == records


@given(steps=STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_keeps_exactly_the_durable_records_in_order(steps: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(log_module, "SEGMENT_FRAMES", 3)
        model = Model(Path(folder))
        for name, argument in steps:
            getattr(model, name)(argument)
            model.check()
        model.writer.close()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_after_the_cure_nothing_is_lost_or_doubled(tmp_path: Path, small_files: None) -> None:
    blocks: list[list[Record]] = [[(None, os.urandom(30_000))] for _ in range(6)]
    with LogWriter(tmp_path) as writer:
        writer.append("t", 0, blocks[0])
        writer.sync()
        for block in blocks[1:]:
            writer.append("t", 0, block)
        for _ in range(2):
            with pytest.raises(DefinitelyNotDone, match="nothing of this group"):
                writer.sync()
        assert records_of(LogReader(tmp_path), "t", 0) == blocks[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
        writer.sync()
    assert records_of(LogReader(tmp_path), "t", 0) == [record for block in blocks for record in block]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_keeps_what_was_durable(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)
    block: list[Record] = [(None, os.urandom(60_000))]
    with LogWriter(small_disk / "log") as writer:
        written = 0
        with pytest.raises(DefinitelyNotDone):
            for _ in range(10):
                writer.append("t", 0, block)
                writer.sync()
                written += 1
        assert 0 < written < 10
        ballast.unlink()
        writer.sync()
    assert records_of(LogReader(small_disk / "log"), "t", 0) == block * (written + 1)


WRITE_AND_DIE = """
import sys
from pathlib import Path
from tidegate.capture.log import LogWriter
writer = LogWriter(Path(sys.argv[1]))
for number in range(5):
    for partition in (0, 1):
        writer.append("t", partition, [(None, b"%d" % number)] * 100)
    writer.sync()
    print(number, flush=True)
"""


@pytest.mark.parametrize("point", ["log-appended:3", "log-synced:3"])
def test_a_writer_killed_inside_a_sync_leaves_what_was_published(tmp_path: Path, point: str) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)],
        env={**os.environ, "TIDEGATE_CRASH_AT": point},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with LogWriter(tmp_path) as writer:
        writer.append("t", 1, [(None, b"after")])
        writer.sync()
    expected: list[Record] = [(None, b"%d" % number) for number in (0, 1) for _ in range(100)]
    assert records_of(LogReader(tmp_path), "t", 0) == expected
    assert records_of(LogReader(tmp_path), "t", 1) == [*expected, (None, b"after")]


def test_the_ends_of_all_partitions_move_together(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    with LogWriter(tmp_path) as writer:
        for number in range(200):
            for partition in range(3):
                writer.append("t", partition, [(None, b"%d" % number)])
            before = set(reader.ends().values())
            writer.sync()
            assert len(before) <= 1
            assert set(reader.ends().values()) == {number + 1}
