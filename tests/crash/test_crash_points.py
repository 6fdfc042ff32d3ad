"""A crash at each point where something is half done: the next run goes on, and a reader never knows."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.crash.events import MadeUpShop, record, write_growing_project
from tests.crash.following import Follower, postgres_reader, sqlite_reader
from tests.crash.program import Program, program

from tidegate.embedded.postgres import EmbeddedPostgres
from tidegate.errors import DefinitelyNotDone

RUN_DIES = (
    "log-appended",
    "log-synced",
    "bound",
    "ingested",
    "sealed",
    "derived",
    "stored",
    "destination-committed",
    "log-committed",
)
WORKER_DIES = ("table-history-written", "view-history-written", "stage-sent")
TRANSACTIONS_PER_STAGE = 8
TRANSACTIONS_PER_MERGE = 60
EVENTS_PER_TICK = 12
POSTGRES = '  - {view: orders_with_lines, to: postgres, dsn: "${DESTINATION_DSN}", table: orders_with_lines}\n'


@pytest.fixture(scope="module")
def destination(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(tmp_path_factory.mktemp("destination") / "postgres", settings={"fsync": "off"})
    postgres.start()
    yield postgres
    postgres.remove()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Views into SQLite and into Postgres, over a recording that grows."""
    folder = write_growing_project(tmp_path, EVENTS_PER_TICK)
    file = folder / "tidegate.yaml"
    file.write_text(file.read_text().replace("tick: {", POSTGRES + "tick: {"))
    return folder


def play(one: Program, shop: MadeUpShop, point: str, visit: int) -> None:
    """More transactions come, and a run dies at the point; it must have got there."""
    count = TRANSACTIONS_PER_MERGE if point == "merged" else TRANSACTIONS_PER_STAGE
    record(one.project, shop, count)
    code, run = one.run_until_idle(crash_at=f"{point}:{visit}")
    if point not in WORKER_DIES:
        assert code == -signal.SIGKILL, f"{point}:{visit} was not reached: {code} {run.told()}"
    elif visit == 1:  # each new worker dies there too
        assert code == DefinitelyNotDone.exit_code, f"{point}:{visit}: {code} {run.told()}"
    else:
        assert code in (0, DefinitelyNotDone.exit_code), f"{point}:{visit}: {code} {run.told()}"


def play_all(project: Path, destination: EmbeddedPostgres, seed: int, points: Sequence[tuple[str, int]]) -> None:
    shop = MadeUpShop(seed)
    dsn = destination.dsn()
    readers = {"sqlite": sqlite_reader(project / "out.db"), "postgres": postgres_reader(dsn)}
    with ExitStack() as stack:
        one = stack.enter_context(program(project, {"DESTINATION_DSN": dsn}))
        followers = [Follower(read, shop.states) for read in readers.values()]
        for follower in followers:
            stack.enter_context(follower.following())
        for point, visit in points:
            play(one, shop, point, visit)
        code, run = one.run_until_idle()
        assert code == 0, run.told()
        one.verify()
    for follower in followers:
        follower.assert_at_the_end()


@pytest.mark.timeout(400)
def test_a_crash_at_each_point_loses_and_doubles_nothing(project: Path, destination: EmbeddedPostgres) -> None:
    points = [(point, 1 + place % 2) for place, point in enumerate(RUN_DIES) if not point.startswith("log-")]
    first = [("log-appended", 1), ("log-synced", 1)]
    play_all(project, destination, 1, [*first, *points, *((point, 1) for point in WORKER_DIES[:2]), ("merged", 1)])


BY_CUSTOMER = "  - {view: by_customer, to: sqlite, path: out.db, table: by_customer}\n"
STAGES = """SELECT customer, count(*) AS orders, sum(total) AS total
FROM orders_with_lines WHERE status LIKE '%ed %' GROUP BY customer"""


@pytest.mark.timeout(400)
def test_a_crash_between_the_stages_of_a_view_loses_and_doubles_nothing(tmp_path: Path) -> None:
    project, shop = write_growing_project(tmp_path, EVENTS_PER_TICK), MadeUpShop(4)
    (project / "views" / "by_customer.sql").write_text(STAGES)
    file = project / "tidegate.yaml"
    file.write_text(file.read_text().replace("tick: {", BY_CUSTOMER + "tick: {"))
    with program(project) as one:
        for point in ("stage-sent", "derived"):
            play(one, shop, point, 1)
        code, run = one.run_until_idle()
        assert code == 0, run.told()
        one.verify()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 4))
def test_crashes_in_any_order_at_any_visit_lose_and_double_nothing(
    project: Path, destination: EmbeddedPostgres, seed: int
) -> None:
    chance = random.Random(seed)
    points = [("log-appended", 1), *((point, chance.randint(1, 3)) for point in (*RUN_DIES[2:], *WORKER_DIES[:2]) * 2)]
    chance.shuffle(points)
    play_all(project, destination, seed, [*points, ("merged", 1), ("log-synced", 1)])
