"""Which Prefect API a command reports its flow runs to. Import before Prefect."""

import ipaddress
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

from weighbridge.deployments.errors import CommandError

LOCAL_API = "http://127.0.0.1:4200/api"

CONSENT_HINT = (
    "consent with --allow-remote-api (paths, questions, ids and counts are sent, never "
    "documents), or unset PREFECT_API_URL"
)

# Where no temporary server will do.
_ANOTHER = "name another with PREFECT_API_URL"

_DEFAULTS = {
    # No other network use than what the user asks for.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A temporary server takes 10 to 26 s to start, longer than Prefect waits by default.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Commands say themselves what went wrong; the log of a run is kept by the API.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "weighbridge",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def quiet_prefect() -> None:
    """Set what our commands want of Prefect, where the user has set nothing.

    Must run before Prefect is imported.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect gives extra loggers its handlers, but not the level of its own.
    logging.getLogger("weighbridge").setLevel(logging.INFO)
    # Or the log handler reports to stderr, batch by batch, that its server has gone.
    logging.raiseExceptions = False


@contextmanager
def reporting(
    *, allow_remote: bool, say: Callable[[str], None], otherwise: str = "unset PREFECT_API_URL"
) -> Generator[None]:
    """Choose the API that flow runs within this block report to, and say which.

    The API that Prefect is set to (environment or profile), else a server that
    runs on this machine, else a temporary one.

    Args:
        allow_remote: Consent to an API that is not on this machine.
        say: Told in a sentence what was chosen.
        otherwise: What can be done, beside starting it, where the API that is set is silent.

    Raises:
        CommandError: The API is not on this machine and there is no consent, it
            does not answer, or temporary servers are switched off.
    """
    quiet_prefect()
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    url = PREFECT_API_URL.value()
    if url:
        shown = _without_user(url)
        if not is_loopback(url) and not allow_remote:
            raise CommandError(
                f"flow runs must be reported to this machine, and Prefect is set to {shown}",
                hint=CONSENT_HINT,
            )
        if is_loopback(url) and not answers(url):
            raise CommandError(
                f"the Prefect API must answer, and {shown} does not",
                hint=f"start it with: prefect server start, or {otherwise}",
            )
        say(f"reporting to the Prefect API at {shown}")
        yield
    elif answers(LOCAL_API):
        say(f"reporting to the Prefect server at {LOCAL_API}")
        with temporary_settings({PREFECT_API_URL: LOCAL_API}):
            yield
    elif not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        raise CommandError(
            "a Prefect server must run, as PREFECT_SERVER_ALLOW_EPHEMERAL_MODE is false",
            hint="start it with: prefect server start",
        )
    else:
        say("starting a temporary Prefect server (10 to 20 s; prefect server start keeps one)")
        yield


@contextmanager
def kept_server(*, allow_remote: bool, say: Callable[[str], None]) -> Generator[None]:
    """Choose the API as `reporting` does, but never a temporary one.

    What is deployed or triggered must be there when the command has ended.

    Raises:
        CommandError: No server runs, or as `reporting` does.
    """
    if describe_api() is None:
        raise CommandError(
            f"a Prefect server must run, and none answers at {LOCAL_API}",
            hint=f"start it in another terminal: prefect server start, or {_ANOTHER}",
        )
    with reporting(allow_remote=allow_remote, say=say, otherwise=_ANOTHER):
        yield


def describe_api() -> str | None:
    """Return the API that a command would report to, None for a temporary server."""
    quiet_prefect()
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if url:
        return _without_user(url)
    return LOCAL_API if answers(LOCAL_API) else None


def is_loopback(url: str) -> bool:
    """Return whether an API is on this machine, going by its URL alone."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def answers(url: str) -> bool:
    """Return whether a Prefect API answers within two seconds."""
    # A proxy of the environment must not be asked about this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url.rstrip('/')}/health", timeout=2) as response:
            return response.status == 200
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
