import copy
import hashlib
import json
import pickle
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer.errors import SchemaError
from weighbridge.scorer.schema import Field, FieldKind, Schema

CASES = Path(__file__).parents[1] / "cases"
INVALID = json.loads((CASES / "schemas_invalid.json").read_text(encoding="utf-8"))


def one(**changes) -> str:
    field = {"type": "enum", "description": "x", "choices": ["LOW", "HIGH"]} | changes
    return json.dumps({"a": {key: value for key, value in field.items() if value is not None}})


def refused(text: str) -> SchemaError:
    with pytest.raises(SchemaError) as caught:
        Schema.parse(text)
    return caught.value


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case["name"])
def test_invalid_schema_is_refused_in_the_words_of_the_case(case):
    error = refused(case["text"])
    # The message alone must name them: a log line may not carry the hint.
    assert [w for w in case["error_mentions"] if w.lower() not in error.message.lower()] == []
    # Every refusal says what to do.
    assert error.hint


def test_case_words_can_be_missed():
    # Negative control: a message about another field must not satisfy the check above.
    assert "chioces" not in refused(one(description=None)).message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["object", "nothing"]),
        (" \n", ["nothing"]),
        ("\ufeff", ["nothing"]),
        ("null", ["object", "null"]),
        ('{"a": 1}', ['"a"', "object", "1"]),
        ('{"a": {"type": "enum", "type": "boolean"}}', ['"a"', "duplicate", '"type"']),
        ('{"a": {"labels": {"x": "1", "x": "2"}}}', ['"a"', '"labels"', "duplicate", '"x"']),
        (one(description=None)[:-1] + ', "a": 1e999}', ["duplicate"]),
        ('{"a": {"description": -Infinity}}', ['"a"', '"description"', "-Infinity"]),
        ('{"a": 1e999}', ['"a"', "Infinity"]),
        ('{"a": ' + "1" * 5000 + "}", ["number", "digits"]),
        ('{"a": \n tru}', ["line 2", "column 2"]),
        ("[" * 100_000, ["32", "deep"]),
        ('"' * 300_001, ["line 1"]),
        (" " * 1_000_000 + "{}", ["1,000,000", "1,000,002"]),
        (one(type=None), ['"a"', '"type"', "missing"]),
        (one(type=["enum"]), ['"type"', "a list"]),
        (one(choices=None), ['"a"', '"choices"', "missing"]),
        (one(choices="LOW"), ['"choices"', "list", "LOW"]),
        (one(choices=["LOW", True]), ['"choices"', "entry 2", "true"]),
        (one(choices=["LOW", " "]), ['"choices"', "entry 2", "blank"]),
        (one(choices=["LOW\nHIGH"]), ["entry 1", "U+000A"]),
        (one(choices=["LOW\x00"]), ["entry 1", "U+0000"]),
        (one(choices=["\ud800"]), ["entry 1", "surrogate", "U+D800"]),
        (one(choices=["a\u2028b"]), ["entry 1", "U+2028"]),
        (one(levels=["a", "b"]), ["unknown", '"levels"']),
        (one(description=5), ['"description"', "5"]),
        (one(description="\x1b[31m"), ['"description"', "U+001B"]),
        (one(description="a\x85"), ['"description"', "U+0085"]),
        (one(choice_descriptions=["y"]), ['"choice_descriptions"', "object", "a list"]),
        (one(choice_descriptions={"LOW": None}), ['"choice_descriptions"', '"LOW"', "null"]),
        (one(choice_descriptions={"LOW": ""}), ['"choice_descriptions"', '"LOW"', "blank"]),
        (one(labels={"low": "x"}), ['"labels"', '"low"']),
        (one(labels={"LOW": ""}), ['"labels"', '"LOW"', "blank"]),
        (one(labels={"LOW": " x"}), ['"labels"', '"LOW"', "space"]),
        (one(labels={"LOW": "x", "HIGH": "x"}), ['"labels"', '"x"', "twice"]),
        (one(labels={"LOW": "HIGH"}), ['"labels"', '"HIGH"', "twice"]),
        (one(labels={"LOW": "caf\u00e9", "HIGH": "cafe\u0301"}), ['"labels"', "NFC"]),
        (one(type="boolean", choices=[]), ['"choices"', "one or two"]),
        (one(type="boolean", choices=[True, True]), ['"choices"', "true, true"]),
        (one(type="boolean", choices=["true"]), ['"choices"', "native"]),
        (one(type="score", choices=None), ['"levels"', "missing"]),
        (one(type="score", levels=["a", "b"]), ['"levels"', '"choices"', "both"]),
        (one(type="score", choices=None, levels=["a"]), ['"levels"', "2 to 255", "1"]),
        ('{"": {"type": "boolean", "description": "x"}}', ["field name", "blank"]),
        ('{" ": {"type": "boolean", "description": "x"}}', ["field name", "blank"]),
        ('{"a\\tb": {"type": "boolean", "description": "x"}}', ["field name", "U+0009"]),
    ],
)
def test_refusal_names_the_place_and_what_came(text, words):
    error = refused(text)
    # Place, rule and received value are what a person needs to mend the file.
    assert [word for word in words if word not in error.message] == []
    assert error.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (one(desciption="x"), 'did you mean "description"?'),
        (one(type="bool"), "boolean"),
        (one(type="object"), "flat"),
        (one(choice_descriptions={"HIHG": "y"}), 'did you mean "HIGH"?'),
    ],
)
def test_hint_names_the_closest_known_word(text, hint):
    # One slip of the fingers away: the reader should not have to look the word up.
    assert hint in str(refused(text).hint)


def test_field_names_equal_after_nfc_are_refused():
    field = {"type": "boolean", "description": "x"}
    error = refused(json.dumps({"caf\u00e9": field, "cafe\u0301": field}))
    # The two look alike, so only escapes can show which is which.
    assert r"caf\u00e9" in error.message
    assert r"cafe\u0301" in error.message


def test_lawful_extremes_are_accepted():
    # One choice has p = 1; 255 is the most that one-token codes can tell apart.
    assert len(Schema.parse(one(choices=["only"])).field("a").choices) == 1
    assert len(Schema.parse(one(choices=[f"c{i}" for i in range(255)])).field("a").choices) == 255
    # A description may have lines; a boolean may allow one answer only.
    assert Schema.parse(one(description="first\n\tsecond")).field("a").description[5] == "\n"
    assert Schema.parse(one(type="boolean", choices=[True])).field("a").choices == (True,)


def test_order_is_kept_and_booleans_are_native():
    text = """{"z": {"type": "boolean", "description": "d", "choices": [true, false]},
               "a": {"type": "boolean", "description": "d"},
               "m": {"type": "score", "description": "d", "levels": ["zero", "one"]}}"""
    schema = Schema.parse(text, name="n")
    assert [field.name for field in schema.fields] == ["z", "a", "m"]
    # `is`, because 1 == True.
    assert schema.field("z").choices[0] is True
    # FIELD's default order: false is the first code.
    assert schema.field("a").keys == ("false", "true")
    assert schema.field("m").keys == ("zero", "one")
    assert schema.name == "n"


def test_labels_may_be_partial():
    field = Schema.parse(one(labels={"HIGH": "urgent"})).field("a")
    # A choice without a label is its own word.
    assert field.words == ("LOW", "urgent")
    assert dict(field.labels) == {"HIGH": "urgent"}
    # Swapping is lawful: only the final words must differ.
    assert Schema.parse(one(labels={"LOW": "HIGH", "HIGH": "LOW"})).field("a").words[0] == "HIGH"


def test_choice_keys_match_after_nfc():
    text = one(choices=["caf\u00e9"], choice_descriptions={"cafe\u0301": "coffee"})
    # The description is kept under the choice's own spelling, or a look-up would miss it.
    assert dict(Schema.parse(text).field("a").choice_descriptions) == {"caf\u00e9": "coffee"}
    both = one(choices=["caf\u00e9"], choice_descriptions={"cafe\u0301": "x", "caf\u00e9": "y"})
    assert "twice" in refused(both).message


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (one(type="boolean", choices=None), one(type="boolean", choices=[False, True])),
        (one(type="score"), one(type="score", choices=None, levels=["LOW", "HIGH"])),
        (one(), one(choice_descriptions={}, labels={})),
        (one(), one(labels={"LOW": "LOW"})),
        (one(labels={"LOW": "a", "HIGH": "b"}), one(labels={"HIGH": "b", "LOW": "a"})),
        (one(), "\ufeff \n" + one()),
        (
            one(choice_descriptions={"LOW": "a", "HIGH": "b"}),
            one(choice_descriptions={"HIGH": "b", "LOW": "a"}),
        ),
        (
            '{"a": {"choices": ["LOW"], "description": "\\u00e9", "type": "enum"}}',
            '{"a":{"type":"enum","description":"é","choices":["LOW"]}}',
        ),
    ],
)
def test_one_meaning_has_one_canonical_text(text, same):
    # A decision is found again by this hash, so two spellings must not score twice.
    assert Schema.parse(text).canonical == Schema.parse(same).canonical
    assert Schema.parse(text) == Schema.parse(same)


def test_canonical_is_minimal_json_without_the_name():
    schema = Schema.parse(one(description="é"), name="n")
    # Written out by hand from the format: key order type, description, choices; no spaces.
    expected = '{"a":{"type":"enum","description":"é","choices":["LOW","HIGH"]}}'
    assert schema.canonical == expected
    assert schema.sha256 == hashlib.sha256(expected.encode()).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        one(choices=["HIGH", "LOW"]),
        one(description="y"),
        one(type="score"),
        one(labels={"LOW": "x"}),
        one(choice_descriptions={"LOW": "x"}),
        one(choices=["LOW", "high"]),
    ],
)
def test_another_meaning_has_another_hash(other):
    # Each of these changes the prompt, and so may change the answer.
    assert Schema.parse(other).sha256 != Schema.parse(one()).sha256


def test_a_native_field_may_be_called_questions():
    text = '{"questions": {"type": "boolean", "description": "Are there questions?"}}'
    # Its type is text, which no question of a question file is.
    assert Schema.parse(text).field("questions").kind == FieldKind.BOOLEAN


def test_field_of_another_name_is_refused_with_the_closest():
    with pytest.raises(SchemaError, match='"urgnt"') as caught:
        Schema.parse('{"urgent": {"type": "boolean", "description": "x"}}').field("urgnt")
    # The hint carries the name that was probably meant.
    assert "urgent" in str(caught.value.hint)


def test_values_are_frozen_hashable_and_can_be_copied():
    schema = Schema.parse(one(labels={"LOW": "x"}, choice_descriptions={"LOW": "y"}))
    with pytest.raises(TypeError):
        schema.fields[0].labels["LOW"] = "z"  # pyright: ignore[reportIndexIssue]
    # Equal values must have equal hashes; mapping proxies cannot be pickled by themselves.
    assert {schema: 1}[Schema.parse(schema.canonical)] == 1
    assert pickle.loads(pickle.dumps(schema)) == schema
    assert copy.deepcopy(schema) == schema


def test_field_made_in_python_is_checked_too():
    # A schema from another source must not get round the rules of the file.
    with pytest.raises(SchemaError, match="twice"):
        Field("a", FieldKind.ENUM, "x", ("b", "b"))
    with pytest.raises(SchemaError, match="at least one field"):
        Schema(())


def test_load_takes_the_name_from_the_file_and_accepts_a_byte_order_mark(tmp_path):
    path = tmp_path / "triage.json"
    path.write_bytes(b"\xef\xbb\xbf" + one().encode())
    schema = Schema.load(path)
    # Windows editors write the mark; it is no part of the meaning.
    assert schema.name == "triage"
    assert schema.sha256 == Schema.parse(one()).sha256


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "nothing"),
        (b'{"a": "\xff"}', "byte 0xff at offset 7"),
        ("{}".encode("utf-16"), "UTF-8"),
        (b'{"a"', "line 1"),
        (b" " * 4_000_001, "4,000,000"),
    ],
)
def test_load_names_the_file(tmp_path, data, word):
    path = tmp_path / "triage.json"
    path.write_bytes(data)
    with pytest.raises(SchemaError) as caught:
        Schema.load(str(path))
    # With several schemas at hand the reader must know which one it was.
    assert "triage.json" in caught.value.message
    assert word in caught.value.message


@pytest.mark.parametrize(("name", "word"), [("absent.json", "No such file"), ("", "directory")])
def test_load_of_no_file_says_why(tmp_path, name, word):
    with pytest.raises(SchemaError, match=word) as caught:
        Schema.load(tmp_path / name)
    # The operating system's reason, without a traceback.
    assert caught.value.hint


def test_load_of_a_path_with_nul_is_an_error_of_ours():
    # Python raises ValueError here, not OSError.
    with pytest.raises(SchemaError, match="null"):
        Schema.load("a\0b")


TEXTS = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=12
).filter(lambda text: text == text.strip() and bool(text))


def distinct(least: int, most: int):
    return st.lists(
        TEXTS, min_size=least, max_size=most, unique_by=lambda t: unicodedata.normalize("NFC", t)
    )


@st.composite
def fields(draw, name: str) -> Field:
    kind = draw(st.sampled_from(FieldKind))
    choices: list = (
        draw(st.sampled_from([[True], [False, True], [True, False]]))
        if kind == FieldKind.BOOLEAN
        else draw(distinct(2, 5))
    )
    keys = [json.dumps(c) if isinstance(c, bool) else c for c in choices]
    words = draw(distinct(len(keys), len(keys)))
    return Field(
        name,
        kind,
        draw(TEXTS),
        tuple(choices),
        choice_descriptions={key: draw(TEXTS) for key in keys if draw(st.booleans())},
        labels=dict(zip(keys, words, strict=True)) if draw(st.booleans()) else {},
    )


@st.composite
def schemas(draw) -> Schema:
    return Schema(tuple(draw(fields(name)) for name in draw(distinct(1, 4))))


@given(schemas())
def test_canonical_reads_back_as_the_same_schema(schema):
    again = Schema.parse(schema.canonical)
    # The canonical text is all that the store keeps, so it must hold the whole meaning.
    assert again == schema
    assert again.canonical == schema.canonical


@given(schemas(), st.data())
def test_order_is_part_of_the_hash(schema, data):
    order = data.draw(st.permutations(schema.fields))
    # Equal exactly when nothing moved: order changes the prompt, so it may change answers.
    assert (Schema(tuple(order)).sha256 == schema.sha256) == (tuple(order) == schema.fields)


@given(st.text(max_size=60) | st.text('{}[]":,\\ab1', max_size=60))
def test_any_text_gives_a_schema_or_an_error_of_ours(text):
    try:
        schema, error = Schema.parse(text), None
    except SchemaError as caught:
        schema, error = None, caught
    # An error goes to a terminal: it must be printable and say what to do.
    assert error is None or (error.message.isprintable() and error.hint)
    assert schema is None or schema.fields
