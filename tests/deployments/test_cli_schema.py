"""schema show and schema convert: every source of questions, every form, nothing in silence."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.deployments.cli import main
from weighbridge.scorer.schema import Schema

CASES = Path(__file__).parents[1] / "cases"
WIRE = str(CASES / "questions_wire.json")
SCHEMA: dict[str, Any] = {
    "urgent": {"type": "boolean", "description": "Does it need an answer today?"},
    "team": {
        "type": "enum",
        "description": "Who should answer?",
        "choices": ["billing", "other"],
        "choice_descriptions": {"billing": "charges and refunds"},
        "labels": {"other": "rest"},
    },
}
MODEL = """
from typing import Literal
from pydantic import BaseModel, Field
print("loading")

class Ticket(BaseModel):
    urgent: bool = Field(description="Does it need an answer today?")
    team: Literal["billing", "other"] = Field(
        description="Who should answer?",
        json_schema_extra={
            "choice_descriptions": {"billing": "charges and refunds"},
            "labels": {"other": "rest"},
        },
    )

class Bad(BaseModel):
    when: float = Field(description="x")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    Path("triage.json").write_text(json.dumps(SCHEMA))
    Path("wb_models.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("wb_models", None)


def test_a_schema_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "show", "triage.json"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "schema  triage",
        f"sha256  {Schema.parse(json.dumps(SCHEMA)).sha256}",
        "",
        "urgent  (boolean)",
        "  Does it need an answer today?",
        "  choice",
        "  false",
        "  true",
        "",
        "team  (enum)",
        "  Who should answer?",
        "  choice   said as  meaning",
        "  billing           charges and refunds",
        "  other    rest",
    ]
    assert err == ""


@pytest.mark.parametrize("source", ["triage.json", "wb_models:Ticket", json.dumps(SCHEMA)])
def test_every_source_shows_the_same_questions(source: str, capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "show", source, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The names people know them by; the questions and their hash are the same.
    assert found.pop("name") in {"triage", "Ticket", None}
    assert found == {
        "sha256": Schema.parse(json.dumps(SCHEMA)).sha256,
        "fields": [
            {
                "field": "urgent",
                "kind": "boolean",
                "description": "Does it need an answer today?",
                "choices": [
                    {"choice": False, "description": None, "label": None},
                    {"choice": True, "description": None, "label": None},
                ],
            },
            {
                "field": "team",
                "kind": "enum",
                "description": "Who should answer?",
                "choices": [
                    {"choice": "billing", "description": "charges and refunds", "label": None},
                    {"choice": "other", "description": None, "label": "rest"},
                ],
            },
        ],
    }


def test_a_question_file_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "show", WIRE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "schema  questions_wire"
    kinds = [line for line in lines if line.endswith(")") and not line.startswith(" ")]
    assert kinds == [
        "wants refund?  (boolean)",
        "team  (enum)",
        "urgency  (score, from low to high)",
    ]


@pytest.mark.parametrize("form", ["native", "systemone"])
def test_a_question_file_goes_round(form: str, capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "convert", WIRE, "--to", form, "--output", "made.json"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "written to made.json\n")
    assert Schema.load("made.json").sha256 == Schema.load(WIRE).sha256
    # And back from there into the other form.
    other = "native" if form == "systemone" else "systemone"
    assert main(["schema", "convert", "made.json", "--to", other]) == 0
    assert Schema.parse(capsys.readouterr().out).sha256 == Schema.load(WIRE).sha256


def test_a_model_is_written_out(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "convert", "wb_models:Ticket"]) == 0
    out, err = capsys.readouterr()
    # A boolean's choices are written out too; the rest is as it was.
    native = {**SCHEMA, "urgent": {**SCHEMA["urgent"], "choices": [False, True]}}
    assert json.loads(out) == native
    assert err == "loading\n"


def test_what_a_form_lacks_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "convert", "triage.json", "--to", "systemone"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == (
        'error: a System One question file cannot hold: field "team": labels'
    )
    assert main(["schema", "convert", WIRE, "--to", "nimble", "--output", "made.json"]) == 1
    assert 'a Nimble schema cannot hold: field "urgency": a score' in capsys.readouterr().err
    assert not Path("made.json").exists()


def test_a_json_schema_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "convert", "triage.json", "--to", "json-schema"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["properties"]["urgent"]["type"] == "boolean"
    assert err == 'hint: field "team": labels are words of the prompt and no answers\n'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "absent.json"], ["absent.json", "readable"]),
        (["show", "wb_models:Bad"], ['field "when"', "float", "Literal of texts"]),
        (["show", "wb_models:Nothing"], ["nothing of that name"]),
        (["show", "wb_absent:Ticket"], ["wb_absent", "importable", "current folder"]),
        (["convert", "triage.json", "--output", "no/such/folder.json"], ["output", "existing"]),
        (["convert", "triage.json", "--output", "."], ["output", "directory"]),
    ],
)
def test_what_goes_wrong_is_told(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["schema", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [word for word in words if word not in err] == []
    assert "Traceback" not in err


def test_an_unknown_form_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "convert", "triage.json", "--to", "yaml"]) == 2
    assert "'yaml' is not one of" in capsys.readouterr().err


def test_texts_of_a_schema_cannot_rewrite_the_screen(capsys: pytest.CaptureFixture[str]):
    text = json.dumps(
        {"a": {"type": "enum", "description": "x\u202ey", "choices": ["p\u202eq", "r"]}}
    )
    for arguments in (["show", text], ["show", text, "--json"], ["convert", text]):
        assert main(["schema", *arguments]) == 0
        out = capsys.readouterr().out
        # Escaped on the terminal; the same value in JSON.
        assert "\u202e" not in out
        assert "\\u202e" in out


def test_the_example_model_asks_what_the_example_file_asks(capsys: pytest.CaptureFixture[str]):
    examples = Path(__file__).parents[2] / "examples"
    source = "weighbridge.examples.ticket_model:Ticket"
    assert main(["schema", "show", source, "--json"]) == 0
    file = Schema.load(examples / "schemas" / "triage.json")
    assert json.loads(capsys.readouterr().out)["sha256"] == file.sha256
