"""What every test may use: one Spark session for the whole run, started by the first test that asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = sys.executable


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session on two threads, stopped when the last test is done."""
    from tidegate.spark.session import spark_session  # no Spark for the tests that need none

    session = spark_session({"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}, "local[2]")
    yield session
    session.stop()
