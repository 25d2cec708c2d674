"""The task that decides the temperature of a run."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from weighbridge.scorer.temperature import Temperature
from weighbridge.tasks.scorers import ScorerSpec, open_scorer


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="resolve temperature")
def resolve_temperature(scorer: ScorerSpec) -> Temperature:
    """Apply the temperature policy of a checkpoint and say where the value came from.

    Args:
        scorer: Which scorer the run uses.

    Raises:
        CheckpointError: There is no such checkpoint.
        TemperatureError: The temperature is refused, or READY.json cannot be trusted.
    """
    logger = get_run_logger()
    temperature = open_scorer(scorer, say=logger.info).temperature
    logger.info("temperature %s (%s)", temperature.value, temperature.source)
    if temperature.warning:
        logger.warning("%s", temperature.warning)
    return temperature
