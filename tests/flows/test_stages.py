"""Stages add up to the time of a run, whatever happens beside what."""

import random
from itertools import pairwise
from typing import Any

import pytest

from weighbridge.flows.stages import STAGES, Stages
from weighbridge.scorer.results import DecisionKey, ScoreResult
from weighbridge.scorer.rows import Timings
from weighbridge.scorer.temperature import TemperatureKind


class Clock:
    """Time that goes by when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def result(prefill: float, branch: float) -> ScoreResult:
    key = DecisionKey(
        schema_sha256="", checkpoint="", dtype="", contract=None, layout="", encoding="",
        prompt_version="",
    )  # fmt: skip
    return ScoreResult(
        output={}, fields={}, key=key, temperature=1.0, temperature_fitted=False,
        temperature_kind=TemperatureKind.DEFAULT,
        timings=Timings(prefill_seconds=prefill, branch_seconds=branch),
    )  # fmt: skip


def took(stages: Stages) -> dict[str, float]:
    return {stage: round(seconds, 9) for stage, seconds in stages.seconds().items() if seconds}


def test_without_a_second_thread_each_second_is_where_it_was_spent(clock: Clock):
    stages = Stages(clock)
    clock.now += 1
    with stages.at("reading"):
        clock.now += 2
        with stages.at("planning"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert took(stages) == {"preparing": 17, "reading": 10, "planning": 4}


def test_what_goes_by_while_a_batch_is_scored_is_hidden(clock: Clock):
    stages = Stages(clock)
    began = clock.now
    with stages.at("recording"):
        clock.now += 1
    with stages.at("other scoring"):
        clock.now += 3  # waits for the batch
    # The batch was through half a second before the flow's thread looked.
    stages.scored(began, clock.now - 0.5, [result(2.0, 0.5)], loading=0.25)
    assert took(stages) == {"loading": 0.25, "prefill": 2, "branch": 0.5, "other scoring": 1.25}
    assert {stage: each for stage, each in stages.hidden.items() if each} == {"recording": 1}
    assert str(stages) == (
        "loading 0.25 s, prefill 2.00 s, branch 0.50 s, other scoring 1.25 s, "
        "recording 0.00 s (and 1.00 s while scoring)"
    )


@pytest.mark.parametrize("seed", range(20))
def test_they_always_add_up(clock: Clock, seed: int):
    chance = random.Random(seed)
    stages = Stages(clock)
    names: list[Any] = list(STAGES)
    free = clock.now  # until then the scoring thread has been at work
    for _ in range(50):
        moments = sorted(chance.uniform(clock.now, clock.now + 2) for _ in range(4))
        for before, moment in pairwise([clock.now, *moments]):
            assert moment >= before
            clock.now = moment
            stages.enter(chance.choice(names))
        began, ended = sorted(chance.uniform(free, clock.now) for _ in range(2))
        stages.scored(began, ended, [result(0.3 * (ended - began), 0.1 * (ended - began))])
        free = ended
    assert sum(stages.seconds().values()) == pytest.approx(clock.now - 100.0, rel=1e-12)
    assert all(seconds >= -1e-9 for seconds in stages.seconds().values())


def test_taking_values_is_of_a_stage_and_using_them_is_not(clock: Clock):
    stages = Stages(clock)

    def numbers():
        for number in range(5):
            clock.now += 1
            yield number

    seen: list[int] = []
    for number in stages.each("reading", numbers(), together=2):
        clock.now += 10
        seen.append(number)
    assert seen == [0, 1, 2, 3, 4]
    assert took(stages) == {"reading": 5, "preparing": 50}
