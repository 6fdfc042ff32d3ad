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
    assert said(tmp_path) == "tidegate.yaml:6: \"tables.lines.decimals\" has to be one of 'auto', 'text' or 'base64'"


DELIVERED = (
    PROJECT
    + """\
materializations:
  - {view: v, to: sqlite, path: out.db}
  - view: v
    to: sqlite
    path: out.db
    name: second
"""
)
SQLITE = "Known here: path, table, timeout_seconds."
ADD_KEY = "Set `key: [...]` of tables.orders in tidegate.yaml to the table's primary key columns."
FIRST = 'tidegate.yaml:9: sqlite of "v-sqlite"'
MISTAKES = {
    ("to: sqlite, path", "to: sqlit, path"): (
        'tidegate.yaml:9: there is no destination "sqlit"',
        'Did you mean "sqlite"? There are: postgres, sqlite.',
    ),
    ("path: out.db}", "tabel: x, path: out.db}"): (
        f'{FIRST}: unknown setting "tabel"',
        f'Did you mean "table"? {SQLITE}',
    ),
    (", path: out.db}", "}"): (f'{FIRST}: "path" is missing', f"Add `path: …` here. {SQLITE}"),
    ("path: out.db}", "path: 5}"): (f'{FIRST}: "path" has to be text', SQLITE),
    ("out.db}", "out.db, timeout_seconds: long}"): (f'{FIRST}: "timeout_seconds" has to be a number', SQLITE),
    ("    path: out.db\n", ""): (
        'tidegate.yaml:10: sqlite of "second": "path" is missing',
        f"Add `path: …` here. {SQLITE}",
    ),
    ("{key: [id], columns", "{columns"): ('tidegate.yaml:4: table "orders" has no key', ADD_KEY),
    ("{key: [id]", "{key: [number]"): (
        "tidegate.yaml:4: table \"orders\": the key ['number'] is not among its columns",
        ADD_KEY,
    ),
    ("  lines:\n", "  lines:\n    topic: ship.public.lines\n"): (
        'tidegate.yaml:5: table "lines": topic "ship.public.lines" does not start with the source\'s topic_prefix'
        ' "shop."',
        "Correct tables.lines.topic or source.topic_prefix in tidegate.yaml.",
    ),
    ("kind: files", "kind: filse"): (
        'tidegate.yaml:2: there is no source of kind "filse"',
        'Did you mean "files"? There are: files, postgres.',
    ),
    ("kind: files", "kind: kafka"): (
        'tidegate.yaml:2: there is no source of kind "kafka"',
        "There are: files, postgres.",
    ),
    ("kind: files, ", ""): (
        'tidegate.yaml:2: "source.kind" is missing',
        "Add `kind: …` here. There are: files, postgres.",
    ),
    ("shop\nsource", "shop\ntick: {every_ms: -1}\nsource"): (
        'tidegate.yaml:2: "tick.every_ms" has to be 0 or more',
        "See docs/configuration.md for values.",
    ),
    ("shop\nsource", "shop\ntick: often\nsource"): (
        'tidegate.yaml:2: "tick" has to be a section: settings by name',
        "See docs/configuration.md for values.",
    ),
}


@pytest.mark.parametrize("change", MISTAKES)
def test_every_mistake_names_its_line_and_its_remedy_in_plain_words(tmp_path: Path, change: tuple[str, str]) -> None:
    assert change[0] in DELIVERED
    write(tmp_path, DELIVERED.replace(*change, 1))
    assert (said(tmp_path), refusal(tmp_path).remedy) == MISTAKES[change]


def test_a_table_may_be_called_as_a_kind_of_source(tmp_path: Path) -> None:
    write(tmp_path, PROJECT.replace("  lines:\n", "  files:\n    kye: [id]\n"))
    assert said(tmp_path) == 'tidegate.yaml:6: unknown setting "tables.files.kye"'
