"""What a run tells while it goes on: tags, the order of its log, events; on a real server."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from weighbridge.db.records import RunSummary
from weighbridge.flows.telling import REJECTED_EVENT, emit_rejected, errors_told, run_name, tag_run
from weighbridge.scorer.errors import SchemaError
from weighbridge.tasks.errors import SourceError

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

Rows = dict[str, list[dict[str, Any]]]
Kept = Callable[[Callable[[Rows], Any]], Rows]


def in_flow(function: Callable[[], Any], **options: Any) -> Any:
    """Run a function as a flow of its own, and return its state."""
    from prefect import flow

    @flow(persist_result=False, name="told", **options)
    def told() -> Any:
        return function()

    return told(return_state=True)


def flow_run(state: Any) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_run(state.state_details.flow_run_id)


def summary(documents: int, rejected: int) -> RunSummary:
    moment = datetime(2026, 11, 30, tzinfo=UTC)
    names = RunSummary.__annotations__
    return RunSummary(
        **{
            **dict.fromkeys(names, ""),
            "run_id": 3,
            "started_at": moment,
            "documents": documents,
            "rejected": rejected,
        }  # pyright: ignore[reportArgumentType]
    )


def test_tags_stand_beside_the_users_own(prefect_server: str):
    from prefect import tags
    from prefect.client.orchestration import get_client

    attempts: list[set[str]] = []

    def tagged() -> None:
        from prefect.runtime import flow_run as running

        tag_run("triage", "smollm2")
        tag_run("triage", "smollm2")
        with get_client(sync_client=True) as client:
            attempts.append(set(client.read_flow_run(UUID(str(running.id))).tags))
        if len(attempts) == 1:
            raise RuntimeError("again")

    with tags("nightly", "urgent"):
        state = in_flow(tagged, retries=1)
    assert state.is_completed()
    expected = {"nightly", "urgent", "checkpoint:smollm2", "schema:triage"}
    assert attempts == [expected, expected]
    # Once each, also after a retry.
    assert sorted(flow_run(state).tags) == sorted(expected)


def test_a_tag_is_one_short_line(prefect_server: str):
    state = in_flow(lambda: tag_run("a\nb\x1b[31m" + "c" * 500, "m" * 500))
    found = sorted(flow_run(state).tags)
    assert found[0] == "checkpoint:" + "m" * 68 + "…"
    assert found[1].startswith("schema:a b [31mccc")
    assert [len(tag) for tag in found] == [80, 80]


def test_nothing_is_tagged_outside_of_a_flow():
    tag_run("triage", "smollm2")


def test_what_went_wrong_is_told_before_the_traceback(prefect_server: str, kept_by_prefect: Kept):
    def refused() -> None:
        with errors_told():
            raise SchemaError("a schema must have a field, and has none", hint="write one")

    def source() -> None:
        with errors_told():
            # Put together, as tracebacks show the line.
            raise SourceError("the header must have a column", hint="it has " + "SECRET".lower())

    def unexpected() -> None:
        with errors_told():
            raise ZeroDivisionError("SECRET is not told twice")

    states = {each.__name__: in_flow(each) for each in (refused, source, unexpected)}

    def lines(kept: Rows, name: str) -> list[str]:
        run_id = states[name].state_details.flow_run_id
        return [
            log["message"]
            for log in sorted(kept["log"], key=lambda log: log["timestamp"])
            if log["level"] == 40 and UUID(log["flow_run_id"]) == run_id
        ]

    def whole(kept: Rows) -> bool:
        return all(any("Encountered" in line for line in lines(kept, name)) for name in states)

    kept = kept_by_prefect(whole)
    assert all(state.is_failed() for state in states.values())
    first, second, *_ = lines(kept, "refused")
    assert first == "a schema must have a field, and has none\nhint: write one"
    assert second.startswith("Encountered exception during execution: SchemaError(")
    # The hint of a source may quote a document: it stays in the terminal.
    assert lines(kept, "source")[0].startswith(
        "the header must have a column\nhint: weighbridge valid"
    )
    assert "it has secret" not in repr(kept)
    assert lines(kept, "unexpected")[0].startswith(
        "Encountered exception during execution: ZeroDivis"
    )


@pytest.mark.parametrize(
    ("documents", "rejected", "share", "told"),
    [
        (10, 1, 0.1, False),  # as much as is allowed
        (10, 2, 0.1, True),
        (10, 0, 0.0, False),
        (1000, 1, 0.0, True),
        (10, 10, 1.0, False),
        (0, 0, 0.0, False),
    ],
)
def test_more_than_the_share_is_told(
    prefect_server: str, documents: int, rejected: int, share: float, told: bool
):
    state = in_flow(lambda: emit_rejected(summary(documents, rejected), share))
    assert state.result() is told


def test_the_event_holds_counts_only(prefect_server: str, kept_by_prefect: Kept):
    state = in_flow(lambda: emit_rejected(summary(8, 3), 0.25))
    run = flow_run(state)
    resource = f"weighbridge.run.{run.id}"

    def emitted(kept: Rows) -> list[dict[str, Any]]:
        return [each for each in kept["events"] if each["resource_id"] == resource]

    (event,) = emitted(kept_by_prefect(emitted))
    assert event["event"] == REJECTED_EVENT == "weighbridge.documents.rejected"
    assert json.loads(event["payload"]) == {
        "run_id": 3,
        "documents": 8,
        "rejected": 3,
        "share": 0.375,
        "alert_share": 0.25,
    }
    resource = json.loads(event["resource"])
    assert resource["prefect.resource.name"] == run.name
    # So that an automation finds the flow run, and the deployment where there is one.
    assert f"prefect.flow-run.{run.id}" in event["related"]


def test_a_run_has_the_day_it_was_scheduled_for(prefect_server: str):
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from weighbridge.flows import ScoreRequest

    names: list[str] = []

    @flow(persist_result=False, name="told-names")
    def named(request: ScoreRequest) -> None:
        names.append(run_name(request))

    request = ScoreRequest.model_validate(
        {"documents": "a", "schema": "in/triage-{date-1}.json", "timezone": "Asia/Tokyo"}
    )
    from prefect.states import Scheduled

    # Late at night in UTC, and next morning in Tokyo; run long after.
    due = datetime(2026, 3, 1, 20, tzinfo=UTC)
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(
            named,
            parameters={"request": request.model_dump(by_alias=True)},
            state=Scheduled(scheduled_time=due),
        )
    run_flow(named, flow_run=run, parameters={"request": request})
    assert names == ["score-triage-2026-03-01-2026-03-02"]
