"""Shows a prompt as the model gets it: its exact text and tokens, and what may be answered."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, chop_cells

from weighbridge.deployments.console import answer_console, print_answer, printable

if TYPE_CHECKING:
    from weighbridge.scorer.plan import PromptPart, SchemaPlan
    from weighbridge.scorer.schema import Field

_MEANING = {
    "resident prefix": "the same for all documents, computed once",
    "document": "computed once per document",
    "suffix": "the same for all documents, asks for the field",
}
_WIDTH = 76


def prompt_json(plan: "SchemaPlan", text: str, field: "Field") -> dict[str, Any]:
    """Return the prompt of one field of a document, as `--json` shows it.

    Args:
        plan: The schema on its tokenizer.
        text: A document that the plan accepts.
        field: The field.
    """
    parts = plan.parts(text, field)
    choices = plan.choices[plan.schema.fields.index(field)]
    shown = {
        "resident prefix": parts.resident,
        "document": parts.document,
        "suffix": parts.suffix,
    }
    return {
        "field": field.name,
        "tokens": len(parts.tokens),
        "text": parts.text,
        "token_ids": list(parts.tokens),
        "parts": [_part(name, part) for name, part in shown.items()],
        "rows": [
            {
                "path": [_token(plan, token) for token in branching.path],
                "candidates": [_token(plan, token) for token in branching.candidates],
            }
            for branching in choices.branchings
        ],
        "choices": [
            {
                "choice": key,
                "said_as": choices.codes[number] if choices.codes else word,
                "way": [
                    {
                        "row": row,
                        **_token(plan, choices.branchings[row].candidates[candidate]),
                    }
                    for row, candidate in choices.steps[number]
                ],
            }
            for number, (key, word) in enumerate(zip(field.keys, field.words, strict=True))
        ],
    }


def print_prompts(head: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> None:
    r"""Print the prompts of a document, with what is the same as before said only once.

    A line break of the prompt is shown as `\n` and broken there; what a terminal would
    act on is escaped.

    Args:
        head: Position, line and id of the document.
        prompts: What `prompt_json` returned, field by field.
    """
    where = [f"position {head['position']}"]
    where += [f"line {head['line']}"] if head["line"] is not None else []
    where += [f"id {head['external_id']}"] if head["external_id"] is not None else []
    print_answer(f"document at {', '.join(where)} (the first position is 0)")
    seen: dict[str, Any] = {}
    for prompt in prompts:
        print_answer()
        print_answer(f"field {prompt['field']}: {prompt['tokens']} tokens")
        for part in prompt["parts"]:
            name = part["part"]
            print_answer()
            heading = f"{name}, {_count(part['token_ids'], 'token')}: {_MEANING[name]}"
            if seen.get(name) == part and name != "suffix":
                print_answer(f"{heading} (as above)")
                continue
            print_answer(heading)
            seen[name] = part
            _print_part(part)
        print_answer()
        _print_answers(prompt)


def _part(name: str, part: "PromptPart") -> dict[str, Any]:
    return {"part": name, "text": part.text, "token_ids": list(part.tokens)}


def _token(plan: "SchemaPlan", token: int) -> dict[str, Any]:
    return {"token": token, "text": plan.token_text(token)}


def _print_part(part: Mapping[str, Any]) -> None:
    for line in _lines(part["text"]):
        print_answer(f"  | {line}")
    if part["token_ids"]:
        ids = " ".join(map(str, part["token_ids"]))
        for line in textwrap.wrap(f"tokens {ids}", _WIDTH, subsequent_indent="       "):
            print_answer(f"  {line}")


def _lines(text: str) -> Iterator[str]:
    """Cut a text behind its line breaks, and on a terminal where a line is full."""
    console = answer_console()
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        escaped = printable(line)
        if console.is_terminal and cell_len(escaped) > console.width - 4:
            yield from chop_cells(escaped, console.width - 4)
        else:
            yield escaped


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _print_answers(prompt: Mapping[str, Any]) -> None:
    rows = prompt["rows"]
    print_answer(f"answers, {_count(rows, 'row')}: the tokens whose logits are read")
    for number, row in enumerate(rows):
        said = "".join(token["text"] for token in row["path"])
        behind = f"behind {said!r}" if said else "behind the prompt"
        print_answer(f"  row {number}, {behind}")
        for token in row["candidates"]:
            print_answer(f"    {token['token']:>7}  {token['text']!r}")
    for choice in prompt["choices"]:
        way = ", ".join(f"row {step['row']} {step['text']!r}" for step in choice["way"])
        as_word = "" if choice["said_as"] == choice["choice"] else f" as {choice['said_as']!r}"
        print_answer(f"  {choice['choice']}{as_word}: {way or 'the only choice'}")
