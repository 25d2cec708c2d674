"""The output head, cut down to the rows of the candidates.

The head stays where it is in the model: while candidates are asked for, the module
that projects on the vocabulary gathers and multiplies their rows alone. So whatever a
model does around its head (a cap, a scale, a norm before it) is done by the model's
own code, on K columns instead of V.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from weighbridge.scorer.errors import CheckpointError

ROW_SETS = 32
"""Sets of candidates whose gathered rows are kept."""

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_LINEARS = (nn.Linear, nn.QuantizedLinear)
_PROBE = (1, 2, 3, 4)


@dataclass(slots=True)
class _Asked:
    """What is asked of the head at the moment; `answered` once it was cut for it."""

    last: mx.array
    candidates: tuple[int, ...]
    answered: bool = field(default=False)


class CandidateHead:
    """Runs a text model and reads the logits of candidates only.

    Every module with one row per token of the vocabulary becomes able to answer for
    some rows: `lm_head` as well as tied embeddings, by whatever name.

    Args:
        model: A text model of mlx-lm with evaluated weights.

    Raises:
        CheckpointError: The model does not turn tokens into logits.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._asked: _Asked | None = None
        self._rows: dict[tuple[int, tuple[int, ...]], tuple[mx.array, mx.array | None]] = {}
        self.cut = True
        # Nothing is computed here: the shape of a lazy array is known beforehand.
        self.vocabulary = _width(model)
        modules: list[Any] = [module for _, module in model.named_modules()]
        for module in modules:
            if _is_head(module, self.vocabulary):
                module.__class__ = _able_to_cut(type(module), weakref.ref(self))

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
        if asked.answered:
            logits = logits[:, 0]
        else:
            # A head that is no module of its own, such as a product with a bare array.
            logits = logits[mx.arange(len(last)), asked.last][:, mx.array(candidates)]
        logits = _at_least_float32(logits)
        mx.eval(logits)
        return np.array(logits)

    def advance(self, tokens: mx.array, caches: Sequence[Any]) -> None:
        """Append tokens to caches, without logits; nothing is evaluated yet.

        Args:
            tokens: (1, T).
            caches: One cache per layer.
        """
        # One column at one position, which nobody reads and MLX never computes.
        self._call(tokens, caches, _Asked(mx.array([0]), (0,)))

    def check(self, tolerance: float) -> float:
        """Compare candidate logits with those of the whole head, once, on a short prompt.

        Args:
            tolerance: Above it the head is left whole from now on: slower, and right
                for a model that does more with its head than multiply.

        Returns:
            The largest difference relative to the largest logit; not a number where
            the logits are none, which is for the documents to tell.
        """
        step = max(self.vocabulary // 97, 1)
        candidates = tuple(sorted({(index * step) % self.vocabulary for index in range(8)}))
        prompt, last = mx.array([_PROBE]), [len(_PROBE) - 1]
        whole = self._model(prompt)[0, -1][mx.array(candidates)]
        try:
            own = self.logits(prompt, None, last, candidates)[0]
        except (ValueError, TypeError, AttributeError, RuntimeError, LookupError):
            difference = float("inf")
        else:
            difference = relative_difference(own, np.array(_at_least_float32(whole)))
        self.cut = not difference > tolerance
        return difference

    def _call(self, tokens: mx.array, caches: Sequence[Any] | None, asked: _Asked) -> mx.array:
        self._asked = asked if self.cut else None
        try:
            return self._model(tokens, cache=caches)
        finally:
            self._asked = None

    def project(self, head: Any, hidden: mx.array) -> mx.array | None:
        """Answer for a head what is asked, or None when nothing is.

        Args:
            head: A module with one row per token.
            hidden: Its input, (B, T, D).

        Returns:
            (B, 1, K).
        """
        asked = self._asked
        if asked is None or hidden.ndim != 3:
            return None
        key = (id(head), asked.candidates)
        if key not in self._rows:
            if len(self._rows) >= ROW_SETS:
                self._rows.clear()
            self._rows[key] = candidate_rows(head, asked.candidates)
            mx.eval(self._rows[key])
        rows, bias = self._rows[key]
        asked.answered = True
        picked = hidden[mx.arange(hidden.shape[0]), asked.last]
        logits = picked.astype(rows.dtype) @ rows.T
        return (logits if bias is None else logits + bias)[:, None]


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
        biases = getattr(head, "biases", None)
        rows = mx.dequantize(
            head.weight[index],
            head.scales[index],
            None if biases is None else biases[index],
            group_size=head.group_size,
            bits=head.bits,
            mode=head.mode,
        )
    else:
        rows = head.weight[index]
    bias = head["bias"][index] if "bias" in head else None
    return _at_least_float32(rows), None if bias is None else _at_least_float32(bias)


def relative_difference(found: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference between logits, relative to the largest one."""
    scale = max(float(np.abs(reference).max()), 1.0)
    return float(np.abs(found - reference).max()) / scale


def _at_least_float32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.float64 else array.astype(mx.float32)


def _width(model: Any) -> int:
    try:
        logits = model(mx.array([_PROBE]))
        _, _, width = logits.shape
    except Exception as error:  # what a foreign architecture makes of a plain prompt
        raise CheckpointError(
            "a text model must turn a plain prompt into logits, got "
            f"{type(error).__name__}: {error}",
            hint="this architecture is not supported",
        ) from error
    return int(width)


def _is_head(module: Any, vocabulary: int) -> bool:
    return isinstance(module, _EMBEDDINGS + _LINEARS) and module["weight"].shape[0] == vocabulary


def _able_to_cut(kind: Any, owner: "weakref.ref[CandidateHead]") -> type:
    """Derive a class whose projection answers for candidates while they are asked for."""
    name = "as_linear" if issubclass(kind, _EMBEDDINGS) else "__call__"

    # The owner holds the model: a strong reference here would keep the weights from going.
    def projection(self: Any, x: mx.array) -> mx.array:
        head = owner()
        logits = None if head is None else head.project(self, x)
        return getattr(kind, name)(self, x) if logits is None else logits

    return type(kind.__name__, (kind,), {name: projection})
