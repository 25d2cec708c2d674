"""Which settings of this shell a service is given, and which must not lie in its file.

launchd and systemd start a service without the variables of a shell. What is set in files
(`weighbridge.toml`, `config.toml`, the Prefect profile) it reads by itself.
"""

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from weighbridge.deployments.automations import SILENCE
from weighbridge.deployments.errors import CommandError
from weighbridge.tasks.checkpoints import on_hub
from weighbridge.tasks.settings import ENV_PREFIX, Settings

_SECRET = re.compile(r"KEY|AUTH|PASSWORD|SECRET|TOKEN|HEADERS")
_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
# Where runs are reported is said by `api`; the others are said for every service below.
_SAID = ("PREFECT_API_URL", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "PREFECT_TEST_MODE")
# Three heartbeats fit into the silence after which the server takes a run for dead.
_HEARTBEAT = int(SILENCE.total_seconds()) // 3 - 20


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable may hold a secret: by its name, or a URL with a password."""
    return bool(_SECRET.search(name)) or has_password(value)


def has_password(url: str) -> bool:
    """Return whether a text is a URL with a password."""
    if "://" not in url:
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return "@" in url
    # A password may come as a parameter too.
    return "@" in parts.netloc or "password" in parts.query.lower()


def prefect_variables(before: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Choose what both services are given of the variables of the shell.

    Args:
        before: The environment as it was before our commands set anything.

    Returns:
        The variables, and the names of those that may hold a secret and are left out.
    """
    kept: dict[str, str] = {}
    left_out: list[str] = []
    for name, value in sorted(before.items()):
        ours = name.startswith("PREFECT_") and not name.startswith("PREFECT__")
        if not value or name in _SAID or not (ours or name in (*_FOLDERS, "TZ")):
            continue
        if is_secret(name, value):
            left_out.append(name)
        else:
            kept[name] = value
    return {**kept, "DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}, left_out


def worker_variables(
    before: Mapping[str, str], settings: Settings, api: str, heartbeat: int | None
) -> dict[str, str]:
    """Choose what a worker is given beside that.

    Args:
        before: The environment as it was before our commands set anything.
        settings: The settings as they are now.
        api: URL of the Prefect API.
        heartbeat: Seconds between heartbeats as Prefect is set now; None for none.

    Raises:
        CommandError: One of them holds a password.
    """
    chosen: dict[str, str] = {}
    values = settings.model_dump(mode="json")
    for name in Settings.model_fields:
        variable = f"{ENV_PREFIX}{name.upper()}"
        if before.get(variable) and values[name] is not None:
            # As it was understood here: absolute, wherever the service runs.
            value = values[name]
            chosen[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    for variable in ("WEIGHBRIDGE_CHECKPOINT", "WEIGHBRIDGE_ADAPTER"):
        if variable in chosen and not on_hub(chosen[variable]):
            chosen[variable] = os.path.abspath(chosen[variable])  # noqa: PTH100
    if settings.allow_remote_api and settings.origin("allow_remote_api") == "option":
        chosen["WEIGHBRIDGE_ALLOW_REMOTE_API"] = "true"
    if has_password(chosen.get("WEIGHBRIDGE_DATABASE_URL", "")):
        raise password_error("WEIGHBRIDGE_DATABASE_URL")
    if has_password(api):
        raise CommandError(
            "the URL of the Prefect API must hold no password, and PREFECT_API_URL does",
            hint="prefect config set PREFECT_API_AUTH_STRING='user:password' keeps it apart",
        )
    return {
        **chosen,
        "PREFECT_API_URL": api,
        # A server that is missing must be loud, not replaced by one that nobody sees.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(min(heartbeat or _HEARTBEAT, _HEARTBEAT)),
    }


def password_error(what: str) -> CommandError:
    """Say that a service's file is no place for the password of a database."""
    from weighbridge.tasks.settings import user_folder

    return CommandError(
        f"the file of a service must hold no password, and {what} does",
        hint=f"write database_url = '…' into {user_folder('config') / 'config.toml'}, "
        "readable for you alone: the service reads it",
    )
