"""The same documents under a second checkpoint: its run, and both runs compared."""

from typing import Any

from weighbridge.deployments.cli.diff import print_comparison
from weighbridge.deployments.comparison import compare
from weighbridge.deployments.console import print_hint, print_json, print_note
from weighbridge.deployments.report import print_closing

_LISTED = 20


def against_request(
    request: dict[str, Any], checkpoint: str | None, adapter: str | None
) -> dict[str, Any]:
    """Ask the same of another checkpoint, or of the same one with another adapter."""
    from weighbridge.tasks.scorers import OF_A_CHECKPOINT

    print_note(f"now with {' + '.join(filter(None, (checkpoint, adapter)))}")
    if checkpoint is None:
        return {**request, "adapter": adapter}
    return {
        **request,
        "checkpoint": checkpoint,
        **dict.fromkeys(OF_A_CHECKPOINT),
        "adapter": adapter,
    }


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
