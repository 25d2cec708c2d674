"""Schemas: the typed questions that every document is asked.

A schema is an ordered list of fields, each valid by construction. The JSON forms it is
read from are those of `weighbridge.scorer.questions`; the native one is also `canonical`::

    {"urgent": {"type": "boolean", "description": "…", "choices": [true, false]?},
     "team":   {"type": "enum", "description": "…", "choices": ["billing", "other"],
                "choice_descriptions": {"billing": "…"}?, "labels": {"other": "rest"}?},
     "impact": {"type": "score", "description": "…", "levels": ["low", "high"]}}

It is the schema file of Bespoke Labs Nimble, which has no `score` and no `labels`.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from weighbridge.scorer.errors import SchemaError, quoted, shown, suggestion
from weighbridge.scorer.questions import MAX_CHARACTERS, MAX_CHOICES, read_questions

MAX_BYTES = 4 * MAX_CHARACTERS  # UTF-8 takes at most 4 bytes per character

Choice = str | bool


class FieldKind(StrEnum):
    """What a field's value is; the text is the `type` of the schema file."""

    ENUM = "enum"
    BOOLEAN = "boolean"
    SCORE = "score"


@dataclass(frozen=True)
class Field:
    """One question with its allowed answers, checked when it is made.

    Attributes:
        choices: In the order of the file; of a score field its levels, low to high.
        choice_descriptions: Text by choice key, in the order of the choices; may be partial.
        labels: The words that stand for values in the `labels` encoding, by choice key.
            May be partial: a choice without one is its own word, see `words`.

    Raises:
        SchemaError: When a value breaks the rules of the schema file.
    """

    name: str
    kind: FieldKind
    description: str
    choices: tuple[Choice, ...]
    choice_descriptions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    labels: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        _check_text("a field name", self.name)
        where = f"field {quoted(self.name)}"
        _check_text(f'{where}: "description"', self.description, multiline=True)
        _check_choices(where, self.kind, self.choices)
        descriptions = self._by_choice("choice_descriptions", self.choice_descriptions)
        for key, text in descriptions.items():
            what = f'{where}: "choice_descriptions" of {quoted(key)}'
            _check_text(what, text, multiline=True)
        labels = self._by_choice("labels", self.labels)
        for key, word in labels.items():
            what = f'{where}: "labels" of {quoted(key)}'
            _check_text(what, word)
            if word != word.strip():
                raise SchemaError(
                    f"{what} must not begin or end with space, got {quoted(word)}",
                    hint="leave the space out: the encoding sets it where the model needs it",
                )
        # A choice that is its own word says nothing; dropping it keeps one spelling per meaning.
        labels = {key: word for key, word in labels.items() if word != key}
        object.__setattr__(self, "choice_descriptions", MappingProxyType(descriptions))
        object.__setattr__(self, "labels", MappingProxyType(labels))
        _check_distinct(f'{where}: the words of "labels" and of choices without one', self.words)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can be neither pickled nor deep-copied.
        described, labels = dict(self.choice_descriptions), dict(self.labels)
        values = (self.name, self.kind, self.description, self.choices, described, labels)
        return Field, values

    @property
    def keys(self) -> tuple[str, ...]:
        """The choices as JSON keys: `"false"` and `"true"` for booleans, else the text."""
        return tuple(_key(choice) for choice in self.choices)

    @property
    def words(self) -> tuple[str, ...]:
        """The word of each choice in the `labels` encoding, in the order of the choices."""
        return tuple(self.labels.get(key, key) for key in self.keys)

    def rotated(self, places: int) -> "Field":
        """Return the field with its first `places` choices moved behind the others."""
        return replace(self, choices=(*self.choices[places:], *self.choices[:places]))

    def _by_choice(self, what: str, values: Mapping[str, str]) -> dict[str, str]:
        """Order `values` by choice, matching keys after NFC as the choices are compared."""
        where = f"field {quoted(self.name)}: {quoted(what)}"
        keys = {unicodedata.normalize("NFC", key): key for key in self.keys}
        found: dict[str, str] = {}
        for given, text in values.items():
            key = keys.get(unicodedata.normalize("NFC", given))
            if key is None:
                raise SchemaError(
                    f"{where} names {quoted(given)}, which is not one of the choices",
                    hint=suggestion(given, self.keys, "the choices are"),
                )
            if key in found:
                raise SchemaError(
                    f"{where} must name a choice once, {quoted(key)} came twice",
                    hint="remove one of the two spellings",
                )
            found[key] = text
        return {key: found[key] for key in self.keys if key in found}


@dataclass(frozen=True)
class Schema:
    """An ordered set of fields; equal when `canonical` is equal, whatever the name.

    Attributes:
        name: What people call it, for display only; the file's stem when loaded from one.

    Raises:
        SchemaError: When there is no field, or two names are equal after NFC.
    """

    fields: tuple[Field, ...]
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.fields:
            raise SchemaError(
                "a schema must have at least one field, got none",
                hint='write {"field name": {"type": "boolean", "description": "…"}}',
            )
        _check_distinct("field names", [each.name for each in self.fields])

    @classmethod
    def parse(cls, text: str, *, name: str | None = None) -> Self:
        """Read a schema, or a System One question file, from JSON text.

        Args:
            text: The JSON; a byte order mark at its start is ignored.
            name: What people call it.

        Raises:
            SchemaError: Naming the field and the key, with what to do in its hint.
        """
        fields = tuple(
            Field(
                name=question.name,
                kind=FieldKind(question.kind),
                description=question.description,
                choices=question.choices,
                choice_descriptions=question.choice_descriptions,
                labels=question.labels,
            )
            for question in read_questions(text)
        )
        return cls(fields, name=name)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a schema from a UTF-8 file; its stem becomes the name.

        Raises:
            SchemaError: As `parse`, with the path in front; also when the file cannot be read.
        """
        path = Path(path)
        shown_path = quoted(str(path), limit=200)[1:-1]
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SchemaError(
                f"{shown_path}: a schema file must be readable, got: {reason}",
                hint="give the path of a JSON file",
            ) from error
        if len(data) > MAX_BYTES:
            raise SchemaError(
                f"{shown_path}: a schema file must have at most {MAX_BYTES:,} bytes, got more",
                hint="give the path of a schema, not of the documents",
            )
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SchemaError(
                f"{shown_path}: a schema file must be UTF-8, got byte 0x{data[error.start]:02x} "
                f"at offset {error.start}",
                hint="save the file as UTF-8",
            ) from error
        try:
            # A file name need not be UTF-8; what we keep of it must be.
            return cls.parse(text, name=path.stem.encode("utf-8", "replace").decode("utf-8"))
        except SchemaError as error:
            raise SchemaError(f"{shown_path}: {error.message}", hint=error.hint) from error

    @cached_property
    def canonical(self) -> str:
        """The schema as minimal JSON in the native form: one text per meaning.

        Order of fields and choices is kept, since it changes answers; the name is left out.
        """
        document = {each.name: _canonical_field(each) for each in self.fields}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def sha256(self) -> str:
        """Lower-case hex SHA-256 of the UTF-8 bytes of `canonical`."""
        return hashlib.sha256(self.canonical.encode("utf-8")).hexdigest()

    def in_order(self, order: int, orders: int) -> Self:
        """Return the schema in one of several orders of its choices.

        Order k of K rotates a field of n choices by k * n // K places, so that K orders
        are spread evenly over its rotations; where K is above n they repeat. All fields
        are rotated together. Which orders those are is part of the version of a prompt:
        `prompt_version` must change with this rule.

        Args:
            order: k, from 0. Order 0 is the schema's own.
            orders: K, at least 1.

        Returns:
            A schema with a hash of its own, or this very one when nothing is moved.
        """
        fields = tuple(each.rotated(order * len(each.choices) // orders) for each in self.fields)
        return self if fields == self.fields else replace(self, fields=fields)

    def field(self, name: str) -> Field:
        """Return the field called `name`.

        Raises:
            SchemaError: When there is none.
        """
        for each in self.fields:
            if each.name == name:
                return each
        names = [each.name for each in self.fields]
        raise SchemaError(
            f"the schema has no field {quoted(name)}",
            hint=suggestion(name, names, "its fields are"),
        )


def _check_choices(where: str, kind: FieldKind, choices: tuple[object, ...]) -> None:
    if kind == FieldKind.BOOLEAN:
        # `is`, because 0 and 1 equal the booleans.
        native = all(choice is True or choice is False for choice in choices)
        if not native or not choices or len(set(choices)) != len(choices):
            raise SchemaError(
                f'{where}: "choices" of a boolean must be one or two different native booleans, '
                f"got {quoted(json.dumps(choices, default=repr))[1:-1]}",
                hint='write "choices": [true, false], or leave it out for [false, true]',
            )
        return
    key, least = ("levels", 2) if kind == FieldKind.SCORE else ("choices", 1)
    if not least <= len(choices) <= MAX_CHOICES:
        raise SchemaError(
            f'{where}: "{key}" must hold {least} to {MAX_CHOICES} texts, got {len(choices)}',
            hint="split the field in two" if choices[MAX_CHOICES:] else f"add to {key}",
        )
    for position, choice in enumerate(choices, start=1):
        _check_text(f'{where}: entry {position} of "{key}"', choice)
    _check_distinct(f'{where}: "{key}"', [str(choice) for choice in choices])


def _check_distinct(what: str, texts: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for text in texts:
        normal = unicodedata.normalize("NFC", text)
        first = seen.get(normal)
        if first is not None:
            if first == text:
                rule, came = "different", f"{quoted(text)} came twice"
            else:
                # Escaped, because the two look the same when they are printed.
                rule = "different after Unicode normalisation (NFC)"
                came = f"{json.dumps(first)} and {json.dumps(text)} are the same"
            raise SchemaError(
                f"{what} must be {rule}, {came}",
                hint="remove or rename one of them",
            )
        seen[normal] = text


_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROLS_MULTILINE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def _check_text(what: str, value: object, *, multiline: bool = False) -> None:
    """Refuse what is not text, is blank, or would damage a prompt or a terminal."""
    if not isinstance(value, str):
        raise SchemaError(f"{what} must be text, got {shown(value)}", hint="put it in quotes")
    if not value.strip():
        raise SchemaError(f"{what} must not be blank, got {quoted(value)}", hint="write a text")
    found = (_CONTROLS_MULTILINE if multiline else _CONTROLS).search(value)
    if found:
        lines = "" if multiline else "line breaks, "
        raise SchemaError(
            f"{what} must not hold {lines}control characters or lone surrogates, "
            f"got U+{ord(found[0]):04X} at character {found.start() + 1}",
            hint="remove that character",
        )


def _key(choice: Choice) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)


def _canonical_field(each: Field) -> dict[str, object]:
    return {
        "type": each.kind.value,
        "description": each.description,
        "levels" if each.kind == FieldKind.SCORE else "choices": each.choices,
        **({"choice_descriptions": dict(d)} if (d := each.choice_descriptions) else {}),
        **({"labels": dict(labels)} if (labels := each.labels) else {}),
    }
