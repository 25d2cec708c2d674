"""The temperature of a checkpoint as it is about to score: its kind says for what it holds."""

from weighbridge.scorer.checkpoint import CheckpointInfo
from weighbridge.scorer.temperature import Temperature, resolve_temperature, transferred


def checkpoint_temperature(
    info: CheckpointInfo,
    *,
    temperature: float | None = None,
    allow_uncalibrated: bool = False,
    permutations: int = 1,
) -> Temperature:
    """Apply the temperature policy to a checkpoint that was looked at.

    A fitted temperature is of the logits it was fitted on. The releases were fitted as they
    were published, in 16 bits, on their own prompt and one order of the choices: packed weights,
    another system text and averages over orders give other logits, to which theirs is
    transferred. One that was fitted here,
    on these very files, has seen how they are packed.

    Args:
        info: The checkpoint, with its adapter if one is fused at load.
        temperature: Overrides the checkpoint's own.
        allow_uncalibrated: Permit 1.0 where a transferred temperature is known.
        permutations: Over how many orders of the choices logits are averaged.

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
    if info.contract and info.contract.accepted_sha256:
        resolved = transferred(resolved, "but the system text is not the trained one")
    if info.quantization:
        why = f"but the weights here are {info.quantization}"
        resolved = transferred(resolved, why, to_stored=False)
    if permutations > 1:
        why = f"but applied to averages over {permutations} orders of the choices"
        resolved = transferred(resolved, why)
    return resolved
