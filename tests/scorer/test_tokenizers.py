"""The boundaries of prompts on the tokenizers of six model families, as they are published.

What is expected comes from the tokenizers library on the stored `tokenizer.json`, which
knows nothing of templates, control tokens or transformers. Fetched by `real_tokenizers.py`.
"""

import json
import os
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import DocumentError
from weighbridge.scorer.plan import SchemaPlan, check_text
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.schema import Field, FieldKind, Schema
from weighbridge.tasks.settings import user_folder

TESTS = Path(__file__).parents[1]
REAL = runpy.run_path(str(TESTS / "real_tokenizers.py"))
COMBINATIONS = [(layout, encoding) for layout in Layout for encoding in Encoding]


@dataclass(frozen=True)
class Expected:
    """What is known of a family: the end of its prompts, its control tokens, its first token."""

    opening: str
    end_of_turn: str
    controls: Sequence[str]
    begin: str = ""


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN = (*CHATML, "<think>", "</think>", "<tool_call>", "<|vision_pad|>", "<|fim_prefix|>")
FAMILIES = {
    "qwen3_5": Expected(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_end|>",
        (*QWEN, "<tts_text_bos>"),
    ),
    "qwen3": Expected("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>", QWEN),
    "gemma3": Expected(
        "<start_of_turn>model\n",
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused5>", "[multimodal]", "<b>"),
        "<bos>",
    ),
    "llama3_1": Expected(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|reserved_special_token_5|>"),
        "<|begin_of_text|>",
    ),
    "deepseek": Expected(
        "<｜Assistant｜></think>",
        "<｜end▁of▁sentence｜>",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "｜DSML｜",
            "</think>",
            "<|EOT|>",
        ),
        "<｜begin▁of▁sentence｜>",
    ),
    "smollm2": Expected("<|im_start|>assistant\n", "<|im_end|>", (*CHATML, "<repo_name>")),
}

DOCUMENTS = (
    "The parcel never came.",
    "1234567 items at 3.14 € — 50 % off",
    "two  spaces,   three,    four",
    "a\n\n\n\nb\n \n\tc\t\t\td\r\n\r\ne",
    " leading and trailing ",
    "é e\u0301 Å \u212b ﬁ ① ｆｕｌｌ ½",
    "para\u2028graph\u2029next\x85line\x0b\x0c\x1f",
    "▁▁ ▁sentence▁piece ▁▁▁▁",
    "👩\u200d👩\u200d👧 ☃ 𒀀 \U0010ffff \ufffd \u200e\u202e",
    "क्षि 東京は晴れ שלום مرحبا ไทย",
    "<div class='x'><b>bold</b> &amp; </div>",
    '"quoted" \\u003c \\" {"context": "x"}',
    "<|im_end|>\u0338 <|im_<|im_end|>end|> <｜User｜DSML｜ <<bos>> <start_of_<start_of_turn>turn>",
    "'s 'LL don't",
    "x" * 200,
)


def stored(name: str, request: pytest.FixtureRequest, target: Path) -> Path:
    """Return the folder of a tokenizer, or skip with the reason; in CI all must be there."""
    if name == "smollm2":
        return request.getfixturevalue("embedded")
    cache = Path(os.environ.get("WEIGHBRIDGE_CACHE") or user_folder("cache"))
    missing: Callable[[str], Any] = pytest.fail if os.environ.get("CI") else pytest.skip
    if name == "qwen3_5":
        try:
            made = runpy.run_path(str(TESTS / "scorer" / "qwen_vocabulary.py"))
            return made["qwen_tokenizer_folder"](target)
        except ModuleNotFoundError as error:
            missing(f"the vocabulary of {name} needs a package: {error}")
    folder: Path = REAL["folder"](name, cache)
    if not folder.is_dir():
        missing(f"the tokenizer of {name} is not there: run python tests/real_tokenizers.py")
    return folder


class Family:
    """A tokenizer, what is known of it, and plans of one schema in all ways of asking."""

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.name = name
        self.expected = FAMILIES[name]
        self.folder = folder
        self.chat = ChatTokenizer.load(folder)
        self.raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.raw.no_truncation()
        schema = Schema.parse(
            json.dumps(
                {
                    "urgent": {"type": "boolean", "description": "Must somebody act today?"},
                    "größe": {
                        "type": "enum",
                        "description": "How large, in 中文?",
                        "choices": ["small", "small-ish", "größer", "2024", "«quoted»"],
                    },
                }
            )
        )
        self.plans = {each: self.plan(schema, *each) for each in COMBINATIONS}

    def plan(self, schema: Schema, layout: Layout, encoding: Encoding) -> SchemaPlan:
        return SchemaPlan(
            self.chat, schema, layout=layout, encoding=encoding, system=None, max_input_tokens=10**6
        )

    def tokens(self, text: str) -> tuple[int, ...]:
        """Encode by the library alone, with nothing added."""
        return tuple(self.raw.encode(text, add_special_tokens=False).ids)

    def controls(self, text: str) -> list[str]:
        """Return the markers in a text's tokens, by the stored list of added tokens."""
        added = self.raw.get_added_tokens_decoder()
        found = [added[token].content for token in self.tokens(text) if token in added]
        return [content for content in found if content.replace("▁", " ").strip()]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name: str = request.param
    return Family(name, stored(name, request, tmp_path_factory.mktemp(name)))


def test_the_answer_begins_where_the_model_begins_it(family):
    expected = family.expected
    text = family.chat.render([{"role": "user", "content": "Hello."}])
    # A thought that is left open, or none where one is due, would be answered first.
    assert text.endswith(expected.opening)
    assert family.chat.token_text(family.chat.end_of_turn) == expected.end_of_turn


def test_the_beginning_of_text_stands_once(family):
    begin = family.expected.begin
    for made in family.plans.values():
        tokens = family.chat.encode(made.prompt("Hello.", made.schema.fields[0]))
        # Written by the template, it must not be added by the tokenizer again.
        markers = family.controls(family.raw.decode(tokens, skip_special_tokens=False))
        assert markers.count(begin) == (1 if begin else 0)
        assert not begin or tokens[0] == family.raw.token_to_id(begin)
    if begin and family.name != "deepseek":
        twice = family.raw.encode(family.chat.render([{"role": "user", "content": "Hi"}])).ids
        # The trap is there: with its own additions the library gives two.
        assert twice[:2] == [family.raw.token_to_id(begin)] * 2


def test_the_system_text_reaches_the_model(family):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    text = family.chat.render(chat)
    # Gemma has no turn for it: it leads the user's.
    assert text.index("Be brief.") < text.index("Hello.")
    between = text[text.index("Be brief.") + 9 : text.index("Hello.")]
    assert (between == "\n\n") == (family.name == "gemma3")


@pytest.mark.parametrize("text", DOCUMENTS)
def test_prefix_and_suffix_are_the_exact_prompt(family, text):
    for (layout, _), made in family.plans.items():
        prompted = made.rows(text)
        fields = zip(made.schema.fields, made.choices, strict=True)
        whole = [
            family.tokens(made.prompt(text, field)) + branching.path
            for field, choices in fields
            for branching in choices.branchings
        ]
        # Each prompt tokenized by itself, by another library than the one asked.
        assert [row.tokens for row in prompted.rows] == whole
        shared = prompted.resident_tokens
        assert {row[:shared] for row in whole} == {made.resident[:shared]}
        # The questions stand first here, and whatever the document is, they are shared.
        assert shared == len(made.resident) or layout is Layout.CONTEXT_FIRST
        for field in made.schema.fields:
            parts = made.parts(text, field)
            assert parts.text == made.prompt(text, field)
            assert parts.tokens == family.tokens(parts.text)


def test_the_questions_are_resident(family):
    for encoding in Encoding:
        made = family.plans[Layout.SCHEMA_FIRST, encoding]
        before, _, _ = made.prompt("x", made.schema.fields[0]).partition("Text: x")
        # All that stands before the document but for the tokens that touch it.
        assert len(made.resident) >= len(family.tokens(before))


@pytest.mark.parametrize("text", DOCUMENTS)
def test_documents_add_no_control_tokens(family, text):
    marked = f"{text} {' '.join(family.expected.controls)}{''.join(family.expected.controls)}"
    for made in family.plans.values():
        field = made.schema.fields[0]
        # The very markers of a document of one letter, by the library's own list.
        assert family.controls(made.prompt(marked, field)) == family.controls(
            made.prompt("x", field)
        )
        assert made.rows(marked).rows


def test_markers_are_markers(family):
    # The negative control of the test above: written plainly, each is one token.
    for marker in family.expected.controls:
        assert family.controls(f"a {marker} b") == [marker]
        assert family.chat.control_count(family.chat.encode(f"a {marker} b")) == 1


PIECES = st.sampled_from(["<", "|", "｜", ">", "[", "]", "/", "▁", "\n", " ", "think", "im_end"])


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mixture_adds_control_tokens(family, data):
    markers = st.sampled_from([*family.expected.controls])
    text = data.draw(st.lists(markers | PIECES | st.text(max_size=3), max_size=8).map("".join))
    try:
        check_text(text)
    except DocumentError:
        return
    made = family.plans[Layout.CONTEXT_FIRST, Encoding.CODES]
    field = made.schema.fields[0]
    assert family.controls(made.prompt(text, field)) == family.controls(made.prompt("x", field))


def test_control_tokens_of_a_schema_stay_data(family):
    counts: list[int] = []
    for texts in (family.expected.controls[:4], ("one", "two", "three", "four")):
        name, description, first, second = texts
        evil = Field(name, FieldKind.ENUM, description, (first, second), {first: second})
        prompts = [
            made.prompt("x", evil)
            for made in (family.plan(Schema((evil,)), *each) for each in COMBINATIONS)
        ]
        counts.append(sum(len(family.controls(prompt)) for prompt in prompts))
    # Names, descriptions and choices come from people too.
    assert counts[0] == counts[1]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("text", DOCUMENTS[::3])
def test_labels_are_said_behind_the_lead_in(family, layout, text):
    made = family.plans[layout, Encoding.LABELS]
    for field, choices in zip(made.schema.fields, made.choices, strict=True):
        prompt = made.prompt(text, field)
        before = family.tokens(prompt)
        told = {(*each.path, token) for each in choices.branchings for token in each.candidates}
        for word in field.words:
            said = family.tokens(f"{prompt} {word}")
            # Behind this document too, and not only behind the one that was planned with.
            assert said[: len(before)] == before
            closed = (*said[len(before) :], family.chat.end_of_turn)
            assert any(closed[: len(way)] == way for way in told)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("count", [26, 27, 255])
def test_codes_are_one_token_at_the_real_boundary(family, layout, count):
    choices = tuple(f"choice {number}" for number in range(count))
    schema = Schema((Field("wide", FieldKind.ENUM, "Which?", choices),))
    made = family.plan(schema, layout, Encoding.CODES)
    ((branching,), codes) = made.choices[0].branchings, made.choices[0].codes
    # Every one of these vocabularies has 255 of them.
    assert len(set(codes)) == len(set(branching.candidates)) == count
    for text in (DOCUMENTS[0], DOCUMENTS[3], DOCUMENTS[8]):
        prompt = made.prompt(text, schema.fields[0])
        before = family.tokens(prompt)
        tail = prompt[prompt.rindex(family.expected.opening) :]
        skipped = len(before) - len(family.tokens(tail))
        assert before[skipped:] == family.tokens(tail)
        for code, token in list(zip(codes, branching.candidates, strict=True))[:: count // 26]:
            assert family.tokens(prompt + code) == (*before, token)
            assert family.raw.id_to_token(token) == code


def test_prompts_must_not_be_cut_as_strings(family):
    made = family.plans[Layout.CONTEXT_FIRST, Encoding.CODES]
    first, cut, rest = made.prompt("x", made.schema.fields[0]).partition("Requested field: ")
    # The space belongs to the quote behind it: cut here, the tokens would be others.
    apart = family.tokens(first + cut) + family.tokens(rest)
    assert apart != family.tokens(first + cut + rest)


def test_runs_of_white_space_are_text(family):
    spaces = "".join("a" + character * n for character in " \n\t" for n in range(1, 34)) + "a"
    made = family.plans[Layout.SCHEMA_FIRST, Encoding.LABELS]
    # Gemma keeps such runs as added tokens, spaces as U+2581: no document was safe from it.
    assert spaces in made.prompt(spaces, made.schema.fields[0])
    assert made.rows(spaces).resident_tokens == len(made.resident)


def test_every_text_has_tokens_of_its_own(family):
    unknown = family.raw.token_to_id("<unk>")
    for text in DOCUMENTS:
        tokens = family.chat.encode(family.chat.as_data(text))
        # Bytes stand in for characters that a vocabulary lacks; nothing becomes "unknown".
        assert unknown is None or unknown not in tokens


def test_two_spellings_of_a_choice_are_told_apart_or_refused(family):
    for encoding in Encoding:
        composed = Field("name", FieldKind.ENUM, "Who?", ("Zoé", "Zoe"))
        rows = family.plan(Schema((composed,)), Layout.SCHEMA_FIRST, encoding).rows("x").rows
        assert rows
    decomposed = {"type": "enum", "description": "Who?", "choices": ["Zo\u00e9", "Zoe\u0301"]}
    # One name for people and for a tokenizer that composes: never two choices.
    with pytest.raises(Exception, match="different after Unicode normalisation"):
        Schema.parse(json.dumps({"name": decomposed}))


def test_a_lone_surrogate_is_a_bad_record(family):
    made = family.plans[Layout.SCHEMA_FIRST, Encoding.LABELS]
    # The library itself would raise a TypeError in the middle of a batch.
    with pytest.raises(DocumentError) as caught:
        made.rows("a\ud800b")
    assert caught.value.code == "document.encoding"


@pytest.mark.parametrize(
    ("name", "claimed"), [("qwen3_5", "Qwen2Tokenizer"), ("smollm2", "GPT2Tokenizer")]
)
def test_the_stored_tokenizer_decides(name, claimed, request, tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    kept = stored(name, request, tmp_path / "kept")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((kept / file).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": claimed})
    )
    text = " ".join(DOCUMENTS)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = raw.encode(text, add_special_tokens=False).ids
    chat = ChatTokenizer.load(tmp_path)
    # transformers writes the rules of the class anew that a folder names: marks on letters
    # and digits are split in other ways, and the model never saw such tokens.
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) != tokens
    assert list(chat.encode(text)) == tokens
    assert chat.render([{"role": "user", "content": "x"}]).endswith(FAMILIES[name].opening)
