"""What `score` takes besides JSONL and CSV files: from the command line to the store."""

import gzip
import io
import json
import sqlite3
import sys
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from weighbridge.deployments.cli import main

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

SCHEMA = json.dumps(
    {
        "sentiment": {
            "type": "enum",
            "choices": ["negative", "positive"],
            "description": "The feeling of the text.",
        }
    }
)
ROWS: list[dict[str, Any]] = [
    {"id": "a", "subject": "Broken", "text": "It broke again.", "n": 1},
    {"id": "b", "subject": "Thanks", "text": "Thank you!", "n": 2},
    {"id": "c", "subject": None, "text": None, "n": 3},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def store(
    tmp_path: Path, embedded: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHBRIDGE_DATABASE_URL", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("WEIGHBRIDGE_CHECKPOINT", str(embedded))
    pq.write_table(pa.Table.from_pylist(ROWS), "a.parquet")
    Path("a.json").write_text(json.dumps(ROWS))
    Path("a.jsonl.zst").write_bytes(zstandard.compress(LINES))
    with closing(sqlite3.connect("a.db")) as connection:
        connection.execute("create table t (id, subject, text, n)")
        connection.executemany("insert into t values (:id, :subject, :text, :n)", ROWS)
        connection.commit()
    return tmp_path / "store.db"


def items(store: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(
            "select external_id, line, metadata, code from item order by run_id, position"
        ).fetchall()


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["a.parquet"], [None] * 3),
        (["a.json"], [1, 1, 1]),
        (["a.jsonl.zst"], [1, 2, 3]),
        (["a.db", "--query", "select * from t order by id"], [None] * 3),
        (["sqlite:///a.db", "--query", "select * from t order by id"], [None] * 3),
    ],
)
def test_sources_of_records(
    store: Path, arguments: list[str], lines: list[int | None], capsys: pytest.CaptureFixture[str]
):
    assert main(["score", *arguments, "--schema", SCHEMA, "--json"]) == 3
    outcome = json.loads(capsys.readouterr().out)
    assert [outcome[name] for name in ("documents", "scored", "rejected")] == [3, 2, 1]
    found = items(store)
    assert [each[0] for each in found] == ["a", "b", "c"]
    assert [each[1] for each in found] == lines
    assert [each[2] and json.loads(each[2]) for each in found] == [
        {"subject": "Broken", "n": 1},
        {"subject": "Thanks", "n": 2},
        None,
    ]
    assert found[2][3] == "document.missing_text"
    # Rejections without a line can be listed.
    assert main(["rejected"]) == 0
    assert "document.missing_text" in capsys.readouterr().out


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, None])
def test_a_pipe_is_known_by_its_first_bytes(
    pack: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    feed(monkeypatch, pack(LINES) if pack else Path("a.parquet").read_bytes())
    assert main(["score", "-", "--schema", SCHEMA, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["scored"] == 2


def test_a_folder_a_template_and_a_text_from_a_pipe(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Path("notes/sub").mkdir(parents=True)
    Path("notes/sub/one.md").write_text("It broke again.")
    assert main(["score", "notes", "--schema", SCHEMA]) == 0
    template = ["a.json", "--text-field", r"{subject}\n\n{text}", "--limit", "1"]
    assert main(["score", *template, "--schema", SCHEMA]) == 0
    feed(monkeypatch, b"a text\nof two lines")
    assert main(["score", "-", "--format", "text", "--schema", SCHEMA]) == 0
    assert [each[0] for each in items(store)] == ["sub/one.md", "a", "stdin"]
    with closing(sqlite3.connect(store)) as connection:
        texts = [text for (text,) in connection.execute("select text from document order by id")]
    assert texts == ["It broke again.", "Broken\n\nIt broke again.", "a text\nof two lines"]
    capsys.readouterr()


def test_a_query_is_kept_with_its_run(store: Path, capsys: pytest.CaptureFixture[str]):
    query = "select id, text\n  from t\n  where id is not null and " + " and ".join(["1 = 1"] * 60)
    for wanted in (query, "select * from t"):
        assert main(["score", "a.db", "--query", wanted, "--schema", SCHEMA]) in {0, 3}
    capsys.readouterr()
    with closing(sqlite3.connect(store)) as connection:
        kept = [each for (each,) in connection.execute("select documents_source from run")]
    assert kept == [f"a.db: {' '.join(query.split())[:200].rstrip()}", "a.db: select * from t"]
    assert main(["show", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("source "))
    assert " ".join(" ".join(lines[at : at + 4]).split()) == f"source {kept[0]}"
    assert max(map(len, lines[at : at + 4])) <= 80


def test_a_file_in_another_encoding_has_one_way_out(capsys: pytest.CaptureFixture[str]):
    rows = "".join(f"T-{n};Die Übergabe für Müller\n" for n in range(4))
    Path("tickets.csv").write_bytes(f"id;text\n{rows}1;plain\n".encode("cp1252"))
    assert main(["score", "tickets.csv", "--schema", SCHEMA]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == (
        "hint: 4 of 5 records are not UTF-8; the file looks like Windows-1252: "
        "iconv -f CP1252 -t UTF-8 tickets.csv > tickets-utf8.csv"
    )


def test_what_is_refused_before_anything_starts(store: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, code, words in (
        (["a.db"], 1, "SQLite database"),
        (["a.db", "--query", "delete from t"], 1, "something else than read"),
        (["a.db", "--query", "select x from t"], 1, "no such column: x"),
        (["postgresql://u:S3CRET@h/d", "--query", "select 1"], 2, "PGPASSWORD"),
        (["a.json", "--format", "xml"], 2, "--format"),
        (["a.json", "--text-field", "{"], 1, "matching braces"),
        (["--text", "x", "--query", "select 1"], 2, "--query"),
    ):
        assert main(["score", *arguments, "--schema", SCHEMA]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert words.lower() in err.lower()
        assert "S3CRET" not in err
        assert "Traceback" not in err
    assert not store.exists()


def test_dates_in_paths_are_those_of_today(store: Path, capsys: pytest.CaptureFixture[str]):
    # It may be midnight meanwhile.
    now = datetime.now().astimezone()
    days = [f"{day:%Y-%m-%d}" for day in (now, now + timedelta(days=1))]
    for day in days:
        Path(f"in-{day}.jsonl").write_bytes(LINES)
    arguments = ["in-{date}.jsonl", "--schema", SCHEMA, "--output", "{date:%Y}/out-{date}.csv"]
    assert main(["score", *arguments]) == 3
    (written,) = Path().glob("*/out-*.csv")
    today = written.stem.removeprefix("out-")
    assert today in days
    assert written == Path(f"{today[:4]}/out-{today}.csv")
    assert f" written to {written}\n" in capsys.readouterr().err
    assert len(written.read_text().splitlines()) == 3
    with closing(sqlite3.connect(store)) as connection:
        (source,) = connection.execute("select documents_source from run").fetchone()
    assert source.endswith(f"in-{today}.jsonl")


def test_a_query_may_say_since_when(store: Path, capsys: pytest.CaptureFixture[str]):
    with closing(sqlite3.connect("mails.db")) as connection:
        connection.execute("create table mail (id, text, created)")
        mails = [("old", "It broke.", "2026-10-01"), ("new", "It broke again.", "2026-11-02")]
        connection.executemany("insert into mail values (?, ?, ?)", mails)
        connection.commit()
    query = "select id, text from mail where datetime(created) >= :since"
    command = ["score", "mails.db", "--schema", SCHEMA, "--query", query]
    assert main(command) == 1
    assert "--since" in capsys.readouterr().err
    assert main([*command, "--since", "2026-11-01"]) == 0
    assert [external_id for external_id, *_ in items(store)] == ["new"]
