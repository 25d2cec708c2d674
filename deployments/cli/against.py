"""The same documents under a second checkpoint: its run, and both runs compared."""

from typing import Any

from weighbridge.deployments.cli.diff import print_comparison
from weighbridge.deployments.comparison import compare
from weighbridge.deployments.console import print_hint, print_json, print_note
from weighbridge.deployments.report import print_closing

_LISTED = 20
_OF_THE_FIRST = ("adapter", "model_id", "revision")


def against_request(request: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Ask the same of another checkpoint."""
    print_note(f"now with {checkpoint}")
    return {**request, "checkpoint": checkpoint, **dict.fromkeys(_OF_THE_FIRST)}


def report_against(
    database_url: str, first: dict[str, Any], second: dict[str, Any], *, as_json: bool
) -> None:
    """Print both outcomes and what differs: with `--json` as one object."""
    from weighbridge.db import open_engine

    runs = first["run_id"], second["run_id"]
    engine = open_engine(database_url, readonly=True)
    try:
        found = compare(engine, *runs, limit=None if as_json else _LISTED)
    finally:
        engine.dispose()
    if as_json:
        print_json({"first": first, "second": second, "diff": found})
        return
    print_comparison(found)
    for outcome in (first, second):
        print_closing(outcome)
    print_hint(f"weighbridge diff {runs[0]} {runs[1]} --changed lists the answers that changed")
