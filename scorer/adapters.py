"""LoRA adapters as files: mlx and PEFT folders read into one representation.

Configuration and header are read, no tensor: what an adapter would do that a low-rank
product cannot say is refused by name here. `weighbridge.scorer.low_rank` fuses what is read.
"""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weighbridge.scorer.adapter_formats import (
    LowRank,
    WholeCopy,
    core_path,
    read_mlx,
    read_peft,
)
from weighbridge.scorer.chat import first_line
from weighbridge.scorer.config_file import CONFIG_FILE
from weighbridge.scorer.contract import CONTRACT_FILE, SYSTEM_FILE
from weighbridge.scorer.errors import CheckpointError, quoted
from weighbridge.scorer.names import name_fault
from weighbridge.scorer.weight_files import safetensors_header

ADAPTER_CONFIG = "adapter_config.json"
MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
WEIGHT_FILES = (MLX_WEIGHTS, PEFT_WEIGHTS)
CONTRACT_FILES = (CONTRACT_FILE, SYSTEM_FILE)
"""A trained prompt belongs to the adapter that was trained on it, where it brings one."""

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, described without loading its weights.

    Attributes:
        folder: Where it is.
        format: Whose layout its files have.
        weights: Its safetensors file; the sha256 of it is the adapter's identity.
        base_model: What it says it was trained on, None where it does not say.
        low_rank: A product for each module it changes, in order of their names.
        whole: Copies of base weights that it brings along unchanged, see `WholeCopy`.
        ties_head: Whether a product on tied embeddings is meant for the head as well.
        layers: How many of the last layers it covers, None for what its tensors say.
        keys: Modules that it covers in each of these layers, likewise.
    """

    folder: Path
    format: Literal["mlx", "peft"]
    weights: Path
    base_model: str | None
    low_rank: tuple[LowRank, ...]
    whole: tuple[WholeCopy, ...] = ()
    ties_head: bool = True
    layers: int | None = None
    keys: tuple[str, ...] | None = None

    @property
    def rank(self) -> int:
        """The largest rank of its products."""
        return max(each.rank for each in self.low_rank)

    @property
    def scales(self) -> tuple[float, ...]:
        """The distinct factors of its products, sorted."""
        return tuple(sorted({each.scale for each in self.low_rank}))

    @property
    def parts_tied_head(self) -> bool:
        """Whether a head that is tied to the embeddings changes in another way than they do."""
        if self.format != "peft":
            return False
        head = any(core_path(each.module) == "lm_head" for each in self.low_rank)
        embedding = any(each.embedding for each in self.low_rank)
        return (head and embedding) if self.ties_head else (head or embedding)

    @property
    def files(self) -> tuple[Path, ...]:
        """What a decision depends on: configuration, weights, and a trained prompt if any."""
        prompts = [self.folder / name for name in CONTRACT_FILES]
        return (
            self.folder / ADAPTER_CONFIG,
            self.weights,
            *(path for path in prompts if path.is_file()),
        )

    @property
    def description(self) -> str:
        """One line for people, such as `PEFT LoRA, rank 16, scale 2, 64 modules`."""
        name = "mlx" if self.format == "mlx" else "PEFT"
        scales = self.scales
        scale = f"{scales[0]:g}" if len(scales) == 1 else f"{scales[0]:g} to {scales[-1]:g}"
        ranks = {each.rank for each in self.low_rank}
        rank = f"rank {self.rank}" if len(ranks) == 1 else f"ranks {min(ranks)} to {self.rank}"
        count = len(self.low_rank)
        return f"{name} LoRA, {rank}, scale {scale}, {count} module{'' if count == 1 else 's'}"


def read_adapter(folder: Path) -> Adapter:
    """Read the configuration and the header of an adapter folder.

    Args:
        folder: A folder with adapter_config.json and the weights of mlx
            (adapters.safetensors) or PEFT (adapter_model.safetensors).

    Raises:
        CheckpointError: It is not such a folder, a file is damaged, or the adapter is
            more than low-rank products (DoRA, `modules_to_save`, trained biases, …).
    """
    try:
        folder = Path(folder).expanduser().resolve()
        there, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError, ValueError):  # a name that is too long, `~nobody`, a NUL
        there = is_file = False
    if not there:
        if is_file and folder.suffix in {".safetensors", ".json", ".bin"}:
            raise CheckpointError(
                f"an adapter must be a folder, {quoted(str(folder))} is a file",
                hint=f"name its folder: {folder.parent}",
            )
        raise CheckpointError(
            f"an adapter must be an existing folder, got {quoted(str(folder))}",
            hint=f"name the folder that holds {ADAPTER_CONFIG} and the adapter's weights",
        )
    config = _read_config(folder)
    if "peft_type" in config:
        weights, header = _open(folder, PEFT_WEIGHTS)
        read = read_peft(config, header)
        kind, base = "peft", config.get("base_model_name_or_path")
    elif "lora_parameters" in config or "fine_tune_type" in config:
        weights, header = _open(folder, MLX_WEIGHTS)
        read = read_mlx(config, header)
        kind, base = "mlx", config.get("model")
    else:
        raise CheckpointError(
            f"{ADAPTER_CONFIG} must be one of PEFT (peft_type) or of mlx-lm (lora_parameters), "
            f"got neither in {folder}",
            hint="other formats: convert the adapter to PEFT's with the tool that made it",
        )
    base = None if name_fault(base) else base
    return Adapter(
        folder,
        kind,
        weights,
        base,
        read.low_rank,
        read.whole,
        read.ties_head,
        read.layers,
        read.keys,
    )


def check_not_swapped(folder: Path, adapter: Path | None) -> None:
    """Refuse an adapter that is named as the checkpoint, with the model named as its adapter.

    Args:
        folder: What is named as the checkpoint.
        adapter: What is named as the adapter, None for nothing.

    Raises:
        CheckpointError: With the two in their places.
    """
    if adapter is None or not _is_model(adapter) or _is_model(folder):
        return
    if _has(folder, ADAPTER_CONFIG) and not _has(adapter, ADAPTER_CONFIG):
        raise CheckpointError(
            f"a checkpoint must be a whole model and an adapter an adapter, got the adapter in "
            f"{folder} as the checkpoint and the model in {adapter} as the adapter",
            hint=f"name {shlex.quote(str(adapter))} as the checkpoint and "
            f"{shlex.quote(str(folder))} as its adapter",
        )


def _is_model(folder: Path) -> bool:
    return _has(folder, CONFIG_FILE)


def _has(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file()
    except (OSError, ValueError):  # what no path can be is refused where it is read
        return False


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_finite)
    except FileNotFoundError as error:
        if (folder / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"an adapter must hold {ADAPTER_CONFIG}, got a whole model in {folder}",
                hint="name it as the checkpoint, without --adapter; where the two were "
                "confused, name the adapter with --adapter",
            ) from error
        raise CheckpointError(
            f"an adapter must hold {ADAPTER_CONFIG}, got none in {folder}",
            hint="its rank and scale are told there: copy it from where the adapter was trained",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{ADAPTER_CONFIG} must be readable JSON, got: {first_line(error)}",
            hint=f"restore {path}",
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{ADAPTER_CONFIG} must be a JSON object, got {type(config).__name__}",
            hint=f"restore {path}",
        )
    return config


def _not_finite(_: str) -> float:
    return math.nan  # refused where it is read, by the name of its key


def _open(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    path = folder / name
    # A link into a hub cache that was cleared is there, and fails in words of its own.
    if not path.is_file() and not path.is_symlink():
        pickles = [each for each in _PICKLES if (folder / each).is_file()]
        if pickles:
            raise CheckpointError(
                f"an adapter must be stored as safetensors, got {pickles[0]}: loading a pickle "
                "runs the code in it",
                hint="load it with PEFT where you trust it, and save it again: "
                "save_pretrained(FOLDER, safe_serialization=True)",
            )
        raise CheckpointError(
            f"an adapter of this configuration must hold {name}, got none in {folder}",
            hint="fetch the adapter again, with its weights",
        )
    header = safetensors_header(path)
    header.pop("__metadata__", None)
    return path, header
