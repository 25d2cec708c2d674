"""The trained prompt contract of a checkpoint, read from its folder.

A checkpoint with `schema_config.json` was trained on one exact prompt, so its
layout and encoding are fixed and its system text must be the trained one. The
text is never ours to ship: it comes from the folder, and its hash is checked.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.scorer.errors import CheckpointError

CONFIG_FILE = "schema_config.json"
SYSTEM_FILE = "system_prompt.txt"

NARROW_SHA256 = "5ae11c8de9ed42c34dd0053f6e8fc8dc5bd946eb51b70971136a59206f015daf"
WIDE_SHA256 = "2d6facc167cd5b20c897f527152eb231b699ff97a87ccd7f1530b69c6b6a99be"

NARROW_CHOICES = 26
"""Up to so many choices codes are single letters, and the narrow text is used."""

_TASKS = ("schema_candidate_classification_v1", "schema_candidate_classification_v2")


@dataclass(frozen=True, slots=True)
class Contract:
    """A trained prompt contract.

    Attributes:
        task: Its name in `schema_config.json`.
        max_length: Longest prompt in tokens it was trained on, if it says so.
        narrow_system: System text for up to 26 choices.
        wide_system: System text for more choices, None where there is none.
    """

    task: str
    max_length: int | None
    narrow_system: str
    wide_system: str | None

    def system(self, choices: int) -> str:
        """Return the system text for a schema whose widest field has so many choices.

        Raises:
            CheckpointError: The contract has no text for so many.
        """
        if choices <= NARROW_CHOICES:
            return self.narrow_system
        if self.wide_system is None:
            raise CheckpointError(
                f"a field must have at most {NARROW_CHOICES} choices with this checkpoint, "
                f"got {choices}",
                hint="its contract has no wide system text",
            )
        return self.wide_system


def read_contract(folder: Path) -> Contract | None:
    """Read the contract of a checkpoint folder, None where it has none.

    Raises:
        CheckpointError: The contract is damaged, unknown, or its text is missing
            or not the trained one.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        return None
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{CONFIG_FILE} must be readable JSON, got: {error}", hint=f"restore {path}"
        ) from error
    task = config.get("task") if isinstance(config, dict) else None
    if task not in _TASKS:
        raise CheckpointError(
            f"{CONFIG_FILE} must name a known task ({', '.join(_TASKS)}), got {task!r}",
            hint="this contract needs a newer weighbridge",
        )
    max_length = config.get("max_length")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise CheckpointError(
            f"max_length in {CONFIG_FILE} must be a whole number above 0, got {max_length!r}",
            hint=f"restore {path}",
        )
    wide = config.get("wide_system_prompt")
    if wide is not None:
        _check(wide, WIDE_SHA256, f"wide_system_prompt in {path}")
        narrow = wide.replace("short", "one-letter")
        _check(narrow, NARROW_SHA256, f"the narrow form of wide_system_prompt in {path}")
        return Contract(task, max_length, narrow, wide)
    narrow = _read_system(folder)
    _check(narrow, NARROW_SHA256, str(folder / SYSTEM_FILE))
    return Contract(task, max_length, narrow, None)


def _read_system(folder: Path) -> str:
    path = folder / SYSTEM_FILE
    try:
        # Read as bytes: universal newlines would change the text under its hash.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"a checkpoint with {CONFIG_FILE} must bring its system text, got none in {folder}",
            hint=f"put the text it was trained with into {path}",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{SYSTEM_FILE} must be readable UTF-8, got: {error}", hint=f"restore {path}"
        ) from error


def _check(text: Any, expected: str, where: str) -> None:
    # JSON can spell lone surrogates, which are no UTF-8 and in no trained text.
    actual = (
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if isinstance(text, str)
        else "no text"
    )
    if actual != expected:
        raise CheckpointError(
            f"the system text must have sha256 {expected}, got {actual} ({where})",
            hint="copy the text of the checkpoint's own release, without a newline at its end",
        )
