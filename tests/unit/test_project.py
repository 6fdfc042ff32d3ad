"""What stands in a project's files is taken as it is meant, or refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import FixConfiguration
from tidegate.pipeline.project import declared_table, load

PROJECT = """\
name: shop
source: {kind: files, topic_prefix: shop, path: "*.jsonl"}
tables:
  orders: {key: [id], columns: {id: bigint}}
  lines:
    key: [id]
    columns: {id: bigint, made: timestamp}
"""


def write(folder: Path, text: str) -> Path:
    (folder / "views").mkdir(exist_ok=True)
    (folder / "views" / "v.sql").write_text("SELECT id FROM orders")
    (folder / "tidegate.yaml").write_text(text)
    return folder


def refusal(folder: Path) -> FixConfiguration:
    with pytest.raises(FixConfiguration) as refused:
        load(folder)
    return refused.value


def said(folder: Path) -> str:
    return refusal(folder).message.replace(f"{folder}/", "")


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, PROJECT)
    (tmp_path / "views" / "v.sql").write_bytes("SELECT id\nFROM orders -- für".encode("latin-1"))
    assert said(tmp_path) == "views/v.sql:2: the byte 0xfc is not UTF-8"
    assert refusal(tmp_path).remedy == "Save the file as UTF-8."
    (tmp_path / "tidegate.yaml").write_bytes(PROJECT.replace("shop\n", "läden\n", 1).encode("latin-1"))
    assert said(tmp_path) == "tidegate.yaml:1: the byte 0xe4 is not UTF-8"


def test_a_setting_that_is_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    write(tmp_path, PROJECT + "  orders: {key: [id]}\n")
    assert said(tmp_path) == 'tidegate.yaml:8: "orders" is given twice, first in line 4'
    write(tmp_path, PROJECT.replace("{id: bigint, made", "{id: int, id: bigint, made"))
    assert said(tmp_path) == 'tidegate.yaml:7: "id" is given twice, first in line 7'
    assert refusal(tmp_path).remedy == "Remove one, or put what both hold under one."


def test_two_tables_of_one_topic_are_refused(tmp_path: Path) -> None:
    write(tmp_path, PROJECT.replace("    key: [id]\n", "    topic: shop.public.orders\n    key: [id]\n"))
    assert said(tmp_path) == ('tidegate.yaml:5: table "lines" has the same topic as table "orders": shop.public.orders')


def test_a_type_that_is_none_is_refused_with_its_table_and_column(tmp_path: Path) -> None:
    write(tmp_path, PROJECT.replace("made: timestamp", "made: itn"))
    assert said(tmp_path) == 'tidegate.yaml:7: table "lines", column "made": "itn" is not a column type'
    assert refusal(tmp_path).remedy.startswith("Use one of boolean, ")


def test_how_a_table_writes_decimals_and_timestamps_may_be_said(tmp_path: Path) -> None:
    write(tmp_path, PROJECT.replace("    key: [id]\n", "    decimals: text\n    timestamps: micros\n    key: [id]\n"))
    table = declared_table(load(tmp_path), "lines")
    assert table is not None
    assert (table.decimals, table.column("made").unit) == ("text", "micros")
    write(tmp_path, PROJECT.replace("    key: [id]\n", "    decimals: txet\n    key: [id]\n"))
    assert said(tmp_path).startswith('tidegate.yaml:6: "tables.lines.decimals": Input should be ')
