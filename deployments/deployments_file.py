"""What `prefect.yaml` of this package says about each deployment."""

import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOW = "score-documents"
POOL = "weighbridge"
SCHEDULED = "nightly"
"""What a deployment under another name is made like."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}", re.ASCII)
"""What names of deployments and work pools may be."""

_FILE = "prefect.yaml"


@dataclass(frozen=True, slots=True)
class Entry:
    """A deployment as the file has it.

    Attributes:
        name: Its name, within the flow.
        description: What its page in the UI says.
        entrypoint: Module and function of the flow.
        tags: Tags of its runs.
        paused: Whether its schedule waits to be switched on.
        slug: What the server knows the schedule by; None without a schedule.
        cron: When it runs; None without a schedule.
        limit: How many of its runs may go on at once.
        collision_strategy: What becomes of a run beyond that.
        grace_period_seconds: How long a run may hold its place before it has started.
    """

    name: str
    description: str
    entrypoint: str
    tags: tuple[str, ...]
    paused: bool
    slug: str | None
    cron: str | None
    limit: int
    collision_strategy: str
    grace_period_seconds: int


def file_text() -> str:
    """Return the file as it is."""
    folder = importlib.resources.files("weighbridge.deployments")
    return (folder / _FILE).read_text(encoding="utf-8")


def read_entries() -> dict[str, Entry]:
    """Return the deployments of the file by their names."""
    import yaml

    found: list[Mapping[str, Any]] = yaml.safe_load(file_text())["deployments"]
    return {each["name"]: _entry(each) for each in found}


def _entry(found: Mapping[str, Any]) -> Entry:
    nothing: dict[str, Any] = {}
    schedules: list[Mapping[str, Any]] = found.get("schedules", [])
    schedule = schedules[0] if schedules else nothing
    concurrency = found["concurrency_limit"]
    return Entry(
        name=found["name"],
        description=found["description"].strip(),
        entrypoint=found["entrypoint"],
        tags=tuple(found["tags"]),
        paused=found.get("paused", False),
        slug=schedule.get("slug"),
        cron=schedule.get("cron"),
        limit=concurrency["limit"],
        collision_strategy=concurrency["collision_strategy"],
        grace_period_seconds=concurrency["grace_period_seconds"],
    )
