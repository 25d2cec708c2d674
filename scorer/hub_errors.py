"""What a hub answers when it does not give a checkpoint, in our words and with what helps.

Nothing of a request is quoted: its headers hold a token, and its address may hold a password.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.hub_cache import HubId

_LOGIN = "hf auth login (or set HF_TOKEN)"


def hub_host() -> str:
    """Name the hub by its host alone."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).hostname or "the hub"


def hub_page(repo: str) -> str:
    """Return the address of a repository's page, without a name or password."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{repo}"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a hub gave no answer that is about what was asked.

    Attributes:
        reason: Such as `huggingface.co answers HTTP 503`.
        later: Whether it may answer in a while, with nothing changed here.
    """

    reason: str
    later: bool


def unanswered(error: Exception) -> Unanswered:
    """Tell a hub that has trouble of its own from one that cannot be reached."""
    host, status = hub_host(), _status(error)
    if status is not None:
        return Unanswered(f"{host} answers HTTP {status}", later=True)
    # To connect takes long also where there is no network, to answer only where there is one.
    if any(kind.__name__ in {"ReadTimeout", "WriteTimeout"} for kind in type(error).__mro__):
        return Unanswered(f"{host} did not answer in time", later=True)
    return Unanswered(f"{host} cannot be reached", later=False)


def _status(error: Exception) -> int | None:
    """Return the status of an answer that is an error, None when none came."""
    return getattr(getattr(error, "response", None), "status_code", None)


def refusal(error: Exception, hub_id: HubId) -> CheckpointError | None:
    """Translate what the hub answered; None when it did not, and the cache may help."""
    from huggingface_hub import errors

    host = hub_host()
    page = hub_page(hub_id.repo)
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{hub_id.repo} on {host} must be granted to your account first: it is gated",
            hint=f"accept its terms at {page}, then: {_LOGIN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{hub_id.repo} on {host} must have the revision that is named, it has no "
            f"{hub_id.revision}",
            hint=f"look up its branches and commits at {page}, or leave @{hub_id.revision} out",
        )
    status = _status(error)
    # Hubs that only look like the first one leave the code out that says what is not found.
    bare = status == 404 and not isinstance(error, errors.EntryNotFoundError)
    if bare or isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{hub_id.repo} must be a folder here or a repository on {host} that you may read, "
            "got neither",
            hint=f"check the spelling; if it is private: {_LOGIN}",
        )
    disabled = isinstance(error, errors.DisabledRepoError)
    return _refused_status(403 if disabled else status, hub_id)


def _refused_status(status: int | None, hub_id: HubId) -> CheckpointError | None:
    if status is None or status >= 500:
        return None
    host, said = hub_host(), f"(HTTP {status})"
    if status in {401, 403}:
        return CheckpointError(
            f"{host} must give access to {hub_id.repo}, it refused {said}",
            hint="check HF_TOKEN, or: hf auth login",
        )
    if status == 429:
        return CheckpointError(
            f"{host} must answer, it has had too many requests {said}",
            hint="try again in some minutes; with a token the limit is higher: hf auth login",
        )
    return CheckpointError(
        f"{host} must know {hub_id}, it answered otherwise {said}",
        hint="check HF_ENDPOINT and the id",
    )


def broken_off(error: Exception, hub_id: HubId, cache: Path) -> CheckpointError:
    """Describe a download that did not come to its end."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    numbers = {cause.errno for cause in causes if isinstance(cause, OSError)}
    if numbers & {errno.ENOSPC, errno.EDQUOT}:
        return disk_full(hub_id, cache, "more than is free")
    if numbers & {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}:
        return unwritable(cache)
    return CheckpointError(
        f"the download of {hub_id.repo} from {hub_host()} must come to its end, it broke off "
        f"({type(error).__name__})",
        hint="run the same command again: files that are whole are kept",
    )


def unwritable(cache: Path) -> CheckpointError:
    """Describe a cache that nothing can be fetched into."""
    return CheckpointError(
        f"the cache of the hub must be a folder that you may write to, got {cache}",
        hint="check its owner, or name another folder with HF_HUB_CACHE",
    )


def disk_full(hub_id: HubId, cache: Path, needs: str) -> CheckpointError:
    """Describe a disk that cannot take a checkpoint."""
    return CheckpointError(
        f"the disk must have room for {hub_id.repo}, which needs {needs} in {cache}",
        hint="free some, such as with: hf cache rm; or name another disk with HF_HUB_CACHE",
    )
