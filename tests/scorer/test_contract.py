"""Trained contracts, with made-up texts: the real ones are not ours to keep."""

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import pytest

from weighbridge.scorer import ParallelScorer, contract
from weighbridge.scorer.checkpoint import DEFAULT_MAX_INPUT_TOKENS, inspect_checkpoint
from weighbridge.scorer.contract import Contract, read_contract
from weighbridge.scorer.errors import CheckpointError
from weighbridge.scorer.schema import Field, FieldKind, Schema

V1, V2 = "schema_candidate_classification_v1", "schema_candidate_classification_v2"
WIDE = "Answer with the short code.\nOne short code — nothing else."
NARROW = "Answer with the one-letter code.\nOne one-letter code — nothing else."


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(autouse=True)
def made_up_texts(monkeypatch):
    monkeypatch.setattr(contract, "WIDE_SHA256", sha(WIDE))
    monkeypatch.setattr(contract, "NARROW_SHA256", sha(NARROW))


def write(folder: Path, config: Any, system: str | bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "schema_config.json").write_text(text)
    if system is not None:
        data = system if isinstance(system, bytes) else system.encode()
        (folder / "system_prompt.txt").write_bytes(data)
    return folder


def test_a_folder_without_one_has_none(tmp_path):
    # A plain instruct model; a stray system_prompt.txt alone makes no contract.
    (tmp_path / "system_prompt.txt").write_text(NARROW)
    assert read_contract(tmp_path) is None


def test_the_newer_task_carries_its_text(tmp_path):
    config = {"task": V2, "max_length": 2048, "wide_system_prompt": WIDE, "max_choices": 255}
    found = read_contract(write(tmp_path, config))
    # `short` becomes `one-letter` in both places for up to 26 choices.
    assert found == Contract(V2, 2048, NARROW, WIDE, max_choices=255)
    assert found is not None
    assert (found.system(26), found.system(27), found.system(255)) == (NARROW, WIDE, WIDE)


def test_every_key_of_the_newer_task(tmp_path):
    codes = [*string.ascii_uppercase, "AA"]
    config = {
        "task": V2,
        "model": "Qwen/Qwen3.5-9B",
        "revision": "c" * 40,
        "max_length": 4096,
        "max_choices": 27,
        "candidate_encoding": "uppercase_single_token_v1",
        "candidate_codes": codes,
        "candidate_token_ids": list(range(100, 127)),
        "prompt_source_sha256": {"prompt.py": "0" * 64},
        "wide_system_prompt": WIDE,
    }
    found = read_contract(write(tmp_path, config))
    assert found is not None
    assert (found.model, found.revision) == ("Qwen/Qwen3.5-9B", "c" * 40)
    assert (found.codes, found.code_token_ids) == (tuple(codes), tuple(range(100, 127)))
    assert found.accepted_sha256 is None
    assert found.system(27) == WIDE
    # What was never trained has no answer, however many codes the tokenizer has.
    with pytest.raises(CheckpointError, match=r"at most 27 choices .* got 28"):
        found.system(28)


def test_the_older_task_takes_its_text_from_the_folder(tmp_path):
    config = {"task": V1, "prompt_code_sha256": "0", "model": "base", "revision": "r"}
    found = read_contract(write(tmp_path, config, NARROW))
    assert found == Contract(V1, None, NARROW, None, model="base", revision="r")
    assert found is not None
    assert found.system(26) == NARROW
    # It was never trained on wide codes.
    with pytest.raises(CheckpointError, match=r"at most 26 choices .* got 27") as caught:
        found.system(27)
    assert caught.value.hint


def test_a_newer_task_without_its_wide_text_is_narrow(tmp_path):
    found = read_contract(write(tmp_path, {"task": V2}, NARROW))
    assert found is not None
    with pytest.raises(CheckpointError, match=r"at most 26 choices .* got 27") as caught:
        found.system(27)
    assert "no wide system text" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (V1, ["system_prompt.txt", sha(NARROW), "line break"]),
        (V2, ["wide_system_prompt", sha(WIDE), "system_prompt.txt", sha(NARROW)]),
    ],
)
def test_the_remedy_for_a_missing_text_names_file_and_hash(tmp_path, task, words):
    with pytest.raises(CheckpointError) as caught:
        read_contract(write(tmp_path, {"task": task}))
    assert [word for word in words if word not in str(caught.value.hint)] == []
    # Consent is to a text that is there.
    with pytest.raises(CheckpointError, match="must bring its system text"):
        read_contract(tmp_path, accept_prompt=True)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_line_break_at_the_end_is_told_as_such(tmp_path, ending):
    with pytest.raises(CheckpointError, match="must have sha256") as caught:
        read_contract(write(tmp_path, {"task": V1}, NARROW + ending))
    # The most common slip: editors end files with one.
    assert str(caught.value.hint).startswith("remove the line break at its end; or consent")


@pytest.mark.parametrize(
    ("config", "system", "narrow", "wide"),
    [
        ({"task": V1}, "Mine.", "Mine.", None),
        ({"task": V2, "wide_system_prompt": "A short one."}, None, "A one-letter one.", True),
    ],
)
def test_another_text_needs_consent_and_is_told_by_its_hash(tmp_path, config, system, narrow, wide):
    folder = write(tmp_path, config, system)
    with pytest.raises(CheckpointError, match="must have sha256") as caught:
        read_contract(folder)
    assert "--accept-prompt" in str(caught.value.hint)
    found = read_contract(folder, accept_prompt=True)
    assert found is not None
    assert (found.narrow_system, bool(found.wide_system)) == (narrow, bool(wide))
    # The run records it, so that answers under another text can be told apart.
    assert found.accepted_sha256 == sha(narrow)


@pytest.mark.parametrize("wide", [WIDE.replace("short", "one-letter", 1), NARROW])
def test_the_text_that_differs_is_the_one_that_is_told(tmp_path, wide):
    # Its form for up to 26 choices is the trained one, and nothing was consented to there.
    folder = write(tmp_path, {"task": V2, "wide_system_prompt": wide})
    found = read_contract(folder, accept_prompt=True)
    assert found is not None
    assert found.narrow_system == NARROW
    assert found.accepted_sha256 == sha(wide)


def test_consent_to_the_trained_text_accepts_nothing(tmp_path):
    found = read_contract(write(tmp_path, {"task": V1}, NARROW), accept_prompt=True)
    assert found is not None
    assert found.accepted_sha256 is None


@pytest.mark.parametrize("text", ["", " \n", 5, None, "\ud800 short"])
def test_consent_is_to_a_text_that_says_something(tmp_path, text):
    with pytest.raises(CheckpointError) as caught:
        read_contract(write(tmp_path, {"task": V2, "wide_system_prompt": text}), accept_prompt=True)
    # What consent cannot mend does not ask for it.
    assert "--accept-prompt" not in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_blank_text_of_the_folder_is_no_text(tmp_path, text):
    for accept in (True, False):
        with pytest.raises(CheckpointError, match="must not be blank") as caught:
            read_contract(write(tmp_path, {"task": V1}, text), accept_prompt=accept)
        assert "--accept-prompt" not in str(caught.value.hint)


def test_a_byte_order_mark_is_no_damage(tmp_path):
    write(tmp_path, {"task": V1, "max_length": 512}, NARROW)
    path = tmp_path / "schema_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = read_contract(tmp_path)
    assert found is not None
    assert found.max_length == 512


class TestCodes:
    contract = Contract(V2, None, NARROW, WIDE, 3, ("A", "B", "AA"), (10, 11, 12))

    def test_the_trained_ones_pass(self):
        self.contract.check_codes({"A": 10, "B": 11, "AA": 12})
        self.contract.check_codes({"A": 10})
        # A contract that lists none cannot tell.
        Contract(V1, None, NARROW, None).check_codes({"Z": 1})

    @pytest.mark.parametrize(
        ("planned", "message"),
        [
            ({"A": 10, "B": 12}, 'choice 2 .* "B" of token 11.* got "B" of token 12'),
            ({"A": 10, "C": 11}, 'choice 2 .* "B" of token 11.* got "C" of token 11'),
            ({"B": 11, "A": 10}, 'choice 1 .* "A" of token 10'),
            ({"A": 10, "B": 11, "AA": 12, "AB": 13}, "at most 3 choices.* got 4"),
        ],
    )
    def test_the_first_that_differs_is_named(self, planned, message):
        # Another token for a code is another question to the model, answered with noise.
        with pytest.raises(CheckpointError, match=message) as caught:
            self.contract.check_codes(planned)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "system", "message"),
    [
        ({"task": V1}, None, "must bring its system text"),
        ({"task": V2}, None, "must bring its system text"),
        ({"task": V1}, NARROW + "\n", f"must have sha256 {sha(NARROW)}, got "),
        ({"task": V1}, NARROW.replace("\n", "\r\n"), "must have sha256"),
        ({"task": V1}, WIDE, "must have sha256"),
        ({"task": V1}, b"\xff", "must be readable UTF-8"),
        ({"task": V2, "wide_system_prompt": NARROW}, None, "got " + sha(NARROW)),
        ({"task": V2, "wide_system_prompt": 5}, None, "must be a text, got 5"),
        ({"task": V2, "wide_system_prompt": "\ud800 short"}, None, "must be valid Unicode"),
        ({"task": "other"}, NARROW, 'must name a known task .* got "other"'),
        ({}, NARROW, "must name a known task .* got null"),
        ([], NARROW, "must be a JSON object"),
        ("{", NARROW, "must be readable JSON"),
        ("[" * 100_000, NARROW, "must be readable JSON"),
        ({"task": V1, "max_length": 0}, NARROW, "max_length .* above 0, got 0"),
        ({"task": V1, "max_length": 10**300}, NARROW, "max_length .* from 1 to 2147483647, got 1"),
        ('{"task": "other", "task": "other"}', NARROW, "a key that came twice"),
        ({"task": V1, "model": "\ud800"}, NARROW, "model .* printable"),
        ({"task": V1, "max_length": True}, NARROW, "max_length .* got true"),
        ({"task": V1, "max_length": "512"}, NARROW, 'max_length .* got "512"'),
        *(
            ({"task": V2, "wide_system_prompt": WIDE, **damage}, None, message)
            for damage, message in (
                ({"max_choices": 256}, "max_choices .* from 1 to 255, got 256"),
                ({"max_choices": 0}, "max_choices .* got 0"),
                ({"candidate_encoding": "digits_v2"}, "candidate_encoding .* got .digits_v2"),
                ({"candidate_codes": ["A"]}, "candidate_token_ids .* got null"),
                ({"candidate_codes": ["A", "A"], "candidate_token_ids": [1, 2]}, "distinct texts"),
                ({"candidate_codes": ["A", "B"], "candidate_token_ids": [1, True]}, "distinct wh"),
                ({"candidate_codes": ["A"], "candidate_token_ids": [1]}, "at least max_choices"),
                (
                    {"candidate_codes": ["A"], "candidate_token_ids": [1, 2], "max_choices": 1},
                    "as many candidate_codes as candidate_token_ids.* got 1 and 2",
                ),
                ({"model": 5}, "model .* not blank, got 5"),
                ({"revision": ""}, "revision .* not blank"),
            )
        ),
    ],
)
def test_what_is_damaged_or_unknown_is_refused(tmp_path, config, system, message):
    # With another text than the trained one every answer would silently be off.
    with pytest.raises(CheckpointError, match=message) as caught:
        read_contract(write(tmp_path, config, system))
    assert caught.value.hint


def test_the_real_hashes_stand_in_the_code():
    import importlib.util

    spec = importlib.util.find_spec("weighbridge.scorer.contract")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    # From the published releases (FIELD §1); here because the tests replace them.
    assert '"2d6facc167cd5b20c897f527152eb231b699ff97a87ccd7f1530b69c6b6a99be"' in text
    assert '"5ae11c8de9ed42c34dd0053f6e8fc8dc5bd946eb51b70971136a59206f015daf"' in text


@pytest.mark.mlx
class TestScoring:
    @pytest.fixture
    def trained(self, tiny, tmp_path) -> Path:
        config = {"task": V2, "max_length": 700, "wide_system_prompt": WIDE}
        return write(tiny.checkpoint(tmp_path / "trained"), config)

    def test_layout_encoding_and_limit_follow_the_contract(self, trained, tiny, tmp_path):
        scorer = ParallelScorer(trained)
        assert (scorer.layout, scorer.encoding) == ("context-first", "codes")
        # Longer prompts were never trained on; the caller may still say otherwise.
        assert scorer.max_input_tokens == 700
        assert ParallelScorer(trained, max_input_tokens=900).max_input_tokens == 900
        plain = inspect_checkpoint(tiny.checkpoint(tmp_path / "plain"))
        assert (plain.layout, plain.encoding) == ("schema-first", "labels")
        assert plain.max_input_tokens == DEFAULT_MAX_INPUT_TOKENS

    @pytest.mark.parametrize("other", [{"layout": "schema-first"}, {"encoding": "labels"}])
    def test_another_prompt_is_refused(self, trained, other):
        # Its codes mean nothing anywhere else.
        with pytest.raises(CheckpointError, match=f"trained on {V2} must be scored with"):
            ParallelScorer(trained, **other)
        # Saying what holds anyway is no fault.
        assert ParallelScorer(trained, layout="context-first", encoding="codes").info.contract

    @pytest.mark.parametrize(("choices", "text"), [(26, NARROW), (27, WIDE)])
    def test_the_widest_field_selects_the_text(self, trained, choices, text):
        words = tuple(f"w{number}" for number in range(choices))
        small = Field("small", FieldKind.BOOLEAN, "Is it?", (False, True))
        schema = Schema((small, Field("wide", FieldKind.ENUM, "Which?", words)))
        prompt = ParallelScorer(trained).plan(schema).prompt("x", small)
        # One system text for the whole schema, also where a field is narrow.
        assert prompt.startswith(f"<|begin|>system\n{text}<|end|>\n")

    def test_it_scores(self, trained, tiny):
        result = ParallelScorer(trained).score("The invoice was charged twice.", tiny.schema())
        # Codes by position: A is the first choice of every field.
        assert {field.code for field in result.fields.values()} <= set("ABCD")
        for field, answer in zip(tiny.schema().fields, result.fields.values(), strict=True):
            assert field.choices["ABCD".index(answer.code or "")] == answer.value
