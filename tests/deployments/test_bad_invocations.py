"""Whatever is typed, the answer is `error:` and an exit code, never a traceback.

The invocations are made from the live command tree: each takes a call that works, or an
empty one, and puts one thing into it that cannot be right. A seed picks 50 of them.
"""

import json
import os
import platform
import random
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.db import Store, open_engine, sqlite_url
from weighbridge.deployments.cli import main
from weighbridge.deployments.cli.errors import ExitCode

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases"
DOCS = runpy.run_path(str(ROOT / "docs" / "generate.py"))
COMMANDS: dict[str, Any] = {name: command for name, command, _ in DOCS["commands"]()}
SEED = 20261130
GENERATED = 50
HUGE = "9" * 200_000
SCHEMA = '{"urgent": {"type": "boolean", "description": "Whether it is urgent."}}'
# None of these is a store, a schema, a source, a run, an id or a statement.
HOSTILE = {
    "empty": "",
    "blank": " ",
    "NUL": "a\0b",
    "huge": HUGE,
    "not UTF-8": "\udcff\udcfe",
    "missing file": "no/such/file",
    "folder": "folder",
    "unreadable": "loop",  # a link to itself: nobody can read it, not even root
    "negative": "-1",
    "control characters": "\x1b[31m\u202e",
}
# Where no file can be created.
NO_PLACE = {"NUL", "huge", "folder", "unreadable"}
# Where such a value is right all the same.
FINE = {
    ("db backup", "FILE"): HOSTILE.keys() - {"NUL", "huge", "missing file", "unreadable"},
    # There is no store yet, which is nothing wrong.
    ("doctor", "--db"): {"blank", "missing file", "negative", "control characters", "not UTF-8"},
    ("db path", "--db"): set(HOSTILE),
    # These create a store where there is none, and would then start to score.
    ("score", "--db"): HOSTILE.keys() - NO_PLACE,
    ("demo", "--db"): HOSTILE.keys() - NO_PLACE,
    # Where a server runs, a worker would start, and not end.
    ("worker start", "--db"): HOSTILE.keys() - NO_PLACE,
    # A worker would make the store.
    ("worker install", "--db"): HOSTILE.keys() - NO_PLACE - {"control characters", "not UTF-8"},
    # It is the place a new file would be.
    ("schema convert", "--output"): {"blank", "not UTF-8", "control characters", "negative"},
}
# What a call needs beside the thing that is wrong, so that the wrong thing is looked at.
NEEDS = {
    "score": ["two.jsonl", "--schema", "s.json"],
    "validate": ["two.jsonl", "--schema", "s.json"],
    "query": ["select 1"],
    "schema show": ["s.json"],
    "schema convert": ["s.json"],
    "show": ["1"],
    "trigger": ["adhoc"],
    "diff": ["1", "1"],
    "db prune": ["--older-than", "90d", "--dry-run"],
    "db forget": ["T-0", "--dry-run"],
}


def bad_invocations() -> Iterator[tuple[str, list[str]]]:
    """Yield a label and a command line for everything wrong that can be made of the tree."""
    for name, command in COMMANDS.items():
        call = [*name.split(), *NEEDS.get(name, [])]
        yield f"{name}: unknown option", [*call, "--no-such-option"]
        yield f"{name}: too many arguments", [*call, *["surplus"] * 5]
        if any(each.required for each in command.params):
            yield f"{name}: what is required is missing", name.split()
        for each in command.params:
            if each.param_type_name == "option" and not each.is_flag:
                yield from bad_options(name, each, call)
        yield from bad_arguments(name, command)
    yield "no such command", ["no-such-command"]
    yield "a command that is not UTF-8", ["\udcff"]
    yield "an empty command", [""]


def bad_options(name: str, option: Any, call: list[str]) -> Iterator[tuple[str, list[str]]]:
    spelt = option.opts[-1]
    yield f"{name}: {spelt} without a value", [*call, spelt]
    kinds: set[str] = set()
    if option.type_descriptor.annotation in {int, float}:
        kinds = {"empty", "blank", "NUL", "not UTF-8", "missing file", "control characters"}
    elif spelt == "--db" or (spelt == "--schema" and option.required):
        # An empty setting counts as none.
        kinds = HOSTILE.keys() - FINE.get((name, spelt), set()) - {"empty"}
    for kind in sorted(kinds):
        yield f"{name}: {spelt} {kind}", [*call, spelt, HOSTILE[kind]]


def bad_arguments(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    if len(arguments) == 1:
        (argument,) = arguments
        rest = NEEDS.get(name, [])[1:]
        for kind in sorted(HOSTILE.keys() - FINE.get((name, argument.metavar), set())):
            line = [*name.split(), *rest, "--", HOSTILE[kind]]
            yield f"{name}: {argument.metavar} {kind}", line


ALL = dict(bad_invocations())
CHOSEN = random.Random(SEED).sample(sorted(ALL), GENERATED)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WEIGHBRIDGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", sqlite_url(tmp_path / "store.db"))
    monkeypatch.setattr("sys.stdin", None)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("s.json").write_text(SCHEMA)
    Path("two.jsonl").write_text('{"id": "a", "text": "It broke."}\n{"id": "b", "text": "Hi!"}\n')
    make = runpy.run_path(str(ROOT / "tests" / "db" / "conftest.py"))["Builders"]()
    engine = open_engine(sqlite_url(tmp_path / "store.db"))
    store = Store(engine)
    run_id = store.begin_run(make.start(host=platform.node())).run_id
    store.record_batch(run_id, make.batch(make.scored(0), make.rejected(1)))
    store.finish_run(run_id, "completed", documents=2)
    engine.dispose()
    return tmp_path


def require_plain_error(code: int, out: str, err: str) -> None:
    assert code in {ExitCode.FAILED, ExitCode.USAGE, ExitCode.REJECTED}
    assert "Traceback" not in out + err
    assert err.startswith("error: ") or "\nerror: " in err
    # Nor by the last stop before the terminal, which knows nothing to say.
    assert "error: unexpected" not in err
    assert "\x1b" not in out + err
    # What was typed is shortened, however long it was.
    assert max(map(len, err.splitlines())) < 2000


def test_the_tree_gives_enough_to_choose_from():
    # Every command is among what can be chosen, and most kinds of wrong things are chosen.
    assert len(ALL) > 4 * GENERATED
    assert all(any(label.startswith(f"{name}: ") for label in ALL) for name in COMMANDS)
    kinds = {label.split(": ")[-1].rpartition(" ")[2] for label in CHOSEN}
    assert len(kinds) > 8


@pytest.mark.parametrize("label", CHOSEN)
def test_generated(label: str, capsys: pytest.CaptureFixture[str]):
    code = main(ALL[label])
    out, err = capsys.readouterr()
    require_plain_error(code, out, err)


@pytest.mark.parametrize("command", ["score", "demo"])
@pytest.mark.parametrize("kind", sorted(NO_PLACE))
def test_a_store_that_cannot_be_is_told_first(
    command: str, kind: str, capsys: pytest.CaptureFixture[str]
):
    # No checkpoint is there, and none is fetched: the place is looked at before.
    code = main(ALL[f"{command}: --db {kind}"])
    out, err = capsys.readouterr()
    require_plain_error(code, out, err)
    assert err.startswith("error: a store must be ")


def test_a_planted_traceback_is_noticed():
    # Negative control: what these tests look for is found when it is there.
    for code, err in (
        (0, "error: x"),
        (1, "Traceback (most recent call last):"),
        (1, "error: unexpected KeyError: 'x'"),
        (1, "something"),
        (1, f"error: {HUGE}"),
    ):
        with pytest.raises(AssertionError):
            require_plain_error(code, "", err)


# What only a real process can show: bytes in argv, and a closed or missing stdin.
@pytest.mark.parametrize(
    "arguments",
    [
        [b"results", b"\xff\xfe"],
        [b"query", b"select '\xff"],
        [b"show", b"\xff"],
        [b"runs", b"--db", b"\xff/store.db"],
        [b"schema", b"show", b"\xff.json"],
        [b"db", b"prune", b"--older-than", b"0d"],  # it would ask, and there is no terminal
        [b"db", b"forget", b"T-0"],
    ],
)
def test_in_a_process_of_its_own(arguments: list[bytes], weighbridge: Callable[..., Any]):
    done = weighbridge(*arguments)
    require_plain_error(done.returncode, done.stdout, done.stderr)


INVALID = json.loads((CASES / "schemas_invalid.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", INVALID, ids=[case["name"] for case in INVALID])
@pytest.mark.parametrize("command", [["schema", "show"], ["schema", "convert"]])
def test_schemas_that_are_no_schemas(
    case: dict[str, Any], command: list[str], capsys: pytest.CaptureFixture[str]
):
    Path("case.json").write_text(case["text"], encoding="utf-8", errors="surrogatepass")
    code = main([*command, "case.json"])
    out, err = capsys.readouterr()
    require_plain_error(code, out, err)
    assert out == ""


def test_questions_of_system_one(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "show", str(CASES / "questions_wire.json"), "--json"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.mlx
def test_documents_that_are_hostile(embedded: Path, capsys: pytest.CaptureFixture[str]):
    hostile = str(CASES / "documents_hostile.jsonl")
    model = ["--checkpoint", str(embedded)]
    assert main(["validate", hostile, "--schema", "s.json", *model]) == ExitCode.REJECTED
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
