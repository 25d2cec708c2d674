"""The task that decides the temperature of a run."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from weighbridge.scorer.temperature import Temperature
from weighbridge.scorer.temperature import resolve_temperature as resolve
from weighbridge.tasks.checkpoints import checkpoint_folder
from weighbridge.tasks.scorers import ScorerSpec
from weighbridge.tasks.settings import load_settings


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="resolve temperature")
def resolve_temperature(scorer: ScorerSpec) -> Temperature:
    """Apply the temperature policy of a checkpoint and say where the value came from.

    Args:
        scorer: Which scorer the run uses.

    Raises:
        CheckpointError: There is no such checkpoint.
        TemperatureError: The temperature is refused, or READY.json cannot be trusted.
    """
    temperature = resolve(
        checkpoint_folder(scorer.checkpoint, load_settings()),
        model_id=scorer.model_id,
        revision=scorer.revision,
        temperature=scorer.temperature,
        allow_uncalibrated=scorer.allow_uncalibrated,
    )
    logger = get_run_logger()
    logger.info("temperature %s (%s)", temperature.value, temperature.source)
    if temperature.warning:
        logger.warning("%s", temperature.warning)
    return temperature
