"""The page on deploying shows commands and options that exist."""

import re
import runpy
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands_of(page: str) -> list[list[str]]:
    """Return the words of each of our commands in the code blocks of a page."""
    blocks = re.findall(r"(?m)^    (?:[^\n]+\n(?: {4}|\n(?= {4}))?)+", page)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if " weighbridge " in f" {line}"]
    return [words[words.index("weighbridge") + 1 :] for words in found if "weighbridge" in words]


def test_the_page_on_deploying_shows_commands_that_exist():
    tree = runpy.run_path(str(ROOT / "docs" / "generate.py"))["commands"]()
    known = {name: command for name, command, _ in tree}
    found = commands_of((ROOT / "docs" / "deploying.md").read_text(encoding="utf-8"))
    names: set[str] = set()
    for words in found:
        name = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in known)
        options = {each for given in known[name].params for each in given.opts}
        options |= {each for given in known[name].params for each in given.secondary_opts}
        assert {word for word in words if word.startswith("-")} <= options, words
        names.add(name)
    assert {"deploy", "worker start", "trigger", "worker install", "db backup"} <= names
    # Negative control: a command that goes on in the next line is read whole.
    assert commands_of("x\n\n    weighbridge a \\\n        --b\n\ny\n") == [["a", "--b"]]
