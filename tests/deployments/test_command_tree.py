"""What must hold for every command, asked of the real command tree: a new command is in here."""

import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from weighbridge.db import Store, open_engine, sqlite_url
from weighbridge.deployments.cli import main
from weighbridge.tasks.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
DOCS = runpy.run_path(str(ROOT / "docs" / "generate.py"))
COMMANDS: dict[str, Any] = {name: command for name, command, _ in DOCS["commands"]()}
GROUPS = sorted({name.rpartition(" ")[0] for name in COMMANDS} - {""})
WITH_JSON = [
    name
    for name, command in COMMANDS.items()
    if any("--json" in parameter.opts for parameter in command.params)
]
SCHEMA = '{"urgent": {"type": "boolean", "description": "Whether it is urgent."}}'
MODEL = (pytest.mark.mlx,)
FLOW = (pytest.mark.mlx, pytest.mark.prefect, pytest.mark.slow)

# How to ask each command with --json on the store below, in several ways where it has several
# shapes, and the exit code. A command without an entry fails the test.
CALLS: dict[str, list[tuple[list[str], int]]] = {
    "validate": [
        (["two.jsonl", "--schema", "s.json"], 0),
        (["two.jsonl", "--schema", "s.json", "--show-prompt", "0"], 0),
        (["--schema", "s.json"], 0),
    ],
    "score": [(["two.jsonl", "--schema", "s.json", "--limit", "1"], 0)],
    "results": [
        ([], 0),
        (["1", "--field", "topic", "--uncertain", "--limit", "1"], 0),
        (["1", "--wide"], 0),
        (["1", "--count"], 0),
        (["1", "--temperature", "2"], 0),
    ],
    "rejected": [([], 0), (["2"], 0)],
    "runs": [([], 0), (["--limit", "1"], 0), (["--status", "failed"], 0)],
    "query": [(["select * from results"], 0), (["select 1 where false"], 0)],
    "show": [([], 0), (["1"], 0), (["T-0", "--text"], 0), (["1:2"], 0)],
    "diff": [(["1", "2"], 0), (["1", "2", "--changed"], 0)],
    "doctor": [([], 0)],
    "bench": [(["--model", "llama", "--scenario", "1x239", "--repeats", "1"], 0)],
    "schema show": [(["s.json"], 0)],
    "schema convert": [(["s.json"], 0)],
    "checkpoint info": [([], 0)],
    "checkpoint verify": [([], 0)],
    "deploy": [([], 0), (["nightly", "--documents", "two.jsonl", "--schema", "s.json"], 0)],
    "trigger": [(["adhoc", "--documents", "two.jsonl", "--schema", "s.json"], 0)],
    "worker install": [
        ([], 0),
        (["--print", "--platform", "launchd", "--pool", "gpu"], 0),
        (["--server", "--print"], 0),
    ],
    "db path": [([], 0)],
    "db backup": [([], 0), (["copy.backup"], 0)],
    "db prune": [
        (["--older-than", "90d", "--dry-run"], 0),
        (["--older-than", "90d", "--yes"], 0),
        (["--older-than", "9000d", "--yes", "--vacuum"], 0),
    ],
    "db forget": [(["T-0", "--dry-run"], 0), (["T-0", "--yes"], 0)],
    "db vacuum": [([], 0)],
}
# What must have been done before.
BEFORE = {"trigger": ["deploy"]}
MARKS = {
    "deploy": (pytest.mark.prefect,),
    "trigger": (pytest.mark.prefect,),
    "validate": MODEL,
    "score": FLOW,
    "doctor": MODEL,
    "bench": MODEL,
    "checkpoint info": MODEL,
    "checkpoint verify": MODEL,
}


def calls() -> list[Any]:
    return [
        pytest.param(
            name, arguments, code, id=" ".join([name, *arguments]), marks=MARKS.get(name, ())
        )
        for name in WITH_JSON
        for arguments, code in CALLS.get(name, [])
    ]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A store of two runs of the same documents, one of them old, and files to ask about."""
    for name in [name for name in os.environ if name.startswith("WEIGHBRIDGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "store.db"
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", sqlite_url(path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    if request.node.get_closest_marker("mlx"):
        monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(request.getfixturevalue("embedded")))
    if request.node.get_closest_marker("prefect"):
        request.getfixturevalue("prefect_server")
    Path("s.json").write_text(SCHEMA)
    Path("two.jsonl").write_text('{"id": "a", "text": "It broke."}\n{"id": "b", "text": "Hi!"}\n')
    make = runpy.run_path(str(ROOT / "tests" / "db" / "conftest.py"))["Builders"]()
    engine = open_engine(sqlite_url(path))
    for age, version in ((100, "1"), (1, "2")):
        began = datetime.now(UTC) - timedelta(days=age)
        writer = Store(engine, clock=lambda began=began: began)
        start = make.start(host=platform.node(), prompt_version=version)
        run_id = writer.begin_run(start).run_id
        # What a terminal must not be sent, in an id and in metadata.
        odd = make.scored(1, "odd\x1b[31m", external_id="T-\u202e1", metadata={"a": "\x1b"})
        writer.record_batch(run_id, make.batch(make.scored(0), odd, make.rejected(2)))
        writer.finish_run(run_id, "completed", documents=3)
    engine.dispose()
    return path


@pytest.mark.parametrize("name", [*COMMANDS, *GROUPS, ""])
def test_every_help_says_what_for_and_fits_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if cell_len(line.rstrip()) > 80] == []
    if name in COMMANDS:
        assert "Example: weighbridge" in out or "Example: sqlite3" in out
        purpose = DOCS["purpose"](COMMANDS[name])
        assert purpose.endswith(".")
        assert purpose.split()[0] in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name: str):
    silent = [each.opts[0] for each in COMMANDS[name].params if not getattr(each, "help", "")]
    assert silent == []


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_can_be_typed(name: str):
    # Options that an example shows are options that the command has.
    _, examples = DOCS["parts"](COMMANDS[name].help)
    assert examples
    known = {option for each in COMMANDS[name].params for option in each.opts}
    for example in examples:
        assert f"weighbridge {name}" in example
        assert set(re.findall(r"(?<!\S)--[a-z-]+", example)) <= known


def test_every_command_with_json_is_asked_below():
    assert sorted(set(WITH_JSON) - CALLS.keys()) == []
    assert len(WITH_JSON) > 8


@pytest.mark.parametrize(("name", "arguments", "code"), calls())
def test_json_is_one_value_and_nothing_else(
    name: str, arguments: list[str], code: int, store: Path, capsys: pytest.CaptureFixture[str]
):
    if name in BEFORE:
        main(BEFORE[name])
        capsys.readouterr()
    assert main([*name.split(), *arguments, "--json"]) == code
    out = capsys.readouterr().out
    json.loads(out, parse_constant=lambda constant: pytest.fail(f"JSON has no {constant}"))
    # One value, one end of line, and nothing that a terminal acts on.
    assert out.endswith("\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_docs(name: str):
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert f"\n## {name}\n" in page


def test_docs_and_readme_are_what_the_command_line_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_stale_docs_are_noticed():
    # Negative control: a table that says something else is replaced, a missing mark refused.
    text = "a\n<!-- exit codes -->\nold\n<!-- /exit codes -->\nb"
    assert DOCS["with_block"](text, "exit codes", ["new"]) == text.replace("old", "new")
    with pytest.raises(ValueError, match="must have the marks"):
        DOCS["with_block"](text, "settings", ["new"])
    with pytest.raises(ValueError, match="must have an Example"):
        DOCS["parts"]("Does something.")


def complete(weighbridge: Callable[..., Any], shell: str, words: str) -> str:
    """Ask as the shell does that has `words` typed, the cursor at their end."""
    environment = {
        "_WEIGHBRIDGE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_WORD_TO_COMPLETE": words.rpartition(" ")[2],
    }
    done = weighbridge(env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# The command calls itself `-c` here, not `weighbridge`; what the shells do is the same.
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str, weighbridge: Callable[..., Any]):
    found = complete(weighbridge, shell, "weighbridge db pr")
    assert re.search(r"\bprune\b", found)
    assert "backup" not in found
    assert re.search(r"--older-than\b", complete(weighbridge, shell, "weighbridge db prune --ol"))


def test_completion_can_be_looked_at(weighbridge: Callable[..., Any]):
    done = weighbridge("--show-completion", env={"SHELL": "/bin/bash"})
    assert "Traceback" not in done.stderr
    assert "weighbridge" in done.stdout + done.stderr or done.returncode == 1


EXAMPLE = (ROOT / "examples" / "weighbridge.toml").read_text(encoding="utf-8")


def test_the_example_settings_load_as_they_are_and_set_nothing():
    assert tomllib.loads(EXAMPLE) == {}


def test_the_example_settings_name_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"WEIGHBRIDGE_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE, flags=re.MULTILINE)
    Path("weighbridge.toml").write_text(text, encoding="utf-8")
    assert list(tomllib.loads(text)) == list(Settings.model_fields)
    settings = load_settings()
    origins = {settings.origin(name) for name in Settings.model_fields}
    assert origins == {str(tmp_path / "weighbridge.toml")}
    # Each has its reason written above it.
    for name in Settings.model_fields:
        assert re.search(rf"^# [A-Z].*\n(# .*\n)*# {name} = ", EXAMPLE, flags=re.MULTILINE)
