"""Recorded events are imported once each, whatever ends the import and however the files grow."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.capture.files import ImportResult, import_files
from tidegate.capture.log import LogReader, LogWriter, Record
from tidegate.capture.murmur2 import partition_for
from tidegate.capture.topic_facts import TopicFacts, check_topic
from tidegate.errors import BadRecord, FixConfiguration


def run_import(pattern: Path, root: Path, partitions: int = 1) -> ImportResult:
    with LogWriter(root) as writer:
        return import_files(str(pattern), writer, lambda topic: partitions)


def contents(root: Path) -> dict[tuple[str, int], list[Record]]:
    reader = LogReader(root)
    return {
        place: [
            (key, value)
            for batch in reader.read(*place, 0, end)
            for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
        ]
        for place, end in reader.ends().items()
        if end
    }


def line(number: int, topic: str = "t") -> str:
    return json.dumps({"topic": topic, "partition": 0, "key": {"id": number}, "value": {"n": number}}) + "\n"


def numbers(root: Path) -> list[int]:
    return [json.loads(value or b"")["n"] for _, value in contents(root)[("t", 0)]]


def test_strings_json_and_null_come_as_the_bytes_of_a_topic(tmp_path: Path) -> None:
    lines = [
        r'{"seq":1,"topic":"t","key":"{\"id\":1}","value":"{\"a\":\"\u00fc\"}"}',
        '{"topic":"t","key":{"id": 2},"value":{"a": [1, 2.50]},"partition":3}',
        '{"topic":"t","key":null,"value":null}',
        "",
        '{"topic":"u","value":7}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert run_import(tmp_path / "*.jsonl", tmp_path / "log") == ImportResult(1, 4)
    assert contents(tmp_path / "log") == {
        ("t", 0): [(b'{"id":1}', '{"a":"ü"}'.encode()), (None, None)],
        ("t", 3): [(b'{"id": 2}', b'{"a": [1, 2.50]}')],
        ("u", 0): [(None, b"7")],
    }


def test_a_record_without_a_partition_lies_where_kafka_would_put_it(tmp_path: Path) -> None:
    keys = [b'{"id":%d}' % number for number in range(200)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"topic":"t","key":%s,"value":null}\n' % key for key in keys))
    run_import(tmp_path / "a.jsonl", tmp_path / "log", partitions=3)
    found = contents(tmp_path / "log")
    for partition in range(3):
        assert [key for key, _ in found["t", partition]] == [key for key in keys if partition_for(key, 3) == partition]


def test_files_are_taken_in_the_order_of_their_names_gzip_or_not(tmp_path: Path) -> None:
    (tmp_path / "2.jsonl").write_text(line(2))
    (tmp_path / "1.jsonl").write_bytes(gzip.compress(line(0).encode()) + gzip.compress(line(1).encode()))
    run_import(tmp_path / "*.jsonl", tmp_path / "log")
    assert numbers(tmp_path / "log") == [0, 1, 2]


@pytest.mark.parametrize("is_gzip", [False, True])
def test_a_file_that_has_grown_goes_on_behind_its_imported_part(tmp_path: Path, is_gzip: bool) -> None:
    file = tmp_path / "a.jsonl"
    packed = gzip.compress if is_gzip else bytes
    file.write_bytes(packed((line(0) + line(1).rstrip()).encode()))
    assert run_import(file, tmp_path / "log").records == 2
    assert run_import(file, tmp_path / "log").records == 0
    with file.open("ab") as more:
        more.write(packed(("\n" + line(2)).encode()))
    assert run_import(file, tmp_path / "log").records == 1
    assert numbers(tmp_path / "log") == [0, 1, 2]


@pytest.mark.parametrize(("content", "what"), [(line(0), "is shorter"), (line(7) + line(1), "no longer begins")])
def test_a_file_that_has_changed_is_refused(tmp_path: Path, content: str, what: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(line(0) + line(1))
    run_import(file, tmp_path / "log")
    file.write_text(content)
    with pytest.raises(FixConfiguration, match=what):
        run_import(file, tmp_path / "log")
    assert numbers(tmp_path / "log") == [0, 1]


@pytest.mark.parametrize(
    "broken",
    [
        '{"topic":"t","key":{"id":',
        "nonsense",
        '{"key":null,"value":null}',
        '{"topic":"t","partition":-1,"value":null}',
        r'{"topic":"t","value":"\ud8"}',
        r'{"topic":"t","value":"{\"a\": 1"}',
        '{"topic":"t","value":"nonsense"}',
    ],
)
def test_a_broken_line_is_named_and_after_the_cure_the_import_goes_on(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(line(0) + "\n" + line(1) + broken + "\n" + line(3))
    for _ in range(2):
        with pytest.raises(BadRecord, match=r"a\.jsonl, line 4: "):
            run_import(file, tmp_path / "log")
        assert numbers(tmp_path / "log") == [0, 1]
    file.write_text(line(0) + "\n" + line(1) + line(2) + line(3))
    assert run_import(file, tmp_path / "log").records == 2
    assert numbers(tmp_path / "log") == [0, 1, 2, 3]


def test_a_truncated_gzip_file_is_named_and_after_the_cure_the_import_goes_on(tmp_path: Path) -> None:
    whole = gzip.compress("".join(map(line, range(1000))).encode())
    file = tmp_path / "a.jsonl"
    file.write_bytes(whole[:-100])
    with pytest.raises(BadRecord, match=r"a\.jsonl.* too early"):
        run_import(file, tmp_path / "log")
    file.write_bytes(whole)
    run_import(file, tmp_path / "log")
    assert numbers(tmp_path / "log") == list(range(1000))


def test_a_topic_that_is_refused_keeps_the_whole_block_out_of_the_log(tmp_path: Path) -> None:
    def check(facts: TopicFacts) -> None:
        check_topic(facts, "t")

    file = tmp_path / "a.jsonl"
    file.write_text(line(0) + line(1).replace('"partition": 0', '"partition": 1'))
    with (
        LogWriter(tmp_path / "log") as writer,
        pytest.raises(FixConfiguration, match=r"a\.jsonl: the transaction topic t has 2 partitions"),
    ):
        import_files(str(file), writer, lambda topic: 1, check)
    assert contents(tmp_path / "log") == {}


def test_no_file_at_all_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(FixConfiguration, match="no file matches"):
        run_import(tmp_path / "*.jsonl", tmp_path / "log")


IMPORT = """
import sys
from pathlib import Path
from tidegate.capture import files
from tidegate.capture.log import LogWriter
files._CHUNK_BYTES, files._SYNC_BYTES = 1000, 300
with LogWriter(Path(sys.argv[2])) as writer:
    files.import_files(sys.argv[1], writer, lambda topic: 1)
"""


@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize("point", ["log-appended", "log-synced"])
def test_an_import_killed_again_and_again_gives_each_record_once(tmp_path: Path, point: str, is_gzip: bool) -> None:
    packed = gzip.compress if is_gzip else bytes
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / f"{name}.jsonl").write_bytes(packed("".join(map(line, range(first, first + 100))).encode()))
    deaths = 0
    while True:
        ended = subprocess.run(
            [sys.executable, "-c", IMPORT, str(tmp_path / "*.jsonl"), str(tmp_path / "log")],
            env={**os.environ, "TIDEGATE_CRASH_AT": f"{point}:{4 - deaths % 3}"},
            capture_output=True,
            check=False,
        )
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        deaths += 1
    assert deaths >= 2
    assert numbers(tmp_path / "log") == list(range(200))
