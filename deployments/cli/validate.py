"""The command that looks at a schema and documents before anything is scored."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.document_file import document_file
from weighbridge.deployments.cli.errors import ExitCode
from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.cli.score_options import (
    AcceptPromptOption,
    AdapterOption,
    CheckpointOption,
    EncodingOption,
    FormatOption,
    IdFieldOption,
    LayoutOption,
    LimitOption,
    MaxInputTokensOption,
    PermutationsOption,
    QueryOption,
    SchemaOption,
    TextFieldOption,
    TextOption,
)
from weighbridge.deployments.console import (
    print_hint,
    print_json,
    print_json_with_list,
    print_note,
    warnings_shown,
)
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.progress import counting
from weighbridge.deployments.prompt_report import print_prompts, prompt_json
from weighbridge.deployments.validation_report import print_costs, print_counts, print_rejections

if TYPE_CHECKING:
    from weighbridge.scorer.parallel_scorer import ParallelScorer
    from weighbridge.scorer.schema import Schema
    from weighbridge.tasks.looking import Looked, RepeatedIds, TokenCounts
    from weighbridge.tasks.sources import BadRecord, Document

SHOWN = 5
_PROMPT = "One prompt"
_SPOOLED_BYTES = 1 << 20


@warnings_shown()
def validate(
    schema: SchemaOption,
    documents: Annotated[
        str | None,
        typer.Argument(
            metavar="DOCS",
            help="What score takes; - reads stdin. The schema alone if left out.",
            show_default=False,
        ),
    ] = None,
    text: TextOption = None,
    text_field: TextFieldOption = "text",
    id_field: IdFieldOption = "id",
    format: FormatOption = None,
    query: QueryOption = None,
    limit: LimitOption = None,
    checkpoint: CheckpointOption = None,
    adapter: AdapterOption = None,
    accept_prompt: AcceptPromptOption = False,
    max_input_tokens: MaxInputTokensOption = None,
    layout: LayoutOption = None,
    encoding: EncodingOption = None,
    permutations: PermutationsOption = 1,
    show_prompt: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Print the exact prompts of the document at position N, the first being 0, "
            "and look at no other.",
            rich_help_panel=_PROMPT,
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            "--field",
            help="Only the prompt of this field.",
            rich_help_panel=_PROMPT,
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a schema and documents, and say what score would reject.

    Counts tokens with the tokenizer: loads no model, and does not ask the store
    what is decided already. Ends with 3 when some documents would be rejected.

    Example: weighbridge validate tickets.jsonl --schema triage.json

    Example: weighbridge validate tickets.csv --schema triage.json --show-prompt 0
    """
    if documents is not None and text is not None:
        raise typer.BadParameter("name documents (a file, or - for stdin), or --text, not both")
    if documents is None and (format or query):
        raise typer.BadParameter("--format and --query are for documents, and none are named")
    if show_prompt is not None and documents is None and text is None:
        raise typer.BadParameter("--show-prompt needs documents, or --text")
    if field is not None and show_prompt is None:
        raise typer.BadParameter("--field belongs to --show-prompt")
    from weighbridge.tasks.questions import read_schema
    from weighbridge.tasks.scorers import ScorerSpec, open_scorer
    from weighbridge.tasks.sources import read_documents

    questions = read_schema(schema)
    if field is not None:
        questions.field(field)  # a wrong name is told before the documents are read
    scorer = open_scorer(
        ScorerSpec(
            checkpoint=checkpoint,
            adapter=adapter,
            accept_prompt=accept_prompt,
            # Prompts do not depend on the temperature.
            allow_uncalibrated=True,
            max_input_tokens=max_input_tokens,
            layout=layout,
            encoding=encoding,
            permutations=permutations,
        ),
        say=print_note,
    )
    if documents is None and text is None:
        _tell_schema(scorer, questions, as_json=as_json)
        return
    with document_file(documents, text) as (path, known_as):
        records = islice(
            read_documents(
                path,
                text_field="text" if text is not None else text_field,
                id_field="id" if text is not None else id_field,
                format=format,
                query=query,
            ),
            limit,
        )
        if show_prompt is not None:
            bad = _tell_prompt(scorer, questions, records, show_prompt, field, as_json=as_json)
        else:
            rejections = _tell_documents(scorer, questions, records, as_json=as_json)
            bad = rejections.total
            rejections.tell_encoding(path, known_as)
    if bad:
        raise typer.Exit(ExitCode.REJECTED)


def _tell_schema(scorer: "ParallelScorer", schema: "Schema", *, as_json: bool) -> None:
    costs = _costs(scorer, schema)
    if as_json:
        print_json({**costs, "documents": None, "model_loaded": scorer.model_loaded})
    else:
        print_costs(costs)


def _tell_documents(
    scorer: "ParallelScorer",
    schema: "Schema",
    records: "Iterable[Document | BadRecord]",
    *,
    as_json: bool,
) -> "_Rejections":
    """Look at all documents, and return which of them would be rejected."""
    from weighbridge.tasks.looking import RepeatedIds, TokenCounts, look_at

    costs = _costs(scorer, schema)
    tokens = TokenCounts()
    ids = RepeatedIds()
    with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES, "w+", encoding="utf-8") as file:
        rejections = _Rejections(file if as_json else None)
        with counting("looked at") as tell:
            for looked in look_at(scorer, schema, records):
                rejections.records += 1
                ids.add(looked.record.external_id)
                if looked.input_tokens is not None:
                    tokens.add(looked.input_tokens)
                rejections.add(looked)
                tell(rejections.records)
        counted = _counted(rejections, tokens, ids, scorer.max_input_tokens)
        if as_json:
            head = {**costs, "documents": counted, "model_loaded": scorer.model_loaded}
            print_json_with_list(head, "rejections", rejections.all())
        else:
            print_costs(costs)
            print_counts(counted, scorer.max_input_tokens)
            print_rejections(rejections.first, rejections.by_code)
    return rejections


def _tell_prompt(
    scorer: "ParallelScorer",
    schema: "Schema",
    records: "Iterator[Document | BadRecord]",
    position: int,
    field: str | None,
    *,
    as_json: bool,
) -> int:
    """Show the prompts of one document, and return how many were rejected: 0 or 1."""
    from weighbridge.tasks.looking import look_at

    number = 0
    wanted: Looked | None = None
    with counting("read") as tell:
        for record in records:
            if number == position:
                (wanted,) = look_at(scorer, schema, [record])
                break
            number += 1
            tell(number)
    if wanted is None:
        raise CommandError(
            f"--show-prompt must be the position of a document, got {position}, and there are "
            f"{number} documents",
            hint="positions are counted from 0, and records that would be rejected count",
        )
    fields = [schema.field(field)] if field is not None else list(schema.fields)
    record = wanted.record
    head: dict[str, Any] = {
        "position": record.position,
        "line": record.line,
        "external_id": record.external_id,
        "rejection": _reason(wanted),
    }
    prompts: Sequence[dict[str, Any]] = ()
    if wanted.code is None:
        plan = scorer.plan(schema)
        # Only a document passes without a code; a bad record has no text.
        prompts = [prompt_json(plan, getattr(record, "text", ""), each) for each in fields]
    if as_json:
        print_json({**head, "prompts": prompts})
    else:
        print_prompts(head, prompts)
        if wanted.code is not None:
            print_note(f"rejected: {wanted.code}: {wanted.message}")
        elif scorer.permutations > 1:
            print_hint(f"this is the first of {scorer.permutations} orders of the choices")
    return int(wanted.code is not None)


def _reason(looked: "Looked") -> dict[str, Any] | None:
    return None if looked.code is None else {"code": looked.code, "message": looked.message}


class _Rejections:
    """What would be rejected: counts and the first of each code in memory, all in a file.

    Args:
        file: Where they are kept, None when `all` will not be asked for.
    """

    def __init__(self, file: IO[str] | None) -> None:
        self.records = 0
        self.by_code: Counter[str] = Counter()
        self.first: dict[str, list[dict[str, Any]]] = {}
        self._file = file

    @property
    def total(self) -> int:
        """How many there are."""
        return self.by_code.total()

    def add(self, looked: "Looked") -> None:
        """Keep a record that would be rejected; leave others aside."""
        if looked.code is None:
            return
        record = looked.record
        entry = {
            "position": record.position,
            "line": record.line,
            "external_id": record.external_id,
            "code": looked.code,
            "message": looked.message,
        }
        self.by_code[looked.code] += 1
        first = self.first.setdefault(looked.code, [])
        if len(first) < SHOWN:
            first.append(entry)
        if self._file:
            self._file.write(json.dumps(entry) + "\n")

    def tell_encoding(self, path: str, known_as: str | None) -> None:
        """Say what to do if most records are not UTF-8."""
        from weighbridge.tasks.encodings import encoding_hint

        refused = self.by_code["document.encoding"]
        if hint := encoding_hint(path, refused, self.records, known_as=known_as):
            print_hint(hint)

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield every one, in input order."""
        if self._file:
            self._file.seek(0)
            yield from map(json.loads, self._file)


def _costs(scorer: "ParallelScorer", schema: "Schema") -> dict[str, Any]:
    """Say what a schema costs with a scorer: tokens that stay, tokens and rows that come again."""
    plans = scorer.plans(schema)
    own = plans[0]
    orders = dict.fromkeys(plans)
    return {
        "schema": schema.name,
        "sha256": schema.sha256,
        "checkpoint": scorer.info.name,
        "layout": scorer.layout.value,
        "encoding": scorer.encoding.value,
        "permutations": scorer.permutations,
        "max_input_tokens": scorer.max_input_tokens,
        "resident_tokens": len(own.resident),
        "rows_per_document": sum(
            len(choices.branchings) for plan in orders for choices in plan.choices
        ),
        "fields": [
            {
                "field": each.name,
                "kind": each.kind.value,
                "choices": len(each.choices),
                "suffix_tokens": own.suffix_tokens(each),
                "rows": len(choices.branchings),
            }
            for each, choices in zip(schema.fields, own.choices, strict=True)
        ],
    }


def _counted(
    rejections: _Rejections, tokens: "TokenCounts", ids: "RepeatedIds", limit: int
) -> dict[str, Any]:
    return {
        "documents": rejections.records,
        "accepted": rejections.records - rejections.total,
        "rejected": rejections.total,
        "rejected_by_code": dict(sorted(rejections.by_code.items())),
        "tokens": {
            "median": tokens.percentile(50),
            "p95": tokens.percentile(95),
            "max": tokens.percentile(100),
        },
        "over_limit": tokens.over(limit),
        "repeated_ids": {"count": ids.count, "first": ids.first, "all_compared": ids.complete},
    }
