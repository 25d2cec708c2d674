"""A head of its own for a model that reads its embeddings backwards.

PEFT adapts the embeddings and the head of such a model apart, so after fusing they are two
matrices. Call everything here on the MLX thread.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantized import is_packed

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
LINEARS = (nn.Linear, nn.QuantizedLinear)
"""Modules with a row for each token, or for each output."""

_FLAG = "tie_word_embeddings"
_PROMPT = (1, 2, 3, 4)


def head_is_tied(modules: Mapping[str, Any]) -> bool:
    """Whether the only matrix with a row for each token is that of the embeddings.

    Args:
        modules: Modules of a model by their paths.
    """
    rows = {each.weight.shape[0] for each in modules.values() if isinstance(each, EMBEDDINGS)}
    heads = [
        path
        for path, each in modules.items()
        if isinstance(each, LINEARS)
        and each.weight.shape[0] in rows
        # Within layers it is chance that a size is that of the vocabulary.
        and not any(part.isdigit() for part in path.split("."))
    ]
    return bool(rows) and not heads


def untie_head(model: Any) -> None:
    """Give a model with tied embeddings a head of the same weights.

    No number is copied: both hold the same arrays until one of them changes.

    Args:
        model: A model of mlx-lm whose head is tied.

    Raises:
        CheckpointError: Its architecture cannot be told to use a head of its own.
    """
    before = _logits(model)
    modules = dict(model.named_modules())
    embeddings = [each for each in modules.values() if isinstance(each, EMBEDDINGS)]
    owners = [path for path, module in modules.items() if _claims_tied(module)]
    if len(embeddings) != 1 or not owners:
        raise _impossible()
    for path in owners:
        module = modules[path]
        if getattr(module, _FLAG, False):
            setattr(module, _FLAG, False)
        if getattr(getattr(module, "args", None), _FLAG, False):
            setattr(module.args, _FLAG, False)
    # The outermost one turns hidden states into logits.
    owner = modules[min(owners, key=lambda path: path.count(".") + bool(path))]
    owner.lm_head = head = _head(embeddings[0])
    try:
        same = bool(mx.array_equal(_logits(model), before).item())
        scales = head.weight if not is_packed(head) else head.scales
        name = "weight" if not is_packed(head) else "scales"
        head[name] = mx.zeros_like(scales)
        used = not bool(mx.array_equal(_logits(model), before).item())
        head[name] = scales
    except Exception as error:  # what a foreign architecture makes of a head it does not know
        raise _impossible() from error
    # Either alone could be chance: a head that nobody asks leaves the logits as they were.
    if not same or not used:
        raise _impossible()


def _claims_tied(module: Any) -> bool:
    return bool(
        getattr(module, _FLAG, False) or getattr(getattr(module, "args", None), _FLAG, False)
    )


def _head(embedding: Any) -> Any:
    """Make a linear module around the arrays of an embedding."""
    if is_packed(embedding):
        group, bits, mode = embedding.group_size, embedding.bits, embedding.mode
        head: Any = nn.QuantizedLinear(group, 1, bias=False, group_size=group, bits=bits, mode=mode)
        for name in ("weight", "scales", "biases"):
            if name in embedding:
                head[name] = embedding[name]
        return head
    head = nn.Linear(1, 1, bias=False)
    head.weight = embedding.weight
    return head


def _logits(model: Any) -> mx.array:
    logits = model(mx.array([_PROMPT]))
    mx.eval(logits)
    return logits


def _impossible() -> CheckpointError:
    return CheckpointError(
        "a PEFT adapter on tied embeddings changes them or the head alone, and this "
        "architecture cannot hold the two apart",
        hint="train the adapter with ensure_weight_tying, or without embed_tokens and lm_head",
    )
