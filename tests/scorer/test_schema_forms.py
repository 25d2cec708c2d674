"""Schemas in the forms of others: read back as the same questions, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer.errors import SchemaError, quoted
from weighbridge.scorer.schema import Field, FieldKind, Schema
from weighbridge.scorer.schema_forms import (
    json_schema,
    native_form,
    nimble_form,
    not_in_json_schema,
    system_one_form,
)

WIRE = Path(__file__).parents[1] / "cases" / "questions_wire.json"
TEXTS = st.text("aé{}[]\"'\\ \n1", min_size=1, max_size=8).filter(str.strip)
NAMES = st.text("aé{}\"'\\ 1", min_size=1, max_size=5).filter(lambda text: text == text.strip())


@st.composite
def fields(draw: st.DrawFn, name: str) -> Field:
    kind = draw(st.sampled_from(FieldKind))
    names = st.lists(NAMES, min_size=2, max_size=12, unique=True).map(tuple)
    choices = (
        draw(st.sampled_from([(True,), (False, True), (True, False)]))
        if kind is FieldKind.BOOLEAN
        else draw(names)
    )
    plain = Field(name, kind, draw(TEXTS), choices)
    described = {key: draw(TEXTS) for key in plain.keys if draw(st.booleans())}
    words = {key: f"w{number}" for number, key in enumerate(plain.keys)}
    labels = words if draw(st.booleans()) else {}
    return Field(name, kind, plain.description, choices, described, labels)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    return Schema(tuple(draw(fields(name)) for name in names))


def read(form: dict) -> Schema:
    return Schema.parse(json.dumps(form))


@given(schemas())
def test_native_holds_everything(schema: Schema):
    assert read(native_form(schema)) == schema


@given(schemas())
def test_what_is_written_for_others_asks_the_same(schema: Schema):
    for write in (nimble_form, system_one_form):
        form, error = written(write, schema)
        # Refused by the name of a field, and only where something is in the way.
        assert (form is None) == (error is not None)
        assert form is None or read(form) == schema
        assert error is None or any(
            f"{quoted(each.name)}:" in error.message for each in schema.fields
        )


def written(
    write: Callable[[Schema], dict], schema: Schema
) -> tuple[dict | None, SchemaError | None]:
    try:
        return write(schema), None
    except SchemaError as error:
        return None, error


def test_the_case_file_goes_round():
    schema = Schema.load(WIRE)
    assert read(system_one_form(schema)) == schema
    assert read(native_form(schema)) == schema
    written = system_one_form(schema)["questions"]
    # By hand from the file: order, kinds and nulls as they were.
    assert list(written) == ["wants refund?", "team", "urgency"]
    assert written["wants refund?"]["type"] == "noul"
    assert written["wants refund?"]["criteria"]["false"] is None
    assert written["team"]["criteria"]["other"] is None
    assert written["urgency"]["criteria"][2] == "fully blocked"


def field(kind: str, choices: tuple, **more) -> Schema:
    return Schema((Field("a", FieldKind(kind), "x", choices, **more),))


@pytest.mark.parametrize(
    ("write", "schema", "words"),
    [
        (nimble_form, field("score", ("x", "y")), 'field "a": a score'),
        (nimble_form, field("enum", ("x", "y"), labels={"x": "z"}), 'field "a": labels'),
        (system_one_form, field("enum", ("x", "y"), labels={"x": "z"}), 'field "a": labels'),
        (system_one_form, field("boolean", (True, False)), "false, true in this order"),
        (system_one_form, field("boolean", (True,)), "false, true in this order"),
        (system_one_form, field("enum", ("x",)), "a single choice"),
        (system_one_form, field("score", tuple("abcdefghijk")), "11 levels, more than 10"),
        (
            system_one_form,
            field("score", ("x", "y"), choice_descriptions={"x": "z"}),
            "descriptions of levels",
        ),
    ],
)
def test_what_a_form_cannot_hold_is_refused(write, schema: Schema, words: str):
    with pytest.raises(SchemaError) as caught:
        write(schema)
    assert words in caught.value.message


def test_all_that_is_in_the_way_is_named_at_once():
    many = [Field(f"f{i}", FieldKind.ENUM, "x", ("y",), labels={"y": "z"}) for i in range(6)]
    with pytest.raises(SchemaError, match=r'"f0": labels.*"f0": a single.*"f4".*and 2 more'):
        system_one_form(Schema(tuple(many)))


def test_a_json_schema_describes_the_answers():
    schema = Schema(
        (
            Field("yes", FieldKind.BOOLEAN, "x", (False, True)),
            Field("always", FieldKind.BOOLEAN, "x", (True,)),
            Field("team", FieldKind.ENUM, "x", ("a", "b"), {"a": "first"}, {"b": "rest"}),
            Field("level", FieldKind.SCORE, "x", ("low", "high")),
        ),
        name="triage",
    )
    assert json_schema(schema) == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "triage",
        "type": "object",
        "properties": {
            "yes": {"description": "x", "type": "boolean"},
            "always": {"description": "x", "type": "boolean", "enum": [True]},
            "team": {
                "description": "x",
                "type": "string",
                "oneOf": [{"const": "a", "description": "first"}, {"const": "b"}],
            },
            "level": {"description": "x", "type": "string", "enum": ["low", "high"]},
        },
        "required": ["yes", "always", "team", "level"],
        "additionalProperties": False,
    }
    # What it leaves out is told, field by field.
    assert [line.split(":")[0] for line in not_in_json_schema(schema)] == [
        'field "team"',
        'field "level"',
    ]
