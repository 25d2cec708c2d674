"""The names of repositories, and what the cache of the hub holds of them.

`huggingface_hub` decides where the cache is.
"""

import json
import os
import re
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from logging import CRITICAL
from pathlib import Path
from secrets import token_hex
from typing import Any

from weighbridge.scorer.adapters import CONTRACT_FILES
from weighbridge.scorer.config_file import CONFIG_FILE, QUANTIZATION_FILE
from weighbridge.scorer.weight_files import (
    ADAPTER_WEIGHTS,
    INDEX_FILE,
    TOKENIZER_FILES,
    VOCABULARY_FILES,
)

FETCHED = (
    CONFIG_FILE,
    "generation_config.json",
    QUANTIZATION_FILE,
    *dict.fromkeys(TOKENIZER_FILES),
    "*.jinja",
    "model*.safetensors",
    INDEX_FILE,
    *CONTRACT_FILES,
    "READY.json",
    "adapter_config.json",
    *ADAPTER_WEIGHTS,
)
"""What is fetched of a repository, by patterns for names at its top."""
NOT_FETCHED = (
    "*/*",
    # Second copies of the same weights, which mlx-lm would load into the first.
    *(f"model.{variant}*.safetensors" for variant in ("bf16", "fp16", "fp32", "fp8", "int8")),
)
"""What is left out of it all the same."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the hub, and which of its commits is meant.

    Attributes:
        repo: `org/name`.
        revision: A branch, a tag or a commit; None means the default branch.
    """

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        """Write it as people name it."""
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def is_commit(revision: str | None) -> bool:
    """Say whether a revision is a whole commit hash, which never means other files."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def is_fetched(name: str) -> bool:
    """Say whether a file of a repository is one that is fetched: no code, no pickles."""
    return _any_fits([name], FETCHED) and not _any_fits([name], NOT_FETCHED)


def cache_folder() -> Path:
    """Return the cache that all repositories share."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def storage(repo: str) -> Path:
    """Return the folder of one repository in the cache."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def snapshot(repo: str, commit: str) -> Path:
    """Return the folder of one commit, whether it is there or not."""
    return storage(repo) / "snapshots" / commit


def cached_commits(repo: str) -> list[str]:
    """Name the commits that the cache has something of."""
    return sorted(path.name for path in (storage(repo) / "snapshots").glob("*"))


def is_whole(repo: str, commit: str) -> bool:
    """Say whether the cache is known to hold all that is fetched of a commit.

    Other programs fetch single files: without the list of all files, nothing tells that
    a prompt contract or a temperature is not missing.
    """
    return listed_files(repo, commit) is not None and not missing_files(repo, commit)


def listed_files(repo: str, commit: str) -> set[str] | None:
    """Return what is fetched of a commit by the list in the cache, None without a list."""
    from huggingface_hub import get_cached_repo_tree

    with suppress(Exception), quietly():  # there is none, or it is damaged
        tree = get_cached_repo_tree(repo, revision=commit)
        return {file.path for file in tree if is_fetched(file.path)}
    return None


def missing_files(repo: str, commit: str) -> list[str]:
    """Name what a commit in the cache lacks for sure.

    Where no list of its files is kept, that is what no checkpoint can do without.
    """
    folder = snapshot(repo, commit)
    there = {path.name for path in folder.glob("*") if is_fetched(path.name)}
    expected = there | (listed_files(repo, commit) or set())
    if "adapter_config.json" not in expected:
        expected.add(CONFIG_FILE)
        if not _any_fits(expected, VOCABULARY_FILES):
            expected.add("tokenizer.json")
    with suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        index: Any = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        expected |= set(index["weight_map"].values())
    if not any(name.endswith(".safetensors") for name in expected):
        expected.add("model.safetensors")
    # A link into blobs that were removed does not exist either.
    return sorted(name for name in expected if not (folder / name).exists())


def remember_commit(repo: str, revision: str | None, commit: str) -> None:
    """Keep which commit a branch is, where the library looks it up too.

    Called once the commit is whole: so an update that broke off leaves the commit before it
    for work without a connection.
    """
    if revision == commit:
        return
    path = _ref(repo, revision)
    partial = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    with suppress(OSError):  # a cache that others fill is read only
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Readable for whom the cache is: a temporary file would be the owner's alone.
            partial.write_text(commit, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def remembered_commit(repo: str, revision: str | None) -> str | None:
    """Return the commit that a branch was when it was last fetched, None if it never was."""
    try:
        commit = _ref(repo, revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


def _any_fits(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _ref(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants

    return storage(repo) / "refs" / (revision or constants.DEFAULT_REVISION)


@contextmanager
def quietly() -> Generator[None]:
    """Keep the library's own lines and bars off standard error, unless the user set otherwise.

    Its lines hold addresses, which may hold a password; its bars are for terminals.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    bars = "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ or sys.stderr.isatty()
    quiet = not bars and not are_progress_bars_disabled()
    level = logging.get_verbosity()
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity(CRITICAL)
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if quiet:
            enable_progress_bars()
