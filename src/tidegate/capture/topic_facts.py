"""What a topic must be like, so that whole transactions can be read out of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.errors import FixConfiguration


@dataclass(frozen=True)
class TopicFacts:
    """What is known of a topic, and who told it: a file, a broker."""

    told_by: str
    topic: str
    partitions: int
    cleanup_policy: str = "delete"  # as Kafka says it: "delete", "compact" or "compact,delete"


def check_topic(facts: TopicFacts, transaction_topic: str) -> None:
    """Refuses a topic that cannot keep the order of commits, or that loses events which END has counted."""
    if facts.topic == transaction_topic and facts.partitions > 1:
        raise FixConfiguration(
            f"{facts.told_by}: the transaction topic {facts.topic} has {facts.partitions} partitions,"
            " so the order of commits is lost",
            remedy="Give the transaction topic exactly one partition, and take a new snapshot.",
        )
    if "compact" in map(str.strip, facts.cleanup_policy.split(",")):
        raise FixConfiguration(
            f"{facts.told_by}: topic {facts.topic} has cleanup.policy={facts.cleanup_policy}:"
            " compaction removes events that END has counted",
            remedy="Set cleanup.policy=delete for this topic, and take a new snapshot.",
        )
