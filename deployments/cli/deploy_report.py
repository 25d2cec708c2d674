"""What `weighbridge deploy` says it has done, and what to do next."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from weighbridge.deployments.console import print_answer, print_hint
from weighbridge.deployments.deployments_file import POOL
from weighbridge.deployments.report import beginning

if TYPE_CHECKING:
    from weighbridge.deployments.automations import AppliedAutomation
    from weighbridge.deployments.deploying import Applied

_WIDTH = 78
_FIRST = ("documents", "query", "schema", "output")


@dataclass(frozen=True, slots=True)
class Done:
    """What is on the server now.

    Attributes:
        deployments: As they are.
        automations: Likewise.
        pools: Work pools that were made.
        idle: Work pools of the deployments in which no worker is online.
    """

    deployments: "Sequence[Applied]"
    automations: "Sequence[AppliedAutomation]"
    pools: Sequence[str]
    idle: Sequence[str]


def values(done: Done) -> dict[str, Any]:
    """Return it as JSON."""
    return {
        "pools_made": list(done.pools),
        "deployments": [
            {**asdict(each), "id": str(each.id), "schedules": list(each.schedules)}
            for each in done.deployments
        ],
        "automations": [{**asdict(each), "id": str(each.id)} for each in done.automations],
    }


def print_report(done: Done) -> None:
    """Print it to stdout."""
    for pool in done.pools:
        print_answer(f"made       work pool {pool}")
    for each in done.deployments:
        print_answer(f"{_verb(each)}  deployment {each.name}, {_when(each)}")
        for line in _fields(each):
            print_answer(f"{'':11}{line}")
    for each in done.automations:
        off = "" if each.enabled else ", switched off"
        print_answer(f"{_verb(each)}  automation {each.name}{off}")


def say_what_is_next(done: Done) -> None:
    """Print hints to stderr."""
    from weighbridge.deployments.automations import REJECTED

    if not any(each.name == REJECTED for each in done.automations):
        print_hint("--notify slack-webhook/ops tells you when a run rejects many documents")
    for each in done.deployments:
        ready = {"documents", "schema"} <= each.request.keys()
        name = shlex.quote(each.name)
        what = "" if ready else " --documents DOCS --schema SCHEMA"
        if each.paused and each.schedules:
            print_hint(f"weighbridge deploy {name}{what} --activate")
        elif not each.schedules:
            print_hint(f"weighbridge trigger {name}{what} --wait")
    for pool in done.idle:
        other = "" if pool == POOL else f" --pool {shlex.quote(pool)}"
        print_hint(f"weighbridge worker start{other} runs them")


def _verb(applied: "Applied | AppliedAutomation") -> str:
    return f"{'made' if applied.made else 'updated' if applied.changed else 'unchanged':9}"


def _when(applied: "Applied") -> str:
    if not applied.schedules:
        return "started by weighbridge trigger"
    when = "; ".join(applied.schedules)
    return f"paused, would run at {when}" if applied.paused else f"runs at {when}"


def _fields(applied: "Applied") -> Iterator[str]:
    request = applied.request
    for name in (*_FIRST, *(each for each in request if each not in _FIRST)):
        value = request.get(name)
        if value is None or name == "schema_name":
            continue
        shown = value if isinstance(value, str) else json.dumps(value)
        if name == "schema" and shown.lstrip()[:1] == "{":
            shown = f"{request.get('schema_name') or 'of its own'}, kept with the deployment"
        # Paths are to be copied; all else is for a glance.
        whole = name in {"documents", "schema", "output"}
        yield f"{name} {shown if whole else beginning(shown, _WIDTH - len(name) - 12)}"
