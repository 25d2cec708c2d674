"""Which Prefect API a run reports to: this machine's, or another one with consent alone."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weighbridge.deployments import prefect_api
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.prefect_api import is_loopback, quiet_prefect, reporting

DEAD = "http://127.0.0.1:9/api"  # the discard port, on which nothing listens
REMOTE = "https://me:secret@example.com/api?key=secret"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hosts that anything tried to reach."""
    hosts: list[Any] = []
    look_up = socket.getaddrinfo

    def noted(host: Any, *rest: Any, **options: Any) -> Any:
        hosts.append(host)
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    return hosts


@contextmanager
def prefect_set_to(url: str | None, *, ephemeral: bool = True) -> Iterator[None]:
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    with temporary_settings(
        updates={PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: ephemeral}
        | ({PREFECT_API_URL: url} if url else {}),
        restore_defaults=None if url else {PREFECT_API_URL},
    ):
        yield


def choice(*, allow_remote: bool = False) -> tuple[str, str | None]:
    """Return what is said, and which API is set within the block."""
    from prefect.settings import PREFECT_API_URL

    said: list[str] = []
    with reporting(allow_remote=allow_remote, say=said.append):
        url = PREFECT_API_URL.value()
    (sentence,) = said
    return sentence, url


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("http://127.9.9.9/api", True),
        ("http://localhost:4200/api", True),
        ("http://[::1]:4200/api", True),
        ("https://api.prefect.cloud/api/accounts/1/workspaces/2", False),
        ("http://localhost.example.com/api", False),
        ("http://127.0.0.1@example.com/api", False),
        ("http://127.0.0.1.example.com/api", False),
        ("http://192.168.1.7:4200/api", False),
        ("http://0.0.0.0:4200/api", False),
        ("http:///api", False),
        ("nonsense", False),
    ],
)
def test_loopback_is_told_from_the_url_alone(url: str, local: bool, asked: list[Any]):
    assert is_loopback(url) is local
    assert asked == []


@pytest.mark.parametrize("mode", [True, False])
def test_an_api_elsewhere_needs_consent(asked: list[Any], mode: bool):
    with prefect_set_to(REMOTE, ephemeral=mode), pytest.raises(CommandError) as caught:
        choice()
    assert "https://example.com/api" in caught.value.message
    assert caught.value.hint is not None
    assert "--allow-remote-api" in caught.value.hint
    assert "secret" not in f"{caught.value.message}{caught.value.hint}"
    assert asked == []


def test_with_consent_it_is_named_and_used(asked: list[Any]):
    with prefect_set_to(REMOTE):
        said, url = choice(allow_remote=True)
    assert said == "reporting to the Prefect API at https://example.com/api"
    assert url == REMOTE
    assert asked == []  # Prefect itself will tell if it does not answer


def test_an_api_here_must_answer():
    with prefect_set_to(DEAD), pytest.raises(CommandError) as caught:
        choice()
    assert caught.value.message == f"the Prefect API must answer, and {DEAD} does not"
    assert caught.value.hint is not None
    assert "prefect server start" in caught.value.hint


@pytest.mark.prefect
def test_the_api_that_prefect_is_set_to_comes_first(prefect_server: str):
    with prefect_set_to(prefect_server):
        assert choice() == (f"reporting to the Prefect API at {prefect_server}", prefect_server)


@pytest.mark.prefect
def test_a_server_that_runs_here_is_used(prefect_server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefect_api, "LOCAL_API", prefect_server)
    # A proxy of the environment is not asked about this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with prefect_set_to(None):
        said, url = choice()
    assert said == f"reporting to the Prefect server at {prefect_server}"
    assert url == prefect_server


def test_without_any_server_a_temporary_one_is_announced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefect_api, "LOCAL_API", DEAD)
    with prefect_set_to(None):
        said, url = choice()
    assert said.startswith("starting a temporary Prefect server")
    assert url is None
    with prefect_set_to(None, ephemeral=False), pytest.raises(CommandError) as caught:
        choice()
    assert "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE" in caught.value.message


def test_prefect_is_quiet_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DO_NOT_TRACK")
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "true")
    quiet_prefect()
    assert os.environ["DO_NOT_TRACK"] == "1"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"


def test_the_choice_is_made_before_prefect_is_imported():
    # Importing Prefect in a terminal sends analytics, unless it was told not to before.
    code = (
        "import sys; from weighbridge.deployments.prefect_api import reporting;"
        "assert 'prefect' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.prefect
def test_the_api_of_a_running_server_is_described(prefect_server: str):
    # What `doctor` shows is where a command would report to.
    assert prefect_api.describe_api() == prefect_server
