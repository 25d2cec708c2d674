"""READY.json: what lies beside merged weights and says who they are.

Releases write the adapter that was merged, the base it was merged into, and hashes of
weights and prompt. A calibration of ours adds one entry under a key of its own:

    {"weighbridge": {"temperature": {"value": 1.7, "fitted_on": "…", "fitted_at": "…",
                                     "fingerprint": "…", "metrics": {"nll": 0.41},
                                     "layout": "context-first", "encoding": "codes",
                                     "permutations": 1}}}
"""

import json
import math
import numbers
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError, TemperatureError, quoted, shown
from weighbridge.scorer.names import name_fault

READY_FILE = "READY.json"
OWN_KEY = "weighbridge"

LOWEST, HIGHEST = 0.05, 20.0
"""The temperatures that a fit may end at. Divided by 0.05 nearly every answer has
probability 0 or 1, by 20 nearly all are alike: a fit that ends beyond has found no minimum
but the end of its search, on too few labels or on wrong ones."""

_LONGEST_FILE = 255  # bytes, on every disk
_SHA256 = re.compile("[0-9a-fA-F]{64}")
_TEXTS = (
    *("model", "revision", "base_model", "base_revision", "base_quantization"),
    "adapter_base_model",
)
_KNOWN = {
    *_TEXTS,
    *("adapter_sha256", "base_adapter_sha256", "prompt_sha256", "weight_sha256"),
    *("precision", "versions", "merged_at", OWN_KEY),
}


@dataclass(frozen=True, slots=True)
class StoredTemperature:
    """A temperature that a calibration of ours wrote beside the weights.

    Attributes:
        value: Between 0.05 and 20.
        fitted_on: What it was fitted on, for people: a file, how many labels.
        fitted_at: When, with a time zone.
        fingerprint: The checkpoint it was fitted on, adapter included.
        metrics: Such as the log loss before and after, by name.
        layout: Of the prompt it was fitted on, None where it is not told.
        encoding: How that prompt asked for a choice, likewise.
        permutations: Over how many orders of the choices logits were averaged.
    """

    value: float
    fitted_on: str
    fitted_at: datetime
    fingerprint: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    layout: str | None = None
    encoding: str | None = None
    permutations: int = 1


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """What READY.json says of the weights it lies beside; None where it says nothing.

    Attributes:
        adapter_sha256: Of the adapter that was merged into them, lower-case hex.
        model: Hub id of the weights.
        revision: Full commit of that id.
        base_model: Hub id of what the adapter was merged into. Never selects a temperature.
        base_revision: Its commit, likewise.
        adapter_base_model: What the adapter says it was trained on, which need not be the base.
        base_quantization: How the base was packed before the merge, None for plain weights.
        base_adapter_sha256: Of another adapter that was in the base already.
        prompt_sha256: Of the system text they were trained with.
        weight_sha256: Of each weight file, by its name.
        precision: In what dtype they were merged.
        versions: Of the packages that wrote them.
        temperature: Fitted by a calibration of ours.
        unknown: Keys of the file that nothing here reads.
    """

    adapter_sha256: str | None = None
    model: str | None = None
    revision: str | None = None
    base_model: str | None = None
    base_revision: str | None = None
    adapter_base_model: str | None = None
    base_quantization: str | None = None
    base_adapter_sha256: str | None = None
    prompt_sha256: str | None = None
    weight_sha256: Mapping[str, str] = field(default_factory=dict[str, str])
    precision: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    temperature: StoredTemperature | None = None
    unknown: tuple[str, ...] = ()

    def merged_otherwise(self, fused: str | None = None) -> list[str]:
        """Say how what is below an adapter differs from the plain base of its release.

        Args:
            fused: Hash of an adapter that is fused into these weights at load; None where
                the adapter is the one that was merged.
        """
        found: list[str] = []
        if self.base_quantization is not None:
            found.append(f"but it was merged into {self.base_quantization} weights")
        mine = (fused or self.adapter_sha256 or "").lower()
        found += [
            f"but another adapter ({other[:12]}…) was in its base already"
            for other in (self.base_adapter_sha256, self.adapter_sha256)
            if other is not None and other != mine
        ]
        return found


def read_ready(folder: Path) -> ReadyFile:
    """Read READY.json of a checkpoint folder; an absent file says nothing.

    Raises:
        TemperatureError: The folder is not there, or the file cannot be trusted: going on
            without it would score with a temperature of 1 in silence.
    """
    path = folder / READY_FILE
    data = _load(folder)
    read = _Reader(path)
    return ReadyFile(
        adapter_sha256=read.sha256(data, "adapter_sha256"),
        **{key: read.text(data, key) for key in _TEXTS},
        base_adapter_sha256=read.sha256(data, "base_adapter_sha256"),
        prompt_sha256=read.sha256(data, "prompt_sha256"),
        weight_sha256=read.hashes(data, "weight_sha256"),
        # Only shown, so that any form will do.
        precision=_described(data.get("precision")),
        versions=_versions(data.get("versions")),
        temperature=read.stored(data),
        unknown=tuple(key for key in data if key not in _KNOWN),
    )


def record_temperature(
    folder: Path,
    value: float,
    *,
    fitted_on: str,
    metrics: Mapping[str, float],
    fingerprint: str,
    fitted_at: datetime | None = None,
    layout: str | None = None,
    encoding: str | None = None,
    permutations: int = 1,
) -> StoredTemperature:
    """Write a fitted temperature into READY.json; all other keys stay as they are.

    The file is made where there is none, and replaced at once: a reader sees the old or the
    new one. A link, as in the cache of a hub, becomes a file of its own.

    Args:
        folder: The checkpoint folder.
        value: Between 0.05 and 20.
        fitted_on: What it was fitted on, for people.
        metrics: Finite numbers by name.
        fingerprint: Of the checkpoint it was fitted on, adapter included.
        fitted_at: With a time zone; now if left out.
        layout: Of the prompt it was fitted on, such as `context-first`.
        encoding: How that prompt asked for a choice, such as `codes`.
        permutations: Over how many orders of the choices logits were averaged.

    Raises:
        TemperatureError: The value is out of range, an argument is not usable, or the file
            that is there cannot be trusted.
        CheckpointError: The folder cannot be written.
    """
    read_ready(folder)  # what cannot be trusted is not written over
    entry: dict[str, Any] = {
        "value": _plain(value),
        "fitted_on": fitted_on,
        "fitted_at": (fitted_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        "fingerprint": fingerprint,
        "metrics": {name: _plain(number) for name, number in metrics.items()},
        **({} if layout is None else {"layout": str(layout)}),
        **({} if encoding is None else {"encoding": str(encoding)}),
        "permutations": permutations,
    }
    data = _load(folder)
    own = data.get(OWN_KEY)
    kept: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    data[OWN_KEY] = {**kept, "temperature": entry}
    stored = _Reader(folder / READY_FILE).stored(data)
    assert stored is not None  # noqa: S101 - for the type checker
    write_ready(folder, data)
    return stored


def write_ready(folder: Path, data: Mapping[str, Any]) -> None:
    """Replace READY.json of a folder at once.

    Args:
        folder: The checkpoint folder.
        data: What the file shall hold; its order is kept.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    text = json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    partial: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=folder, prefix=f".{READY_FILE}.", delete=False
        ) as file:
            partial = Path(file.name)
            file.write(text)
        # What mkstemp makes is for the owner alone; whoever reads the weights reads this.
        partial.chmod(0o644)
        partial.replace(folder / READY_FILE)
    except OSError as error:
        raise CheckpointError(
            f"{READY_FILE} must be written into {folder}, and cannot: {error.strerror or error}",
            hint="make the folder writable, or copy the checkpoint to a place of your own",
        ) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def _load(folder: Path) -> dict[str, Any]:
    path = folder / READY_FILE
    refused = _Reader(path).refused
    try:
        if not folder.is_dir():
            raise TemperatureError(
                f"the checkpoint must be a folder, got {quoted(str(folder), limit=200)}",
                hint="give the folder that holds config.json and the weights",
            )
        data = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=_once)
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise refused(
            f"must be JSON, got at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refused(f"must be a readable UTF-8 JSON file, got: {reason}") from error
    if not isinstance(data, dict):
        raise refused(f"must hold a JSON object, got {shown(data)}")
    return data


class _Reader:
    """Reads the values of one READY.json, and says in which file one is wrong."""

    def __init__(self, path: Path) -> None:
        self._where = quoted(str(path), limit=200)[1:-1]

    def refused(self, what: str, hint: str | None = None) -> TemperatureError:
        return TemperatureError(
            f"{self._where} {what}",
            hint=hint
            or f"restore {READY_FILE} from the release, or remove it to use the default "
            "temperature",
        )

    def text(self, data: Mapping[str, Any], key: str) -> str | None:
        value = data.get(key)
        if value is not None and (must := name_fault(value)):
            raise self.refused(f'must have {must} as "{key}", got {shown(value)}')
        return value

    def sha256(self, data: Mapping[str, Any], key: str) -> str | None:
        value = data.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self.refused(f'must have 64 hex digits as "{key}", got {shown(value)}')
        return value.lower()

    def hashes(self, data: Mapping[str, Any], key: str) -> dict[str, str]:
        value = data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.refused(f'must have an object of hashes as "{key}", got {shown(value)}')
        found: dict[str, str] = {}
        for name, sha256 in value.items():
            if (name and not name.isprintable()) or len(name.encode()) > _LONGEST_FILE:
                raise self.refused(f'must have names of files in "{key}", got {quoted(name)}')
            if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
                raise self.refused(
                    f'must have 64 hex digits for {quoted(name)} in "{key}", got {shown(sha256)}'
                )
            found[name] = sha256.lower()
        return found

    def stored(self, data: Mapping[str, Any]) -> StoredTemperature | None:
        own = data.get(OWN_KEY)
        entry = own.get("temperature") if isinstance(own, dict) else None
        if entry is None:
            return None
        where = f'"{OWN_KEY}.temperature'
        hint = f'record it anew (docs/checkpoints.md), or remove {where}" from {READY_FILE}'
        if not isinstance(entry, dict):
            raise self.refused(f'must have an object as {where}", got {shown(entry)}', hint)
        value = _finite(entry.get("value"))
        if value is None or not LOWEST <= value <= HIGHEST:
            raise self.refused(
                f'must have a number from {LOWEST:g} to {HIGHEST:g} as {where}.value", '
                f"got {shown(entry.get('value'))}",
                hint,
            )
        for key in ("fitted_on", "fingerprint", "layout", "encoding"):
            if key not in entry and key in {"layout", "encoding"}:
                continue
            text = entry.get(key)
            # For people, and shown in short: any text will do.
            free = key == "fitted_on" and isinstance(text, str) and text.strip()
            if not free and (must := name_fault(text)):
                raise self.refused(f'must have {must} as {where}.{key}", got {shown(text)}', hint)
        metrics = entry.get("metrics", {})
        if not isinstance(metrics, dict) or any(_finite(n) is None for n in metrics.values()):
            raise self.refused(
                f'must have an object of finite numbers as {where}.metrics", got {shown(metrics)}',
                hint,
            )
        permutations = entry.get("permutations", 1)
        if type(permutations) is not int or permutations < 1:
            raise self.refused(
                f'must have a whole number above 0 as {where}.permutations", '
                f"got {shown(permutations)}",
                hint,
            )
        return StoredTemperature(
            value=value,
            fitted_on=entry["fitted_on"],
            fitted_at=self._time(entry.get("fitted_at"), where, hint),
            fingerprint=entry["fingerprint"].lower(),
            metrics={str(name): float(number) for name, number in metrics.items()},
            layout=entry.get("layout"),
            encoding=entry.get("encoding"),
            permutations=permutations,
        )

    def _time(self, value: Any, where: str, hint: str) -> datetime:
        with suppress(TypeError, ValueError):
            found = datetime.fromisoformat(value)
            if found.tzinfo is not None:
                return found
        raise self.refused(
            f'must have a time with its zone as {where}.fitted_at", got {shown(value)}', hint
        )


def _plain(value: Any) -> Any:
    """Turn a number of NumPy into one that JSON can hold; leave all else for the check."""
    if isinstance(value, int) or not isinstance(value, numbers.Real):
        return value
    return float(value)


def _finite(value: Any) -> float | None:
    # bool is an int, and 10**400 is no float.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    return None


def _described(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _versions(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name: str(_described(version)) for name, version in value.items()}


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key that came twice")
    return made
