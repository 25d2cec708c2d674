"""What `validate` prints: what a schema costs, and what would become of the documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from weighbridge.deployments.console import (
    Column,
    print_answer,
    print_hint,
    print_note,
    print_pairs,
    print_table,
)

_FIELD_COLUMNS = (
    Column("field"),
    Column("kind"),
    Column("choices", "right"),
    Column("suffix tokens", "right"),
    Column("rows", "right"),
)
_IDS = 5
_ID_WIDTH = 40
_REJECTION_COLUMNS = (
    Column("position", "right"),
    Column("line", "right"),
    Column("id"),
    Column("code"),
    Column("message"),
)


def print_costs(costs: Mapping[str, Any]) -> None:
    """Print what a schema costs: tokens that stay, tokens and rows that come with a document."""
    orders = costs["permutations"]
    print_pairs(
        [
            ("schema", f"{costs['schema'] or 'inline'}, sha256 {costs['sha256'][:12]}"),
            ("checkpoint", f"{costs['checkpoint']}, {costs['layout']}, {costs['encoding']}"),
            *([("orders", f"{orders} of the choices, averaged")] if orders > 1 else []),
            (
                "prompt",
                f"{costs['resident_tokens']} tokens are the same for all documents; "
                f"{costs['rows_per_document']} rows per document",
            ),
        ]
    )
    print_answer()
    print_table(
        _FIELD_COLUMNS,
        [{**each, "suffix tokens": each["suffix_tokens"]} for each in costs["fields"]],
    )


def print_counts(counted: Mapping[str, Any], limit: int) -> None:
    """Print how many documents there are, how many would be rejected, and how long they are."""
    print_answer()
    tokens = counted["tokens"]
    pairs = [
        ("documents", str(counted["documents"])),
        ("accepted", str(counted["accepted"])),
        ("rejected", str(counted["rejected"])),
        *((f"  {code}", f"  {count}") for code, count in counted["rejected_by_code"].items()),
    ]
    if tokens["max"] is not None:
        spread = ", ".join(f"{name} {value}" for name, value in tokens.items())
        pairs.append(("tokens", f"{spread}; {counted['over_limit']} over the limit of {limit}"))
    print_pairs(pairs)
    _tell_repeated(counted["repeated_ids"])


def _tell_repeated(repeated: Mapping[str, Any]) -> None:
    """Say which ids are not those of one document alone, which a join would multiply."""
    if count := repeated["count"]:
        names = [
            name if len(name) <= _ID_WIDTH else f"{name[: _ID_WIDTH - 1]}…"
            for name in repeated["first"][:_IDS]
        ]
        more = ", …" if count > len(names) else ""
        come = "id comes" if count == 1 else "ids come"
        print_note(f"{count:,} {come} more than once: {', '.join(names)}{more}")
    if not repeated["all_compared"]:
        print_note("only the first 1,000,000 different ids are compared with the others")


def print_rejections(
    first: Mapping[str, Sequence[Mapping[str, Any]]], by_code: Mapping[str, int]
) -> None:
    """Print the first documents that would be rejected for each reason, and how many follow.

    Args:
        first: Some of them, by code.
        by_code: How many there are.
    """
    if not by_code:
        return
    print_answer()
    shown = [entry for entries in first.values() for entry in entries]
    print_table(_REJECTION_COLUMNS, [{**each, "id": each["external_id"]} for each in shown])
    more = {code: by_code[code] - len(entries) for code, entries in first.items()}
    for code, count in more.items():
        if count:
            print_answer(f"… and {count} more {code}")
    if any(more.values()):
        print_hint("--json lists them all")
