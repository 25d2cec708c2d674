"""What a person should know of a READY.json: keys that look as if they meant something."""

from difflib import get_close_matches

from weighbridge.scorer.errors import listed, quoted
from weighbridge.scorer.ready import READY_FILE, ReadyFile

# What people write, and what is read.
_MEANT = {
    "adapter": "adapter_sha256",
    "adapter_hash": "adapter_sha256",
    "base": "base_model",
    "base_model_name_or_path": "base_model",
    "commit": "revision",
    "hub_id": "model",
    "model_id": "model",
    "model_name": "model",
    "model_revision": "revision",
    "name": "model",
    "repo": "model",
    "repo_id": "model",
    "sha256": "weight_sha256",
    "temperature": "weighbridge.temperature",
    "weights": "weight_sha256",
}
_READ = (
    *("adapter_sha256", "base_model", "base_revision", "model", "prompt_sha256", "revision"),
    *("weighbridge", "weight_sha256"),
)
# Of releases and of training programs: they tell people, and nothing here asks for them.
_FOR_PEOPLE = frozenset({"created_at", "dtype", "license", "notes", "schema_version", "status"})


def ready_notes(ready: ReadyFile) -> tuple[str, ...]:
    """Name the keys of READY.json that are not read, with those that may be meant.

    Args:
        ready: What was read.

    Returns:
        Sentences, none where every key is read.
    """
    notes: list[str] = []
    others: list[str] = []
    for key in ready.unknown:
        folded = key[:200].strip().lower().replace("-", "_")
        close = get_close_matches(folded, _READ, n=1, cutoff=0.85)
        meant = _MEANT.get(folded) or (close[0] if close else None)
        if meant is not None:
            notes.append(
                f"{READY_FILE}: {quoted(key)} is not a key that is read; did you mean "
                f"{quoted(meant)}?"
            )
        elif folded not in _FOR_PEOPLE:
            others.append(key)
    if others:
        one = len(others) == 1
        notes.append(
            f"{READY_FILE}: {listed(others)} {'is not a key' if one else 'are not keys'} that "
            f"{'is' if one else 'are'} read"
        )
    return tuple(notes)
