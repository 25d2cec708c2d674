"""A request with what depends on the flow run filled in: dates, and since when to read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from weighbridge.flows.request import ScoreRequest, is_schema_file
from weighbridge.flows.since import last_start
from weighbridge.flows.when import has_dates, moment_of, resolve_dates, scheduled_time
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.sql_parameters import parameters_of

SINCE = "since"


@dataclass(frozen=True)
class Resolved:
    """What a flow run reads and writes.

    Attributes:
        request: Its paths hold no dates to fill in any more.
        parameters: Values of the query's parameters, for `read_documents`.
        label: What the run keeps as its source: the path as it was read, and since when.
    """

    request: ScoreRequest
    label: str
    parameters: Mapping[str, datetime] = field(default_factory=dict[str, datetime])


def resolve_request(request: ScoreRequest) -> Resolved:
    """Fill in what a request leaves to the flow run; the same in each retry of it.

    Dates are filled in where a path names what is read or written anew: documents, output
    and a schema's file. Not in the store, which reuses only what it holds itself, nor in the
    text of a query, which has parameters for values.

    Raises:
        DateError: A date or time zone is none.
        SourceError: The query has `:since` and nothing says since when, or the request says
            since when and its query does not ask.
    """
    changes: dict[str, Any] = {}
    dated = {name: text for name, text in _paths(request).items() if has_dates(text)}
    if dated:
        scheduled = scheduled_time(request.timezone)
        changes = {name: resolve_dates(text, scheduled) for name, text in dated.items()}
    if request.source and "documents" in changes:
        changes["source"] = f"{request.source} ({changes['documents']})"
    resolved = request.model_copy(update=changes)
    since = _since(request)
    if since is None:
        return Resolved(resolved, resolved.source_label)
    return Resolved(
        resolved, f"{resolved.source_label} (since {since:%Y-%m-%d %H:%M:%S} UTC)", {SINCE: since}
    )


def _paths(request: ScoreRequest) -> dict[str, str]:
    paths = {"documents": request.documents, "output": request.output}
    if is_schema_file(request.schema_):  # braces in the text of a schema mean nothing
        paths["schema_"] = request.schema_
    return {name: text for name, text in paths.items() if text}


def _since(request: ScoreRequest) -> datetime | None:
    asks = request.query is not None and SINCE in parameters_of(request.query)
    if not request.since:
        return last_start(request) if asks else None
    if not asks:
        raise SourceError(
            "since must come with a query that has the parameter :since, and there is none",
            hint="write one such as: SELECT id, text FROM mails WHERE datetime(created) >= :since",
        )
    return moment_of(request.since, scheduled_time(request.timezone))
