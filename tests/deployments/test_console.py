"""What is printed cannot act on the terminal, and is whole in a pipe."""

import io
import json
import logging
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.deployments import console
from weighbridge.deployments.console import Column, printable, warnings_shown

COLUMNS = (Column("position", "right"), Column("value"), Column("probability", "right", digits=3))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("\u202eevil\u2066\u2028", "\\u202eevil\\u2066\\u2028"),
        ("\ud800\ufeff\U000e0041", "\\ud800\\ufeff\\U000e0041"),
        # Family emoji, Persian with a non-joiner and Hebrew are text, not controls.
        ("👩‍👩‍👧 می‌خواهم שלום \\n é", "👩‍👩‍👧 می‌خواهم שלום \\n é"),
    ],
)
def test_printable_escapes_controls_and_keeps_text(text: str, shown: str):
    assert printable(text) == shown


def controls(text: str) -> list[str]:
    return re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


@given(st.text(), st.text())
def test_json_is_safe_and_equal(key: str, text: str):
    out = io.StringIO()
    original, sys.stdout = sys.stdout, out
    try:
        console.print_json([{key: text}])
    finally:
        sys.stdout = original
    assert controls(out.getvalue()) == []
    out.getvalue().encode()  # no surrogate is left
    assert json.loads(out.getvalue()) == [{key: text}]


def test_json_refuses_what_json_cannot_hold():
    with pytest.raises(ValueError, match="JSON"):
        console.print_json({"p": float("nan")})


def test_a_table_in_a_pipe_is_aligned_and_whole(capsys: pytest.CaptureFixture[str]):
    long = "word " * 40 + "end"
    rows = [
        {"position": 0, "value": "日本", "probability": 0.98765},
        {"position": 10, "value": long, "probability": None},
    ]
    console.print_table(COLUMNS, rows)
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.startswith("position  value")
    assert first.startswith("       0  日本  ")
    assert first.endswith("        0.988")
    assert second == f"      10  {long}"


def test_a_table_on_a_terminal_folds_and_drops_nothing(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    value = "[bold]" + "x" * 150
    console.print_table(COLUMNS, [{"position": 3, "value": value, "probability": 0.5}])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert plain != terminal.getvalue()  # the header is bold
    assert max(map(len, plain.splitlines())) <= 80
    assert "…" not in plain
    # The folded value, put together again from its column.
    assert re.sub(r"[\s\d.]|position|value|probability", "", plain) == value

    monkeypatch.setenv("NO_COLOR", "1")
    coloured = Terminal()
    monkeypatch.setattr(sys, "stderr", coloured)
    console.print_error("a")
    assert "31" not in coloured.getvalue()


def test_answers_and_notes_take_different_streams(capsys: pytest.CaptureFixture[str]):
    console.print_answer("answer\x1b")
    console.print_pairs([("a", "1\x1b"), ("long", "")])
    console.print_note("note [x] \x1b" + "y" * 200)
    console.print_error("broken \x1b")
    console.print_hint("first\nsecond")
    out, err = capsys.readouterr()
    assert out == "answer\\x1b\na     1\\x1b\nlong\n"
    assert err == (
        "note [x] \\x1b" + "y" * 200 + "\nerror: broken \\x1b\nhint: first\nhint: second\n"
    )


def test_warnings_of_our_layers_are_shown_once(capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("weighbridge.scorer.resident")
    with warnings_shown():
        logger.warning("computed on its own, which is %s", "slower")
        logger.warning("computed on its own, which is slower")
        logging.getLogger("elsewhere").info("not ours")
    # A fallback must not be silent, and a warning per batch would bury the answer.
    assert capsys.readouterr().err == "hint: computed on its own, which is slower\n"


@given(st.text(), st.lists(st.dictionaries(st.text(), st.text() | st.none(), min_size=1)))
def test_json_with_a_long_list_is_the_same_value(text: str, entries: list[dict[str, str | None]]):
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        console.print_json_with_list({"head": text, "more": {}}, "list", iter(entries))
    # As if it had been one value all along, and nothing for the terminal to act on.
    assert json.loads(out.getvalue()) == {"head": text, "more": {}, "list": entries}
    assert controls(out.getvalue()) == []


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *table: object) -> list[str]:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NO_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    console.print_table(*table)  # pyright: ignore[reportArgumentType]
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()


def test_columns_keep_a_readable_width(monkeypatch: pytest.MonkeyPatch):
    columns = [Column("a name of its own"), Column("n", "right"), Column("text")]
    row = {"a name of its own": "x", "n": 123456, "text": "word " * 20}
    lines = on_terminal(monkeypatch, 40, columns, [row])
    assert lines[0] == "a name of its own       n  text"
    assert lines[1] == "x                  123456  word word"
    # 20 words, two in each line; the other columns stay blank beside them.
    assert len(lines) == 1 + 10
    assert max(map(len, lines)) <= 40


def test_a_table_too_wide_is_a_record_for_each_row(monkeypatch: pytest.MonkeyPatch):
    columns = [Column(f"column_{n}") for n in range(9)]
    rows = [{f"column_{n}": f"{'value' * 20}-{r}-{n}" for n in range(9)} for r in range(2)]
    lines = on_terminal(monkeypatch, 80, columns, rows)
    assert lines.count("") == 1
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("column")] == [
        column.name for _ in rows for column in columns
    ]
    # Every value, put together again from its lines.
    told = "".join(line[len("column_0  ") :] for line in lines)
    assert told == "".join(value for row in rows for value in row.values())
    assert on_terminal(monkeypatch, 80, columns, []) == [column.name for column in columns]


@settings(deadline=None)  # how long a first console takes says nothing of tables
@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=12), st.text(max_size=60)), min_size=1),
    st.integers(10, 100),
)
def test_no_table_loses_a_value_on_a_terminal(pairs: list[tuple[str, str]], width: int):
    names = {f"{place}{printable(name)}": text for place, (name, text) in enumerate(pairs)}
    columns = [Column(name) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        lines = on_terminal(patch, width, columns, [names])
    # Counted without blanks, which folding may eat.
    told = sorted(re.sub(r"\s", "", "".join(lines)))
    wanted = "".join(part for name, text in names.items() for part in (name, printable(text)))
    assert told == sorted(re.sub(r"\s", "", wanted))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.8807970779778823, "0.8808"), (123456.789, "123457"), (0.1 + 0.2, "0.3"), (1e-9, "1e-09")],
)
def test_floats_of_unknown_size(value: float, shown: str, capsys: pytest.CaptureFixture[str]):
    console.print_table([Column("n", "right", significant=4)], [{"n": value}])
    assert capsys.readouterr().out.splitlines()[1].strip() == shown
