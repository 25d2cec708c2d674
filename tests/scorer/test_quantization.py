"""Configurations of packed weights: what mlx-lm reads rightly, and what is refused and why."""

from typing import Any

import pytest

from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.quantization import (
    check_quantization,
    describe_quantization,
    group_sizes,
)


def own(**more: Any) -> dict[str, Any]:
    return {"quantization": {"group_size": 64, "bits": 4, **more}}


def foreign(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, **weights}}}
    return foreign("compressed-tensors", format="pack-quantized", config_groups=groups)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        own(),
        own(mode="affine", bits=8, group_size=32),
        own(mode="mxfp4", group_size=32),
        own(mode="mxfp8", bits=8, group_size=32),
        own(mode="nvfp4", group_size=16),
        # A layer is packed otherwise, or not at all; one that says bits only has its mode's
        # groups, not the model's.
        own(**{"model.layers.0.mlp.down_proj": {"bits": 8}, "lm_head": False}),
        own(**{"lm_head": {"mode": "mxfp8", "bits": 8, "group_size": 32}}),
        # Ours beside a copy of it for the hub.
        {**own(), "quantization_config": {"group_size": 64, "bits": 4}},
        foreign("awq", bits=4, group_size=128, version="gemm"),
        foreign("awq", bits=4, group_size=64, version="GEMM", zero_point=True),
        foreign("mxfp4"),
        foreign("mxfp8"),
        foreign("fp8", weight_block_size=[128, 128]),
        foreign("modelopt", quant_algo="NVFP4"),
        foreign("compressed-tensors", format="nvfp4-pack-quantized"),
        compressed(symmetric=True),
    ],
)
def test_what_mlx_lm_reads_is_accepted(config):
    check_quantization(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (own(bits=7), r"got 7 bits in groups of 64, and affine has"),
        (own(group_size=16), r"4 bits in groups of 16"),
        (own(mode="mxfp4"), r"in groups of 64, and mxfp4 has"),
        (own(mode="int4"), r'the mode "int4", none of affine'),
        (own(lm_head={"mode": "nvfp4", "group_size": 32}), "for lm_head, and nvfp4 has"),
        ({"quantization": 4}, "which must be an object"),
        (own(mode={}), "the mode an object, none of"),
        (own(mode=None), "the mode null, none of"),
        (own(bits=True), "got True bits in groups of 64"),
        (own(lm_head={"mode": [1]}), "the mode a list for lm_head"),
        (foreign("compressed-tensors", format={}), "in the format an object"),
        ({"quantization_config": {"bits": 4}}, "without a quant_method"),
        ({"text_config": foreign("hqq")}, 'quant_method "hqq", which mlx-lm leaves out'),
        (foreign("bitsandbytes", load_in_4bit=True), 'quant_method "bitsandbytes"'),
        (foreign("torchao"), 'quant_method "torchao"'),
        (foreign("gptq", bits=4), "GPTQ, whose packing mlx-lm would read as that of AWQ"),
        (foreign("bitnet"), "BitNet"),
        (foreign("awq", bits=8), "AWQ with 8 bits"),
        (foreign("awq", bits=4, group_size=-1), "in groups of -1"),
        (foreign("awq", bits=4, version="gemv"), "'gemv', which would be read as gemm"),
        (foreign("modelopt", quant_algo="FP8"), 'modelopt with "FP8"'),
        (
            foreign("compressed-tensors", format="float-quantized"),
            'compressed-tensors in the format "float-quantized"',
        ),
        (compressed(num_bits=8), "with 8 bits in groups of 32"),
        (compressed(group_size=128), "with 4 bits in groups of 128"),
        (compressed(symmetric=False), "would be read as 4 symmetric bits"),
    ],
)
def test_what_would_be_misread_is_refused(config, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        check_quantization(config)
    assert "mlx_lm convert" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, None),
        (own(), "4-bit affine, groups of 64"),
        (own(mode="mxfp4", group_size=32), "4-bit mxfp4, groups of 32"),
        (own(a={"bits": 8}), "4-bit affine, groups of 64, some layers 8-bit affine"),
        (own(a={"bits": 4}), "4-bit affine, groups of 64"),
        (foreign("awq", bits=4, group_size=128), "4-bit awq, groups of 128"),
        (foreign("fp8"), "fp8"),
    ],
)
def test_packing_in_words(config, words):
    assert describe_quantization(config) == words


def test_group_sizes_by_module():
    config = own(a={"bits": 8, "group_size": 32}, b={"bits": 8}, c={"mode": "mxfp8"}, d=False)
    assert group_sizes(config) == (64, {"a": 32, "b": 64, "c": 32})
    assert group_sizes({}) == (32, {})
