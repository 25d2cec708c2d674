"""Headers of safetensors files whose claims and bytes differ."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.weight_files import safetensors_header

ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


def written(path: Path, header: dict[str, Any]) -> Path:
    """Write a header with four bytes behind it."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    return path


@pytest.mark.parametrize("shape", [[2], [1, 2], [2, 1, 1]])
def test_a_header_that_fits_is_read(tmp_path, shape):
    header = {"a": {**ENTRY, "shape": shape}, "__metadata__": {"format": "mlx"}}
    assert safetensors_header(written(tmp_path / "model.safetensors", header)) == header


def test_of_packed_floats_the_shape_may_count_otherwise(tmp_path):
    header = {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}
    assert safetensors_header(written(tmp_path / "model.safetensors", header)) == header


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**18]},
        {"shape": [3]},
        {"shape": [1] * 3},
        {"shape": [-1, -2]},
        {"shape": ["2"]},
        {"shape": 2},
        {"shape": None},
        {"data_offsets": [8, 4]},
        {"data_offsets": [-4, 4], "shape": [4]},
        {"data_offsets": [0, 10**400]},
        {"data_offsets": [0, 4.0]},
    ],
)
def test_sizes_that_a_header_only_claims(tmp_path, changes):
    path = written(tmp_path / "model.safetensors", {"a" * 500: {**ENTRY, **changes}})
    with pytest.raises(CheckpointError, match="must be a whole safetensors file") as caught:
        safetensors_header(path)
    # Nothing of what it claims fills the screen.
    assert len(caught.value.message) < 250
    assert str(path) in (caught.value.hint or "")


def test_a_link_to_itself(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to(path.name)
    with pytest.raises(CheckpointError, match="must be a readable file") as caught:
        safetensors_header(path)
    assert "leads back to itself" in (caught.value.hint or "")
