"""What helps when a name means no folder: a name that is close, or how a hub id is written.

People mistype paths, and paste addresses, which may hold a password or a token: of an address
nothing but its scheme and host is ever shown.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from weighbridge.scorer.errors import CheckpointError, quoted

_ADDRESS = re.compile(r"(?:^|/)(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)
_LOGIN = re.compile(r"(?:^|/)[^/\s:@]*:[^/\s@]*@")  # user:password@ without a scheme
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co")
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
_AS_ID = "name a model of a hub as org/name"
_LOOKED_AT = 1000  # folders beside the one that is missing


def missing_folder(named: str | Path, *, what: str = "a checkpoint") -> CheckpointError:
    """Describe a name that means no folder, with the closest one that is there.

    Args:
        named: As it was typed, or the path that became of it.
        what: Which kind of folder: `a checkpoint` or `an adapter`.
    """
    text = str(named)
    refused = f"{what} must be an existing folder, got"
    if found := _ADDRESS.search(text):
        return CheckpointError(f"{refused} {_without_secrets(found)}", hint=_for_address(found))
    if _LOGIN.search(text):
        return CheckpointError(f"{refused} an address with a login", hint=f"{_AS_ID}, or a path")
    shown = _QUERY.sub("?…", text) if "?" in text or "token=" in text else text
    return CheckpointError(f"{refused} {quoted(shown, limit=300)}", hint=_for_path(text))


def closest_folder(path: Path) -> Path | None:
    """Return the folder that is called nearly like a missing one, None where none is.

    Any parts of the path may be mistyped. Of a name alone, checkpoints one folder further down
    are candidates too.
    """
    try:
        found = _closest(path)
        if found is None and len(path.parts) == 1:
            below = {
                config.parent.name: config.parent
                for config in islice(sorted(Path().glob("[!.]*/*/*config.json")), _LOOKED_AT)
            }
            return next((below[name] for name in _alike(path.name, sorted(below))), None)
    except (OSError, ValueError):  # not to be read, or a name that no path can have
        return None
    return found


def _closest(path: Path) -> Path | None:
    here = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if (here / part).is_dir():
            here /= part
            continue
        close = _alike(part, sorted(_folders(here, hidden=part.startswith("."))))
        if not close:
            return None
        here /= close[0]
    return here


def _folders(parent: Path, *, hidden: bool) -> Iterator[str]:
    entries = (entry for entry in parent.iterdir() if hidden or not entry.name.startswith("."))
    return (entry.name for entry in islice(entries, _LOOKED_AT) if entry.is_dir())


def _alike(name: str, names: list[str]) -> list[str]:
    """Return the names that are close to one, the closest first; letter case counts least."""
    folded = {known.casefold(): known for known in names}
    return [folded[close] for close in get_close_matches(name[:255].casefold(), folded, n=3)]


def _without_secrets(found: re.Match[str]) -> str:
    first = re.split(r"[/?#]", found["rest"])[0]
    host = first.rpartition("@")[2]
    # A password may hold a slash: what stands before an @ is never a host.
    if ("@" in found["rest"] and "@" not in first) or not re.fullmatch(r"[\w.-]+(:\d+)?", host):
        host = "…"
    return f"an address ({quoted(found['scheme'] + '://' + host + '/…')})"


def _for_address(found: re.Match[str]) -> str:
    scheme = found["scheme"].lower()
    if scheme == "file":
        return "name the folder by its path, without file://"
    host, _, path = found["rest"].rpartition("@")[2].partition("/")
    path = path if host.lower() in _HUBS else found["rest"] if scheme in {"hf", "hub"} else ""
    if (repo := _ID.match(path)) and "@" not in found["rest"]:
        return f"name it as {repo[0].removesuffix('.git')}"
    return f"{_AS_ID}, without {scheme}://"


def _for_path(text: str) -> str:
    path = Path(text)
    if close := closest_folder(path):
        return f"did you mean {close}?"
    plain = re.sub(r"(\.git|@|/)+\Z", "", text)
    if plain != text and _ID.fullmatch(plain):
        return f"{_AS_ID}: {plain}"
    if _ID.match(text) and "?" in text:
        return f"{_AS_ID} alone"
    if _ID.fullmatch(text):
        return (
            f"check the path: the folder {path.parts[0]} is here, and does not hold it; if a "
            f"model of a hub is meant, name its branch too: {text}@main"
        )
    return _for_other(text)


def _for_other(text: str) -> str:
    if re.fullmatch(r"[\w.-]+:[\w.-]+", text):
        return f"{_AS_ID}; such names are those of Ollama, whose files are not read here"
    demo = "weighbridge checkpoint demo builds the embedded one"
    if re.fullmatch(r"[\w-][\w.-]{0,99}", text):
        return f"check the path, or {_AS_ID}; {demo}"
    return f"check the path; {demo}"
