"""Adapter folders read: both formats alike, and what is more than LoRA refused by name."""

import json
import math
from typing import Any

import numpy as np
import pytest
from tests.scorer.adapter_folders import RANK, SCALE, draw, write_mlx, write_peft

from weighbridge.scorer.adapters import read_adapter
from weighbridge.scorer.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.1.self_attn.v_proj"
PRODUCTS = draw({Q: (6, 4), V: (8, 4)})
ONE = draw({Q: (6, 4)})


def test_both_formats_say_the_same(tmp_path):
    mlx = read_adapter(write_mlx(tmp_path / "mlx", PRODUCTS))
    peft = read_adapter(write_peft(tmp_path / "peft", PRODUCTS))
    for adapter in (mlx, peft):
        assert [each.module for each in adapter.low_rank] == [Q, V]
        assert (adapter.rank, adapter.scales, adapter.base_model) == (RANK, (SCALE,), "org/base")
    assert mlx.description == "mlx LoRA, rank 3, scale 0.75, 2 modules"
    assert peft.description == "PEFT LoRA, rank 3, scale 0.75, 2 modules"


def test_files_are_what_a_decision_depends_on(tmp_path):
    folder = write_peft(tmp_path, ONE)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    (folder / "README.md").write_text("a card")
    assert [file.name for file in read_adapter(folder).files] == names
    (folder / "schema_config.json").write_text("{}")
    assert [file.name for file in read_adapter(folder).files] == [*names, "schema_config.json"]


def test_rank_stabilized_scale(tmp_path):
    # alpha / sqrt(r) instead of alpha / r.
    folder = write_peft(tmp_path, ONE, use_rslora=True, lora_alpha=6)
    assert read_adapter(folder).scales == (6 / math.sqrt(RANK),)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("q_proj", [Q]),
        ("self_attn.q_proj", [Q]),
        (Q, [Q]),
        (r"layers\.\d+\.self_attn\.[qv]_proj", [Q, V]),
        ("proj", []),  # no part of a name
        ("layers.0", []),  # not its end
        (r"_proj", []),
    ],
)
def test_patterns_match_the_end_of_a_path_at_a_dot(tmp_path, pattern, matched):
    folder = write_peft(tmp_path, PRODUCTS, alpha_pattern={pattern: 30})
    scales = {each.module: each.scale for each in read_adapter(folder).low_rank}
    assert scales == {module: 10.0 if module in matched else SCALE for module in (Q, V)}


def test_the_first_pattern_wins_and_rank_and_alpha_go_their_own_ways(tmp_path):
    products = {**draw({Q: (6, 4)}, rank=2), **draw({V: (8, 4)})}
    folder = write_peft(
        tmp_path,
        products,
        lora_alpha=12,
        rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 5},
        alpha_pattern={"q_proj": 8},
    )
    adapter = read_adapter(folder)
    assert [(each.rank, each.scale) for each in adapter.low_rank] == [(2, 4.0), (3, 4.0)]
    assert adapter.description == "PEFT LoRA, ranks 2 to 3, scale 4, 2 modules"


def test_names_of_adapters_inside_tensor_names(tmp_path):
    plain = read_adapter(write_peft(tmp_path / "plain", PRODUCTS))
    named = read_adapter(write_peft(tmp_path / "named", PRODUCTS, name="default"))
    assert [each.module for each in named.low_rank] == [each.module for each in plain.low_rank]
    other = {
        f"base_model.model.{Q}.lora_A.other.weight": ONE[Q][0],
        f"base_model.model.{Q}.lora_B.other.weight": ONE[Q][1],
    }
    folder = write_peft(tmp_path / "two", draw({V: (8, 4)}), name="default", tensors=other)
    with pytest.raises(CheckpointError, match='one adapter, got "default", "other"'):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, r"plain LoRA, got DoRA \(use_dora\)"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save: "lm_head"'),
        ({"bias": "lora_only"}, 'biases alone, got bias "lora_only"'),
        ({"lora_bias": True}, "lora_bias: true"),
        ({"trainable_token_indices": [5]}, 'trainable_token_indices: "5"'),
        ({"target_parameters": ["experts.down"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora: true"),
        ({"use_something_new": True}, "use_something_new: true"),
        ({"peft_type": "IA3"}, 'got peft_type "IA3"'),
        ({"peft_type": "LOKR"}, 'got peft_type "LOKR"'),
        ({"peft_type": "PROMPT_TUNING"}, 'got peft_type "PROMPT_TUNING"'),
        ({"init_lora_weights": "pissa_niter_4"}, "changes them before training"),
        ({"init_lora_weights": "loftq"}, "changes them before training"),
        ({"r": True}, "r of an adapter must be a whole number above 0, got true"),
        ({"r": 0}, "r of an adapter must be a whole number above 0, got 0"),
        ({"lora_alpha": None}, "lora_alpha of an adapter must be a finite number"),
        ({"lora_alpha": math.nan}, "lora_alpha of an adapter must be a finite number"),
        ({"lora_alpha": 0}, "other than 0, got 0"),
        ({"lora_alpha": 10**400}, "lora_alpha of an adapter must be a finite number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern of an adapter must be a finite"),
        ({"r": 5}, f'tensors of "{Q}" must have the rank 5 .* got ranks 3 and 3'),
        ({"rank_pattern": {"q_proj": 2}}, "must have the rank 2"),
        ({"alpha_pattern": {"(": 2}}, "must be regular expressions"),
        ({"alpha_pattern": [1]}, "alpha_pattern of an adapter must be an object"),
    ],
)
def test_more_than_peft_lora_is_refused(tmp_path, config, words):
    folder = write_peft(tmp_path, ONE, **config)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(folder)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fine_tune_type": "dora"}, "got DoRA"),
        ({"fine_tune_type": "full"}, 'fine_tune_type "full": whole weights'),
        ({"lora_parameters": {"scale": None}}, "scale of an adapter must be a finite number"),
        ({"lora_parameters": {"rank": 8}}, "must have the rank 8"),
        ({"lora_parameters": {"scale": 10**400}}, "scale of an adapter must be a finite number"),
    ],
)
def test_more_than_mlx_lora_is_refused(tmp_path, config, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(write_mlx(tmp_path, ONE, **config))
    assert caught.value.hint


MAGNITUDE = f"base_model.model.{Q}.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (MAGNITUDE, f'magnitudes of DoRA: "{MAGNITUDE}"'),
        (f"{MAGNITUDE}.default.weight", "magnitudes of DoRA"),
        (f"base_model.model.{Q}.lora_E", "lora_A and lora_B only"),
        (f"base_model.model.{Q}.bias", f'got others: "base_model.model.{Q}.bias"'),
        (f"base_model.model.{V}.lora_A.weight", "two tensors for"),  # half a pair
    ],
)
def test_other_tensors_of_peft_are_refused(tmp_path, name, words):
    folder = write_peft(tmp_path, ONE, tensors={name: np.ones((3, 4), np.float32)})
    with pytest.raises(CheckpointError, match=words):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{Q}.m", "magnitudes of DoRA"),
        (f"{Q}.weight", "lora_a and lora_b only"),
        (f"{Q}.lora_a.0", "lora_a and lora_b only"),
        (f"{V}.lora_b", "two tensors for"),
    ],
)
def test_other_tensors_of_mlx_are_refused(tmp_path, name, words):
    folder = write_mlx(tmp_path, ONE, tensors={name: np.ones((4, 3), np.float32)})
    with pytest.raises(CheckpointError, match=words):
        read_adapter(folder)


def test_integers_and_vectors_are_refused(tmp_path):
    a = f"base_model.model.{Q}.lora_A.weight"
    for array, words in (
        (np.ones((3, 4), np.int32), "floating-point, got I32"),
        (np.ones(3, np.float32), r"matrices, got the shape \(3,\)"),
    ):
        folder = write_peft(tmp_path, ONE, tensors={a: array})
        with pytest.raises(CheckpointError, match=words):
            read_adapter(folder)


def test_no_adapter_is_refused_with_what_helps(tmp_path):
    with pytest.raises(CheckpointError, match="must be an existing folder"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"must hold adapter_config.json"):
        read_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    for text, words in (
        ("{", "readable JSON"),
        ("[]", "a JSON object, got list"),
        ("{}", "one of PEFT .* or of mlx-lm"),
        ('{"peft_type": "LORA"}', "must hold adapter_model.safetensors, got none"),
        ('{"fine_tune_type": "lora"}', "must hold adapters.safetensors, got none"),
    ):
        config.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            read_adapter(tmp_path)


def test_a_pickle_is_never_loaded(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"code")
    with pytest.raises(CheckpointError, match=r"got adapter_model.bin: loading a pickle") as caught:
        read_adapter(tmp_path)
    assert "safe_serialization" in (caught.value.hint or "")


def test_a_file_or_a_whole_model_is_told_as_such(tmp_path):
    folder = write_peft(tmp_path / "a", ONE)
    with pytest.raises(CheckpointError, match="is a file") as caught:
        read_adapter(folder / "adapter_model.safetensors")
    assert caught.value.hint == f"name its folder: {folder}"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="got a whole model") as caught:
        read_adapter(tmp_path)
    assert "as the checkpoint" in str(caught.value.hint)


@pytest.mark.parametrize("base", ["\ud800", "x" * 5000, " ", 5])
def test_a_base_that_can_be_no_name_is_none(tmp_path, base):
    folder = write_peft(tmp_path, ONE, base_model_name_or_path=base)
    assert read_adapter(folder).base_model is None


def test_a_file_cut_short_is_refused(tmp_path):
    weights = read_adapter(write_peft(tmp_path, ONE)).weights
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="must be a whole safetensors file"):
        read_adapter(tmp_path)


def test_reading_loads_no_mlx(fresh_process, tmp_path):
    folder = write_peft(tmp_path, ONE)
    done: Any = fresh_process(
        "import sys, pathlib\n"
        "from weighbridge.scorer.adapters import read_adapter\n"
        f"read_adapter(pathlib.Path({json.dumps(str(folder))}))\n"
        "assert 'mlx' not in sys.modules and 'mlx.core' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr
