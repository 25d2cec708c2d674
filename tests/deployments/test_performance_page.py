"""docs/performance.md: what was measured, as `weighbridge bench` wrote it, and no more."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from weighbridge.deployments.bench_targets import TARGETS

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "performance.py"))
MACHINE = {
    "system": "Linux 6",
    "processor": "A CPU",
    "cpus": 2,
    "device": "cpu",
    "dtype": "float32",
    "blas": "MKL 2026",
    "threads": {"MKL_NUM_THREADS": "1"},
    "load": 0.5,
}


def row(contender: str, baseline: str, **values: Any) -> dict[str, Any]:
    return {
        "model": "llama",
        "scenario": "8x1953",
        "contender": contender,
        "baseline": baseline,
        "seconds": 2.0,
        "ratio": 1.5,
        "runs": 3,
        "labels_match": True,
        "max_probability_difference": 2e-7,
        "extra_bytes": 0,
        **values,
    }


def page(*rows: dict[str, Any]) -> str:
    report = {"machine": MACHINE, "versions": {"mlx": "0.32"}, "rows": list(rows)}
    return SCRIPT["page"](report)


def test_the_page_is_what_was_measured():
    report = json.loads((DOCS / "performance.json").read_text(encoding="utf-8"))
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == SCRIPT["page"](report)
    assert (DOCS / "images" / "performance.svg").read_text().startswith("<svg")
    # Nothing was measured on Metal, so nothing is claimed of it.
    assert report["machine"]["device"] == "cpu"


def test_a_page_by_hand():
    text = page(
        row("reference-parallel", "reference-independent", seconds=3.0),
        row("parallel", "reference-parallel"),
        row("parallel", "reference-independent", ratio=10.5),
        row("auto", "reference-parallel", ratio=1.49),
    )
    assert "| llama | 8 x 1953 | 3.000 | 2.000 | 1.50 | 1.49 |  | 10.50 |  |" in text
    assert "A CPU, 2 CPUs, cpu in float32, MKL 2026 (MKL_NUM_THREADS=1); mlx 0.32." in text
    assert "medians of 3 rounds" in text
    assert "All labels were those of the reference, and probabilities within 2e-07 of it." in text
    # What was not measured has no section.
    assert "Memory" not in text


def test_memory_is_a_share_of_copies():
    same = {"scenario": "memory"}
    text = page(
        row("prefix packed", "prefix copied", extra_bytes=12 * 2**20, **same),
        row("prefix copied", "prefix packed", extra_bytes=120 * 2**20, **same),
    )
    assert "| llama | 32 fields, 2,048 tokens | 120 | 12 | 10% |" in text


def test_targets_are_held_against_what_was_measured():
    reference = {"baseline": "reference-parallel"}
    resident = "schema-first, resident"
    text = page(
        row("auto", ratio=1.45, **reference),
        row("auto", "reference-independent", ratio=9.99),
        row(resident, ratio=2.79, scenario="documents-8x1000", **reference),
        row("auto", model="qwen3_5", ratio=1.99, **reference),
        row("auto", model="embedded", ratio=1.0, **reference),
        row("cached_serial", ratio=1.0, **reference),
    )
    lines = text.partition("## Targets")[2].partition("##")[0].splitlines()
    assert [line for line in lines if line.startswith(("| llama", "| qwen", "| emb"))] == [
        "| llama | 8 x 1953: `auto` over the reference | 1.45 | 1.45 | met |",
        "| llama | 8 x 1953: `auto` over independent | 10.00 | 9.99 | **missed** |",
        f"| llama | 8 fields, 1,000 tokens: `{resident}` over the reference | 2.80 | 2.79 | "
        "**missed** |",
        "| qwen3_5 | 8 x 1953: `auto` over the reference | 2.00 | 1.99 | **missed** |",
    ]


def test_targets_name_what_is_measured():
    from weighbridge.deployments.bench_contests import scenario_names

    report = json.loads((DOCS / "performance.json").read_text(encoding="utf-8"))
    measured = {(row["scenario"], row["contender"], row["baseline"]) for row in report["rows"]}
    for each in TARGETS:
        assert each.scenario in scenario_names()
        assert (each.scenario, each.contender, each.baseline) in measured


def test_a_checkpoint_stands_beside_the_random_models():
    same = {"scenario": "documents-3x30"}
    of_one = {"model": "embedded", "runs": 1}
    text = page(
        *(
            each
            for values in ({}, of_one)
            for each in (
                row("reference-parallel", "schema-first, resident", seconds=2.0, **same, **values),
                row("schema-first, resident", "reference-parallel", seconds=0.5, **same, **values),
            )
        )
    )
    assert "medians of 1 to 3 rounds" in text
    assert "- `embedded`: SmolLM2-135M-Instruct, the embedded checkpoint" in text
    for model in ("llama", "embedded"):
        assert f"| {model} | 3 fields, 30 tokens | 0.50 | 2.00 | 1.50 |" in text


@pytest.mark.parametrize(
    "wrong",
    [{"labels_match": False}, {"max_probability_difference": None}],
)
def test_a_page_does_not_hide_what_differs(wrong: dict[str, Any]):
    good = row("parallel", "reference-parallel")
    assert "DIFFER" in page(good, {**good, **wrong})
    assert "DIFFER" not in page(good)
