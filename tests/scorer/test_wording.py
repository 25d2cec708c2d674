"""Pins what a prompt says to its version: an unnoticed change would mix old and new answers."""

import hashlib
from typing import Any

import pytest

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.prior import reference_texts
from weighbridge.scorer.prompts import Layout, PromptText, prompt_version

# Version, and the first digits of the hash of all texts. Whoever changes a text raises its
# version in `scorer/prompts.py` and pins both here.
PINNED = {
    (Layout.SCHEMA_FIRST, Encoding.LABELS): ("3.2", "7c6fb3f99ebb4fb5"),
    (Layout.SCHEMA_FIRST, Encoding.CODES): ("3.1", "93acb85fed67bc5f"),
    (Layout.CONTEXT_FIRST, Encoding.LABELS): ("2.2", "ae3a792176036dfe"),
    (Layout.CONTEXT_FIRST, Encoding.CODES): ("2.1", "f87c385c3ca347ca"),
}


def digest(tiny: Any, layout: Layout, encoding: Encoding) -> str:
    schema = tiny.schema()
    codes = "ABCD" if encoding is Encoding.CODES else ""
    made = PromptText(ChatTokenizer(tiny.tokenizer()), schema, layout, encoding, codes, None)
    texts = [made.prompt(made.document("a < b"), field) for field in schema.fields]
    if encoding is Encoding.LABELS:
        texts += reference_texts(schema)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("layout", "encoding"), list(PINNED))
def test_wording_is_pinned_to_its_version(tiny: Any, layout: Layout, encoding: Encoding):
    # Answers of another wording under the same version would be reused as equals.
    assert (prompt_version(layout, encoding), digest(tiny, layout, encoding)) == PINNED[
        layout, encoding
    ]


def test_every_way_of_asking_has_its_own_wording(tiny: Any):
    digests = {digest(tiny, layout, encoding) for layout in Layout for encoding in Encoding}
    # The hash does see layout and encoding.
    assert len(digests) == len(PINNED)
