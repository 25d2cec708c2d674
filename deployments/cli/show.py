"""The command that shows one run, or one document in every run it is in."""

import re
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighbridge.deployments.cli.options import DatabaseOption, JsonOption
from weighbridge.deployments.cli.reading import chosen_run, counted, reading_store, shown
from weighbridge.deployments.cli.runs import run_values
from weighbridge.deployments.console import (
    Column,
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_pairs,
    print_table,
    printable,
)
from weighbridge.deployments.errors import CommandError
from weighbridge.deployments.report import beginning, print_distribution

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from weighbridge.db import ItemDetails, RunDetails

_PLACE = re.compile(r"(\d{1,18}):(\d{1,18})")
_NUMBER = re.compile(r"\d{1,18}")
_CHOICE_COLUMNS = (
    Column("field"),
    Column("choice"),
    Column("probability", "right", digits=3),
    Column("logit", "right", digits=2),
    Column("margin", "right", digits=2),
    Column("flip rate", "right", digits=2),
)
_CODE_COLUMNS = (Column("rejected as"), Column("documents", "right"))
_STARTS = 12
_BEGINNING = 60
_LINE = 66
_SHOWN = 5


def show(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|DOC",
            help="Number of a run, id of a document, or RUN:POSITION; the latest run if left out.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[
        bool,
        typer.Option("--document", help="Take it for a document's id, even if it is a run's too."),
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="The whole text of the document.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"At most so many runs of a document; {_SHOWN} unless as JSON.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Show a run, or a document in every run it is in.

    A number that is a run's shows the run; anything else is the id of a document.
    A document without an id is shown as RUN:POSITION, which results has.

    Example: weighbridge show 3

    Example: weighbridge show T-1047 --text
    """
    if document and what is None:
        raise typer.BadParameter("--document needs the id of one")
    with reading_store(database) as engine:
        run = None if document else _run(engine, what)
        if run is not None:
            _show_run(engine, run, as_json=as_json)
        else:
            _show_document(engine, str(what), text=text, limit=limit, as_json=as_json)


def _run(engine: "Engine", what: str | None) -> int | None:
    """Give the run that is meant, None for a document."""
    from weighbridge.db import RunRefused, existing_run

    if what is None:
        return chosen_run(engine, None)
    if _NUMBER.fullmatch(what):
        try:
            return existing_run(engine, int(what))
        except RunRefused:
            return None
    return None


def _show_run(engine: "Engine", run_id: int, *, as_json: bool) -> None:
    from weighbridge.db import (
        answer_distribution,
        mean_flip_rate,
        rejected_codes,
        run_details,
        schema_view,
    )

    details = run_details(engine, run_id)
    view = schema_view(engine, run_id)
    answers = answer_distribution(engine, run_id)
    codes = rejected_codes(engine, run_id)
    flip_rate = mean_flip_rate(engine, run_id) if details.summary.permutations > 1 else None
    if as_json:
        rest = {name: value for name, value in asdict(details).items() if name != "summary"}
        rest["resumed_at"] = details.resumed_at and details.resumed_at.isoformat()
        print_json(
            {
                **run_values(details.summary),
                **rest,
                "documents_per_second": _rate(details),
                "flip_rate": flip_rate,
                "view": view.name,
                "view_remark": view.remark,
                "answers": [asdict(each) for each in answers],
                "rejected_codes": codes,
            }
        )
        return
    print_pairs(_run_lines(details, flip_rate, view.name or "none"))
    if answers:
        print_answer()
        print_distribution(answers)
    if codes:
        print_answer()
        rows = [{"rejected as": code, "documents": count} for code, count in codes.items()]
        print_table(_CODE_COLUMNS, rows)
    if view.remark:
        print_note(view.remark)
    if answers:
        print_hint(f"weighbridge results {run_id} shows each answer")


def _run_lines(details: "RunDetails", flip_rate: float | None, view: str) -> list[tuple[str, str]]:
    run = details.summary
    started = run.started_at.astimezone()
    rate = _rate(details)
    # Kind and dtype are columns of their own, and often stand in the words beside them too.
    source = run.temperature_source.removeprefix(f"{run.temperature_kind}: ")
    on_backend = f"{run.dtype} on {run.backend}"
    lines = [
        ("run", f"{run.run_id}, {run.name}"),
        ("status", f"{run.status}{f': {run.message}' if run.message else ''}"),
        ("started", f"{started:%Y-%m-%d %H:%M:%S} on {run.host}"),
        *_source_lines(run.documents_source),
        (
            "documents",
            f"{run.documents:,}: {run.scored:,} scored, {run.reused:,} reused, "
            f"{run.rejected:,} rejected"
            + (f" ({run.wasted:,} scored in vain)" if run.wasted else ""),
        ),
        ("seconds", f"{run.seconds:.1f}" + (f", {rate:.1f} documents/s" if rate else "")),
        ("schema", f"{run.schema} ({details.schema_sha256[:_STARTS]})"),
        ("view", view),
        ("checkpoint", f"{run.checkpoint} ({details.fingerprint[:_STARTS]})"),
        *(("from", each) for each in (run.checkpoint_source, run.adapter_source) if each),
        ("temperature", f"{run.temperature:g} ({run.temperature_kind}): {source}"),
        ("asked", f"{run.layout}, {run.encoding}, mode {run.mode}, contract {run.contract}"),
        ("computed", run.backend if run.dtype in run.backend.split() else on_backend),
    ]
    if run.accepted_prompt_sha256:
        lines.append(
            ("prompt", f"accepted, not the trained one ({run.accepted_prompt_sha256[:_STARTS]})")
        )
    if run.permutations > 1:
        rate_text = "" if flip_rate is None else f", flip rate {flip_rate:.2f}"
        lines.append(("orders", f"{run.permutations} of the choices{rate_text}"))
    if details.total_seconds is not None:
        lines.append(("timings", _timings(details)))
    if details.peak_bytes is not None:
        lines.append(("peak memory", f"{details.peak_bytes / 2**20:,.0f} MiB"))
    if not details.store_text:
        lines.append(("texts", "not kept"))
    return lines


def _source_lines(source: str) -> list[tuple[str, str]]:
    """Fold what is longer than a line: a query may be; a path without blanks stays whole."""
    folded = wrap(printable(source), _LINE, break_long_words=False, break_on_hyphens=False)
    first, *rest = folded or [source]
    return [("source", first), *(("", line) for line in rest)]


def _timings(details: "RunDetails") -> str:
    parts = [
        f"{seconds:.1f} s {stage}"
        for seconds, stage in (
            (details.prefill_seconds, "prefill"),
            (details.branch_seconds, "branches"),
            (details.total_seconds, "scoring in all"),
        )
        if seconds is not None
    ]
    batches = "1 batch" if details.batches == 1 else f"{details.batches:,} batches"
    return f"{', '.join(parts)}, in {batches}"


def _rate(details: "RunDetails") -> float | None:
    run = details.summary
    return round(run.documents / run.seconds, 3) if run.seconds > 0 else None


def _show_document(
    engine: "Engine", what: str, *, text: bool, limit: int | None, as_json: bool
) -> None:
    from weighbridge.db import count_items, document_items, item_details

    most = limit if limit is not None or as_json else _SHOWN
    found = document_items(engine, what, limit=most)
    total = len(found) if most is None else count_items(engine, what)
    if not found and (place := _PLACE.fullmatch(what)):
        one = item_details(engine, int(place[1]), int(place[2]))
        found, total = ([one], 1) if one else ([], 0)
    if not found:
        raise CommandError(
            f"there must be a run or a document of this name, and there is no {what!r:.80}",
            hint=_missed(engine, what),
        )
    if as_json:
        print_json([_item_values(item) for item in found])
        return
    for place, item in enumerate(found):
        if place:
            print_answer()
        _print_item(item, whole=text)
    if len(found) < total:
        print_note(f"{len(found)} of {counted(total, 'run')} with it, the latest")
        print_hint(f"--limit {total} shows all of them")


def _missed(engine: "Engine", what: str) -> str:
    """Say what may have been meant by a name that nothing has."""
    from weighbridge.db import latest_run_id
    from weighbridge.db.near_ids import near_ids

    hints = ["list runs with: weighbridge runs; ids with: weighbridge results"]
    if near := near_ids(engine, what):
        hints.insert(0, f"did you mean {' or '.join(f'{each:.80}' for each in near)}?")
    latest = latest_run_id(engine)
    if latest is not None and _NUMBER.fullmatch(what):
        hints.append(f"a document by its place is RUN:POSITION, such as {latest}:{what}")
    return "\n".join(hints)


def _item_values(item: "ItemDetails") -> dict[str, Any]:
    return {**asdict(item), "started_at": item.started_at.isoformat()}


def _print_item(item: "ItemDetails", *, whole: bool) -> None:
    lines = [
        ("document", f"{shown(item.external_id) or 'without an id'}, position {item.position}"),
        ("run", f"{item.run_id}, {item.started_at.astimezone():%Y-%m-%d %H:%M}, {item.status}"),
        ("schema", item.schema),
        ("checkpoint", f"{item.checkpoint}, temperature {item.temperature:g}"),
    ]
    if item.line is not None:
        lines.append(("line", str(item.line)))
    if item.code is not None:
        lines.append(("rejected", f"{item.code}: {item.message}"))
    lines += [
        (f"metadata {printable(str(shown(name)))}", str(shown(str(value))))
        for name, value in (item.metadata or {}).items()
    ]
    if item.document_sha256 is not None:
        characters = f"{item.characters:,} characters, {item.document_sha256[:_STARTS]}"
        lines.append(("content", characters))
        if not whole:
            kept = "not kept" if item.text is None else beginning(item.text, _BEGINNING)
            lines.append(("text", kept))
    print_pairs(lines)
    if item.answers:
        print_answer()
        rows = _choice_rows(item)
        # A single order of the choices has no flip rate.
        shown_columns = [
            column
            for column in _CHOICE_COLUMNS
            if column.name != "flip rate" or any(row.get("flip rate") is not None for row in rows)
        ]
        print_table(shown_columns, rows)
    if whole and item.document_sha256 is not None:
        print_answer()
        for line in (item.text or "the text was not kept").split("\n"):
            print_answer(line)


def _choice_rows(item: "ItemDetails") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for answer in item.answers:
        first = {"margin": answer.margin, "flip rate": answer.flip_rate}
        ordered = sorted(
            answer.choices, key=lambda each: (each.choice != answer.value, -each.logit)
        )
        for place, choice in enumerate(ordered):
            row = {
                "field": shown(answer.field) if not place else None,
                "choice": shown(choice.choice),
                "probability": choice.probability,
                "logit": choice.logit,
            }
            rows.append(row if place else {**row, **first})
    return rows
