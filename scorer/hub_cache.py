"""The names of repositories, and what the cache of the hub holds of them.

`huggingface_hub` decides where the cache is.
"""

import json
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weighbridge.scorer.weight_files import INDEX_FILE, TOKENIZER_FILES

FETCHED = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    "model*.safetensors",
    INDEX_FILE,
    "schema_config.json",
    "system_prompt.txt",
    "READY.json",
    "adapter_config.json",
    "adapters.safetensors",
    "adapter_model.safetensors",
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
    left_out = any(fnmatchcase(name, pattern) for pattern in NOT_FETCHED)
    return not left_out and any(fnmatchcase(name, pattern) for pattern in FETCHED)


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


def missing_files(repo: str, commit: str) -> list[str]:
    """Name what a commit in the cache lacks, also where others fetched single files of it."""
    from huggingface_hub import get_cached_repo_tree

    folder = snapshot(repo, commit)
    expected: set[str] = set()
    with suppress(Exception):  # only what was fetched as a whole has a list of its files
        tree = get_cached_repo_tree(repo, revision=commit)
        expected = {file.path for file in tree if is_fetched(file.path)}
    if not (folder / "adapter_config.json").exists():
        expected.add("config.json")
    with suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        index: Any = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        expected |= set(index["weight_map"].values())
    weights = any(name.endswith(".safetensors") for name in expected)
    if not weights and not any(file.exists() for file in folder.glob("*.safetensors")):
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
    with suppress(OSError):  # a cache that others fill is read only
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(commit)
        Path(file.name).replace(path)


def remembered_commit(repo: str, revision: str | None) -> str | None:
    """Return the commit that a branch was when it was last fetched, None if it never was."""
    try:
        commit = _ref(repo, revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


def _ref(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants

    return storage(repo) / "refs" / (revision or constants.DEFAULT_REVISION)
