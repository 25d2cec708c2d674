"""The gated delta rule in chunks, where mlx-lm would run it token by token.

Without Metal, `mlx_lm.models.gated_delta` computes the recurrence of Qwen3.5, Qwen3-Next
and OLMo Hybrid in a Python loop over tokens (mlx-lm 0.32). The chunked form does the work of
up to `CHUNK` tokens with a few matrix products, and has the same result up to float32
rounding. `install` puts it in the place of that one function of mlx-lm; nothing else changes.

It is for computing logits: MLX has no gradient of `tri_inv`, so uninstall it to train.
"""

import threading
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta as stock

CHUNK = 32
"""Most tokens of a chunk. 16 to 64 differ little, multiples of 16 are best (benchmarks/)."""

ALWAYS_FROM = 8
"""Tokens from which on the chunked form is faster on every shape measured."""

WORTH_IT = 2**18
"""Tokens times elements of the state from which on fewer tokens are worth it too."""

FORGOTTEN = 1e-15
"""Decay below which a token is forgotten: far below float32 rounding. Heads that forget fast
otherwise fill the products with subnormal numbers, which made them two to three times slower."""

_lock = threading.Lock()
_loop: Any = None
"""The function of mlx-lm that was replaced; None when none is."""


def install() -> bool:
    """Let mlx-lm use the chunked form where it pays; do nothing where Metal has kernels.

    Applies to models loaded before and after, on all threads.

    Returns:
        Whether it is in use from now on.
    """
    global _loop  # noqa: PLW0603
    if mx.metal.is_available():
        return False
    with _lock:
        if _loop is None:
            _loop = stock.gated_delta_ops
            stock.gated_delta_ops = _update
    return True


def uninstall() -> None:
    """Give mlx-lm its own function back."""
    global _loop  # noqa: PLW0603
    with _lock:
        if _loop is not None:
            stock.gated_delta_ops = _loop
            _loop = None


def _update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Stand in for `gated_delta_ops`, with its arguments and results."""
    if suits(q, k, v, g, beta, state):
        return chunked(q, k, v, g, beta, state, mask)
    loop = _loop or stock.gated_delta_ops  # uninstalled since this call began
    return loop(q, k, v, g, beta, state, mask)


def suits(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None,
) -> bool:
    """Return whether the chunked form has the loop's result, and sooner.

    Not for a gate per key channel (Kimi Linear: g is 4-D), and not for float64, where modes
    agree to the last digits only while all of them add up in one order. Everything else
    accumulates in float32, as the loop does.
    """
    if g.ndim != 3 or mx.float64 in {each.dtype for each in (q, k, v, g, beta)}:
        return False
    if state is not None and state.dtype != mx.float32:
        return False
    rows, tokens, heads, width = v.shape
    elements = rows * heads * width * k.shape[-1]
    return tokens >= ALWAYS_FROM or tokens * elements >= WORTH_IT


def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """Compute the gated delta rule, S <- g S + beta (v - g S k) kT and y = S q, in chunks.

    The WY form of Yang et al., "Gated Delta Networks" (2024), section 3. Within a chunk of
    tokens 1 to C, with the decay D[i, j] = g[j+1] ... g[i] from after token j to token i:

        A = beta D * (K KT), strictly lower      W = (1 + A)^-1 diag(beta)
        U = W V - W diag(D[:, 0]) K ST           what each token adds along its key
        Y = D[:, 0] * (Q ST) + (D * Q KT) U      and S <- D[C, 0] S + (D[C, :] * U)T K

    Our differences: D is made of running products instead of exponentials of differences of
    logarithms. That is exact where a g is 0, never divides, and a product costs MLX on x86 a
    thirtieth of an exponential. The inverse is LAPACK's: a Neumann series blows up for keys
    that resemble each other. Value heads that share a key head share its products, and the
    chunks of a call are of one length that leaves less than one token each of padding.

    Args:
        q: Queries, (B, T, Hk, Dk), any float dtype up to float32.
        k: Keys, (B, T, Hk, Dk), of length 1 at most.
        v: Values, (B, T, Hv, Dv); Hv is a multiple of Hk.
        g: What the state keeps of itself per token, (B, T, Hv), in [0, 1].
        beta: Strength of writing, (B, T, Hv), in [0, 2].
        state: The state S before, (B, Hv, Dv, Dk); None stands for zeros.
        mask: Which tokens count, (B, T) or (1, T) bool; others leave the state alone, and
            their outputs mean nothing (as in the loop, but they are other numbers).
        chunk: Most tokens of a chunk, C.

    Returns:
        Outputs (B, T, Hv, Dv) in the dtype of q, and the state after, float32.
    """
    rows, tokens, key_heads, key_width = k.shape
    heads, width = v.shape[2:]
    group = heads // key_heads
    if mask is not None:
        g = mx.where(mask[..., None], g, 1.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    count = -(-tokens // chunk)
    size = -(-tokens // count)

    def tiles(x: mx.array, per_head: int, fill: float = 0.0) -> mx.array:
        """(B, T, H, ...) to (chunks, B, Hk, H / Hk, C, ...): a chunk is one block of memory."""
        x = x.astype(mx.float32)
        padding = count * size - tokens
        if padding:
            ends = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
            x = mx.pad(x, ends, constant_values=fill)
        x = x.reshape(rows, count, size, key_heads, per_head, *x.shape[3:])
        return mx.contiguous(x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim)))

    qk = mx.concatenate([tiles(q, 1), tiles(k, 1)], axis=-2)
    k, v = qk[..., size:, :], tiles(v, group)
    g, beta = tiles(g, group, fill=1.0), tiles(beta, group)

    later = mx.tril(mx.ones((size, size), dtype=mx.bool_), -1)
    decay = _floored(mx.cumprod(mx.where(later, g[..., None], 1.0), axis=-2))
    since_start = _floored(mx.cumprod(g, axis=-1))
    until_end = decay[..., -1, :, None]
    products = qk @ k.swapaxes(-1, -2)
    reads = mx.tril(decay * products[..., :size, :])
    system = mx.where(later, beta[..., None] * decay * products[..., size:, :], mx.eye(size))
    # Linear algebra of MLX runs on the CPU only, whatever the default device.
    writes = mx.linalg.tri_inv(system, stream=mx.cpu) * beta[..., None, :]
    writes = mx.where(decay > 0, writes, 0.0)  # entry by entry, it has D as a factor too
    recalls = writes * since_start[..., None, :]
    since_start = since_start[..., None]

    held = (
        mx.zeros((rows, key_heads, group, width, key_width))
        if state is None
        else state.reshape(rows, key_heads, group, width, key_width)
    )
    outputs: list[mx.array] = []
    for n in range(count):
        found = qk[n] @ held.swapaxes(-1, -2)
        added = mx.addmm(writes[n] @ v[n], recalls[n], found[..., size:, :], alpha=-1.0)
        outputs.append(mx.addmm(since_start[n] * found[..., :size, :], reads[n], added))
        kept = since_start[n, ..., -1:, :] * held
        held = mx.addmm(kept, (until_end[n] * added).swapaxes(-1, -2), k[n])
    y = mx.stack(outputs, axis=1).transpose(0, 1, 4, 2, 3, 5)
    y = y.reshape(rows, count * size, heads, width)[:, :tokens]
    return y.astype(q.dtype), held.reshape(rows, heads, width, key_width)


def _floored(decay: mx.array) -> mx.array:
    """Return products of g with 0 for those that leave nothing to be seen."""
    return mx.where(decay < FORGOTTEN, 0.0, decay)
