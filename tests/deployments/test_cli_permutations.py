"""The option that asks in several orders of the choices, and what it tells."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weighbridge.deployments.cli import main
from weighbridge.deployments.report import print_closing

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

SCHEMA = json.dumps(
    {
        "sentiment": {
            "type": "enum",
            "choices": ["negative", "positive"],
            "description": "The feeling of the text.",
        }
    }
)
THREE = ["It broke again.", "Thank you!", "The parcel came on Monday."]
LINE = re.compile(
    r"flip rate (\d\.\d\d): of 2 orders of choices, this share disagreed with the answer"
)


@pytest.fixture(autouse=True)
def store(
    tmp_path: Path, embedded: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(embedded))
    Path("three.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in THREE))
    return tmp_path / "store.db"


def test_the_flip_rate_is_told_at_the_end(capsys: pytest.CaptureFixture[str]):
    command = ["score", "three.jsonl", "--schema", SCHEMA, "--permutations", "2"]
    assert main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    (told,) = [found for line in lines if (found := LINE.fullmatch(line))]
    # Again, as JSON: nothing is scored, and the figure is the same.
    assert main([*command, "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["scored"], outcome["reused"], outcome["permutations"]) == (0, 3, 2)
    assert f"{outcome['flip_rate']:.2f}" == told[1]
    sql = "select field, count(*) as answers, permutations from stability group by run_id"
    assert main(["query", sql, "--json"]) == 0
    row = {"field": "sentiment", "answers": 3, "permutations": 2}
    assert json.loads(capsys.readouterr().out) == [row, row]
    assert main(["runs", "--json"]) == 0
    assert [run["permutations"] for run in json.loads(capsys.readouterr().out)] == [2, 2]


def test_one_order_says_nothing_of_it_and_reuses_nothing(capsys: pytest.CaptureFixture[str]):
    command = ["score", "three.jsonl", "--schema", SCHEMA, "--limit", "1"]
    assert main([*command, "--permutations", "2"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "run 2: 1 document, 1 scored, 0 reused" in err
    assert "flip rate" not in err


@pytest.mark.parametrize("orders", ["0", "33", "-1", "1.5", "many", ""])
def test_what_is_no_number_of_orders_is_a_usage_error(
    orders: str, store: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["score", "three.jsonl", "--schema", SCHEMA, f"--permutations={orders}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "--permutations" in err
    assert not store.exists()


def test_the_line_fits_a_terminal(capsys: pytest.CaptureFixture[str]):
    outcome: dict[str, Any] = dict.fromkeys(("run_id", "documents", "scored", "reused"), 1)
    outcome |= dict.fromkeys(("rejected", "seconds", "documents_per_second"), 0)
    outcome |= {"temperature": 1.0, "temperature_kind": "default", "database": "store.db"}
    print_closing({**outcome, "permutations": 32, "flip_rate": 0.125})
    told = capsys.readouterr().err.splitlines()
    # At its longest.
    assert told[2] == (
        "flip rate 0.12: of 32 orders of choices, this share disagreed with the answer"
    )
    assert len(told[2]) <= 80
