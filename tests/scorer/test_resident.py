"""Checkpoints that stay: loaded once, as many as fit, and branched only if that is right."""

import itertools
import json
import logging
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from weighbridge.scorer import ParallelScorer
from weighbridge.scorer.backend import PROBE_TOLERANCE, on_mlx_thread
from weighbridge.scorer.checkpoint import inspect_checkpoint
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.engine import Engine
from weighbridge.scorer.errors import BackendError, CheckpointError
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.resident import (
    PLAN_LIMIT,
    release_checkpoints,
    resident_checkpoint,
)
from weighbridge.scorer.results import ScoreResult

pytestmark = pytest.mark.mlx


@pytest.fixture(autouse=True)
def nothing_loaded() -> None:
    release_checkpoints()


TEXT = "The invoice was charged twice and the customer would like the money back."


class ForgetfulCache(KVCache):
    """Loses its offset when it is forked: wrong numbers, and no error."""

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, v: Any) -> None:
        self.keys, self.values, _ = v
        self.offset = 0


class ClosedCache(KVCache):
    """Cannot be forked at all."""

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, v: Any) -> None:
        raise NotImplementedError("no state to set")


def broken_llama(cache: type[KVCache]) -> type[llama.Model]:
    """Return a llama whose layers keep such caches; whole prompts are not affected."""

    class Model(llama.Model):
        def make_cache(self) -> list[Any]:
            return [cache() for _ in self.layers]

    return Model


@pytest.fixture
def architecture(monkeypatch):
    """Make a model class known to mlx-lm under a name of its own."""

    def install(name: str, model: type[llama.Model]) -> str:
        module = ModuleType(f"mlx_lm.models.{name}")
        module.__dict__.update(Model=model, ModelArgs=llama.ModelArgs)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return name

    return install


SEEDS = itertools.count(100)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """Return a checkpoint that no other test has loaded: equal files would be shared."""
    return tiny.checkpoint(tmp_path / "tiny", seed=next(SEEDS))


# --- the probe ---


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_probe_of_a_llama_is_tiny(tiny, dtype):
    found = Engine(tiny.model(dtype=dtype)).probe()
    # Rounding only: far within what is tolerated, and a number.
    assert 0 <= found <= PROBE_TOLERANCE[dtype] / 10


@pytest.mark.usefixtures("cpu")
def test_probe_sees_a_fork_that_is_wrong(tiny):
    model = tiny.model()
    model.__class__ = broken_llama(ForgetfulCache)
    # Other positions, other logits: no error anywhere, and a difference of some tenths.
    assert PROBE_TOLERANCE["bfloat16"] < Engine(model).probe() < math.inf


@pytest.mark.usefixtures("cpu")
def test_probe_of_a_fork_that_fails_is_infinite(tiny):
    model = tiny.model()
    model.__class__ = broken_llama(ClosedCache)
    assert Engine(model).probe() == math.inf


@pytest.mark.usefixtures("cpu")
def test_probe_of_numbers_that_are_none_is_infinite(tiny):
    import mlx.core as mx

    model = tiny.model()
    model.model.norm.weight = mx.full((64,), float("nan"), mx.float64)
    # A comparison with NaN is false; it must not pass for a small difference.
    assert Engine(model).probe() == math.inf


@pytest.mark.usefixtures("cpu")
def test_probe_of_a_model_that_cannot_run_is_a_checkpoint_error(tiny):
    model = tiny.model()

    class Deaf(llama.LlamaModel):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("needs pixels")

    model.model.__class__ = Deaf
    # Falling back to whole prompts would not help: they do not run either.
    with pytest.raises(CheckpointError, match="into logits, got TypeError: needs pixels"):
        Engine(model).probe()


@pytest.mark.usefixtures("cpu")
def test_probe_works_with_any_size_of_vocabulary(tiny):
    for size in (2, 50, 97, 1000):
        # Its tokens and candidates are spread over what there is.
        assert Engine(tiny.model(vocab_size=size)).probe() <= 1e-12


@pytest.mark.parametrize("cache", [ForgetfulCache, ClosedCache])
def test_a_broken_fork_falls_back_loudly_and_scores_right(
    tiny, tmp_path, architecture, caplog, cache
):
    model_type = architecture("wb_broken", broken_llama(cache))
    broken = tiny.checkpoint(tmp_path / "broken")
    config = (broken / "config.json").read_text().replace('"llama"', f'"{model_type}"')
    (broken / "config.json").write_text(config)
    plain = tiny.checkpoint(tmp_path / "plain")
    with caplog.at_level(logging.WARNING):
        found = ParallelScorer(broken).score(TEXT, tiny.schema(), mode="parallel")
    # Said once, with the reason and the price.
    assert "a forked cache differs from recomputing by" in caplog.text
    assert "every field is computed on its own, which is slower" in caplog.text
    expected = ParallelScorer(plain).score(TEXT, tiny.schema(), mode="independent")
    # The same weights in an unbroken llama: whole prompts need no fork.
    for one, other in zip(found.fields.values(), expected.fields.values(), strict=True):
        assert one.logits == pytest.approx(other.logits, abs=1e-6)
    assert found.timings.prefills == 0


# --- one copy in a process ---


def test_scorers_of_the_same_files_share_one_copy(folder, tiny, tmp_path):
    first = ParallelScorer(folder)
    second = ParallelScorer(shutil.copytree(folder, tmp_path / "copy"), temperature=2.0)
    assert first.model_loaded is second.model_loaded is False
    first.score(TEXT, tiny.schema("urgent"))
    # Loaded by the one, there for the other: found by what the files are.
    assert second.model_loaded


def test_a_copy_that_is_still_there_is_loaded(folder, tiny, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    ParallelScorer(folder)
    shutil.rmtree(folder)
    # The first folder is known by the same fingerprint, and gone.
    assert ParallelScorer(copy).score(TEXT, tiny.schema("urgent")).output


def test_release_gives_the_weights_back(folder, tiny):
    import mlx.core as mx

    scorer = ParallelScorer(folder)
    scorer.score(TEXT, tiny.schema())
    held = on_mlx_thread(mx.get_active_memory)
    resident_checkpoint(scorer.info).release()
    # Some 130,000 float32 weights at least, and the model is loaded again on demand.
    assert on_mlx_thread(mx.get_active_memory) < held - 400_000
    assert not scorer.model_loaded
    assert scorer.score(TEXT, tiny.schema()).output
    assert scorer.model_loaded


def test_float64_is_another_copy_on_the_cpu(folder, tiny):
    exact, usual = ParallelScorer(folder, dtype="float64"), ParallelScorer(folder)
    # Another dtype, another decision, another set of weights.
    assert exact.key(tiny.schema()) != usual.key(tiny.schema())
    assert exact.backend.startswith("cpu float64")
    one, two = (scorer.score(TEXT, tiny.schema("urgent")) for scorer in (exact, usual))
    assert (exact.model_loaded, usual.model_loaded) == (True, True)
    # The same answer, and rounding to tell them apart.
    first, second = (list(each.fields["urgent"].logits.values()) for each in (one, two))
    apart = np.subtract(first, second)
    assert 0 < np.abs(apart).max() < 1e-3


def test_a_dtype_that_does_not_exist_is_refused(folder):
    with pytest.raises(BackendError, match=r"must be one of float64, .* got 'int4'"):
        ParallelScorer(folder, dtype="int4")


def test_a_head_that_cannot_be_cut_is_told(tiny, tmp_path, architecture, caplog):
    class Model(llama.Model):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            logits = super().__call__(*args, **kwargs)
            return logits - logits[..., -1:]

    name = architecture("wb_relative", Model)
    odd = tiny.checkpoint(tmp_path / "odd")
    config = (odd / "config.json").read_text().replace('"llama"', f'"{name}"')
    (odd / "config.json").write_text(config)
    plain = tiny.checkpoint(tmp_path / "plain")
    with caplog.at_level(logging.WARNING):
        found = ParallelScorer(odd).score(TEXT, tiny.schema("urgent"))
    assert "all of the vocabulary is computed, which is slower" in caplog.text
    expected = ParallelScorer(plain).score(TEXT, tiny.schema("urgent"))
    # One number less on all logits: the same probabilities.
    for key, score in expected.fields["urgent"].scores.items():
        assert found.fields["urgent"].scores[key] == pytest.approx(score, abs=1e-6)


def test_a_failed_load_is_tried_again(folder, tiny):
    weights = folder / "model.safetensors"
    scorer = ParallelScorer(folder)
    weights.rename(folder / "hidden")
    with pytest.raises(CheckpointError, match="must hold model"):
        scorer.score(TEXT, tiny.schema("urgent"))
    assert not scorer.model_loaded
    (folder / "hidden").rename(weights)
    # Such as a volume that was not mounted yet.
    assert scorer.score(TEXT, tiny.schema("urgent")).output


def test_plans_are_kept_and_bounded(folder, tiny):
    info = inspect_checkpoint(folder)
    kept = resident_checkpoint(info)
    layout, encoding = Layout.SCHEMA_FIRST, Encoding.LABELS
    first = kept.plan(tiny.schema(), layout, encoding, 1000)
    # The same questions, read again from a file of another name.
    assert kept.plan(tiny.schema(), layout, encoding, 1000) is first
    for change in (
        (tiny.schema("mood"), layout, encoding, 1000),
        (tiny.schema(), Layout.CONTEXT_FIRST, encoding, 1000),
        (tiny.schema(), layout, Encoding.CODES, 1000),
        (tiny.schema(), layout, encoding, 1001),
    ):
        assert kept.plan(*change) is not first
    for limit in range(2000, 2000 + PLAN_LIMIT):
        kept.plan(tiny.schema("urgent"), layout, encoding, limit)
    # Least recently used first out, so a long-lived process does not grow.
    assert kept.plan(tiny.schema(), layout, encoding, 1000) is not first


def test_schema_prefix_stays_between_documents(folder, tiny):
    # In `labels` the reference texts of the prior would have come first.
    scorer = ParallelScorer(folder, encoding="codes")
    first, second = scorer.score_batch([TEXT, "Login is not possible."], tiny.schema())
    assert isinstance(first, ScoreResult)
    assert isinstance(second, ScoreResult)
    # The first document computes the questions, the second takes them. Both are so short that
    # all behind the questions is one pass.
    assert (first.timings.resident_tokens, first.timings.prefills) == (0, 1)
    assert (second.timings.resident_tokens, second.timings.prefills) == (
        len(scorer.plan(tiny.schema()).resident),
        0,
    )


def spoil(folder: Path, name: str, row: int | None = None) -> None:
    """Make a weight of a checkpoint, or one row of it, not a number."""

    def write() -> None:
        import mlx.core as mx

        path = str(folder / "model.safetensors")
        arrays: Any = mx.load(path)
        weight = arrays[name]
        if row is None:
            weight = mx.full(weight.shape, float("nan"))
        else:
            weight[row] = float("nan")
        mx.save_safetensors(path, {**arrays, name: weight})

    on_mlx_thread(write)


def test_a_token_that_gives_no_numbers_rejects_its_document(folder, tiny):
    chat = resident_checkpoint(inspect_checkpoint(folder)).chat
    (token,) = chat.encode("Q")
    spoil(folder, "model.embed_tokens.weight", token)
    good, bad = ParallelScorer(folder).score_batch([TEXT, "Queen"], tiny.schema("urgent"))
    # NaN must not get into the store, where it would be an answer.
    assert isinstance(good, ScoreResult)
    assert not isinstance(bad, ScoreResult)
    assert bad.code == "document.not_finite"
    assert "field 'urgent' must be finite numbers, and 2 of 2 are not" in bad.message


def test_weights_that_are_no_numbers_are_refused(folder, tiny):
    spoil(folder, "model.norm.weight")
    scorer = ParallelScorer(folder)
    # Once, and not as a fault of each document.
    with pytest.raises(CheckpointError, match="logits of a plain prompt must be finite"):
        scorer.score(TEXT, tiny.schema("urgent"))
    assert not scorer.model_loaded


def test_tolerances_cover_the_compute_dtypes():
    # Each as wide as its rounding needs: the coarser the type, the wider.
    values = [PROBE_TOLERANCE[name] for name in ("float64", "float32", "float16", "bfloat16")]
    assert values == sorted(values)
    assert np.finfo(np.float32).eps * 100 < PROBE_TOLERANCE["float32"]


def test_a_checkpoint_that_changes_before_it_is_loaded_is_refused(tiny, tmp_path):
    folder = tiny.checkpoint(tmp_path / "changes")
    scorer = ParallelScorer(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Its answers would be kept under the fingerprint of what it was before.
    with pytest.raises(CheckpointError, match="must stay as it is"):
        scorer.score(TEXT, tiny.schema())
    assert ParallelScorer(folder).score(TEXT, tiny.schema()).key.checkpoint != (
        scorer.info.fingerprint
    )
