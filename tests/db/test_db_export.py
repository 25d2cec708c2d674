"""Answers as files: each format reads back the same, and a file is whole or not there."""

import csv
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from weighbridge.db import (
    CsvStyle,
    ExportRefused,
    common_type,
    export_format,
    export_rows,
    export_values,
)
from weighbridge.db.export import ROW_GROUP, as_text

ROWS: list[dict[str, Any]] = [
    {"id": "a", "value": 'comma, quote " and\nline', "probability": 0.1, "margin": None},
    {"id": None, "value": "日本 \u2028 é", "probability": 1 / 3, "margin": -2.5},
]
COLUMNS = ["id", "value", "probability", "margin"]


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes().decode()
    if path.suffix.lower() == ".json":
        return json.loads(text)
    if path.suffix == ".jsonl":
        # U+2028 ends a line for str.splitlines, and not for JSON lines.
        return [json.loads(line) for line in text.split("\n") if line]
    return list(csv.DictReader(text.splitlines(keepends=True)))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.JSON"])
def test_json_reads_back_the_same(tmp_path: Path, name: str):
    export_rows(ROWS, tmp_path / name, columns=COLUMNS)
    assert read(tmp_path / name) == ROWS
    export_rows([], tmp_path / name, columns=COLUMNS)
    assert read(tmp_path / name) == []


def test_csv_reads_back_as_text(tmp_path: Path):
    path = tmp_path / "a.csv"
    export_rows(ROWS, path, columns=COLUMNS)
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["value"] for row in found] == [row["value"] for row in ROWS]
    # repr of a float is its shortest exact form: no digit is lost.
    assert [float(row["probability"]) for row in found] == [0.1, 1 / 3]
    assert [row["margin"] for row in found] == ["", "-2.5"]


def test_a_csv_file_without_rows_still_has_its_columns(tmp_path: Path):
    export_rows([], tmp_path / "a.csv", columns=COLUMNS)
    assert (tmp_path / "a.csv").read_text() == "id,value,probability,margin\n"


def test_columns_are_chosen_and_ordered(tmp_path: Path):
    export_rows(ROWS, tmp_path / "a.jsonl", columns=["margin", "id"])
    assert [list(row) for row in read(tmp_path / "a.jsonl")] == [["margin", "id"]] * 2


def test_answers_are_for_the_user_alone(tmp_path: Path):
    export_rows(ROWS, tmp_path / "a.csv", columns=COLUMNS)
    assert stat.S_IMODE((tmp_path / "a.csv").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text("the old one")

    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise RuntimeError("the store went away")

    with pytest.raises(RuntimeError, match="went away"):
        export_rows(rows(), path, columns=COLUMNS)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_json_cannot_hold_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        export_rows([{"p": float("nan")}], tmp_path / "a.json", columns=["p"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.xlsx", "a", "a.csv.gz", ".csv", "json"])
def test_a_name_without_a_known_ending_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ExportRefused, match=r"\.json, \.jsonl, \.csv") as caught:
        export_format(tmp_path / name)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(".csv")


@pytest.mark.parametrize(
    ("place", "words"),
    [("absent/a.csv", "absent cannot be written"), ("folder.csv", "it is a folder")],
)
def test_a_place_that_holds_no_file_is_refused_beforehand(tmp_path: Path, place: str, words: str):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ExportRefused, match=words) as caught:
        export_format(tmp_path / place)
    assert str(caught.value.hint).startswith("name another file in an existing folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ExportRefused, match="cannot be written"):
        export_format(tmp_path / "a.csv")


def test_a_place_that_goes_away_is_refused(tmp_path: Path):
    # /proc takes no new files, not even from root, and says so only when one is made.
    with pytest.raises(ExportRefused, match="must be a file that can be written"):
        export_rows(ROWS, Path("/proc/answers.csv"), columns=COLUMNS)


TYPES = {"id": str, "value": str, "probability": float, "margin": float, "n": int}


def test_parquet_keeps_types_and_nulls(tmp_path: Path):
    rows = [{**row, "n": 2**53 + n} for n, row in enumerate(ROWS)]
    export_rows(rows, tmp_path / "a.parquet", columns=TYPES)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.to_pylist() == rows
    kinds = {field.name: str(field.type) for field in table.schema}
    # 2 ** 53 + 1 is no float64: integers are integers.
    assert kinds == {
        **dict.fromkeys(("id", "value"), "string"),
        **dict.fromkeys(("probability", "margin"), "double"),
        "n": "int64",
    }
    export_rows([], tmp_path / "a.parquet", columns=TYPES)
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").schema == table.schema


def test_parquet_is_written_in_row_groups(tmp_path: Path):
    rows = ((n, f"v{n % 3}") for n in range(2 * ROW_GROUP + 1))
    done = export_values(rows, tmp_path / "a.parquet", columns={"n": int, "value": str})
    file = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet")
    assert (done.rows, file.metadata.num_row_groups) == (2 * ROW_GROUP + 1, 3)
    assert file.read().column("n").to_pylist() == list(range(done.rows))


@pytest.mark.parametrize("cell", ["=1+1", "@SUM(A1)", "+1 (2)", "-x", "\t=1", "\r=1", "+49 30 1"])
def test_formulas_stay_unless_they_are_to_be_escaped(tmp_path: Path, cell: str):
    path = tmp_path / "a.csv"
    for escape, wanted in ((False, cell), (True, f"'{cell}")):
        done = export_values([(cell, 1.0)], path, columns=["id", "p"], style=CsvStyle(escape))
        with path.open(newline="", encoding="utf-8") as file:
            assert list(csv.reader(file)) == [["id", "p"], [wanted, "1.0"]]
        assert (done.rows, done.formulas) == (1, 1)


@pytest.mark.parametrize("cell", ["-5", "+5.25", "a=b", "", "'=1", "1-2"])
def test_what_is_no_formula_is_not_taken_for_one(tmp_path: Path, cell: str):
    path = tmp_path / "a.csv"
    done = export_values(
        [(cell, -1.5)], path, columns=["id", "p"], style=CsvStyle(escape_formulas=True)
    )
    assert done.formulas == 0
    assert path.read_text().endswith(f"{cell},-1.5\n")


def test_a_format_given_by_name(tmp_path: Path):
    export_rows(ROWS, tmp_path / "answers", columns=COLUMNS, format="jsonl")
    assert len((tmp_path / "answers").read_text().split("\n")) == 3
    with pytest.raises(
        ExportRefused, match=r"end as its format does, got a\.csv for the format json"
    ):
        export_format(tmp_path / "a.csv", "json")


def test_a_csv_file_for_a_spreadsheet(tmp_path):
    path = tmp_path / "a.csv"
    style = CsvStyle(escape_formulas=True, byte_order_mark=True, separator=";", decimal=",")
    rows = [("=1;2", 0.5, 7, True), ("é", None, -1, [1])]
    export_values(rows, path, columns=["id", "p", "n", "x"], style=style)
    text = path.read_bytes().decode("utf-8")
    assert text == '\ufeffid;p;n;x\n"\'=1;2";0,5;7;true\né;;-1;[1]\n'


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], int),
        ([1, 2.5], float),
        ([True, False], bool),
        # Mixed, or too long for a number of a file.
        *(([], str), ([None], str), ([1, "a"], str), ([True, 1], str), ([[1]], str)),
        *(([2**63], str), ([2**53 + 1, 0.5], str), (["a"], str)),
    ],
)
def test_the_type_of_a_column(values, kind, tmp_path):
    assert common_type(values) is kind
    path = tmp_path / "a.parquet"
    export_values([(value,) for value in values], path, columns={"x": common_type(values)})
    (told,) = pyarrow.parquet.read_table(path).to_pydict().values()
    text = kind is str
    assert told == [as_text(value) if text else value for value in values]


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "link.csv"])
def test_a_database_is_never_replaced(store, engine, path, make, name):
    run_id = store.begin_run(make.start()).run_id
    store.record_batch(run_id, make.batch(make.scored(0)))
    path.with_name("link.csv").symlink_to(path)
    before = path.read_bytes()
    # A slip of --db and --output must not cost the answers of a year.
    with pytest.raises(ExportRefused, match="it is a SQLite database"):
        export_format(path.with_name(name), "csv")
    assert path.read_bytes() == before


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "out.csv"
    os.mkfifo(pipe)
    # As root, /dev/null itself would become a plain file.
    with pytest.raises(ExportRefused, match="a pipe or a device"):
        export_format(pipe)
    assert pipe.is_fifo()
