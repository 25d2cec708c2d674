"""The output head, cut down to the rows of the candidates.

The head stays where it is in the model: while candidates are asked for, the module
that projects on the vocabulary gathers and multiplies their rows alone. So whatever a
model does around its head (a cap, a scale, a norm before it) is done by the model's
own code, on K columns instead of V.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantized import plain_weight
from weighbridge.scorer.untying import EMBEDDINGS, LINEARS

ROWS_LIMIT_BYTES = 64 * 2**20
"""What the gathered rows of all sets of candidates may hold together."""

_FIRST_LOOK = (1, 2, 3, 4)
_FOREIGN = (CheckpointError, ValueError, TypeError, AttributeError, RuntimeError, LookupError)


class HeadCut(StrEnum):
    """How much of the head is computed."""

    COLUMNS = "columns"
    """One position of each row, the candidates' columns."""
    POSITIONS = "positions"
    """One position of each row, all of the vocabulary."""
    ALL_POSITIONS = "all positions"
    """All positions, the candidates' columns: a bare product with tied embeddings."""
    NONE = "none"
    """All positions, all of the vocabulary."""


@dataclass(slots=True)
class _Asked:
    """What is asked of the head at the moment; `answered` once it was cut for it."""

    last: mx.array
    candidates: tuple[int, ...]
    answered: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """Gathered rows, and the head they are from: an id alone could be given out again."""

    head: Any
    weight: mx.array
    bias: mx.array | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class CandidateHead:
    """Runs a text model and reads the logits of candidates only.

    Every module with one row per token of the vocabulary becomes able to answer for
    some rows: `lm_head` as well as tied embeddings, by whatever name. A model has one
    such reader, the latest, and its weights must not change afterwards.

    Args:
        model: A text model of mlx-lm with evaluated weights.

    Raises:
        CheckpointError: The model does not turn tokens into logits.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._asked: _Asked | None = None
        self._rows: OrderedDict[tuple[int, tuple[int, ...]], _Rows] = OrderedDict()
        self.cut = HeadCut.COLUMNS
        # Nothing is computed here: the shape of a lazy array is known beforehand.
        self.vocabulary = _width(model)
        modules: list[Any] = [module for _, module in model.named_modules()]
        for module in modules:
            if _is_head(module, self.vocabulary):
                module.__class__ = _able_to_cut(type(module), weakref.ref(self))
        self._by_token = _holds_token_ids(model)

    def logits(
        self,
        tokens: mx.array,
        caches: Sequence[Any] | None,
        last: list[int],
        candidates: tuple[int, ...],
    ) -> np.ndarray:
        """Run the model and return the logits of candidates at one position per row.

        Args:
            tokens: (B, T).
            caches: One cache per layer, None for none.
            last: For each row the position to read, B of them.
            candidates: K tokens, the same for all rows.

        Returns:
            (B, K), float32, or float64 for float64 weights. Accumulated in float32
            also for 16-bit weights, so it need not be bitwise equal to a 16-bit head.
        """
        asked = _Asked(mx.array(last), candidates)
        logits = self._call(tokens, caches, asked)
        columns = asked.answered and self.cut is not HeadCut.POSITIONS
        picked = asked.answered and self.cut is not HeadCut.ALL_POSITIONS
        expected = (
            len(last),
            1 if picked else tokens.shape[1],
            len(candidates) if columns else self.vocabulary,
        )
        if logits.shape != expected:
            raise CheckpointError(
                f"the logits of a model must be of shape {expected}, got {logits.shape}",
                hint="this architecture is not supported",
            )
        logits = logits[:, 0] if picked else logits[mx.arange(len(last)), asked.last]
        logits = at_least_float32(logits if columns else logits[:, mx.array(candidates)])
        mx.eval(logits)
        return np.array(logits)

    def advance(self, tokens: mx.array, caches: Sequence[Any]) -> None:
        """Append tokens to caches, without logits; nothing is evaluated yet.

        Args:
            tokens: (B, T).
            caches: One cache per layer.
        """
        # One column at one position, which nobody reads and MLX never computes.
        self._call(tokens, caches, _Asked(mx.array([0]), (0,)))

    def check(self, tolerance: float) -> HeadCut:
        """Find out how far this head can be cut, against the whole one on a short prompt.

        Candidates from all over the vocabulary, at the end and in the middle. What
        differs is left less cut: slower, and right for a model that does more with its
        head than multiply.

        Args:
            tolerance: Largest difference, relative to the spread of the logits.

        Returns:
            How it is computed from now on.

        Raises:
            CheckpointError: The logits are not finite, or differ even uncut.
        """
        spread = sorted({index * (self.vocabulary - 1) // 7 for index in range(8)})
        # Neither the first nor the last column where it stands in the whole vocabulary.
        prompt = (*spread[3:], *spread[:3])
        last = [len(prompt) - 1, len(prompt) // 2]
        tokens = mx.array([prompt, prompt])
        whole = at_least_float32(self._model(tokens)[mx.arange(2), mx.array(last)])
        reference = np.array(whole[:, mx.array(prompt)])
        # Minus infinity is how a model forbids tokens that its vocabulary does not use.
        used = np.flatnonzero(~np.isneginf(reference).all(axis=0)).tolist()
        candidates = tuple(prompt[column] for column in used)
        reference = reference[:, used]
        if not candidates or not np.isfinite(reference).all():
            raise CheckpointError(
                "the logits of a plain prompt must be finite numbers, got some that are not",
                hint="the weights are damaged, or too large for the compute dtype",
            )
        for cut in HeadCut:
            if self._by_token and cut in {HeadCut.COLUMNS, HeadCut.ALL_POSITIONS}:
                continue
            self.cut = cut
            try:
                own = self.logits(tokens, None, last, candidates)
            except _FOREIGN:
                continue
            answered = cut is HeadCut.NONE or self._is_cut(tokens)
            if answered and relative_difference(own, reference) <= tolerance:
                return cut
        raise CheckpointError(
            "a model must give the same logits for the same prompt, got different ones",
            hint="this architecture is not supported",
        )

    def project(
        self, head: Any, hidden: mx.array, whole: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Project hidden states on what is asked for, or on all when nothing is.

        Args:
            head: A module with one row per token.
            hidden: Its input, (B, T, D).
            whole: Its own projection.

        Returns:
            (B, 1, K), (B, 1, V) or (B, T, V), by what is asked and how far it is cut.
        """
        asked = self._asked
        if (
            asked is None
            or self.cut is HeadCut.ALL_POSITIONS
            or hidden.ndim != 3
            or hidden.shape[0] != asked.last.size
        ):
            return whole(hidden)
        asked.answered = True
        picked = hidden[mx.arange(hidden.shape[0]), asked.last]
        if self.cut is HeadCut.POSITIONS:
            return whole(picked[:, None])
        rows = self._gathered(head, asked.candidates)
        logits = picked.astype(rows.weight.dtype) @ rows.weight.T
        return (logits if rows.bias is None else logits + rows.bias)[:, None]

    def factor(self, head: Any, whole: mx.array) -> mx.array:
        """Return what a model multiplies by that takes the weights of its head itself.

        Args:
            head: An embedding module.
            whole: Its weights, (V, D).

        Returns:
            The rows of the candidates, (K, D), while they are asked for in this way.
        """
        if self._asked is None or self.cut is not HeadCut.ALL_POSITIONS:
            return whole
        self._asked.answered = True
        return self._gathered(head, self._asked.candidates).weight

    def look_up(self, own: Callable[[], mx.array]) -> mx.array:
        """Embed tokens, for which the weights must be whole."""
        asked, self._asked = self._asked, None
        try:
            return own()
        finally:
            self._asked = asked

    def _call(self, tokens: mx.array, caches: Sequence[Any] | None, asked: _Asked) -> mx.array:
        self._asked = None if self.cut is HeadCut.NONE else asked
        try:
            return self._model(tokens, cache=caches)
        finally:
            self._asked = None

    def _is_cut(self, tokens: mx.array) -> bool:
        """Whether any head answers at all: a product with a bare array does not."""
        asked = _Asked(mx.array([0] * tokens.shape[0]), (0,))
        self._call(tokens, None, asked)
        return asked.answered

    def _gathered(self, head: Any, candidates: tuple[int, ...]) -> _Rows:
        key = (id(head), candidates)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = _Rows(head, *candidate_rows(head, candidates))
            mx.eval(rows.weight, *([] if rows.bias is None else [rows.bias]))
            while len(self._rows) > 1 and self.rows_nbytes > ROWS_LIMIT_BYTES:
                self._rows.popitem(last=False)
        self._rows.move_to_end(key)
        return rows

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all gathered rows."""
        return sum(rows.nbytes for rows in self._rows.values())


def candidate_rows(head: Any, token_ids: tuple[int, ...]) -> tuple[mx.array, mx.array | None]:
    """Gather the rows of the candidates from a head.

    Args:
        head: A linear or embedding module, quantized or not.
        token_ids: K candidate tokens.

    Returns:
        The rows (K, D) and their bias (K,) if the head has one, float32, or float64
        where the head is float64.
    """
    index = mx.array(token_ids)
    if isinstance(head, nn.QuantizedLinear | nn.QuantizedEmbedding):
        rows = plain_weight(head, index)
    else:
        # Not as an attribute: that may be answered by these very rows.
        rows = head["weight"][index]
    bias = head["bias"][index] if "bias" in head else None
    return at_least_float32(rows), None if bias is None else at_least_float32(bias)


def relative_difference(found: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference between logits, relative to the spread of them.

    Softmax sees differences of logits only, so their spread is what an error counts
    against; equal logits are compared as they are.
    """
    spread = float(np.ptp(reference)) or max(float(np.abs(reference).max()), 1.0)
    return float(np.abs(found - reference).max()) / spread


def at_least_float32(array: mx.array) -> mx.array:
    """Return logits or weights in float32, or in float64 where they are."""
    return array if array.dtype == mx.float64 else array.astype(mx.float32)


def _width(model: Any) -> int:
    try:
        logits = model(mx.array([_FIRST_LOOK]))
        rows, tokens, width = logits.shape
    except Exception as error:  # what a foreign architecture makes of a plain prompt
        raise CheckpointError(
            "a text model must turn a plain prompt into logits, got "
            f"{type(error).__name__}: {error}",
            hint="this architecture is not supported",
        ) from error
    if (rows, tokens) != (1, len(_FIRST_LOOK)):
        raise CheckpointError(
            f"a text model must give logits for each of {len(_FIRST_LOOK)} tokens, "
            f"got the shape {logits.shape}",
            hint="this architecture is not supported",
        )
    return int(width)


def _is_head(module: Any, vocabulary: int) -> bool:
    return isinstance(module, EMBEDDINGS + LINEARS) and module["weight"].shape[0] == vocabulary


def _holds_token_ids(model: Any) -> bool:
    """Whether a model holds whole numbers outside its layers and its packed weights.

    They are ids of tokens, and Phi 3 small writes to the logits by them. Logits of K columns
    would be written to behind their end, where MLX checks nothing: not even to be tried.
    """
    for path, module in model.named_modules():
        layer = any(part.isdigit() for part in path.split("."))
        if layer or isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        for value in module.values():
            if isinstance(value, mx.array) and not mx.issubdtype(value.dtype, mx.floating):
                return True
    return False


def _able_to_cut(kind: Any, owner: "weakref.ref[CandidateHead]") -> type:
    """Derive a class whose projection answers for candidates while they are asked for."""
    plain: Any = getattr(kind, "uncut", kind)
    name = "as_linear" if issubclass(plain, EMBEDDINGS) else "__call__"

    # The owner holds the model: a strong reference here would keep the weights from going.
    def projection(self: Any, x: mx.array) -> mx.array:
        def whole(hidden: mx.array) -> mx.array:
            return getattr(plain, name)(self, hidden)

        head = owner()
        return whole(x) if head is None else head.project(self, x, whole)

    members: dict[str, Any] = {name: projection, "uncut": plain}
    if issubclass(plain, nn.Embedding):

        def weight(self: Any) -> mx.array:
            head = owner()
            return self["weight"] if head is None else head.factor(self, self["weight"])

        def look_up(self: Any, x: mx.array) -> mx.array:
            head = owner()
            return (
                plain.__call__(self, x)
                if head is None
                else head.look_up(lambda: plain.__call__(self, x))
            )

        members |= {"weight": property(weight), "__call__": look_up}
    return type(plain.__name__, (plain,), members)
