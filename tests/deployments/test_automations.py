"""Automations on a real server: one that fires, and what is stored of the other."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from weighbridge.deployments.automations import REJECTED, SILENCE, ZOMBIES
from weighbridge.deployments.cli import main

pytestmark = pytest.mark.prefect


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """A web server that keeps what is posted to it."""
    came: list[Any] = []

    class Keeper(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("content-length", 0))
            came.append(json.loads(self.rfile.read(size)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Keeper)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", came
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from prefect.client.orchestration import get_client

    del prefect_server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with get_client(sync_client=True) as client:
        for automation in client.read_automations():
            client.delete_automation(automation.id)
        yield client
        for automation in client.read_automations():
            client.delete_automation(automation.id)


def notified(came: list[Any], seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    while not came and time.monotonic() < deadline:
        time.sleep(0.2)
    return came


def test_a_run_that_rejects_many_is_told_of(
    receiver: tuple[str, list[Any]], client: Any, tmp_path: Path, embedded: Path
):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    from weighbridge.flows import ScoreRequest, score_documents

    url, came = receiver
    said = {"subject": "{{subject}}", "body": "{{body}}"}
    block = CustomWebhookNotificationBlock(
        name="ops", url=url, json_data=said, headers=None, cookies=None
    )
    block.save("ops", overwrite=True)  # pyright: ignore[reportUnusedCoroutine]
    assert main(["deploy", "--notify", "custom-webhook/ops"]) == 0
    assert main(["deploy", "--notify", "custom-webhook/ops"]) == 0
    assert sorted(each.name for each in client.read_automations()) == sorted([ZOMBIES, REJECTED])

    # No text in it, so that no model is needed.
    documents = tmp_path / "d.jsonl"
    documents.write_text('{"id": "a", "text": ""}\n{"id": "b", "text": ""}\n')
    request: dict[str, Any] = {
        "documents": str(documents),
        "schema": '{"urgent": {"type": "boolean", "description": "Whether it is urgent."}}',
        "checkpoint": str(embedded),
        "database": str(tmp_path / "store.db"),
    }
    # Exactly the share is not more than it: all may be rejected.
    score_documents(ScoreRequest.model_validate({**request, "alert_rejected_share": 1.0}))
    score_documents(ScoreRequest.model_validate({**request, "alert_rejected_share": 0.9}))
    (told,) = notified(came, 300)
    assert told["subject"] == "Weighbridge rejected 2 of 2 documents"
    assert "2 of 2 documents were rejected" in told["body"]
    assert "weighbridge rejected 2 says" in told["body"]  # the second run of this store
    assert len(came) == 1


def test_without_a_block_nothing_is_notified_and_the_way_is_told(
    client: Any, capsys: pytest.CaptureFixture[str]
):
    assert main(["deploy"]) == 0
    assert [each.name for each in client.read_automations()] == [ZOMBIES]
    assert "--notify" in capsys.readouterr().err


def test_the_automation_for_runs_whose_process_is_gone(client: Any):
    assert main(["deploy"]) == 0
    (stored,) = client.read_automations()
    flow = client.create_flow_from_name("score-documents")
    trigger = stored.trigger
    assert stored.enabled
    assert trigger.posture.value == "Proactive"
    assert trigger.after == {"prefect.flow-run.heartbeat"}
    assert trigger.within == SILENCE
    assert trigger.for_each == {"prefect.resource.id"}
    # Runs of other flows are none of our business.
    related = trigger.match_related.model_dump()
    assert related["prefect.resource.id"] == f"prefect.flow.{flow}"
    (action,) = stored.actions
    assert (action.type, action.state.value) == ("change-flow-run-state", "CRASHED")
    # Heartbeats of a worker that is set to nothing else come several times within it.
    from prefect.settings.models.flows import FlowsSettings

    assert 3 * timedelta(seconds=FlowsSettings().heartbeat_frequency or 0) < SILENCE
