"""What each optimization around the model brings: runs with all of them beside runs without one.

Each run is a process of its own. Those of a round follow one another, so that what else the
machine does meets all of them. What one brings is what is lost without it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALL_ON = "all on"


@dataclass(frozen=True)
class Switch:
    """An optimization that can be turned off.

    Attributes:
        what: What it does, in a few words.
        module: Where its switch is.
        name: The name of the switch.
        off: Its value without the optimization.
        embedded: Whether it shows beside a real model only, in wall time.
    """

    what: str
    module: str
    name: str
    off: Any
    embedded: bool = False


SWITCHES = {
    "cut": Switch(
        "the document encoded once for all fields", "weighbridge.scorer.prompt_tokens", "CUT", False
    ),
    "bare": Switch(
        "the tokenizers library asked directly", "weighbridge.scorer.bare", "BARE", False
    ),
    "unsearched": Switch(
        "arguments of tasks not searched", "weighbridge.tasks.direct", "SEARCHED", True
    ),
    "direct": Switch(
        "rows handed to the driver as they are", "weighbridge.db.bulk", "DIRECT", False
    ),
    "updates": Switch(
        "progress shown once a second", "weighbridge.flows.artifacts", "UPDATE_SECONDS", 0.0
    ),
    "overlap": Switch(
        "recorded and planned while scored", "weighbridge.flows.ahead", "OVERLAP", False
    ),
    "prepared": Switch(
        "a waiting batch made ready meanwhile", "weighbridge.flows.ahead", "PREPARED", False
    ),
    "prepared, embedded model": Switch(
        "the same beside a real model", "weighbridge.flows.ahead", "PREPARED", False, embedded=True
    ),
    "overlap, embedded model": Switch(
        "the same beside a real model", "weighbridge.flows.ahead", "OVERLAP", False, embedded=True
    ),
}

Measure = Callable[[str | None, bool, int], dict[str, Any]]


def switched(measure: Measure, times: int) -> dict[str, Any]:
    """Measure each switch in rounds, and compare.

    Args:
        measure: Runs once with a switch off, None for all on; on the embedded model or on one
            of next to no weights; in a round. Returns its figures.
        times: How many rounds.
    """
    found: dict[str, Any] = {}
    for embedded in (False, True):
        names = [name for name, each in SWITCHES.items() if each.embedded == embedded]
        order = [None, *names]
        # Back and forth: a machine grows warmer, or busier, in one direction.
        rounds = [
            {name: measure(name, embedded, number) for name in order[:: (-1) ** number]}
            for number in range(times)
        ]
        on = "all on, embedded model" if embedded else ALL_ON
        found[on] = _medians([each[None] for each in rounds])
        for name in names:
            found[name] = _medians([each[name] for each in rounds]) | _lost(
                [each[name] for each in rounds], [each[None] for each in rounds]
            )
    return found


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _lost(
    without: Sequence[Mapping[str, float]], on: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Compare the runs of a round with each other: the median, in ms for each document."""
    return {
        f"{figure}_ms_per_document": statistics.median(
            1000 * (one[f"{figure}_seconds"] - other[f"{figure}_seconds"]) / one["documents"]
            for one, other in zip(without, on, strict=True)
        )
        for figure in ("cpu", "run")
    }


def switch_lines(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table: what a run takes, and what is lost without each optimization."""
    lines = [
        f"  {'':26} {'CPU s':>8} {'run s':>8}   lost without it, a document",
    ]
    for name, figures in found.items():
        line = f"  {name:26} {figures['cpu_seconds']:8.2f} {figures['run_seconds']:8.2f}"
        if name in SWITCHES:
            line += (
                f"   {figures['cpu_ms_per_document']:+6.2f} ms CPU,"
                f" {figures['run_ms_per_document']:+7.2f} ms: {SWITCHES[name].what}"
            )
        lines.append(line)
    return lines
