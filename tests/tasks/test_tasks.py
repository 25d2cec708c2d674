"""The tasks one by one, as a user's own flow calls them."""

import json
from pathlib import Path

import pytest
from prefect import flow
from prefect.cache_policies import NO_CACHE

from weighbridge.db import RecordRefused, open_engine, run_summary, runs, sqlite_url
from weighbridge.flows import score_documents
from weighbridge.scorer import Rejection, ScoreResult, Temperature, TemperatureKind
from weighbridge.scorer.errors import CheckpointError, SchemaError, ScorerError
from weighbridge.tasks import (
    BadRecord,
    Document,
    ScorerSpec,
    Settings,
    open_scorer,
    read_schema,
    record_batch,
    recorded_run,
    resolve_temperature,
    score_batch,
    validate_schema,
)
from weighbridge.tasks.errors import ResultRefused

SCHEMA = json.dumps(
    {
        "sentiment": {
            "type": "enum",
            "choices": ["negative", "positive"],
            "description": "The feeling of the text.",
        }
    }
)
ONE = Temperature(1.0, TemperatureKind.EXPLICIT, "given by the caller")


@pytest.fixture
def spec(embedded: Path) -> ScorerSpec:
    return ScorerSpec(checkpoint=str(embedded))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return sqlite_url(tmp_path / "store.db")


def document(position: int, text: str) -> Document:
    return Document(position, position + 1, None, text, {})


def statuses(url: str) -> list[tuple[str, str | None]]:
    engine = open_engine(url)
    found = [(run.status, run.message) for run in runs(engine)]
    engine.dispose()
    return found


@pytest.mark.parametrize(
    "part", [validate_schema, resolve_temperature, score_batch, record_batch, score_documents]
)
def test_prefect_is_to_keep_no_values(part: object):
    assert part.persist_result is False  # type: ignore[attr-defined]
    if part is not score_documents:
        assert part.cache_policy == NO_CACHE  # type: ignore[attr-defined]


def test_a_schema_is_a_file_or_its_text(tmp_path: Path):
    path = tmp_path / "mood.json"
    path.write_text(SCHEMA)
    assert read_schema(path).name == "mood"
    assert read_schema(str(path)).sha256 == read_schema(f"  {SCHEMA}").sha256
    with pytest.raises(SchemaError):
        read_schema(str(tmp_path / "absent.json"))


@pytest.mark.mlx
def test_a_scorer_is_opened_without_loading_weights(spec: ScorerSpec):
    scorer = open_scorer(spec.model_copy(update={"max_input_tokens": 99}))
    assert scorer.max_input_tokens == 99
    with pytest.raises(ScorerError, match="layout must be one of"):
        open_scorer(spec.model_copy(update={"layout": "sideways"}))


def test_without_any_checkpoint_the_next_step_is_named(tmp_path: Path):
    settings = Settings(cache=tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_scorer(ScorerSpec(), settings)
    assert caught.value.hint is not None
    assert "weighbridge checkpoint demo" in caught.value.hint


@pytest.mark.prefect
@pytest.mark.mlx
def test_composed_by_hand(prefect_server: str, spec: ScorerSpec, url: str):
    # Documents of the caller's own making; one cannot be scored, one comes twice.
    documents = [document(0, "It broke."), document(1, "\udbc0"), document(2, "It broke.")]

    @flow(persist_result=False)
    def mine() -> list[ScoreResult | Rejection]:
        schema = validate_schema(SCHEMA)
        temperature = resolve_temperature(spec)
        with recorded_run(
            schema, spec, temperature, documents="memory", database_url=url, name="mine"
        ) as run:
            results = score_batch([each.text for each in documents], schema, spec)
            outcome = record_batch(run, documents, results)
            assert (outcome.scored, outcome.reused, outcome.rejected) == (1, 1, 1)
            assert run_summary(run.engine, run.run_id).status == "running"
        return results

    first, second, third = mine()
    assert isinstance(first, ScoreResult)
    assert isinstance(second, Rejection)
    assert second.code == "document.encoding"
    assert isinstance(third, ScoreResult)
    assert first.fields["sentiment"].logits == third.fields["sentiment"].logits
    engine = open_engine(url)
    (run,) = runs(engine)
    engine.dispose()
    assert (run.name, run.status, run.documents_source) == ("mine", "completed", "memory")
    # The text was scored twice by hand: what was done in vain is counted.
    assert (run.scored, run.reused, run.rejected, run.wasted) == (1, 1, 1, 1)
    assert run.flow_run_id is not None


@pytest.mark.prefect
@pytest.mark.mlx
def test_batches_leave_out_what_is_decided(prefect_server: str, spec: ScorerSpec, url: str):
    records = [
        document(0, "It broke."),
        BadRecord(1, 2, None, "document.empty", "must not be blank"),
        document(2, "Thank you!"),
        document(3, "It broke."),
    ]

    @flow(persist_result=False)
    def mine() -> list[tuple[str, ...]]:
        schema = validate_schema(SCHEMA)
        taken: list[tuple[str, ...]] = []
        with recorded_run(schema, spec, ONE, documents="memory", database_url=url) as run:
            for batch in run.batches(records, size=1):
                taken.append(batch.texts)
                record_batch(run, batch, score_batch(batch.texts, schema, spec))
        return taken

    assert mine() == [("It broke.",), ("Thank you!",)]
    assert mine() == [()]
    assert statuses(url) == [("completed", None)] * 2


@pytest.mark.mlx
def test_how_a_run_ends_is_recorded(spec: ScorerSpec, url: str):
    # Outside of any flow each is a run of its own.
    schema = read_schema(SCHEMA)

    def run(error: BaseException | None, total: int | None = None) -> None:
        with recorded_run(
            schema, spec, ONE, documents="memory", database_url=url, total=total
        ) as opened:
            assert not opened.continued
            if error:
                raise error

    run(None)
    with pytest.raises(ValueError, match="secret"):
        run(ValueError("a secret of a document"))
    with pytest.raises(KeyboardInterrupt):
        run(KeyboardInterrupt())
    # What was lost between counting and scoring must not pass for done.
    with pytest.raises(RecordRefused, match="2 came in, 0 are recorded"):
        run(None, total=2)
    assert statuses(url) == [
        ("failed", "RecordRefused"),
        ("cancelled", "KeyboardInterrupt"),
        ("failed", "ValueError"),
        ("completed", None),
    ]


@pytest.mark.mlx
def test_the_first_error_is_the_one_that_shows(spec: ScorerSpec, url: str):
    # Closing the run fails as well here, and says less about what happened.
    schema = read_schema(SCHEMA)

    def lose_the_run() -> None:
        with recorded_run(schema, spec, ONE, documents="memory", database_url=url) as run:
            run.store.finish_run(run.run_id, "failed")
            raise ValueError("what happened")

    with pytest.raises(ValueError, match="what happened"):
        lose_the_run()


@pytest.mark.prefect
@pytest.mark.mlx
def test_two_runs_in_one_flow_run_are_refused(prefect_server: str, spec: ScorerSpec, url: str):
    from weighbridge.db import RunRefused

    @flow(persist_result=False)
    def mine() -> None:
        schema = read_schema(SCHEMA)
        for source in ("one", "two"):
            with recorded_run(schema, spec, ONE, documents=source, database_url=url):
                pass

    with pytest.raises(RunRefused, match="documents_source"):
        mine()


@pytest.mark.prefect
@pytest.mark.mlx
def test_answers_to_another_schema_are_not_recorded(
    prefect_server: str, url: str, spec: ScorerSpec
):
    other = read_schema(SCHEMA.replace("The feeling of the text.", "How it sounds."))

    @flow(persist_result=False)
    def mixed_up() -> None:
        schema = validate_schema(SCHEMA)
        with recorded_run(schema, spec, ONE, documents="two", database_url=url) as run:
            documents = [document(0, "It works.")]
            record_batch(run, documents, score_batch(["It works."], other, spec))

    # They would be found later as answers to the run's own question.
    with pytest.raises(ResultRefused, match="got another schema_sha256"):
        mixed_up()
    assert statuses(url) == [("failed", "ResultRefused")]
