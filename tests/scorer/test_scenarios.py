"""The five published scenarios in float32: equal labels, and probabilities within 1e-4.

Each is a number of fields and the number of tokens that their prompts share; the models
are random and narrow. `pytest -rP` shows the differences of each mode.
"""

import sys
from typing import Any

import numpy as np
import pytest

from weighbridge.scorer.engine import Engine
from weighbridge.scorer.rows import Mode, Row

pytestmark = pytest.mark.mlx

SCENARIOS = [
    (1, 239),
    (3, 433),
    (8, 950),
    (3, 1436),
    pytest.param(8, 1953, marks=pytest.mark.slow),
]
SUFFIXES = (9, 14, 4, 11, 1, 7, 20, 5)
MODES = {
    "auto": {"mode": Mode.AUTO},
    "cached_serial": {"mode": Mode.CACHED_SERIAL},
    "parallel": {"mode": Mode.PARALLEL},
    "parallel 3": {"mode": Mode.PARALLEL, "batch_size": 3},
    "resident": {"mode": Mode.AUTO, "resident_tokens": 100},
}
TOLERANCE = 1e-4
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 128},
    "qwen3_5": {"num_hidden_layers": 2},
}


def probabilities(logits: list[np.ndarray]) -> list[np.ndarray]:
    weights = [np.exp(row.astype(np.float64) - row.max()) for row in logits]
    return [row / row.sum() for row in weights]


def labels_differ(one: np.ndarray, other: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Tell whether the most probable choice differs, other than between near ties."""
    best, found = int(one.argmax()), int(other.argmax())
    return best != found and one[best] - one[found] > tolerance


def scenario_rows(tiny: Any, fields: int, prefix: int) -> list[Row]:
    rows: list[Row] = tiny.rows(prefix, SUFFIXES[:fields], seed=fields + prefix)
    return rows


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("fields", "prefix"), SCENARIOS)
@pytest.mark.parametrize("architecture", list(SMALL))
def test_scenario(tiny, record_property, architecture, fields, prefix):
    model = tiny.model(architecture=architecture, dtype="float32", **SMALL[architecture])
    engine = Engine(model)
    rows = scenario_rows(tiny, fields, prefix)
    reference = probabilities(engine.score(rows, mode=Mode.INDEPENDENT)[0])
    worst: dict[str, float] = {}
    for name, options in MODES.items():
        found = probabilities(engine.score(rows, **options)[0])
        worst[name] = tiny.apart(reference, found)
        # Whole prompts are the oracle. Two choices closer than the bound may change places.
        assert not any(map(labels_differ, reference, found))
    record_property("max_dp", max(worst.values()))
    report = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    sys.stdout.write(f"{architecture}, {fields} fields, {prefix} shared: max |dp| {report}\n")
    # DESIGN invariant 7, on float32.
    assert max(worst.values()) <= TOLERANCE
    # Choices are neither all alike nor decided: there is something to agree about.
    assert 1e-3 < np.mean([row.max() - row.min() for row in reference]) < 0.999


@pytest.mark.usefixtures("cpu")
def test_control_a_lost_token_shows(tiny):
    engine = Engine(tiny.model(dtype="float32"))
    rows = scenario_rows(tiny, 8, 433)
    reference = probabilities(engine.score(rows, mode=Mode.INDEPENDENT)[0])
    lost = [Row(row.tokens[:300] + row.tokens[301:], row.candidates) for row in rows]
    found = probabilities(engine.score(lost)[0])
    # One token of 433 lost moves all later positions: far over the bound.
    assert tiny.apart(reference, found) > 10 * TOLERANCE


def test_labels_differ_by_hand():
    one = np.array([0.5, 0.3, 0.2])
    # The same best choice; another one by 0.2; and a tie of 5e-5, which is no difference.
    assert not labels_differ(one, np.array([0.4, 0.35, 0.25]))
    assert labels_differ(one, np.array([0.3, 0.5, 0.2]))
    assert not labels_differ(np.array([0.50005, 0.5]), np.array([0.5, 0.50005]))
