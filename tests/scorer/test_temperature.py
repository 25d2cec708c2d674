import json
import logging
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.scorer.errors import ScorerError, TemperatureError
from weighbridge.scorer.temperature import (
    TemperatureKind,
    _warn_once,
    resolve_temperature,
    softmax,
    validate_temperature,
)

CASES = json.loads(
    (Path(__file__).parents[1] / "cases" / "temperature_policy.json").read_text(encoding="utf-8")
)
V1 = "bespokelabs/Bespoke-Nimble-9B"
V1_REVISION = "93ec5d6ff1a9cd31d6cc0e0c58d312465d36de7c"
V1_ADAPTER = "ba7e28acb97f973e80fa51f3aa6fc6f75ea4081b89632ed45d8e5f3a1d7bfa6b"
V2 = "bespokelabs/Bespoke-Nimble-9B-v2"
FITTED = 2.179078721266035


def folder_with(tmp_path: Path, ready: object) -> Path:
    text = ready if isinstance(ready, str) else json.dumps(ready)
    (tmp_path / "READY.json").write_text(text, encoding="utf-8")
    return tmp_path


def check(case: dict, folder: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    expect = case["expect"]
    if "error_mentions" in expect:
        with pytest.raises(TemperatureError) as caught:
            resolve_temperature(folder, **case["call"])
        # The message alone must name them: a log line may not carry the hint.
        assert [w for w in expect["error_mentions"] if w not in caught.value.message] == []
        assert caught.value.hint
        return
    resolved = resolve_temperature(folder, **case["call"])
    # Exact: a temperature is copied, never computed.
    assert (resolved.value, resolved.kind) == (expect["temperature"], expect["kind"])
    assert resolved.source
    for word in expect.get("warning_mentions", []):
        # Said twice on purpose: in the value for the record, in the log for whoever watches.
        assert word in str(resolved.warning)
        assert word in caplog.text


@pytest.fixture(autouse=True)
def warned_of_nothing():
    """Forget which warnings were logged before."""
    _warn_once.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_policy(case, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="weighbridge.scorer.temperature")
    ready = case.get("ready_text", case.get("ready"))
    check(case, None if ready is None else folder_with(tmp_path, ready), caplog)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "ready" not in c and "ready_text" not in c],
    ids=lambda c: c["name"],
)
def test_policy_with_an_empty_folder(case, tmp_path, caplog):
    # A folder without READY.json says as much as no folder.
    check(case, tmp_path, caplog)


def test_policy_check_can_fail(caplog):
    # Negative control: the wrong kind for a plain call must not pass.
    with pytest.raises(AssertionError):
        check({"call": {}, "expect": {"temperature": 1.0, "kind": "fitted"}}, None, caplog)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"model_id": V1.lower(), "revision": V1_REVISION}, ["letter case", V1.lower(), V1]),
        ({"model_id": f"{V1} ", "revision": V1_REVISION}, ["space", V1]),
        ({"model_id": V1, "revision": V1_REVISION.upper()}, ["letter case", "full"]),
        ({"model_id": V1, "revision": f" {V1_REVISION}\n"}, ["space", "full"]),
        ({"model_id": V1, "revision": V1_REVISION[:39]}, ["short", "full", V1_REVISION[:39]]),
        ({"model_id": V2.upper()}, ["letter case", V2]),
        ({"model_id": V1}, ["no revision", "full"]),
        ({"model_id": V1, "revision": "main"}, ["main", "full"]),
    ],
)
def test_near_miss_never_matches_but_warns(call, words, caplog):
    resolved = resolve_temperature(**call)
    assert (resolved.value, resolved.kind) == (1.0, "default")
    # Otherwise T=1 would be used in silence for a checkpoint that has a better one.
    assert [word for word in words if word not in str(resolved.warning)] == []
    assert str(resolved.warning) in caplog.text


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"model_id": "Qwen/Qwen3.5-4B", "revision": V1_REVISION[:7]},
        {"model_id": V1, "revision": "0" * 40},
        {"model_id": V1, "revision": V1_REVISION},
        {"model_id": V2, "revision": "main"},
        {"model_id": V1, "temperature": 1.5},
    ],
)
def test_no_warning_where_nothing_is_wrong(call, caplog):
    # Another full revision is another release, not a slip; noise would hide real warnings.
    assert resolve_temperature(**call).warning is None
    assert caplog.text == ""


def test_near_miss_is_said_beside_an_explicit_temperature():
    resolved = resolve_temperature(model_id=V2.lower(), temperature=1.0)
    # With the right spelling this very call is refused, so silence would mislead.
    assert resolved.kind == TemperatureKind.EXPLICIT
    assert V2 in str(resolved.warning)


@pytest.mark.parametrize(
    ("ready", "call", "kind", "word"),
    [
        # An adapter that is no release of ours is known not to be v1.
        ({"adapter_sha256": "0" * 64}, {"model_id": V1, "revision": V1_REVISION}, "default", "v1"),
        ({"adapter_sha256": "0" * 64, "model": V2}, {}, "default", "v2"),
        # Names in the file beat those of the caller, as they lie beside the weights.
        ({"model": "other"}, {"model_id": V1, "revision": V1_REVISION}, "default", "not followed"),
        ({"model": V2}, {"model_id": V1, "revision": V1_REVISION}, "transferred", "not followed"),
        ({"model": V1}, {"model_id": "other", "revision": V1_REVISION}, "default", "not followed"),
    ],
)
def test_what_lies_beside_the_weights_beats_the_caller(tmp_path, ready, call, kind, word):
    resolved = resolve_temperature(folder_with(tmp_path, ready), **call)
    assert resolved.kind == kind
    # Overruling the caller in silence would look like an answer to the question asked.
    assert word in str(resolved.warning)


def test_caller_may_complete_the_file(tmp_path):
    folder = folder_with(tmp_path, {"model": V1, "adapter_sha256": None})
    # The file names the model only; the revision the caller adds is of that model.
    assert resolve_temperature(folder, revision=V1_REVISION).kind == "fitted"
    assert resolve_temperature(folder, model_id=V1, revision=V1_REVISION).warning is None


def test_adapter_hash_is_a_number_whatever_its_letters(tmp_path):
    folder = folder_with(tmp_path, "\ufeff" + json.dumps({"adapter_sha256": V1_ADAPTER.upper()}))
    # Hex digits are the same number in either case; a byte order mark means nothing.
    assert resolve_temperature(folder).value == FITTED


@pytest.mark.parametrize(
    ("ready", "words"),
    [
        ("", ["line 1"]),
        ('{"adapter_sha256": "a", "adapter_sha256": "b"}', ["twice"]),
        ('{"a": ' + "1" * 5000 + "}", ["digits"]),
        ("[" * 100_000, ["JSON"]),
        ({"adapter_sha256": V1_ADAPTER[:63]}, ["adapter_sha256", "64 hex", V1_ADAPTER[:63]]),
        ({"adapter_sha256": V1_ADAPTER + "\n"}, ["adapter_sha256", "64 hex"]),
        ({"adapter_sha256": ""}, ["adapter_sha256", "64 hex"]),
        ({"model": 1}, ['"model"', "text", "1"]),
        ({"model": V1, "revision": ["x"]}, ['"revision"', "a list"]),
        ({"revision": " "}, ['"revision"', "blank"]),
    ],
)
def test_ready_file_that_cannot_be_trusted_is_an_error(tmp_path, ready, words):
    with pytest.raises(TemperatureError) as caught:
        resolve_temperature(folder_with(tmp_path, ready), temperature=2.0)
    # Falling back to T=1 here is the slip this policy exists for.
    assert "READY.json" in caught.value.message
    assert [word for word in words if word not in caught.value.message] == []


def test_ready_file_must_be_a_readable_file(tmp_path):
    (tmp_path / "READY.json").mkdir()
    with pytest.raises(TemperatureError, match=r"READY\.json"):
        resolve_temperature(tmp_path)
    (tmp_path / "READY.json").rmdir()
    (tmp_path / "READY.json").write_bytes(b"\xff\xfe")
    # UTF-16 from a Windows shell: named, not guessed.
    with pytest.raises(TemperatureError, match="UTF-8"):
        resolve_temperature(tmp_path)


def test_folder_must_be_there(tmp_path):
    # A mistyped folder has no READY.json either, and T=1 would be used in silence.
    with pytest.raises(TemperatureError, match="folder"):
        resolve_temperature(tmp_path / "absent")


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        np.True_,
        "2.1",
        None,
        math.nan,
        math.inf,
        -math.inf,
        0,
        -0.0,
        -1,
        pytest.param(10**5000, id="huge"),
        1j,
        [1.0],
        np.array([1.0]),
        np.float32("nan"),
        Fraction(-1, 2),
    ],
)
def test_what_is_no_temperature(value):
    # Dividing by any of these gives no distribution, or one nobody asked for.
    with pytest.raises(TemperatureError, match="finite and above 0"):
        validate_temperature(value)


@pytest.mark.parametrize(
    ("value", "number"),
    [(2, 2.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (Fraction(1, 4), 0.25)],
)
def test_any_real_number_is_a_temperature(value, number):
    result = validate_temperature(value)
    # A plain float, so that it goes into JSON and SQLite as it is.
    assert (type(result), result) == (float, number)


NAMES = st.sampled_from([None, "", V1, V2, V1.lower(), "other", " "])


@given(
    model_id=NAMES,
    revision=st.sampled_from([None, "", "main", V1_REVISION, V1_REVISION[:7], "0" * 40]),
    temperature=st.none() | st.floats() | st.integers(),
    allow_uncalibrated=st.booleans(),
)
def test_resolved_temperature_is_always_usable(**call):
    try:
        resolved = resolve_temperature(**call)
    except TemperatureError:
        resolved = None
    # Only a given temperature can be refused here.
    assert resolved is not None or call["temperature"] is not None
    assert resolved is None or (math.isfinite(resolved.value) and resolved.value > 0)


LOGITS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=255)
TEMPERATURES = st.floats(1e-3, 1e3)


def test_softmax_by_hand():
    # Logits ln 1 and ln 3 at T=1: 1/4 and 3/4.
    assert softmax([0.0, math.log(3)], 1.0) == pytest.approx((0.25, 0.75), abs=1e-15)
    # T=2 halves the gap: 1/(1 + sqrt 3).
    assert softmax([0.0, math.log(3)], 2)[0] == pytest.approx(1 / (1 + math.sqrt(3)), abs=1e-15)
    # One choice has p = 1, exactly.
    assert softmax([-7.0], 2.0) == (1.0,)


@given(LOGITS, TEMPERATURES)
def test_softmax_is_a_distribution_in_the_order_of_the_logits(logits, temperature):
    result = softmax(logits, temperature)
    assert abs(math.fsum(result) - 1) <= 1e-12
    assert all(0 <= p <= 1 for p in result)
    # Rising logits never give a falling probability, whatever the temperature.
    ranked = [p for _, p in sorted(zip(logits, result, strict=True))]
    assert ranked == sorted(ranked)
    # The choice with the top logit keeps the top probability.
    assert result[logits.index(max(logits))] == max(result)


@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=20),
    st.integers(-1000, 1000),
    TEMPERATURES,
)
def test_softmax_ignores_a_constant_shift(logits, shift, temperature):
    # Integers add without rounding, so equality is exact.
    assert softmax([x + shift for x in logits], temperature) == softmax(logits, temperature)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20), st.floats(0.1, 10))
def test_softmax_agrees_with_the_textbook(logits, temperature):
    weights = [math.exp(logit / temperature) for logit in logits]
    # The definition, slow and unshifted; safe in this range.
    expected = [weight / sum(weights) for weight in weights]
    assert softmax(logits, temperature) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("temperature", [5e-324, 1.7e308])
def test_softmax_survives_the_ends_of_float64(temperature):
    result = softmax([-1.7e308, 0.0, 1.7e308], temperature)
    # Naive division overflows at one end; the sum must still be 1.
    assert math.fsum(result) == pytest.approx(1, abs=1e-12)


def test_softmax_takes_numpy_values():
    result = softmax(np.array([0.0, 1.0], dtype=np.float32), np.float32(1))  # pyright: ignore[reportArgumentType]
    # Plain floats out, computed in float64.
    assert [type(p) for p in result] == [float, float]


@pytest.mark.parametrize("logits", [[], [math.nan], [0.0, math.inf], [-math.inf]])
def test_softmax_refuses_what_has_no_distribution(logits):
    with pytest.raises(ScorerError, match="logit"):
        softmax(logits, 1.0)


def test_softmax_refuses_a_temperature_of_zero():
    # The limit is a one-hot vector, but nobody means that by 0.
    with pytest.raises(TemperatureError, match="above 0"):
        softmax([0.0], 0.0)
