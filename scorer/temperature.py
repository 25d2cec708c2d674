"""The temperature that a checkpoint's logits are divided by, and where it comes from.

A temperature is fitted for one set of weights, so it follows their identity. What the
caller gives comes first; then what a calibration of ours stored in `READY.json` for these
very weights; then the table, the published policy of the Bespoke Nimble releases, by the
hash of the adapter, else by a model id with its full revision. Scaling happens once, on the
candidate logits; the logits that are stored and the selected choice never change.
"""

import logging
import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from weighbridge.scorer.errors import ScorerError, TemperatureError, quoted
from weighbridge.scorer.ready import READY_FILE, ReadyFile, read_ready

_logger = logging.getLogger("weighbridge.scorer.temperature")


class TemperatureKind(StrEnum):
    """How far a temperature can be trusted.

    FITTED on held-out answers of these very weights; TRANSFERRED from other weights;
    UNFITTED for a known release that came without one; EXPLICIT when the caller gave it;
    DEFAULT when nothing is known about the checkpoint.
    """

    FITTED = "fitted"
    TRANSFERRED = "transferred"
    UNFITTED = "unfitted"
    EXPLICIT = "explicit"
    DEFAULT = "default"


@dataclass(frozen=True)
class Temperature:
    """A temperature with its provenance.

    Attributes:
        value: Finite and above 0.
        source: A sentence for people: where the value came from.
        warning: What looks like a mistake in how the checkpoint was named, or None.
        stored: Whether a calibration of ours fitted it, on these files as they are.
    """

    value: float
    kind: TemperatureKind
    source: str
    warning: str | None = None
    stored: bool = False


@dataclass(frozen=True)
class _Release:
    """A published checkpoint; `revision` None means that any revision is meant."""

    title: str
    adapter_sha256: str
    value: float
    kind: TemperatureKind
    model_id: str | None = None
    revision: str | None = None


_NIMBLE_V1 = _Release(
    title="Bespoke-Nimble-9B v1",
    adapter_sha256="ba7e28acb97f973e80fa51f3aa6fc6f75ea4081b89632ed45d8e5f3a1d7bfa6b",
    value=2.179078721266035,
    kind=TemperatureKind.FITTED,
    model_id="bespokelabs/Bespoke-Nimble-9B",
    revision="93ec5d6ff1a9cd31d6cc0e0c58d312465d36de7c",
)
_RELEASES = (
    _NIMBLE_V1,
    _Release(
        title="Bespoke-Nimble-9B-v2",
        adapter_sha256="1bd126be997be6d9a0c25ce483ccf858c31b3422d480c33f02ba47b614be68ae",
        value=_NIMBLE_V1.value,
        kind=TemperatureKind.TRANSFERRED,
        model_id="bespokelabs/Bespoke-Nimble-9B-v2",
    ),
    _Release(
        title="the latest Bespoke-Nimble release",
        adapter_sha256="29ef39b072dee97287947455337879c1e916705c2f727287922a2d81f5e2f20a",
        value=1.0,
        kind=TemperatureKind.UNFITTED,
    ),
)


@dataclass(frozen=True)
class _Identity:
    """What is known of the weights; `ready` holds nothing that they do not."""

    ready: ReadyFile
    model: str | None
    revision: str | None
    fused: bool  # an adapter is fused into them at load

    @property
    def adapter(self) -> str:
        """What tells the hash of the adapter."""
        return "the hash of the adapter" if self.fused else f"the adapter hash in {READY_FILE}"


def resolve_temperature(
    folder: str | Path | None = None,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    temperature: float | None = None,
    allow_uncalibrated: bool = False,
    adapter_sha256: str | None = None,
    fingerprint: str | None = None,
) -> Temperature:
    """Decide the temperature of a checkpoint, and say why.

    What lies beside the weights beats what the caller says of them. An adapter hash decides
    alone: one that is in no table means the default, whatever model id comes with it.
    `base_model` and `base_revision` in READY.json never select. An adapter that was merged
    into packed weights, or over another one, is not the release: its value is transferred.

    Args:
        folder: The checkpoint's folder, which may hold READY.json.
        model_id: The hub id the checkpoint came from, letter for letter.
        revision: Its full commit hash; a short one never matches.
        temperature: A value that overrides the checkpoint's own.
        allow_uncalibrated: Permit `temperature=1.0` where a transferred one is known.
        adapter_sha256: Of an adapter that is fused into the weights at load. The names in
            READY.json are about the weights without it, and are not asked then.
        fingerprint: Of the checkpoint, adapter included: a stored temperature that was fitted
            on another one is not followed. None takes the file at its word.

    Returns:
        The temperature. Its warning, if any, is logged too, once in a process.

    Raises:
        TemperatureError: When the temperature is not usable or is refused, the folder is
            not there, or READY.json cannot be trusted.
    """
    given = None if temperature is None else validate_temperature(temperature)
    ready = ReadyFile() if folder is None else read_ready(Path(folder))
    known = _identity(ready, model_id, revision, adapter_sha256)
    release, recognised_by = _recognise(known)
    stored, stale = _stored(ready, fingerprint, fused=known.fused)
    own = stored or _own_temperature(release, recognised_by, known)
    for why in ready.merged_otherwise(adapter_sha256):
        own = transferred(own, why, to_stored=False)
    resolved = own
    if given is not None:
        if (
            release is not None
            and release.kind == TemperatureKind.TRANSFERRED
            and given == 1.0 != own.value
            and not allow_uncalibrated
        ):
            raise TemperatureError(
                f"temperature must not be 1.0 for {release.title}, whose scores need "
                f"{own.value}, unless allow_uncalibrated is set",
                hint=f"leave the temperature out to use {own.value}, or pass "
                "allow_uncalibrated to see unscaled scores on purpose",
            )
        resolved = Temperature(given, TemperatureKind.EXPLICIT, "given by the caller")
    settled = given is not None or stored is not None
    warnings = [
        *([stale] if stale and given is None else []),
        *_near_misses(release, known, settled=settled),
        *_contradictions(release, known, model_id, revision),
    ]
    if not warnings:
        return resolved
    warning = "; ".join(warnings)
    _warn_once(resolved.value, resolved.kind, warning)
    return replace(resolved, warning=warning)


def transferred(temperature: Temperature, why: str, *, to_stored: bool = True) -> Temperature:
    """Mark a fitted temperature as used on something that it was not fitted on.

    Args:
        temperature: Of any kind; only a fitted one changes.
        why: What is different, as it goes on from the source: `but these weights are packed`.
        to_stored: Whether that holds for one of our own calibration too. It was fitted on
            these files as they are, so that how they are quantized is no difference.
    """
    if temperature.kind != TemperatureKind.FITTED or (temperature.stored and not to_stored):
        return temperature
    source = f"{temperature.source}; {why}, so it is transferred, not fitted"
    return replace(temperature, kind=TemperatureKind.TRANSFERRED, source=source, stored=False)


def release_of(adapter_sha256: str) -> str | None:
    """Name the published release that an adapter belongs to, None where it is none."""
    titles = {release.adapter_sha256: release.title for release in _RELEASES}
    return titles.get(adapter_sha256.lower())


@lru_cache
def _warn_once(value: float, kind: TemperatureKind, warning: str) -> None:
    """Log a warning; a policy is resolved again with every batch."""
    _logger.warning("temperature %s (%s): %s", value, kind, warning)


def validate_temperature(value: object) -> float:
    """Return `value` as a float.

    Raises:
        TemperatureError: Unless it is a real number, finite and above 0. Booleans and
            texts are refused even when they look like one.
    """
    number, received = math.nan, ""
    # NumPy's booleans are no numbers.Real, Python's are.
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            # Such a number may also be too long to be written out.
            received = "a number too large for float64"
    if math.isfinite(number) and number > 0:
        return number
    raise TemperatureError(
        f"temperature must be a number, finite and above 0, got {received or f'{value!r:.80}'}",
        hint="give a number such as 1.0, or leave it out to use the checkpoint's own",
    )


def softmax(logits: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Turn the logits of a field's choices into probabilities, in float64.

    Order is kept, but a high temperature or underflow can make different logits equal
    here: take the selected choice from the logits.

    Args:
        logits: One per choice, (K,), finite.
        temperature: Divides the logits; finite and above 0.

    Returns:
        K probabilities that sum to 1 within 1e-12.

    Raises:
        ScorerError: When there is no logit, or one is not finite.
        TemperatureError: When the temperature is not usable.
    """
    scale = validate_temperature(temperature)
    values = [float(logit) for logit in logits]
    if not values:
        raise ScorerError("softmax needs at least one logit, got none")
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise ScorerError(f"logits must be finite, got {value} at position {position}")
    top = max(values)
    # Shifted before dividing: a tiny temperature then gives -inf and 0, never an overflow.
    weights = [math.exp((value - top) / scale) for value in values]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def _identity(
    ready: ReadyFile, model_id: str | None, revision: str | None, adapter_sha256: str | None
) -> _Identity:
    """Combine READY.json's names with the caller's, the file's first."""
    if adapter_sha256 is not None:
        return _Identity(ReadyFile(adapter_sha256.lower()), model_id, revision, fused=True)
    if ready.model is None:
        return _Identity(ready, model_id, ready.revision or revision, fused=False)
    # The caller's revision is one of the caller's model, so it cannot complete another's name.
    same_model = model_id is None or model_id == ready.model
    commit = ready.revision or (revision if same_model else None)
    return _Identity(ready, ready.model, commit, fused=False)


def _recognise(known: _Identity) -> tuple[_Release | None, str]:
    """Find the release that this checkpoint is, and what told so."""
    if known.ready.adapter_sha256 is not None:
        by_adapter = {release.adapter_sha256: release for release in _RELEASES}
        return by_adapter.get(known.ready.adapter_sha256), known.adapter
    release = _named(known.model, known.revision)
    any_revision = release is not None and release.revision is None
    return release, "its model id" if any_revision else "its model id and revision"


def _named(model: str | None, revision: str | None) -> _Release | None:
    for release in _RELEASES:
        if model is not None and release.model_id == model:
            return release if release.revision in (None, revision) else None
    return None


def _stored(
    ready: ReadyFile, fingerprint: str | None, *, fused: bool
) -> tuple[Temperature | None, str | None]:
    """Return what our calibration stored, or what speaks against following it."""
    entry = ready.temperature
    if entry is None:
        return None, None
    if fingerprint != entry.fingerprint and (fingerprint is not None or fused):
        return None, (
            f"the temperature {entry.value} in {READY_FILE} was fitted on other files "
            f"(fingerprint {quoted(entry.fingerprint[:12])[1:-1]}…) than these, so it is not "
            "followed; record it anew: docs/checkpoints.md"
        )
    source = (
        f"fitted on {quoted(entry.fitted_on)[1:-1]} at {entry.fitted_at:%Y-%m-%d %H:%M %Z}, "
        f"stored in {READY_FILE}"
    )
    return Temperature(entry.value, TemperatureKind.FITTED, source, stored=True), None


def _own_temperature(release: _Release | None, recognised_by: str, known: _Identity) -> Temperature:
    if release is not None:
        how = {
            TemperatureKind.FITTED: f"fitted on {release.title}",
            TemperatureKind.TRANSFERRED: f"transferred from {_NIMBLE_V1.title} to "
            f"{release.title}, not fitted on it",
            TemperatureKind.UNFITTED: f"none: {release.title} was released without one",
        }[release.kind]
        return Temperature(release.value, release.kind, f"{how}; recognised by {recognised_by}")
    if known.ready.adapter_sha256 is not None:
        what = f"the adapter {known.ready.adapter_sha256[:12]}…"
    elif known.model is None:
        what = "a checkpoint without a model id"
    else:
        at = "" if known.revision is None else f" at revision {quoted(known.revision)}"
        what = quoted(known.model) + at
    return Temperature(1.0, TemperatureKind.DEFAULT, f"default: no temperature is known for {what}")


def _near_misses(release: _Release | None, known: _Identity, *, settled: bool) -> list[str]:
    """Say which name almost selects a temperature; `settled` when one is given or stored."""
    model, revision = known.model, known.revision
    if release is not None or known.ready.adapter_sha256 is not None or model is None:
        return []
    for close in _RELEASES:
        if close.model_id is None or _folded(model) != _folded(close.model_id):
            continue
        found: list[str] = []
        if model != close.model_id:
            found.append(
                f"model id {quoted(model)} differs from {quoted(close.model_id)} in letter case "
                f"or space, so it does not select T={close.value}"
            )
        if close.revision is not None and revision != close.revision:
            found.extend(_near_revision(close.revision, close.value, revision, settled=settled))
        return found
    return []


def _near_revision(known: str, value: float, revision: str | None, *, settled: bool) -> list[str]:
    """Compare a revision that is not `known`; another full revision is no mistake."""
    needs = f"only the full 40-character revision {known} selects T={value}"
    if revision is None or not _folded(revision):
        return [] if settled else [f"no revision is given, {needs}"]
    if _folded(revision) == known:
        came = f"revision {quoted(revision)} differs in letter case or space"
        return [f"{came}, {needs}"]
    if len(_folded(revision)) >= 4 and known.startswith(_folded(revision)):
        return [f"revision {quoted(revision)} is short, {needs}"]
    if settled or re.fullmatch("[0-9a-f]{40}", _folded(revision)):
        return []
    return [f"revision {quoted(revision)} is not a commit hash, {needs}"]


def _contradictions(
    release: _Release | None, known: _Identity, model_id: str | None, revision: str | None
) -> list[str]:
    """Say when the caller's names are overruled by what lies beside the weights."""
    ready = known.ready
    if ready.adapter_sha256 is not None:
        claimed = _named(ready.model or model_id, ready.revision or revision)
        if claimed is None or claimed == release:
            return []
        return [
            f"{known.adapter} is not that of {claimed.title}, "
            f"so the names that say so are not followed"
        ]
    pairs = (("model id", model_id, ready.model), ("revision", revision, ready.revision))
    return [
        f"{READY_FILE} has {what} {quoted(written)}, so {quoted(said)} is not followed"
        for what, said, written in pairs
        if said is not None and written is not None and said != written
    ]


def _folded(text: str) -> str:
    return text.strip().casefold()
