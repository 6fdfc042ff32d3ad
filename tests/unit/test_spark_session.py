"""What Spark's processes write on standard error reaches the user only if it is about the user's work."""

from __future__ import annotations

from tidegate.spark.session import worth_showing

DAEMON = b"""Traceback (most recent call last):
  File "/x/site-packages/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 264, in manager
  File "/x/site-packages/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 95, in worker
BrokenPipeError: [Errno 32] Broken pipe
"""
OURS = b"""Traceback (most recent call last):
  File "/x/site-packages/pyspark/worker.py", line 1, in main
    process()
  File "/x/site-packages/tidegate/pipeline/tasks.py", line 77, in ingest
    yield
ValueError: a bug
"""


def shown(text: bytes) -> bytes:
    return b"".join(worth_showing(text.splitlines(keepends=True)))


def test_what_the_daemon_says_of_a_broken_connection_is_not_shown() -> None:
    assert shown(b"before\n" + DAEMON + b"PySpark daemon failed to flush the output\nafter\n") == b"before\nafter\n"


def test_nor_is_it_if_two_processes_say_it_at_once() -> None:
    lines = DAEMON.splitlines(keepends=True)
    assert shown(b"".join(line for pair in zip(lines, lines, strict=True) for line in pair) + b"after\n") == b"after\n"


def test_a_traceback_through_our_code_is_shown_whole() -> None:
    assert shown(DAEMON + OURS) == OURS


def test_a_traceback_that_is_cut_off_is_shown() -> None:
    assert shown(OURS[:80]) == OURS[:80]


def test_notes_of_java_to_its_authors_are_not_shown() -> None:
    assert shown(b"WARNING: Using incubator modules: jdk.incubator.vector\n26/11/19 ERROR Executor: x\n") == (
        b"26/11/19 ERROR Executor: x\n"
    )
