"""The output head, reduced to the rows of the candidates."""

from typing import Any

import mlx.core as mx
from mlx import nn

from weighbridge.scorer.errors import CheckpointError


def head_module(model: Any) -> nn.Module:
    """Return the module whose rows project hidden states on the vocabulary.

    Raises:
        CheckpointError: The model has neither `lm_head` nor tied embeddings.
    """
    head = getattr(model, "lm_head", None)
    if head is not None:
        return head
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if embedding is None:
        raise CheckpointError(
            "a checkpoint must have an output head (lm_head or tied embeddings), "
            f"got {type(model).__module__}.{type(model).__name__}",
            hint="weighbridge checkpoint info FOLDER shows the architecture",
        )
    return embedding


def vocabulary_size(model: Any) -> int:
    """Return V, the number of tokens the head projects on."""
    weight: Any = head_module(model)["weight"]
    return int(weight.shape[0])


def candidate_rows(model: Any, token_ids: tuple[int, ...]) -> mx.array:
    """Gather the head rows of the candidates.

    Args:
        model: A text model of mlx-lm.
        token_ids: K candidate tokens.

    Returns:
        (K, D), float32, or float64 where the head is float64.

    Raises:
        CheckpointError: The head has a bias or a form whose rows cannot be
            gathered exactly.
    """
    head = head_module(model)
    if "bias" in head:
        raise CheckpointError(
            "an output head must have no bias: scoring by candidate rows would drop it",
            hint="this architecture is not supported",
        )
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
    elif isinstance(head, nn.Linear | nn.Embedding):
        rows = head.weight[index]
    else:
        raise CheckpointError(
            f"an output head must be linear, got {type(head).__name__}",
            hint="this architecture is not supported",
        )
    return rows if rows.dtype == mx.float64 else rows.astype(mx.float32)


def candidate_logits(hidden: mx.array, rows: mx.array) -> mx.array:
    """Project final hidden states on the candidate rows of the head.

    Equals the full vocabulary projection followed by a gather, without the
    other V - K columns. Accumulated in float32 also for 16-bit weights, so it
    need not be bitwise equal to a 16-bit head. Not normalised.

    Args:
        hidden: Final hidden states, (B, D), any float dtype.
        rows: Head rows of the candidates, (K, D), float32 or float64.

    Returns:
        (B, K) logits in the dtype of `rows`; column k belongs to candidate k.
    """
    return hidden.astype(rows.dtype) @ rows.T
