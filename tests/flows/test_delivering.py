"""The output file: looked at before a run, written whole after it."""

import csv
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from weighbridge.db.errors import ExportRefused
from weighbridge.flows import ScoreRequest
from weighbridge.flows.delivering import check_output


def request(folder: Path, **fields: Any) -> ScoreRequest:
    return ScoreRequest.model_validate(
        {"documents": str(folder / "in.jsonl"), "schema": str(folder / "schema.json"), **fields}
    )


def check(folder: Path, output: Path | str, **fields: Any) -> None:
    check_output(request(folder, output=str(output), **fields), f"sqlite:///{folder / 'store.db'}")


def test_folders_are_made_before_the_run(tmp_path: Path):
    check(tmp_path, tmp_path / "2026" / "11" / "answers.csv")
    assert (tmp_path / "2026" / "11").is_dir()
    assert list((tmp_path / "2026" / "11").iterdir()) == []
    check_output(request(tmp_path), "sqlite:///store.db")


def test_a_former_output_may_be_replaced(tmp_path: Path):
    (tmp_path / "answers.csv").write_text("former")
    check(tmp_path, tmp_path / "answers.csv")
    assert (tmp_path / "answers.csv").read_text() == "former"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("answers.xlsx", r"must end in \.json, \.jsonl, \.csv, \.parquet"),
        ("answers", "must end in"),
        ("folder.csv", "it is a folder"),
        ("in.jsonl", "must not replace the documents"),
        ("link.jsonl", "must not replace the documents"),
        ("folder.csv/../in.jsonl", "must not replace the documents"),
        ("schema.json", "must not replace the schema"),
        ("store.db", "must not replace the store"),
        ("data.csv", "it is a SQLite database"),
        ("in.jsonl/answers.csv", "in a folder that can be made"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str, words: str):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "schema.json").write_text("{}")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    (tmp_path / "data.csv").write_bytes(b"SQLite format 3\0")
    with pytest.raises(ExportRefused, match=words) as caught:
        check(tmp_path, tmp_path / name)
    assert caught.value.hint
    assert "--output" not in caught.value.hint
    assert (tmp_path / "in.jsonl").read_text() == '{"text": "a"}\n'


def test_a_document_of_a_folder_is_not_replaced(tmp_path: Path):
    mails = tmp_path / "mails"
    mails.mkdir()
    (mails / "one.json").write_text("a mail")
    with pytest.raises(ExportRefused, match="must not replace a document"):
        check(tmp_path, mails / "one.json", documents=str(mails / "*"), format="text")
    check(tmp_path, tmp_path / "two.json", documents=str(mails / "*"), format="text")


def test_documents_of_a_database_are_not_replaced(tmp_path: Path):
    url = "postgresql://user@host/mails.json"
    check(tmp_path, tmp_path / "mails.json", documents=url, query="select 1")
    with pytest.raises(ExportRefused, match="must not replace the documents"):
        check(tmp_path, tmp_path / "in.jsonl", query="select 1")


# --- after a real run -----------------------------------------------------------------------


@pytest.mark.prefect
@pytest.mark.mlx
@pytest.mark.slow
def test_the_answers_are_written_when_all_is_scored(bench: Any):
    output = bench.folder / "out" / "answers-{date}.csv"
    today = {f"answers-{datetime.now(UTC):%Y-%m-%d}.csv"}
    outcome = bench.score(["It broke.", "Thanks!", " "], output=str(output), timezone="UTC")
    (written,) = (bench.folder / "out").iterdir()
    assert written.name in today | {f"answers-{datetime.now(UTC):%Y-%m-%d}.csv"}
    with written.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = bench.rows("select * from results where run_id = ?", outcome["run_id"])
    assert [row["value"] for row in rows] == [row["value"] for row in kept]
    assert len(rows) == 2
    # Again, in place of the former one and as another format.
    bench.score(["Thanks!"], output=str(written))
    assert len(written.read_text().splitlines()) == 2
    bench.score(["Thanks!"], output=str(written.with_suffix(".json")))
    assert len(json.loads(written.with_suffix(".json").read_text())) == 1


@pytest.mark.prefect
@pytest.mark.mlx
@pytest.mark.slow
def test_a_file_that_fails_in_the_end_costs_no_answers(bench: Any, deployed: Any):
    from weighbridge.flows import score_documents
    from weighbridge.flows.progress import Progress, listening

    output = bench.folder / "out" / "answers.csv"

    def in_the_way(progress: Progress) -> None:
        if progress.done and not output.exists():
            output.mkdir()

    deployed.deploy(score_documents)
    asked = bench.request(["It broke."], output=str(output))
    run = deployed.create(asked.model_dump(mode="json", by_alias=True))
    with (
        listening(in_the_way),
        pytest.raises(
            ExportRefused, match=r"all is scored and kept as run \d+, .* folder"
        ) as caught,
    ):
        deployed.execute(run)
    (kept,) = bench.rows("select id, status, scored from run")
    assert (kept["status"], kept["scored"]) == ("completed", 1)
    assert f"weighbridge results {kept['id']} --output" in str(caught.value.hint)
    assert [each.name for each in output.parent.iterdir()] == ["answers.csv"]
    assert deployed.read(run).state.name == "Failed"

    # Mended, its retry writes the file, and scores nothing once more.
    output.rmdir()
    outcome = deployed.execute(deployed.put_back(run))
    assert (outcome["run_id"], outcome["scored"]) == (kept["id"], 1)
    assert len(output.read_text().splitlines()) == 2
    assert bench.rows("select count(*) as n from decision") == [{"n": 1}]


@pytest.mark.prefect
@pytest.mark.mlx
@pytest.mark.slow
def test_a_wrong_name_is_told_before_anything_is_scored(bench: Any):
    with pytest.raises(ExportRefused, match="must not replace the documents"):
        bench.score(["It broke."], output=str(bench.folder / "documents.jsonl"))
    assert not bench.database.exists() or bench.rows("select * from run") == []
