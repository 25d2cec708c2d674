"""The page on checkpoints: its commands, run as they are written, print what it shows."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import command_environment
from tests.scorer.hub_server import Hub, running_hub
from tests.scorer.stand_ins import furnish

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
# The trained system text is not ours to ship: the stand-in brings another one.
STAND_IN_TEXT = "/models/nimble"
# Of these the page does not show what is said of the stand-in text: it is not the trained one.
REFUSED = {
    "weighbridge checkpoint verify ~/models/nimble",
    "weighbridge checkpoint info ~/models/nimble-old",
}


class Step(NamedTuple):
    """A command or a program of the page, and the lines that it shows of what is printed."""

    command: str
    shown: tuple[str, ...]
    python: bool = False


def steps_of(page: str) -> list[Step]:
    """Read the commands of a page in their order, each with the output below it."""
    steps: list[Step] = []
    for block in re.finditer(r"(?ms)^```python\n(.*?)^```|^((?:    [^\n]*\n|\n(?=    ))+)", page):
        if block[1]:
            steps.append(Step(block[1], (), python=True))
            continue
        for line in block[2].splitlines():
            text = line[4:]
            if text.startswith("$ "):
                steps.append(Step(text[2:], ()))
            elif text and steps and "$ " in block[2]:
                steps[-1] = steps[-1]._replace(shown=(*steps[-1].shown, text))
    return steps


def code_of(step: Step) -> int:
    """Return the code that a step ends with: 1 where the page shows an error."""
    if any(line.startswith("error:") for line in step.shown):
        return 1
    return int(step.command in REFUSED)


def lacking(shown: tuple[str, ...], printed: str) -> list[str]:
    """Name the shown lines that were not printed in this order; `…` stands for anything."""
    rest = iter(" ".join(line.split()) for line in printed.splitlines())
    patterns = [re.escape(" ".join(line.split())).replace("…", ".*") for line in shown]
    return [
        line
        for line, pattern in zip(shown, patterns, strict=True)
        if not any(re.fullmatch(pattern, printed) for printed in rest)
    ]


def test_the_reading_of_the_page():
    steps = steps_of("a\n\n    $ one\n    x …\n\n    $ two\n\n```python\nthree\n```\n\n    no\n")
    assert steps == [Step("one", ("x …",)), Step("two", ()), Step("three\n", (), python=True)]
    assert lacking(("x …", "a  b"), "x 1\na b\n") == []
    # Negative control: a line that was not printed is noticed.
    assert lacking(("x …", "y"), "x 1\nz y\n") == ["y"]
    assert lacking(("x …", "y"), "y\nx 1\n") == ["y"]
    assert code_of(Step("a", ("b", "error: c"))) == 1
    assert code_of(Step("a", ("b",))) == 0
    # Those that end otherwise than the page shows are on it.
    assert {step.command for step in steps_of(PAGE)} >= REFUSED


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.mark.mlx
@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_every_command_of_the_page(tiny, hub, prefect_server, tmp_path):
    furnish(tmp_path, hub, tiny)
    environment = {
        **command_environment(tmp_path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PREFECT_API_URL": prefect_server,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "COLUMNS": "200",
        # Both streams in the order in which a terminal shows them.
        "PYTHONUNBUFFERED": "1",
    }
    steps = steps_of(PAGE)
    assert len(steps) > 30
    wrong: list[str] = []
    for step in steps:
        command = step.command
        if STAND_IN_TEXT in command and re.search("info|score", command):
            command += "" if "nimble-old" in command else " --accept-prompt"
        words = [sys.executable, "-c", command] if step.python else ["bash", "-c", command]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        printed = done.stdout
        missing = lacking(step.shown, printed)
        if missing or done.returncode != code_of(step):
            wrong.append(f"$ {command}\nlacks {missing}, ended with {done.returncode}\n{printed}")
    assert wrong == []


def test_the_messages_of_the_table_are_those_that_are_raised():
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    phrases = [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row)]
    root = Path(__file__).parents[2]
    files = sorted([*root.glob("scorer/*.py"), *root.glob("tasks/*.py")])
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    # Texts go on in the next line of the source.
    source = re.sub(r'"\n\s*f?"', "", source)
    parts = [part.strip() for phrase in phrases for part in phrase.split("…")]
    assert len(rows) > 20
    assert [part for part in parts if part not in source] == []
