"""Named places where a test can kill the process, to prove that a crash there loses and doubles nothing."""

from __future__ import annotations

import os
import signal

CRASH_POINTS = (
    "bound",  # the binding is in the catalog, nothing was read
    "ingested",  # pending files are written, the tick is not sealed
    "sealed",  # the tick is sealed, nothing was derived
    "table-history-written",  # in a Spark task: history file in place, arrangement not committed
    "view-history-written",  # in a Spark task: history file in place, arrangement not committed
    "stage-sent",  # what a stage sends is written, its arrangement has not committed the tick
    "derived",  # the tick's files are all written, the catalog does not list them
    "stored",  # a round's documents are with the driver, nothing is committed
    "destination-committed",  # the destination has committed, the recovery log does not know
    "log-committed",  # the recovery log knows the round, it is not acknowledged
    "merged",  # a merged history file is written, the catalog lists the old ones
    "log-appended",  # capture has appended records, they are not durable
    "log-synced",  # captured records are durable, the source's offset has not advanced
)

_VARIABLE = "TIDEGATE_CRASH_AT"
_visits: dict[str, int] = {}


def reach(name: str) -> None:
    """Dies here by SIGKILL if TIDEGATE_CRASH_AT is `name:visit` and this is that visit in this process."""
    wanted = os.environ.get(_VARIABLE)
    if wanted is None:
        return
    assert name in CRASH_POINTS, name
    _visits[name] = _visits.get(name, 0) + 1
    if wanted == f"{name}:{_visits[name]}":
        os.kill(os.getpid(), signal.SIGKILL)
