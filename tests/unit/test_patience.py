"""A run that is to end by itself does not wait without end for a destination that is away."""

from __future__ import annotations

import pytest

from tidegate.errors import DefinitelyNotDone, MaybeDone
from tidegate.pipeline.runner import Patience

TROUBLES = [
    DefinitelyNotDone("the server is down", remedy="Start it."),
    MaybeDone("the connection broke", remedy="Look at the server."),
]


def test_patience_ends_with_the_first_try_that_fails_when_its_time_is_over() -> None:
    patience = Patience(60.0)
    patience.check("copy", TROUBLES[0], 100.0)
    patience.check("copy", TROUBLES[0], 170.0)  # still the same try: the next may succeed
    with pytest.raises(DefinitelyNotDone) as given_up:
        patience.check("copy", TROUBLES[1], 171.0)
    assert given_up.value.message == '"copy" could not deliver for 60 seconds: the connection broke'
    assert given_up.value.remedy == "Look at the server. It goes on where it stopped."


def test_patience_begins_anew_when_a_round_has_arrived_and_counts_for_each_alone() -> None:
    patience = Patience(60.0)
    patience.check("copy", TROUBLES[0], 100.0)
    patience.check("copy", None, 150.0)
    patience.check("copy", TROUBLES[1], 155.0)
    patience.check("second", TROUBLES[0], 200.0)
    patience.check("copy", TROUBLES[0], 214.0)
    patience.check("second", TROUBLES[1], 216.0)


def test_who_follows_waits_without_end() -> None:
    patience = Patience(None)
    for hour in range(24):
        patience.check("copy", TROUBLES[hour % 2], 3600.0 * hour)
