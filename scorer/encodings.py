"""How a choice becomes tokens, and how token logits become the logits of choices.

`codes`: each choice has a one-token code; its logit is the code's logit.
`labels`: each choice is its literal text on a token trie; its logit is the sum,
along its path, of the log-softmax over the tokens the trie allows next. Equal
to scoring every whole text among the allowed ones, with one row per branching.
What a model prefers before it has read anything is then subtracted (`prior.py`).
"""

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from weighbridge.scorer.errors import CheckpointError, SchemaError

MAX_CODES = 255
_WIDE_CODE = re.compile(r"[A-Z]{2,3}")


class Encoding(StrEnum):
    """What the model is asked to say."""

    CODES = "codes"
    LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Branching:
    """A point of a field's answer where more than one token is allowed.

    Attributes:
        path: Tokens said before it, from the end of the prompt on.
        candidates: The K tokens allowed next.
    """

    path: tuple[int, ...]
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """The branchings of one field, and the way of each choice through them.

    Attributes:
        branchings: One prompt row each. Empty for a field of one choice.
        steps: For each choice its (branching, candidate) indices.
        normalised: Whether logits are log-softmaxed before they are summed.
        codes: The code of each choice, empty in `labels`.
    """

    branchings: tuple[Branching, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    normalised: bool
    codes: tuple[str, ...] = ()

    @property
    def longest_path(self) -> int:
        """Most tokens a row of this field has behind the prompt."""
        return max((len(branching.path) for branching in self.branchings), default=0)

    def logits(self, rows: Sequence[np.ndarray]) -> tuple[float, ...]:
        """Combine the rows of the branchings into one logit per choice.

        Args:
            rows: For each branching its K logits.
        """
        values = [row.astype(np.float64) for row in rows]
        if self.normalised:
            # Not a number stays one, and is for the caller to refuse, without a warning.
            with np.errstate(invalid="ignore"):
                values = [row - np.logaddexp.reduce(row) for row in values]
        return tuple(
            float(sum(values[branching][candidate] for branching, candidate in way))
            for way in self.steps
        )


def plan_codes(codes: Sequence[str], token_ids: Sequence[int]) -> ChoicePlan:
    """Plan a field whose choices have one-token codes.

    Args:
        codes: One code per choice.
        token_ids: The token of each code at the answer boundary.
    """
    return ChoicePlan(
        branchings=(Branching(path=(), candidates=tuple(token_ids)),),
        steps=tuple(((0, index),) for index in range(len(codes))),
        normalised=False,
        codes=tuple(codes),
    )


def plan_labels(
    field: str, labels: Sequence[str], paths: Sequence[tuple[int, ...]], end_of_turn: int
) -> ChoicePlan:
    """Plan a field whose choices are spelled out.

    A label whose tokens begin another label's tokens is closed by the end of
    the turn, so that the two can be told apart.

    Args:
        field: Name of the field, for errors.
        labels: The label of each choice, for errors.
        paths: The tokens of each label behind the answer lead-in.
        end_of_turn: The token that ends an answer.

    Raises:
        SchemaError: Two labels are the same tokens.
    """
    seen: dict[tuple[int, ...], str] = {}
    for label, path in zip(labels, paths, strict=True):
        if path in seen:
            raise SchemaError(
                f"field {field!r}: labels must differ as tokens, "
                f"got {seen[path]!r} and {label!r} with the same tokens",
                hint="reword one of them",
            )
        seen[path] = label
    begun = {path[:length] for path in paths for length in range(len(path))}
    closed = [(*path, end_of_turn) if path in begun else path for path in paths]
    allowed: dict[tuple[int, ...], list[int]] = {}
    for path in closed:
        for length, token in enumerate(path):
            tokens = allowed.setdefault(path[:length], [])
            if token not in tokens:
                tokens.append(token)
    branching_paths = [path for path, tokens in allowed.items() if len(tokens) > 1]
    index = {path: number for number, path in enumerate(branching_paths)}
    return ChoicePlan(
        branchings=tuple(Branching(path, tuple(allowed[path])) for path in branching_paths),
        steps=tuple(
            tuple(
                (index[path[:length]], allowed[path[:length]].index(token))
                for length, token in enumerate(path)
                if path[:length] in index
            )
            for path in closed
        ),
        normalised=True,
    )


def code_names(count: int, vocabulary: Iterable[str]) -> tuple[str, ...]:
    """Return the codes for a schema whose widest field has `count` choices.

    A to Z; above 26 choices also the upper-case strings of two or three letters
    that the vocabulary holds as one token, by length and then by text.

    Raises:
        CheckpointError: The vocabulary does not hold enough such strings.
    """
    letters = tuple(string.ascii_uppercase)
    if count <= len(letters):
        return letters
    wide = sorted(
        {token for token in vocabulary if _WIDE_CODE.fullmatch(token)},
        key=lambda token: (len(token), token),
    )
    codes = (letters + tuple(wide))[:MAX_CODES]
    if count > len(codes):
        raise CheckpointError(
            f"a field of {count} choices needs as many one-token codes, "
            f"got {len(codes)} in this tokenizer",
            hint="use fewer choices, or --encoding labels",
        )
    return codes
