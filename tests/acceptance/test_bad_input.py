"""Bad input: what happened, where, and what to do is said; nothing is lost; after the cure all goes on."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.shell import Done, Shell

from tidegate.cli.init import write_project

Documents = list[tuple[Any, ...]]
AFTER_ALL = [
    (1, 100, "2026-01-05", "paid", "42.00", [(11, "tea", 2, 4.5), (12, "cup", 3, 11)]),
    (2, 101, "2026-01-05", "paid", "16.50", [(22, "beans", 2, 8.25)]),
    (4, 102, "2026-01-06", "new", None, []),
]
AFTER_THREE = [AFTER_ALL[0], (2, 101, "2026-01-05", "new", "9.90", [(21, "coffee", 1, 9.9)])]
BROKEN_REMEDY = "Correct it and run again: what stands before is imported."
RECORD_REMEDY = (
    "Correct the table's key and columns in tidegate.yaml and run again; or, if the connector or the record is wrong,"
    " correct that and begin with a new state folder. Nothing after this record was taken, nothing before it was lost."
)


class Recorded:
    """The project that `tidegate init` writes, with its events in two files: three transactions, then four."""

    def __init__(self, folder: Path, shell: Shell) -> None:
        self.folder, self._shell = folder, shell
        list(write_project(folder))
        recorded = folder / "events" / "shop.jsonl"
        self.lines = recorded.read_text().splitlines()
        recorded.unlink()
        self.first, self.second = folder / "events" / "1.jsonl", folder / "events" / "2.jsonl"
        split = 1 + next(place for place, line in enumerate(self.lines) if '"END"' in line and '"703:' in line)
        self.write(self.first, self.lines[:split])
        self.rest = self.lines[split:]
        self.write(self.second, self.rest)

    def write(self, path: Path, lines: list[str]) -> None:
        path.write_text("".join(line + "\n" for line in lines))

    def change(self, old: str, new: str) -> None:
        path = self.folder / "tidegate.yaml"
        text = path.read_text()
        assert text.count(old) >= 1, old
        path.write_text(text.replace(old, new))

    def __call__(self, *words: str, **environment: str) -> Done:
        return self._shell(*words, "--project", self.folder, **environment)

    def run(self) -> Done:
        return self("run", "--until-idle")

    def refused(self, *words: str, code: int = 2) -> str:
        """What is said before the command ends; never a trace of ours."""
        done = self(*(words or ("run", "--until-idle")))
        assert (done.code, "Traceback" in done.err) == (code, False), done.err
        return done.err.replace(f"{self.folder}/", "")

    def documents(self, table: str = "orders_with_lines") -> Documents:
        connection = sqlite3.connect(f"file:{self.folder / 'out.db'}?mode=ro", uri=True)
        try:
            query = f"SELECT id, customer, order_date, status, total, lines FROM {table} ORDER BY id"
            return [(*row[:-1], lines_of(row[-1])) for row in connection.execute(query)]
        finally:
            connection.close()

    def goes_on(self, table: str = "orders_with_lines") -> None:
        """The cured project delivers everything, as if nothing had happened."""
        done = self.run()
        assert done.code == 0, done.err
        assert self.documents(table) == AFTER_ALL
        verified = self("verify")
        assert (verified.code, ": equal (" in verified.out) == (0, True), verified.out + verified.err


def lines_of(text: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(line.values()) for line in json.loads(text))


@pytest.fixture
def recorded(tmp_path: Path, shell: Shell) -> Recorded:
    return Recorded(tmp_path / "shop", shell)


# --- records


def test_a_broken_line_is_named_and_the_run_goes_on_behind_it(recorded: Recorded) -> None:
    recorded.write(recorded.second, [*recorded.rest[:2], recorded.rest[2][:40], *recorded.rest[3:]])
    assert recorded.refused() == (
        f"error: events/2.jsonl, line 3: Input data was truncated\n  remedy: {BROKEN_REMEDY}\n"
    )
    recorded.write(recorded.second, recorded.rest)
    recorded.goes_on()


def test_a_value_that_is_not_json_is_named_and_the_run_goes_on_behind_it(recorded: Recorded) -> None:
    broken = json.dumps({"topic": "shop.public.order_lines", "key": '{"id": 31}', "value": '{"op": c}'})
    recorded.write(recorded.second, [recorded.rest[0], broken, *recorded.rest[1:]])
    assert recorded.refused() == (
        "error: events/2.jsonl, line 2: its value is not JSON: JSON is malformed: invalid character (byte 7)\n"
        f"  remedy: {BROKEN_REMEDY}\n"
    )
    recorded.write(recorded.second, recorded.rest)
    recorded.goes_on()


def test_a_broken_envelope_is_named_by_its_place_in_the_log(recorded: Recorded) -> None:
    recorded.write(recorded.first, [*recorded.lines[:1], '{"topic": "shop.public.order_lines", "value": {"op": 1}}'])
    said = (
        "error: topic shop.public.order_lines, partition 0, offset 0: the record does not fit table"
        f' "order_lines": Expected `str`, got `int` - at `$.op`\n  remedy: {RECORD_REMEDY}\n'
    )
    assert recorded.refused("check") == said
    assert recorded.refused() == said


def test_a_topic_that_no_record_has_is_refused_if_another_is_nearly_called_so(recorded: Recorded) -> None:
    recorded.change("order_lines: {key", "order_lines: {topic: shop.public.order_line, key")
    said = (
        'error: no record has the topic "shop.public.order_line"\n'
        '  remedy: Did you mean "shop.public.order_lines"? Correct the table\'s topic.\n'
    )
    assert recorded.refused("check") == said
    assert recorded.refused() == said
    recorded.change("topic: shop.public.order_line,", "")
    recorded.goes_on()


def test_a_topic_without_any_record_is_no_mistake_but_said(recorded: Recorded) -> None:
    recorded.change("  order_lines: {", "  returns: {key: [id], columns: {id: bigint}}\n  order_lines: {")
    checked = recorded("check")
    assert checked.code == 0
    assert 'warning: table "returns": no record has the topic "shop.public.returns" yet\n' in checked.out


def test_a_key_column_that_records_lack_is_refused(recorded: Recorded) -> None:
    recorded.change(
        "order_lines: {key: [id], columns: {id: bigint", "order_lines: {key: [number], columns: {number: bigint"
    )
    said = (
        'error: topic shop.public.order_lines, partition 0, offset 0: the record does not fit table "order_lines":'
        f" Object missing required field `number` - at `$.after`\n  remedy: {RECORD_REMEDY}\n"
    )
    view = recorded.folder / "views" / "orders_with_lines.sql"
    right = view.read_text()
    view.write_text(right.replace("ol.id", "ol.number"))
    assert recorded.refused("check") == said
    assert recorded.refused() == said
    recorded.change(
        "order_lines: {key: [number], columns: {number: bigint", "order_lines: {key: [id], columns: {id: bigint"
    )
    view.write_text(right)
    recorded.goes_on()


def test_a_key_that_is_not_among_the_columns_is_refused(recorded: Recorded) -> None:
    recorded.change("order_lines: {key: [id]", "order_lines: {key: [number]")
    assert recorded.refused("check") == (
        "error: tidegate.yaml:9: table \"order_lines\": the key ['number'] is not among its columns\n"
        "  remedy: Set `key: [...]` of tables.order_lines in tidegate.yaml to the table's primary key columns.\n"
    )


def test_a_name_that_yaml_reads_as_something_else_is_to_be_quoted(recorded: Recorded) -> None:
    recorded.change("order_lines: {key: [id]", "order_lines: {key: [no]")
    assert recorded.refused("check") == (
        'error: tidegate.yaml:9: "tables.order_lines.key.0" has to be text\n'
        "  remedy: Write it in quotes: YAML reads words such as no and on, and numbers, as something else than text.\n"
    )


def test_a_type_may_be_mended_as_long_as_nothing_is_sealed(recorded: Recorded) -> None:
    recorded.change("item: string", "item: int")
    said = (
        'error: topic shop.public.order_lines, partition 0, offset 0: the record does not fit table "order_lines":'
        f" Expected `int | null`, got `str` - at `$.after.item` (declared as int)\n  remedy: {RECORD_REMEDY}\n"
    )
    assert recorded.refused() == said
    recorded.change("item: int", "item: string")
    recorded.goes_on()


def test_a_value_that_comes_later_and_does_not_fit_takes_nothing_away(recorded: Recorded) -> None:
    recorded.second.unlink()
    recorded.change("decimal(10,2)", "decimal(4,2)")
    assert recorded.run().code == 0
    recorded.write(recorded.second, [line.replace('"8.25"', '"123.45"') for line in recorded.rest])
    said = (
        'error: topic shop.public.order_lines, partition 0, offset 9: the record does not fit table "order_lines":'
        f' column "price": 123.45 has more than 2 digits before the point\n  remedy: {RECORD_REMEDY}\n'
    )
    assert recorded.refused() == said
    assert recorded.documents() == AFTER_THREE
    recorded.change("decimal(4,2)", "decimal(10,2)")
    assert recorded.refused() == (
        'error: table "order_lines" has changed (column price) since the state folder was begun\n'
        "  remedy: Undo the change, or begin with a new state folder (`state:`) and new destination tables.\n"
    )
    recorded.write(recorded.second, recorded.rest)
    recorded.change("state: .tidegate ", "state: .tidegate-2 ")
    recorded.change("table: orders_with_lines", "table: orders_again, name: again")
    recorded.goes_on("orders_again")


# --- transactions


def without_transactions(lines: list[str]) -> list[str]:
    records = [json.loads(line) for line in lines]
    for record in records:
        if record.get("value"):
            record["value"]["transaction"] = None
    return [json.dumps(record) for record in records if record["topic"] != "shop.transaction"]


def test_events_without_transaction_metadata_are_refused(recorded: Recorded) -> None:
    recorded.second.unlink()
    recorded.write(recorded.first, without_transactions(recorded.lines))
    said = (
        "error: topic shop.public.purchase_orders, partition 0, offset 0: the record does not fit table"
        ' "purchase_orders": it has no transaction metadata: set provide.transaction.metadata=true in the connector\n'
        f"  remedy: {RECORD_REMEDY}\n"
    )
    assert recorded.refused("check") == said
    assert recorded.refused() in (said, said.replace("purchase_orders", "order_lines"))  # one task for each topic
    recorded.write(recorded.first, recorded.lines)
    shutil.rmtree(recorded.folder / ".tidegate")
    recorded.goes_on()


def test_a_recording_without_its_transaction_topic_is_refused_and_goes_on_when_it_comes(recorded: Recorded) -> None:
    transactions = [line for line in recorded.lines if '"shop.transaction"' in line]
    recorded.write(recorded.first, [line for line in recorded.lines if line not in transactions])
    recorded.second.unlink()
    said = recorded.refused(code=3)
    assert "transaction 701: its END has not come (1 row events of purchase_orders seen)\n" in said
    assert "transaction 707: its END has not come (2 row events of order_lines seen)\n" in said
    recorded.write(recorded.second, transactions)
    recorded.goes_on()


def test_a_transaction_whose_rows_are_missing_is_reported_and_goes_on_when_they_come(recorded: Recorded) -> None:
    place = next(n for n, line in enumerate(recorded.rest) if '"item": "beans"' in line)
    missing = recorded.rest[place]
    recorded.write(recorded.second, [*recorded.rest[:place], *recorded.rest[place + 1 :]])
    assert recorded.refused(code=3) == (
        "error: not all that was captured can be delivered:\n"
        "  transaction 707:1224: table order_lines: 2 row events expected, 1 seen\n"
        "  remedy: The rest of these transactions is missing in the source's topics: add the records, or take a new"
        " snapshot. All transactions before them are delivered.\n"
    )
    assert recorded("status").out.endswith(
        "waits: transaction 707:1224: table order_lines: 2 row events expected, 1 seen\n"
    )
    recorded.write(recorded.folder / "events" / "3.jsonl", [missing])
    recorded.goes_on()


def test_a_transaction_topic_with_two_partitions_is_refused(recorded: Recorded) -> None:
    records = [json.loads(line) for line in recorded.rest]
    partitioned = [
        {**one, "partition": n % 2} if one["topic"] == "shop.transaction" else one for n, one in enumerate(records)
    ]
    recorded.write(recorded.second, [json.dumps(one) for one in partitioned])
    said = (
        "error: events/2.jsonl: the transaction topic shop.transaction has 2 partitions, so the order of commits is"
        " lost\n  remedy: Give the transaction topic exactly one partition, and take a new snapshot.\n"
    )
    assert recorded.refused("check") == said
    assert recorded.refused() == said
    recorded.write(recorded.second, recorded.rest)
    recorded.goes_on()


@pytest.mark.parametrize("topic", ["shop.public.order_lines", "shop.transaction"])
def test_a_topic_that_is_compacted_is_refused(recorded: Recorded, topic: str) -> None:
    facts = json.dumps({"topic": topic, "config": {"cleanup.policy": "compact"}})
    recorded.write(recorded.second, [facts, *recorded.rest])
    said = (
        f"error: events/2.jsonl: topic {topic} has cleanup.policy=compact: compaction removes events that END has"
        " counted\n  remedy: Set cleanup.policy=delete for this topic, and take a new snapshot.\n"
    )
    assert recorded.refused("check") == said
    assert recorded.refused() == said
    recorded.write(recorded.second, [facts.replace("compact", "delete"), *recorded.rest])
    recorded.goes_on()


def test_a_prefix_that_no_topic_has_is_refused(recorded: Recorded) -> None:
    recorded.change("topic_prefix: shop", "topic_prefix: ship")
    said = recorded.refused("check")
    assert said.startswith('error: no record has a topic that begins with "ship."; there are shop.public.order_lines, ')
    assert said.endswith("Set source.topic_prefix in tidegate.yaml to the connector's topic.prefix.\n")
    assert recorded.refused() == said
    recorded.change("topic_prefix: ship", "topic_prefix: shop")
    recorded.goes_on()


# --- settings

UNKNOWN = {
    "name: shop": ("name: shop\nmaterialisations: []", 2, "materialisations", "materializations"),
    "spark: {master": ("spark: {mastr: x, master", 3, "spark.mastr", "master"),
    "source: {kind": ("source: {partition: 3, kind", 6, "source.partition", "partitions"),
    "order_lines: {key": ("order_lines: {keys: [id], key", 9, "tables.order_lines.keys", "key"),
    "name: shop\n": ("name: shop\ntick: {max_event: 3}\n", 2, "tick.max_event", "max_events"),
}


@pytest.mark.parametrize("old", UNKNOWN)
def test_an_unknown_setting_is_refused_and_the_nearest_known_one_is_named(recorded: Recorded, old: str) -> None:
    new, line, setting, nearest = UNKNOWN[old]
    recorded.change(old, new)
    for word in ("check", "run", "status", "verify"):
        said = recorded.refused(word)
        assert said.startswith(
            f'error: tidegate.yaml:{line}: unknown setting "{setting}"\n'
            f'  remedy: Did you mean "{nearest}"? Known here: '
        )


def test_an_unknown_setting_of_a_destination_is_refused_and_the_nearest_known_one_is_named(recorded: Recorded) -> None:
    recorded.change("path: out.db", "pathh: out.db")
    said = recorded.refused("check")
    assert said == (
        'error: tidegate.yaml:15: sqlite of "orders_with_lines-sqlite": unknown setting "pathh"\n'
        '  remedy: Did you mean "path"? Known here: path, table, timeout_seconds.\n'
    )


def test_init_says_what_it_wrote_as_json(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "shop"
    done = shell("init", "--json", "--project", folder)
    (said,) = done.json_lines()
    assert done.code == 0 and all(Path(path).is_file() for path in said["wrote"])
    assert str(folder / "tidegate.yaml") in said["wrote"]
    again = shell("init", "--json", "--project", folder)
    assert again.code == 2
    assert again.json_lines()[0]["error"] == f"{folder / 'tidegate.yaml'} exists already"


# --- SQL


def test_sql_that_only_spark_refuses_is_told_in_few_words(recorded: Recorded) -> None:
    view = recorded.folder / "views" / "orders_with_lines.sql"
    right = view.read_text()
    view.write_text(right.replace("SUM(ol.quantity * ol.price)", "COALESCE(po.id, ARRAY_AGG(ol.id))"))
    assert recorded.refused("check") == (
        "error: views/orders_with_lines.sql:3:8: Spark refuses the query: [DATATYPE_MISMATCH.DATA_DIFF_TYPES]"
        ' Cannot resolve "coalesce(id, collect_list(id))" due to data type mismatch: Input to `coalesce` should all be'
        ' the same type, but it\'s ("BIGINT" or "ARRAY<BIGINT>").\n  remedy: Correct the SQL (Spark\'s dialect).\n'
    )
    view.write_text(right.replace(" AS total,", " AS total,,"))
    assert recorded.refused("check") == (
        "error: views/orders_with_lines.sql:3:45: Spark refuses the query: [PARSE_SYNTAX_ERROR] Syntax error at or near"
        " ','.\n  remedy: Correct the SQL (Spark's dialect).\n"
    )
