"""The fence of a destination that keeps the checkpoint itself: decisions only, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

from tidegate.errors import FixConfiguration
from tidegate.protocol.messages import START, KeyRange, RuntimeCheckpoint

Fence = NewType("Fence", int)
_ROWS = "tidegate_checkpoints"


@dataclass(frozen=True)
class FenceRow:
    """A row of `tidegate_checkpoints`; whoever holds its fence may commit for its range."""

    key_range: KeyRange
    fence: Fence
    checkpoint: RuntimeCheckpoint


@dataclass(frozen=True)
class OpenPlan:
    """What Open writes: `mine` belongs to the session that opens; `rows` are all that change, `mine` included."""

    mine: FenceRow
    rows: tuple[FenceRow, ...]


def plan_open(rows: Sequence[FenceRow], wanted: KeyRange) -> OpenPlan:
    """Fences off every session whose range overlaps, and inherits the checkpoint for the wanted range."""
    overlapping = [row for row in rows if row.key_range.overlaps(wanted)]
    fence = Fence(max((row.fence for row in overlapping), default=0) + 1)
    raised = tuple(replace(row, fence=fence) for row in overlapping if row.key_range != wanted)
    mine = FenceRow(wanted, fence, checkpoint_over(overlapping, wanted))
    return OpenPlan(mine, (*raised, mine))


def checkpoint_over(rows: Sequence[FenceRow], wanted: KeyRange) -> RuntimeCheckpoint:
    """The checkpoint that holds at every key of the range; START if no row covers any of it.

    Rows only move forward, so at any key the newest covering row is the truth. (The narrowest is the newest after
    splits were divided, but not after they were joined again.)
    """
    newest = [_newest_at(rows, begin) for begin in _segment_begins(rows, wanted)]
    if len({checkpoint.tick for checkpoint in newest}) > 1:
        ticks = ", ".join(str(tick) for tick in sorted({checkpoint.tick for checkpoint in newest}))
        raise FixConfiguration(
            f"the parts of key range {wanted.text} are at different ticks ({ticks}), so none holds for all of it",
            remedy="Run with the former number of splits until all of them are at the same tick, then change it.",
        )
    return max(newest, key=_progress)


def _segment_begins(rows: Sequence[FenceRow], wanted: KeyRange) -> set[int]:
    """The first key of every stretch of the range over which the covering rows are the same."""
    bounds = {row.key_range.begin for row in rows} | {row.key_range.end + 1 for row in rows}
    return {wanted.begin} | {bound for bound in bounds if bound in wanted}


def _newest_at(rows: Sequence[FenceRow], key_hash: int) -> RuntimeCheckpoint:
    covering = (row.checkpoint for row in rows if key_hash in row.key_range)
    return max(covering, key=_progress, default=START)


def _progress(checkpoint: RuntimeCheckpoint) -> tuple[int, int]:
    return checkpoint.tick, checkpoint.round


def agreed_checkpoint(
    name: str, log: RuntimeCheckpoint, destination: RuntimeCheckpoint, here: RuntimeCheckpoint | None
) -> RuntimeCheckpoint:
    """The destination's checkpoint, if it is the log's or one round ahead of it; anything else is refused.

    `here` is what the state folder says of the destination's tick: None if it has no such tick.
    """
    require_not_behind(name, log, destination)
    require_not_ahead(name, log, destination, here)
    return destination


def require_not_behind(name: str, log: RuntimeCheckpoint, destination: RuntimeCheckpoint) -> None:
    """Refuses a destination that lacks a round which the log knows of."""
    if destination.tick < log.tick or destination.round < log.round:
        raise FixConfiguration(
            f'materialization "{name}": {_says("the destination", destination)}, but'
            f" {_says('the recovery log', log)}: its row in {_ROWS} was lost, or it was restored from a backup",
            remedy="Restore a backup of the destination that is not older than the recovery log, "
            "or give the materialization a new name and an empty table, which builds it anew.",
        )


def require_not_ahead(
    name: str, log: RuntimeCheckpoint, destination: RuntimeCheckpoint, here: RuntimeCheckpoint | None
) -> None:
    """Refuses a destination that holds what this state folder has not brought there.

    The rounds do not tell: a state folder that is new, or set back, may be one round behind as after any crash.
    """
    wrong = _foreign(log, destination, here)
    if wrong:
        raise FixConfiguration(
            f'materialization "{name}": {_says("the destination", destination)}, {wrong}'
            f" ({_says('the recovery log', log)}): the catalog was lost, an older copy of it was put back,"
            " or another project writes under this name",
            remedy="Bring the newest copy of the state folder back, "
            "or give the materialization a new name and an empty table.",
        )


def _foreign(log: RuntimeCheckpoint, destination: RuntimeCheckpoint, here: RuntimeCheckpoint | None) -> str | None:
    if here is None:
        return "which the state folder has not reached"
    if destination.seal is not None and destination.seal != here.seal:
        return "which is another one than that tick of the state folder"
    return "which is more than one round ahead of the state folder" if destination.round > log.round + 1 else None


def _says(who: str, checkpoint: RuntimeCheckpoint) -> str:
    if checkpoint.tick <= START.tick:
        return f"{who} knows of no round"
    return f"{who} is at tick {checkpoint.tick} (round {checkpoint.round})"
