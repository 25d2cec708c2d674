"""The options that `results` and `query` share: the form of what is written."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

if TYPE_CHECKING:
    from weighbridge.db import CsvStyle, ExportFormat

FORM = "Form"
SPREADSHEET = "CSV for spreadsheets"

FormatOption = Annotated[
    Literal["table", "json", "jsonl", "csv", "parquet"] | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="table, json, jsonl, csv or parquet; with --output what its name ends in.",
        rich_help_panel=FORM,
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Write to this file instead of stdout.",
        rich_help_panel=FORM,
        show_default=False,
    ),
]
ExcelOption = Annotated[
    bool,
    typer.Option(
        "--excel",
        help="CSV that Excel reads as it is: --escape-formulas, and UTF-8 marked as such.",
        rich_help_panel=SPREADSHEET,
    ),
]
EscapeOption = Annotated[
    bool,
    typer.Option(
        "--escape-formulas",
        help="' before cells that a spreadsheet would run as a formula.",
        rich_help_panel=SPREADSHEET,
    ),
]
SeparatorOption = Annotated[
    str | None,
    typer.Option(
        "--separator",
        metavar="CHARACTER",
        help="Between cells, in place of a comma: ; or | or tab.",
        rich_help_panel=SPREADSHEET,
        show_default=False,
    ),
]
DecimalOption = Annotated[
    str | None,
    typer.Option(
        "--decimal",
        metavar="MARK",
        help="Decimal mark, . or a comma, which makes the separator ; unless it is given.",
        rich_help_panel=SPREADSHEET,
        show_default=False,
    ),
]
_TABS = {"tab", "\\t", "\t"}
_UNFIT = "\"'\r\n\0.+-"


def probability(text: str) -> float:
    """Read a probability."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise typer.BadParameter(f"a number from 0 to 1, such as 0.8, got {text!r:.80}")
    return found


def spreadsheet_style(
    *, excel: bool, escape_formulas: bool, separator: str | None, decimal: str | None
) -> "CsvStyle":
    """Give the style of CSV that was asked for."""
    from weighbridge.db import CsvStyle

    if decimal not in (None, ".", ","):
        raise typer.BadParameter(f"--decimal takes . or a comma, got {decimal!r:.80}")
    if separator in _TABS:
        separator = "\t"
    if separator is None:
        separator = ";" if decimal == "," else ","
    unfit = len(separator) != 1 or not (separator.isascii() or separator.isprintable())
    if unfit or separator in _UNFIT or separator.isalnum():
        raise typer.BadParameter(
            f"--separator takes one character such as ; or | or the word tab, got {separator!r:.80}"
        )
    if separator == "," == decimal:
        raise typer.BadParameter(
            "--decimal , needs another separator than a comma: leave out --separator, or give ';'"
        )
    return CsvStyle(escape_formulas or excel, excel, separator, decimal or ".")


def written_format(
    format: str | None, output: Path | None, style: "CsvStyle", *, as_json: bool, count: bool
) -> "ExportFormat | None":
    """Give the format to write in; None is a table."""
    if count and (output is not None or format not in (None, "table", "json")):
        raise typer.BadParameter("--count prints a number: leave out --format and --output")
    if as_json and (output is not None or format not in (None, "json")):
        raise typer.BadParameter("--json prints JSON to stdout: leave out --format and --output")
    chosen = "json" if as_json else _chosen(format, output)
    if (style.byte_order_mark, style.separator, style.decimal) != (False, ",", "."):
        if chosen is None and format is None and not count:
            return "csv"
        if chosen != "csv":
            raise typer.BadParameter(
                "--excel, --separator and --decimal are for CSV: give --format csv"
            )
    return chosen


def _chosen(format: str | None, output: Path | None) -> "ExportFormat | None":
    if output is None:
        return None if format in (None, "table") else cast("ExportFormat", format)
    if format == "table":
        raise typer.BadParameter("a table is for stdout: --output takes json, jsonl, csv, parquet")
    from weighbridge.db import export_format

    # Told before anything is read: a wrong name, or a place that takes no file.
    return export_format(output, cast("ExportFormat | None", format))
