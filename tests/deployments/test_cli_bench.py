"""weighbridge bench: what it prints, when it fails, and that contests are fair.

Nothing here says how fast anything is: `make bench` measures that.
"""

import importlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.scorer.adapter_folders import draw, write_mlx
from tests.scorer.conftest import Tiny

from weighbridge.deployments import bench_contests, bench_prompts
from weighbridge.deployments.bench import Contender, Contest, Document, compare, measure, passes
from weighbridge.deployments.cli import main
from weighbridge.scorer.backend import describe_backend, on_mlx_thread
from weighbridge.scorer.checkpoint import inspect_checkpoint
from weighbridge.scorer.rows import Mode, Row, Timings

PROMISED = {
    *("name", "seconds", "wall_seconds", "baseline", "ratio", "runs", "prefix_tokens"),
    *("peak_bytes", "labels_match", "max_probability_difference"),
}
ADAPTED = "model.layers.0.self_attn.q_proj"
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every model and scenario as small as it can be and still be one."""
    from weighbridge.scorer import random_models

    for name, config in random_models.RANDOM_MODELS.items():
        monkeypatch.setitem(random_models.RANDOM_MODELS, name, {**config, **SMALL})
    monkeypatch.setattr(bench_contests, "PUBLISHED", ((1, 40), (3, 50)))
    monkeypatch.setattr(bench_contests, "DOCUMENTS", ((3, 10),))
    monkeypatch.setattr(bench_contests, "SWITCHED", (3, 300))
    monkeypatch.setattr(bench_contests, "LABELLED", (3, 300))
    monkeypatch.setattr(bench_contests, "BRANCHED", (4, 512))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.mlx
@pytest.mark.usefixtures("small")
def test_everything_is_measured_and_the_file_is_what_is_printed(
    small: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "--json", "--repeats", "2", "--output", "bench.json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((small / "bench.json").read_text()) == report
    assert {"machine", "versions", "rows"} <= report.keys()
    assert {"device", "dtype", "blas", "cpus", "threads"} <= report["machine"].keys()
    assert {"weighbridge", "mlx", "mlx-lm", "python"} <= report["versions"].keys()
    rows = report["rows"]
    assert all(row.keys() >= PROMISED for row in rows)
    assert {row["model"] for row in rows} == {"llama", "qwen3_5"}
    assert {row["scenario"] for row in rows} == {
        *("1x40", "3x50", "documents-3x10", "switches", "switches-documents", "labels", "memory")
    }
    assert {row["contender"] for row in rows if row["scenario"] == "3x50"} == {
        *("reference-parallel", "reference-independent"),
        *(mode.value for mode in Mode),
    }
    assert all(row["labels_match"] and row["runs"] == 2 and row["seconds"] > 0 for row in rows)
    # Rounding of float32 on the way, and not the same thing twice.
    apart = [row["max_probability_difference"] for row in rows]
    assert 0 < max(apart) <= 1e-4
    # Random models without gated delta layers have no such switch.
    off = {(row["model"], row["baseline"]) for row in rows if row["contender"] == "everything"}
    assert {model for model, name in off if "gated" in name} == {"qwen3_5"}


@pytest.mark.mlx
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("as_json", [True, False])
def test_control_a_contender_with_a_fault_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
):
    plain = bench_contests._resident

    def forgetful(engine: Any, mode: str) -> Any:
        score = plain(engine, mode)
        if mode != "cached_serial":
            return score
        # Loses the first token of each prompt: all positions behind it move.
        return lambda some: score(
            [
                Document(tuple(Row(row.tokens[1:], row.candidates) for row in each.rows))
                for each in some
            ]
        )

    monkeypatch.setattr(bench_contests, "_resident", forgetful)
    command = ["bench", "--model", "llama", "--scenario", "3x50", "--repeats", "1"]
    assert main([*command, *(["--json"] if as_json else [])]) == 1
    out, err = capsys.readouterr()
    assert "answers must be the same within 0.0001" in err
    assert "3x50 cached_serial" in err
    assert "3x50 parallel" not in err
    if as_json:
        rows = json.loads(out)["rows"]
        assert {row["contender"] for row in rows if not passes(row, 1e-4)} == {"cached_serial"}


@pytest.mark.mlx
@pytest.mark.usefixtures("small")
def test_the_embedded_checkpoint_is_measured_on_its_own_tokens(
    embedded: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["bench", "--model", str(embedded), "--scenario", "1x40", "--repeats", "1"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    # The folder it lies in is nobody's business.
    assert {row["model"] for row in rows} == {embedded.name}


@pytest.fixture
def adapted(small: Path) -> tuple[Path, Path]:
    """Return a tiny checkpoint and an adapter of it."""
    base = Tiny().checkpoint(small / "base")
    shape = load_file(base / "model.safetensors")[f"{ADAPTED}.weight"].shape
    return base, write_mlx(small / "lora", draw({ADAPTED: shape}))


@pytest.mark.mlx
def test_an_adapter_is_fused_as_scoring_does(
    adapted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    base, lora = map(str, adapted)
    command = ["bench", "--model", base, "--scenario", "1x40", "--repeats", "1", "--json"]
    assert main([*command, "--adapter", lora]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["model"] for row in rows} == {"base + lora"}

    def weights(adapter: Path | None) -> list[Any]:
        info = inspect_checkpoint(base, adapter=adapter)
        opened = bench_contests.open_checkpoint(info, describe_backend(), 1e-4)
        return [np.array(dict(each.named_modules())[ADAPTED].weight.astype(mx.float32))
                for each in (opened.model, opened.twin())]  # fmt: skip

    import mlx.core as mx

    (plain, _), (fused, twin) = (on_mlx_thread(weights, each) for each in (None, adapted[1]))
    assert np.array_equal(fused, twin)
    assert np.abs(fused - plain).max() > 0.01


@pytest.mark.mlx
def test_a_folder_with_an_adapter_beside_the_weights_is_not_measured_without_it(
    adapted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    base, lora = adapted
    for file in lora.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    assert main(["bench", "--model", str(base), "--scenario", "1x40", "--repeats", "1"]) == 1
    assert "must be merged or name its adapter" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--adapter", "some"], 2, "an adapter needs one --model that is a checkpoint"),
        (["--model", "llama", "--adapter", "some"], 2, "got llama"),
        (["--model", "embedded", "--model", "x", "--adapter", "y"], 2, "got embedded, x"),
        (["--model", ".", "--adapter", "no-such-folder"], 1, "no-such-folder"),
        (["--scenario", "9x9"], 2, "scenario must be one of 1x239, "),
        (["--repeats", "0"], 2, "--repeats"),
        (["--repeats", "some"], 2, "--repeats"),
        (["--output", "nowhere/bench.json"], 1, "the folder of --output must exist"),
        (["--model", "no-such-folder"], 1, "no-such-folder"),
        (["--model", "embedded"], 1, "weighbridge checkpoint demo"),
    ],
)
def test_bad_options_are_told_at_once(
    options: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    assert main(["bench", *options]) == code
    err = capsys.readouterr().err
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def rows(count: int) -> tuple[Row, ...]:
    return tuple(Row((1, 2, number), (0, 1)) for number in range(count))


def answering(seen: list[str], name: str, logit: Callable[[Row], float]) -> Any:
    def score(some: Sequence[Document]) -> Any:
        seen.append(name)
        return [
            ([np.array([0.0, logit(row)]) for row in each.rows], Timings(peak_bytes=7))
            for each in some
        ]

    return score


def test_everyone_has_a_turn_each_round_and_begins_once():
    seen: list[str] = []
    documents = [Document(rows(1))]
    names = ("a", "b", "c")
    contenders = tuple(
        Contender(name, answering(seen, name, lambda _: 1.0), documents, ("a",), "a")
        for name in names
    )
    measured = measure(Contest("x", 2, contenders), model="m", repeats=3, limit=1e-4)
    assert seen == [*"abc", *"bca", *"cab"]
    assert [row["name"] for row in measured] == ["m x a", "m x b", "m x c"]
    # Over itself, by definition.
    assert measured[0]["ratio"] == 1.0
    assert measured[0]["peak_bytes"] == 7


def test_no_round_begins_once_enough_time_was_spent():
    def runs(repeats: int, seconds: float) -> int:
        seen: list[str] = []
        one = Contender("a", answering(seen, "a", lambda _: 1.0), [Document(rows(1))], ("a",), "a")
        (row,) = measure(
            Contest("x", 2, (one,)), model="m", repeats=repeats, limit=1e-4, seconds=seconds
        )
        assert len(seen) == row["runs"]
        return row["runs"]

    assert runs(5, 0.0) == 1  # never none
    assert runs(5, math.inf) == 5


@pytest.mark.mlx
def test_rounds_are_only_cut_where_nothing_is_decided(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # The package has a function of this name.
    command = importlib.import_module("weighbridge.deployments.cli.bench")
    monkeypatch.setattr(command, "ENOUGH_SECONDS", 0.0)
    base = str(Tiny().checkpoint(small / "base"))
    monkeypatch.setattr(bench_contests, "PUBLISHED", ((1, 239),))  # a target of llama

    def runs(*options: str) -> set[int]:
        assert main(["bench", "--scenario", "1x239", "--json", *options]) == 0
        return {row["runs"] for row in json.loads(capsys.readouterr().out)["rows"]}

    assert runs("--model", "llama") == {3}
    assert runs("--model", base) == {1}
    assert runs("--model", base, "--repeats", "2") == {2}


def test_one_field_at_a_time_is_another_one_each_round():
    asked: list[int] = []

    def logit(row: Row) -> float:
        asked.append(row.tokens[-1])
        return 1.0 * row.tokens[-1]

    documents = [Document(rows(3))]
    whole = Contender("whole", answering([], "whole", lambda row: row.tokens[-1]), documents,
                      ("each",), "each")  # fmt: skip
    each = Contender(
        "each", answering([], "each", logit), documents, ("whole",), "whole", one_field=True
    )
    measured = measure(Contest("x", 2, (whole, each)), model="m", repeats=4, limit=1e-4)
    assert asked == [0, 1, 2, 0]
    # Answers are held against those of the same field: another field's would differ.
    assert all(row["labels_match"] for row in measured)
    assert {row["max_probability_difference"] for row in measured} == {0.0}


def answers(*rows_of_p: Sequence[float]) -> dict[tuple[int, int], Any]:
    return {(0, place): np.array(row) for place, row in enumerate(rows_of_p)}


def test_answers_compared_by_hand():
    one = answers([0.5, 0.3, 0.2], [0.9, 0.1, 0.0])
    assert compare(one, one, 1e-4) == (False, 0.0)
    # The second row chooses another label: 0.1 for 0.9.
    differs, apart = compare(one, answers([0.5, 0.3, 0.2], [0.1, 0.9, 0.0]), 1e-4)
    assert (differs, apart) == (True, pytest.approx(0.8))
    # Two choices closer than the limit may change places.
    tie, swapped = answers([0.50004, 0.49996]), answers([0.49996, 0.50004])
    assert compare(tie, swapped, 1e-4)[0] is False
    assert compare(tie, swapped, 1e-5)[0] is True
    # Not a number, and nothing in common.
    assert compare(one, answers([np.nan, 0.5, 0.5]), 1e-4) == (True, None)
    assert compare(one, {(7, 0): np.array([1.0])}, 1e-4) == (True, None)


@pytest.mark.parametrize(
    ("labels", "apart", "ok"),
    [(True, 1e-4, True), (True, 1.1e-4, False), (False, 0.0, False), (True, None, False)],
)
def test_what_passes(labels: bool, apart: float | None, ok: bool):
    row = {"labels_match": labels, "max_probability_difference": apart}
    assert passes(row, 1e-4) is ok


def test_documents_share_what_is_said_and_no_more():
    source = tuple(range(1000))
    prompt = bench_prompts.Prompt(before=50, behind=7)
    made = bench_prompts.documents_around(source, 3, prompt, 20, 4)
    assert [each.resident_tokens for each in made] == [50] * 4
    assert {row.tokens[:50] for each in made for row in each.rows} == {made[0].rows[0].tokens[:50]}
    assert len({each.rows[0].tokens[50] for each in made}) == 4
    assert {row.tokens[70:77] for each in made for row in each.rows} == {tuple(range(70, 77))}
    # Within a document 77 tokens are shared, and then its fields part.
    for each in made:
        assert len({row.tokens[:77] for row in each.rows}) == 1
        assert len({row.tokens[77] for row in each.rows}) == 3


@pytest.mark.mlx
@pytest.mark.parametrize(("fields", "name"), [(3, "triage"), (8, "incident")])
def test_prompts_are_as_long_as_those_of_the_sample_schemas(embedded: Path, fields: int, name: str):
    from weighbridge.scorer.chat import ChatTokenizer
    from weighbridge.scorer.encodings import Encoding
    from weighbridge.scorer.plan import SchemaPlan
    from weighbridge.scorer.prompts import Layout
    from weighbridge.scorer.rows import common_prefix
    from weighbridge.scorer.schema import Schema

    chat = ChatTokenizer.load(embedded)
    schema = Schema.load(Path(__file__).parents[2] / "examples" / "schemas" / f"{name}.json")
    text = "The invoice for March was charged twice, and nobody answers."
    for layout, prompts in (
        (Layout.CONTEXT_FIRST, bench_prompts.CONTEXT_FIRST),
        (Layout.SCHEMA_FIRST, bench_prompts.SCHEMA_FIRST),
    ):
        plan = SchemaPlan(
            chat,
            schema,
            layout=layout,
            encoding=Encoding.CODES,
            system=None,
            max_input_tokens=2048,
        )
        rows = plan.rows(text).rows
        assert len(rows) == fields
        around = common_prefix([row.tokens for row in rows]) - len(chat.encode(text))
        told = prompts[fields]
        # Two tokens may merge where the document ends.
        assert abs(around - told.before - told.behind) <= 2
        # What stands behind is about as long as the suffixes of the benchmark.
        ends = [len(row.tokens) - len(chat.encode(text)) - around for row in rows]
        assert min(bench_prompts.SUFFIXES) <= max(ends) <= max(bench_prompts.SUFFIXES)
