"""What it costs to keep the model, and not to: a weighbridge worker beside a stock one.

A real Prefect server, a real worker process of each kind, the embedded checkpoint and one
deployment on each pool. Runs are triggered one after the other, each with documents of its
own, so each one needs the model. Counted: in how many processes they ran, how often a model
was loaded, and the seconds from the trigger until the run was `Running`.

    python benchmarks/residency.py --json
"""

# ruff: noqa: PLC0415 - Prefect reads its environment when it is imported

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from machine import machine_lines

RESIDENT, PROCESS = "weighbridge", "process"
TARGET_SECONDS = 1.5
DOCUMENTS = 3
LOG_SECONDS = 30  # logs arrive some time after their run has ended
SCHEMA = {"urgent": {"type": "boolean", "description": "The text asks for help at once."}}
SCRIPTS = Path(sys.executable).parent


def main() -> int:
    parser = argparse.ArgumentParser(description="A worker that keeps the model, and a stock one.")
    parser.add_argument("--resident", type=int, default=9, help="runs on the weighbridge worker")
    parser.add_argument("--process", type=int, default=5, help="runs on the process worker")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = prepared_environment(folder)
        with server(environment, folder):
            found = {
                "resident": measure(RESIDENT, arguments.resident, environment, folder),
                "process": measure(PROCESS, arguments.process, environment, folder),
            }
    result = {"machine": machine_lines(), "poll_seconds": 1, **found}
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0  # a target that is missed is shown; a busy machine misses it for its own reasons


def prepared_environment(folder: Path) -> dict[str, str]:
    """Set up an environment of our own, for this process and those it starts."""
    from weighbridge.deployments.prefect_api import quiet_prefect
    from weighbridge.scorer.backend import on_mlx_thread
    from weighbridge.scorer.embedded import embedded_checkpoint
    from weighbridge.tasks.settings import load_settings

    checkpoint = on_mlx_thread(embedded_checkpoint, load_settings().cache)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for variable in [each for each in os.environ if each.startswith(("PREFECT_", "WEIGHBRIDGE_"))]:
        del os.environ[variable]
    os.environ |= {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        # The stock worker polls every 10 s by default, which would decide the comparison.
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "WEIGHBRIDGE_CACHE": str(folder / "cache"),
        "WEIGHBRIDGE_LEASE": str(folder / "lease"),
        "WEIGHBRIDGE_CHECKPOINT": str(checkpoint),
        "WEIGHBRIDGE_DATABASE_URL": str(folder / "store.db"),
    }
    quiet_prefect()
    # Or a stock worker's processes would not log what the scorer says.
    os.environ["PREFECT_LOGGING_ROOT_LEVEL"] = "INFO"
    return dict(os.environ)


@contextlib.contextmanager
def server(environment: dict[str, str], folder: Path) -> Generator[None]:
    api = environment["PREFECT_API_URL"]
    port = api.rpartition(":")[2].partition("/")[0]
    command = [SCRIPTS / "prefect", "server", "start", "--port", port]
    with running(command, environment, folder / "server.log"):
        until(lambda: answers(f"{api}/health"), 120)
        yield


@contextlib.contextmanager
def running(
    command: list[Any], environment: dict[str, str], log: Path
) -> Generator["subprocess.Popen[bytes]"]:
    """Run a program within this block, then end it as a service manager does."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(kind: str, runs: int, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """Trigger runs on a worker of one kind, one after the other."""
    deploy(kind)
    log = folder / f"{kind}.log"
    command = [SCRIPTS / "prefect", "worker", "start", "--type", kind, "--pool", kind]
    if kind == RESIDENT:
        command = [SCRIPTS / "weighbridge", "worker", "start", "--pool", kind]
    flow_runs: list[UUID] = []
    seconds: list[float] = []
    totals: list[float] = []
    chance = random.Random(1)
    with running(command, environment, log):
        # Not before it polls: a service is there long before its runs.
        until(lambda: worker_is_online(kind), 120)
        if kind == RESIDENT:
            until(lambda: "runs will find" in log.read_text(), 300)
        for number in range(runs):
            # At any time between two polls.
            time.sleep(1 + chance.random())
            flow_run, to_running, total = one_run(kind, number, folder)
            flow_runs.append(flow_run)
            seconds.append(round(to_running, 3))
            totals.append(round(total, 3))
    pids = {run_row(folder, flow_run)["pid"] for flow_run in flow_runs}
    return {
        "runs": runs,
        "pids": len(pids),
        "loads": loads(folder, kind, flow_runs),
        "seconds_to_running": seconds,
        "median_seconds_to_running": round(statistics.median(seconds), 3),
        "seconds_to_completed": totals,
        "median_seconds_to_completed": round(statistics.median(totals), 3),
    }


def deploy(kind: str) -> None:
    from prefect import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.types.entrypoint import EntrypointType

    from weighbridge.flows import score_documents

    with get_client(sync_client=True) as api:
        api.create_work_pool(WorkPoolCreate(name=kind, type=kind))
    deployment: Any = score_documents.to_deployment(
        kind, entrypoint_type=EntrypointType.MODULE_PATH, work_pool_name=kind
    )
    deployment.apply(work_pool_name=kind)


def one_run(kind: str, number: int, folder: Path) -> tuple[UUID, float, float]:
    """Trigger a run and wait for its end; give its seconds to Running and to Completed.

    Both go by the server's clock, from the moment it had the run.
    """
    from prefect import get_client
    from prefect.deployments import run_deployment

    documents = folder / f"{kind}-{number}.jsonl"
    texts = [f"{kind} {number}: machine {each} broke." for each in range(DOCUMENTS)]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    request = {"documents": str(documents), "schema": json.dumps(SCHEMA), "encoding": "codes"}
    made: Any = run_deployment(
        f"score-documents/{kind}", parameters={"request": request}, timeout=0, as_subflow=False
    )
    with get_client(sync_client=True) as api:
        until(partial(has_ended, api, made.id), 300)
        states = api.read_flow_run_states(made.id)
    at = {str(state.name): state.timestamp for state in states}
    if "Completed" not in at:
        raise SystemExit(f"a run of {kind} must complete, got {sorted(at)}")
    triggered = at["Scheduled"]
    to_running = (at["Running"] - triggered).total_seconds()
    return made.id, to_running, (at["Completed"] - triggered).total_seconds()


def has_ended(api: Any, flow_run: UUID) -> bool:
    return api.read_flow_run(flow_run).state.is_final()


def loads(folder: Path, kind: str, flow_runs: list[UUID]) -> int:
    """Count how often a model was loaded.

    Our worker prints the lines of its runs and of its warm-up; those of a stock worker's
    runs are kept by the server.
    """
    from prefect import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    if kind == RESIDENT:
        lines = (folder / f"{kind}.log").read_text().splitlines()
        return sum(" loaded " in line for line in lines)
    deadline = time.monotonic() + LOG_SECONDS
    with get_client(sync_client=True) as api:
        while True:
            found = 0
            for flow_run in flow_runs:
                only = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
                logs = api.read_logs(log_filter=only, limit=200)
                found += sum(log.message.startswith("loaded ") for log in logs)
            if found >= len(flow_runs) or time.monotonic() > deadline:
                return found
            time.sleep(1)


def run_row(folder: Path, flow_run: UUID) -> dict[str, Any]:
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("select * from run where flow_run_id = ?", (str(flow_run),))
        return dict(rows.fetchone())


def worker_is_online(pool: str) -> bool:
    from prefect import get_client

    with get_client(sync_client=True) as api:
        response = api._client.post(f"/work_pools/{pool}/workers/filter", json={})
    return any(worker["status"] == "ONLINE" for worker in response.json())


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def until(true: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"it must come within {seconds:.0f} s, and did not")
        time.sleep(0.1)


def show(result: dict[str, Any]) -> None:
    for line in result["machine"]:
        print(line)
    print(f"{'worker':<12}{'runs':>6}{'pids':>6}{'loads':>7}{'to Running s':>14}{'to end s':>10}")
    for name in ("resident", "process"):
        row = result[name]
        print(
            f"{name:<12}{row['runs']:>6}{row['pids']:>6}{row['loads']:>7}"
            f"{row['median_seconds_to_running']:>14}{row['median_seconds_to_completed']:>10}"
        )
    resident = result["resident"]
    kept = resident["pids"] == resident["loads"] == 1
    quick = resident["median_seconds_to_running"] <= TARGET_SECONDS
    verdict = "met" if kept and quick else "MISSED"
    print(f"target, one process, one load, {TARGET_SECONDS} s to Running: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
