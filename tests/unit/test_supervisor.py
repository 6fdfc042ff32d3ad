"""The engine's process and the server: how soon it is started again, and what it is told of the address."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tidegate.capture.engine import CaptureSettings, connector_properties
from tidegate.capture.engine_process import begin_from_kept_offsets
from tidegate.capture.log import LogWriter
from tidegate.capture.server_check import check_server, with_absolute_files
from tidegate.capture.supervisor import Backoff, Capture
from tidegate.errors import FixConfiguration


def test_each_early_death_doubles_the_delay_up_to_half_a_minute() -> None:
    backoff = Backoff()
    assert [backoff.after(lived_seconds=3) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_after_a_steady_while_the_delay_begins_anew() -> None:
    backoff = Backoff()
    assert [backoff.after(lived) for lived in (3, 3, 3, 61, 3)] == [0.5, 1, 2, 0.5, 1]


def test_an_engine_waits_for_the_log_and_says_so_until_the_other_run_lets_go(tmp_path: Path) -> None:
    nowhere = "host=127.0.0.1 port=1 user=me dbname=shop"
    capture = Capture(CaptureSettings(nowhere, ("orders",), "shop", 1, tmp_path, "slot", "publication"))

    def await_trouble(text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in (capture.trouble or ""):
            capture.check()
            assert time.monotonic() < deadline, capture.trouble
            time.sleep(0.02)

    with LogWriter(capture.settings.log_root):
        capture.begin()
        waiting = capture.pid
        await_trouble("another process writes to the log")
        assert capture.pid == waiting
    await_trouble("Postgres at 127.0.0.1:1 cannot be reached")
    capture.stop()


@pytest.mark.parametrize(
    ("position", "is_taken"),
    [(b"{}", False), (b'{"lsn":7,"snapshot_completed":false}', False), (b'{"lsn":7}', True)],
)
def test_a_position_from_within_a_snapshot_is_not_gone_on_from(tmp_path: Path, position: bytes, is_taken: bool) -> None:
    settings = CaptureSettings("", ("orders",), "shop", 1, tmp_path, "slot", "publication")
    settings.offsets.write_bytes(b"torn")
    settings.kept_offsets.write_bytes(position)
    begin_from_kept_offsets(settings)
    assert (settings.offsets.read_bytes() if settings.offsets.exists() else None) == (position if is_taken else None)


def properties(**server: str) -> dict[str, str]:
    settings = CaptureSettings("", ("orders",), "shop", 1, Path("state"), "slot", "publication")
    return connector_properties(settings, server)


def test_the_files_of_a_secure_connection_reach_the_engine() -> None:
    files = {"sslrootcert": "/ca.pem", "sslcert": "/me.pem", "sslkey": "/me.pk8", "sslpassword": "secret"}
    told = properties(host="db", sslmode="verify-full", **files)
    assert {name: told[f"database.{name}"] for name in files} == files
    assert told["database.sslmode"] == "verify-full"
    assert not [name for name in properties(host="db") if name.startswith("database.ssl") and name[12:] != "mode"]


def test_files_are_named_so_that_a_process_elsewhere_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_files("host=db user=me") == "host=db user=me"
    assert f"sslrootcert={tmp_path}/ca.pem" in with_absolute_files("postgresql://me@db/shop?sslrootcert=ca.pem")


@pytest.mark.parametrize("dsn", ["host=/var/run/postgresql dbname=shop", "postgresql:///shop?host=/var/run/postgresql"])
def test_a_socket_is_refused(dsn: str) -> None:
    with pytest.raises(FixConfiguration, match="by TCP only") as refused:
        check_server(dsn, ["orders"], "slot", "publication")
    assert "host=127.0.0.1" in refused.value.remedy


@pytest.mark.parametrize("table", ["my orders", "öffentlich.orders", "public.orders$"])
def test_a_name_that_topics_do_not_keep_is_refused(table: str) -> None:
    with pytest.raises(FixConfiguration, match="Debezium replaces"):
        check_server("host=127.0.0.1 port=1", ["lines", table], "slot", "publication")


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(FixConfiguration, match=r'"public\.orders" and "archive\.orders" have the same name'):
        check_server("host=127.0.0.1 port=1", ["orders", "lines", "archive.orders"], "slot", "publication")
