"""Destinations by name."""

from __future__ import annotations

import pytest

from tidegate.destinations.registry import ENTRIES, Entry, destination, load
from tidegate.errors import FixConfiguration


@pytest.mark.parametrize("name", ENTRIES)
def test_a_destination_knows_its_own_name(name: str) -> None:
    assert destination(name).name == name


def test_a_missing_client_library_is_named_with_what_to_install() -> None:
    with pytest.raises(FixConfiguration, match="no_such_library") as raised:
        load("mysql", Entry("no_such_library", "MysqlDestination", "mysql"))
    assert 'pip install "tidegate[mysql]"' in raised.value.remedy


def test_a_broken_import_of_our_own_is_not_taken_for_a_missing_library() -> None:
    with pytest.raises(ImportError):
        load("mysql", Entry("tidegate.destinations.no_such_module", "MysqlDestination", "mysql"))
