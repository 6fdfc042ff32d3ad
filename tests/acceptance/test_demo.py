"""The demo as a user starts it: a real process, real servers, a real kill -9."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

DEMO_SECONDS = 15
DEADLINE_SECONDS = 240


def start_demo(folder: Path) -> subprocess.Popen[str]:
    words = ["demo", "--seconds", str(DEMO_SECONDS), "--json", "--folder", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "tidegate.cli.main", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(demo: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report and what was said; the demo is stopped gently if the test fails meanwhile."""
    try:
        report, said = demo.communicate(timeout=DEADLINE_SECONDS)
    except BaseException:
        demo.terminate()
        demo.communicate(timeout=60)
        raise
    return demo.returncode, json.loads(report) if report.strip() else {}, said


def dsn_of(folder: Path, name: str) -> str:
    lines = (folder / "environment").read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}[name]


def assert_nothing_runs(folder: Path) -> None:
    """No process names the demo's folder or works in it, and its server takes no connections."""
    facts = [process.info for process in psutil.process_iter(["cmdline", "cwd"])]
    words = [" ".join([*(one["cmdline"] or []), one["cwd"] or ""]) for one in facts]
    assert [line for line in words if str(folder) in line] == []
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn_of(folder, "SHOP_DSN"), connect_timeout=5)


@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_the_demo_keeps_every_promise_and_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    code, report, said = finish(start_demo(folder))
    assert code == 0, said
    assert report["fallen"] == []
    assert report["verify"] == "equal"
    assert report["kills"] == 1
    assert report["transactions"] > 100
    ours = report["tidegate"]
    assert (ours["torn_states"], ours["backwards"], ours["duplicates"], ours["lost"]) == (0, 0, 0, 0)
    assert ours["looks"] > 100
    assert report["usual_way"]["torn_states"] > 0
    assert report["usual_way"]["lost"] == 0, "the usual way is torn in between, but ends right"
    assert_nothing_runs(folder)


TEAR = """
UPDATE orders_with_lines SET total = total + 1 WHERE id = (SELECT min(id) FROM orders_with_lines)
"""


def tear_once_a_second(folder: Path, stopped: threading.Event) -> None:
    """An outsider who writes to the destination: the demo must not overlook it."""
    while not stopped.wait(1.0):
        try:
            with psycopg.connect(dsn_of(folder, "DESTINATION_DSN"), autocommit=True) as connection:
                connection.execute(TEAR)
        except (OSError, psycopg.Error):
            continue  # it has not begun, or has ended


@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_the_demo_fails_when_the_destination_was_torn(tmp_path: Path) -> None:
    folder, stopped = tmp_path / "demo", threading.Event()
    demo = start_demo(folder)
    outsider = threading.Thread(target=tear_once_a_second, args=(folder, stopped))
    outsider.start()
    try:
        code, report, said = finish(demo)
    finally:
        stopped.set()
        outsider.join()
    assert code == 1, said
    assert report["tidegate"]["torn_states"] > 0
    assert any(text.startswith("whole") for text in report["fallen"])


@pytest.mark.timeout(120)
def test_the_demo_stops_everything_when_it_is_told_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = start_demo(folder)
    while demo.poll() is None and not (folder / "run.log").exists():
        threading.Event().wait(0.1)
    demo.terminate()
    code, _, said = finish(demo)
    assert code == 130, said
    assert_nothing_runs(folder)
