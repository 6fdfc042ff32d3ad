"""A topic that cannot carry whole transactions is refused by what is known of it."""

from __future__ import annotations

import pytest

from tidegate.capture.topic_facts import TopicFacts, check_topic
from tidegate.errors import FixConfiguration


def refusal(facts: TopicFacts) -> FixConfiguration:
    with pytest.raises(FixConfiguration) as refused:
        check_topic(facts, "shop.transaction")
    return refused.value


def test_a_transaction_topic_with_two_partitions_is_refused() -> None:
    error = refusal(TopicFacts("broker:9092", "shop.transaction", 2))
    assert error.message == (
        "broker:9092: the transaction topic shop.transaction has 2 partitions, so the order of commits is lost"
    )
    assert error.remedy == "Give the transaction topic exactly one partition, and take a new snapshot."


@pytest.mark.parametrize("topic", ["shop.public.orders", "shop.transaction"])
@pytest.mark.parametrize("policy", ["compact", "compact,delete", "delete, compact"])
def test_a_compacted_topic_is_refused(topic: str, policy: str) -> None:
    error = refusal(TopicFacts("broker:9092", topic, 1, policy))
    assert error.message == (
        f"broker:9092: topic {topic} has cleanup.policy={policy}: compaction removes events that END has counted"
    )
    assert error.remedy == "Set cleanup.policy=delete for this topic, and take a new snapshot."


@pytest.mark.parametrize(
    "facts",
    [
        TopicFacts("broker:9092", "shop.transaction", 1),
        TopicFacts("broker:9092", "shop.public.orders", 12, "delete"),
        TopicFacts("broker:9092", "shop.public.compact", 2),
    ],
)
def test_a_topic_that_keeps_its_events_is_taken(facts: TopicFacts) -> None:
    check_topic(facts, "shop.transaction")
