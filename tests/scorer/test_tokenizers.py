"""The boundaries of prompts on the tokenizers of six model families, as they are published.

What is expected comes from the tokenizers library on the stored `tokenizer.json`, which
knows nothing of templates, control tokens or transformers. Fetched by `real_tokenizers.py`.
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.scorer.families import COMBINATIONS, DOCUMENTS, FAMILIES, TEXTS, Family, rows_of, stored

from weighbridge.scorer.chat import ChatTokenizer
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import DocumentError
from weighbridge.scorer.plan import check_text
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.schema import Field, FieldKind, Schema


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


@given(text=TEXTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_those_of_whole_prompts(family, text):
    for made in family.plans.values():
        try:
            rows = [row.tokens for row in made.rows(text).rows]
        except DocumentError:
            continue
        assert rows == rows_of(made, text, family.tokens)


def test_the_document_is_encoded_once_for_all_fields(family):
    for made in family.plans.values():
        before = family.chat.encode_once.cache_info()
        for number, text in enumerate(DOCUMENTS):
            made.rows(f"{text} {number} {made.resident}")
        after = family.chat.encode_once.cache_info()
        # Otherwise the tests beside this one would compare whole prompts with themselves.
        assert after.misses - before.misses == len(DOCUMENTS)
        assert after.hits - before.hits == len(DOCUMENTS) * (len(made.schema.fields) - 1)


@given(left=TEXTS, joint=st.sampled_from(["\nT", ", ", "? ", ": ", ". "]), right=TEXTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_token_ends_where_it_is_known_to(family, left, joint, right):
    text = (left + joint + right).encode("utf-8", "ignore").decode().replace("\0", "")
    places = [found.start() for found in family.chat.token_ends.finditer(text)]
    assert places
    for place in places:
        # What is behind it counts for nothing but the next character, what is before not at all.
        one = family.tokens(text[place])
        before = family.tokens(text[: place + 1])
        apart = before[: len(before) - len(one)] + family.tokens(text[place:])
        assert apart == family.tokens(text)


def test_tokens_do_not_end_everywhere(family):
    # The negative control of the test above: places like those of other cuts.
    def differs(left: str, right: str) -> bool:
        one, before = family.tokens(right[0]), family.tokens(left + right[0])
        apart = before[: len(before) - len(one)] + family.tokens(right)
        return apart != family.tokens(left + right)

    assert any(map(differs, ("a ", "a", "a\n", 'a"'), ("word", "bout", "\n", ", b")))


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
