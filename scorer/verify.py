"""Whether the files of a checkpoint are those that it says it is made of.

READY.json lists hashes of the weights, of the adapter that was merged into them and of the
system text; the embedded checkpoint has a manifest of its own. Neither is signed: this
finds damage and mix-ups, not forgery.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from weighbridge.scorer.adapters import WEIGHT_FILES, Adapter
from weighbridge.scorer.contract import (
    CONTRACT_FILE,
    NARROW_SHA256,
    SYSTEM_FILE,
    WIDE_SHA256,
    Contract,
    read_contract,
    read_contract_file,
    sha256_of,
)
from weighbridge.scorer.embedded import FILES, MANIFEST, embedded_hashes
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.hashes import hash_files
from weighbridge.scorer.ready import READY_FILE, ReadyFile, read_ready
from weighbridge.scorer.temperature import release_of
from weighbridge.scorer.weight_files import weight_files

State = Literal["same", "differs", "missing", "unlisted", "unchecked"]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A file or text, and what its hash should be.

    Attributes:
        file: Its name in the folder; for an adapter elsewhere its path.
        expected: The sha256 that is written down, None where none is.
        found: The sha256 of what is there, None where nothing is or nothing was hashed.
        state: `same`, `differs`, `missing`; `unlisted` for weights that nothing tells of;
            `unchecked` where what the hash is of is not here.
        note: Who says what is expected, or why there is nothing to compare.
    """

    file: str
    expected: str | None
    found: str | None
    state: State
    note: str

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the file."""
        return self.state in {"same", "unchecked"}


def verify_checkpoint(
    folder: Path, adapter: Adapter | None = None, *, hash_cache: Path | None = None
) -> tuple[FileCheck, ...]:
    """Compare the files of a checkpoint with the hashes that are written beside them.

    Args:
        folder: A checkpoint folder.
        adapter: An adapter that is to be fused into it; by default one that lies there.
        hash_cache: A file that keeps hashes of files by size and time of change. All files
            are read again whatever it says, and it learns what was found.

    Returns:
        A check for each hash and each weight file, none where nothing is written down.

    Raises:
        CheckpointError: A file cannot be read, or the prompt contract or the manifest is
            damaged.
        TemperatureError: READY.json cannot be trusted.
    """
    ready = read_ready(folder)
    checks = [
        *_embedded(folder, hash_cache),
        *_weights(folder, ready.weight_sha256, hash_cache),
        *_adapter(folder, ready, adapter, hash_cache),
        *_prompt(folder, ready),
    ]
    if adapter is not None and adapter.folder != folder.resolve():
        # An adapter that was trained on a prompt of its own brings it along.
        checks += [
            replace(check, file=f"{check.file} ({adapter.folder})")
            for check in _prompt(adapter.folder, read_ready(adapter.folder))
        ]
    return tuple(checks)


def _embedded(folder: Path, hash_cache: Path | None) -> list[FileCheck]:
    written = embedded_hashes(folder)
    if not written:
        return []
    return _listed(folder, written, sorted(FILES - set(written)), MANIFEST, hash_cache)


def _weights(folder: Path, written: Mapping[str, str], hash_cache: Path | None) -> list[FileCheck]:
    if not written:
        return []
    try:
        there = [file.name for file in weight_files(folder)]
    except CheckpointError:  # none at all, or not all of them: the list tells which are missing
        there = [file.name for file in sorted(folder.glob("*.safetensors"))]
    unlisted = [name for name in there if name not in written]
    return _listed(folder, written, unlisted, READY_FILE, hash_cache)


def _listed(
    folder: Path,
    written: Mapping[str, str],
    unlisted: list[str],
    source: str,
    hash_cache: Path | None,
) -> list[FileCheck]:
    names = sorted(written)
    there = [name for name in names if _inside(name) and (folder / name).is_file()]
    files = [folder / name for name in there]
    hashes = dict(zip(there, hash_files(files, hash_cache, anew=True), strict=True))
    checks = [_compared(name, written[name], hashes.get(name), f"by {source}") for name in names]
    return checks + [
        FileCheck(name, None, None, "unlisted", f"{source} does not list it") for name in unlisted
    ]


def _inside(name: str) -> bool:
    """Whether a name stays in the folder: READY.json may come from anywhere."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _compared(name: str, expected: str, found: str | None, note: str) -> FileCheck:
    if found is None:
        return FileCheck(name, expected, None, "missing", f"listed {note}")
    state: State = "same" if found == expected else "differs"
    return FileCheck(name, expected, found, state, note)


def _adapter(
    folder: Path, ready: ReadyFile, adapter: Adapter | None, hash_cache: Path | None
) -> list[FileCheck]:
    lying = (folder / name for name in WEIGHT_FILES)
    file = adapter.weights if adapter else next(filter(Path.is_file, lying), None)
    expected, source = ready.adapter_sha256, READY_FILE
    if adapter is not None and (own := read_ready(adapter.folder).adapter_sha256):
        # What lies beside an adapter is about that adapter.
        expected, source = own, str(adapter.folder / READY_FILE)
    if file is None:
        if expected is None:
            return []
        note = "merged into the weights; its file is not here: name it with --adapter"
        return [FileCheck("adapter", expected, None, "unchecked", note)]
    name = file.name if file.parent == folder else str(file)
    (found,) = hash_files([file], hash_cache, anew=True)
    if expected is not None:
        note = f"by {source}"
        if found != expected and adapter is not None:
            note += ": not the adapter that it tells of"
        return [_compared(name, expected, found, note)]
    title = release_of(found)
    if title:
        return [FileCheck(name, found, found, "same", f"the adapter of {title}")]
    note = f"no {READY_FILE} says what it should be"
    return [FileCheck(name, None, found, "unchecked", note)]


def _prompt(folder: Path, ready: ReadyFile) -> list[FileCheck]:
    contract = read_contract(folder, accept_prompt=True)
    checks: list[FileCheck] = []
    texts: dict[str, str] = {}
    if contract is not None:
        trained = f"the text that {contract.task} was trained with"
        file = f"wide_system_prompt in {CONTRACT_FILE}" if contract.wide_system else SYSTEM_FILE
        text, expected = (
            (contract.wide_system, WIDE_SHA256)
            if contract.wide_system
            else (contract.narrow_system, NARROW_SHA256)
        )
        checks.append(_compared(file, expected, sha256_of(text), trained))
        texts = {
            file: sha256_of(text),
            f"{file}, up to 26 choices": sha256_of(contract.narrow_system),
        }
    if (folder / SYSTEM_FILE).is_file():
        (texts[SYSTEM_FILE],) = hash_files([folder / SYSTEM_FILE])
    if ready.prompt_sha256 is not None:
        checks.append(_ready_prompt(ready.prompt_sha256, texts))
    return checks + _prompt_code(folder, contract)


def _ready_prompt(expected: str, hashes: Mapping[str, str]) -> FileCheck:
    for name, found in hashes.items():
        if found == expected:
            return FileCheck("prompt_sha256", expected, found, "same", f"by {READY_FILE}: {name}")
    note = f"by {READY_FILE}"
    if not hashes:
        note += "; the folder holds no system text"
        return FileCheck("prompt_sha256", expected, None, "unchecked", note)
    return FileCheck("prompt_sha256", expected, next(iter(hashes.values())), "differs", note)


def _prompt_code(folder: Path, contract: Contract | None) -> list[FileCheck]:
    """List the hashes of the programs that made the training prompts."""
    if contract is None:
        return []
    config = read_contract_file(folder) or {}
    sources = config.get("prompt_source_sha256")
    written = dict(sources) if isinstance(sources, dict) else {}
    if "prompt_code_sha256" in config:
        written["prompt code"] = config["prompt_code_sha256"]
    note = f"by {CONTRACT_FILE}; the program that made the training prompts is not here"
    return [
        FileCheck(str(name), str(sha256), None, "unchecked", note)
        for name, sha256 in sorted(written.items())
    ]
