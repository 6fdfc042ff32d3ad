"""What acceptance tests share: a process that runs commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.shell import Shell


@pytest.fixture(scope="session")
def shell() -> Iterator[Shell]:
    with Shell() as shell:
        yield shell
