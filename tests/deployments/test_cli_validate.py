"""validate: what score would reject, what a schema costs, and exactly what the model is told."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.deployments.cli import main
from weighbridge.scorer import ParallelScorer, Schema

CASES = Path(__file__).parents[1] / "cases"
HOSTILE = str(CASES / "documents_hostile.jsonl")
SCHEMA = json.dumps(
    {
        "mood": {"type": "enum", "choices": ["bad", "good"], "description": "The feeling."},
        "login": {
            "type": "enum",
            "choices": ["feature request", "feature", "bug"],
            "description": "What it is about.",
        },
    }
)
TWO = '{"id": "a", "text": "It broke again."}\n{"id": "b", "text": "Thank you!"}\n'
COST_KEYS = [
    *("schema", "sha256", "checkpoint", "layout", "encoding", "permutations"),
    *("max_input_tokens", "resident_tokens", "rows_per_document", "fields"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(embedded))
    Path("two.jsonl").write_text(TWO)
    Path("mood.json").write_text(SCHEMA)
    return tmp_path


def found(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["validate", "--schema", "mood.json", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


# --- the schema alone ---


def test_a_schema_alone_tells_what_it_costs(embedded: Path, capsys: pytest.CaptureFixture[str]):
    costs = found([], capsys)
    assert list(costs) == [*COST_KEYS, "documents", "model_loaded"]
    assert costs["documents"] is None
    plan = ParallelScorer(embedded).plan(json.loads(SCHEMA))
    assert costs["resident_tokens"] == len(plan.resident)
    # By hand: one question whose two words differ at once; one whose words begin alike, and
    # branch at the first token and behind "feature".
    assert [field["rows"] for field in costs["fields"]] == [1, 2]
    assert costs["rows_per_document"] == len(plan.rows("x").rows) == 3
    for field, cost in zip(plan.schema.fields, costs["fields"], strict=True):
        # All of a prompt that does not hold "x" or its like: what stands in front, and behind.
        whole = plan.parts("hello", field)
        assert cost["suffix_tokens"] == len(whole.suffix.tokens)
    assert not Path("store.db").exists()


def test_orders_of_the_choices_cost_rows(capsys: pytest.CaptureFixture[str]):
    # Two orders of either question: twice the rows.
    assert found(["--permutations", "2"], capsys)["rows_per_document"] == 6
    costs = found(["--encoding", "codes", "--layout", "context-first"], capsys)
    # A code is one token, so each field is one row.
    assert costs["rows_per_document"] == 2
    assert (costs["encoding"], costs["layout"]) == ("codes", "context-first")


def test_the_costs_fit_a_terminal(capsys: pytest.CaptureFixture[str]):
    assert main(["validate", "--schema", "mood.json"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["schema", "checkpoint", "prompt"]
    assert lines[4].split() == ["field", "kind", "choices", "suffix", "tokens", "rows"]
    assert lines[5].split()[:3] == ["mood", "enum", "2"]
    assert max(map(len, lines)) <= 80
    assert err == ""


# --- documents ---


def test_documents_are_counted(embedded: Path, capsys: pytest.CaptureFixture[str]):
    counted = found(["two.jsonl"], capsys)
    assert list(counted) == [*COST_KEYS, "documents", "model_loaded", "rejections"]
    plan = ParallelScorer(embedded).plan(json.loads(SCHEMA))
    short, long = sorted(plan.rows(text).input_tokens for text in ("It broke again.", "Thank you!"))
    # Of two documents the lower one is the median, as at least half have no more tokens.
    assert counted["documents"] == {
        "documents": 2,
        "accepted": 2,
        "rejected": 0,
        "rejected_by_code": {},
        "tokens": {"median": short, "p95": long, "max": long},
        "over_limit": 0,
        "repeated_ids": {"count": 0, "first": [], "all_compared": True},
    }
    assert counted["rejections"] == []


def test_the_hostile_cases(capsys: pytest.CaptureFixture[str]):
    expected = {
        case["line"]: case["note"].split(":")[0]
        for case in json.loads((CASES / "documents_hostile_expected.json").read_text())
        if case["status"] == "rejected"
    }
    counted = found([HOSTILE], capsys, 3)
    assert {each["line"]: each["code"] for each in counted["rejections"]} == expected
    assert counted["documents"]["rejected"] == len(expected)
    assert sum(counted["documents"]["rejected_by_code"].values()) == len(expected)
    assert counted["documents"]["over_limit"] == 1
    # A longest prompt that is over the limit says how far the limit is from enough.
    assert counted["documents"]["tokens"]["max"] > counted["max_input_tokens"]


@pytest.mark.mlx
@pytest.mark.prefect
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--max-input-tokens", "150", "--permutations", "2"]])
def test_score_rejects_the_very_same(
    more: list[str], prefect_server: str, capsys: pytest.CaptureFixture[str]
):
    foreseen = found([HOSTILE, *more], capsys, 3)["rejections"]
    assert main(["score", HOSTILE, "--schema", "mood.json", *more]) == 3
    capsys.readouterr()
    assert main(["rejected", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == foreseen


def test_no_weights_are_loaded(weighbridge: Callable[..., subprocess.CompletedProcess[str]]):
    # In a process of its own: in this one another test may have loaded them.
    done = weighbridge("validate", HOSTILE, "--schema", "mood.json", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["model_loaded"] is False
    code = (
        "import sys; from weighbridge.deployments.cli import main\n"
        "code = main(['validate', 'two.jsonl', '--schema', 'mood.json'])\n"
        "print(code, 'prefect' in sys.modules)"
    )
    quiet = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Prefect takes seconds to import, and no run is started.
    assert quiet.stdout.splitlines()[-1] == "0 False"


def test_many_rejections_are_paged_on_the_terminal_only(capsys: pytest.CaptureFixture[str]):
    Path("bad.jsonl").write_text('{"text": ""}\n' * 23 + '{"id": "\\u001b[31m", "text": ""}\n')
    assert main(["validate", "bad.jsonl", "--schema", "mood.json"]) == 3
    out, err = capsys.readouterr()
    rows = [line for line in out.splitlines() if "document.empty  " in line and "must" in line]
    assert len(rows) == 5
    assert out.splitlines()[-1] == "… and 19 more document.empty"
    assert err == "hint: --json lists them all\n"
    everything = found(["bad.jsonl"], capsys, 3)["rejections"]
    assert [each["position"] for each in everything] == list(range(24))
    assert everything[-1]["external_id"] == "\x1b[31m"
    # Nothing makes a prompt, so there is no length to tell.
    assert "tokens  " not in out.split("\n\n")[2]


def test_a_file_that_is_not_utf8_is_told_once(capsys: pytest.CaptureFixture[str]):
    rows = "".join(f"T-{n};Die Übergabe für Müller\n" for n in range(59))
    Path("tickets.csv").write_bytes(b"id;text\n;x\n1;;2\n2;plain\n" + rows.encode("cp1252"))
    assert main(["validate", "tickets.csv", "--schema", "mood.json"]) == 3
    out, err = capsys.readouterr()
    # A code that is rare is not pushed out by one that is not.
    assert out.count("document.bad_csv  ") == 2
    assert out.splitlines()[-1] == "… and 54 more document.encoding"
    assert err.splitlines() == [
        "hint: --json lists them all",
        "hint: 59 of 62 records are not UTF-8; the file looks like Windows-1252: "
        "iconv -f CP1252 -t UTF-8 tickets.csv > tickets-utf8.csv",
    ]


def test_ids_that_come_again_are_named(capsys: pytest.CaptureFixture[str]):
    ids = ["T-1", "T-6", "T-8", "T-6", None, None, "T-8", "T-6"]
    lines = [json.dumps({"id": each, "text": "Hello."}) for each in ids]
    Path("again.jsonl").write_text("\n".join(lines))
    assert main(["validate", "again.jsonl", "--schema", "mood.json"]) == 0
    assert capsys.readouterr().err == "2 ids come more than once: T-6, T-8\n"
    told = found(["again.jsonl"], capsys)["documents"]["repeated_ids"]
    assert told == {"count": 2, "first": ["T-6", "T-8"], "all_compared": True}


def test_one_text_and_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert found(["--text", "It broke."], capsys)["documents"]["accepted"] == 1
    assert found(["--text", " "], capsys, 3)["rejections"][0]["code"] == "document.empty"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TWO.encode())))
    assert found(["-"], capsys)["documents"]["documents"] == 2


def test_documents_are_read_as_score_reads_them(capsys: pytest.CaptureFixture[str]):
    Path("mails.csv").write_text("key,subject,body\n1,Hello,It broke\n2,Again,Thanks\n")
    options = ["mails.csv", "--text-field", "{subject}: {body}", "--id-field", "key"]
    prompt = found([*options, "--show-prompt", "1", "--field", "mood"], capsys)
    assert prompt["external_id"] == "2"
    assert "Again: Thanks" in prompt["prompts"][0]["text"]
    assert found([*options, "--limit", "1"], capsys)["documents"]["documents"] == 1
    Path("data").write_text(TWO)
    assert found(["data", "--format", "jsonl"], capsys)["documents"]["documents"] == 2


# --- one prompt ---


@pytest.mark.parametrize("encoding", ["labels", "codes"])
def test_a_prompt_is_exactly_what_is_scored(
    embedded: Path, encoding: str, capsys: pytest.CaptureFixture[str]
):
    shown = found([HOSTILE, "--encoding", encoding, "--show-prompt", "2"], capsys)
    text = json.loads(Path(HOSTILE).read_bytes().split(b"\n")[2])["text"]
    plan = ParallelScorer(embedded, encoding=encoding).plan(json.loads(SCHEMA))
    rows = iter(plan.rows(text).rows)
    for prompt, field in zip(shown["prompts"], plan.schema.fields, strict=True):
        assert prompt["text"] == plan.prompt(text, field)
        parts = prompt["parts"]
        assert [part["part"] for part in parts] == ["resident prefix", "document", "suffix"]
        assert "".join(part["text"] for part in parts) == prompt["text"]
        assert [token for part in parts for token in part["token_ids"]] == prompt["token_ids"]
        for said in prompt["rows"]:
            row = next(rows)
            path = [token["token"] for token in said["path"]]
            assert tuple(prompt["token_ids"] + path) == row.tokens
            assert tuple(token["token"] for token in said["candidates"]) == row.candidates
        # Each choice is told by the tokens that lead to it.
        assert [choice["choice"] for choice in prompt["choices"]] == list(field.keys)
        assert len({str(choice["way"]) for choice in prompt["choices"]}) == len(field.keys)
    assert list(rows) == []
    said = [choice["said_as"] for choice in shown["prompts"][0]["choices"]]
    assert said == (["bad", "good"] if encoding == "labels" else ["A", "B"])


def test_a_prompt_on_the_terminal(capsys: pytest.CaptureFixture[str]):
    text = "one\x1b[31m\ntwo \u202e"
    assert main(["validate", "--schema", "mood.json", "--text", text, "--show-prompt", "0"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "document at position 0, line 1 (the first position is 0)"
    # Escaped, and broken where the prompt is; the second field does not say it again.
    assert lines.count("  |  one\\x1b[31m\\n") == 1
    assert sum(line.startswith("  | two \\u202e") for line in lines) == 1
    assert sum(line.endswith("(as above)") for line in lines) == 2
    assert sum(line.startswith("suffix, ") for line in lines) == 2
    assert "answers, 2 rows: the tokens whose logits are read" in lines
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", out)
    assert err == ""


def test_a_rejected_document_has_no_prompt(capsys: pytest.CaptureFixture[str]):
    shown = found([HOSTILE, "--show-prompt", "5"], capsys, 3)
    assert shown["rejection"]["code"] == "document.empty"
    assert shown["prompts"] == []
    assert main(["validate", HOSTILE, "--schema", "mood.json", "--show-prompt", "5"]) == 3
    assert capsys.readouterr().err.startswith("rejected: document.empty: ")


def test_orders_are_told_beside_a_prompt(capsys: pytest.CaptureFixture[str]):
    options = ["--schema", "mood.json", "--show-prompt", "1", "--permutations", "3"]
    assert main(["validate", "two.jsonl", *options]) == 0
    assert capsys.readouterr().err == "hint: this is the first of 3 orders of the choices\n"


# --- other sources of questions, and mistakes ---


def test_a_model_is_a_schema(capsys: pytest.CaptureFixture[str]):
    Path("wb_validated.py").write_text(
        "from pydantic import BaseModel, Field\n"
        "class Mood(BaseModel):\n"
        "    good: bool = Field(description='Is it good?')\n"
    )
    assert main(["validate", "two.jsonl", "--schema", "wb_validated:Mood", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert (counted["schema"], counted["fields"][0]["kind"]) == ("Mood", "boolean")
    native = Schema.parse('{"good": {"type": "boolean", "description": "Is it good?"}}')
    assert counted["sha256"] == native.sha256
    sys.modules.pop("wb_validated", None)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["two.jsonl", "--text", "x"], 2, "not both"),
        (["--show-prompt", "0"], 2, "--show-prompt needs documents"),
        (["two.jsonl", "--field", "mood"], 2, "--field belongs to --show-prompt"),
        (["--query", "SELECT 1"], 2, "--format and --query are for documents"),
        (["two.jsonl", "--show-prompt", "-1"], 2, "--show-prompt"),
        (["two.jsonl", "--show-prompt", "2"], 1, "got 2, and there are 2 documents"),
        (["two.jsonl", "--show-prompt", "0", "--field", "moood"], 1, 'did you mean "mood"?'),
        (["absent.jsonl"], 1, "absent.jsonl"),
        (["two.jsonl", "--text-field", "body"], 3, ""),
        (["--checkpoint", "absent"], 1, "absent"),
        (["--max-input-tokens", "1000000"], 1, "max_input_tokens must be at most"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["validate", "--schema", "mood.json", *arguments]) == code
    err = capsys.readouterr().err
    assert words in " ".join(err.split())
    assert "Traceback" not in err
