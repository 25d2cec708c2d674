r"""The text of a prompt, in two layouts.

`schema-first` is ours: all questions in plain sentences, then the document, then
the requested field. `context-first` is the form the Nimble checkpoints were
trained on: one JSON object of context and schema, then the requested field.

The answer boundary is the end of the prompt: the generation prompt and, in
`labels`, the lead-in `<field name>:` behind it.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from weighbridge.scorer.chat import ChatTokenizer, Message
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.schema import Field, Schema

LAYOUT_VERSIONS = {"schema-first": 3, "context-first": 2}
ENCODING_VERSIONS = {"labels": 2, "codes": 1}
"""Part of the key of a decision: raised with every change of wording, of the lead-in, or of
the reference texts of the label prior. A test pins the texts of each version."""

INSTRUCTIONS = "Read the text and answer the questions."


class Layout(StrEnum):
    """What stands first in the prompt."""

    SCHEMA_FIRST = "schema-first"
    CONTEXT_FIRST = "context-first"


def prompt_version(layout: Layout, encoding: Encoding, permutations: int = 1) -> str:
    """Number the wording of a prompt, as it enters the key of a decision.

    Args:
        layout: What stands first.
        encoding: What the model is asked to say.
        permutations: In how many orders of the choices it is asked.

    Returns:
        Such as `3.2`, or `3.2/4` for four orders: an average is another decision than
        the answer in one order.
    """
    wording = f"{LAYOUT_VERSIONS[layout]}.{ENCODING_VERSIONS[encoding]}"
    return wording if permutations == 1 else f"{wording}/{permutations}"


def spoken(field: Field) -> str:
    """Return the name of a field as words."""
    return field.name.replace("_", " ")


class PromptText:
    """Writes the prompts of a schema for one tokenizer.

    Args:
        chat: Tokenizer and chat template of the checkpoint.
        schema: The questions, all shown in every prompt.
        layout: What stands first.
        encoding: What the model is asked to say.
        codes: Codes by position of a choice, empty in `labels`.
        system: System text of a trained contract, None for ours.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        schema: Schema,
        layout: Layout,
        encoding: Encoding,
        codes: Sequence[str],
        system: str | None,
    ) -> None:
        self._chat = chat
        self._encoding = encoding
        self._codes = tuple(codes)
        self._layout = layout
        self._system = system
        self._questions = (
            "\n".join(self._question(field) for field in schema.fields)
            if layout is Layout.SCHEMA_FIRST
            else chat.as_data(contract_json([self._definition(field) for field in schema.fields]))
        )

    def document(self, text: str) -> str:
        """Prepare a document: whatever looks like control in it becomes plain data."""
        if self._layout is Layout.SCHEMA_FIRST:
            return self._chat.as_data(text)
        # After the JSON: control tokens without `<` get an escape too, still valid JSON.
        return self._chat.as_data(contract_json(text))

    def prompt(self, document: str, field: Field) -> str:
        """Return the prompt of one field up to the answer boundary.

        Args:
            document: A text made ready by `document`.
            field: The requested field, one of the schema's.
        """
        write = self._schema_first if self._layout is Layout.SCHEMA_FIRST else self._context_first
        lead_in = f"{spoken(field)}:" if self._encoding is Encoding.LABELS else ""
        return self._chat.render(write(document, field)) + self._chat.as_data(lead_in)

    def _schema_first(self, document: str, field: Field) -> list[Message]:
        user = f"{INSTRUCTIONS}\n\n{self._questions}\n\nText: {document}\n\n{self._asked(field)}"
        return [{"role": "user", "content": user}]

    def _context_first(self, document: str, field: Field) -> list[Message]:
        user = (
            f'{{"context": {document}, "schema": {self._questions}}}\n\n'
            f"Requested field: {self._chat.as_data(contract_json(field.name))}"
        )
        return [
            {"role": "system", "content": self._system or INSTRUCTIONS},
            {"role": "user", "content": user},
        ]

    def _question(self, field: Field) -> str:
        """Put a field in plain sentences: the question, its description, the choices."""
        options: list[str] = []
        for position, (key, word) in enumerate(zip(field.keys, field.words, strict=True)):
            code = f"{self._codes[position]} = " if self._codes else ""
            meaning = field.choice_descriptions.get(key)
            options.append(f"{code}{word} ({meaning})" if meaning else f"{code}{word}")
        choices = self._chat.as_data(f"{field.description} It can be {_or(options)}.")
        return f"{self._asked(field)} {choices}"

    def _asked(self, field: Field) -> str:
        return self._chat.as_data(f"What is the {spoken(field)} of the text?")

    def _definition(self, field: Field) -> dict[str, Any]:
        """Describe a field as the trained contract does."""
        choices: list[dict[str, Any]] = []
        for position, (key, choice) in enumerate(zip(field.keys, field.choices, strict=True)):
            shown: dict[str, Any] = {"code": self._codes[position]} if self._codes else {}
            # What `labels` spells out must be what was shown.
            shown["value"] = choice if self._codes else field.words[position]
            if key in field.choice_descriptions:
                shown["description"] = field.choice_descriptions[key]
            choices.append(shown)
        return {"name": field.name, "description": field.description, "choices": choices}


def _or(options: Sequence[str]) -> str:
    """Join options as a sentence does."""
    return " or ".join(filter(None, (", ".join(options[:-1]), options[-1])))


def contract_json(value: object) -> str:
    """Write JSON as the trained contract does: no `<` or `>`, so no control tokens."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e")
