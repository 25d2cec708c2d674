"""Schemas from Pydantic models: a class is read as the questions that its fields ask.

What an annotation becomes::

    class Triage(BaseModel):
        urgent: bool = Field(description="Does it need an answer today?")
        team: Literal["billing", "other"] = Field(
            description="Who should answer?",
            json_schema_extra={
                "choice_descriptions": {"billing": "charges and refunds"},
                "labels": {"other": "rest"},
            },
        )
        impact: Literal["low", "high"] = Field(
            description="How bad is it?", json_schema_extra={"ordered": True}
        )

`bool` is a boolean; `Literal` of texts, or an `Enum` whose values are texts, is an enum; with
`"ordered": True` its choices are the levels of a score, low to high. Every field has a
description. Nothing else is guessed: other annotations are refused by name.
"""

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weighbridge.scorer.chat import first_line
from weighbridge.scorer.errors import SchemaError, quoted, suggestion
from weighbridge.scorer.schema import Choice, Field, FieldKind, Schema

SchemaLike = Schema | Mapping[str, Any] | type[BaseModel]
"""A schema, the object of its JSON file, or a Pydantic model."""

_EXTRAS = ("choice_descriptions", "labels", "ordered")
_ALLOWED = (
    "a field may be bool, Literal of texts, or an Enum whose values are texts; with "
    'json_schema_extra={"ordered": True} its choices are the levels of a score'
)


def as_schema(schema: SchemaLike) -> Schema:
    """Return a schema given as such, as the object of its JSON file, or as a Pydantic model.

    Raises:
        SchemaError: The object is no schema.
    """
    if isinstance(schema, Schema):
        return schema
    if isinstance(schema, type):
        return schema_of_model(schema)
    try:
        text = json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(
            f"a schema must be an object of JSON values, got: {first_line(error)}",
            hint="give what json.load returns for a schema file",
        ) from error
    return Schema.parse(text)


def schema_of_model(model: type) -> Schema:
    """Read a schema from a Pydantic model; its class name becomes the name.

    Args:
        model: A subclass of `BaseModel`. Defaults, validators and computed fields say
            nothing about questions and are left aside.

    Raises:
        SchemaError: Naming the class and the field, with what is allowed in its hint.
    """
    where = quoted(model.__name__)[1:-1]
    if not issubclass(model, BaseModel):
        raise SchemaError(
            f"a schema class must be a Pydantic model, got {where}",
            hint="make it a subclass of pydantic.BaseModel",
        )
    if not model.__pydantic_complete__ and model.model_rebuild(raise_errors=False) is not True:
        raise SchemaError(
            f"{where}: all annotations of a model must be known, and some are not",
            hint="import or define the types they name in the module of the class",
        )
    if not model.model_fields:
        raise SchemaError(f"{where}: a model must have at least one field, got none", hint=_ALLOWED)
    try:
        fields = tuple(_field(name, info) for name, info in model.model_fields.items())
        return Schema(fields, name=model.__name__)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error.message}", hint=error.hint) from error


def _field(name: str, info: FieldInfo) -> Field:
    where = f"field {quoted(name)}"
    if info.description is None:
        raise SchemaError(
            f"{where} must have a description, got none",
            hint='write Field(description="…"): a sentence on what it asks about the document',
        )
    choices = _choices(where, info.annotation)
    extras = _extras(where, info.json_schema_extra)
    boolean = isinstance(choices[0], bool)
    ordered = extras.get("ordered", False)
    if not isinstance(ordered, bool) or (ordered and boolean):
        raise SchemaError(
            f'{where}: "ordered" in json_schema_extra must be True or False on a field of texts, '
            f"got {'a boolean field' if boolean else quoted(repr(ordered))[1:-1]}",
            hint="leave it out, or make the field a Literal of levels, low to high",
        )
    return Field(
        name=name,
        kind=FieldKind.BOOLEAN if boolean else FieldKind.SCORE if ordered else FieldKind.ENUM,
        description=info.description,
        choices=choices,
        choice_descriptions=_texts(where, "choice_descriptions", extras),
        labels=_texts(where, "labels", extras),
    )


def _choices(where: str, annotation: Any) -> tuple[Choice, ...]:
    # `type Name = …` of Python 3.12 stands for its value.
    while type(annotation).__name__ == "TypeAliasType":
        annotation = annotation.__value__
    if annotation is bool:
        return (False, True)
    values: list[Any] = []
    if get_origin(annotation) is Literal:
        values = list(get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        values = [member.value for member in annotation]
    kinds = {type(value) for value in values}
    if kinds == {str} or (kinds == {bool} and get_origin(annotation) is Literal):
        return tuple(values)
    written = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    raise SchemaError(
        f"{where}: a question must have texts or booleans to choose from, got "
        f"{quoted(written.removeprefix('typing.'))[1:-1]}"
        + (f" with values {_listed(values)}" if values else ""),
        hint=_refused(annotation, values),
    )


def _refused(annotation: Any, values: Iterable[Any]) -> str:
    if type(None) in get_args(annotation) or None in values:
        return f"every question is answered: write it without None; {_ALLOWED}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"fields are flat: make a nested model several fields; {_ALLOWED}"
    return _ALLOWED


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(quoted(repr(value))[1:-1] for value in list(values)[:5])


def _extras(where: str, extra: Any) -> Mapping[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise SchemaError(
            f"{where}: json_schema_extra must be a mapping, got {type(extra).__name__}",
            hint=f"write a dict with {', '.join(_EXTRAS)}",
        )
    for key in extra:
        # A misspelt key would otherwise be a description that no prompt shows.
        if key not in _EXTRAS:
            raise SchemaError(
                f"{where}: unknown key {quoted(str(key))} in json_schema_extra",
                hint=suggestion(str(key), _EXTRAS, "the known keys are"),
            )
    return extra


def _texts(where: str, what: str, extras: Mapping[str, Any]) -> dict[str, str]:
    """Return texts by choice key, where the model may also say `True` or `Team.BILLING`."""
    given = extras.get(what, {})
    if not isinstance(given, Mapping):
        raise SchemaError(
            f'{where}: "{what}" must be a mapping from choice to text, got {type(given).__name__}',
            hint=f'write "{what}": {{"choice": "text"}} or leave it out',
        )
    found: dict[str, str] = {}
    for choice, text in given.items():
        value = choice.value if isinstance(choice, Enum) else choice
        key = value if isinstance(value, str) else json.dumps(value, default=repr)
        if key in found:
            raise SchemaError(
                f'{where}: "{what}" must name a choice once, {quoted(key)} came twice',
                hint="remove one of the two spellings",
            )
        found[key] = text
    return found
