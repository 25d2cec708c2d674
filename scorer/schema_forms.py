"""Writes schemas in the forms that others read, and says what a form cannot hold.

A form that a schema does not fit is refused by name: what is written asks the same
questions. `native_form` and `system_one_form` are read again by `Schema.parse`, to an
equal schema; `json_schema` describes the answers instead.
"""

import json
from collections.abc import Mapping
from typing import Any

from weighbridge.scorer.errors import SchemaError, quoted
from weighbridge.scorer.questions import MAX_LEVELS
from weighbridge.scorer.schema import Field, FieldKind, Schema

_WIRE_TYPES = {FieldKind.BOOLEAN: "noul", FieldKind.ENUM: "choice", FieldKind.SCORE: "score"}


def native_form(schema: Schema) -> dict[str, Any]:
    """Return our own form, which holds all of a schema."""
    return json.loads(schema.canonical)


def nimble_form(schema: Schema) -> dict[str, Any]:
    """Return the schema file of Nimble: the native form without scores and labels.

    Raises:
        SchemaError: The schema has one of them.
    """
    _require("a Nimble schema", [fault for each in schema.fields for fault in _not_nimble(each)])
    return native_form(schema)


def system_one_form(schema: Schema) -> dict[str, Any]:
    """Return the question file of the System One ecosystem.

    Raises:
        SchemaError: The schema holds what such a file cannot say.
    """
    faults = [fault for each in schema.fields for fault in _not_system_one(each)]
    _require("a System One question file", faults)
    return {"questions": {each.name: _question(each) for each in schema.fields}}


def json_schema(schema: Schema) -> dict[str, Any]:
    """Return a JSON Schema (2020-12) of `ScoreResult.output`, for those who check answers."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **({"title": schema.name} if schema.name else {}),
        "type": "object",
        "properties": {each.name: _answers(each) for each in schema.fields},
        "required": [each.name for each in schema.fields],
        "additionalProperties": False,
    }


def not_in_json_schema(schema: Schema) -> list[str]:
    """Say what `json_schema` leaves out, a sentence for each field that has it."""
    left_out: list[str] = []
    for each in schema.fields:
        where = f"field {quoted(each.name)}"
        if each.kind is FieldKind.SCORE:
            left_out.append(f"{where}: JSON Schema knows no order of levels")
        if each.labels:
            left_out.append(f"{where}: labels are words of the prompt and no answers")
    return left_out


def _require(target: str, faults: list[str]) -> None:
    if faults:
        more = f" and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise SchemaError(
            f"{target} cannot hold: {'; '.join(faults[:10])}{more}",
            hint="take that out of the schema, or convert to native, which holds everything",
        )


def _not_nimble(each: Field) -> list[str]:
    where = f"field {quoted(each.name)}"
    return [
        *([f"{where}: a score"] if each.kind is FieldKind.SCORE else []),
        *([f"{where}: labels"] if each.labels else []),
    ]


def _not_system_one(each: Field) -> list[str]:
    where = f"field {quoted(each.name)}"
    faults = [f"{where}: labels"] if each.labels else []
    if each.kind is FieldKind.BOOLEAN and each.choices != (False, True):
        faults.append(f"{where}: choices other than false, true in this order")
    if each.kind is FieldKind.ENUM and len(each.choices) < 2:
        faults.append(f"{where}: a single choice")
    if each.kind is FieldKind.SCORE and len(each.choices) > MAX_LEVELS:
        faults.append(f"{where}: {len(each.choices)} levels, more than {MAX_LEVELS}")
    if each.kind is FieldKind.SCORE and each.choice_descriptions:
        faults.append(f"{where}: descriptions of levels")
    return faults


def _question(each: Field) -> dict[str, Any]:
    described: Mapping[str, str] = each.choice_descriptions
    criteria: Any = {key: described.get(key) for key in each.keys}
    if each.kind is FieldKind.SCORE:
        criteria = list(each.keys)
    elif each.kind is FieldKind.BOOLEAN:
        criteria = {key: described.get(key) for key in ("true", "false")} if described else None
    return {
        "type": _WIRE_TYPES[each.kind],
        "instructions": each.description,
        **({} if criteria is None else {"criteria": criteria}),
    }


def _answers(each: Field) -> dict[str, Any]:
    described = each.choice_descriptions
    allowed: dict[str, Any] = {"enum": list(each.choices)}
    if described:
        # The usual way to say what a single value means.
        allowed = {
            "oneOf": [
                {"const": choice, **({"description": described[key]} if key in described else {})}
                for key, choice in zip(each.keys, each.choices, strict=True)
            ]
        }
    elif each.kind is FieldKind.BOOLEAN and len(each.choices) > 1:
        allowed = {}
    return {
        "description": each.description,
        "type": "boolean" if each.kind is FieldKind.BOOLEAN else "string",
        **allowed,
    }
