"""A schema made ready for one tokenizer: documents in, token rows out.

Everything that does not depend on the document is worked out once, on probe
documents: codes and label paths at the real answer boundary, the number of
control tokens, and the leading tokens that all documents share.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import (
    ChoicePlan,
    Encoding,
    code_names,
    plan_codes,
    plan_labels,
)
from weighbridge.scorer.errors import CheckpointError, DocumentError
from weighbridge.scorer.prior import reference_texts
from weighbridge.scorer.prompt_tokens import PromptTokens, common_ending
from weighbridge.scorer.prompts import Layout, PromptText
from weighbridge.scorer.rows import Row, common_prefix
from weighbridge.scorer.schema import Field, Schema

_PROBES = ("x", "1 y")


@dataclass(frozen=True, slots=True)
class Prompted:
    """A document as token rows.

    Attributes:
        rows: All rows of all fields, field by field.
        input_tokens: Tokens of the longest row.
        resident_tokens: Leading tokens that it shares with other documents.
        seconds: What making the rows took.
    """

    rows: tuple[Row, ...]
    input_tokens: int
    resident_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A stretch of a prompt: its exact text, and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The prompt of one field, up to the answer boundary, in three parts.

    Attributes:
        resident: What other documents share and is computed once for all of them.
        document: The document, and what its tokens have merged with.
        suffix: What stands behind every document, and asks for the field.
    """

    resident: PromptPart
    document: PromptPart
    suffix: PromptPart

    @property
    def text(self) -> str:
        """The exact text of the prompt."""
        return self.resident.text + self.document.text + self.suffix.text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the rows of the field begin with."""
        return self.resident.tokens + self.document.tokens + self.suffix.tokens


class SchemaPlan:
    """The rows of a schema on one tokenizer, in one layout and encoding.

    Args:
        chat: Tokenizer and chat template of the checkpoint.
        schema: The questions.
        layout: What stands first.
        encoding: What the model is asked to say.
        system: System text of a trained contract, None for ours.
        max_input_tokens: Most tokens a row may have: document, schema, field.

    Raises:
        CheckpointError: A code is not one ordinary token at the answer boundary.
        SchemaError: Two labels are the same tokens.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        schema: Schema,
        *,
        layout: Layout,
        encoding: Encoding,
        system: str | None,
        max_input_tokens: int,
    ) -> None:
        self.schema = schema
        self.max_input_tokens = max_input_tokens
        self._chat = chat
        self._encoding = encoding
        widest = max(len(field.choices) for field in schema.fields)
        codes = code_names(widest, chat.vocabulary) if encoding is Encoding.CODES else ()
        self._text = PromptText(chat, schema, layout, encoding, codes, system)
        probes = [[self.prompt(probe, field) for field in schema.fields] for probe in _PROBES]
        self._probes = [[chat.encode(prompt) for prompt in prompts] for prompts in probes]
        self._check_boundary()
        self._tokens = PromptTokens(chat, probes)
        self._controls = [chat.control_count(probe) for probe in self._probes[0]]
        self.choices = tuple(
            self._plan_field(field, codes, probe)
            for field, probe in zip(schema.fields, self._probes[0], strict=True)
        )

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """The leading tokens that the rows of nearly all documents share."""
        probes = [row for probe in self._probes for row in probe]
        return probes[0][: common_prefix(probes)]

    def prompt(self, text: str, field: Field) -> str:
        """Return the exact prompt text of one field, up to the answer boundary."""
        return self._text.prompt(self._text.document(text), field)

    def rows(self, text: str) -> Prompted:
        """Turn a document into token rows.

        Args:
            text: The document.

        Raises:
            DocumentError: The document is empty, is not encodable, makes
                control tokens, or is too long; nothing is ever cut.
        """
        prompted = self._rows(text)
        if prompted.input_tokens > self.max_input_tokens:
            raise DocumentError(
                f"a prompt must have at most {self.max_input_tokens} tokens, "
                f"got {prompted.input_tokens} (document, schema and field together); "
                "raise the limit or split the document",
                code="document.too_long",
            )
        return prompted

    def input_tokens(self, text: str) -> int:
        """Count the tokens of a document's longest row, whatever the limit.

        Raises:
            DocumentError: As `rows`, but not for its length.
        """
        return self._rows(text).input_tokens

    def token_text(self, token: int) -> str:
        """Return the text of one token; of a part of a character, a replacement character."""
        return self._chat.token_text(token)

    def suffix_tokens(self, field: Field) -> int:
        """Count the tokens that stand behind every document and ask for one field."""
        first, second = self._probes_of(field)
        return common_ending(first, second)

    def parts(self, text: str, field: Field) -> PromptParts:
        """Show the prompt of one field as it is scored, cut into its parts.

        Args:
            text: A document that `rows` accepts.
            field: The field, one of the schema's.

        Raises:
            CheckpointError: The tokenizer does not tell where a token ends in the text.
        """
        prompt = self.prompt(text, field)
        tokens = self._chat.encode(prompt)
        # What is the same for all documents is cut where it is in the prompt of a probe: a
        # document may hold bytes without a token, behind which a tokenizer loses count.
        probe = self.prompt(_PROBES[0], field)
        probed, ends = self._chat.encode_with_ends(probe)
        shared = tokens[: len(self.resident)] == self.resident
        resident = len(self.resident) if shared else 0
        same = min(self.suffix_tokens(field), common_ending(tokens, probed), len(tokens) - resident)
        first = ends[resident - 1] if resident else 0
        last = len(prompt) - len(probe) + ends[len(probed) - same - 1]
        return PromptParts(
            PromptPart(prompt[:first], tokens[:resident]),
            PromptPart(prompt[first:last], tokens[resident : len(tokens) - same]),
            PromptPart(prompt[last:], tokens[len(tokens) - same :]),
        )

    def reference_rows(self) -> list[Prompted]:
        """Return the rows of the texts that measure the label prior; none in `codes`.

        Not held to the limit of documents: the prior belongs to the key of a
        decision, and the limit does not.
        """
        if self._encoding is Encoding.CODES:
            return []
        references: list[Prompted] = []
        for text in reference_texts(self.schema):
            with suppress(DocumentError):
                references.append(self._rows(text))
        return references

    def _rows(self, text: str) -> Prompted:
        start = time.perf_counter()
        check_text(text)
        document = self._text.document(text)
        rows: list[Row] = []
        longest, shared = 0, True
        for number, (field, choices) in enumerate(
            zip(self.schema.fields, self.choices, strict=True)
        ):
            prompt = self._tokens.encode(number, self._text.prompt(document, field))
            longest = max(longest, len(prompt) + choices.longest_path)
            self._chat.check_control_count(prompt, self._controls[number])
            # A document may merge with the text before it, and then shares less.
            if choices.branchings and prompt[: len(self.resident)] != self.resident:
                shared = False
            rows.extend(
                Row(prompt + branching.path, branching.candidates)
                for branching in choices.branchings
            )
        resident = len(self.resident) if shared else 0
        return Prompted(tuple(rows), longest, resident, time.perf_counter() - start)

    def choice_logits(self, rows: list[np.ndarray]) -> list[tuple[float, ...]]:
        """Return the logits of every field's choices from the logits of all rows."""
        result: list[tuple[float, ...]] = []
        first = 0
        for choices in self.choices:
            last = first + len(choices.branchings)
            result.append(choices.logits(rows[first:last]))
            first = last
        return result

    def _probes_of(self, field: Field) -> tuple[tuple[int, ...], tuple[int, ...]]:
        at = self.schema.fields.index(field)
        first, second = self._probes
        return first[at], second[at]

    def _check_boundary(self) -> None:
        """Require a control token between document and answer.

        Text behind a control token is tokenized apart from text before it, so
        what is planned on the probes holds for every document.
        """
        for first, second in zip(*self._probes, strict=True):
            if first == second:
                raise CheckpointError(
                    "a chat template must show the text of the user, got the same prompt for two "
                    "documents",
                    hint="use a template that takes the content of a message as plain text",
                )
            ending = common_ending(first, second)
            if not self._chat.control_count(first[len(first) - ending :]):
                raise CheckpointError(
                    "a chat template must place a control token between the document and the "
                    "answer, got none",
                    hint="use an instruct model with its own chat template",
                )

    def _plan_field(
        self, field: Field, codes: tuple[str, ...], boundary: tuple[int, ...]
    ) -> ChoicePlan:
        prompt, boundary = self._answer_boundary(self.prompt(_PROBES[0], field), boundary)
        if self._encoding is Encoding.CODES:
            used = codes[: len(field.choices)]
            return plan_codes(used, self._code_tokens(field, used, prompt, boundary))
        words = [f" {self._chat.as_data(word)}" for word in field.words]
        paths: list[tuple[int, ...]] = []
        for word in words:
            whole = self._chat.encode(prompt + word)
            if whole[: len(boundary)] != boundary:
                raise CheckpointError(
                    f"the answer lead-in must keep its tokens when a label follows, "
                    f"got a merge across it for label {word!r} of field {field.name!r}",
                    hint="rename the field, or use --encoding codes",
                )
            paths.append(whole[len(boundary) :])
        return plan_labels(field.name, words, paths, self._chat.end_of_turn)

    def _answer_boundary(self, prompt: str, tokens: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Cut a prompt down to what decides how an answer behind it is tokenized.

        A field of 255 choices is planned by encoding 255 answers: behind the last
        few tokens instead of the whole prompt that is some hundred times faster.
        """
        tail = self._chat.tail(prompt)
        short = self._chat.encode(tail)
        sample = self._chat.encode(prompt + "A")
        alike = sample == tokens[: len(tokens) - len(short)] + self._chat.encode(tail + "A")
        # A tokenizer that treats the start of a text in its own way needs the whole prompt.
        return (tail, short) if alike and short else (prompt, tokens)

    def _code_tokens(
        self, field: Field, codes: tuple[str, ...], prompt: str, boundary: tuple[int, ...]
    ) -> list[int]:
        tokens: list[int] = []
        for code in codes:
            whole = self._chat.encode(prompt + code)
            answer = whole[len(boundary) :]
            one = whole[: len(boundary)] == boundary and len(answer) == 1
            if not one or answer[0] in self._chat.control_tokens:
                raise CheckpointError(
                    f"code {code!r} of field {field.name!r} must be exactly one ordinary token "
                    f"at the answer boundary, got {len(answer)} tokens",
                    hint="use --encoding labels with this tokenizer",
                )
            tokens.append(answer[0])
        if len(set(tokens)) != len(tokens):
            raise CheckpointError(
                f"the codes of field {field.name!r} must be distinct tokens, got repeated ones",
                hint="use --encoding labels with this tokenizer",
            )
        return tokens


def check_text(text: str) -> None:
    """Refuse a text that no tokenizer should see.

    Raises:
        DocumentError: `document.empty` or `document.encoding`.
    """
    if not text.strip():
        raise DocumentError(
            "a document must hold text, got an empty or blank one", code="document.empty"
        )
    if "\0" in text:
        raise DocumentError(
            f"a document must hold no NUL, got one at character {text.index(chr(0))}",
            code="document.encoding",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            "a document must be Unicode text, got the lone surrogate "
            f"U+{ord(text[error.start]):04X} at character {error.start}",
            code="document.encoding",
        ) from error
