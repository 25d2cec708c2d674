"""The tokenizers library without transformers around it, where that gives the same tokens."""

from typing import Any

BARE = True
"""Whether the library is asked directly: for measuring what that brings."""


def bare_tokenizer(tokenizer: Any) -> Any | None:
    """Return the library's tokenizer behind one of transformers; None where it is not all.

    transformers turns what it returns into lists of several kinds, with the places of the
    tokens in the text, which takes a quarter of the time.

    Args:
        tokenizer: One of transformers. Its stored truncation and padding are turned off, as
            transformers does itself with each call.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    names = ("encode", "_encode_plus")
    if not issubclass(kind, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in names):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend
