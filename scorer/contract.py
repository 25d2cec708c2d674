"""The prompt contract that a checkpoint was trained on: `schema_config.json`.

A trained checkpoint answers well only to the exact prompt it has seen. Its system
text belongs to the checkpoint and is not shipped here: it is read from the folder
and checked by hash. Another text can be consented to, and is then told by its hash.

What the folder says of the code that made the prompts cannot be checked. Its codes and
their tokens can, and must be what this program would use.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from weighbridge.scorer.errors import CheckpointError, quoted, shown
from weighbridge.scorer.names import name_fault

CONTRACT_FILE = "schema_config.json"
SYSTEM_FILE = "system_prompt.txt"

NARROW_SHA256 = "5ae11c8de9ed42c34dd0053f6e8fc8dc5bd946eb51b70971136a59206f015daf"
WIDE_SHA256 = "2d6facc167cd5b20c897f527152eb231b699ff97a87ccd7f1530b69c6b6a99be"

NARROW_CHOICES = 26
"""Up to so many choices codes are single letters, and the narrow text is used."""

WIDE_CHOICES = 255
CANDIDATE_ENCODING = "uppercase_single_token_v1"

# Lengths are kept with a run, and no model reads so many tokens.
_MOST_TOKENS = 2**31 - 1
_TASKS = ("schema_candidate_classification_v1", "schema_candidate_classification_v2")


@dataclass(frozen=True, slots=True)
class Contract:
    """A trained prompt contract.

    Attributes:
        task: Its name in `schema_config.json`.
        max_length: Longest prompt in tokens it was trained on, if it says so.
        narrow_system: System text for up to 26 choices.
        wide_system: System text for more choices, None where there is none.
        max_choices: Most choices of a field.
        codes: The codes by position of a choice, None where it does not list them.
        code_token_ids: The token of each of them.
        model: Hub id of the base model that was trained.
        revision: Its commit.
        accepted_sha256: Of the system text that is not the trained one and was consented to;
            where both differ, of the one for up to 26 choices. None for the trained texts.
    """

    task: str
    max_length: int | None
    narrow_system: str
    wide_system: str | None
    max_choices: int = NARROW_CHOICES
    codes: tuple[str, ...] | None = None
    code_token_ids: tuple[int, ...] | None = None
    model: str | None = None
    revision: str | None = None
    accepted_sha256: str | None = None

    def system(self, choices: int) -> str:
        """Return the system text for a schema whose widest field has so many choices.

        Raises:
            CheckpointError: The contract has no text for so many, or allows fewer.
        """
        most = self.max_choices
        why = f"{self.task} was trained on no more"
        if self.wide_system is None and most > NARROW_CHOICES:
            most, why = NARROW_CHOICES, "its contract has no wide system text"
        if choices > most:
            raise CheckpointError(
                f"a field must have at most {most} choices with this checkpoint, got {choices}",
                hint=f"split the choices over two fields: {why}",
            )
        return self.narrow_system if choices <= NARROW_CHOICES else self.wide_system or ""

    def check_codes(self, planned: Mapping[str, int]) -> None:
        """Compare the codes that a prompt is about to use with those that were trained.

        Args:
            planned: The token of each code at the answer boundary, in the order of the
                choices.

        Raises:
            CheckpointError: A code or its token is another one.
        """
        if self.codes is None or self.code_token_ids is None:
            return
        trained = list(zip(self.codes, self.code_token_ids, strict=True))
        for position, (code, token) in enumerate(planned.items()):
            if position >= len(trained):
                raise CheckpointError(
                    f"a field must have at most {len(trained)} choices, as many as "
                    f"{CONTRACT_FILE} has codes, got {len(planned)}",
                    hint="split the choices over two fields",
                )
            if (code, token) != trained[position]:
                wanted, wanted_token = trained[position]
                raise CheckpointError(
                    f"choice {position + 1} must have the code {quoted(wanted)} of token "
                    f"{wanted_token}, as {CONTRACT_FILE} says, got {quoted(code)} of token {token}",
                    hint="the tokenizer beside the weights is not the one they were trained "
                    "with: copy tokenizer.json and tokenizer_config.json of the same release",
                )


def read_contract(folder: Path, *, accept_prompt: bool = False) -> Contract | None:
    """Read the contract of a checkpoint folder, None where it has none.

    Args:
        folder: The checkpoint folder.
        accept_prompt: Consent to a system text that is not the trained one.

    Raises:
        CheckpointError: The contract is damaged, unknown, or its text is missing
            or not the trained one.
    """
    path = folder / CONTRACT_FILE
    config = read_contract_file(folder)
    if config is None:
        return None
    reader = _Config(config, path)
    task = config.get("task")
    if task not in _TASKS:
        raise CheckpointError(
            f"{CONTRACT_FILE} must name a known task ({', '.join(_TASKS)}), got {shown(task)}",
            hint="this contract needs a newer weighbridge",
        )
    encoding = config.get("candidate_encoding")
    if encoding not in (None, CANDIDATE_ENCODING):
        raise CheckpointError(
            f"candidate_encoding in {CONTRACT_FILE} must be {CANDIDATE_ENCODING}, "
            f"got {shown(encoding)}",
            hint="this contract needs a newer weighbridge",
        )
    is_wide = task == _TASKS[1]
    max_choices = reader.whole("max_choices", most=WIDE_CHOICES) or (
        WIDE_CHOICES if is_wide else NARROW_CHOICES
    )
    codes, tokens = reader.codes(max_choices)
    narrow, wide, accepted = _texts(folder, config, accept_prompt=accept_prompt)
    return Contract(
        task=task,
        max_length=reader.whole("max_length", most=_MOST_TOKENS),
        narrow_system=narrow,
        wide_system=wide,
        max_choices=max_choices,
        codes=codes,
        code_token_ids=tokens,
        model=reader.text("model"),
        revision=reader.text("revision"),
        accepted_sha256=accepted,
    )


def sha256_of(text: str) -> str:
    """Return the sha256 of a text in UTF-8, in hex."""
    # Lone surrogates, which JSON can spell, are refused as a system text.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_contract_file(folder: Path) -> dict[str, Any] | None:
    """Read `schema_config.json` as it is, None where there is none.

    Args:
        folder: A folder that may hold it.

    Raises:
        CheckpointError: It is no JSON object, or has a key twice.
    """
    path = folder / CONTRACT_FILE
    if not path.exists():
        return None
    try:
        text = path.read_bytes().decode("utf-8-sig")
        config: Any = json.loads(text, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{CONTRACT_FILE} must be readable JSON, got: {error}", hint=f"restore {path}"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{CONTRACT_FILE} must be a JSON object, got {shown(config)}", hint=f"restore {path}"
        )
    return config


class _Config:
    """Reads the values of one `schema_config.json`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config: Any = config
        self._path = path

    def _damaged(self, key: str, must: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{key} in {CONTRACT_FILE} must be {must}, got {shown(value)}",
            hint=f"restore {self._path}",
        )

    def whole(self, key: str, *, most: int) -> int | None:
        value = self._config.get(key)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= most:
            far = most == _MOST_TOKENS and (type(value) is not int or value < 1)
            must = "a whole number above 0" if far else f"a whole number from 1 to {most}"
            raise self._damaged(key, must, value)
        return value

    def text(self, key: str) -> str | None:
        value = self._config.get(key)
        if value is not None and (must := name_fault(value)):
            raise self._damaged(key, must, value)
        return value

    def codes(self, max_choices: int) -> tuple[tuple[str, ...] | None, tuple[int, ...] | None]:
        codes: Any = self._config.get("candidate_codes")
        tokens: Any = self._config.get("candidate_token_ids")
        if codes is None and tokens is None:
            return None, None
        if not _distinct(codes, str):
            raise self._damaged("candidate_codes", "a list of distinct texts", codes)
        if not _distinct(tokens, int):
            raise self._damaged("candidate_token_ids", "a list of distinct whole numbers", tokens)
        if not max_choices <= len(codes) == len(tokens):
            raise CheckpointError(
                f"{CONTRACT_FILE} must have as many candidate_codes as candidate_token_ids, and "
                f"at least max_choices ({max_choices}), got {len(codes)} and {len(tokens)}",
                hint=f"restore {self._path}",
            )
        return tuple(codes), tuple(tokens)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key that came twice")
    return made


def _distinct(values: Any, kind: type[object]) -> TypeGuard[list[Any]]:
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        return False
    return len(set(values)) == len(values)


def _texts(
    folder: Path, config: Mapping[str, Any], *, accept_prompt: bool
) -> tuple[str, str | None, str | None]:
    """Return the narrow text, the wide one, and the hash of a text that was consented to."""
    wide: Any = config.get("wide_system_prompt")
    if wide is None:
        narrow = _read_system(folder, is_wide=config["task"] == _TASKS[1])
        checks = [(narrow, NARROW_SHA256, str(folder / SYSTEM_FILE))]
    else:
        where = f"wide_system_prompt in {folder / CONTRACT_FILE}"
        _is_trained(wide, WIDE_SHA256, where, accept_prompt=accept_prompt)
        narrow = wide.replace("short", "one-letter")
        checks = [
            (narrow, NARROW_SHA256, f"the narrow form of {where}"),
            (wide, WIDE_SHA256, where),
        ]
    other = [
        sha256_of(text)
        for text, expected, place in checks
        if not _is_trained(text, expected, place, accept_prompt=accept_prompt)
    ]
    return narrow, wide, other[0] if other else None


def _read_system(folder: Path, *, is_wide: bool) -> str:
    path = folder / SYSTEM_FILE
    try:
        # Read as bytes: universal newlines would change the text under its hash.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        restore = (
            f"restore wide_system_prompt in {folder / CONTRACT_FILE} (sha256 {WIDE_SHA256}); or, "
            f"for up to {NARROW_CHOICES} choices, "
        )
        raise CheckpointError(
            f"a checkpoint with {CONTRACT_FILE} must bring its system text, got none in {folder}",
            hint=f"{restore if is_wide else ''}put the text it was trained with into {path}, as "
            f"UTF-8 without a line break at its end (sha256 {NARROW_SHA256})",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{SYSTEM_FILE} must be readable UTF-8, got: {error}", hint=f"restore {path}"
        ) from error


def _is_trained(text: Any, expected: str, where: str, *, accept_prompt: bool) -> bool:
    if not isinstance(text, str):
        raise CheckpointError(
            f"the system text must be a text, got {shown(text)} ({where})",
            hint=f"restore it from the release: its sha256 is {expected}",
        )
    if not text.strip():
        raise CheckpointError(
            f"the system text must not be blank ({where})",
            hint=f"restore it from the release: its sha256 is {expected}",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"the system text must be valid Unicode, got a lone surrogate ({where})",
            hint=f"restore it from the release: its sha256 is {expected}",
        ) from error
    actual = sha256_of(text)
    if actual == expected:
        return True
    if accept_prompt:
        return False
    ends = sha256_of(text.rstrip("\r\n")) == expected
    copied = (
        "remove the line break at its end"
        if ends
        else "copy the text of the checkpoint's own release, without a line break at its end"
    )
    raise CheckpointError(
        f"the system text must have sha256 {expected}, got {actual} ({where})",
        hint=f"{copied}; or consent to another text than the trained one with --accept-prompt, "
        "and the run records its hash",
    )
