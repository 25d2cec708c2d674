"""Pydantic models as schemas: what each annotation becomes, and what is refused by name."""

import json
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic import Field as About

from weighbridge.scorer import ParallelScorer, Schema, SchemaError
from weighbridge.scorer.pydantic_schema import schema_of_model


class Team(StrEnum):
    BILLING = "billing"
    OTHER = "other"


class Mood(Enum):
    CALM = "calm"
    FURIOUS = "furious"


class Level(IntEnum):
    LOW = 1


class Inner(BaseModel):
    flag: bool = About(description="x")


# Pydantic's own type knows JSON keys only, and people write the choices themselves.
YES: Any = {"choice_descriptions": {True: "today"}, "labels": {"false": "later"}}


class Ticket(BaseModel):
    """Every kind of field, each written in the way a user would."""

    urgent: bool = About(
        description="Does it need an answer today?",
        json_schema_extra=YES,
    )
    team: Team = About(
        Team.OTHER,
        description="Who should answer?",
        json_schema_extra={"choice_descriptions": {Team.BILLING: "money"}},
    )
    tone: Literal["kind", "rude"] = About(description="How is it said?")
    mood: Annotated[Mood, About(description="How angry?", json_schema_extra={"ordered": True})]
    answered: Literal[True, False] = About(description="Is it answered?")


# The same by hand, in the native form.
NATIVE = {
    "urgent": {
        "type": "boolean",
        "description": "Does it need an answer today?",
        "choice_descriptions": {"true": "today"},
        "labels": {"false": "later"},
    },
    "team": {
        "type": "enum",
        "description": "Who should answer?",
        "choices": ["billing", "other"],
        "choice_descriptions": {"billing": "money"},
    },
    "tone": {"type": "enum", "description": "How is it said?", "choices": ["kind", "rude"]},
    "mood": {"type": "score", "description": "How angry?", "levels": ["calm", "furious"]},
    "answered": {"type": "boolean", "description": "Is it answered?", "choices": [True, False]},
}


made_of: Any = create_model  # its types do not know of annotations as values


def one(annotation: Any, **about: Any) -> type[BaseModel]:
    values: dict[str, Any] = {"description": "x", **about}
    return made_of("Made", a=(annotation, About(**values)))


def test_a_model_equals_its_native_form():
    made = schema_of_model(Ticket)
    # One meaning, one hash: answers are found again whichever form the user has.
    assert made.sha256 == Schema.parse(json.dumps(NATIVE)).sha256
    assert made.name == "Ticket"


def test_order_is_that_of_the_class():
    turned = made_of("Turned", b=(bool, About(description="x")), a=(bool, About(description="x")))
    # Negative control of the test above: order is part of the hash.
    assert [field.name for field in schema_of_model(turned).fields] == ["b", "a"]


def test_annotations_written_as_text_are_understood():
    later = made_of("Later", a=("Literal['x', 'y']", About(description="x")), __module__=__name__)
    # What `from __future__ import annotations` does to every class of a module.
    assert schema_of_model(later).field("a").choices == ("x", "y")


EXTRA = "json_schema_extra"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (one(Optional[bool]), ["Made", '"a"', "bool"]),  # noqa: UP045
        (one(Literal["x", None]), ["Made", '"a"', "None"]),
        (one(int), ['"a"', "got int"]),
        (one(str), ['"a"', "got str"]),
        (one(list[str]), ['"a"', "list[str]"]),
        (one(Inner), ['"a"', "Inner"]),
        (one(Level), ['"a"', "Level", "values 1"]),
        (one(Literal[1, 2]), ['"a"', "Literal[1, 2]"]),
        (one(Literal["x", True]), ['"a"', "True"]),
        (one(Literal[Team.BILLING]), ['"a"', "BILLING"]),
        (one(bool | Literal["x"]), ['"a"', "bool"]),
        (one(Enum("Empty", {})), ['"a"', "Empty"]),
        (one(bool, description=None), ['"a"', "description"]),
        (one(bool, description=" "), ['"a"', "blank"]),
        (one(bool, json_schema_extra={"ordered": True}), ['"ordered"', "boolean"]),
        (one(Literal["x", "y"], json_schema_extra={"ordered": 1}), ['"ordered"', "got 1"]),
        (one(Literal["x"], json_schema_extra={"ordered": True}), ['"levels"', "2 to 255"]),
        (one(bool, json_schema_extra={"label": {}}), ['"a"', '"label"', EXTRA]),
        (one(bool, json_schema_extra=lambda _: None), [EXTRA, "mapping", "function"]),
        (one(bool, json_schema_extra={"labels": ["x"]}), ['"labels"', "mapping", "list"]),
        (one(bool, json_schema_extra={"labels": {"x": "y"}}), ['"labels"', '"x"']),
        (one(bool, json_schema_extra={"labels": {True: "x", "true": "y"}}), ['"true"', "twice"]),
        (one(bool, json_schema_extra={"labels": {"true": 1}}), ['"labels"', "text", "got 1"]),
        (made_of("Bare"), ["Bare", "at least one field"]),
        (made_of("Waits", a=("NoSuchType", About(description="x"))), ["Waits", "annotations"]),
        (Team, ["Team", "Pydantic model"]),
    ],
)
def test_what_cannot_be_asked_is_refused(model: type, words: list[str]):
    with pytest.raises(SchemaError) as caught:
        schema_of_model(model)
    # Class or field, the rule, and what came; the hint says what is allowed.
    assert [word for word in words if word not in caught.value.message] == []
    assert caught.value.hint


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (one(bool | None), "without None"),
        (one(Inner), "several fields"),
        (one(int), "Literal of texts"),
        (one(bool, json_schema_extra={"lables": {}}), 'did you mean "labels"?'),
    ],
)
def test_the_hint_says_what_to_do(model: type, words: str):
    with pytest.raises(SchemaError) as caught:
        schema_of_model(model)
    assert words in (caught.value.hint or "")


@pytest.fixture(scope="module")
def scorer(tiny, tmp_path_factory) -> ParallelScorer:
    folder: Path = tiny.checkpoint(tmp_path_factory.mktemp("models") / "tiny", seed=7)
    return ParallelScorer(folder)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    urgent: bool = About(description="Does it need an answer today?", alias="isUrgent")
    team: Team = About(description="Who should answer?")


@pytest.mark.mlx
def test_a_model_asks_and_takes_the_answers(scorer: ParallelScorer):
    result = scorer.score("The invoice was charged twice.", Strict)
    # The class and its schema ask the same.
    assert result.key == scorer.score("x", schema_of_model(Strict)).key
    made = result.as_model(Strict)
    # The aliased name, and the member of an enum by its value, in a strict model too.
    assert {"urgent": made.urgent, "team": made.team.value} == result.output
    assert isinstance(made.team, Team)


@pytest.mark.mlx
def test_answers_that_do_not_fit_another_model_are_refused(scorer: ParallelScorer):
    result = scorer.score("The invoice was charged twice.", Strict)
    with pytest.raises(ValidationError, match="mood"):
        result.as_model(Ticket)


@pytest.mark.mlx
def test_a_class_that_is_no_model_is_a_schema_error(scorer: ParallelScorer):
    with pytest.raises(SchemaError, match="Pydantic model, got dict"):
        scorer.score("x", dict)  # type: ignore[arg-type]
