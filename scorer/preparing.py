"""From documents to the rows of every order of the choices, or to why they are rejected.

Needs the tokenizer only. `ParallelScorer` scores what is prepared here, and `measure`
looks at the same without scoring it: both reject the same documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge.scorer.errors import DocumentError
from weighbridge.scorer.plan import Prompted, SchemaPlan
from weighbridge.scorer.results import Rejection


@dataclass(frozen=True, slots=True)
class Measured:
    """What a document costs, and whether it would be rejected before the model sees it.

    Attributes:
        input_tokens: Tokens of its longest prompt, over all fields and orders of the
            choices; also of one that is too long, None where it makes no prompt.
        rejection: Why it is rejected, None where it is not.
    """

    input_tokens: int | None
    rejection: Rejection | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Documents made ready to be scored, of which nothing but the model is left.

    Attributes:
        plans: The plan of each order of the choices, the schema's own first; orders that are
            the same share theirs.
        documents: For each document its rows in each different order, or why it is rejected.
    """

    plans: tuple[SchemaPlan, ...]
    documents: tuple[tuple[Prompted, ...] | Rejection, ...]

    @property
    def orders(self) -> tuple[SchemaPlan, ...]:
        """The different orders."""
        return tuple(dict.fromkeys(self.plans))

    @property
    def needs_model(self) -> bool:
        """Whether anything is asked: a batch of rejections loads no weights."""
        return any(
            prompted.rows
            for each in self.documents
            if not isinstance(each, Rejection)
            for prompted in each
        )


def prepare_all(plans: Sequence[SchemaPlan], contexts: Sequence[object]) -> Prepared:
    """Make documents ready: what the tokenizer rejects in any order costs no model time.

    Args:
        plans: As `ParallelScorer.plans` returns them.
        contexts: The documents.
    """
    orders = tuple(dict.fromkeys(plans))
    return Prepared(tuple(plans), tuple(prepare(orders, context) for context in contexts))


def prepare(orders: Sequence[SchemaPlan], context: object) -> tuple[Prompted, ...] | Rejection:
    """Turn a document into the rows of every order of the choices."""
    if not isinstance(context, str):
        return Rejection(
            code="document.not_text",
            message=f"a document must be text, got {type(context).__name__}",
        )
    made: list[Prompted] = []
    for plan in orders:
        try:
            made.append(plan.rows(context))
        except DocumentError as error:
            return Rejection(code=error.code, message=error.message)
    return tuple(made)


def measure(plans: Sequence[SchemaPlan], context: object) -> Measured:
    """Say what a document would cost, without a model.

    What only the model can show, an answer that is no finite number, is not foreseen.

    Args:
        plans: The plan of each order of the choices, as `ParallelScorer.plans` returns.
        context: The document.
    """
    orders = tuple(dict.fromkeys(plans))
    prepared = prepare(orders, context)
    if not isinstance(prepared, Rejection):
        return Measured(max(prompted.input_tokens for prompted in prepared), None)
    if prepared.code != "document.too_long":
        return Measured(None, prepared)
    return Measured(max(plan.input_tokens(str(context)) for plan in orders), prepared)
