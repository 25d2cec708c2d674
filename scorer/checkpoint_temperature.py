"""The temperature of a checkpoint as it is about to score: its kind says for what it holds."""

from weighbridge.scorer.checkpoint import CheckpointInfo
from weighbridge.scorer.contract import CONTRACT_FILE
from weighbridge.scorer.encodings import Encoding
from weighbridge.scorer.prompts import Layout
from weighbridge.scorer.ready import StoredTemperature, read_ready
from weighbridge.scorer.temperature import (
    Temperature,
    TemperatureKind,
    resolve_temperature,
    transferred,
)

_TRAINED = (Layout.CONTEXT_FIRST, Encoding.CODES)
"""Layout and encoding of the prompt that the releases were trained and fitted on."""


def checkpoint_temperature(
    info: CheckpointInfo,
    *,
    temperature: float | None = None,
    allow_uncalibrated: bool = False,
    permutations: int = 1,
    layout: Layout | None = None,
    encoding: Encoding | None = None,
) -> Temperature:
    """Apply the temperature policy to a checkpoint that was looked at.

    A fitted temperature is of the logits it was fitted on. The releases were fitted as they
    were published, in 16 bits, on their own prompt and one order of the choices: packed
    weights, another prompt and averages over orders give other logits, to which theirs is
    transferred. One that was fitted here, on these very files, has seen how they are packed,
    and tells what prompt and how many orders it was fitted on.

    Args:
        info: The checkpoint, with its adapter if one is fused at load.
        temperature: Overrides the checkpoint's own.
        allow_uncalibrated: Permit 1.0 where a transferred temperature is known.
        permutations: Over how many orders of the choices logits are averaged.
        layout: Of the prompt. Without layout and encoding nothing is said of a prompt yet,
            and the kind is that of the weights.
        encoding: How the prompt asks for a choice.

    Raises:
        TemperatureError: As `resolve_temperature`.
    """
    resolved = resolve_temperature(
        info.folder,
        model_id=info.model_id,
        revision=info.revision,
        temperature=temperature,
        allow_uncalibrated=allow_uncalibrated,
        adapter_sha256=info.adapter_sha256 if info.adapter else None,
        fingerprint=info.fingerprint,
    )
    entry = read_ready(info.folder).temperature if resolved.stored else None
    if info.contract and info.contract.accepted_sha256:
        resolved = transferred(resolved, "but the system text is not the trained one")
    if info.quantization:
        why = f"but the weights here are {info.quantization}"
        resolved = transferred(resolved, why, to_stored=False)
    if layout is not None or encoding is not None:
        used = (layout or info.layout, encoding or info.encoding)
        why = _other_prompt(info, entry, used)
        resolved = transferred(resolved, why) if why else resolved
    fitted = entry.permutations if entry else 1
    if permutations != fitted:
        why = f"but applied to {_averages(permutations)}"
        resolved = transferred(resolved, f"{why}, not {_averages(fitted)}" if entry else why)
    return resolved


def prompt_warning(info: CheckpointInfo, temperature: Temperature) -> str | None:
    """Say that a release's fitted temperature is not for the prompt that its folder gets.

    For who looks at a checkpoint without scoring: its kind is that of the weights then.

    Args:
        info: The checkpoint.
        temperature: Its own, of no prompt in particular.
    """
    released = temperature.kind == TemperatureKind.FITTED and not temperature.stored
    if not released or info.contract is not None:
        return None
    return (
        f"this temperature is of the prompt that the release was trained on, and without "
        f"{CONTRACT_FILE} the prompt here is {info.layout}, {info.encoding}: "
        "scores with it are marked as transferred"
    )


def _other_prompt(
    info: CheckpointInfo, entry: StoredTemperature | None, used: tuple[Layout, Encoding]
) -> str | None:
    """Say in what the prompt differs from the one that the temperature was fitted on."""
    if entry is not None:
        pairs = zip(used, (entry.layout, entry.encoding), strict=True)
        other = [f"{now}, not {then}" for now, then in pairs if then is not None and now != then]
        return f"but the prompt is {' and '.join(other)}" if other else None
    if info.contract is None and used != _TRAINED:
        return f"but the prompt is {used[0]}, {used[1]}, not the trained one"
    return None


def _averages(permutations: int) -> str:
    if permutations == 1:
        return "one order of the choices"
    return f"averages over {permutations} orders of the choices"
