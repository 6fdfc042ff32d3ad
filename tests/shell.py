"""The command as a user types it, many times in one process of its own: Java starts once, Spark as often as needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_SERVE = """
import json, os, sys, tempfile
from tidegate.cli.main import app

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    words, environment = json.loads(line)
    os.environ.update(environment)
    sys.argv = ["tidegate", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            app()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        texts = [file.seek(0) or file.read().decode() for file in (out, err)]
    answers.write(json.dumps([code, *texts]) + chr(10))
    answers.flush()
"""


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Shell:
    """Runs `tidegate` again and again."""

    def __enter__(self) -> Shell:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)

    def __call__(self, *words: str | Path, **environment: str) -> Done:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([[str(word) for word in words], environment]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process of the commands has ended"
        return Done(*json.loads(answer))
