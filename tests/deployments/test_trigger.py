"""`weighbridge trigger` against a real server and a real worker process."""

import json
import re
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from weighbridge.deployments.cli import main
from weighbridge.deployments.following import plain_message

pytestmark = [pytest.mark.prefect, pytest.mark.mlx]

SCHEMA = '{"urgent": {"type": "boolean", "description": "The text asks for help at once."}}'
# Without the prior of labels, which a process would compute first.
FAST = ["-p", "encoding=codes"]
NIGHT = datetime(2026, 11, 20, 6, 0, tzinfo=UTC)
GOOD = [{"id": "a", "text": "It broke, help!"}, {"id": "b", "text": "Hi."}]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def at_work(yard: Any) -> tuple[Any, UUID]:
    """A worker that found a run waiting which was due at night, ten days ago."""
    from prefect.client.orchestration import get_client
    from prefect.states import Scheduled

    from weighbridge.deployments.deploying import find

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(yard.folder)
        Path("triage.json").write_text(SCHEMA)
        write(Path("tickets-2026-11-19.jsonl"), GOOD)
        night = ["--documents", "tickets-{date-1}.jsonl", "--schema", "triage.json", *FAST]
        assert main(["deploy", "--pool", yard.pool]) == 0
        assert main(["deploy", "nightly", *night, "--timezone", "UTC"]) == 0
    with get_client(sync_client=True) as client:
        nightly = find(client, "nightly")
        assert nightly is not None
        state = Scheduled(scheduled_time=NIGHT)  # pyright: ignore[reportArgumentType]
        late = client.create_flow_run_from_deployment(nightly.id, state=state).id
    yard.start("--no-warm-up")
    return yard, late


@pytest.fixture
def adhoc(
    at_work: tuple[Any, UUID], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Trigger `adhoc` and wait: the exit code, the answer and what was said."""
    yard, late = at_work
    yard.ended(late)  # or the worker might not be heard of yet
    monkeypatch.chdir(yard.folder)

    def run(documents: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        request = ["--documents", documents, "--schema", "triage.json", *FAST]
        code = main(["trigger", "adhoc", *request, *arguments, "--wait", "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


@pytest.fixture
def idle(
    prefect_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """A deployment that no worker looks after; return what triggers it."""
    del prefect_server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("triage.json").write_text(SCHEMA)
    request = ["--documents", "d.jsonl", "--schema", "triage.json"]
    assert main(["deploy", "idle", *request, "--pool", "nobody"]) == 0
    capsys.readouterr()
    return ["trigger", "idle"]


def flow_run(identity: str) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(identity))


@pytest.fixture
def waiting(idle: list[str], start_weighbridge: Callable[..., Any]) -> Callable[[], Any]:
    """Trigger `idle` in a process of its own, which waits; give it and its flow run's id.

    What it says tells when it has seen a state: only then the next one may come.
    """

    def start() -> tuple[Any, UUID]:
        process = start_weighbridge(*idle, "--wait")
        return process, UUID(process.stdout.readline().split()[1])

    return start


def set_state(identity: UUID, state: Any) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(identity, state, force=True)


@pytest.mark.slow
def test_a_run_that_was_due_while_nothing_ran_runs_once_for_its_own_night(
    at_work: tuple[Any, UUID],
):
    yard, late = at_work
    assert yard.ended(late) == "Completed"
    assert yard.history(late).count("Running") == 1
    found = yard.flow_run(late)
    assert found.expected_start_time == NIGHT
    # The dates of paths are those of the night it was due, not of the morning it ran.
    outcome = [each for each in artifacts(late) if (each.key or "").endswith("-outcome")]
    assert json.loads(str(outcome[0].data))[0]["documents"] == len(GOOD)


def artifacts(identity: UUID) -> list[Any]:
    from prefect.client.orchestration import get_client

    from weighbridge.deployments.published import artifacts_of

    with get_client(sync_client=True) as client:
        return artifacts_of(client, identity)


@pytest.mark.slow
def test_done_is_0(adhoc: Callable[..., Any], at_work: tuple[Any, UUID]):
    yard, _ = at_work
    write(yard.folder / "good.jsonl", GOOD)
    code, answer, err = adhoc("good.jsonl", "-p", "limit=1", "--output", "answers-{date}.csv")
    assert code == 0
    assert answer["state"] == "completed"
    assert answer["outcome"]["documents"] == 1
    assert answer["outcome"]["rejected"] == 0
    assert answer["name"].startswith("score-triage-")
    assert answer["flow_run_id"] in answer["url"]
    assert "completed" in err
    assert "no worker is online" not in err
    # Where the answers are: in the worker's store, which is not that of this shell.
    run = answer["outcome"]["run_id"]
    assert f"run {run}, 1 document, " in err
    assert f"weighbridge results {run} --db {yard.folder}/setting.db shows each answer" in err
    (written,) = yard.folder.glob("answers-2*.csv")
    assert f"written to {written}\n" in err
    # Questions are sent, and paths hold anywhere.
    request = flow_run(answer["flow_run_id"]).parameters["request"]
    assert request["documents"] == str(yard.folder / "good.jsonl")
    assert json.loads(request["schema"])["urgent"]["type"] == "boolean"
    assert (request["schema_name"], request["limit"]) == ("triage", 1)


@pytest.mark.slow
def test_rejected_documents_are_3(
    adhoc: Callable[..., Any], at_work: tuple[Any, UUID], monkeypatch: pytest.MonkeyPatch
):
    setting = at_work[0].environment["WEIGHBRIDGE_DATABASE_URL"]
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", setting)
    write(at_work[0].folder / "empty.jsonl", [{"id": "a", "text": ""}])
    code, answer, err = adhoc("empty.jsonl")
    assert (code, answer["state"], answer["outcome"]["rejected"]) == (3, "completed", 1)
    assert f"weighbridge rejected {answer['outcome']['run_id']} says which" in err
    assert "shows each answer" not in err  # there is none


@pytest.mark.slow
def test_failed_is_1(adhoc: Callable[..., Any]):
    code, answer, err = adhoc("missing.jsonl")
    assert (code, answer["state"], answer["outcome"]) == (1, "failed", None)
    # As the flow has raised it, without what Prefect puts before it.
    assert re.search(r"^error: \S+ failed: .*missing\.jsonl does not exist", err, re.MULTILINE)
    assert "trigger it again" not in err  # nothing was recorded
    assert "is not on this machine" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "message", "code", "said"),
    [
        ("Crashed", "the lid was closed", 1, " crashed: the lid was closed\n"),
        ("Cancelled", "by me", 130, " was cancelled: by me\n"),
        ("Cancelled", "cancelled through Prefect", 130, " was cancelled through Prefect\n"),
    ],
)
def test_other_ends(state: str, message: str, code: int, said: str, waiting: Callable[[], Any]):
    from prefect import states

    process, identity = waiting()
    assert process.stdout.readline().startswith("page  http://127.0.0.1")
    read_until(process, "waiting for a worker")
    set_state(identity, getattr(states, state)(message=message))
    err = process.stderr.read()
    assert process.wait(300) == code
    assert said in err
    assert "interrupted" not in err  # nobody has pressed Ctrl-C here
    assert "trigger it again" not in err


@pytest.mark.slow
def test_what_a_run_goes_through_is_told(waiting: Callable[[], Any]):
    from prefect import states
    from prefect.client.orchestration import get_client

    from weighbridge.deployments.deploying import find

    # A worker that is heard of, and has a run.
    assert main(["deploy", "idle", "--pool", "busy"]) == 0
    with get_client(sync_client=True) as client:
        deployment = find(client, "idle")
        assert deployment is not None
        client.send_worker_heartbeat("busy", "mini", 3600)
        other_run = client.create_flow_run_from_deployment(deployment.id)
        client.set_flow_run_state(other_run.id, states.Running(), force=True)
    process, identity = waiting()
    later = datetime.now(UTC) + timedelta(hours=1)
    read_until(process, "waiting: the worker is busy with another run")
    for state, told in (
        (states.Pending(), "a worker has taken it, and is starting"),
        (states.Running(), "running"),
        (
            states.AwaitingRetry(scheduled_time=later),  # pyright: ignore[reportArgumentType]
            "put back, waiting for a worker to go on with it",
        ),
        (states.Completed(), "completed"),
    ):
        set_state(identity, state)
        assert process.stderr.readline() == f"{told}\n"
    # It is not known what became of the documents, so that this is no success.
    assert "completed without saying what became of its documents" in process.stderr.read()
    assert process.wait(300) == 1


def test_a_worker_that_is_online_is_not_asked_for(
    at_work: tuple[Any, UUID], capsys: pytest.CaptureFixture[str]
):
    yard, late = at_work
    yard.ended(late)
    capsys.readouterr()
    assert main(["deploy", "nightly"]) == 0
    out, err = capsys.readouterr()
    assert "unchanged  deployment nightly" in out
    assert "worker start" not in err


def test_what_prefect_puts_before_an_error_goes():
    before = "Flow run encountered an exception: "
    for message, plain in (
        (f"{before}SourceError: d: e must hold", "d: e must hold"),
        (f"{before}KeyError: 'urgent'", "KeyError: 'urgent'"),  # which says nothing alone
        (f"{before}SourceError: ", "SourceError"),
        ("Finished in state Failed: no", "Finished in state Failed: no"),
    ):
        assert plain_message(message) == plain


def test_without_waiting_it_prints_the_run_and_its_page(
    idle: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(idle) == 0
    out, err = capsys.readouterr()
    identity = out.split()[1]
    run = flow_run(identity)
    assert run.state.type.value == "SCHEDULED"
    assert out.splitlines()[1].endswith(f"/runs/flow-run/{identity}")
    assert "no worker is online in the pool nobody: weighbridge worker start --pool nobody" in err
    assert [line for line in (out + err).splitlines() if len(line) > 100] == []


def test_a_new_schema_does_not_keep_the_name_of_the_old(
    idle: list[str], capsys: pytest.CaptureFixture[str]
):
    model = ["--schema", "weighbridge.examples.ticket_model:Ticket"]
    assert main(["deploy", "idle", *model]) == 0
    capsys.readouterr()
    assert main([*idle, "--json"]) == 0
    request = flow_run(json.loads(capsys.readouterr().out)["flow_run_id"]).parameters["request"]
    # A model is written out: its module may not be where the worker is.
    assert request["schema_name"] == "Ticket"
    assert isinstance(json.loads(request["schema"]), dict)
    assert main([*idle, "--schema", SCHEMA, "--json"]) == 0
    request = flow_run(json.loads(capsys.readouterr().out)["flow_run_id"]).parameters["request"]
    assert "schema_name" not in request


def test_what_is_refused_starts_nothing(idle: list[str], capsys: pytest.CaptureFixture[str]):
    for arguments, code, said in (
        (["-p", "temperature=hot"], 2, "Invalid value for -p temperature: Input should be"),
        (["-p", "permutations=99"], 2, "Invalid value for -p permutations: Input should be"),
        (["-p", "tempratur=1"], 2, "did you mean temperature?"),
        (["-p", "limit=1", "-p", "limit=2"], 2, "limit must be named once"),
        (["--query", "SELECT 1", "-p", "query=x"], 2, "query must be named once: --query"),
        (["--since", "yesterday"], 2, "--since"),
        (["--output", "answers.xlsx"], 2, "Invalid value for --output: must end in .json"),
        (["--documents", "-"], 2, "stdin"),
        (["--documents", "t-{dat}.jsonl"], 2, "Invalid value for --documents: a date in a path"),
        (["--documents", "mysql://u:secret@h/d"], 2, "no password"),
        (["--schema", "missing.json"], 1, "missing.json"),
        (["--schema", "no.such.module:Class"], 1, "no.such.module"),
    ):
        assert main([*idle, *arguments]) == code, arguments
        out, err = capsys.readouterr()
        assert said in err, (arguments, err)
        assert "secret" not in err
        assert err.count("got ") <= 1, err
        assert out == ""


def test_what_only_the_server_refuses_names_the_field(
    idle: list[str], capsys: pytest.CaptureFixture[str]
):
    # The deployment is of another version, whose form is stricter.
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentUpdate

    from weighbridge.deployments.deploying import find

    with get_client(sync_client=True) as client:
        found = find(client, "idle")
        assert found is not None
        form: Any = found.parameter_openapi_schema
        fields = form["definitions"]["ScoreRequest"]["properties"]
        fields["limit"] = {"type": "integer", "maximum": 5}
        client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=form))
    assert main([*idle, "-p", "limit=6"]) == 1
    err = capsys.readouterr().err
    assert "error: the server refuses to trigger idle: limit: 6 is greater than" in err


def test_an_unknown_deployment_lists_those_there_are(
    idle: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["trigger", "weekly"]) == 1
    err = capsys.readouterr().err
    assert re.search(r"there is no deployment 'weekly', only (.+ and )?\S+$", err, re.MULTILINE)
    assert "idle" in err
    assert "weighbridge deploy" in err


def test_names_that_cannot_be(prefect_server: str, capsys: pytest.CaptureFixture[str]):
    del prefect_server
    for name in ("", " /", "a\0b", "\udcff", "9" * 100_000, "other-flow/idle"):
        assert main(["trigger", "--", name]) == 2
        assert "must be the name of a deployment" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_leaves_the_run_going(
    idle: list[str], start_weighbridge: Callable[..., Any], tmp_path: Path, way: Any
):
    process = start_weighbridge(*idle, "--wait", cwd=tmp_path, env={"PREFECT_API_URL": way.url})
    identity = process.stdout.readline().split()[1]
    read_until(process, "waiting for a worker")
    way.end()  # without its server it does not just stand there
    read_until(process, "the Prefect API does not answer; trying again")
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert process.wait(300) == 130
    assert "the run goes on: http://127.0.0.1:" in err
    assert f"to end it: prefect flow-run cancel {identity}" in err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert flow_run(identity).state.type.value == "SCHEDULED"


def read_until(process: Any, said: str) -> None:
    assert any(said in line for line in process.stderr), f"it ended and did not say: {said}"
