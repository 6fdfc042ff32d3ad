"""Where reading stands is known without looking at every binding that there ever was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.timeline.binding import Binding, LogPartition, Tick, after, bind, rewound

PARTITIONS = [LogPartition("rows", 0), LogPartition("rows", 1), LogPartition("transactions", 0)]
GROWTHS = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=8)


@given(growths=GROWTHS, budget=st.integers(1, 12), data=st.data())
def test_reading_stands_before_any_binding_where_it_stood_then(
    growths: list[list[int]], budget: int, data: st.DataObject
) -> None:
    ends: dict[LogPartition, int] = {}
    stood: list[dict[LogPartition, int]] = [{}]
    bindings: list[Binding] = []
    for tick, growth in enumerate(growths):
        ends = {one: ends.get(one, 0) + more for one, more in zip(PARTITIONS, growth, strict=True)}
        bindings.append(bind(Tick(tick), stood[-1], ends, {}, budget))
        stood.append(after(stood[-1], bindings[-1]))
    since = data.draw(st.integers(0, len(bindings)))
    assert rewound(stood[-1], bindings[since:]) == stood[since]
