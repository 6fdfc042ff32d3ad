"""Which message may follow which: one table, and everything else is a violation."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from tidegate.errors import ProtocolViolation
from tidegate.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Applied,
    Apply,
    Described,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    Spec,
    StartCommit,
    StartedCommit,
    Store,
    Validate,
    Validated,
)


class End:
    """The end of the stream, said by closing it."""


class Phase(Enum):
    """Where a stream stands after its last message."""

    NEW = auto()
    DESCRIBING = auto()
    VALIDATING = auto()
    APPLYING = auto()
    OPENING = auto()
    OPENED = auto()
    ACKNOWLEDGING = auto()  # no load was sent yet: between two rounds
    ACKNOWLEDGED = auto()
    LOADING_EARLY = auto()  # loads are under way, the last round is not acknowledged
    LOADING = auto()
    FLUSHING = auto()
    STORING = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    CLOSED = auto()


NEXT: dict[Phase, dict[type[Any], Phase]] = {
    Phase.NEW: {
        Spec: Phase.DESCRIBING,
        Validate: Phase.VALIDATING,
        Apply: Phase.APPLYING,
        Open: Phase.OPENING,
        End: Phase.CLOSED,
    },
    Phase.DESCRIBING: {Described: Phase.NEW},
    Phase.VALIDATING: {Validated: Phase.NEW},
    Phase.APPLYING: {Applied: Phase.NEW},
    Phase.OPENING: {Opened: Phase.OPENED},
    Phase.OPENED: {Acknowledge: Phase.ACKNOWLEDGING, End: Phase.CLOSED},
    Phase.ACKNOWLEDGING: {Acknowledged: Phase.ACKNOWLEDGED, Load: Phase.LOADING_EARLY, End: Phase.CLOSED},
    Phase.ACKNOWLEDGED: {Load: Phase.LOADING, Flush: Phase.FLUSHING, End: Phase.CLOSED},
    Phase.LOADING_EARLY: {
        Load: Phase.LOADING_EARLY,
        Loaded: Phase.LOADING_EARLY,
        Acknowledged: Phase.LOADING,
    },
    Phase.LOADING: {Load: Phase.LOADING, Loaded: Phase.LOADING, Flush: Phase.FLUSHING},
    Phase.FLUSHING: {Loaded: Phase.FLUSHING, Flushed: Phase.STORING},
    Phase.STORING: {Store: Phase.STORING, StartCommit: Phase.COMMITTING},
    Phase.COMMITTING: {StartedCommit: Phase.COMMITTED},
    Phase.COMMITTED: {Acknowledge: Phase.ACKNOWLEDGING, End: Phase.CLOSED},
    Phase.CLOSED: {},
}


def next_phase(phase: Phase, message: type[Any]) -> Phase:
    """The phase after a message of this type, or a violation."""
    if after := NEXT[phase].get(message):
        return after
    allowed = ", ".join(kind.__name__ for kind in NEXT[phase]) or "nothing"
    raise ProtocolViolation(
        f"{message.__name__} came out of turn: the session is {phase.name.lower()}, where only {allowed} may come",
        remedy="This is a bug in the runtime or in the driver. Report it with the message's name and the phase.",
    )
