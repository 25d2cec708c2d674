"""A schedule, on a server that has its scheduler, with a real worker."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

SCHEMA = '{"urgent": {"type": "boolean", "description": "The text asks for help at once."}}'
DEADLINE = 300


@pytest.fixture
def server(yard: Any) -> Iterator[str]:
    """Start a server as users do; that of the test harness schedules nothing."""
    log = yard.folder / "server.log"
    for _ in range(5):
        process, url = start_server(yard, log)
        until(lambda server=process, api=url: answers(api) or server.poll() is not None, log)
        if process.poll() is None:
            break  # or somebody else had taken the port meanwhile
    else:
        raise AssertionError(log.read_text())
    yield url
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_server(yard: Any, log: Path) -> "tuple[subprocess.Popen[bytes], str]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "prefect", "server", "start"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            env={
                **yard.environment,
                "PREFECT_API_URL": url,
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_HOME": str(yard.folder / "server"),
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return process, url


def answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def until(true: Any, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def test_a_run_that_is_due_in_a_moment_runs_by_itself(
    yard: Any, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterStateName
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from weighbridge.deployments.cli import main

    monkeypatch.chdir(yard.folder)
    Path("triage.json").write_text(SCHEMA)
    Path("tickets.jsonl").write_text('{"id": "a", "text": "It broke, help!"}\n')
    with temporary_settings({PREFECT_API_URL: server}):
        request = ["--documents", "tickets.jsonl", "--schema", "triage.json"]
        more = ["-p", "encoding=codes", "--output", "answers-{scheduled:%H%M}.json"]
        # Every five seconds, which no user would want: a minute is long to wait for.
        when = ["--cron", "* * * * * */5", "--timezone", "Europe/Berlin", "--activate"]
        assert main(["deploy", "nightly", *request, *more, *when]) == 0
        assert "runs at * * * * * */5 (Europe/Berlin)" in capsys.readouterr().out
        yard.start("--no-warm-up", "--pool", "weighbridge", env={"PREFECT_API_URL": server})
        only = FlowRunFilter(
            state={"name": FlowRunFilterStateName(any_=["Completed"])}  # pyright: ignore
        )
        with get_client(sync_client=True) as client:
            (run, *_) = yard.until(lambda: client.read_flow_runs(flow_run_filter=only), DEADLINE)
            due = run.expected_start_time
            assert due is not None
            assert (due.second % 5, due.microsecond) == (
                0,
                0,
            )  # as the schedule says, whenever it ran
            assert run.auto_scheduled
            # Switched off again: nothing more is due.
            assert main(["deploy", "nightly", "--paused"]) == 0
    # The zone of the schedule is that of dates in paths.
    written = yard.folder / f"answers-{due.astimezone(ZoneInfo('Europe/Berlin')):%H%M}.json"
    assert [each["field"] for each in json.loads(written.read_text())] == ["urgent"]
