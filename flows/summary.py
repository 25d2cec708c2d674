"""The summary of a run as markdown: answers, temperature, time, and what it was made with.

Holds counts and names only: nothing of a document, no metadata. The names of fields and
choices are the user's own and may hold anything, so each is made harmless first.
"""

import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from weighbridge.db.queries import FieldValue, RunDetails, RunField
from weighbridge.flows.stages import STAGES, Stage
from weighbridge.scorer.temperature import TemperatureKind

MAX_ROWS = 12
"""Answers shown of a field; a field may have 255 choices."""

MAX_FIELDS = 100
_MAX_NAME = 60
_MAX_LISTED = 8
_BAR_WIDTH = 16
_SHOWN_SECONDS = 0.005
_PUNCTUATION = re.compile(r"([\\`*_{}\[\]()#+!|~$^=-])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}

_KINDS = {
    TemperatureKind.FITTED: "Fitted on held-out answers of these very weights, so that on "
    "documents like those a probability tells how often the answer is right. Yours may differ.",
    TemperatureKind.TRANSFERRED: "Fitted for other weights and carried over. Whether the "
    "probabilities are calibrated for this checkpoint is not known.",
    TemperatureKind.UNFITTED: "This release came without a fitted temperature: the probabilities "
    "are the model's own weighing of the choices, not calibrated.",
    TemperatureKind.EXPLICIT: "Given by whoever started the run. The probabilities are calibrated "
    "only if it was fitted for this checkpoint.",
    TemperatureKind.DEFAULT: "Nothing is known about this checkpoint, so the logits are as they "
    "are: the probabilities are the model's own weighing of the choices, not calibrated.",
}


@dataclass(frozen=True)
class Facts:
    """What the summary of a run is written from.

    Attributes:
        details: The run, with the sums over its batches.
        answers: How often each field had each value, fields in order.
        fields: The fields with all their choices, in order.
        codes: How many documents were rejected, by code.
        flip_rate: Mean over the answers, None for a single order of the choices.
        stages: Seconds of each stage in this process; they add up to what it took.
        hidden: Seconds of stages that went by while something was scored, beside those.
        store: The store's file, None for another database.
        output: The file that the answers were written to, None if none was asked for.
    """

    details: RunDetails
    answers: Sequence[FieldValue]
    fields: Sequence[RunField]
    codes: Mapping[str, int] = field(default_factory=dict[str, int])
    flip_rate: float | None = None
    stages: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
    hidden: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
    store: str | None = None
    output: str | None = None


def summary_markdown(facts: Facts) -> str:
    """Write the summary of a run.

    Args:
        facts: What is known of it.
    """
    parts = (_counts, _answers, _temperature, _time, _made_with, _commands)
    return "\n".join(line for part in parts for line in part(facts))


def plain(text: str, width: int = _MAX_NAME) -> str:
    """Make a name one short line: no control characters, nothing that turns the text around."""
    visible = "".join(
        # Format characters (Cf) may hide or reverse what stands beside them.
        " " if unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp"} else character
        for character in text[: 4 * width]
    )
    line = " ".join(visible.split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[: width - 1]}…"


def inline(text: str) -> str:
    """Make a name harmless in markdown, within a table cell too: neither markup nor tags."""
    escaped = _PUNCTUATION.sub(r"\\\1", plain(text))
    return "".join(_ENTITIES.get(character, character) for character in escaped)


def code_span(text: str) -> str:
    """Write a text as code, in its own length; a table needs its bars escaped."""
    line = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{padding}{line}{padding}{fence}".replace("|", "\\|")


def documents(count: int) -> str:
    """Count documents in words."""
    return f"{count:,} document{'' if count == 1 else 's'}"


def _counts(facts: Facts) -> Iterator[str]:
    run = facts.details.summary
    rate = run.documents / run.seconds if run.seconds else 0.0
    yield f"# Run {run.run_id}: {inline(run.schema)}"
    yield ""
    if run.status != "completed":
        yield f"This run is **{run.status}**; what stands here was recorded before."
        yield ""
    yield (
        f"**{documents(run.documents)}**: {run.scored:,} scored, {run.reused:,} reused, "
        f"{run.rejected:,} rejected in {run.seconds:,.1f} s ({rate:,.1f} documents/s)."
    )
    yield ""
    if facts.codes:
        codes = ", ".join(f"{count:,} × `{code}`" for code, count in facts.codes.items())
        yield f"Rejected: {codes}."
        yield ""


def _answers(facts: Facts) -> Iterator[str]:
    yield "## Answers"
    yield ""
    if not facts.answers:
        yield "None: no document was scored."
        yield ""
        return
    known = {each.name: each for each in facts.fields}
    grouped = [(name, list(rows)) for name, rows in groupby(facts.answers, attrgetter("field"))]
    for name, answers in grouped[:MAX_FIELDS]:
        yield from _field(name, answers, known.get(name))
    if len(grouped) > MAX_FIELDS:
        yield f"{len(grouped) - MAX_FIELDS} more fields are not shown."
        yield ""


def _field(name: str, answers: list[FieldValue], known: RunField | None) -> Iterator[str]:
    total = sum(answer.count for answer in answers)
    choices = known.choices if known else ()
    shown = answers[:MAX_ROWS]
    if answers[0].kind == "score":
        # Levels read from low to high, whichever is the most frequent.
        shown.sort(key=lambda answer: _place(choices, answer.value))
    yield f"### {inline(name)}"
    yield ""
    yield "| answer | documents | share | mean probability |"
    yield "|---|--:|---|--:|"
    for answer in shown:
        share = answer.count / total
        yield (
            f"| {inline(answer.value)} | {answer.count:,} | `{_bar(share)}` {share:.0%} "
            f"| {answer.mean_probability:.2f} |"
        )
    yield ""
    if left := answers[MAX_ROWS:]:
        count = sum(answer.count for answer in left)
        yield f"{len(left)} more answers, given to {documents(count)}, are not shown."
        yield ""
    given = {answer.value for answer in answers}
    if never := [choice for choice in choices if choice not in given]:
        more = len(never) - _MAX_LISTED
        listed = ", ".join(inline(choice) for choice in never[:_MAX_LISTED])
        yield f"Never answered: {listed}{f' and {more} more' if more > 0 else ''}."
        yield ""


def _place(choices: Sequence[str], value: str) -> int:
    return choices.index(value) if value in choices else len(choices)


def _bar(share: float) -> str:
    filled = min(round(share * _BAR_WIDTH), _BAR_WIDTH)
    # What is left is blank, but not collapsed: its background is the bar's track.
    return "█" * filled + "\u00a0" * (_BAR_WIDTH - filled)


def _temperature(facts: Facts) -> Iterator[str]:
    run = facts.details.summary
    yield "## How far to trust a probability"
    yield ""
    # The source names the kind first.
    yield f"Temperature **{run.temperature:g}** ({inline_sentence(run.temperature_source)})."
    yield ""
    yield _KINDS[TemperatureKind(run.temperature_kind)]
    yield ""
    if run.permutations > 1:
        yield (
            f"Each document was asked in {run.permutations} orders of the choices, and the "
            "answers were averaged."
        )
        yield ""
    if facts.flip_rate is not None:
        yield (
            f"Flip rate **{facts.flip_rate:.2f}**: of {run.permutations} orders of the choices, "
            "this share disagreed with the answer. 0 is stable. The view `stability` has it for "
            "each answer."
        )
        yield ""


def inline_sentence(text: str) -> str:
    """Make a sentence of ours, which may quote names, harmless in markdown."""
    return "".join(_ENTITIES.get(each, each) for each in plain(text, 400)).replace("|", "\\|")


def _time(facts: Facts) -> Iterator[str]:
    details = facts.details
    whole = sum(facts.stages.values()) or 1.0
    yield "## Time"
    yield ""
    yield "| stage | seconds | share |"
    yield "|---|--:|---|"
    for stage, name in STAGES.items():
        seconds = facts.stages.get(stage, 0.0)
        share = seconds / whole
        yield f"| {name} | {seconds:,.2f} | `{_bar(share)}` {share:.0%} |"
    yield ""
    if (hidden := sum(facts.hidden.values())) >= _SHOWN_SECONDS:
        yield (
            f"Another {hidden:,.2f} s of reading, planning, recording and telling went by while "
            "documents were scored."
        )
        yield ""
    tokens = (details.prefix_tokens or 0) + (details.suffix_tokens or 0)
    if tokens:
        kept = details.resident_tokens or 0
        yield (
            f"{tokens:,} prompt tokens were computed in {details.batches:,} "
            f"batch{'' if details.batches == 1 else 'es'}"
            + (f"; {kept:,} more came from a prefix kept in memory." if kept else ".")
        )
        yield ""


def _made_with(facts: Facts) -> Iterator[str]:
    details, run = facts.details, facts.details.summary
    dtype = "" if run.dtype in run.backend else f", {run.dtype}"
    yield "## Made with"
    yield ""
    yield f"- checkpoint {inline(run.checkpoint)} (`{details.fingerprint[:12]}`)"
    for source in filter(None, (run.checkpoint_source, run.adapter_source)):
        yield f"- from {inline(source)}"
    if run.accepted_prompt_sha256:
        yield (
            "- **a system text that is not the trained one**, accepted by hand "
            f"(`{run.accepted_prompt_sha256[:12]}`)"
        )
    yield f"- schema {inline(run.schema)} (`{details.schema_sha256[:12]}`)"
    yield f"- backend {inline(run.backend)}{dtype}"
    yield f"- prompt {run.layout}, {run.encoding} (`{details.prompt_version}`)"
    yield f"- {', '.join(f'{name} {value}' for name, value in details.versions.items())}"
    yield ""


def _commands(facts: Facts) -> Iterator[str]:
    run = facts.details.summary
    store = f" --db {shlex.quote(facts.store)}" if facts.store else ""
    yield "## The answers themselves"
    yield ""
    # A browser opens no file:// link from a page that came over http, hence commands.
    yield f"They stay on {code_span(run.host)}, outside of Prefect. There:"
    yield ""
    yield f"    weighbridge results {run.run_id}{store}"
    yield f"    weighbridge show {run.run_id}{store}"
    if run.rejected:
        yield f"    weighbridge rejected {run.run_id}{store}"
    if facts.output:
        yield ""
        yield f"Written to {code_span(facts.output)}."
