"""Recorded events are imported once each, whatever ends the import and however the files grow."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from tidegate.capture import files
from tidegate.capture.files import FilesImport, ImportResult, import_files
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


def looking(pattern: Path, *, is_live: bool = True, stop_after: int | None = None) -> FilesImport:
    """An import that is told to stop when it has been asked so many times."""
    asked = iter(range(1_000_000))
    return FilesImport(
        str(pattern),
        lambda topic: 1,
        lambda facts: None,
        is_live,
        lambda: stop_after is not None and next(asked) >= stop_after,
    )


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = files._opened

    def noted(path: Path) -> AbstractContextManager[BinaryIO]:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(files, "_opened", noted)
    (tmp_path / "a.jsonl").write_text(line(0))
    (tmp_path / "b.jsonl").write_text(line(1))
    importing = looking(tmp_path / "*.jsonl")
    with LogWriter(tmp_path / "log") as writer:
        assert [importing.look(writer).records for _ in range(3)] == [2, 0, 0]
        with (tmp_path / "b.jsonl").open("a") as more:
            more.write(line(2))
        assert importing.look(writer).records == 1
    assert [path.name for path in opened] == ["a.jsonl", "b.jsonl", "b.jsonl"]
    assert numbers(tmp_path / "log") == [0, 1, 2]


@pytest.mark.parametrize("is_gzip", [False, True])
def test_while_live_a_file_that_is_still_being_written_is_awaited(tmp_path: Path, is_gzip: bool) -> None:
    whole = (line(0) + line(1)).encode()
    whole, cut = (gzip.compress(whole), -9) if is_gzip else (whole, -20)
    file, importing = tmp_path / "a.jsonl", looking(tmp_path / "a.jsonl")
    file.write_bytes(whole[:cut])
    with LogWriter(tmp_path / "log") as writer:
        assert importing.look(writer).records <= 1
        assert importing.look(writer).records == 0
        file.write_bytes(whole)
        importing.look(writer)
    assert numbers(tmp_path / "log") == [0, 1]


def test_while_live_a_broken_line_with_its_newline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(0) + line(1)[:-20] + "\n")
    with LogWriter(tmp_path / "log") as writer, pytest.raises(BadRecord, match=r"a\.jsonl, line 2: "):
        looking(tmp_path / "a.jsonl").look(writer)


def test_a_line_that_is_cut_off_is_refused_where_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line(0) + line(1)[:-20])
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 2: "):
        run_import(tmp_path / "a.jsonl", tmp_path / "log")
    assert numbers(tmp_path / "log") == [0]


def test_an_import_that_is_to_stop_ends_between_two_blocks_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 100)
    (tmp_path / "a.jsonl").write_text("".join(map(line, range(100))))
    with LogWriter(tmp_path / "log") as writer:
        taken = looking(tmp_path / "a.jsonl", stop_after=3).look(writer).records
        assert 0 < taken < 20
        assert looking(tmp_path / "a.jsonl", stop_after=2).look(writer).records == 0  # while it reads what it has
        assert looking(tmp_path / "a.jsonl").look(writer).records == 100 - taken
    assert numbers(tmp_path / "log") == list(range(100))


def test_a_line_may_state_facts_of_a_topic_and_is_no_record(tmp_path: Path) -> None:
    told: list[TopicFacts] = []
    facts = (
        '{"topic":"t","config":{"cleanup.policy":"compact,delete","retention.ms":"-1"}}\n{"topic":"u","config":{}}\n'
    )
    (tmp_path / "a.jsonl").write_text(line(0) + facts + line(1))
    with LogWriter(tmp_path / "log") as writer:
        assert import_files(str(tmp_path / "a.jsonl"), writer, lambda topic: 3, told.append).records == 2
    assert numbers(tmp_path / "log") == [0, 1]
    by = str(tmp_path / "a.jsonl")
    assert told == [
        TopicFacts(by, "t", 3, "compact,delete"),
        TopicFacts(by, "u", 3, "delete"),
        TopicFacts(by, "t", 1),
    ]
    assert list(contents(tmp_path / "log")) == [("t", 0)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"topic":"t","config":{},"value":null}', "a record's `value` or a topic's `config`, not both"),
        ('{"topic":"t","config":{"cleanup.policy":1}}', "Expected `str`, got `int`"),
        ('{"topic":"t","key":null}', "missing required field `value`"),
    ],
)
def test_a_line_that_is_neither_record_nor_facts_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(BadRecord, match=why):
        run_import(tmp_path / "a.jsonl", tmp_path / "log")


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
