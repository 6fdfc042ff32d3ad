"""What a tick costs beside a bare Spark job of the same shape, and what a whole run does beside a plain script.

`python -m bench.tick` prints both as ratios within this run: the machine's own speed cancels out. A bare job is read,
shuffle by key, fold, collect: no more than what any tick on Spark has to do. `--quick` takes a tenth of the events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bench.workload import Workload, records, write
from pyspark.sql import SparkSession

from tidegate.pipeline.defining import define_all
from tidegate.pipeline.materialize import Materializer
from tidegate.pipeline.project import FilesSource, load
from tidegate.pipeline.runner import catalog_of, session, ticks_of
from tidegate.pipeline.sources import FilesFeed

PROJECT = """
name: shop
spark: {master: "local[2]"}
source: {kind: files, topic_prefix: shop, path: "events/*.jsonl", partitions: 2}
tables:
  purchase_orders: {key: [id], columns: {id: bigint, order_date: date, purchaser_id: int, total: bigint}}
  order_lines: {key: [id], columns: {id: bigint, order_id: bigint, product_id: int, quantity: int, price: bigint}}
materializations:
  - {view: orders_with_lines, to: sqlite, path: out.db, table: orders_with_lines}
"""
VIEW = """
SELECT po.id, po.order_date, po.purchaser_id, po.total, SUM(ol.quantity * ol.price) AS lines_total,
       ARRAY_AGG(STRUCT(ol.id, ol.product_id, ol.quantity, ol.price)) FILTER (WHERE ol.id IS NOT NULL) AS lines
FROM purchase_orders po LEFT JOIN order_lines ol ON ol.order_id = po.id
GROUP BY po.id, po.order_date, po.purchaser_id, po.total
"""
TICKS, WARM_UP = 60, 15
EVENTS_OF_A_TRANSACTION = 5  # BEGIN, three rows, END
TRANSACTIONS_OF_A_TICK = 3  # nine row changes
STATE = Workload(orders=20_000, updates=0)


def project(folder: Path) -> Path:
    (folder / "views").mkdir(parents=True)
    (folder / "views" / "orders_with_lines.sql").write_text(VIEW)
    (folder / "tidegate.yaml").write_text(PROJECT)
    (folder / "events").mkdir()
    return folder


# --- the fixed cost of a tick


def _reads(loads: Iterable[list[int]]) -> Iterator[tuple[int, int]]:
    return ((number % 2, number) for load in loads for number in load)


def _folds(rows: Iterable[tuple[int, int]]) -> Iterator[int]:
    yield sum(number for _, number in rows)


def _same(key: int) -> int:
    return key


def bare_job(spark: SparkSession) -> None:
    loads = spark.sparkContext.parallelize([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], 2)
    assert sum(loads.mapPartitions(_reads).partitionBy(2, _same).mapPartitions(_folds).collect()) == 55


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def fixed_cost(folder: Path) -> dict[str, Any]:
    """Ticks of nine changes over 120,000 rows, and as many bare jobs, by turns in one session."""
    loaded = load(project(folder))
    settings = loaded.file.source
    assert isinstance(settings, FilesSource)
    recorded = records(replace(STATE, updates=TICKS * TRANSACTIONS_OF_A_TICK))
    _append(folder, islice(recorded, STATE.orders * (STATE.lines + 3)))
    catalog = catalog_of(loaded)
    catalog.take_over()
    feed = FilesFeed(loaded, settings)
    feed.import_once()
    spark = session(loaded)
    defined = define_all(loaded, feed.tables(), spark)
    ticks = ticks_of(loaded, spark, catalog, defined)
    ticks.recover()
    delivering = Materializer(loaded, loaded.file.materializations[0], defined.views[0], catalog, lambda _: None)

    def tick() -> None:
        assert ticks.step() is not None

    def deliver() -> None:
        assert delivering.deliver()

    while ticks.step() is not None:
        deliver()
    found: dict[str, list[float]] = {"bare_job": [], "tick": [], "delivery": []}
    for _ in range(TICKS):
        _append(folder, islice(recorded, TRANSACTIONS_OF_A_TICK * EVENTS_OF_A_TRANSACTION))
        feed.import_once()
        found["bare_job"].append(timed(lambda: bare_job(spark)))
        found["tick"].append(timed(tick))
        found["delivery"].append(timed(deliver))
    delivering.close()
    spark.stop()
    catalog.close()
    middle = {name: statistics.median(times[WARM_UP:]) for name, times in found.items()}
    return {f"{name}_ms_p50": round(time_ms, 1) for name, time_ms in middle.items()} | {
        "tick_in_bare_jobs": round(middle["tick"] / middle["bare_job"], 2),
        "tick_and_delivery_in_bare_jobs": round((middle["tick"] + middle["delivery"]) / middle["bare_job"], 2),
    }


def _append(folder: Path, lines: Iterable[str]) -> None:
    with (folder / "events" / "shop.jsonl").open("a") as file:
        file.writelines(lines)


# --- row events a second, end to end


def throughput(folder: Path, workload: Workload) -> dict[str, Any]:
    """`tidegate run --until-idle`, from files into SQLite, and then bench/plain.py on the same events."""
    write(folder / "events.jsonl", workload)
    (folder / "plain").mkdir()
    plain = Path(__file__).with_name("plain.py")
    plain_seconds = min(_plain_seconds(plain, folder) for _ in range(2))
    start_up = _run_seconds(folder / "start-up", folder / "events.jsonl", 1_000)
    whole = _run_seconds(folder / "whole", folder / "events.jsonl", None)
    rates = {"plain": workload.row_events / plain_seconds, "tidegate": workload.row_events / (whole - start_up)}
    return {
        "workload": asdict(workload) | {"row_events": workload.row_events},
        "plain_seconds": round(plain_seconds, 2),
        "start_up_seconds": round(start_up, 2),
        "whole_run_seconds": round(whole, 2),
        **{f"{name}_row_events_a_second": round(rate) for name, rate in rates.items()},
        "tidegate_to_plain": round(rates["tidegate"] / rates["plain"], 3),
    }


def _plain_seconds(script: Path, folder: Path) -> float:
    words = [sys.executable, str(script), str(folder / "events.jsonl"), str(folder / "plain" / "out.jsonl")]
    answer = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return float(answer["seconds"])


def _run_seconds(folder: Path, events: Path, lines: int | None) -> float:
    """A whole `tidegate run --until-idle`, from the start of its process to its end."""
    target = project(folder) / "events" / "shop.jsonl"
    if lines is None:
        os.link(events, target)
    else:
        with events.open() as file:
            target.write_text("".join(islice(file, lines)))
    words = [sys.executable, "-m", "tidegate.cli.main", "run", "--until-idle", "--project", str(folder)]
    began = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the events")
    quick = parser.parse_args().quick
    workload = Workload(orders=10_000, updates=20_000) if quick else Workload()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        print(json.dumps({"fixed cost of a tick of 9 changes": fixed_cost(Path(name) / "tick")}, indent=1), flush=True)
        print(json.dumps({"end to end": throughput(Path(name) / "run", workload)}, indent=1))


if __name__ == "__main__":
    main()
