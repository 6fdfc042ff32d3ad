"""The Spark session that Tidegate works with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.worker.reuse": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    "spark.rdd.compress": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOGGING = Path(__file__).with_name("log4j2.properties")
_ending = threading.Event()  # from here on Spark's parts miss one another, and say so
_LOCAL = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def spark_session(conf: Mapping[str, str], master: str) -> SparkSession:
    """The session of this process: the settings given, over ours, over Spark's."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {**_DEFAULTS, **(_LOCAL if master.startswith("local") else {}), **conf}
    options = settings.get("spark.driver.extraJavaOptions", "")
    if "log4j2.configurationFile" not in options:
        settings["spark.driver.extraJavaOptions"] = f"{options} -Dlog4j2.configurationFile={_LOGGING.as_uri()}".strip()
    _ending.clear()
    # It would print a page about each query that Spark refuses; the error itself comes to us, and is told by us.
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True
    with _own_interrupt():
        return _session(SparkConf().setAll(list(settings.items())).setMaster(master).setAppName("tidegate"))


def _session(conf: SparkConf) -> SparkSession:
    if SparkContext._gateway is None:
        # A session of its own: what the terminal sends to all its processes is for the command to answer alone.
        words = {"stderr": subprocess.PIPE, "start_new_session": True}
        gateway = launch_gateway(conf, words)  # type: ignore[no-untyped-call]
        threading.Thread(target=_pass_on, args=(gateway.proc.stderr,), name="stderr of Spark", daemon=True).start()
        SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def _pass_on(lines: IO[bytes]) -> None:
    for line in worth_showing(lines):
        if not _ending.is_set():
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


_NOTES = (b"WARNING: ", b"PySpark daemon failed to flush")


def worth_showing(lines: Iterable[bytes]) -> Iterator[bytes]:
    """What Spark's processes write, but for notes to its authors, and for what its daemon says of a task that was
    broken off because another one failed: that other one's error is told by us."""
    block: list[bytes] = []  # tracebacks that are being read; those of several processes come mixed
    begun = 0
    for line in lines:
        if block or line.startswith(b"Traceback"):
            block.append(line)
            begun += 1 if line.startswith(b"Traceback") else 0 if line.startswith(b" ") else -1
            if begun == 0:
                yield from () if _is_of_spark_alone(block) else block
                block = []
        elif not line.startswith(_NOTES):
            yield line
    yield from block


def _is_of_spark_alone(traceback: Iterable[bytes]) -> bool:
    return all(b"/pyspark/" in line for line in traceback if line.lstrip().startswith(b'File "'))


def stop_session(spark: SparkSession) -> None:
    """Ends the session; a Java that is gone already, such as by a signal to all processes, has nothing to end."""
    _ending.set()
    with suppress(Py4JError, ConnectionError):
        spark.stop()


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Spark makes Ctrl-C cancel its jobs; what Ctrl-C means is for the command to say."""
    former = signal.getsignal(signal.SIGINT)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, former)
