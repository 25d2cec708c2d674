"""The files for launchd and systemd say what they should, and what they say starts a worker."""

import configparser
import json
import os
import plistlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.deployments.automations import SILENCE
from weighbridge.deployments.cli import main
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.service import (
    Service,
    launchd_plist,
    service_file,
    service_id,
    systemd_quoted,
    systemd_unit,
    write_service,
)
from weighbridge.deployments.service_settings import is_secret

HOME = Path("/Users/ada")
ODD = 'a "b" 100% $HOME %h \\n back\\slash ;'
# What a service's file may hold: everything but control characters and half characters.
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
ANALYZE = shutil.which("systemd-analyze")


def make(**changes: Any) -> Service:
    values: dict[str, Any] = {
        "role": "worker",
        "name": "",
        "program": ("/opt/venv/bin/weighbridge", "worker", "start", "--pool", "weighbridge"),
        "environment": {"DO_NOT_TRACK": "1"},
        "folder": "/data",
    }
    return Service(**{**values, **changes})


def systemd_words(line: str, *, dollar: bool = False) -> list[str]:
    """Read words as systemd.syntax(7) has them: quotes and C escapes, then specifiers.

    A slow reference for `%%`, the escapes and (in arguments) `$$`; anything else that has a
    meaning there must not come.
    """
    words: list[str] = []
    word, quote, begun, at = "", "", False, 0
    while at < len(line):
        letter = line[at]
        if letter == "\\":
            assert line[at + 1] in '\\"'
            word, begun, at = word + line[at + 1], True, at + 2
            continue
        if letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote, begun = letter, True
        elif not quote and letter in " \t":
            words, word, begun = [*words, *([word] if begun else [])], "", False
        else:
            word, begun = word + letter, True
        at += 1
    assert not quote
    words += [word] if begun else []
    read: list[str] = []
    for number, each in enumerate(words):
        assert "%" not in each.replace("%%", ""), f"{each} has a specifier"
        plain = each.replace("%%", "%")
        if dollar and number > 0:
            assert "$" not in plain.replace("$$", ""), f"{each} has a variable"
            plain = plain.replace("$$", "$")
        read.append(plain)
    return read


def read_unit(text: str) -> dict[str, list[str]]:
    """Read a unit: all values of each name, in order, and each line where it must be."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values.setdefault(name, []).append(value)
        else:
            assert re.fullmatch(r"\[(Unit|Service|Install)\]|", line)
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.read_string(text)  # which finds lines that belong to no section
    assert parser.sections() == ["Unit", "Service", "Install"]
    return values


def unit_start(text: str) -> tuple[list[str], dict[str, str], str]:
    """Read what a unit starts: the words, the environment and the folder."""
    unit = read_unit(text)
    (command,), (folder,) = unit["ExecStart"], unit["WorkingDirectory"]
    assert "%" not in folder.replace("%%", "")
    environment = [systemd_words(each) for each in unit["Environment"]]
    assert all(len(each) == 1 for each in environment)
    pairs = dict(each[0].split("=", 1) for each in environment)
    return systemd_words(command, dollar=True), pairs, folder.replace("%%", "%")


def plist_start(text: str) -> tuple[list[str], dict[str, str], str]:
    """Read what a property list starts, in the same way."""
    plist = plistlib.loads(text.encode())
    return plist["ProgramArguments"], plist["EnvironmentVariables"], plist["WorkingDirectory"]


def test_a_plist_restarts_the_worker_whatever_ended_it_and_lets_it_drain():
    plist = plistlib.loads(launchd_plist(make(), HOME).encode())
    assert plist["Label"] == "weighbridge.worker"
    assert plist["KeepAlive"] is True
    assert plist["RunAtLoad"] is True
    assert plist["ExitTimeOut"] >= 120
    assert plist["ProcessType"] == "Interactive"
    assert plist["ProgramArguments"][-5:] == list(make().program)
    assert plist["StandardErrorPath"] == "/Users/ada/Library/Logs/weighbridge/worker.log"
    sleepy = plistlib.loads(launchd_plist(make(keep_awake=False), HOME).encode())
    assert sleepy["ProgramArguments"] == list(make().program)


def test_a_unit_restarts_the_worker_whatever_ended_it_and_lets_it_drain():
    unit = read_unit(systemd_unit(make()))
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]
    assert (unit["KillSignal"], unit["KillMode"]) == (["SIGTERM"], ["mixed"])
    assert int(unit["TimeoutStopSec"][0]) >= 120
    assert unit["WantedBy"] == ["default.target"]
    assert "After" not in read_unit(systemd_unit(make(role="server")))


def test_each_pool_has_a_service_of_its_own():
    names = {service_id(make(name=pool), "systemd") for pool in ("", "gpu", "two words")}
    assert names == {
        "weighbridge-worker.service",
        "weighbridge-worker-gpu.service",
        "weighbridge-worker-two-words.service",
    }
    assert service_file(make(name="gpu"), "launchd", HOME) == Path(
        "/Users/ada/Library/LaunchAgents/weighbridge.worker.gpu.plist"
    )


@given(st.lists(TEXT, min_size=1), TEXT)
def test_any_argument_and_variable_comes_back_from_the_unit(words: list[str], value: str):
    service = make(program=("/bin/true", *words), environment={"A": value})
    program, environment, _ = unit_start(systemd_unit(service))
    assert program == ["/bin/true", *words]
    assert environment == {"A": value}


@given(st.lists(TEXT, min_size=1), TEXT)
def test_any_argument_and_variable_comes_back_from_the_plist(words: list[str], value: str):
    service = make(program=("/bin/true", *words), environment={"A": value})
    program, environment, _ = plist_start(launchd_plist(service, HOME))
    assert program[3:] == ["/bin/true", *words]
    assert environment == {"A": value}


@pytest.mark.parametrize(
    "changes",
    [
        {"folder": "/data\n[Service]"},
        {"program": ("/bin/true", "a\0b")},
        {"environment": {"A": "\udcff"}},
        {"folder": "/data "},
        {"folder": "/data\\"},
    ],
)
def test_what_a_file_could_not_hold_is_refused(changes: dict[str, Any]):
    with pytest.raises(CommandError, match="of a service must"):
        make(**changes)


def verified(unit: str, folder: Path) -> str:
    """Let systemd read a unit; return what it says of it."""
    if ANALYZE is None:
        pytest.skip("systemd-analyze is not installed here")
    file = folder / "weighbridge-test.service"
    file.write_text(unit, encoding="utf-8")
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    # It looks at units of the machine too.
    return "\n".join(line for line in done.stderr.splitlines() if "weighbridge-test" in line)


def odd_service(folder: Path) -> Service:
    """A service whose program really is in a folder."""
    folder.mkdir()
    program = folder / "weigh bridge"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return make(program=(str(program), "--db", ODD), environment={"A": ODD}, folder=str(folder))


def test_systemd_finds_the_program_at_an_odd_path(tmp_path: Path):
    unit = systemd_unit(odd_service(tmp_path / "two words 100% $HOME %h é"))
    assert verified(unit, tmp_path) == ""
    # Negative controls: it would have said so.
    assert "is not executable" in verified(unit.replace("weigh bridge", "missing"), tmp_path)
    assert "%" in verified(unit.replace("%%", "%"), tmp_path)


def test_systemd_takes_a_program_whose_path_has_quotes(tmp_path: Path):
    service = odd_service(tmp_path / 'it\'s "q" \\n')
    unit = systemd_unit(service)
    assert verified(unit, tmp_path) == ""
    program, _, _ = unit_start(unit)
    # A shell starts it, in its own place, and hands on every word.
    shown = subprocess.run(
        [*program[:3], "/bin/echo", *program[4:]], capture_output=True, check=True
    )
    assert shown.stdout.decode() == f"--db {ODD}\n"
    assert program[3] == service.program[0]


def test_a_file_is_private_and_another_one_is_not_lost(tmp_path: Path):
    file = tmp_path / "units" / "w.service"
    assert write_service(file, "one", [], replace=False) is False
    assert file.stat().st_mode & 0o777 == 0o600
    assert write_service(file, "one", [], replace=False) is False
    with pytest.raises(CommandError, match="says something else"):
        write_service(file, "two", [], replace=False)
    assert file.read_text() == "one"
    assert write_service(file, "two", [], replace=True) is True
    assert file.read_text() == "two"
    assert [each.name for each in file.parent.iterdir()] == ["w.service"]


def test_what_may_be_secret():
    assert is_secret("PREFECT_API_KEY", "x")
    assert is_secret("PREFECT_API_AUTH_STRING", "x")
    assert is_secret("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql://me:pw@host/db")
    assert not is_secret("PREFECT_SERVER_DATABASE_CONNECTION_URL", "sqlite:////data/prefect.db")
    assert not is_secret("PREFECT_API_URL", "http://127.0.0.1:4200/api")


def installed(weighbridge: Callable[..., Any], *options: str, **given: Any) -> dict[str, Any]:
    done = weighbridge("worker", "install", *options, "--json", **given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_secrets_stay_out_and_settings_come_in(weighbridge: Callable[..., Any], tmp_path: Path):
    for name in ("nimble", "lora", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)  # or it could be a hub id
    env = {
        "PREFECT_API_KEY": "hidden",
        "PREFECT_API_URL": "http://127.0.0.1:4300/api",
        "WEIGHBRIDGE_CHECKPOINT": "models/nimble",
        "WEIGHBRIDGE_ADAPTER": "models/lora",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    worker = installed(weighbridge, "--platform", "systemd", "--pool", "gpu", env=env)
    _, environment, folder = unit_start(worker["text"])
    assert worker["left_out"] == ["PREFECT_API_KEY"]
    assert "hidden" not in worker["text"]
    assert folder == str(tmp_path)
    assert environment["PREFECT_API_URL"] == env["PREFECT_API_URL"]
    assert environment["WEIGHBRIDGE_CHECKPOINT"] == str(tmp_path / "models" / "nimble")
    assert environment["WEIGHBRIDGE_ADAPTER"] == str(tmp_path / "models" / "lora")
    assert environment["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] == "false"
    # The server takes a run for dead that misses three.
    assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) < SILENCE.total_seconds()
    file = tmp_path / "config" / "systemd" / "user" / "weighbridge-worker-gpu.service"
    assert worker["path"] == str(file)
    assert file.read_text() == worker["text"]

    # The adapter belongs to the other model.
    other = ["--checkpoint", "models/other", "--print"]
    program, environment, _ = unit_start(
        installed(weighbridge, "--platform", "systemd", *other, env=env)["text"]
    )
    assert program[-2:] == ["--checkpoint", str(tmp_path / "models" / "other")]
    assert "WEIGHBRIDGE_ADAPTER" not in environment

    server = installed(weighbridge, "--platform", "launchd", "--server", "--print", env=env)
    program, environment, _ = plist_start(server["text"])
    assert program[1:] == ["server", "start", "--host", "127.0.0.1", "--port", "4300"]
    assert "PREFECT_API_URL" not in environment
    assert not Path(server["path"]).exists()


def test_what_is_no_service_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    elsewhere: Any = {PREFECT_API_URL: "http://prefect.example:4200/api"}
    password = "postgresql://me:hidden@host/db"
    for settings, arguments, code, remedy in (
        ({}, ["--db", password], 1, "config.toml"),
        ({}, ["--pool", "a/b"], 2, "letters"),
        ({}, ["--server", "--pool", "gpu"], 2, "--server"),
        ({}, ["--checkpoint", "missing"], 1, "must be a folder"),
        (elsewhere, [], 1, "--allow-remote-api"),
        (elsewhere, ["--server"], 1, "where the server is"),
    ):
        with temporary_settings(settings):
            assert main(["worker", "install", *arguments]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert remedy in err
        assert "hidden" not in err
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", password)
    assert main(["worker", "install"]) == 1
    assert "hidden" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.mlx
@pytest.mark.parametrize("platform", ["launchd", "systemd"])
def test_what_is_printed_starts_a_worker(
    platform: str, weighbridge: Callable[..., Any], tmp_path: Path, embedded: Path
):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus
    from prefect.exceptions import PrefectHTTPStatusError

    folder = tmp_path / ODD.removesuffix(" ;")
    folder.mkdir()
    pool = f"service {platform}"
    done = weighbridge(
        *("worker", "install", "--print", "--platform", platform, "--pool", pool),
        *("--db", "answers.db", "--checkpoint", str(embedded)),
        env={"WEIGHBRIDGE_LEASE": str(tmp_path / "lease")},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    read = plist_start if platform == "launchd" else unit_start
    program, environment, place = read(done.stdout)
    assert place == str(folder)
    assert program[-4:] == ["--checkpoint", str(embedded), "--db", str(folder / "answers.db")]
    log = tmp_path / "log"
    # Nothing else comes from this shell, but what keeps tests from the network. There is no
    # caffeinate on Linux, and the shell that would start it starts the worker all the same.
    plain = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    plain["PYTHONPATH"] = str(Path(__file__).parents[1] / "no_network")
    with log.open("w") as output:
        worker = subprocess.Popen(
            program,
            env={**environment, **plain},
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
    try:
        deadline = time.monotonic() + 300
        found: list[Any] = []
        with get_client(sync_client=True) as client:
            while not found:
                assert worker.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
                try:
                    found = client.read_workers_for_work_pool(pool, worker_filter=online)
                except PrefectHTTPStatusError as error:
                    if error.response.status_code != 404:  # the worker makes the pool
                        raise
        # The signal goes to the process that was started, as both of them send it.
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(timeout=300) == 0, log.read_text()
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    assert "ended: the worker received SIGTERM" in log.read_text()


def test_quoting_is_what_systemd_documents():
    assert systemd_quoted('a "b" \\ 5% $x') == '"a \\"b\\" \\\\ 5%% $x"'
    assert systemd_quoted("$x", dollar=True) == '"$$x"'
