"""Answers as files: each format reads back the same, and a file is whole or not there."""

import csv
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.db import ExportRefused, export_format, export_rows

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
    assert caught.value.hint == "name a file in an existing folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ExportRefused, match="cannot be written"):
        export_format(tmp_path / "a.csv")


def test_a_place_that_goes_away_is_refused(tmp_path: Path):
    # /proc takes no new files, not even from root, and says so only when one is made.
    with pytest.raises(ExportRefused, match="must be a file that can be written"):
        export_rows(ROWS, Path("/proc/answers.csv"), columns=COLUMNS)
