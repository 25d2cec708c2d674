"""Whether a folder is a checkpoint that can score, told before a byte of weights is loaded.

Most folders of models are none: another format, half a download, an adapter without its
base, a model that only sees. Each is refused with what helps.
"""

import errno
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weighbridge.scorer.architectures import unsupported_architecture
from weighbridge.scorer.config_file import read_config
from weighbridge.scorer.errors import CheckpointError, listed, quoted
from weighbridge.scorer.foreign_formats import foreign_format
from weighbridge.scorer.missing_folder import missing_folder
from weighbridge.scorer.tokenizer_files import check_tokenizer
from weighbridge.scorer.weight_files import (
    ADAPTER_FILES,
    INDEX_FILE,
    is_draft,
    is_vision,
    safetensors_header,
    unreadable,
    weight_files,
)

_FLOATS = {"F64", "F32", "F16", "BF16"}
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


def check_folder(folder: Path) -> None:
    """Refuse what is no whole checkpoint of a language model.

    Reads names, small files and the headers of weights. Says nothing about an adapter that
    lies beside weights.

    Args:
        folder: As it was named; need not exist.

    Raises:
        CheckpointError: With the reason, and what to do about it.
    """
    names = _entries(folder)
    if not names:
        raise CheckpointError(
            f"a checkpoint must be a folder with files, got an empty one: {folder}",
            hint="copy or fetch the files of the checkpoint into it",
        )
    _refuse_hub_cache(folder, names)
    if "config.json" not in names or "model_index.json" in names:
        raise _no_config(folder, names)
    weights = _weights(folder, names)
    _check_architecture(folder, read_config(folder), names)
    tensors = {path.name: _tensors(path) for path in weights}
    _check_shards(folder, tensors)
    _check_tensors(folder, tensors)
    check_tokenizer(folder)


def _entries(folder: Path) -> set[str]:
    """Name what lies in a folder."""
    named = quoted(str(folder), limit=300)
    try:
        return {entry.name for entry in folder.iterdir()}
    except FileNotFoundError as error:
        if folder.is_symlink():
            raise CheckpointError(
                f"a checkpoint must be an existing folder, {named} is a link to "
                f"{folder.readlink()}, where nothing is",
                hint="restore what it points to, or name the folder itself",
            ) from error
        raise missing_folder(folder) from error
    except NotADirectoryError as error:
        raise _a_file(folder, named) from error
    except PermissionError as error:
        raise CheckpointError(
            f"a checkpoint must be a folder that you may read, got no permission for {named}",
            hint=f"give yourself the right to: chmod u+rx {folder}",
        ) from error
    except (OSError, ValueError) as error:  # a name that no path can have
        if getattr(error, "errno", None) == errno.ELOOP:
            raise CheckpointError(
                f"a checkpoint must be an existing folder, {named} is a link that leads back to "
                "itself",
                hint="name the folder itself",
            ) from error
        raise missing_folder(folder) from error


def _a_file(path: Path, named: str) -> CheckpointError:
    found = foreign_format([path.name])
    if path.suffix == ".safetensors" or path.name in {"config.json", "READY.json"}:
        what, hint = "a file", f"name its folder: {path.parent}"
    elif found is not None:
        what, hint = f"a file: {found.what}", found.remedy
    else:
        what, hint = "a file", "name the folder that holds config.json and the weights"
    return CheckpointError(f"a checkpoint must be an existing folder, {named} is {what}", hint=hint)


def _refuse_hub_cache(folder: Path, names: set[str]) -> None:
    """Point from the cache of the hub to what lies in it."""
    if "config.json" in names:
        return
    if "snapshots" in names and names & {"refs", "blobs"}:
        commits = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
        try:
            main = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        except (OSError, ValueError):
            main = None
        chosen = main if main in commits else commits[0] if commits else None
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        raise CheckpointError(
            f"a checkpoint must hold config.json, got the hub's cache of {quoted(repo)}, whose "
            f"{len(commits)} snapshots hold it",
            hint=f"name {repo} instead" + (f", or the snapshot {chosen}" if chosen else ""),
        )
    cached = sorted(name for name in names if name.startswith("models--"))
    if cached:
        repos = [name.removeprefix("models--").replace("--", "/", 1) for name in cached]
        raise CheckpointError(
            f"a checkpoint must hold config.json, got the cache of the hub in {folder}",
            hint=f"name one of its repositories: {listed(repos)}",
        )


def _no_config(folder: Path, names: set[str]) -> CheckpointError:
    """Say what a folder without config.json is."""
    if _has_adapter(names):
        return adapter_alone(folder)
    below = sorted(path.parent.name for path in folder.glob("*/config.json"))
    found = foreign_format(names)
    what = found.what if found else "none"
    hint = found.remedy if found else "name the folder that holds config.json and the weights"
    if below and (found is None or "model_index.json" not in names):
        hint = f"did you mean {folder / below[0]}?"
    if any(name.startswith("model") and name.endswith(".safetensors") for name in names):
        what, hint = "weights alone", "fetch config.json and the tokenizer of the same release too"
    return CheckpointError(f"a checkpoint must hold config.json, got {what} in {folder}", hint=hint)


def _has_adapter(names: set[str]) -> bool:
    return not names.isdisjoint({"adapter_config.json", *ADAPTER_FILES})


def adapter_alone(folder: Path) -> CheckpointError:
    """Describe an adapter that was given as a checkpoint, and the command that helps."""
    try:
        config: Any = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path") or config.get("model")
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    said, named = "", "the model that it was trained on"
    if isinstance(base, str):
        said = f", made for {quoted(base, limit=200)}"
        named = shlex.quote(base) if base.isprintable() else named
    return CheckpointError(
        f"a checkpoint must hold a whole model, got an adapter alone in {folder}{said}",
        # Some commands take the checkpoint as an argument, others as --checkpoint.
        hint=f"name {named} as the checkpoint, and add --adapter {shlex.quote(str(folder))}",
    )


def _weights(folder: Path, names: set[str]) -> list[Path]:
    if _has_adapter(names) and not any(folder.glob("model*.safetensors")):
        raise adapter_alone(folder)
    try:
        return weight_files(folder)
    except CheckpointError as error:
        # An index says better what is missing than that nothing is there.
        named = _index(folder)
        if named:
            raise _missing_shards(folder, sorted(set(named.values())), []) from error
        raise


def _check_architecture(folder: Path, config: dict[str, Any], names: set[str]) -> None:
    hint = "weighbridge needs a chat model: docs/architectures.md lists those that were tried"
    reason = unsupported_architecture(config)
    if reason is None and ("config_sentence_transformers.json" in names or "1_Pooling" in names):
        reason = (
            "a checkpoint must be a language model that writes the next token, got an embedding "
            f"model (sentence-transformers) in {folder}"
        )
    if reason is not None:
        raise CheckpointError(reason, hint=hint)


def _index(folder: Path) -> dict[str, str]:
    """Read which file holds which tensor, {} without an index.

    Raises:
        CheckpointError: The index is not what it must be.
    """
    path = folder / INDEX_FILE
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
        files = {str(name): Path(file).name for name, file in index["weight_map"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{INDEX_FILE} must be a JSON object with a weight_map, got another file",
            hint=f"fetch {path} again",
        ) from error
    return files


def _tensors(path: Path) -> dict[str, str]:
    """Read the types of the tensors in a file, by name."""
    header = safetensors_header(path)
    return {name: tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"}


def _check_shards(folder: Path, tensors: Mapping[str, Mapping[str, str]]) -> None:
    """Compare the weights that are there with those that the index or their names tell of."""
    holders: dict[str, str] = {}
    for file, names in tensors.items():
        for name in names:
            if name in holders:
                # mlx-lm loads all files, and the last one in no fixed order wins.
                raise CheckpointError(
                    f"a tensor must be in one file, got {quoted(name)} in {holders[name]} and "
                    f"in {file}",
                    hint=f"keep the weights of one model only in {folder}",
                )
            holders[name] = file
    there = set(tensors)
    named = _index(folder)
    if not named:
        _check_numbers(folder, there)
        return
    absent = sorted(set(named.values()) - there)
    lost = sorted(name for name in named if name not in holders)
    if absent and lost:
        raise _missing_shards(folder, absent, sorted(there))
    if absent:
        return  # left over from before a conversion: whatever it lists is in other files
    if lost:
        raise CheckpointError(
            f"{INDEX_FILE} must tell what the weights hold, they lack {listed(lost)}",
            hint=f"fetch {INDEX_FILE} and the weights again, from one release",
        )
    if unlisted := sorted(there - set(named.values())):
        raise CheckpointError(
            f"{INDEX_FILE} must list every weight file, got {listed(unlisted)} beside them",
            hint=f"move away what is not of this model; all model*.safetensors in {folder} would "
            "be loaded together",
        )


def _check_numbers(folder: Path, there: set[str]) -> None:
    for name in sorted(there):
        if found := _NUMBERED.fullmatch(name):
            start, _, total = found.groups()
            every = [
                f"{start}{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)
            ]
            if absent := [name for name in every if name not in there]:
                raise _missing_shards(folder, absent, sorted(there))


def _missing_shards(folder: Path, absent: Sequence[str], there: Sequence[str]) -> CheckpointError:
    alone = f"; or remove {INDEX_FILE}, if model.safetensors is the whole model"
    return CheckpointError(
        f"a checkpoint must be whole, {folder} lacks {len(absent)} of "
        f"{len(absent) + len(there)} weight files: {listed(absent)}",
        hint="fetch them too; an interrupted download goes on with the command that began it"
        + (alone if list(there) == ["model.safetensors"] else ""),
    )


def _check_tensors(folder: Path, tensors: Mapping[str, Mapping[str, str]]) -> None:
    dtypes = {name: dtype for names in tensors.values() for name, dtype in names.items()}
    language = {n: dtype for n, dtype in dtypes.items() if not is_vision(n) and not is_draft(n)}
    if dtypes and not language:
        raise CheckpointError(
            f"a checkpoint must hold the weights of a language model, those in {folder} only see "
            "or hear",
            hint="name the folder of the whole model",
        )
    if not _FLOATS & set(language.values()):
        types = sorted(set(language.values()))
        found = ", ".join(quoted(dtype)[1:-1] for dtype in types[:10]) or "no tensors"
        raise CheckpointError(
            f"weights must have float tensors (F32, F16 or BF16), got {found} in {folder}",
            hint="fetch the weights again",
        )
