"""Whatever goes wrong ends as `error:` and `hint:` lines and an exit code, never a traceback."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from weighbridge.db.errors import StoreOutdated
from weighbridge.deployments.cli import main
from weighbridge.deployments.cli.errors import ExitCode, run_app
from weighbridge.deployments.errors import CommandError
from weighbridge.scorer.errors import SchemaError
from weighbridge.tasks.errors import SettingsError, SourceError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def run(body: Callable[[], object]) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("go")(body)
    app.command("other")(lambda: None)
    return run_app(app, ["go"])


def failing(error: BaseException) -> Callable[[], object]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    "error",
    [
        SchemaError("a must hold", hint="do b"),
        StoreOutdated("a must hold", hint="do b"),
        SettingsError("a must hold", hint="do b"),
        SourceError("a must hold", hint="do b"),
        CommandError("a must hold", hint="do b"),
    ],
)
def test_known_errors_are_two_lines(error: Exception, capsys: pytest.CaptureFixture[str]):
    assert run(failing(error)) == 1
    assert capsys.readouterr() == ("", "error: a must hold\nhint: do b\n")


def test_an_error_without_a_hint_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert run(failing(SourceError("bad \x1b name"))) == 1
    assert capsys.readouterr().err == "error: bad \\x1b name\n"


def test_an_unexpected_error_keeps_its_traceback_in_a_private_file(
    cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(failing(KeyError("slipped\x1b"))) == 1
    out, err = capsys.readouterr()
    (log,) = (cache / "logs").iterdir()
    first, second = err.splitlines()
    assert out == ""
    assert first == "error: unexpected KeyError: 'slipped\\x1b'"
    assert second == f"hint: the traceback is in {log}; please report it"
    assert "Traceback (most recent call last)" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_without_a_cache_the_traceback_goes_to_the_temporary_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr("tempfile.tempdir", str(cache.parent))
    assert run(failing(RuntimeError("slipped"))) == 1
    assert str(cache.parent / "weighbridge-error-") in capsys.readouterr().err


def test_exit_codes_pass_through(capsys: pytest.CaptureFixture[str]):
    assert run(lambda: None) == 0
    assert run(failing(typer.Exit(ExitCode.REJECTED))) == 3
    assert run(failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["nothing"], "No such command 'nothing'", "weighbridge --help"),
        (["results", "x"], "RUN", "weighbridge results --help"),
        (["results", "--wrong"], "--wrong", "weighbridge results --help"),
        (["query"], "SQL", "weighbridge query --help"),
        (["db", "nothing"], "nothing", "weighbridge db --help"),
        (["runs", "--limit", "0"], "--limit", "weighbridge runs --help"),
    ],
)
def test_misuse_ends_with_2_and_names_the_help(
    arguments: list[str], words: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()[0], err.splitlines()[-1]
    assert first.startswith("error: ")
    assert words in first
    assert last == f"hint: {hint}"


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        *(
            ([name], [f"weighbridge db {name} --help"])
            for name in ("prune", "backup", "forget", "vacuum", "upgrade", "path")
        ),
        (["convert", "a.json", "--to", "nimble"], ["weighbridge schema convert --help"]),
        (["info"], ["weighbridge checkpoint info --help"]),
        (
            ["validate", "tickets.csv", "triage.json"],
            ["--schema triage.json", "weighbridge validate --help"],
        ),
        (
            ["score", "--limit", "3", "a.csv", "--json", "triage.json"],
            ["--schema triage.json", "weighbridge score --help"],
        ),
        # Neither the documents nor a value of an option is taken for a schema.
        (["score", "a.json"], ["weighbridge score --help"]),
        (["score", "a.csv", "--output", "o.json"], ["weighbridge score --help"]),
        (["score", "a.csv", "--schema", "s.json", "t.json"], ["weighbridge score --help"]),
        *(
            (
                [command, "a.csv", "--schema", "s.json", *option],
                [
                    "--encoding is what the model says, labels or codes, not how a file is written",
                    f"files must be UTF-8: iconv -f {name} -t UTF-8 FILE > utf8-FILE",
                    f"weighbridge {command} --help",
                ],
            )
            for command, option, name in (
                ("score", ["--encoding", "cp1252"], "cp1252"),
                ("validate", ["--encoding=latin-1"], "latin-1"),
                ("validate", ["--encoding", "$(x)"], "FROM"),
            )
        ),
    ],
)
def test_what_was_probably_meant_is_told(
    arguments: list[str], hints: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    first, *said = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert said == [f"hint: {hint}" for hint in hints]


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "Usage: weighbridge" in out + err
    assert "error" not in out + err


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("weighbridge 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "-h"] for name in ("runs", "results", "rejected", "query", "doctor")),
        *(["checkpoint", name, "-h"] for name in ("info", "demo")),
        *(["db", name, "-h"] for name in ("path", "upgrade")),
    ],
)
def test_every_help_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "First steps" in out if arguments == ["--help"] else "Example: " in out


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from weighbridge.deployments.cli import main; main(['--help']);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"prefect", "mlx", "sqlalchemy", "sqlmodel", "pydantic_settings", "numpy", "alembic"}
    assert heavy & set(done.stderr.split()) == set()


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path: Path):
    code = (
        "import sys, typer; from weighbridge.deployments.cli.errors import run_app\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def many():\n"
        "    for number in range(100_000): typer.echo(f'line {number}')\n"
        "sys.exit(run_app(app, []))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=300) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_interrupt_from_outside_ends_with_130():
    code = (
        "import signal, sys, time, typer\n"
        "from weighbridge.deployments.cli.errors import run_app\n"
        # A test runner started in the background hands down an ignored SIGINT.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def wait():\n"
        "    typer.echo('ready'); sys.stdout.flush(); time.sleep(600)\n"
        "sys.exit(run_app(app, []))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")


def test_a_narrow_encoding_escapes_instead_of_failing():
    code = (
        "import sys, typer; from weighbridge.deployments.cli.errors import run_app\n"
        "app = typer.Typer()\n"
        "app.command()(lambda: typer.echo('naïve 日本'))\n"
        "sys.exit(run_app(app, []))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "iso-8859-1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=True
    )
    assert done.stdout == b"na\xefve \\u65e5\\u672c\n"
