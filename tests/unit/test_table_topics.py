"""A declared table's topic is its own: by its name END counts the table's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.pipeline import write_files

from tidegate.errors import BadRecord, FixConfiguration
from tidegate.pipeline.project import load
from tidegate.pipeline.sources import check_source

PROJECT = """
name: shop
source: {{kind: files, topic_prefix: shop, path: "*.jsonl"}}
tables:
  orders: {{topic: {topic}, key: [id], columns: {{id: bigint}}}}
"""


def write(folder: Path, topic: str) -> Path:
    source = {"version": "3.6.3.Final", "connector": "postgresql", "schema": "public", "table": "orders"}
    row = {"op": "c", "after": {"id": 1}, "source": source, "transaction": {"id": "7:40", "total_order": 1}}
    (folder / "events.jsonl").write_text(json.dumps({"topic": topic, "key": None, "value": row}) + "\n")
    return write_files(folder, PROJECT.format(topic=topic), copies="SELECT id FROM orders")


def test_a_table_is_checked_against_its_own_topic(tmp_path: Path) -> None:
    tables, _ = check_source(load(write(tmp_path, "shop.public.orders")))
    assert [table.topic for table in tables] == ["shop.public.orders"]


def test_a_topic_without_a_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FixConfiguration, match=r"is not called PREFIX\.schema\.table") as refused:
        check_source(load(write(tmp_path, "shop.orders")))
    assert "without routing" in refused.value.remedy


def test_a_routed_topic_is_refused_by_its_first_record(tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match=r'a row of table "public\.orders" in the topic of "cdc\.orders"'):
        check_source(load(write(tmp_path, "shop.cdc.orders")))
