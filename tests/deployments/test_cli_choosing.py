"""results and query for a spreadsheet user: which documents, which columns, which file."""

import csv
import io
import json
import runpy
import socket
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from weighbridge.db import Store, open_engine
from weighbridge.deployments.cli import main

TESTS = Path(__file__).parents[1]
make = runpy.run_path(str(TESTS / "db" / "conftest.py"))["Builders"]()
TOLD: list[dict[str, Any] | None] = [
    {"city": "Oslo", "n": 1, "topic": "old"},
    {"city": 7, "n": 2.5, "topic": "=1+1"},
    None,
    {"city": ["a"], "n": None},
]


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Topic logits n against 1.5 for billing and login; metadata of several kinds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answers.db"
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{path}")
    engine = open_engine(f"sqlite:///{path}")
    store = Store(engine)
    run_id = store.begin_run(make.start(host=socket.gethostname())).run_id
    items = [
        make.scored(n, metadata=told, answers=make.answers(topic={"billing": n, "login": 1.5}))
        for n, told in enumerate(TOLD)
    ]
    store.record_batch(run_id, make.batch(*items))
    store.finish_run(run_id, "completed")
    engine.dispose()
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    found = main(list(arguments))
    out, err = capsys.readouterr()
    assert (found, "Traceback" in err) == (code, False), err
    return out, err


def value(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json")[0])


def test_values_and_where(capsys: pytest.CaptureFixture[str]):
    topic = ("results", "--field", "topic")
    both = value(capsys, *topic, "--value", "login", "--value", "billing")
    assert [row["value"] for row in both] == ["login", "login", "billing", "billing"]
    where = ("results", "--where", "topic=login", "--where", "urgent=true")
    assert {row["position"] for row in value(capsys, *where)} == {0, 1}
    assert value(capsys, *where, "--count") == 6
    # 0.818 for 0 and 0.622 for 1; the bound is that of topic, and all columns stay.
    (row,) = value(capsys, *where[:3], "--min-probability", "0.8", "--wide")
    assert (row["position"], row["urgent"]) == (0, "true")
    anger = value(capsys, *where, "--field", "anger", "--wide")
    assert [list(row)[3:] for row in anger] == [["anger", "anger_probability"]] * 2


def test_wide_by_the_least_probable(capsys: pytest.CaptureFixture[str]):
    rows = value(capsys, "results", "--wide", "--uncertain", "--field", "topic")
    # Margins 1.5, 0.5, 0.5, 1.5.
    assert [row["position"] for row in rows] == [1, 2, 0, 3]


def test_metadata_columns(capsys: pytest.CaptureFixture[str]):
    plain = value(capsys, "results", "--wide")
    rows = value(capsys, "results", "--wide", "--with", "city,n", "--with", "topic")
    assert list(rows[0])[:7] == [
        *("run_id", "position", "external_id", "city", "n", "metadata_topic", "topic"),
    ]
    assert [[row.pop(name) for name in ("city", "n", "metadata_topic")] for row in rows] == [
        ["Oslo", 1, "old"],
        [7, 2.5, "=1+1"],
        [None, None, None],
        [["a"], None, None],
    ]
    # Without the columns all is as it was.
    assert rows == plain
    long = value(capsys, "results", "--with", "n", "--field", "topic")
    assert [list(row)[-2:] for row in long] == [["schema", "n"]] * 4
    out, _ = run(capsys, "results", "--wide", "--with", "n,city")
    assert out.splitlines() == [
        "position  id     n  city   topic    urgent  anger",
        "       0  T-0    1  Oslo   login    true    annoyed",
        "       1  T-1  2.5  7      login    true    annoyed",
        "       2  T-2              billing  true    annoyed",
        '       3  T-3       ["a"]  billing  true    annoyed',
    ]
    out, _ = run(capsys, "results", "--with", "city", "--field", "topic", "--limit", "1")
    assert out.splitlines()[0].split()[:3] == ["position", "id", "city"]


@pytest.mark.parametrize("wide", [["--wide"], []])
def test_metadata_columns_in_files(wide: list[str], capsys: pytest.CaptureFixture[str]):
    arguments = ("results", *wide, "--field", "topic", "--with", "city,n")
    run(capsys, *arguments, "--output", "a.parquet")
    table = pyarrow.parquet.read_table("a.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["city"], types["n"]) == ("string", "double")
    assert table.to_pydict()["city"] == ["Oslo", "7", None, '["a"]']
    run(capsys, *arguments, "--output", "a.csv")
    with Path("a.csv").open(newline="") as file:
        assert [row["city"] for row in csv.DictReader(file)] == ["Oslo", "7", "", '["a"]']


def test_csv_for_a_spreadsheet(capsys: pytest.CaptureFixture[str]):
    arguments = ("results", "--wide", "--field", "topic", "--with", "topic", "--excel")
    _, err = run(capsys, *arguments, "--decimal", ",", "--output", "a.csv")
    assert err == "4 rows of run 1 (tickets.jsonl) written to a.csv\n"
    text = Path("a.csv").read_bytes().decode("utf-8")
    assert text.splitlines()[0].startswith("\ufeffrun_id;position;")
    rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff")), delimiter=";"))
    assert [row["metadata_topic"] for row in rows] == ["old", "'=1+1", "", ""]
    assert rows[0]["topic_probability"].startswith("0,8")
    out, err = run(capsys, "query", "select 0.5 as a, '=1' as b", "--excel", "--separator", "tab")
    assert (out, err) == ("\ufeffa\tb\n0.5\t'=1\n", "")


def test_query_into_files(capsys: pytest.CaptureFixture[str]):
    sql = (
        "select 1 as n, 0.5 as p, 'x' as s, x'00ff' as b, 1 as m "
        "union select 2, 1.0, null, x'', 'a'"
    )
    rows = value(capsys, "query", sql)
    for suffix in ("json", "jsonl", "csv", "parquet"):
        out, err = run(capsys, "query", sql, "--output", f"q.{suffix}")
        assert (out, err) == ("", f"2 rows written to q.{suffix}\n")
    assert json.loads(Path("q.json").read_text()) == rows
    assert [json.loads(line) for line in Path("q.jsonl").read_text().splitlines()] == rows
    assert Path("q.csv").read_text() == "n,p,s,b,m\n1,0.5,x,00ff,1\n2,1.0,,,a\n"
    table = pyarrow.parquet.read_table("q.parquet")
    assert [str(field.type) for field in table.schema] == [
        *("int64", "double", "string", "string", "string"),
    ]
    assert table.num_rows == 2
    assert run(capsys, "query", sql, "--format", "csv")[0] == Path("q.csv").read_text()
    assert json.loads(run(capsys, "query", "select 9e999 as x", "--format", "json")[0]) == [
        {"x": "inf"}
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--min-probability", "80%"), 2, "a number from 0 to 1, such as 0.8, got '80%'"),
        (("--max-probability", "0,8"), 2, "a number from 0 to 1, such as 0.8, got '0,8'"),
        (("--min-probability", "80"), 2, "such as 0.8, got '80'"),
        (("--min-probability", "nan"), 2, "such as 0.8, got 'nan'"),
        (("--field", "urgent,topic"), 1, "hint: name each on its own: --field urgent --field"),
        (("--where", "urgent"), 2, "--where takes FIELD=VALUE"),
        (("--where", "nope=1"), 1, "hint: the fields are: topic, urgent, anger"),
        (("--where", "topic=nope"), 1, "hint: the choices are: billing, login"),
        (("--where", "topic=login", "--where", "topic=billing"), 2, "cannot be both"),
        (("--with", "nope"), 1, "hint: the columns are: city, n, topic"),
        (("--format", "csv", "--decimal", ",", "--separator", ","), 2, "--decimal , needs another"),
        (("--decimal", "x"), 2, "--decimal takes"),
        (("--separator", "ab"), 2, "--separator takes one character"),
        (("--excel", "--json"), 2, "are for CSV"),
        (("--excel", "--output", "a.json"), 2, "are for CSV"),
        (("--separator", ";", "--count"), 2, "are for CSV"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
):
    out, err = run(capsys, "results", *arguments, code=code)
    assert (out, words in err) == ("", True), err
    assert not Path("a.json").exists()
