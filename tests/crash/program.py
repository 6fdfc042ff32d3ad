"""`tidegate` as a user starts it: real processes, which can be interrupted and killed, and what they said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PROGRAM = (sys.executable, "-m", "tidegate.cli.main")
START_SECONDS = 90.0
END_SECONDS = 120.0


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_seconds:.0f} s: {what}"
        time.sleep(0.02)


class Running:
    """One `tidegate run --json` in a session of its own, as a terminal would start it."""

    def __init__(self, project: Path, number: int, words: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.output, self.errors = project / f"run-{number}.out", project / f"run-{number}.err"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*PROGRAM, "run", "--json", "--project", str(project), *words],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._started: set[psutil.Process] = {psutil.Process(self._process.pid)}

    # --- what it says

    def said(self) -> list[dict[str, Any]]:
        lines = self.output.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.said() if one["event"] == kind]

    def complaints(self) -> str:
        return self.errors.read_text()

    @property
    def is_ready(self) -> bool:
        return any(one.get("text") == "ready" for one in self.events("said"))

    def await_ready(self) -> None:
        self.await_that(lambda: self.is_ready, "it is ready", START_SECONDS)

    def await_delivery(self) -> None:
        """One more round has arrived."""
        count = len(self.events("delivered"))
        self.await_that(lambda: len(self.events("delivered")) > count, "a round is delivered", START_SECONDS)

    def await_that(self, condition: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        def holds() -> bool:
            assert self._process.poll() is None or condition(), f"ended with {self._process.returncode}: {self.told()}"
            return condition()

        wait_until(holds, timeout_seconds, what)

    def told(self) -> str:
        return self.output.read_text()[-2000:] + self.complaints()[-3000:]

    # --- what happens to it

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self, timeout_seconds: float = END_SECONDS) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + timeout_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            self.descendants()
            time.sleep(0.05)
        assert self._process.poll() is not None, f"did not end in {timeout_seconds:.0f} s: {self.told()}"
        return self._process.returncode

    def kill(self) -> None:
        self.descendants()
        self._process.kill()
        self._process.wait()

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to the whole foreground group."""
        self.descendants()
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        self.descendants()
        self._process.send_signal(signal.SIGTERM)

    # --- the processes that it has started

    def descendants(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._started.update(found)
        return found

    def capture(self) -> psutil.Process | None:
        """The process that holds Debezium's engine."""
        return next((one for one in self.descendants() if "tidegate.capture.engine_process" in words_of(one)), None)

    def workers(self) -> list[psutil.Process]:
        """Spark's Python workers: what the daemon has forked."""
        python = self.python()
        pids = {one.pid for one in python}
        return [one for one in python if parent_of(one) in pids]

    def python(self) -> list[psutil.Process]:
        """Spark's Python workers, and the daemon that forks them."""
        return [one for one in self.descendants() if "pyspark.daemon" in words_of(one)]

    @contextmanager
    def held(self) -> Iterator[None]:
        """No task of Spark's gets on meanwhile: a tick that begins now takes as long as this."""
        processes = self.python()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def await_nothing_left(self, timeout_seconds: float = 20.0) -> None:
        """Everything that it has started ends by itself."""
        _, alive = psutil.wait_procs(list(self._started), timeout_seconds)
        assert not alive, [words_of(one) for one in alive]

    def close(self) -> None:
        """Kills what is left of it."""
        self.descendants()
        for process in self._started:
            if process.is_running():
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        self._process.wait()
        psutil.wait_procs(list(self._started), 10)


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def parent_of(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


class Program:
    """Starts runs over one project, one after another or side by side."""

    def __init__(self, project: Path, environment: Mapping[str, str] | None = None) -> None:
        self.project = project
        self._environment = dict(environment or {})
        self._runs: list[Running] = []

    def run(self, *words: str, crash_at: str | None = None, environment: Mapping[str, str] | None = None) -> Running:
        crash = {"TIDEGATE_CRASH_AT": crash_at} if crash_at else {}
        running = Running(self.project, len(self._runs), words, {**self._environment, **(environment or {}), **crash})
        self._runs.append(running)
        return running

    def run_until_idle(self, crash_at: str | None = None) -> tuple[int, Running]:
        running = self.run("--until-idle", crash_at=crash_at)
        return running.end(), running

    def ask(self, *words: str) -> str:
        """What a command prints that ends well."""
        done = subprocess.run(
            [*PROGRAM, *words, "--project", str(self.project)],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=END_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def verify(self) -> None:
        """`tidegate verify` says equal, of every materialization."""
        assert all(one["equal"] for one in json.loads(self.ask("verify", "--json")))

    def close(self) -> None:
        for running in self._runs:
            running.close()


@contextmanager
def program(project: Path, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Whatever a test leaves running is killed at its end."""
    one = Program(project, environment)
    try:
        yield one
    finally:
        one.close()
