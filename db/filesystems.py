"""Which file system a path lies on, and whether SQLite can keep a WAL file there.

WAL needs shared memory between all processes that open the file, which network
and host-shared file systems do not give (SQLite documentation, "Write-Ahead
Logging", Overview, point 2). On those a store is not slow but wrong.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import NamedTuple

from weighbridge.db.errors import StoreUnavailable

_REMOTE_KINDS = re.compile(
    r"9p|acfs|afp?s|afpfs|beegfs|ceph|cifs|coda|davfs|drvfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?"
    r"|ocfs2|orangefs|prl_fs|pvfs2|smb[23]|smbfs|vboxsf|vmhgfs|webdav"
    r"|fuse\.(ceph|cephfs|davfs2?|gcsfuse|glusterfs|goofys|moosefs|rclone|s3fs|sshfs|vmhgfs-fuse)"
)
_MACOS_LINE = re.compile(r"^.+? on (?P<point>/.*) \((?P<options>[^()]+)\)$")


class Mount(NamedTuple):
    """One mounted file system."""

    point: str
    kind: str
    local: bool


def parse_proc_mounts(text: str) -> list[Mount]:
    """Read the text of Linux's /proc/mounts (blanks are written as octal escapes there)."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[1])
        kind = parts[2]
        mounts.append(Mount(point, kind, _REMOTE_KINDS.fullmatch(kind) is None))
    return mounts


def parse_mount_command(text: str) -> list[Mount]:
    """Read what macOS's `mount` prints; there the flag `local` marks what is not remote."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        match = _MACOS_LINE.match(line)
        if match is None:
            continue
        options = [option.strip() for option in match["options"].split(",")]
        mounts.append(Mount(match["point"], options[0], "local" in options))
    return mounts


def mount_of(path: PurePath, mounts: Iterable[Mount]) -> Mount | None:
    """Find the mount a resolved path lies on: the deepest, and of equals the latest."""
    best: Mount | None = None
    for mount in mounts:
        deeper = best is None or len(mount.point) >= len(best.point)
        if deeper and path.is_relative_to(mount.point):
            best = mount
    return best


def require_local(path: Path) -> None:
    """Refuse a path on a file system that SQLite's WAL cannot work on.

    Raises:
        StoreUnavailable: The path lies on a network or host-shared file system, or leads
            nowhere.
    """
    try:
        resolved = path.resolve()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a NUL, too long
        reason = getattr(error, "strerror", None) or error
        raise StoreUnavailable(
            f"a store must be at a path that leads to a file, got {str(path)!r:.200}:"
            f" {reason!s:.200}",
            hint="name another path",
        ) from error
    mount = mount_of(resolved, _mounts())
    if mount is not None and not mount.local:
        raise StoreUnavailable(
            f"a store must be on a local disk, got {path} on {mount.point} ({mount.kind})",
            hint="choose a local path: SQLite cannot share a write-ahead log over this file system",
        )


def _mounts() -> list[Mount]:
    """List what is mounted; empty where the system gives no way to ask."""
    try:
        if sys.platform == "darwin":
            ran = subprocess.run(
                ["/sbin/mount"], capture_output=True, text=True, timeout=10, check=True
            )
            return parse_mount_command(ran.stdout)
        text = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        return parse_proc_mounts(text)
    except (OSError, subprocess.SubprocessError):
        return []
