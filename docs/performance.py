"""Writes docs/performance.md and docs/images/performance.svg from what `weighbridge bench` said.

weighbridge bench --output docs/performance.json
python docs/performance.py            # write
python docs/performance.py --check    # fail when the page is not what would be written
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from weighbridge.deployments.bench_contests import (
    INDEPENDENT,
    LABELLED,
    REFERENCE,
    RESIDENT,
    SWITCHED,
    SWITCHED_DOCUMENTS,
)
from weighbridge.deployments.bench_targets import held_against

FOLDER = Path(__file__).parent
MEASURED = FOLDER / "performance.json"
PAGE = FOLDER / "performance.md"
PLOT = FOLDER / "images" / "performance.svg"
SHAPES = {
    "llama": "random weights, 8 layers of width 256 with 4 heads",
    "qwen3_5": "random weights, 8 layers of width 256, 6 of them gated delta layers",
    "gemma3": "random weights, 8 layers of width 256, 6 of them with a sliding window",
    "embedded": "SmolLM2-135M-Instruct, the embedded checkpoint",
}
SWITCHED_ON = {
    "switches": f"{SWITCHED[0]} fields, {SWITCHED[1]:,} shared tokens",
    "switches-documents": f"{SWITCHED_DOCUMENTS[0]} fields, {SWITCHED_DOCUMENTS[1]} tokens",
    "labels": f"{LABELLED[0]} fields of labels, {LABELLED[1]} shared tokens",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    text = page(report)
    if check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not same:
            print("docs/performance.md is not what docs/performance.json says; run: make bench")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"written: {PAGE}")
    plot(report)
    print(f"written: {PLOT}")
    return 0


def page(report: dict[str, Any]) -> str:
    machine, rows = report["machine"], report["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    counts = sorted({row["runs"] for row in rows})
    runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    apart = [row["max_probability_difference"] for row in rows]
    same = all(row["labels_match"] for row in rows) and None not in apart
    lines = [
        "# Performance",
        "",
        "<!-- Written by docs/performance.py from docs/performance.json: make bench -->",
        "",
        f"Measured on {machine['system']}, {machine['processor']}, {machine['cpus']} CPUs, "
        f"{machine['device']} in {machine['dtype']}, {machine['blas']}{threads(machine)}; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + f". {loaded(machine)}",
        "",
        f"These figures are of the {machine['device']} named above and of no other machine. To "
        "measure another one, a Mac with Metal for example:",
        "",
        "```",
        "weighbridge bench --json --output bench.json",
        "```",
        "",
        "What is compared runs on the same weights in the same process, and takes turns. Seconds",
        f"are medians of {runs} rounds, of process CPU time; a ratio is the seconds of the other",
        "one over ours, so more is better. The reference is the published algorithm in the same",
        "library (`scorer/reference.py`): prefix prefilled in one piece, caches copied to every",
        "field, gated delta layers as mlx-lm brings them. *Independent* is the reference with a",
        "whole prompt for each field, measured on one field and counted for all.",
        "",
        "".join(
            (
                "All labels were those of the reference" if same else "**Some labels DIFFER**",
                ", and probabilities within ",
                f"{max(each for each in apart if each is not None):.1g} of it.",
            )
        ),
        "",
        *(f"- `{name}`: {SHAPES.get(name, 'a checkpoint')}" for name in models),
        "",
        "![Ratios by scenario](images/performance.svg)",
        "",
    ]
    sections = (targets, published, documents, switches, memory)
    return "\n".join([*lines, *(line for section in sections for line in section(rows, models))])


def threads(machine: dict[str, Any]) -> str:
    told = ", ".join(f"{name}={value}" for name, value in machine["threads"].items())
    return f" ({told})" if told else ""


def loaded(machine: dict[str, Any]) -> str:
    busy = machine["load"] > machine["cpus"]
    return (
        f"Others were at work on the machine (load {machine['load']}), so wall seconds are "
        "longer than they need be, and CPU seconds somewhat."
        if busy
        else f"Load of the machine at the start: {machine['load']}."
    )


def found(rows: list[dict[str, Any]], **wanted: str) -> dict[str, Any] | None:
    """Return the row with these values, None where it was not measured."""
    matching = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return next(matching, None)


def ratio(rows: list[dict[str, Any]], **wanted: str) -> str:
    row = found(rows, **wanted)
    return "" if row is None else f"{row['ratio']:.2f}"


def table(title: str, head: list[str], lines: list[list[str]]) -> list[str]:
    if not lines:
        return []
    marks = "|".join("---" if index < 2 else "--:" for index in range(len(head)))
    body = [f"| {' | '.join(line)} |" for line in lines]
    return [f"## {title}", "", f"| {' | '.join(head)} |", f"|{marks}|", *body, ""]


def scenarios(rows: list[dict[str, Any]], model: str, start: str = "") -> list[str]:
    names = dict.fromkeys(row["scenario"] for row in rows if row["model"] == model)
    return [name for name in names if name.startswith(start) and "switches" not in name]


def called(scenario: str) -> str:
    """Say a scenario as people do: 8 x 1953, or 8 fields, 30 tokens."""
    fields, _, tokens = scenario.removeprefix("documents-").partition("x")
    documents = scenario.startswith("documents-")
    return f"{fields} fields, {int(tokens):,} tokens" if documents else f"{fields} x {tokens}"


def targets(rows: list[dict[str, Any]], models: list[str]) -> list[str]:
    over = {REFERENCE: "the reference", INDEPENDENT: "independent"}
    lines = [
        [
            each.model,
            f"{called(each.target.scenario)}: `{each.target.contender}` over "
            f"{over[each.target.baseline]}",
            f"{each.least:.2f}",
            f"{each.ratio:.2f}",
            "met" if each.met else "**missed**",
        ]
        for model in models
        for each in held_against([row for row in rows if row["model"] == model])
    ]
    return table("Targets", ["model", "ratio", "target", "measured", ""], lines)


def published(rows: list[dict[str, Any]], models: list[str]) -> list[str]:
    lines: list[list[str]] = []
    for model in models:
        for name in scenarios(rows, model):
            same = {"model": model, "scenario": name}
            reference = found(rows, **same, contender=REFERENCE, baseline=INDEPENDENT)
            own = found(rows, **same, contender="parallel", baseline=REFERENCE)
            if reference is None or own is None:
                continue
            lines.append(
                [
                    model,
                    called(name),
                    f"{reference['seconds']:.3f}",
                    f"{own['seconds']:.3f}",
                    f"{own['ratio']:.2f}",
                    ratio(rows, **same, contender="auto", baseline=REFERENCE),
                    ratio(rows, **same, contender="cached_serial", baseline=REFERENCE),
                    ratio(rows, **same, contender="parallel", baseline=INDEPENDENT),
                    ratio(rows, **same, contender="auto", baseline=INDEPENDENT),
                ]
            )
    head = [
        "model",
        "fields x shared tokens",
        "reference s",
        "`parallel` s",
        "over reference",
        "`auto`",
        "`cached_serial`",
        "`parallel` over independent",
        "`auto`",
    ]
    return table("The same prompts", head, lines)


def documents(rows: list[dict[str, Any]], models: list[str]) -> list[str]:
    lines: list[list[str]] = []
    for model in models:
        for name in scenarios(rows, model, "documents-"):
            same = {"model": model, "scenario": name}
            reference = found(rows, **same, contender=REFERENCE)
            own = found(rows, **same, contender=RESIDENT, baseline=REFERENCE)
            if reference is None or own is None:
                continue
            lines.append(
                [
                    model,
                    called(name),
                    f"{1 / reference['seconds']:.2f}",
                    f"{1 / own['seconds']:.2f}",
                    f"{own['ratio']:.2f}",
                    ratio(rows, **same, contender=RESIDENT, baseline="schema-first"),
                ]
            )
    head = [
        "model",
        "documents",
        "reference, documents/s",
        "schema-first, documents/s",
        "ratio",
        "of which the resident prefix",
    ]
    made = table("Many documents", head, lines)
    return made and [
        *made,
        "Per CPU second. The reference puts the document first, so that nothing of a prompt is",
        "that of the next document; our own layout puts the questions first, in fewer words, and",
        "keeps them. Prompts are as long as those of the sample schemas triage (3 fields) and",
        "incident (8). Answers are compared with those to whole prompts in our own layout.",
        "",
    ]


def switches(rows: list[dict[str, Any]], models: list[str]) -> list[str]:
    lines = [
        [
            model,
            row["baseline"].removeprefix("without "),
            SWITCHED_ON[row["scenario"]],
            f"{row['ratio']:.2f}",
        ]
        for model in models
        for row in rows
        if (row["model"], row["contender"]) == (model, "everything")
        and row["baseline"].startswith("without ")
    ]
    made = table(
        "What each optimization brings",
        ["model", "optimization", "on", "seconds without it over seconds with it"],
        lines,
    )
    return made and [
        *made,
        "All others being there. Labels are of two tokens; documents stand behind questions that",
        "stay. Packed branches are for models that keep more than keys and values by token, or",
        "take one position for all rows: others compute all that stands behind a prefix in one",
        "pass, two or three short documents at a time on a CPU.",
        "",
    ]


def memory(rows: list[dict[str, Any]], models: list[str]) -> list[str]:
    lines: list[list[str]] = []
    for model in models:
        same = {"model": model, "scenario": "memory"}
        packed = found(rows, **same, contender="prefix packed")
        copied = found(rows, **same, contender="prefix copied")
        if packed and copied:
            share = packed["extra_bytes"] / copied["extra_bytes"]
            lines.append(
                [
                    model,
                    "32 fields, 2,048 tokens",
                    *(f"{each['extra_bytes'] / 2**20:.0f}" for each in (copied, packed)),
                    f"{share:.0%}",
                ]
            )
    head = ["model", "branches", "prefix copied, MiB", "prefix packed, MiB", "share"]
    made = table("Memory of branches", head, lines)
    return made and [
        *made,
        "What MLX held at most, beyond weights and prefix. Recurrent states of gated delta layers",
        "have no tokens to share, and are there for each field either way.",
        "",
    ]


def plot(report: dict[str, Any]) -> None:
    """Draw the ratios over the reference; needs no browser."""
    import altair  # noqa: PLC0415 - the page alone can be made and checked without it

    wanted = {"auto": "same prompts", RESIDENT: "schema-first, resident"}
    values = [
        {
            "model": row["model"],
            "scenario": row["scenario"].replace("documents-", "documents "),
            "ratio": row["ratio"],
            "layout": wanted[row["contender"]],
        }
        for row in report["rows"]
        if row["contender"] in wanted and row["baseline"] == REFERENCE
    ]
    order = list(dict.fromkeys(value["scenario"] for value in values))
    bars = altair.Chart(altair.Data(values=values)).mark_bar()
    chart = bars.encode(
        x=altair.X("ratio:Q", title="reference seconds / ours"),
        y=altair.Y("scenario:N", sort=order, title=None),
        color=altair.Color("layout:N", title=None, legend=altair.Legend(orient="bottom")),
        column=altair.Column("model:N", title=None),
    )
    PLOT.parent.mkdir(exist_ok=True)
    # A background of its own: pages are read on dark screens, too.
    chart.properties(width=230, height=190).configure(background="white").save(str(PLOT))


if __name__ == "__main__":
    sys.exit(main())
