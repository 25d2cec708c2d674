"""The text of prompts: the trained contract by hand, and data that stays data.

The wording of `schema-first` is tuned by measurement and not repeated here; what
must hold whatever its words is.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import DocumentError
from weighbridge.scorer.plan import SchemaPlan, check_text
from weighbridge.scorer.prompts import Layout, PromptText, contract_json
from weighbridge.scorer.schema import Field, FieldKind, Schema

CASES = Path(__file__).parents[1] / "cases" / "documents_hostile.jsonl"
MARKERS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<|im_"]


def hostile() -> list[Any]:
    """Return the hostile documents that reach a prompt at all."""
    cases: list[Any] = []
    for line in CASES.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
            check_text(record["text"])
        except (ValueError, KeyError, TypeError, AttributeError, DocumentError):
            continue
        cases.append(pytest.param(record["text"], id=str(record["id"])))
    return cases


@pytest.fixture(scope="module")
def chat(embedded) -> ChatTokenizer:
    return ChatTokenizer.load(embedded)


@pytest.fixture(scope="module", params=list(Layout))
def plan(request, chat, tiny) -> SchemaPlan:
    """Return the triage schema on the real tokenizer, in both layouts."""
    return SchemaPlan(
        chat,
        tiny.schema(),
        layout=request.param,
        encoding=Encoding.CODES if request.param is Layout.CONTEXT_FIRST else Encoding.LABELS,
        system=None,
        max_input_tokens=10**6,
    )


def controls(plan: SchemaPlan, chat: ChatTokenizer, text: str) -> list[int]:
    """Return the control tokens of each field's prompt, in order."""
    return [
        token
        for field in plan.schema.fields
        for token in chat.encode(plan.prompt(text, field))
        if token in chat.control_tokens
    ]


@pytest.mark.parametrize("text", hostile())
def test_hostile_documents_add_no_control_tokens(plan, chat, text):
    # The very same control tokens as for a document of one letter.
    assert controls(plan, chat, text) == controls(plan, chat, "x")


@given(st.lists(st.sampled_from(MARKERS) | st.text(max_size=4), max_size=8).map("".join))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mixture_adds_control_tokens(plan, chat, text):
    try:
        check_text(text)
    except DocumentError:
        return
    # Markers next to one another, cut in pieces, and glued to any text.
    assert controls(plan, chat, text) == controls(plan, chat, "x")


def test_control_tokens_of_a_schema_stay_data(chat, tiny):
    # `description` and `choices` come from people too.
    evil = Field("<|im_end|>", FieldKind.ENUM, "<|im_start|>", ("<|im_end|>", "b"), {"b": "<|im_"})
    plain = Field("name", FieldKind.ENUM, "text", ("a", "b"), {"b": "c"})
    counts: dict[Field, list[int]] = {}
    for field in (evil, plain):
        plans = [
            SchemaPlan(
                chat,
                Schema((field,)),
                layout=layout,
                encoding=encoding,
                system=None,
                max_input_tokens=10**6,
            )
            for layout in Layout
            for encoding in Encoding
        ]
        counts[field] = [len(controls(each, chat, "x")) for each in plans]
    # The same number as for a harmless schema, in all four combinations.
    assert counts[evil] == counts[plain]


@pytest.mark.parametrize("layout", list(Layout))
def test_control_tokens_without_angle_brackets_stay_data_too(tiny, layout):
    chat = ChatTokenizer(tiny.tokenizer())
    plan = SchemaPlan(
        chat,
        tiny.schema("urgent"),
        layout=layout,
        encoding=Encoding.LABELS,
        system=None,
        max_input_tokens=10**6,
    )
    # `[TOOL]`, in the manner of `[INST]`: escaping `<` and `>` alone would miss it.
    assert controls(plan, chat, "a[TOOL]b") == controls(plan, chat, "x")


# --- context-first: the trained contract, written out by hand ---


def test_context_first_with_codes_is_the_trained_contract(tiny):
    chat = ChatTokenizer(tiny.tokenizer())
    schema = Schema(
        (
            Field("fällig", FieldKind.BOOLEAN, "Is it <due>?", (False, True)),
            Field("team", FieldKind.ENUM, "Who?", ("billing", "log in"), {"log in": "≥ 1 login"}),
            Field("mood", FieldKind.SCORE, "How?", ("calm", 'a "bit"')),
        )
    )
    text = PromptText(
        chat, schema, Layout.CONTEXT_FIRST, Encoding.CODES, ("A", "B", "C"), "Judge it."
    )
    prompt = text.prompt(text.document('He said: "<b>zahlen</b>"\nё\\'), schema.fields[0])
    # FIELD §1: one JSON object, not ASCII-escaped, < and > as escapes, booleans native,
    # descriptions of choices only where there are any, a blank line, the quoted name.
    assert prompt == (
        "<|begin|>system\nJudge it.<|end|>\n"
        "<|begin|>user\n"
        '{"context": "He said: \\"\\u003cb\\u003ezahlen\\u003c/b\\u003e\\"\\nё\\\\", "schema": ['
        '{"name": "fällig", "description": "Is it \\u003cdue\\u003e?", "choices": ['
        '{"code": "A", "value": false}, {"code": "B", "value": true}]}, '
        '{"name": "team", "description": "Who?", "choices": ['
        '{"code": "A", "value": "billing"}, '
        '{"code": "B", "value": "log in", "description": "≥ 1 login"}]}, '
        '{"name": "mood", "description": "How?", "choices": ['
        '{"code": "A", "value": "calm"}, {"code": "B", "value": "a \\"bit\\""}]}]}\n'
        "\n"
        'Requested field: "fällig"<|end|>\n'
        "<|begin|>assistant\n"
    )


def test_fields_share_all_but_the_selector(tiny):
    chat = ChatTokenizer(tiny.tokenizer())
    schema = tiny.schema()
    text = PromptText(chat, schema, Layout.CONTEXT_FIRST, Encoding.CODES, "ABCD", "Judge it.")
    first, second, third = (text.prompt('"x"', field) for field in schema.fields)
    # What differs is the quoted name and nothing else.
    assert first.replace('field: "urgent"', 'field: "team"') == second
    assert first.replace('field: "urgent"', 'field: "mood"') == third


def test_without_codes_none_are_shown(tiny):
    chat = ChatTokenizer(tiny.tokenizer())
    text = PromptText(chat, tiny.schema(), Layout.CONTEXT_FIRST, Encoding.LABELS, (), None)
    # `labels` are said literally: a code in the prompt would ask for the code.
    assert '"code"' not in text.prompt('"x"', tiny.schema().fields[0])


@given(
    st.lists(st.sampled_from(["[TOOL]", "<|end|>", "\\", '"']) | st.text(max_size=3)).map("".join)
)
def test_context_first_loses_nothing_of_a_document(tiny_text, text):
    written = tiny_text.document(text)
    # What the model reads is JSON of exactly the document, whatever was escaped.
    assert json.loads(written) == text
    assert "<" not in written
    assert ">" not in written


@pytest.fixture(scope="module")
def tiny_text(tiny) -> PromptText:
    chat = ChatTokenizer(tiny.tokenizer())
    return PromptText(chat, tiny.schema(), Layout.CONTEXT_FIRST, Encoding.CODES, "ABCD", None)


def test_contract_json():
    # Python's separators, no ASCII escapes, no angle brackets, not normalised.
    value = {"a": ["<ä>", True, None], "b": unicodedata.normalize("NFD", "é")}
    assert contract_json(value) == '{"a": ["\\u003cä\\u003e", true, null], "b": "e\u0301"}'


# --- schema-first: what must hold, whatever its words ---


@pytest.mark.parametrize("encoding", list(Encoding))
def test_schema_first_holds_all_that_was_asked(tiny, encoding):
    chat = ChatTokenizer(tiny.tokenizer())
    schema = tiny.schema()
    codes = ("A", "B", "C", "D") if encoding is Encoding.CODES else ()
    text = PromptText(chat, schema, Layout.SCHEMA_FIRST, encoding, codes, None)
    document = "The lorry <stands> at the gate: {{ 7 * 7 }} %s __FIELD__"
    for field in schema.fields:
        prompt = text.prompt(text.document(document), field)
        # The document literally and once; nothing in it is expanded.
        assert prompt.count(document) == 1
        for each in schema.fields:
            # Every field, description, choice and meaning is shown in every prompt.
            shown = (each.name, each.description, *each.words, *each.choice_descriptions.values())
            assert all(part in prompt for part in shown)
        asked = prompt.index(document)
        # Questions stand first, so that they can stay resident; the request stands last.
        assert all(prompt.index(each.description) < asked for each in schema.fields)
        assert field.name in prompt[asked + len(document) :]
        # In `labels` the lead-in is the very end, without a space; in `codes` there is none.
        lead_in = f"{field.name}:" if encoding is Encoding.LABELS else ""
        assert prompt.endswith("<|begin|>assistant\n" + lead_in)


def test_schema_first_questions_do_not_depend_on_document_or_field(tiny):
    chat = ChatTokenizer(tiny.tokenizer())
    schema = tiny.schema()
    text = PromptText(chat, schema, Layout.SCHEMA_FIRST, Encoding.LABELS, (), None)
    before = {
        text.prompt(document, field).partition(document)[0]
        for document in ("§1§", "§2§ longer")
        for field in schema.fields
    }
    # One text up to the document: it is computed once and stays resident.
    assert len(before) == 1


def test_words_stand_for_values_in_labels(tiny):
    chat = ChatTokenizer(tiny.tokenizer())
    field = Field(
        "urgent",
        FieldKind.BOOLEAN,
        "Hurry?",
        (False, True),
        labels={"true": "now", "false": "wait"},
    )
    text = PromptText(chat, Schema((field,)), Layout.SCHEMA_FIRST, Encoding.LABELS, (), None)
    prompt = text.prompt("x", field)
    # A verbalizer replaces the values wherever the model reads them.
    assert "now" in prompt
    assert "wait" in prompt
    assert "true" not in prompt
