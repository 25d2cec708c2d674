"""Documents as token rows: prefixes, boundaries, limits."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import CheckpointError, DocumentError, SchemaError
from weighbridge.scorer.plan import SchemaPlan, check_text
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.rows import common_prefix
from weighbridge.scorer.schema import Field, FieldKind, Schema

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1)
COMBINATIONS = [(layout, encoding) for layout in Layout for encoding in Encoding]


def plan(
    chat: ChatTokenizer,
    schema: Schema,
    layout: Layout = Layout.SCHEMA_FIRST,
    encoding: Encoding = Encoding.LABELS,
    limit: int = 4096,
) -> SchemaPlan:
    return SchemaPlan(
        chat, schema, layout=layout, encoding=encoding, system=None, max_input_tokens=limit
    )


@pytest.fixture(scope="module")
def chat(embedded) -> ChatTokenizer:
    return ChatTokenizer.load(embedded)


@pytest.fixture(scope="module")
def tiny_chat(tiny) -> ChatTokenizer:
    return ChatTokenizer(tiny.tokenizer())


# --- the common prefix ---


@given(ROWS)
def test_common_prefix_is_the_longest_that_leaves_each_row_a_token(rows):
    length = common_prefix(rows)
    # Shared by all, and nobody is left without a token to read the answer from.
    assert {row[:length] for row in rows} == {rows[0][:length]}
    assert all(len(row) > length for row in rows)
    # One more would either differ somewhere or use up the shortest row.
    longer = {row[: length + 1] for row in rows}
    assert len(longer) > 1 or min(map(len, rows)) == length + 1


@given(ROWS, st.randoms(use_true_random=False))
def test_common_prefix_ignores_order_and_repeats(rows, random):
    again = [*rows, random.choice(rows)]
    random.shuffle(again)
    # It is a property of the set of rows.
    assert common_prefix(again) == common_prefix(rows)


def test_common_prefix_by_hand():
    # Differs at position 2; stops before the last token; a row alone keeps one.
    assert common_prefix([(1, 2, 3, 4), (1, 2, 5, 4)]) == 2
    assert common_prefix([(1, 2), (1, 2, 3)]) == 1
    assert common_prefix([(1, 2, 3)]) == 2
    assert common_prefix([(1,)]) == 0


@given(st.text(max_size=60).filter(lambda text: bool(text.strip()) and "\0" not in text))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize(("layout", "encoding"), COMBINATIONS)
def test_prefix_and_suffix_are_the_exact_prompt(real_plans, layout, encoding, text):
    made, chat = real_plans[layout, encoding]
    try:
        prompted = made.rows(text)
    except DocumentError:
        return
    whole = [
        chat.encode(made.prompt(text, field)) + branching.path
        for field, choices in zip(made.schema.fields, made.choices, strict=True)
        for branching in choices.branchings
    ]
    shared = common_prefix([row.tokens for row in prompted.rows])
    prefix = prompted.rows[0].tokens[:shared]
    # Tokenizing each whole prompt on its own is the oracle: no merge is lost at the cut.
    assert [prefix + row.tokens[shared:] for row in prompted.rows] == whole
    # What stays for other documents is part of what the rows share.
    resident = prompted.resident_tokens
    assert resident in {0, len(made.resident)}
    assert prefix[:resident] == made.resident[:resident]
    assert prompted.input_tokens == max(
        len(chat.encode(made.prompt(text, field))) + choices.longest_path
        for field, choices in zip(made.schema.fields, made.choices, strict=True)
    )


@pytest.fixture(scope="module")
def real_plans(chat, tiny) -> Any:
    schema = tiny.schema()
    return {each: (plan(chat, schema, *each), chat) for each in COMBINATIONS}


def test_schema_first_shares_its_questions_between_documents(chat, tiny):
    made = plan(chat, tiny.schema())
    texts = ["The lorry is late.", "1 + 1 = 2", "«Ça va»"]
    # Ordinary documents leave the questions alone, so they can stay resident.
    assert {made.rows(text).resident_tokens for text in texts} == {len(made.resident)}
    questions = chat.encode(made.prompt("x", made.schema.fields[0]).partition("x\n")[0])
    # All of them, but for what touches the document.
    assert len(made.resident) >= len(questions) - 3


def test_a_document_that_merges_with_the_text_before_it_is_not_cut_there(tiny):
    chat = ChatTokenizer(tiny.tokenizer())
    made = plan(chat, tiny.schema("urgent"), Layout.CONTEXT_FIRST)
    found = {text: made.rows(text).resident_tokens for text in ("x", "\\", "é", "  a", "user")}
    for text, resident in found.items():
        tokens = chat.encode(made.prompt(text, made.schema.fields[0]))
        # Either the row really begins with the resident tokens, or none are used.
        assert tokens[:resident] == made.resident[:resident]


# --- labels and codes at the real boundary ---


@pytest.mark.parametrize("layout", list(Layout))
def test_labels_are_their_tokens_behind_the_lead_in(chat, tiny, layout):
    made = plan(chat, tiny.schema("team"), layout)
    (field,), (choices,) = made.schema.fields, made.choices
    prompt = made.prompt("x", field)
    for word, way in zip(field.words, choices.steps, strict=True):
        said = chat.encode(f"{prompt} {word}")[len(chat.encode(prompt)) :]
        passed = [choices.branchings[number].path for number, _ in way]
        taken = [choices.branchings[number].candidates[index] for number, index in way]
        closed = (*said, chat.end_of_turn)
        # On its way each label takes its own next token, or closes behind its last one.
        assert [closed[len(path)] for path in passed] == taken
        assert all(closed[: len(path)] == path for path in passed)
    # "login" begins "login reset", so one branching must offer the end of the turn.
    assert any(chat.end_of_turn in each.candidates for each in choices.branchings)


@pytest.mark.parametrize("layout", list(Layout))
def test_codes_are_one_ordinary_token_at_the_boundary(chat, tiny, layout):
    choices = tuple(f"choice {number}" for number in range(26))
    schema = Schema((Field("wide", FieldKind.ENUM, "Which?", choices),))
    made = plan(chat, schema, layout, Encoding.CODES)
    prompt = made.prompt("x", schema.fields[0])
    boundary = chat.encode(prompt)
    (branching,) = made.choices[0].branchings
    for code, token in zip(made.choices[0].codes, branching.candidates, strict=True):
        # Said after the real prompt, not tokenized on its own.
        assert chat.encode(prompt + code) == (*boundary, token)
        assert token not in chat.control_tokens
    assert made.choices[0].codes == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def test_wide_codes_work_on_the_real_tokenizer(chat):
    choices = tuple(f"choice {number}" for number in range(255))
    schema = Schema((Field("wide", FieldKind.ENUM, "Which?", choices),))
    made = plan(chat, schema, Layout.CONTEXT_FIRST, Encoding.CODES, limit=10**5)
    (branching,) = made.choices[0].branchings
    # 255 distinct tokens: 26 letters, then what the vocabulary holds in capitals.
    assert len(set(branching.candidates)) == 255
    assert made.choices[0].codes[26:] == tuple(
        sorted(made.choices[0].codes[26:], key=lambda code: (len(code), code))
    )


def test_a_code_of_several_tokens_is_refused(tiny):
    tokenizer = tiny.tokenizer(tiny.template.replace("assistant\n{%", "assistant {%"))
    model = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = model["model"]["vocab"], model["model"]["merges"]
    vocabulary["ĠB"] = max(vocabulary.values()) + 5
    merges.insert(0, ["Ġ", "B"])
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(model)),
        chat_template=tokenizer.chat_template,
    )
    # "assistant " + "B" merges the space into the code: scoring B alone would be wrong.
    with pytest.raises(CheckpointError, match=r"code 'B' .* exactly one ordinary token") as caught:
        plan(ChatTokenizer(merging), tiny.schema("urgent"), encoding=Encoding.CODES)
    assert "labels" in str(caught.value.hint)


@pytest.mark.parametrize(("control", "count"), [("B", 2), ("AA", 27)], ids=["letter", "wide"])
def test_a_code_that_is_a_control_token_is_refused(tiny, control, count):
    tokenizer = tiny.tokenizer(control=(*tiny.control, control))
    choices = tuple(f"choice {number}" for number in range(count))
    schema = Schema((Field("wide", FieldKind.ENUM, "Which?", choices),))
    # An added token is control, whatever it looks like: an answer cannot be one.
    with pytest.raises(CheckpointError, match=f"code '{control}' .* exactly one ordinary token"):
        plan(ChatTokenizer(tokenizer), schema, encoding=Encoding.CODES)
    # The same tokenizer without that token serves well.
    assert plan(ChatTokenizer(tiny.tokenizer()), schema, encoding=Encoding.CODES).choices


def test_a_lead_in_that_merges_with_a_label_is_refused(tiny):
    tokenizer = tiny.tokenizer()
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    # Byte level keeps a colon and the space behind it apart; this one does not.
    stored["pre_tokenizer"]["use_regex"] = False
    vocabulary, merges = stored["model"]["vocab"], stored["model"]["merges"]
    vocabulary[":Ġ"] = max(vocabulary.values()) + 5
    merges.insert(0, [":", "Ġ"])
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(stored)),
        chat_template=tokenizer.chat_template,
    )
    with pytest.raises(CheckpointError, match="lead-in must keep its tokens") as caught:
        plan(ChatTokenizer(merging), tiny.schema("urgent"))
    assert caught.value.hint


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("encoding", Encoding)
def test_answers_are_tokenized_as_behind_the_whole_prompt(tiny, scheme, encoding):
    from tokenizers import pre_tokenizers

    tokenizer = tiny.tokenizer()
    # Metaspace, as in Llama 2 and Gemma, marks the start of a text, or of each part of it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace("Ġ", prepend_scheme=scheme),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    chat, schema = ChatTokenizer(tokenizer), tiny.schema("team")
    made = plan(chat, schema, encoding=encoding)
    (field,), (choices,) = schema.fields, made.choices
    prompt = made.prompt("x", field)
    answers = choices.codes or tuple(f" {word}" for word in field.words)
    # The oracle encodes each answer behind the whole prompt, never behind its end alone.
    first = len(chat.encode(prompt))
    paths = [chat.encode(prompt + answer)[first:] for answer in answers]
    told = {(*row.path, token) for row in choices.branchings for token in row.candidates}
    assert {path[0] for path in paths} <= {path[0] for path in told}
    assert all(any(path[: len(one)] == one for one in told) for path in paths)


def test_a_template_without_control_behind_the_document_is_refused(tiny):
    bare = "<|begin|>{% for message in messages %}{{ message.content }}{% endfor %} answer "
    # Nothing parts document and answer, so a document could change the boundary.
    with pytest.raises(CheckpointError, match="place a control token between"):
        plan(ChatTokenizer(tiny.tokenizer(bare)), tiny.schema("urgent"))


def test_a_template_that_drops_the_document_is_refused(tiny):
    parts = (
        "{% for message in messages %}<|begin|>{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    )
    # Templates of vision-language models may expect parts, and see none in a text: every
    # document would get the same answers.
    with pytest.raises(CheckpointError, match="the same prompt for two documents") as caught:
        plan(ChatTokenizer(tiny.tokenizer(parts)), tiny.schema("urgent"))
    assert caught.value.hint


def test_labels_of_equal_tokens_are_refused(tiny):
    from tokenizers import normalizers

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    schema = Schema((Field("team", FieldKind.ENUM, "Who?", ("Billing", "billing")),))
    # Distinct texts, one spelling for this tokenizer.
    with pytest.raises(SchemaError, match="must differ as tokens"):
        plan(ChatTokenizer(tokenizer), schema)


# --- limits and refusals ---


@pytest.mark.parametrize(("layout", "encoding"), COMBINATIONS)
def test_the_limit_counts_everything_and_is_met_exactly(tiny_chat, tiny, layout, encoding):
    text = "The invoice was charged twice. " * 3
    schema = tiny.schema()
    free = plan(tiny_chat, schema, layout, encoding)
    needed = max(
        len(tiny_chat.encode(free.prompt(text, field))) + choices.longest_path
        for field, choices in zip(schema.fields, free.choices, strict=True)
    )
    # Document, schema, field, and the longest way into a label: exactly this many.
    exact = plan(tiny_chat, schema, layout, encoding, limit=needed).rows(text)
    assert exact.input_tokens == needed == max(len(row.tokens) for row in exact.rows)
    with pytest.raises(DocumentError) as caught:
        plan(tiny_chat, schema, layout, encoding, limit=needed - 1).rows(text)
    # Both numbers, and the larger one is a limit that would do.
    assert f"at most {needed - 1} tokens, got {needed} " in caught.value.message
    assert caught.value.code == "document.too_long"
    # The remedy is part of the message: it is all that a rejected document keeps.
    assert "raise the limit or split the document" in caught.value.message


def test_a_field_of_one_choice_is_limited_too(tiny_chat):
    schema = Schema((Field("only", FieldKind.ENUM, "Which?", ("this",)),))
    # It needs no row, but it would still be a prompt that is too long.
    with pytest.raises(DocumentError, match="at most 20 tokens"):
        plan(tiny_chat, schema, limit=20).rows("x")
    assert plan(tiny_chat, schema).rows("x").rows == ()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", "document.empty", "empty or blank"),
        (" \n\t\u2003", "document.empty", "empty or blank"),
        ("ab\0c", "document.encoding", "NUL, got one at character 2"),
        ("ab\ud800c", "document.encoding", "surrogate U+D800 at character 2"),
    ],
)
def test_text_no_tokenizer_should_see(tiny_chat, tiny, text, code, message):
    for refuse in (check_text, plan(tiny_chat, tiny.schema("urgent")).rows):
        with pytest.raises(DocumentError) as caught:
            refuse(text)
        # The position counts characters from 0, and the text itself is not repeated.
        assert (caught.value.code, message in caught.value.message) == (code, True)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_document_that_makes_control_tokens_is_refused(tiny, layout):
    from tokenizers import AddedToken, normalizers

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<|wide|>", normalized=True)])
    made = plan(ChatTokenizer(tokenizer), tiny.schema("urgent"), layout)
    # Full-width brackets are data to us, and a control token after NFKC.
    with pytest.raises(DocumentError, match="got 1 from text that this tokenizer") as caught:
        made.rows("say ＜|wide|＞")
    assert caught.value.code == "document.control_tokens"
    # Written plainly it is escaped in time.
    assert made.rows("say <|wide|>").rows


def test_logits_go_to_their_fields(tiny_chat, tiny):
    made = plan(tiny_chat, tiny.schema(), encoding=Encoding.CODES)
    rows = [np.arange(len(field.choices)) + 10.0 * n for n, field in enumerate(made.schema.fields)]
    # One row per field in `codes`, in the order of the schema: 2, 4 and 3 choices.
    assert made.choice_logits(rows) == [(0, 1), (10, 11, 12, 13), (20, 21, 22)]
    words = plan(tiny_chat, tiny.schema())
    several = [np.zeros(len(each.candidates)) for way in words.choices for each in way.branchings]
    # In `labels` a field has as many rows as branchings; each field's sum is 1 again.
    for field in words.choice_logits(several):
        assert np.exp(field).sum() == pytest.approx(1.0, abs=1e-12)
