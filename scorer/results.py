"""What scoring a document gives. Frozen, and JSON through `model_dump()`."""

from pydantic import BaseModel, ConfigDict

from weighbridge.scorer.engine import Timings
from weighbridge.scorer.errors import DocumentCode
from weighbridge.scorer.schema import Choice, FieldKind
from weighbridge.scorer.temperature import TemperatureKind


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldResult(_Frozen):
    """The answer to one field.

    Attributes:
        kind: Kind of the field.
        value: The choice with the highest logit; the first of equals.
        scores: Probability by choice: softmax(logits / temperature).
        logits: Raw logit by choice, before temperature.
        margin: Highest logit minus the second highest, before temperature;
            None for a field of one choice.
        expected_value: Sum of i * p_i over the levels of a score field, i from
            0; None for other kinds.
        code: The code of the selected choice; None in `labels`.
    """

    kind: FieldKind
    value: Choice
    scores: dict[str, float]
    logits: dict[str, float]
    margin: float | None
    expected_value: float | None
    code: str | None


class ScoreResult(_Frozen):
    """The answers to all fields of one document.

    Attributes:
        output: Selected value by field, booleans as native booleans.
        fields: Answer by field, in the order of the schema.
        temperature: What the logits were divided by.
        temperature_kind: Where it came from.
        temperature_fitted: Whether it was fitted for this very checkpoint.
        timings: Seconds, tokens and bytes.
    """

    output: dict[str, Choice]
    fields: dict[str, FieldResult]
    temperature: float
    temperature_kind: TemperatureKind
    temperature_fitted: bool
    timings: Timings


class Rejection(_Frozen):
    """Why a document was not scored.

    Attributes:
        code: Stable name of the reason, such as `document.too_long`.
        message: What must hold and what came.
    """

    code: DocumentCode
    message: str
