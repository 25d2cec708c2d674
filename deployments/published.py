"""What a flow run has published: how far it is, its outcome, and where its answers are."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact

# What the progress artifact says of itself: run 7: 1,000 of 2,000 documents.
_COUNTED = re.compile(r"([\d,]+) of ([\d,]+) document", re.ASCII)
# All numbers that are said of an outcome.
_SAID = ("run_id", "documents", "scored", "reused", "rejected", "seconds")


@dataclass(frozen=True, slots=True)
class Published:
    """What a flow run has published.

    Attributes:
        outcome: Counts of the run; None when it published none.
        recorded: Whether any document was recorded.
        host: The machine that keeps the answers, empty if that is not known.
        store: The option that names its store to our commands, empty for a database.
        output: The file that the answers were written to.
    """

    outcome: Mapping[str, Any] | None
    recorded: bool
    host: str
    store: str
    output: str | None


def artifacts_of(client: "SyncPrefectClient", flow_run: UUID) -> "list[Artifact]":
    """Return what a flow run has published so far, the latest first."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.client.schemas.sorting import ArtifactSort

    only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    return client.read_artifacts(artifact_filter=only, sort=ArtifactSort.CREATED_DESC)


def counted(progress: "Artifact") -> tuple[int, int] | None:
    """Return how many documents of how many are recorded, as a progress artifact says."""
    found = _COUNTED.search(progress.description or "")
    if found is None:
        return None
    done, total = (int(each.replace(",", "")) for each in found.groups())
    return done, total


def read_published(artifacts: "Sequence[Artifact]") -> Published:
    """Read the artifacts of a flow run, the latest first."""
    outcome = next(filter(None, map(_outcome, artifacts)), None)
    done = [counted(each) for each in artifacts if each.type == "progress"]
    place = outcome or {}
    database = str(place.get("database") or "")
    return Published(
        outcome=outcome,
        recorded=outcome is not None or any(each and each[0] for each in done),
        host=str(place.get("host") or ""),
        store="" if "://" in database or not database else f" --db {shlex.quote(database)}",
        output=place.get("output"),
    )


def _outcome(artifact: "Artifact") -> Mapping[str, Any] | None:
    if artifact.type != "table" or not (artifact.key or "").endswith("-outcome"):
        return None
    try:
        rows: Any = json.loads(artifact.data) if isinstance(artifact.data, str) else artifact.data
    except ValueError:
        return None
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return None
    outcome = cast("dict[str, Any]", rows[0])
    known = all(isinstance(outcome.get(name), int | float) for name in _SAID)
    return outcome if known else None
