"""What a catalog keeps, and what it promises: each call is one transaction, refused to anyone but the newest owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.protocol.messages import RuntimeCheckpoint
from tidegate.protocol.session import RecoveryLog
from tidegate.timeline.binding import Binding, LogPartition, Tick


@dataclass(frozen=True)
class Seal:
    """Tick `tick` contains the transactions listed in `transactions` (an Arrow blob), and is definite from here on."""

    tick: Tick
    next_position: int
    last_lsn: int
    last_snapshot: str | None
    source_position: str | None
    commit_ms: int | None
    needed_since: int | None
    transactions: bytes = field(repr=False)


@dataclass(frozen=True)
class HistoryFile:
    """One file of a collection's history: the updates of the ticks `first` to `last`."""

    collection: str
    path: str
    first: int
    last: int
    rows: int
    size_bytes: int
    merges: int = 0


@dataclass(frozen=True)
class Applied:
    """Up to which tick a partition of a collection's arrangement must have come."""

    collection: str
    layout: str
    partition: int
    tick: int


class Catalog(RecoveryLog, Protocol):
    def take_over(self) -> int:
        """Makes the caller the one owner; all others are fenced off from now on."""

    def check_owner(self) -> None:
        """Raises Fenced if another owner has taken over."""

    def setting(self, name: str) -> str | None:
        """A value kept under a name, such as a table's schema."""

    def settings(self, prefix: str) -> dict[str, str]: ...

    def set(self, name: str, value: str) -> None: ...

    def bind(self, binding: Binding) -> bool:
        """Writes the next tick's binding; False, and nothing written, if that tick is bound already."""

    def bindings(self, since: int) -> list[Binding]: ...

    def positions(self) -> dict[LogPartition, int]:
        """Where reading goes on after the newest binding."""

    def seal(self, seal: Seal) -> None:
        """Seals the tick after the last sealed one, with a mark that no seal of another catalog or copy has."""

    def last_seal(self) -> Seal | None: ...

    def seals(self, since: int, before: int) -> list[Seal]:
        """The seals of the ticks from `since` to before `before`, in order."""

    def derive(self, tick: Tick, files: Sequence[HistoryFile], applied: Sequence[Applied]) -> None:
        """Lists all files of one tick, and moves the collections' frontier behind it."""

    def derived(self) -> int:
        """The last tick whose files are all listed; -1 if none."""

    def applied(self) -> list[Applied]: ...

    def files(self, collection: str, after: int, upto: int) -> list[HistoryFile]:
        """The files with updates of the ticks after `after` up to `upto`, in their order."""

    def add_files(self, files: Sequence[HistoryFile], applied: Sequence[Applied]) -> None:
        """Lists the files of a collection that was filled later, at a tick that is derived already."""

    def replace(self, old: Sequence[HistoryFile], new: HistoryFile) -> None:
        """Lists a merged file in place of those it was made of."""

    def checkpoint(self, materialization: str) -> RuntimeCheckpoint:
        """Up to where all of a materialization is delivered, as the recovery log knows it."""

    def close(self) -> None: ...
