"""Reads the questions of a schema from strict JSON, in either of two forms.

The native form is described in `weighbridge.scorer.schema`. The other is the question
file of the System One ecosystem (`/v1/systemone`)::

    {"questions": {
        "refund": {"type": "noul", "instructions": …?, "criteria": {"true": …, "false": …}?},
        "team": {"type": "choice", "instructions": …, "criteria": {"billing": …, "other": null}},
        "urgency": {"type": "score", "instructions": …, "criteria": ["routine", "blocked"]}}}

noul becomes boolean, choice enum and score score. Texts may be a string, or an object or
list, which is kept as compact JSON text. A noul without instructions is asked by its id.
Stricter than JSON parsers usually are: no key twice, no NaN or Infinity, no unknown key,
bounded size and depth. The first thing found wrong is the one reported.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weighbridge.scorer.errors import SchemaError, listed, quoted, shown, suggestion

MAX_CHARACTERS = 1_000_000
MAX_CHOICES = 255
MAX_DEPTH = 32
MAX_LEVELS = 10

Kind = Literal["enum", "boolean", "score"]

_NATIVE_TYPES: Mapping[str, Kind] = {"enum": "enum", "boolean": "boolean", "score": "score"}
_WIRE_TYPES: Mapping[str, Kind] = {"noul": "boolean", "choice": "enum", "score": "score"}
_FLAT = "fields are flat: make a nested value several fields"
_EXAMPLE = 'write {"field name": {"type": "boolean", "description": "…"}}'


@dataclass(frozen=True)
class Question:
    """What a file says of one field: its shape is right, its texts are not yet checked.

    `weighbridge.scorer.schema.Field` has the same attributes and checks the rest.
    """

    name: str
    kind: Kind
    description: Any
    choices: tuple[Any, ...]
    choice_descriptions: Mapping[str, Any]
    labels: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_questions(text: str) -> tuple[Question, ...]:
    """Read questions from JSON text of either form, in the order of the text.

    Args:
        text: The JSON; a byte order mark at its start is ignored.

    Returns:
        The questions; none when the JSON object is empty.

    Raises:
        SchemaError: Naming the field and the key, with what to do in its hint.
    """
    document = _read_json(text.removeprefix("\ufeff"))
    if not isinstance(document, dict):
        raise SchemaError(
            f"a schema must be a JSON object of fields, got {shown(document)}", hint=_EXAMPLE
        )
    if not _is_question_file(document):
        return tuple(_native_field(name, raw) for name, raw in document.items())
    _check_known_keys('a file with "questions"', document, ["questions"])
    questions = document["questions"]
    if not isinstance(questions, dict):
        raise SchemaError(
            f'"questions" must be an object from id to question, got {shown(questions)}',
            hint='write {"questions": {"id": {"type": "noul", "instructions": "…"}}}',
        )
    return tuple(_wire_field(name, raw) for name, raw in questions.items())


def _is_question_file(document: Mapping[str, object]) -> bool:
    if "questions" not in document:
        return False
    questions = document["questions"]
    # A native field may be called "questions": its type is text, a question's id never is.
    return not (isinstance(questions, dict) and isinstance(questions.get("type"), str))


def _check_known_keys(where: str, raw: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse the first key of `raw` that is not in `known`.

    Raises:
        SchemaError: Naming the key, with the closest known one in its hint.
    """
    for key in raw:
        if key not in known:
            raise SchemaError(
                f"{where}: unknown key {quoted(key)}",
                hint=suggestion(key, known, "the known keys are"),
            )


def _kind(where: str, raw: Mapping[str, object], types: Mapping[str, Kind], hint: str) -> Kind:
    """Return the kind that the `type` of a field or question stands for.

    Args:
        where: Start of the error message.
        raw: The JSON object.
        types: The kind of each type that exists.
        hint: Added when the type is none of them.

    Raises:
        SchemaError: When it is missing, not text, or not in `types`.
    """
    value = raw.get("type")
    if isinstance(value, str) and value in types:
        return types[value]
    if "type" not in raw:
        raise SchemaError(f'{where}: "type" is missing', hint=f"the types are {listed(types)}")
    raise SchemaError(
        f'{where}: "type" must be one of {listed(types)}, got {shown(value)}',
        hint=suggestion(shown(value), types, f"{hint}; the types are"),
    )


def _native_field(name: str, raw: object) -> Question:
    where = f"field {quoted(name)}"
    if not isinstance(raw, dict):
        raise SchemaError(
            f"{where} must be an object with type and description, got {shown(raw)}",
            hint='write {"type": "boolean", "description": "…"}',
        )
    common = ["type", "description", "choices", "choice_descriptions", "labels"]
    if "type" not in raw:
        _check_known_keys(where, raw, [*common, "levels"])
    kind = _kind(where, raw, _NATIVE_TYPES, _FLAT)
    _check_known_keys(where, raw, [*common, "levels"] if kind == "score" else common)
    if "description" not in raw:
        raise SchemaError(
            f'{where}: "description" is missing',
            hint="say in a sentence what the field asks about the document",
        )
    for key in ("choice_descriptions", "labels"):
        if not isinstance(raw.get(key, {}), dict):
            raise SchemaError(
                f'{where}: "{key}" must be an object from choice to text, got {shown(raw[key])}',
                hint=f'write "{key}": {{"choice": "text"}} or leave it out',
            )
    return Question(
        name=name,
        kind=kind,
        description=raw["description"],
        choices=_native_choices(where, kind, raw),
        choice_descriptions=raw.get("choice_descriptions", {}),
        labels=raw.get("labels", {}),
    )


def _native_choices(where: str, kind: Kind, raw: Mapping[str, Any]) -> tuple[Any, ...]:
    given = [key for key in ("choices", "levels") if key in raw]
    if not given and kind == "boolean":
        return (False, True)
    if len(given) != 1:
        wanted = '"levels"' if kind == "score" else '"choices"'
        came = "both came" if given else "it is missing"
        rule = f'{wanted}, or "choices" in its place,' if given else wanted
        raise SchemaError(
            f"{where}: {rule} must be a list of texts, {came}",
            hint=f'give {wanted} once, such as {wanted}: ["low", "high"]',
        )
    value = raw[given[0]]
    if not isinstance(value, list):
        raise SchemaError(
            f"{where}: {quoted(given[0])} must be a list, got {shown(value)}",
            hint=f'write {quoted(given[0])}: ["low", "high"]',
        )
    return tuple(value)


def _wire_field(name: str, raw: object) -> Question:
    where = f"question {quoted(name)}"
    if not isinstance(raw, dict):
        raise SchemaError(
            f"{where} must be an object with type and instructions, got {shown(raw)}",
            hint='write {"type": "noul", "instructions": "…"}',
        )
    kind = _kind(where, raw, _WIRE_TYPES, "other types are not supported")
    _check_known_keys(where, raw, ["type", "instructions", "criteria"])
    instructions = raw.get("instructions")
    if instructions is None and kind != "boolean":
        raise SchemaError(
            f'{where}: "instructions" is missing',
            hint="say in a sentence what is asked about the document",
        )
    # The id is all that a noul without instructions says about itself.
    text = name if instructions is None else _text(f'{where}: "instructions"', instructions)
    criteria = raw.get("criteria")
    if kind == "boolean":
        described = _described(where, {} if criteria is None else criteria)
        _check_known_keys(f'{where}: "criteria"', described, ["true", "false"])
        return Question(name, kind, text, (False, True), _given(described))
    if kind == "enum":
        described = _described(where, criteria)
        _check_count(where, described, MAX_CHOICES)
        return Question(name, kind, text, tuple(described), _given(described))
    if not isinstance(criteria, list):
        raise SchemaError(
            f'{where}: "criteria" of a score must be a list of texts from low to high, '
            f"got {shown(criteria)}",
            hint='write "criteria": ["low", "high"], without numbers',
        )
    _check_count(where, criteria, MAX_LEVELS)
    levels = [
        _text(f'{where}: entry {position} of "criteria"', value)
        for position, value in enumerate(criteria, start=1)
    ]
    return Question(name, kind, text, tuple(levels), {})


def _described(where: str, criteria: object) -> dict[str, str | None]:
    if not isinstance(criteria, dict):
        raise SchemaError(
            f'{where}: "criteria" must be an object from name to text or null, '
            f"got {shown(criteria)}",
            hint='write "criteria": {"name": "what it means", "other": null}',
        )
    return {
        key: None if value is None else _text(f'{where}: "criteria" of {quoted(key)}', value)
        for key, value in criteria.items()
    }


def _given(described: Mapping[str, str | None]) -> dict[str, str]:
    return {key: text for key, text in described.items() if text is not None}


def _text(what: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, dict | list) and value:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    came = "an empty one" if isinstance(value, dict | list) else shown(value)
    raise SchemaError(
        f"{what} must be a text, object or list that is not empty, got {came}",
        hint="write a text; for a name that needs none, write null",
    )


def _check_count(where: str, criteria: Collection[object], most: int) -> None:
    if not 2 <= len(criteria) <= most:
        raise SchemaError(
            f'{where}: "criteria" must hold 2 to {most} entries, got {len(criteria)}',
            hint="split the question in two" if len(criteria) > most else "add what else it can be",
        )


class _Object(dict[str, object]):
    """A JSON object that remembers the first key that came twice."""

    duplicate: str | None = None


def _object(pairs: list[tuple[str, object]]) -> _Object:
    made = _Object()
    for key, value in pairs:
        if key in made and made.duplicate is None:
            made.duplicate = key
        made[key] = value
    return made


# A string is one token, closed or not, so that brackets inside it do not count.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def _read_json(text: str) -> object:
    if not text.strip():
        raise SchemaError("a schema must be a JSON object of fields, got nothing", hint=_EXAMPLE)
    if len(text) > MAX_CHARACTERS:
        raise SchemaError(
            f"a schema must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}",
            hint="split it into several schemas; a prompt holds far less",
        )
    depth = 0
    # Counted before parsing: the parser recurses, and how deep it may go is not ours to say.
    for token in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            raise SchemaError(
                f"a schema must be at most {MAX_DEPTH} brackets deep, "
                f"got more at character {token.start() + 1}",
                hint=_FLAT,
            )
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise SchemaError(
            f"a schema must be JSON, got at line {error.lineno}, column {error.colno}: {error.msg}",
            hint="check quotes, commas and brackets there; JSON has no comments",
        ) from error
    except ValueError as error:
        raise SchemaError(
            f"a schema must hold numbers that can be read, got: {error}", hint="shorten the number"
        ) from error
    _check_tree(document, ())
    return document


def _check_tree(value: object, path: tuple[str | int, ...]) -> None:
    """Refuse what JSON parsers let through, naming where it is."""
    where = " → ".join(quoted(at) if isinstance(at, str) else f"entry {at}" for at in path)
    if isinstance(value, _Object):
        if value.duplicate is not None:
            raise SchemaError(
                f"duplicate key {quoted(value.duplicate)} in {where}"
                if path
                else f"duplicate field {quoted(value.duplicate)}",
                hint="rename or remove one of the two",
            )
        for key, inner in value.items():
            _check_tree(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value, start=1):
            _check_tree(inner, (*path, position))
    elif isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(
            f"a schema must hold finite numbers, got {json.dumps(value)} in {where}",
            hint="JSON has no NaN or Infinity; write a text in quotes",
        )
