"""Which checkpoint and adapter a name or a setting means. A leaf: knows no Prefect."""

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weighbridge.scorer.embedded import embedded_path
from weighbridge.scorer.errors import CheckpointError, quoted
from weighbridge.scorer.hub import HubFolder, parse_hub_id, resolve_hub_id
from weighbridge.scorer.hub_cache import HubId
from weighbridge.scorer.missing_folder import closest_folder, missing_folder
from weighbridge.tasks.settings import Settings

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Named:
    """The files that a name means at the moment.

    Attributes:
        folder: Where they are.
        name: A name that means the same files tomorrow and from another working folder: the
            absolute path, or `org/name@commit`.
        model_id: From the caller, else the hub id.
        revision: From the caller, else the commit of the hub id.
    """

    folder: Path
    name: str
    model_id: str | None = None
    revision: str | None = None


def resolve_checkpoint(
    checkpoint: str | None,
    settings: Settings,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    say: Say = logger.info,
) -> Named:
    """Find a checkpoint: as named, as set, else the embedded one. May fetch a hub id.

    Args:
        checkpoint: A folder, or a hub id as `org/name` or `org/name@revision`; None takes
            the setting.
        settings: Of this process.
        model_id: What the caller says of the weights.
        revision: Likewise; for a hub id it is the revision to fetch.
        say: Told in a sentence what is fetched.

    Raises:
        CheckpointError: There is no such folder, it cannot be fetched, the revision of a hub id
            cannot be one, or none is named and the embedded one is not built yet.
    """
    named = checkpoint or settings.checkpoint
    if not named:
        embedded = embedded_path(settings.cache)
        if embedded is None:
            raise CheckpointError(
                "a checkpoint must be named or the embedded one built, got neither",
                hint="build it once with: weighbridge checkpoint demo",
            )
        return Named(embedded, str(embedded.absolute()), model_id, revision)
    hub_id = _hub_id(named)
    if hub_id is None:
        return _folder(named, model_id, revision)
    # Of another model than the one on the hub, such as a copy's origin, it tells nothing about
    # what to fetch.
    own = model_id in (None, hub_id.repo)
    if own and revision is not None:
        at = _at(hub_id, revision)
        if hub_id.revision not in (None, at.revision):
            raise CheckpointError(
                f"a checkpoint must have one revision, got {hub_id.revision!r:.80} in its name "
                f"and {revision!r:.80} beside it",
                hint="leave one of them out",
            )
        hub_id = at
    found = _from_hub(hub_id, say)
    return Named(
        found.folder,
        f"{found.repo}@{found.commit}",
        model_id or found.repo,
        found.commit if own else revision,
    )


def resolve_adapter(
    adapter: str | None, checkpoint: str | None, settings: Settings, *, say: Say = logger.info
) -> Named | None:
    """Find the adapter of a checkpoint. May fetch a hub id.

    The setting is that of the checkpoint in the settings: one that is named brings no
    adapter but the one that is named with it.

    Args:
        adapter: A folder or a hub id; None takes the setting where `checkpoint` does.
        checkpoint: What is named beside it.
        settings: Of this process.
        say: Told in a sentence what is fetched.

    Raises:
        CheckpointError: There is no such folder, or it cannot be fetched.
    """
    named = adapter or (None if checkpoint else settings.adapter)
    if not named:
        return None
    hub_id = _hub_id(named)
    if hub_id is None:
        return _folder(named, what="an adapter")
    # Alone it is no checkpoint, so the command that fetches it names its base as well.
    base = shlex.quote(checkpoint or settings.checkpoint or "BASE")
    fetch = f"weighbridge checkpoint info {base} --adapter"
    found = _from_hub(hub_id, say, fetch)
    return Named(found.folder, f"{found.repo}@{found.commit}")


def on_hub(named: str) -> bool:
    """Whether a name is a hub id: it looks like one, and neither it nor its first part is here."""
    return _hub_id(named) is not None


def hash_cache(settings: Settings) -> Path:
    """Return the file that keeps hashes of weight files."""
    return settings.cache / "hashes.json"


def _hub_id(named: str) -> HubId | None:
    """Return the hub id that a name is, None for a path.

    What is there is a path, and so is `models/chatt` where a folder `models` is: a path that
    was mistyped must be told, not asked of a hub. A revision behind it makes it a hub id, as
    recorded names are, whatever lies in the working folder.
    """
    try:
        if _path(named).exists():
            return None
        hub_id = parse_hub_id(named)
        begun = Path(named.partition("/")[0]).is_dir()
    except (OSError, ValueError):  # a name that no path can have
        return None
    return None if hub_id and begun and hub_id.revision is None else hub_id


def _from_hub(hub_id: HubId, say: Say, fetch: str = "weighbridge checkpoint info") -> HubFolder:
    """Fetch a hub id; where that fails, a path may have been meant."""
    try:
        return resolve_hub_id(hub_id, say=say, fetch=fetch)
    except CheckpointError as error:
        close = closest_folder(Path(hub_id.repo))
        if close is None:
            raise
        meant = f"did you mean {close}? if not: {error.hint}"
        # As in the library's own errors, what lies below may hold a password.
        raise CheckpointError(error.message, hint=meant) from None


def _at(hub_id: HubId, revision: str) -> HubId:
    """Name a revision of a repository; what it must not hold is asked of no hub."""
    found = parse_hub_id(f"{hub_id.repo}@{revision}")
    if found is None:
        raise CheckpointError(
            f"the revision of {hub_id.repo} must be a branch, a tag or a commit, got "
            f"{quoted(revision)}",
            hint="leave it out to take the default branch",
        )
    return found


def _folder(
    named: str,
    model_id: str | None = None,
    revision: str | None = None,
    *,
    what: str = "a checkpoint",
) -> Named:
    path = _path(named)
    try:
        # What else may be wrong with it is said by whoever reads it.
        there = path.exists() or path.is_symlink()
    except PermissionError:
        there = True
    except (OSError, ValueError):  # a name that no path can have
        there = False
    if not there:
        raise missing_folder(path if named.startswith("~") else named, what=what)
    return Named(path, str(path.absolute()), model_id, revision)


def _path(named: str) -> Path:
    try:
        return Path(named).expanduser()
    except RuntimeError:  # `~name` of nobody here, which is refused as no folder
        return Path(named)
