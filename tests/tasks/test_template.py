r"""Templates: several columns become one text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.refusals import Refusal
from weighbridge.tasks.sources import BadRecord, Document, read_documents
from weighbridge.tasks.template import parse_text_field


def text(template: str, **values: Any) -> str:
    return parse_text_field(template).text_of(values, "here")


@pytest.mark.parametrize(
    ("template", "values", "wanted"),
    [
        ("{a}\\n\\n{b}", {"a": "x", "b": "y"}, "x\n\ny"),
        ("{a}\n\t{b}", {"a": "x", "b": "y"}, "x\n\ty"),
        ("{a}\\t\\\\n \\d{b}", {"a": "x", "b": "y"}, "x\t\\n \\dy"),
        ("{{{a}}} {{b}}", {"a": "x"}, "{x} {b}"),
        ("{a}{a}", {"a": "x"}, "xx"),
        ("{a} {b}", {"a": None, "b": "y"}, " y"),
        ("{a} {b} {c}", {"a": 1.5, "b": True, "c": [1, "ü"]}, '1.5 true [1,"ü"]'),
        ("{two words}: {a.b}", {"two words": "x", "a.b": "y"}, "x: y"),
        ('{"{odd}"} {"\\"q\\""}', {"{odd}": "x", '"q"': "y"}, "x y"),
        # A single column, quoted because of its braces: no template.
        ('{"{odd}"}', {"{odd}": "x"}, "x"),
        # What looks like a place in a value is not one.
        ("{a} {b}", {"a": "{b}\\n", "b": "y"}, "{b}\\n y"),
    ],
)
def test_templates_are_filled(template: str, values: dict[str, Any], wanted: str):
    assert text(template, **values) == wanted


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"a": None, "b": None}, "document.missing_text"),
        ({"a": "x"}, "document.missing_text"),
        ({}, "document.missing_text"),
        # What the template itself adds is no text.
        ({"a": " ", "b": ""}, "document.empty"),
        ({"a": " ", "b": None}, "document.empty"),
    ],
)
def test_records_without_text_are_refused(values: dict[str, Any], code: str):
    with pytest.raises(Refusal) as caught:
        text("Title: {a}\n{b}", **values)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "template",
    ["{", "}", "{}", "a {b", "a} b", "{a{b}", "{{a}}", "{{}}", '{"a}', '{"\\x"}', '{"a"b}'],
)
def test_a_template_that_cannot_be_read_is_refused(template: str):
    with pytest.raises(SourceError, match="template"):
        parse_text_field(template)


def test_a_column_without_braces_is_a_name_as_it_is():
    assert parse_text_field("a\\nb").columns == ("a\\nb",)


@given(st.text(min_size=1))
def test_every_name_can_be_written(name: str):
    quoted = parse_text_field("{" + json.dumps(name) + "}.")
    assert quoted.columns == (name,)
    assert quoted.text_of({name: "x"}, "here") == "x."


def test_columns_of_a_template_stay_in_the_metadata(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 7, "s": "x", "n": 1}\n{"id": 8, "n": 1}\n')
    good, bad = read_documents(path, text_field="{id}: {s}")
    assert isinstance(good, Document)
    assert (good.external_id, good.text, good.metadata) == ("7", "7: x", {"s": "x", "n": 1})
    assert isinstance(bad, BadRecord)
    assert bad.message == 'the record on line 2 must have "s", and has "id", "n"'


def test_a_table_without_a_column_of_the_template_is_refused(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("id;s;n\n1;a;b\n")
    with pytest.raises(SourceError) as caught:
        read_documents(path, text_field="{s} {body}")
    assert 'must have a column "body"' in caught.value.message
    assert [each.text for each in read_documents(path, text_field="{s} {n}")] == ["a b"]  # pyright: ignore[reportAttributeAccessIssue]


def test_the_id_alone_is_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    for template in ("{id} {id}", '{"id"}'):
        with pytest.raises(SourceError, match="two columns"):
            read_documents(path, text_field=template)


@pytest.mark.parametrize(
    ("template", "meant"),
    [
        ("{subject}: {body}", "did you mean {Subject}?"),
        ("{Subjekt}: {body}", "did you mean {Subject}?"),
        ("subject", "did you mean --text-field Subject?"),
        ("{price}: {body}", None),
        ("{quoted}: {body}", None),
    ],
)
def test_a_column_that_was_probably_meant(template: str, meant: str | None, tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('id,Subject,body,"Quo{ted"\n1,a,b,c\n')
    with pytest.raises(SourceError) as caught:
        read_documents(path, text_field=template)
    told = (caught.value.hint or "").splitlines()
    assert [line for line in told if line.startswith("did")] == ([meant] if meant else [])
    assert told[0] == 'it has "id", "Subject", "body", "Quo{ted"'
