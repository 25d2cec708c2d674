"""The command that shows answers, and writes them to files."""

from typing import Annotated, Literal

import typer

from weighbridge.deployments.cli.answer_forms import SHOWN, ChosenAnswers
from weighbridge.deployments.cli.options import DatabaseOption, JsonOption, RunArgument
from weighbridge.deployments.cli.reading import chosen_run, reading_store
from weighbridge.deployments.cli.result_options import (
    FORM,
    DecimalOption,
    EscapeOption,
    ExcelOption,
    FormatOption,
    OutputOption,
    SeparatorOption,
    probability,
    spreadsheet_style,
    written_format,
)
from weighbridge.deployments.console import print_answer

_WHICH = "Which answers"
_ORDER = "Order and part"


def results(
    run: RunArgument = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this field; may be given several times.",
            rich_help_panel=_WHICH,
            show_default=False,
        ),
    ] = None,
    value: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUE",
            help="Only answers with this value; of several given, any of them.",
            rich_help_panel=_WHICH,
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only documents whose answer to a field is this; of several given, all hold.",
            rich_help_panel=_WHICH,
            show_default=False,
        ),
    ] = None,
    min_probability: Annotated[
        float | None,
        typer.Option(
            parser=probability,
            metavar="P",
            help="At least so probable, from 0 to 1.",
            rich_help_panel=_WHICH,
            show_default=False,
        ),
    ] = None,
    max_probability: Annotated[
        float | None,
        typer.Option(
            parser=probability,
            metavar="P",
            help="At most so probable, from 0 to 1.",
            rich_help_panel=_WHICH,
            show_default=False,
        ),
    ] = None,
    external_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Only the document with this id.",
            rich_help_panel=_WHICH,
            show_default=False,
        ),
    ] = None,
    uncertain: Annotated[
        bool,
        typer.Option("--uncertain", help="The least probable first.", rich_help_panel=_ORDER),
    ] = False,
    sort: Annotated[
        Literal["position", "probability", "margin", "field"] | None,
        typer.Option(
            metavar="BY",
            help="By position (of the document), probability, margin or field.",
            rich_help_panel=_ORDER,
            show_default=False,
        ),
    ] = None,
    descending: Annotated[
        bool, typer.Option("--descending", help="From the other end.", rich_help_panel=_ORDER)
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"At most so many; {SHOWN} in a table, else all.",
            rich_help_panel=_ORDER,
            show_default=False,
        ),
    ] = None,
    offset: Annotated[
        int, typer.Option(min=0, help="Leave out so many.", rich_help_panel=_ORDER)
    ] = 0,
    count: Annotated[
        bool, typer.Option("--count", help="Only how many there are.", rich_help_panel=FORM)
    ] = False,
    wide: Annotated[
        bool,
        typer.Option(
            "--wide",
            help="A row for each document, a column for each field.",
            rich_help_panel=FORM,
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Probabilities at this temperature instead of the run's.",
            rich_help_panel=FORM,
            show_default=False,
        ),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="COLUMN",
            help="Add a column of the documents' metadata; several, or some with commas.",
            rich_help_panel=FORM,
            show_default=False,
        ),
    ] = None,
    format: FormatOption = None,
    output: OutputOption = None,
    excel: ExcelOption = False,
    escape_formulas: EscapeOption = False,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    as_json: JsonOption = False,
    database: DatabaseOption = None,
) -> None:
    """Show the answers of a run, or write them to a file.

    The probability is at the run's temperature. The margin is the distance of
    the two best choices in logits: near 0 the answer is a coin toss.

    Of a document that is one row (--wide), a filter holds when one of its
    answers is such; --field then says which fields are columns. Its probability
    is that of the least probable of them.

    --where chooses documents by other fields than are shown. Without --field the
    bounds of the probability are those of the answers that --where names.

    Example: weighbridge results 3 --field topic --uncertain --limit 20

    Example: weighbridge results --wide --output answers.csv

    Example: weighbridge results --wide --where urgent=true --min-probability 0.8
    """
    order = _order(sort, uncertain=uncertain)
    style = spreadsheet_style(
        excel=excel, escape_formulas=escape_formulas, separator=separator, decimal=decimal
    )
    if count and temperature is not None:
        raise typer.BadParameter("--temperature changes no count: leave out one of the two")
    chosen = written_format(format, output, style, as_json=as_json, count=count)
    if wide and order not in ("position", "probability"):
        raise typer.BadParameter(
            f"--wide rows are documents, which have no one {order}: leave out --sort, "
            "or take --uncertain"
        )
    from weighbridge.db import AnswerFilter, AnswerPage

    only = AnswerFilter(
        tuple(field or ()),
        tuple(value or ()),
        min_probability,
        max_probability,
        external_id,
        _where(where or []),
    )
    columns = [name.strip() for each in with_ or [] for name in each.split(",") if name.strip()]
    page = AnswerPage(order, descending, limit, offset)
    with reading_store(database) as engine:
        run_id = chosen_run(engine, run)
        answers = ChosenAnswers(
            engine, run_id, only, wide=wide, temperature=temperature, columns=columns
        )
        if count:
            print_answer(str(answers.count()))
        elif chosen is None:
            answers.print_page(page)
        else:
            answers.write(page, chosen, output, style)


def _order(
    sort: Literal["position", "probability", "margin", "field"] | None, *, uncertain: bool
) -> Literal["position", "probability", "margin", "field"]:
    if uncertain and sort not in (None, "probability"):
        raise typer.BadParameter(f"--uncertain sorts by probability: leave out --sort {sort}")
    return "probability" if uncertain else sort or "position"


def _where(given: list[str]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for each in given:
        field, mark, value = each.partition("=")
        if not (field and mark):
            raise typer.BadParameter(
                f"--where takes FIELD=VALUE, such as urgent=true, got {each!r:.80}"
            )
        if found.setdefault(field, value) != value:
            raise typer.BadParameter(
                f"--where {field:.80} cannot be both {found[field]!r:.80} and {value!r:.80}: "
                f"for either of them, --field {field:.80} with --value for each"
            )
    return tuple(found.items())
