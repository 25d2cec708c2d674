"""What a stranger types first, with every way out of this machine closed."""

import importlib.resources
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]


def test_the_demo_shows_answers_and_what_to_type_next(
    weighbridge: Callable[..., subprocess.CompletedProcess[str]], embedded: Path, tmp_path: Path
):
    first = weighbridge("demo")
    assert first.returncode == 0, first.stderr
    header, *lines = first.stdout.splitlines()
    schema = importlib.resources.files("weighbridge.examples") / "schemas" / "triage.json"
    fields = list(json.loads(schema.read_text()))
    assert header.split() == ["id", "text", *fields]
    assert len(lines) == 8
    for line in lines:
        # The id, how the text begins, and for each field an answer with its probability.
        assert re.fullmatch(r"T-\d+  \S.*?" + r"  [a-z][a-z ]* [01]\.\d\d *" * len(fields), line)
        assert len(line) <= 80
    said = first.stderr.splitlines()
    documents = re.search(
        r"run 1: (\d+) documents, (\d+) scored, 0 reused, 0 rejected", first.stderr
    )
    assert documents is not None
    assert documents[1] == documents[2]
    assert int(documents[1]) >= 40
    assert f"kept in {tmp_path}/store.db" in said
    hints = [line.removeprefix("hint: weighbridge ") for line in said if line.startswith("hint: ")]
    assert [hint.split()[0] for hint in hints] == ["results", "query", "score"]

    # What it says to type works as it stands.
    query = re.search(r'query "(.*)"', first.stderr)
    assert query is not None
    assert len(weighbridge("query", query[1]).stdout.splitlines()) == 4
    score = re.search(r"--schema (\S+) --text '(.*)'", first.stderr)
    assert score is not None
    assert Path(score[1]) == Path(str(schema))

    second = weighbridge("demo")
    assert second.returncode == 0, second.stderr
    assert f"run 2: {documents[1]} documents, 0 scored, {documents[1]} reused" in second.stderr
    assert second.stdout == first.stdout
