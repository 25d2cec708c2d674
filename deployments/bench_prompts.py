"""Prompts as tokens, cut from a text: as long as real ones, and as much alike."""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from weighbridge.deployments.bench import Document

if TYPE_CHECKING:
    from weighbridge.scorer.rows import Row

SUFFIXES = (9, 11, 8, 12, 10, 9, 14, 8)
"""Tokens behind the shared prefix, by field: its name, and the end of a chat prompt."""


CHOICES = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """How long the prompts of a schema are around a document, in tokens.

    Attributes:
        before: Before the document.
        behind: Behind it, shared by all fields.
    """

    before: int
    behind: int


CONTEXT_FIRST = {3: Prompt(before=6, behind=317), 8: Prompt(before=6, behind=792)}
"""Prompts of the trained contract by number of fields, measured on the sample schemas triage
and incident, with codes and the tokenizer of the embedded checkpoint. The system text of a
trained checkpoint is some hundred tokens longer than ours, which these begin with."""

SCHEMA_FIRST = {3: Prompt(before=212, behind=5), 8: Prompt(before=501, behind=5)}
"""The same schemas in our own layout: the same questions, in fewer words."""


def prompts(source: tuple[int, ...], fields: int, shared: int) -> "tuple[Row, ...]":
    """Cut prompts from a text: a beginning of `shared` tokens, and a suffix for each field."""
    from weighbridge.scorer.rows import Row

    prefix = tuple(islice(cycle(source), shared))
    rest = source[shared % len(source) :] + source[: shared % len(source)]
    starts: dict[int, int] = {}
    for index, token in enumerate(rest[: -max(SUFFIXES)]):
        starts.setdefault(token, index)  # suffixes must part at their first token
    lengths = islice(cycle(SUFFIXES), fields)
    return tuple(
        Row((*prefix, *rest[start : start + length]), tuple(starts)[:CHOICES])
        for start, length in zip(starts.values(), lengths, strict=False)
    )


def documents_around(
    source: tuple[int, ...], fields: int, prompt: Prompt, tokens: int, count: int
) -> list[Document]:
    """Make documents of some tokens, whose prompts differ in nothing but the document."""
    from weighbridge.scorer.rows import Row

    rows = prompts(source, fields, prompt.before + tokens + prompt.behind)
    made: list[Document] = []
    for number in range(count):
        # Each document is another stretch of the text.
        begin = (number + 1) * 131 % len(source)
        text = tuple(islice(cycle(source), begin, begin + tokens))
        made.append(
            Document(
                tuple(
                    Row(
                        (
                            *row.tokens[: prompt.before],
                            *text,
                            *row.tokens[prompt.before + tokens :],
                        ),
                        row.candidates,
                    )
                    for row in rows
                ),
                # A few tokens are not worth keeping.
                prompt.before if prompt.before > prompt.behind else 0,
            )
        )
    return made


def branchings(rows: "tuple[Row, ...]") -> "tuple[Row, ...]":
    """Let each row ask for the next token behind two of its candidates, too.

    So do labels of several tokens: a field's question, and behind it what can follow.
    """
    from weighbridge.scorer.rows import Row

    return tuple(
        Row((*row.tokens, *behind), row.candidates)
        for row in rows
        for behind in ((), row.candidates[:1], row.candidates[1:2])
    )
