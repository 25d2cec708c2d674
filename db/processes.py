"""Whether the process that wrote a run or claim row still lives on this host."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

# Clocks of the start time have whole seconds, and wall clocks are corrected now and then.
_TOLERANCE = timedelta(seconds=5)
_ELAPSED = re.compile(r"^(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)$")


def process_is_alive(pid: int, since: datetime) -> bool:
    """Tell whether `pid` is the process that had this number at `since` (UTC).

    A number that was given out again, as happens in restarted containers, counts as
    dead: its process started after `since`. A zombie is dead too.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to someone else
    try:
        started = _started_from_ps(pid) if sys.platform == "darwin" else _started_from_proc(pid)
    except (OSError, ValueError, subprocess.SubprocessError):
        return True  # it exists, and nothing more can be learnt here
    return started is not None and started <= since + _TOLERANCE


def parse_elapsed(text: str) -> timedelta:
    """Read the `etime` of ps: `[[days-]hours:]minutes:seconds`."""
    match = _ELAPSED.match(text)
    if match is None:
        raise ValueError(f"elapsed time must be [[days-]hours:]minutes:seconds, got {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _started_from_proc(pid: int) -> datetime | None:
    # Fields of /proc/PID/stat after the command, which may itself hold blanks and brackets
    # (proc(5)): the state comes first, the start time in clock ticks since boot is the 20th.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:
        return None
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        if line.startswith("btime ")
    )
    ticks = os.sysconf("SC_CLK_TCK")
    return datetime.fromtimestamp(boot + int(fields[19]) / ticks, tz=UTC)


def _started_from_ps(pid: int) -> datetime | None:
    ran = subprocess.run(  # noqa: S603 - a fixed command and a number
        ["/bin/ps", "-o", "stat=", "-o", "etime=", "-p", str(pid)],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    parts = ran.stdout.split()
    if len(parts) != 2 or parts[0].startswith("Z"):
        return None
    return datetime.now(UTC) - parse_elapsed(parts[1])
