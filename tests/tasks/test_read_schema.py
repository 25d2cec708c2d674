"""Where schemas come from: files, JSON, and Pydantic models, the only ones that run code."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.scorer.errors import SchemaError
from weighbridge.scorer.schema import Schema
from weighbridge.tasks import read_schema
from weighbridge.tasks.questions import names_model

MODEL = """
from typing import Literal
from pydantic import BaseModel, Field

class Ticket(BaseModel):
    urgent: bool = Field(description="Does it need an answer today?")

    class Part(BaseModel):
        team: Literal["a", "b"] = Field(description="Who?")

class Bad(BaseModel):
    n: int = Field(description="x")

thing = 3
"""
SCHEMA = json.dumps({"urgent": {"type": "boolean", "description": "Does it need an answer today?"}})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module into the current folder, and forget it afterwards."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, source: str) -> None:
        path = Path(name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        # Set and taken back: whatever the test imports is gone after it.
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        del sys.modules[name]

    return write


def test_a_model_in_the_current_folder(module: Callable[[str, str], None]):
    module("wb_tickets", MODEL)
    before = list(sys.path)
    made = read_schema("wb_tickets:Ticket")
    assert (made.name, made.sha256) == ("Ticket", Schema.parse(SCHEMA).sha256)
    assert read_schema("wb_tickets:Ticket.Part").field("team").choices == ("a", "b")
    # Nothing imported later is looked for in a folder that anybody may have written to.
    assert sys.path == before


def test_a_model_in_a_package(module: Callable[[str, str], None]):
    module("wb_package.questions", MODEL)
    assert read_schema("wb_package.questions:Ticket").name == "Ticket"
    sys.modules.pop("wb_package", None)


@pytest.mark.parametrize("schema", ["wb_tickets:Ticket", SCHEMA])
def test_a_name_given_comes_first(module: Callable[[str, str], None], schema: str):
    module("wb_tickets", MODEL)
    assert read_schema(schema, name="triage").name == "triage"


def test_a_file_is_named_by_its_stem_or_as_asked(tmp_path: Path):
    path = tmp_path / "mood.json"
    path.write_text(SCHEMA)
    assert read_schema(path).name == "mood"
    assert read_schema(path, name="triage").name == "triage"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("triage:Ticket", True),
        ("a.b_1.c:D.E", True),
        ("triage.json", False),
        ("schemas/triage:Ticket", False),
        ("triage:", False),
        (":Ticket", False),
        ("a:b:c", False),
        ("1a:B", False),
        ("a b:C", False),
        (f"{SCHEMA}", False),
        (Path("triage:Ticket"), False),
    ],
)
def test_only_a_module_and_a_class_name_a_model(schema: str | Path, expected: bool):
    assert names_model(schema) is expected


def test_a_file_of_that_name_is_read_and_no_module(module: Callable[[str, str], None]):
    module("wb_tickets", "raise RuntimeError('this must not run')")
    Path("wb_tickets:Ticket").write_text(SCHEMA)
    assert read_schema("wb_tickets:Ticket").sha256 == Schema.parse(SCHEMA).sha256


def test_a_module_runs_only_when_it_is_named(module: Callable[[str, str], None]):
    module("wb_tickets", "raise RuntimeError('this must not run')")
    for schema in ("wb_tickets", "wb_tickets.py", "./wb_tickets:Ticket"):
        with pytest.raises(SchemaError) as caught:
            read_schema(schema)
        assert "must not run" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "reference", "words", "hint"),
    [
        (MODEL, "wb_absent:Ticket", "ModuleNotFoundError", "current folder"),
        (MODEL, "wb_broken:Nothing", "nothing of that name", "module:Class"),
        (MODEL, "wb_broken:thing", "got int", "module:Class"),
        (MODEL, "wb_broken:Literal", "must have a class Literal", "module:Class"),
        (MODEL, "wb_broken:Bad", 'field "n"', "bool"),
        ("class A: pass", "wb_broken:A", "Pydantic model", "BaseModel"),
        ("def f(:", "wb_broken:A", "SyntaxError", "python -c"),
        ("import wb_not_there", "wb_broken:A", "wb_not_there", "python -c"),
        ("import sys; sys.exit(4)", "wb_broken:A", "SystemExit: 4", "python -c"),
        ("raise ValueError('a\\x1b[31m')", "wb_broken:A", "ValueError: a\\u001b[31m", "python"),
        ("raise ValueError", "wb_broken:A", "got ValueError", "python"),
    ],
)
def test_what_cannot_be_imported_is_told(
    module: Callable[[str, str], None], source: str, reference: str, words: str, hint: str
):
    module("wb_broken", source)
    with pytest.raises(SchemaError) as caught:
        read_schema(reference)
    # Of foreign code only its own words are told, safe to print; what to do is in the hint.
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.message.isprintable()


def test_an_interrupt_is_no_schema_error(module: Callable[[str, str], None]):
    module("wb_broken", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        read_schema("wb_broken:A")


def test_what_a_module_prints_is_no_answer(
    module: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
):
    module("wb_tickets", "print('loading')\n" + MODEL)
    read_schema("wb_tickets:Ticket")
    # Standard output holds one JSON value, whatever a user's module prints.
    assert capsys.readouterr() == ("", "loading\n")
