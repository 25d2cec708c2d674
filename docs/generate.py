"""Writes what the command line says of itself into docs/commands.md and README.md.

    python docs/generate.py            # write
    python docs/generate.py --check    # fail when what is there is not what would be written

In README.md only what stands between `<!-- name -->` and `<!-- /name -->` is written.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from weighbridge.deployments.cli import app
from weighbridge.deployments.cli.errors import EXIT_MEANINGS, PROGRAM, ExitCode
from weighbridge.tasks.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs" / "commands.md"
README = ROOT / "README.md"
# How Typer calls a kind of value, and how people do.
KINDS = {"<str>": "TEXT", "<int>": "N", "<int range>": "N", "<float>": "X", "<path>": "FILE"}
NOTHING_TO_SAY = {"-h, --help"}
ENDS_WITH_3 = "Ends with 3"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    stale = [path for path, text in generated().items() if text != read(path)]
    if not check:
        for path in stale:
            path.write_text(generated()[path], encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what the command line says; run: make docs")
    return 1 if stale else 0


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def generated() -> dict[Path, str]:
    """Give each file's text as it should be."""
    readme = read(README)
    for name, lines in {"exit codes": exit_codes(), "settings": settings()}.items():
        readme = with_block(readme, name, lines)
    return {COMMANDS: commands_page(), README: readme}


def with_block(text: str, name: str, lines: list[str]) -> str:
    """Replace what stands between the marks of a name.

    Raises:
        ValueError: The text has no such marks.
    """
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if block.search(text) is None:
        raise ValueError(f"README.md must have the marks <!-- {name} --> and <!-- /{name} -->")
    body = "\n".join(lines)
    return block.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text)


def exit_codes() -> list[str]:
    rows = [f"| {code.value} | {meaning} |" for code, meaning in EXIT_MEANINGS.items()]
    return ["| exit code | meaning |", "|---|---|", *rows]


def settings() -> list[str]:
    rows = [
        f"| `{ENV_PREFIX}{name.upper()}` | {field.title} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    return ["| variable | default | what it is |", "|---|---|---|", *rows]


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the command and the context of each command that does something."""
    root: Any = typer.main.get_command(app)
    yield from _below(root, root.make_context(PROGRAM, [], resilient_parsing=True))


def _below(group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    for name, command in group.commands.items():
        inner = type(context)(command, parent=context, info_name=name)
        if hasattr(command, "commands"):
            yield from _below(command, inner)
        else:
            yield f"{inner.command_path}".removeprefix(f"{PROGRAM} "), command, inner


def commands_page() -> str:
    found = list(commands())
    lines = [
        "# Commands",
        "",
        "<!-- Written by docs/generate.py from the command line itself: make docs -->",
        "",
        f"`{PROGRAM} COMMAND --help` says the same in the terminal. The answer of a command goes",
        "to stdout, progress and hints to stderr; `--json` gives one JSON value.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(
            f"| [{name}](#{anchor(name)}) | {cell(purpose(command))} |"
            for name, command, _ in found
        ),
        "",
        *exit_codes(),
        "",
        "## Shell completion",
        "",
        f"`{PROGRAM} --install-completion` teaches the shell you are in (bash, zsh, fish or",
        "PowerShell) to complete commands and options with the Tab key, from the next terminal",
        "on; `--show-completion` prints what it would install.",
        "",
    ]
    for name, command, context in found:
        lines += section(name, command, context)
    return "\n".join(lines)


def section(name: str, command: Any, context: Any) -> list[str]:
    text, examples = parts(command.help or "")
    lines = [f"## {name}", "", *text, ""]
    usage = " ".join([f"{PROGRAM} {name}", *command.collect_usage_pieces(context)])
    lines += ["```", usage, "```", ""]
    records = [(each, each.get_help_record(context)) for each in command.get_params(context)]
    for kind, title in (("argument", "argument"), ("option", "option")):
        rows = [
            f"| `{spelt(record[0])}` | {cell(record[1])} |"
            for each, record in records
            if record and each.param_type_name == kind and record[0] not in NOTHING_TO_SAY
        ]
        if rows:
            lines += [f"| {title} | meaning |", "|---|---|", *rows, ""]
    lines += ["Example:" if len(examples) == 1 else "Examples:", "", "```", *examples, "```", ""]
    rejects = ENDS_WITH_3 in cell(command.help)
    codes = [code for code in ExitCode if code != ExitCode.REJECTED or rejects]
    lines += [f"Exit codes: {', '.join(str(code.value) for code in codes)}.", ""]
    return lines


def parts(text: str) -> tuple[list[str], list[str]]:
    """Split a docstring into its text and its examples.

    Raises:
        ValueError: It has no example.
    """
    body, mark, rest = text.partition("Example:")
    if not mark:
        raise ValueError(f"each command must have an Example: line, got {text[:60]!r}")
    examples = [line.strip().removeprefix("Example:").strip() for line in rest.splitlines()]
    return body.rstrip().splitlines(), [line for line in examples if line]


def purpose(command: Any) -> str:
    """Give the first sentence of a command's help."""
    return (command.help or "").split("\n\n")[0].replace("\n", " ")


def spelt(names: str) -> str:
    """Name kinds of values as people do."""
    for typed, said in KINDS.items():
        names = names.replace(typed, said)
    return re.sub(r"^(\S+) TEXT$", r"\1", names) if not names.startswith("-") else names


def cell(text: str) -> str:
    """Keep a text in its cell of a table."""
    return re.sub(r"\bx>=", "at least ", " ".join(text.split()).replace("|", "\\|"))


def anchor(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
