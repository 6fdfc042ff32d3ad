"""The pipeline as real processes of their own, which can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tidegate.errors import DefinitelyNotDone

PROGRAM = (sys.executable, "-m", "tidegate.cli.main")


class Pipeline:
    """`tidegate run` over one project folder; every process that it starts has ended after `close`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = os.environ | environment
        self._running: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._orphans: list[psutil.Process] = []

    def start(self) -> None:
        """Starts `tidegate run` and returns at once."""
        self._running = self._open("run", "run", "--project", str(self._folder))

    def check(self) -> None:
        """Raises if the pipeline ended by itself."""
        if self._running is not None and self._running.poll() is not None:
            raise self._ended("run", self._running.returncode)

    def kill(self) -> None:
        """SIGKILL, as from the kernel when memory is short; what the process had started is left to itself."""
        assert self._running is not None
        self._orphans += _descendants(self._running.pid)
        self._running.kill()
        self._running.wait()
        self._running = None

    def stop(self, timeout_seconds: float) -> None:
        """Ctrl-C: the round under way is finished."""
        if self._running is not None:
            self._running.send_signal(signal.SIGINT)
            self._await(self._running, "run", timeout_seconds)
            self._running = None

    def finish(self, timeout_seconds: float) -> None:
        """`run --until-idle`: everything captured is delivered when this returns."""
        process = self._open("until-idle", "run", "--until-idle", "--project", str(self._folder))
        if self._await(process, "until-idle", timeout_seconds):
            raise self._ended("until-idle", process.returncode)

    def verify(self, timeout_seconds: float) -> str:
        """`equal`, or what `tidegate verify` says instead."""
        code, answer = self.ask("verify", timeout_seconds)
        return "equal" if code == 0 else json.dumps(answer)

    def ask(self, command: str, timeout_seconds: float) -> tuple[int, Any]:
        """The exit code and the JSON that `tidegate <command> --json` answers."""
        process = self._open(command, command, "--json", "--project", str(self._folder))
        code = self._await(process, command, timeout_seconds)
        text = self._output(command).read_text()
        return code, json.loads(text) if text.strip() else None

    def close(self) -> None:
        """Ends what is left of all that was started here, and of what that has started."""
        left = [child for process in self._started for child in _descendants(process.pid)]
        for process in self._started:
            process.kill()
            process.wait()
        for orphan in (*left, *self._orphans):
            _kill(orphan)
        psutil.wait_procs([*left, *self._orphans], timeout=10)
        self._started.clear()

    def _await(self, process: subprocess.Popen[bytes], name: str, timeout_seconds: float) -> int:
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise DefinitelyNotDone(
                f"`tidegate {name}` did not end within {timeout_seconds:.0f} s", remedy=f"Read {self._log(name)}."
            ) from None

    def _open(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """A session of its own: Ctrl-C in the terminal reaches the demo alone, which then ends its children."""
        with self._output(name).open("wb") as output, self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [*PROGRAM, *words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def _output(self, name: str) -> Path:
        return self._folder / f"{name}.out"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _ended(self, name: str, code: int) -> DefinitelyNotDone:
        last = "".join(path.read_text(errors="replace") for path in (self._output(name), self._log(name)))[-1500:]
        return DefinitelyNotDone(
            f"the pipeline ended by itself with code {code}:\n{last.strip()}",
            remedy=f"Read {self._log(name)}.",
        )


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    """Checks the start time beside the id: an id that another process has got since is left alone."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
