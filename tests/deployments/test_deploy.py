"""`weighbridge deploy` on a real Prefect server: the same end however often, and nothing undone."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import yaml

from weighbridge.deployments.automations import REJECTED, ZOMBIES
from weighbridge.deployments.cli import main
from weighbridge.deployments.cli.request_options import OTHER_FIELDS, OWN_OPTION
from weighbridge.deployments.deploying import overlaid
from weighbridge.deployments.deployments_file import file_text, read_entries
from weighbridge.deployments.time_zone import is_zone, local_zone

pytestmark = pytest.mark.prefect

SCHEMA = '{"urgent": {"type": "boolean", "description": "Whether it is urgent."}}'
NIGHT = ["--documents", "tickets-{date-1}.jsonl", "--schema", "triage.json"]


@pytest.fixture
def client(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server without deployments and automations, in a folder with a schema."""
    from prefect.client.orchestration import get_client

    del prefect_server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("triage.json").write_text(SCHEMA)
    with get_client(sync_client=True) as client:
        for deployment in client.read_deployments():
            client.delete_deployment(deployment.id)
        for automation in client.read_automations():
            client.delete_automation(automation.id)
        yield client


@pytest.fixture
def deploy(client: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run the command and return what it says as JSON, by deployment."""

    def run(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["deploy", *arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        return {**told, **{each["name"]: each for each in told["deployments"]}}

    return run


def test_twice_is_once(deploy: Callable[..., dict[str, Any]], client: Any):
    first, second = deploy(), deploy()
    for name in ("nightly", "adhoc"):
        assert (first[name].pop("made"), first[name].pop("changed")) == (True, True)
        assert (second[name].pop("made"), second[name].pop("changed")) == (False, False)
        assert first[name] == second[name]
    assert len(client.read_deployments()) == 2
    assert [each.name for each in client.read_automations()] == [ZOMBIES]
    assert first["automations"][0]["id"] == second["automations"][0]["id"]
    assert second["automations"][0]["changed"] is False
    assert client.read_work_pool("weighbridge").type == "weighbridge"


def test_what_the_server_has_is_what_the_file_says(
    deploy: Callable[..., dict[str, Any]], client: Any
):
    told = deploy()
    for name, entry in read_entries().items():
        found = client.read_deployment(UUID(told[name]["id"]))
        assert found.entrypoint == "weighbridge.flows.score.score_documents"
        assert (found.path, found.pull_steps) == (None, [])
        assert found.enforce_parameter_schema
        assert found.global_concurrency_limit.limit == entry.limit == 1
        assert found.concurrency_options.collision_strategy == "ENQUEUE"
        assert found.concurrency_options.grace_period_seconds == entry.grace_period_seconds
        assert found.description == entry.description
        # The form explains itself.
        fields = found.parameter_openapi_schema["definitions"]["ScoreRequest"]["properties"]
        assert [field for field, each in fields.items() if not each.get("description")] == []
    nightly = client.read_deployment(UUID(told["nightly"]["id"]))
    assert nightly.paused
    (schedule,) = nightly.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("0 6 * * *", local_zone())
    assert not client.read_deployment(UUID(told["adhoc"]["id"])).schedules


def test_a_job_of_six_o_clock(deploy: Callable[..., dict[str, Any]], client: Any, tmp_path: Path):
    told = deploy(
        "nightly",
        *NIGHT,
        "--output",
        "answers-{date}.csv",
        "-p",
        "limit=5",
        "--timezone",
        "Europe/Berlin",
        "--activate",
    )["nightly"]
    assert told["request"] == {
        # A worker runs in a folder of its own; a schema file is read anew by each run.
        "documents": str(tmp_path / "tickets-{date-1}.jsonl"),
        "schema": str(tmp_path / "triage.json"),
        "output": str(tmp_path / "answers-{date}.csv"),
        "limit": 5,
    }
    assert told["schedules"] == ["0 6 * * * (Europe/Berlin)"]
    assert told["paused"] is False
    # What is not typed stays: all but the hour.
    again = deploy("nightly", "--cron", "30 7 * * 1-5")["nightly"]
    assert again["schedules"] == ["30 7 * * 1-5 (Europe/Berlin)"]
    assert {**again, "schedules": None} == {**told, "schedules": None, "made": False}
    assert deploy("nightly", "--paused")["nightly"]["paused"] is True
    assert len(client.read_deployments()) == 1


def test_what_was_changed_in_the_ui_stays(deploy: Callable[..., dict[str, Any]], client: Any):
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.client.schemas.schedules import CronSchedule

    night = UUID(deploy("nightly", *NIGHT)["nightly"]["id"])
    client.resume_deployment(night)
    client.create_deployment_schedules(night, [(CronSchedule(cron="0 18 * * *"), True)])
    request = {**client.read_deployment(night).parameters["request"], "limit": 7}
    client.update_deployment(night, DeploymentUpdate(parameters={"request": request}))
    (own,) = [each for each in client.read_deployment_schedules(night) if each.slug == "nightly"]
    client.update_deployment_schedule(night, own.id, active=False)
    (zombies,) = client.read_automations()
    client.pause_automation(zombies.id)

    told = deploy()
    assert told["nightly"]["paused"] is False
    assert told["nightly"]["schedules"] == ["0 18 * * * (UTC)"]
    assert told["nightly"]["request"] == request
    assert told["automations"][0]["enabled"] is False
    assert len(client.read_deployment_schedules(night)) == 2
    # --activate is what was typed: it switches on both the deployment and our schedule.
    assert len(deploy("nightly", "--activate")["nightly"]["schedules"]) == 2


def test_another_job_beside_it(
    deploy: Callable[..., dict[str, Any]], client: Any, capsys: pytest.CaptureFixture[str]
):
    # A name that was mistyped is not one of a new job.
    assert main(["deploy", "nigthly", "--paused"]) == 2
    said = "a run needs documents and schema, and nigthly has none yet: name them with --documents"
    assert said in capsys.readouterr().err
    assert client.read_deployments() == []
    told = deploy("mails", *NIGHT, "--cron", "0 7 * * *", "--pool", "other pool")["mails"]
    assert told["made"]
    assert told["paused"]
    assert told["pool"] == "other pool"
    assert client.read_work_pool("other pool").type == "weighbridge"
    # The pool stays too.
    assert deploy("mails", "--activate")["mails"]["pool"] == "other pool"


def test_a_schedule_needs_something_to_run(client: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["deploy", "nightly", "--activate"]) == 2
    assert "a run needs documents and schema" in capsys.readouterr().err
    assert client.read_deployments() == []


def test_a_first_schedule_has_the_zone_of_the_machine_and_is_off(
    deploy: Callable[..., dict[str, Any]],
    client: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    told = deploy()
    night = UUID(told["nightly"]["id"])
    (own,) = client.read_deployment_schedules(night)
    client.delete_deployment_schedule(night, own.id)
    for name in ("nightly", "adhoc"):
        assert main(["deploy", name, "--timezone", "Europe/Berlin"]) == 2
        err = capsys.readouterr().err
        assert f"is the zone of a schedule, and {name} has none: name it with --cron" in err
        assert deploy(name)[name]["schedules"] == []
        made = deploy(name, "--cron", "0 5 * * *")[name]
        # There may be nothing to run yet, and nobody has asked for it.
        assert (made["schedules"], made["paused"]) == (["0 5 * * * (Asia/Tokyo)"], True)
        assert deploy(name, *NIGHT, "--activate")[name]["paused"] is False
    client.delete_deployment(UUID(told["adhoc"]["id"]))
    assert main(["deploy", "adhoc", "--cron", "0 5 * * *"]) == 0
    assert "adhoc, paused, would run at 0 5 * * * (Asia/Tokyo)" in capsys.readouterr().out
    client.delete_deployment(night)
    new = deploy("nightly", *NIGHT, "--timezone", "Europe/Berlin", "--activate")["nightly"]
    assert (new["schedules"], new["paused"]) == (["0 6 * * * (Europe/Berlin)"], False)


def test_what_is_refused_changes_nothing(client: Any, capsys: pytest.CaptureFixture[str]):
    for arguments, code, said in (
        (["--documents", "x"], 2, "weighbridge deploy nightly"),
        (["--activate"], 2, "weighbridge deploy nightly"),
        (["nightly", "--cron", "at six"], 2, "--cron"),
        (["nightly", "--timezone", "Berlin"], 2, "--timezone"),
        (["adhoc", "--timezone", "Europe/Berlin"], 2, "-p timezone=Europe/Berlin"),
        (["night/ly"], 2, "NAME"),
        (["--pool", "a/b"], 2, "--pool"),
        (["nightly", "-p", "limit"], 2, "NAME=VALUE"),
        (["nightly", "-p", "temperature=hot"], 2, "-p temperature"),
        (["nightly", "-p", "tempratur=1"], 2, "got tempratur; did you mean temperature?"),
        (["nightly", "-p", "limit=1", "-p", "limit=2"], 2, "named once"),
        (["nightly", "--output", "answers-{date:%Y.%m.%d}"], 2, "must end in .json, .jsonl"),
        (["nightly", "--documents", "-"], 2, "stdin"),
        (["nightly", "--documents", "postgresql://u:secret@h/d"], 2, "no password"),
        (["nightly", "--documents", "a", "-p", "documents=b"], 2, "named once"),
        (["nightly", "--schema", "missing.json"], 1, "missing.json"),
        (["--notify", "ops"], 1, "TYPE/NAME"),
        (["--notify", "slack-webhook/ops"], 1, "there is no 'slack-webhook/ops'"),
    ):
        assert main(["deploy", *arguments]) == code, arguments
        err = capsys.readouterr().err
        assert said in err, (arguments, err)
        assert "secret" not in err
        assert client.read_deployments() == []
        assert client.read_automations() == []


def test_all_that_is_set_is_shown(client: Any, capsys: pytest.CaptureFixture[str]):
    del client
    query = "SELECT id, body AS text FROM tickets\nWHERE changed > :since " + "AND 1 = 1 " * 20
    more = ["--text-field", "body", "-p", "limit=5", "-p", "store_text=false"]
    assert main(["deploy", "nightly", "--documents", "t.db", "--query", query, *more]) == 0
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (shown,) = [line for line in told if line.startswith("query ")]
    assert shown.startswith("query SELECT id, body AS text FROM tickets WHERE changed > :since")
    assert shown.endswith("…")
    assert {"text_field body", "limit 5", "store_text false"} <= set(told)


def test_every_field_can_be_typed():
    from weighbridge.flows import ScoreRequest

    fields = {name.rstrip("_") for name in ScoreRequest.model_fields}
    assert {*OWN_OPTION, *OTHER_FIELDS} == fields
    assert len(OWN_OPTION) + len(OTHER_FIELDS) == len(fields)


@pytest.mark.parametrize("command", [["deploy"], ["trigger", "adhoc"]])
def test_without_a_server_it_says_how_to_start_one(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from weighbridge.deployments import prefect_api

    monkeypatch.setattr(prefect_api, "LOCAL_API", "http://127.0.0.1:9/api")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert main(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: a Prefect server must run, and none answers")
    assert "prefect server start" in err
    assert "PREFECT_API_URL" in err
    # One that is named and silent: a temporary one would not do.
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert main(command) == 1
    err = capsys.readouterr().err
    assert "or name another with PREFECT_API_URL" in err
    assert "unset" not in err


def test_the_server_refuses_bad_parameters_by_name(
    deploy: Callable[..., dict[str, Any]], prefect_server: str
):
    adhoc = deploy("adhoc")["adhoc"]["id"]
    request = {"documents": "d.jsonl", "schema": SCHEMA}
    url = f"{prefect_server}/deployments/{adhoc}/create_flow_run"
    with httpx.Client(trust_env=False) as direct:
        for change, said in (
            ({"temperature": "hot"}, "request.temperature"),
            ({"permutations": 99}, "request.permutations"),
            ({"mode": "fast"}, "request.mode"),
            ({"alert_rejected_share": 2}, "request.alert_rejected_share"),
            ({"tempratur": 1}, "tempratur"),
            ({"schema": None}, "request.schema"),
        ):
            answer = direct.post(url, json={"parameters": {"request": {**request, **change}}})
            assert (answer.status_code, said in answer.text) == (409, True), answer.text
        # Negative control: without a change it is taken.
        assert direct.post(url, json={"parameters": {"request": request}}).status_code == 201


def test_a_second_run_waits_for_its_turn(deploy: Callable[..., dict[str, Any]], client: Any):
    from prefect.states import Completed, Pending, Running

    deployment = UUID(deploy("nightly")["nightly"]["id"])
    request = {"request": {"documents": "d.jsonl", "schema": SCHEMA}}
    first, second = (
        client.create_flow_run_from_deployment(deployment, parameters=request) for _ in "12"
    )
    # What a worker does when it takes a run.
    assert client.set_flow_run_state(first.id, Pending()).state.name == "Pending"
    client.set_flow_run_state(first.id, Running())
    held = client.set_flow_run_state(second.id, Pending()).state
    assert (held.type.value, held.name) == ("SCHEDULED", "AwaitingConcurrencySlot")
    client.set_flow_run_state(first.id, Completed())
    assert client.set_flow_run_state(second.id, Pending()).state.name == "Pending"


@pytest.mark.slow
def test_prefect_deploys_the_file_as_well(
    deploy: Callable[..., dict[str, Any]],
    client: Any,
    prefect_server: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    ours = {each["name"]: each["id"] for each in deploy()["deployments"]}
    assert main(["deploy", "--print"]) == 0
    assert capsys.readouterr().out == file_text()
    (tmp_path / "prefect.yaml").write_text(file_text())
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        env={
            "PREFECT_API_URL": prefect_server,
            "PREFECT_HOME": str(tmp_path),
            "HOME": str(tmp_path),
            "DO_NOT_TRACK": "1",
            "PATH": "",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each.name: str(each.id) for each in client.read_deployments()} == ours
    for name, identity in ours.items():
        found = client.read_deployment(UUID(identity))
        assert found.entrypoint == "weighbridge.flows.score.score_documents"
        # Nothing is pulled from the folder that it was deployed in.
        assert str(tmp_path) not in str(found.pull_steps), name
        assert found.global_concurrency_limit.limit == 1


def test_the_file_has_one_flow_and_says_what_happens_on_a_collision():
    found = yaml.safe_load(file_text())
    assert found["pull"] == []
    assert {each["entrypoint"] for each in found["deployments"]} == {
        "weighbridge.flows.score.score_documents"
    }
    for each in found["deployments"]:
        assert set(each["concurrency_limit"]) == {
            *("limit", "collision_strategy", "grace_period_seconds")
        }


def test_the_zone_of_the_machine_is_a_zone(monkeypatch: pytest.MonkeyPatch):
    assert is_zone(local_zone())
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert local_zone() == "Asia/Tokyo"
    monkeypatch.setenv("TZ", "nonsense")
    assert is_zone(local_zone())


def test_the_report_fits_80_columns_and_says_what_is_next(
    client: Any, capsys: pytest.CaptureFixture[str]
):
    assert main(["deploy"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in (out + err).splitlines() if len(line) > 80] == []
    assert "deployment nightly, paused" in out
    for what in ("deploy nightly", "trigger adhoc", "worker start", "--notify"):
        assert what in err
    assert REJECTED not in out


def test_another_checkpoint_keeps_nothing_that_was_told_of_the_first():
    before = {"checkpoint": "a", "adapter": "of-a", "revision": "r", "model_id": "m", "limit": 3}
    assert overlaid(before, {"checkpoint": "b"}) == {"checkpoint": "b", "limit": 3}
    typed = {"checkpoint": "b", "adapter": "of-b"}
    assert overlaid(before, typed) == {**typed, "limit": 3}
    assert overlaid(before, {"limit": 4}) == {**before, "limit": 4}
