"""Whether a package that this process has loaded was replaced on disk meanwhile.

A worker lives for weeks. After an upgrade its modules are a mixture: those that are
loaded are old, those that a function imports later are new. So it ends between runs, and
whatever keeps it running starts it anew.
"""

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("weighbridge", "mlx", "mlx-lm", "prefect")
"""What answers depend on, and what runs the flows."""

_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Installation:
    """How a package is installed.

    Attributes:
        version: Its version.
        written_at: When its metadata was written, in nanoseconds: installing the same
            version again, as from a checkout, changes it.
    """

    version: str
    written_at: int


def look(packages: Iterable[str] = PACKAGES) -> dict[str, Installation | None]:
    """Return how packages are installed now; None for one that is not, as amid an upgrade."""
    # Finders remember folders by their time of change, which has the grain of the file system.
    importlib.metadata.MetadataPathFinder().invalidate_caches()
    return {package: _installation(package) for package in packages}


def replaced(
    before: Mapping[str, Installation | None], now: Mapping[str, Installation | None]
) -> str | None:
    """Say which package was replaced, None when none was.

    A package that is missing says nothing yet: an installer removes the old one first.
    """
    for package, installed in now.items():
        was = before.get(package)
        if installed is None or installed == was:
            continue
        if was is None or was.version == installed.version:
            return f"{package} {installed.version} was installed again"
        return f"{package} {was.version} was replaced by {installed.version}"
    return None


def missing(
    before: Mapping[str, Installation | None], now: Mapping[str, Installation | None]
) -> list[str]:
    """Return the packages that were there and are not."""
    return [package for package, was in before.items() if was and now.get(package) is None]


def _installation(package: str) -> Installation | None:
    version = None
    # The first is what Python sees; building a wheel leaves another, without a date, in a checkout.
    for distribution in importlib.metadata.distributions(name=package):
        try:
            version = distribution.version
        except (KeyError, OSError):  # amid an upgrade
            continue
        name = f"{package.replace('-', '_')}-{version}.dist-info"
        folder = Path(str(distribution.locate_file(""))) / name
        for file in (folder / "RECORD", folder / "METADATA", folder):
            try:
                return Installation(version, file.stat().st_mtime_ns)
            except OSError:
                continue
    return None if version is None else Installation(version, 0)


class Upgrades:
    """Looks now and then whether what this process has imported was replaced.

    Attributes:
        replacing: The packages that are gone for a moment, amid an upgrade.
    """

    def __init__(self) -> None:
        self.replacing: list[str] = []
        self._before = look()
        self._looked = time.monotonic()

    def look(self, say: Callable[[str], None]) -> str | None:
        """Return what was replaced, None for nothing; call it as often as you like.

        Args:
            say: Told when an upgrade has begun.
        """
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        now = look()
        gone = missing(self._before, now)
        if gone and not self.replacing:
            say(f"{', '.join(gone)} is being replaced: no new run is started")
        self.replacing = gone
        return None if gone else replaced(self._before, now)
