"""How fast scoring must be over the reference algorithm, on the random models.

The same prompts in mode `auto`, which is what everyone gets who names none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weighbridge.deployments.bench_contests import INDEPENDENT, REFERENCE, RESIDENT

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Target:
    """The least that a ratio must be.

    Attributes:
        scenario: As `weighbridge bench --scenario` names it.
        contender: Whose ratio.
        baseline: Over whom.
        ratios: The least, by model.
    """

    scenario: str
    contender: str
    baseline: str
    ratios: dict[str, float]


def _of(scenario: str, contender: str, baseline: str, llama: float, qwen3_5: float) -> Target:
    return Target(scenario, contender, baseline, {"llama": llama, "qwen3_5": qwen3_5})


TARGETS = (
    _of("1x239", AUTO, REFERENCE, 1.1, 1.5),
    _of("3x433", AUTO, INDEPENDENT, 2.6, 5.0),
    _of("8x1953", AUTO, REFERENCE, 1.45, 2.0),
    _of("8x1953", AUTO, INDEPENDENT, 10.0, 14.0),
    _of("documents-3x30", RESIDENT, REFERENCE, 4.5, 8.0),
    _of("documents-8x30", RESIDENT, REFERENCE, 5.5, 11.0),
    _of("documents-8x1000", RESIDENT, REFERENCE, 2.8, 3.5),
)


@dataclass(frozen=True, slots=True)
class Held:
    """A target beside what was measured.

    Attributes:
        target: The target.
        model: The model.
        least: The least that its ratio must be.
        ratio: What was measured.
    """

    target: Target
    model: str
    least: float
    ratio: float

    @property
    def met(self) -> bool:
        """Whether the ratio is as large as it must be."""
        return self.ratio >= self.least


def has_target(model: str, scenario: str) -> bool:
    """Whether a scenario of a model decides on a target."""
    return any(each.scenario == scenario and model in each.ratios for each in TARGETS)


def held_against(rows: Sequence[dict[str, Any]]) -> list[Held]:
    """Hold the rows of `weighbridge bench --json` against the targets that they decide on."""
    return [
        Held(target, row["model"], target.ratios[row["model"]], row["ratio"])
        for target in TARGETS
        for row in rows
        if row["model"] in target.ratios
        and (row["scenario"], row["contender"], row["baseline"])
        == (target.scenario, target.contender, target.baseline)
    ]
