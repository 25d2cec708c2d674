"""The time zone of this machine, by its name: a schedule keeps to it through summer and winter."""

import os
from pathlib import Path

_LOCALTIME = Path("/etc/localtime")


def local_zone() -> str:
    """Return the IANA name of this machine's zone; `UTC` where it has none."""
    named = os.environ.get("TZ", "").removeprefix(":")
    if named and is_zone(named):
        return named
    _, _, name = str(_LOCALTIME.resolve()).rpartition("zoneinfo/")
    return name if name and not name.startswith("Etc/") and is_zone(name) else "UTC"


def is_zone(name: str) -> bool:
    """Say whether a zone of this name is known here. Loads the flow, and with it Prefect."""
    from weighbridge.flows.when import DateError, zone_of

    try:
        zone_of(name)
    except DateError:
        return False
    return True
