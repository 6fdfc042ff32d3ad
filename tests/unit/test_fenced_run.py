"""Who owns a run's catalog decides what the run's end is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.catalog.sqlite import SqliteCatalog
from tidegate.errors import DefinitelyNotDone, Fenced
from tidegate.pipeline.runner import owned

FULL = DefinitelyNotDone("a pending file could not be written", remedy="Make room.")


@pytest.mark.parametrize("stumbled_over", [FULL, FileNotFoundError("a draft"), Fenced("of a round", remedy="None.")])
def test_a_run_that_is_fenced_off_says_so_whatever_it_has_stumbled_over(
    tmp_path: Path, stumbled_over: Exception
) -> None:
    former, newer = SqliteCatalog(tmp_path / "catalog.db"), SqliteCatalog(tmp_path / "catalog.db")
    with pytest.raises(Fenced, match="another process has taken over"), owned(former):
        newer.take_over()
        raise stumbled_over
    former.close()
    newer.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_run_that_owns_its_catalog_or_cannot_ask_it_says_what_it_has_stumbled_over(
    tmp_path: Path, is_closed: bool
) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    with pytest.raises(DefinitelyNotDone, match="a pending file could not be written"), owned(catalog):
        if is_closed:
            catalog.close()
        raise FULL
    catalog.close()
