"""What all tests share: a private place for every file, no network, one Prefect server."""

import os
import runpy
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
NO_NETWORK = TESTS / "no_network"

# Before anything imports Prefect or opens a socket.
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"] = "ignore"
os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"  # as our commands set it
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests wait neither for a worker of this machine nor for each other.
os.environ["WEIGHBRIDGE_LEASE"] = str(Path(tempfile.mkdtemp(prefix="weighbridge-")) / "lease")
runpy.run_path(str(NO_NETWORK / "sitecustomize.py"))

import pytest  # noqa: E402

CASES = TESTS / "cases"
CACHE = Path(os.environ.get("WEIGHBRIDGE_CACHE", "")) if "WEIGHBRIDGE_CACHE" in os.environ else None


@contextmanager
def held(database: Path) -> Iterator[None]:
    """Keep every other process from writing to a store, so that no run can go on or end.

    However fast the machine is, what is acted on in here is in its middle. A writer waits
    for a minute at most: be done by then.
    """
    with closing(sqlite3.connect(database, timeout=120, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        yield


@pytest.fixture(scope="session")
def embedded() -> Path:
    """Return the real embedded checkpoint, from the cache that a user has too."""
    from weighbridge.scorer.backend import on_mlx_thread
    from weighbridge.scorer.embedded import embedded_checkpoint
    from weighbridge.tasks.settings import user_folder

    return on_mlx_thread(embedded_checkpoint, CACHE or user_folder("cache"))


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a real Prefect server with a database of its own; return its API's URL."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

    with (
        prefect_test_harness(server_startup_timeout=300),
        # A sync flow otherwise waits up to a second at its end for a heartbeat.
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield str(PREFECT_API_URL.value())


# Started in the background, a test runner hands down an ignored SIGINT.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from weighbridge.deployments.cli import main; sys.exit(main())"
)


@pytest.fixture
def start_weighbridge(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the real command in a process of its own, with no way out of this machine.

    The store is `tmp_path/store.db`. Tests marked `prefect` report to the session's
    server.
    """
    environment = command_environment(tmp_path)
    if request.node.get_closest_marker("prefect"):
        environment["PREFECT_API_URL"] = request.getfixturevalue("prefect_server")
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str | bytes, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env={**environment, **(env or {})},
            cwd=options.pop("cwd", tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def weighbridge(
    start_weighbridge: Callable[..., subprocess.Popen[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the real command as `start_weighbridge` does, and wait for its end."""

    def run(
        *arguments: str | bytes, input: str | None = None, timeout: float = 300, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        process = start_weighbridge(*arguments, **options)
        out, err = process.communicate(input, timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def command_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command whose files all lie in one folder."""
    from weighbridge.tasks.settings import user_folder

    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WEIGHBRIDGE_", "PREFECT_", "XDG_"))
    }
    return {
        **kept,
        "PYTHONPATH": str(NO_NETWORK),
        "PREFECT_HOME": str(folder / "prefect"),
        "WEIGHBRIDGE_CACHE": str(CACHE or user_folder("cache")),
        "WEIGHBRIDGE_DATABASE_URL": f"sqlite:///{folder / 'store.db'}",
        "HOME": str(folder),
    }
