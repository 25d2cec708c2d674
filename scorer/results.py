"""What scoring a document gives. Frozen, and JSON through `model_dump()`."""

import json
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from weighbridge.scorer.encodings import ChoicePlan
from weighbridge.scorer.errors import DocumentCode
from weighbridge.scorer.rows import Timings
from weighbridge.scorer.schema import Choice, Field, FieldKind
from weighbridge.scorer.temperature import TemperatureKind, softmax

_Model = TypeVar("_Model", bound=BaseModel)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldResult(_Frozen):
    """The answer to one field.

    Attributes:
        kind: Kind of the field.
        value: The choice with the highest logit; the first of equals.
        scores: Probability by choice: softmax(logits / temperature).
        logits: Logit by choice, before temperature; in `labels` after the label
            prior was subtracted; the mean over all orders of the choices asked.
        margin: Highest logit minus the second highest, before temperature;
            None for a field of one choice.
        expected_value: Sum of i * p_i over the levels of a score field, i from
            0; None for other kinds.
        code: The code of the selected choice in the schema's own order; None in
            `labels`.
        flip_rate: Share of the orders of the choices whose own most likely choice
            differs from `value`: 0 is stable. None when only one order was asked, and
            for a field of one choice.
    """

    kind: FieldKind
    value: Choice
    scores: dict[str, float]
    logits: dict[str, float]
    margin: float | None
    expected_value: float | None
    code: str | None
    flip_rate: float | None = None


class DecisionKey(_Frozen):
    """What a decision depends on beside the document: other values, another decision.

    Attributes:
        schema_sha256: Hash of the ordered schema.
        checkpoint: Fingerprint of the checkpoint.
        dtype: Compute dtype.
        contract: Trained prompt contract, None for plain instruct models.
        layout: What stood first in the prompt.
        encoding: What the model was asked to say.
        prompt_version: Version of the prompt's wording, and of how many orders of the
            choices were averaged when that is more than one: `3.2`, `3.2/4`.
    """

    schema_sha256: str
    checkpoint: str
    dtype: str
    contract: str | None
    layout: str
    encoding: str
    prompt_version: str


class ScoreResult(_Frozen):
    """The answers to all fields of one document.

    Attributes:
        output: Selected value by field, booleans as native booleans.
        fields: Answer by field, in the order of the schema.
        key: What the answers depend on beside the document.
        temperature: What the logits were divided by.
        temperature_kind: Where it came from.
        temperature_fitted: Whether it was fitted for this very checkpoint.
        timings: Seconds, tokens and bytes, of all orders of the choices together.
    """

    output: dict[str, Choice]
    fields: dict[str, FieldResult]
    key: DecisionKey
    temperature: float
    temperature_kind: TemperatureKind
    temperature_fitted: bool
    timings: Timings

    def as_model(self, model: type[_Model]) -> _Model:
        """Return the answers as an instance of a Pydantic model, such as the one that asked.

        Raises:
            pydantic.ValidationError: The model does not take these answers.
        """
        # By JSON, where a strict model too takes the value of an enum for its member.
        return model.model_validate_json(
            json.dumps({_alias(model, name): value for name, value in self.output.items()})
        )


class Rejection(_Frozen):
    """Why a document was not scored.

    Attributes:
        code: Stable name of the reason, such as `document.too_long`.
        message: What must hold and what came.
    """

    code: DocumentCode
    message: str


def field_result(
    field: Field,
    choices: ChoicePlan,
    logits: tuple[float, ...],
    temperature: float,
    flip_rate: float | None = None,
) -> FieldResult:
    """Turn the logits of a field into its answer.

    Args:
        field: The field.
        choices: Its plan, for the codes.
        logits: One finite number per choice.
        temperature: What they are divided by, above 0.
        flip_rate: See `FieldResult`.
    """
    probabilities = softmax(logits, temperature)
    selected = int(np.argmax(logits))
    ordered = sorted(logits, reverse=True)
    is_score = field.kind is FieldKind.SCORE
    return FieldResult(
        kind=field.kind,
        value=field.choices[selected],
        scores=dict(zip(field.keys, probabilities, strict=True)),
        logits=dict(zip(field.keys, logits, strict=True)),
        margin=ordered[0] - ordered[1] if len(ordered) > 1 else None,
        expected_value=sum(i * p for i, p in enumerate(probabilities)) if is_score else None,
        code=choices.codes[selected] if choices.codes else None,
        flip_rate=flip_rate,
    )


def _alias(model: type[BaseModel], name: str) -> str:
    info = model.model_fields.get(name)
    alias = info.validation_alias if info else None
    return alias if isinstance(alias, str) else name
