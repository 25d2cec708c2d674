import json
from pathlib import Path

import pytest

from weighbridge.scorer.errors import SchemaError
from weighbridge.scorer.schema import FieldKind, Schema

WIRE = Path(__file__).parents[1] / "cases" / "questions_wire.json"


def wire(**question) -> str:
    return json.dumps({"questions": {"a": question}})


def field(**question):
    return Schema.parse(wire(**question)).field("a")


def refused(text: str) -> SchemaError:
    with pytest.raises(SchemaError) as caught:
        Schema.parse(text)
    return caught.value


# The case file, put by hand into the native form.
NATIVE = {
    "wants refund?": {
        "type": "boolean",
        "description": "Does the customer ask for money back?",
        "choice_descriptions": {"true": "asks for a refund or chargeback"},
    },
    "team": {
        "type": "enum",
        "description": '{"task":"route","to":"one team"}',
        "choices": ["billing", "technical", "other"],
        "choice_descriptions": {
            "billing": "charges and refunds",
            "technical": "bugs and outages",
        },
    },
    "urgency": {
        "type": "score",
        "description": "How urgent is it?",
        "levels": ["routine", "degraded, a workaround exists", "fully blocked"],
    },
}


def test_wire_file_equals_its_native_form():
    schema = Schema.load(WIRE)
    # One meaning, one hash: answers are found again whichever form the user has.
    assert schema.sha256 == Schema.parse(json.dumps(NATIVE)).sha256
    assert schema.name == "questions_wire"


def test_wire_hash_depends_on_the_order_of_the_file():
    questions = json.loads(WIRE.read_text(encoding="utf-8"))["questions"]
    turned = json.dumps({"questions": dict(reversed(questions.items()))})
    # Negative control of the test above, and criteria are an *ordered* map.
    assert Schema.parse(turned).sha256 != Schema.load(WIRE).sha256


@pytest.mark.parametrize("missing", [{}, {"instructions": None}, {"criteria": None}])
def test_noul_without_instructions_is_asked_by_its_id(missing):
    made = field(type="noul", **missing)
    # The id is the only thing such a question says about itself.
    assert (made.kind, made.description, made.choices) == (FieldKind.BOOLEAN, "a", (False, True))


def test_criteria_keep_order_and_null_means_no_description():
    made = field(type="choice", instructions="x", criteria={"z": None, "a": "first", "m": None})
    assert made.choices == ("z", "a", "m")
    assert dict(made.choice_descriptions) == {"a": "first"}


def test_texts_may_be_objects_and_lists():
    made = field(type="score", instructions=["é", 1], criteria=[{"is": "low"}, "high"])
    # Compact JSON with characters as they are: fewest tokens, nothing dropped.
    assert made.description == '["é",1]'
    assert made.choices == ('{"is":"low"}', "high")


def test_lawful_extremes_are_accepted():
    names = {f"c{i}": None for i in range(255)}
    # FIELD: choice 2 to 255, score 2 to 10.
    assert len(field(type="choice", instructions="x", criteria=names).choices) == 255
    assert len(field(type="score", instructions="x", criteria=list("abcdefghij")).choices) == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"questions": {}}', ["at least one field"]),
        ('{"questions": []}', ['"questions"', "object", "a list"]),
        ('{"questions": {}, "model": "m"}', ["unknown", '"model"']),
        ('{"questions": {"a": {}, "a": {}}}', ["duplicate", '"a"', '"questions"']),
        ('{"questions": {"a": "noul"}}', ['"a"', "object", '"noul"']),
        ('{"questions": {"a": {"instructions": "x"}}}', ['"a"', '"type"', "missing"]),
        ('{"questions": {"a": {"type": "choice", "criteria": {"x": null, "x": null}}}}', ['"x"']),
        (wire(type="boolean", instructions="x"), ['"boolean"', '"noul"']),
        (wire(type="noul", instruction="x"), ["unknown", '"instruction"']),
        (wire(type="noul", instructions=" "), ['"instructions"', "empty"]),
        (wire(type="noul", instructions={}), ['"instructions"', "empty"]),
        (wire(type="noul", instructions=3), ['"instructions"', "3"]),
        (wire(type="noul", instructions=True), ['"instructions"', "true"]),
        (wire(type="noul", criteria={"yes": "x"}), ['"criteria"', '"yes"']),
        (wire(type="noul", criteria=["x"]), ['"criteria"', "object", "a list"]),
        (wire(type="noul", criteria={"true": ""}), ['"criteria"', '"true"', "empty"]),
        (wire(type="choice", criteria={"x": None, "y": None}), ['"instructions"', "missing"]),
        (wire(type="choice", instructions="x"), ['"criteria"', "object", "null"]),
        (wire(type="choice", instructions="x", criteria=["x", "y"]), ['"criteria"', "object"]),
        (
            wire(type="choice", instructions="x", criteria={f"c{i}": None for i in range(256)}),
            ['"criteria"', "2 to 255", "256"],
        ),
        (wire(type="choice", instructions="x", criteria={"": None, "y": None}), ["blank"]),
        (wire(type="score", instructions="x"), ['"criteria"', "list", "null"]),
        (wire(type="score", instructions="x", criteria=["x"]), ["2 to 10", "1"]),
        (wire(type="score", instructions="x", criteria=list("abcdefghijk")), ["2 to 10", "11"]),
        (wire(type="score", instructions="x", criteria=["x", None]), ["entry 2", "null"]),
        (wire(type="score", instructions="x", criteria=["x", "x"]), ['"x"', "twice"]),
        (wire(type="noul", instructions=["\ud800"]), ["surrogate", "U+D800"]),
        (wire(type="noul", instructions={"x": float("nan")}), ['"a"', '"instructions"', "NaN"]),
    ],
)
def test_refusal_names_the_place_and_what_came(text, words):
    error = refused(text)
    # Place, rule and received value are what a person needs to mend the file.
    assert [word for word in words if word not in error.message] == []
    assert error.hint
