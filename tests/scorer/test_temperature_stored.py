"""Explicit beats stored beats table; what an adapter fused at load, packing and averages change."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer.adapters import Adapter
from weighbridge.scorer.checkpoint import CheckpointInfo
from weighbridge.scorer.checkpoint_temperature import checkpoint_temperature, prompt_warning
from weighbridge.scorer.contract import Contract
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.errors import TemperatureError
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.ready import record_temperature
from weighbridge.scorer.temperature import (
    Temperature,
    TemperatureKind,
    release_of,
    resolve_temperature,
    transferred,
)

V1 = "bespokelabs/Bespoke-Nimble-9B"
V1_REVISION = "93ec5d6ff1a9cd31d6cc0e0c58d312465d36de7c"
V1_ADAPTER = "ba7e28acb97f973e80fa51f3aa6fc6f75ea4081b89632ed45d8e5f3a1d7bfa6b"
V2_ADAPTER = "1bd126be997be6d9a0c25ce483ccf858c31b3422d480c33f02ba47b614be68ae"
FITTED = 2.179078721266035
HERE, ELSEWHERE = "a" * 64, "b" * 64


def folder_with(
    tmp_path: Path, ready: Any = None, stored: float | None = None, **told: Any
) -> Path:
    if ready is not None:
        (tmp_path / "READY.json").write_text(json.dumps(ready), encoding="utf-8")
    if stored is not None:
        given = {"fitted_on": "triage.csv", "metrics": {"nll": 0.4}, "fingerprint": HERE}
        record_temperature(tmp_path, stored, **given, **told)
    return tmp_path


def test_stored_beats_the_table(tmp_path: Path):
    folder = folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER}, stored=1.4)
    found = resolve_temperature(folder, fingerprint=HERE)
    assert (found.value, found.kind, found.stored) == (1.4, "fitted", True)
    assert "triage.csv" in found.source
    assert found.warning is None
    # Nobody told what the files are now: the file is taken at its word.
    assert resolve_temperature(folder).value == 1.4


def test_explicit_beats_stored(tmp_path: Path):
    folder = folder_with(tmp_path, stored=1.4)
    found = resolve_temperature(folder, fingerprint=HERE, temperature=3)
    assert (found.value, found.kind, found.stored) == (3.0, "explicit", False)


def test_one_that_was_fitted_on_other_files_is_not_followed(tmp_path: Path, caplog):
    folder = folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER}, stored=1.4)
    found = resolve_temperature(folder, fingerprint=ELSEWHERE)
    # The table still knows these weights; the stored value is of what they were before.
    assert (found.value, found.kind, found.stored) == (FITTED, "fitted", False)
    assert "1.4" in str(found.warning)
    assert "other files" in str(found.warning)
    assert "record it anew" in caplog.text
    # Who gives a temperature does not use it anyway.
    given = resolve_temperature(folder, fingerprint=ELSEWHERE, temperature=2)
    assert given.warning is None


def test_raw_scores_of_v2_are_refused_with_the_value_that_holds(tmp_path: Path):
    folder = folder_with(tmp_path, {"adapter_sha256": V2_ADAPTER}, stored=1.4)
    with pytest.raises(TemperatureError, match=r"need 1\.4"):
        resolve_temperature(folder, fingerprint=HERE, temperature=1.0)
    # Fitted here at just 1, it is no uncalibrated value any more.
    folder_with(tmp_path, stored=1.0)
    assert resolve_temperature(folder, fingerprint=HERE, temperature=1.0).kind == "explicit"


def test_a_stored_temperature_silences_near_misses(tmp_path: Path):
    folder = folder_with(tmp_path, stored=1.4)
    # A model id without its revision would else be asked for one.
    assert resolve_temperature(folder, model_id=V1, fingerprint=HERE).warning is None
    assert resolve_temperature(tmp_path / "..", model_id=V1).warning


class TestFusedAdapter:
    def test_its_hash_selects_whatever_lies_in_the_folder(self, tmp_path: Path):
        folder = folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER})
        found = resolve_temperature(folder, adapter_sha256=V2_ADAPTER.upper())
        assert (found.value, found.kind) == (FITTED, "transferred")
        assert "the hash of the adapter" in found.source

    def test_an_unknown_one_means_the_default(self, tmp_path: Path):
        folder = folder_with(tmp_path, {"model": V1, "revision": V1_REVISION})
        assert resolve_temperature(folder).kind == "fitted"
        # With something fused into it, v1 is v1 no more.
        found = resolve_temperature(folder, adapter_sha256="0" * 64)
        assert (found.value, found.kind, found.warning) == (1.0, "default", None)
        named = resolve_temperature(model_id=V1, revision=V1_REVISION, adapter_sha256="0" * 64)
        assert named.kind == "default"
        assert "the hash of the adapter is not that of Bespoke-Nimble-9B v1" in str(named.warning)

    def test_what_was_stored_without_it_is_not_followed(self, tmp_path: Path):
        folder = folder_with(tmp_path, stored=1.4)
        found = resolve_temperature(folder, adapter_sha256="0" * 64, fingerprint=ELSEWHERE)
        assert (found.kind, "other files" in str(found.warning)) == ("default", True)
        # Nor on its word: the fingerprint alone tells that the adapter was there.
        assert resolve_temperature(folder, adapter_sha256="0" * 64).kind == "default"
        found = resolve_temperature(folder, adapter_sha256="0" * 64, fingerprint=HERE)
        assert (found.value, found.kind) == (1.4, "fitted")


class TestTransferred:
    def test_only_a_fitted_one_changes(self):
        for kind in TemperatureKind:
            given = Temperature(1.5, kind, "so it is", warning="w")
            found = transferred(given, "these weights are packed")
            assert (found.value, found.warning) == (1.5, "w")
            if kind == "fitted":
                assert found.kind == "transferred"
                assert found.source.startswith("so it is; these weights are packed")
            else:
                assert found == given

    def test_packing_is_no_difference_to_what_was_fitted_on_packed_files(self):
        own = Temperature(1.5, TemperatureKind.FITTED, "here", stored=True)
        assert transferred(own, "packed", to_stored=False) == own
        assert transferred(own, "averages").kind == "transferred"


def info(folder: Path, **changes: Any) -> CheckpointInfo:
    """A checkpoint that was looked at."""
    plain: dict[str, Any] = {
        **dict.fromkeys(field.name for field in fields(CheckpointInfo)),
        "folder": folder,
        "fingerprint": HERE,
    }
    return CheckpointInfo(**{**plain, **changes})


@pytest.mark.parametrize(
    ("quantization", "permutations", "table", "stored"),
    [
        (None, 1, "fitted", "fitted"),
        ("4-bit affine, groups of 64", 1, "transferred", "fitted"),
        (None, 4, "transferred", "transferred"),
        ("4-bit affine, groups of 64", 4, "transferred", "transferred"),
    ],
)
def test_a_kind_claims_no_more_than_was_fitted(
    tmp_path: Path, quantization: str | None, permutations: int, table: str, stored: str
):
    folder = folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER})
    described = info(folder, quantization=quantization)
    found = checkpoint_temperature(described, permutations=permutations)
    assert (found.value, found.kind) == (FITTED, table)
    # Values stay: only what is claimed of them changes.
    folder_with(tmp_path, stored=1.4)
    found = checkpoint_temperature(described, permutations=permutations)
    assert (found.value, found.kind) == (1.4, stored)


def test_another_system_text_is_not_what_was_fitted(tmp_path: Path):
    folder = folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER})
    trained = Contract("schema_candidate_classification_v1", None, "trained", None)
    assert checkpoint_temperature(info(folder, contract=trained)).kind == "fitted"
    accepted = info(folder, contract=replace(trained, accepted_sha256="0" * 64))
    found = checkpoint_temperature(accepted)
    assert (found.value, found.kind) == (FITTED, "transferred")
    assert "system text" in found.source


def test_a_fused_adapter_is_what_selects(tmp_path: Path):
    adapter = Adapter(tmp_path, "peft", tmp_path / "adapter_model.safetensors", None, ())
    described = info(tmp_path, adapter=adapter, adapter_sha256=V1_ADAPTER)
    assert checkpoint_temperature(described).value == FITTED
    # A hash in READY.json is read there, with what else it says.
    assert checkpoint_temperature(info(tmp_path, adapter_sha256=V1_ADAPTER)).kind == "default"
    explicit = checkpoint_temperature(described, temperature=2.0)
    assert explicit.kind == "explicit"


class TestMergedOtherwise:
    """What the same adapter is in other weights is not what its release was fitted on."""

    @pytest.mark.parametrize(
        ("told", "why"),
        [
            ({"base_quantization": "4-bit affine, groups of 64"}, "4-bit affine"),
            ({"base_adapter_sha256": "c" * 64}, "another adapter (cccccccccccc…)"),
        ],
    )
    def test_merged_into_what_was_no_plain_base(self, tmp_path: Path, told: Any, why: str):
        folder = folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER, **told})
        for found in (resolve_temperature(folder), checkpoint_temperature(info(folder))):
            assert (found.value, found.kind) == (FITTED, "transferred")
            assert why in found.source
        # Fitted here, on these very files, it holds for them.
        folder_with(tmp_path, stored=1.4)
        assert resolve_temperature(folder, fingerprint=HERE).kind == "fitted"
        assert resolve_temperature(folder, temperature=1.0).kind == "explicit"

    def test_fused_over_another_one(self, tmp_path: Path):
        folder = folder_with(tmp_path, {"adapter_sha256": "c" * 64})
        found = resolve_temperature(folder, adapter_sha256=V1_ADAPTER)
        assert (found.value, found.kind) == (FITTED, "transferred")
        assert "another adapter (cccccccccccc…)" in found.source
        # Negative control: into weights that nothing is told of.
        folder_with(tmp_path, {"model": "org/base"})
        assert resolve_temperature(folder, adapter_sha256=V1_ADAPTER).kind == "fitted"


CODES, LABELS = Encoding.CODES, Encoding.LABELS
CONTEXT, SCHEMA = Layout.CONTEXT_FIRST, Layout.SCHEMA_FIRST


class TestPrompt:
    @pytest.mark.parametrize(
        ("layout", "encoding", "kind"),
        [
            (CONTEXT, CODES, "fitted"),
            (SCHEMA, CODES, "transferred"),
            (CONTEXT, LABELS, "transferred"),
            (None, None, "fitted"),  # nothing is scored
        ],
    )
    def test_a_release_with_a_prompt_that_it_was_not_trained_on(
        self, tmp_path: Path, layout: Layout | None, encoding: Encoding | None, kind: str
    ):
        described = info(folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER}))
        found = checkpoint_temperature(described, layout=layout, encoding=encoding)
        assert (found.value, found.kind) == (FITTED, kind)
        assert ("not the trained one" in found.source) == (kind == "transferred")

    def test_who_only_looks_is_told(self, tmp_path: Path):
        described = info(folder_with(tmp_path, {"adapter_sha256": V1_ADAPTER}))
        found = checkpoint_temperature(described)
        assert "schema-first, labels" in str(prompt_warning(described, found))
        trained = Contract("schema_candidate_classification_v1", None, "trained", None)
        assert prompt_warning(info(tmp_path, contract=trained), found) is None
        folder_with(tmp_path, stored=1.4)
        assert prompt_warning(described, checkpoint_temperature(described)) is None

    @pytest.mark.parametrize(
        ("told", "kind", "why"),
        [
            ({"layout": "schema-first", "encoding": "labels"}, "fitted", ""),
            ({"layout": "context-first", "encoding": "labels"}, "transferred", "context-first"),
            ({"layout": "schema-first", "encoding": "codes"}, "transferred", "codes"),
            ({}, "fitted", ""),  # an entry that does not say
            ({"permutations": 4}, "transferred", "one order of the choices, not averages over 4"),
        ],
    )
    def test_one_of_our_own_is_of_the_prompt_it_was_fitted_on(
        self, tmp_path: Path, told: dict[str, Any], kind: str, why: str
    ):
        described = info(folder_with(tmp_path, stored=1.4, **told))
        found = checkpoint_temperature(described, layout=SCHEMA, encoding=LABELS)
        assert (found.value, found.kind) == (1.4, kind)
        assert why in found.source

    def test_one_that_was_fitted_on_averages_holds_for_them(self, tmp_path: Path):
        described = info(folder_with(tmp_path, stored=1.4, permutations=4))
        assert checkpoint_temperature(described, permutations=4).kind == "fitted"
        assert checkpoint_temperature(described, permutations=3).kind == "transferred"


def test_releases_are_known_by_their_adapters():
    assert release_of(V1_ADAPTER.upper()) == "Bespoke-Nimble-9B v1"
    assert release_of("0" * 64) is None
