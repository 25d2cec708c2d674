"""Checkpoints on a hub: an id becomes a folder of one pinned commit.

Only an id that a person names reaches the network, and a commit that is known to lie in
the cache whole needs none. Code (`*.py`) and pickles are never fetched. `huggingface_hub` keeps the
cache and reads HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge.scorer.errors import CheckpointError, listed
from weighbridge.scorer.foreign_formats import ForeignFormat, foreign_format
from weighbridge.scorer.hub_cache import (
    FETCHED,
    NOT_FETCHED,
    HubId,
    cache_folder,
    cached_commits,
    is_commit,
    is_fetched,
    is_whole,
    listed_files,
    missing_files,
    quietly,
    remember_commit,
    remembered_commit,
    snapshot,
    storage,
)
from weighbridge.scorer.hub_errors import (
    Unanswered,
    broken_off,
    disk_full,
    hub_host,
    refusal,
    unanswered,
    unwritable,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+/-]*")
_LONGEST_NAME = 96
_SECONDS_TO_ANSWER = 15.0


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A commit of a repository, in the cache.

    Attributes:
        folder: Its files.
        repo: `org/name`, as it was asked for.
        commit: All 40 hex digits.
    """

    folder: Path
    repo: str
    commit: str


def parse_hub_id(text: str) -> HubId | None:
    """Read `org/name` or `org/name@revision`; None for what cannot be one, such as a path."""
    repo, at, revision = text.partition("@")
    parts = repo.split("/")
    if len(parts) != 2 or len(repo) > _LONGEST_NAME or "--" in repo or ".." in text:
        return None
    if not all(_NAME.fullmatch(part) for part in parts) or repo.endswith(".git"):
        return None
    if at and not _REVISION.fullmatch(revision):
        return None
    # A commit is looked up as the hub writes it.
    return HubId(repo, (revision.lower() if is_commit(revision.lower()) else revision) or None)


def resolve_hub_id(
    hub_id: HubId, *, say: Callable[[str], None], fetch: str = "weighbridge checkpoint info"
) -> HubFolder:
    """Return the folder of one commit, and fetch what is missing of it.

    Args:
        hub_id: Which repository, and which revision of it.
        say: Told in a sentence what is fetched before it is, and which commit of the cache
            is taken when the hub cannot be asked.
        fetch: The command that fetches it once the id stands behind it, for hints.

    Raises:
        CheckpointError: The hub does not know or give it, the hub cannot be reached and the
            cache does not have it or perhaps a part only, it holds no safetensors, or the disk
            is full.
    """
    # Read once, when the library is first imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants

    repo, revision = hub_id.repo, hub_id.revision
    if revision is not None and is_commit(revision) and is_whole(repo, revision):
        return HubFolder(snapshot(repo, revision), repo, revision)
    if constants.is_offline_mode():
        # The library knows a second name for it.
        other = not os.environ.get("HF_HUB_OFFLINE") and os.environ.get("TRANSFORMERS_OFFLINE")
        given = "TRANSFORMERS_OFFLINE" if other else "HF_HUB_OFFLINE"
        bring = f"run once with a connection and without {given}: {fetch} {hub_id}"
        return _from_cache(hub_id, f"{given} is set", bring, say)
    info = _describe(hub_id)
    if isinstance(info, Unanswered):
        when = "try again later" if info.later else "run once with a connection"
        return _from_cache(hub_id, info.reason, f"{when}: {fetch} {hub_id}", say)
    commit = info.sha
    if commit is None or not is_commit(commit):
        raise CheckpointError(
            f"{hub_host()} must name a commit for {hub_id}, got none",
            hint="check HF_ENDPOINT: it must be the address of a hub",
        )
    _fetch(hub_id, info, commit, say)
    remember_commit(repo, revision, commit)
    return HubFolder(snapshot(repo, commit), repo, commit)


def _describe(hub_id: HubId) -> "ModelInfo | Unanswered":
    """Ask the hub for a revision's commit and files; return the reason when it cannot be asked."""
    from huggingface_hub import HfApi

    try:
        with quietly():
            return HfApi(library_name="weighbridge").model_info(
                hub_id.repo,
                revision=hub_id.revision,
                files_metadata=True,
                timeout=_SECONDS_TO_ANSWER,
            )
    except Exception as error:  # noqa: BLE001 - also those of the HTTP client beneath
        if refused := refusal(error, hub_id):
            # A traceback would quote the address that was asked, which may hold a password.
            raise refused from None
        return unanswered(error)


def _fetch(hub_id: HubId, info: "ModelInfo", commit: str, say: Callable[[str], None]) -> None:
    """Bring what is missing of a commit into the cache."""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = [name for name in sizes if is_fetched(name)]
    _require_safetensors(hub_id, sizes, wanted)
    folder = snapshot(hub_id.repo, commit)
    missing = [name for name in wanted if not (folder / name).exists()]
    if missing:
        cache = cache_folder()
        size = sum(sizes[name] for name in missing)
        _require_space(hub_id, cache, size)
        say(
            f"fetching {hub_id.repo} at commit {commit}: {_count(missing)}, "
            f"{_readable(size)}, from {hub_host()} into {cache}"
        )
        try:
            _download(hub_id.repo, commit)
        except Exception as error:  # noqa: BLE001 - as in `_describe`
            raise (refusal(error, hub_id) or broken_off(error, hub_id, cache)) from None
    elif listed_files(hub_id.repo, commit) is None:
        # All is there, and the list is kept for when nobody can be asked.
        with suppress(Exception):  # a cache that others fill is read only
            _download(hub_id.repo, commit)
    if lacking := missing_files(hub_id.repo, commit):
        raise CheckpointError(
            f"{hub_id.repo} at commit {commit} must be whole on {hub_host()}, it lacks "
            f"{listed(lacking)}",
            hint="name another revision, or tell its authors",
        )


def _download(repo: str, commit: str) -> None:
    """Fetch what is missing of a commit; the library keeps the list of its files too."""
    from huggingface_hub import snapshot_download

    with quietly():
        snapshot_download(
            repo,
            revision=commit,
            allow_patterns=list(FETCHED),
            ignore_patterns=list(NOT_FETCHED),
            library_name="weighbridge",
        )


def _require_safetensors(hub_id: HubId, names: Iterable[str], wanted: Iterable[str]) -> None:
    if any(name.endswith(".safetensors") for name in wanted):
        return
    found = foreign_format(names) or ForeignFormat(
        "no weights", "name the repository that holds the model itself"
    )
    raise CheckpointError(
        f"a checkpoint must hold model*.safetensors weights, {hub_id} on {hub_host()} holds "
        f"{found.what}",
        hint=found.remedy,
    )


def _require_space(hub_id: HubId, cache: Path, size: int) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    total, _, free = shutil.disk_usage(there)
    # Where there is no disk at all, such as below /proc, no room is free either.
    if not there.is_dir() or not os.access(there, os.W_OK) or total == 0:
        raise unwritable(cache)
    if size > free:
        needs = f"{_readable(size)} where {_readable(free)} are free"
        raise disk_full(hub_id, cache, needs)


def _count(files: Sequence[str]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def _from_cache(hub_id: HubId, reason: str, bring: str, say: Callable[[str], None]) -> HubFolder:
    """Take the commit that the cache holds for a revision, when the hub cannot be asked.

    Args:
        hub_id: Which repository, and which revision of it.
        reason: Why the hub cannot be asked.
        bring: How to get it from the hub all the same, for hints.
        say: Told which commit is taken.
    """
    repo, revision = hub_id.repo, hub_id.revision
    cache = cache_folder()
    commit = revision if is_commit(revision) else remembered_commit(repo, revision)
    bring += f"; or copy the folder {storage(repo).name} from the cache of another machine"
    others = [known for known in cached_commits(repo) if is_whole(repo, known)]
    if others:
        bring = f"name a commit that is there: {repo}@{others[0]}; or {bring}"
    if commit is None or not snapshot(repo, commit).is_dir():
        raise CheckpointError(
            f"{hub_id} must be a folder here or in the cache, as {reason}; got neither: there "
            f"is no folder of that name here, and the cache is {cache}",
            hint=bring,
        )
    folder = snapshot(repo, commit)
    if missing := missing_files(repo, commit):
        raise CheckpointError(
            f"{hub_id} must be whole in the cache, as {reason}; {folder} lacks {listed(missing)}",
            hint=bring,
        )
    if not is_whole(repo, commit):
        raise CheckpointError(
            f"{hub_id} must be known to be whole in the cache, as {reason}; another program "
            f"fetched files of it into {folder}, and no list tells whether these are all",
            hint=f"{bring}; or, if you know that nothing is missing, name the folder itself",
        )
    if commit != revision:
        say(
            f"{reason}: taking {repo} at commit {commit} from {cache}, as "
            f"{revision or 'its default branch'} was when it was last fetched"
        )
    return HubFolder(folder, repo, commit)
