"""Several orders of the choices, from the request to the store, on the embedded checkpoint."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from weighbridge.scorer import ParallelScorer

pytestmark = [pytest.mark.prefect, pytest.mark.mlx, pytest.mark.slow]

TRIAGE = {
    "topic": {
        "type": "enum",
        "choices": ["billing", "login", "outage"],
        "description": "What the text is about.",
    },
    "urgent": {"type": "boolean", "description": "Whether it cannot wait."},
}
DOCUMENTS = ["The invoice was charged twice.", "I cannot log in.", "It is down, please hurry!"]


def ask(bench: Any, permutations: int, **changes: Any) -> dict[str, Any]:
    return bench.score(DOCUMENTS, schema=json.dumps(TRIAGE), permutations=permutations, **changes)


def counts(outcome: dict[str, Any]) -> tuple[int, int, int]:
    return outcome["scored"], outcome["reused"], outcome["rejected"]


def test_two_orders_end_to_end(bench: Any):
    first = ask(bench, 2)
    assert (counts(first), first["permutations"]) == ((3, 0, 0), 2)
    scorer = ParallelScorer(bench.checkpoint, permutations=2)
    rates: list[float] = []
    for position, text in enumerate(DOCUMENTS):
        result = scorer.score(text, TRIAGE)
        kept = bench.rows(
            "select * from choice_probabilities where run_id = ? and position = ?",
            *(first["run_id"], position),
        )
        # What is kept is what the library says, by name.
        assert {(row["field"], row["choice"]): row["logit"] for row in kept} == pytest.approx(
            {
                (name, choice): logit
                for name, field in result.fields.items()
                for choice, logit in field.logits.items()
            },
            abs=1e-4,
        )
        rates += [f.flip_rate for f in result.fields.values() if f.flip_rate is not None]
    # Six answers; the mean over them is what is told.
    assert len(rates) == 6
    assert first["flip_rate"] == pytest.approx(sum(rates) / 6)
    stability = bench.rows("select * from stability order by field, position")
    assert [(row["field"], row["position"], row["permutations"]) for row in stability] == [
        (field, position, 2) for field in ("topic", "urgent") for position in range(3)
    ]
    assert sum(row["flip_rate"] for row in stability) / 6 == pytest.approx(first["flip_rate"])
    # Each order has a resident prefix, which the later documents of a batch take from it.
    batches = bench.rows("select * from batch where scored > 0")
    assert sum(batch["resident_hits"] for batch in batches) > 0
    assert sum(batch["resident_tokens"] for batch in batches) > 0
    # Again: all is decided, and as stable as it was.
    again = ask(bench, 2)
    assert counts(again) == (0, 3, 0)
    assert again["flip_rate"] == first["flip_rate"]
    # One order is another decision, and no figure of stability.
    alone = ask(bench, 1)
    assert counts(alone) == (3, 0, 0)
    assert (alone["permutations"], alone["flip_rate"]) == (1, None)
    runs = bench.rows("select id, permutations, prompt_version from run order by id")
    assert [tuple(run.values()) for run in runs] == [
        (1, 2, "none/schema-first/labels/3.2/2"),
        (2, 2, "none/schema-first/labels/3.2/2"),
        (3, 1, "none/schema-first/labels/3.2"),
    ]
    # Nor do four orders reuse anything of two or one.
    assert counts(ask(bench, 4, limit=1)) == (1, 0, 0)
    bench.assert_accounts_close()


def test_the_summary_tells_of_several_orders_only(bench: Any, monkeypatch: pytest.MonkeyPatch):
    from weighbridge.flows import artifacts

    published: list[str] = []
    create = artifacts.create_markdown_artifact

    def recorded(**values: Any) -> Any:
        published.append(values["markdown"])
        return create(**values)

    monkeypatch.setattr(artifacts, "create_markdown_artifact", recorded)
    outcome = ask(bench, 3, limit=1)
    ask(bench, 1, limit=1)
    several, alone = published
    line = f"Flip rate **{outcome['flip_rate']:.2f}**: of 3 orders of the choices, this share"
    assert line in several
    assert "Flip rate" not in alone


def test_without_answers_there_is_no_flip_rate(bench: Any):
    outcome = bench.score([{"text": ""}], permutations=4)
    # Not 0, which would be the best there is.
    assert (outcome["permutations"], outcome["flip_rate"]) == (4, None)


@pytest.mark.parametrize("orders", [0, 33, -1, 1.5])
def test_a_request_holds_1_to_32(bench: Any, orders: float):
    with pytest.raises(ValidationError, match="permutations"):
        bench.request(["One."], permutations=orders)


def test_results_of_another_number_of_orders_are_refused(bench: Any):
    from prefect import flow

    from weighbridge.scorer import Temperature, TemperatureKind
    from weighbridge.tasks import (
        Document,
        ScorerSpec,
        read_schema,
        record_batch,
        recorded_run,
        score_batch,
    )
    from weighbridge.tasks.errors import ResultRefused

    spec = ScorerSpec(checkpoint=str(bench.checkpoint), permutations=2)
    one = Temperature(1.0, TemperatureKind.EXPLICIT, "given by the caller")
    schema = read_schema(json.dumps(TRIAGE))

    @flow(persist_result=False)
    def mine() -> None:
        with recorded_run(
            schema, spec, one, documents="memory", database_url=f"sqlite:///{bench.database}"
        ) as run:
            found = score_batch(["x"], schema, spec.model_copy(update={"permutations": 1}))
            record_batch(run, [Document(0, 1, None, "x", {})], found)

    # They would be kept under a key that says otherwise.
    with pytest.raises(ResultRefused, match="got another prompt_version"):
        mine()
