"""The summary of a run, read as a page reads it: by a markdown parser that is not ours."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from markdown_it import MarkdownIt

from weighbridge.db.queries import FieldValue, RunDetails, RunField
from weighbridge.db.records import RunSummary
from weighbridge.flows.artifacts import artifact_key
from weighbridge.flows.stages import STAGES
from weighbridge.flows.summary import MAX_FIELDS, MAX_ROWS, Facts, plain, summary_markdown
from weighbridge.scorer.temperature import TemperatureKind

STARTED = datetime(2026, 11, 30, 6, tzinfo=UTC)
HOSTILE = [
    "a|b",
    "a\\|b",
    "<img src=x onerror=alert(1)>",
    "<script>",
    "`code`",
    "``` fence",
    "two\nlines\r\n| and a | row |",
    "**bold** _thin_ ~~gone~~",
    "[text](javascript:alert(1))",
    "![image](http://example.invalid/x.png)",
    "# heading",
    "---",
    "&lt;b&gt; &amp; &#60;",
    "\x1b[31mred\x07",
    "\u202eesrever",
    "1. one",
    "- item",
    "$x$",
    "{{ template }}",
    "é ü 漢字 🙂",
]


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "run_id": 7,
        "flow_run_id": None,
        "name": "score-triage-2026-11-30",
        "status": "completed",
        "message": None,
        "host": "mac-1.local",
        "pid": 1,
        "started_at": STARTED,
        "finished_at": STARTED + timedelta(seconds=20),
        "seconds": 20.0,
        "documents": 1010,
        "scored": 1000,
        "reused": 8,
        "rejected": 2,
        "wasted": 0,
        "schema": "triage",
        "checkpoint": "a-model",
        "temperature": 1.0,
        "temperature_kind": "default",
        "temperature_source": "default: nothing is known",
        "documents_source": "tickets.jsonl",
        "mode": "auto",
        "layout": "schema-first",
        "encoding": "labels",
        "contract": "none",
        "dtype": "float32",
        "backend": "cpu float32",
        "rescore": False,
        "permutations": 1,
        "checkpoint_source": None,
        "adapter_source": None,
        "accepted_prompt_sha256": None,
    }
    return RunSummary(**{**values, **changes})


def details(**changes: Any) -> RunDetails:
    return RunDetails(
        summary=summary(**changes),
        resumed_at=None,
        schema_sha256="5" * 64,
        fingerprint="f" * 64,
        model_id=None,
        revision=None,
        architecture="llama",
        quantization=None,
        adapter_sha256=None,
        prompt_version="none/schema-first/labels/2.2",
        max_input_tokens=4096,
        store_text=True,
        versions={"weighbridge": "0.1.0", "mlx": "0.32.4"},
        batches=3,
        prefill_seconds=8.0,
        branch_seconds=4.0,
        total_seconds=13.0,
        prefix_tokens=100,
        suffix_tokens=50,
        prefills=3,
        resident_tokens=40,
        resident_hits=2,
        peak_bytes=None,
    )


def facts(*answers: FieldValue, fields: tuple[RunField, ...] = (), **changes: Any) -> Facts:
    return Facts(details(**changes), answers or (FieldValue("topic", "enum", "a", 4, 0.5),), fields)


def parsed(markdown: str) -> list[Any]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)


def tables(markdown: str) -> list[list[list[str]]]:
    """Return the tables of a page as the text a reader sees in their cells."""
    found: list[list[list[str]]] = []
    tokens = parsed(markdown)
    for token, following in pairwise(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in {"td_open", "th_open"}:
            found[-1][-1].append("".join(child.content for child in following.children or ()))
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_leaves_its_place(name: str):
    markdown = summary_markdown(
        facts(FieldValue(name, "enum", name, 3, 0.5), schema=name, checkpoint=name, backend=name)
    )
    answers, times = tables(markdown)
    assert answers[0] == ["answer", "documents", "share", "mean probability"]
    assert [row[0] for row in answers[1:]] == [plain(name)]
    assert answers[1][1] == "3"
    assert len(times) == 1 + len(STAGES)
    tokens = parsed(markdown)
    inline = [child.type for token in tokens for child in token.children or ()]
    assert not {"html_inline", "link_open", "image", "em_open", "s_open"} & set(inline)
    assert "html_block" not in [token.type for token in tokens]
    headings = [
        following.content and "".join(child.content for child in following.children or ())
        for token, following in pairwise(tokens)
        if token.type == "heading_open"
    ]
    assert headings[:3] == [f"Run 7: {plain(name)}", "Answers", plain(name)]


def test_a_name_left_as_it_is_would_be_found():
    # The negative control of the test above: the parser does see what it looks for.
    raw = "| a |\n|---|\n| <img src=x> [text](http://x) ![image](y) *e* |\n"
    inline = {child.type for token in parsed(raw) for child in token.children or ()}
    assert {"html_inline", "link_open", "image", "em_open"} <= inline


def test_long_names_are_cut():
    markdown = summary_markdown(facts(FieldValue("f" * 5000, "enum", "v" * 5000, 1, 0.5)))
    ((_, row), _) = tables(markdown)
    assert row[0] == "v" * 59 + "…"
    assert len(markdown) < 3000


def test_of_255_choices_the_frequent_ones_are_shown():
    choices = tuple(f"c{number}" for number in range(255))
    # Two each for the first 200, none for the rest.
    answers = [FieldValue("topic", "enum", choice, 2, 0.5) for choice in choices[:200]]
    markdown = summary_markdown(Facts(details(), answers, (RunField(0, "topic", "enum", choices),)))
    shown, _ = tables(markdown)
    assert [row[0] for row in shown[1:]] == list(choices[:MAX_ROWS])
    left = 200 - MAX_ROWS
    assert f"{left} more answers, given to {2 * left} documents, are not shown." in markdown
    assert "Never answered: c200, c201, c202, c203, c204, c205, c206, c207 and 47 more." in markdown


def test_fields_beyond_a_hundred_are_counted():
    answers = [FieldValue(f"f{number}", "enum", "a", 1, 0.5) for number in range(MAX_FIELDS + 3)]
    markdown = summary_markdown(facts(*answers))
    assert len(tables(markdown)) == MAX_FIELDS + 1
    assert "3 more fields are not shown." in markdown


def test_levels_read_from_low_to_high():
    answers = [
        FieldValue("anger", "score", value, count, 0.5)
        for value, count in (("furious", 5), ("calm", 3), ("annoyed", 2))
    ]
    levels = RunField(0, "anger", "score", ("calm", "annoyed", "furious", "livid"))
    markdown = summary_markdown(facts(*answers, fields=(levels,)))
    shown, _ = tables(markdown)
    assert [row[:2] for row in shown[1:]] == [["calm", "3"], ["annoyed", "2"], ["furious", "5"]]
    # 3 of 10 of a bar of 16 is 4.8.
    assert [row[2] for row in shown[1:]] == [
        f"{'█' * filled:\u00a0<16} {share}"
        for filled, share in ((5, "30%"), (3, "20%"), (8, "50%"))
    ]
    assert "Never answered: livid." in markdown


def test_stages_add_up_to_the_run():
    stages: dict[Any, float] = {"reading": 1.0, "loading": 2.0, "prefill": 8.0, "recording": 5.0}
    known = replace(facts(), stages=stages, hidden={"recording": 0.5, "reading": 0.25})
    markdown = summary_markdown(known)
    _, times = tables(markdown)
    assert [row[0].partition(":")[0] for row in times[1:]][-1] == "finishing"
    seconds = [row[1] for row in times[1:]]
    assert seconds == [f"{value:.2f}" for value in (0, 1, 0, 2, 8, 0, 0, 5, 0, 0)]
    assert [row[2][-3:].strip() for row in times[1:]][4] == "50%"
    assert "Another 0.75 s of reading, planning, recording" in markdown
    assert "Another" not in summary_markdown(replace(known, hidden={}))


@pytest.mark.parametrize("kind", TemperatureKind)
def test_calibration_is_claimed_for_a_fitted_temperature_only(kind: TemperatureKind):
    markdown = summary_markdown(facts(temperature_kind=kind.value, temperature=2.179))
    assert "Temperature **2.179** (" in markdown
    claims = "tells how often the answer is right" in markdown
    assert claims == (kind == TemperatureKind.FITTED)
    if kind in {TemperatureKind.DEFAULT, TemperatureKind.UNFITTED}:
        assert "not calibrated" in markdown


def test_an_unfinished_run_says_so():
    assert "This run is **cancelled**" in summary_markdown(facts(status="cancelled"))
    assert "This run is" not in summary_markdown(facts())


def test_a_run_without_answers():
    markdown = summary_markdown(
        Facts(details(documents=0, scored=0, reused=0, seconds=0.0), (), ())
    )
    assert "None: no document was scored." in markdown
    assert "**0 documents**" in markdown


def test_commands_can_be_typed_as_they_stand():
    known = replace(facts(), store="/Users/a b/it's.db", output="/out/a|b.csv")
    markdown = summary_markdown(known)
    (block,) = [token.content for token in parsed(markdown) if token.type == "code_block"]
    first = block.splitlines()[0]
    assert first == """weighbridge results 7 --db '/Users/a b/it'"'"'s.db'"""
    assert "weighbridge rejected 7 --db" in block
    assert "rejected" not in summary_markdown(facts(rejected=0)).partition("The answers")[2]
    assert "--db" not in summary_markdown(facts())


@pytest.mark.parametrize(
    ("schema", "slug"),
    [
        ("triage", "triage"),
        ("Triage 2 (new)", "triage-2-new"),
        ("Qualität", "qualitat"),
        ("漢字", "schema"),
        ("", "schema"),
        ("---", "schema"),
        ("../../etc", "etc"),
        ("a" * 59 + "-bcd", "a" * 59),
    ],
)
def test_keys_are_what_prefect_takes(schema: str, slug: str):
    from prefect.client.schemas.actions import ArtifactCreate

    key = artifact_key(schema, "summary")
    assert key == f"weighbridge-{slug}-summary"
    assert ArtifactCreate(key=key).key == key
