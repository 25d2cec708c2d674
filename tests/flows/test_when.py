"""Dates in paths: what they become, what is refused, and which time Prefect keeps for them."""

import string
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.flows.when import (
    DateError,
    check_dates,
    check_moment,
    has_dates,
    moment_of,
    refuse_dates,
    resolve_dates,
    scheduled_time,
    zone_of,
)

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = datetime(2026, 11, 30, 2, 5, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mails-{date}.csv", "mails-2026-11-30.csv"),
        ("mails-{date}/*.txt", "mails-2026-11-30/*.txt"),
        ("{date-1}", "2026-11-29"),
        ("{date+2}.json", "2026-12-02.json"),
        ("{date-30}", "2026-10-31"),
        ("{scheduled:%Y-%m-%d}", "2026-11-30"),
        ("{scheduled:%H%M}", "0205"),
        ("{scheduled-1:%d.%m.%Y %H}h", "29.11.2026 02h"),
        ("in/{date:%Y/%m}/mails-{date}.csv", "in/2026/11/mails-2026-11-30.csv"),
        ("{date:%G-W%V}", "2026-W49"),
        ("{date:week %-j}", "week 334"),
        ("{date:100%% %d}", "100% 30"),
        # Braces of somebody else.
        ("{subject}-{data}-{id}.csv", "{subject}-{data}-{id}.csv"),
        ("{a,b}/{}/}{", "{a,b}/{}/}{"),
        ("{{date}}", "{2026-11-30}"),
        ("plain.csv", "plain.csv"),
    ],
)
def test_dates_are_filled_in(text: str, expected: str):
    assert resolve_dates(text, NIGHT) == expected
    assert check_dates(text) == text
    assert has_dates(text) == (text != expected)


@pytest.mark.parametrize(
    "text",
    [
        *("{dat}", "{dates}", "{Date}", "{ date }", "{date-x}", "{date-}", "{date - 1}", "{date"),
        *("{date-1d}", "{date/1}", "{date_1}", "{scheduled}", "{scheduled:}", "{scheduled-1}"),
        *("{shed}/{schedule:%Y}", "{today}", "{yesterday}", "{now}", "{%Y-%m-%d}", "{date:}"),
        *("{date:YYYY-MM-DD}", "{date:%Q}", "{date:%}", "{date:%Y%}", "{date:%-%}", "{date:%-}"),
        *("{date:../%Y}", "{date:%Y/../..}", "{date:%Y\0}", "{date:%x}", "{date:%c}"),
        *("{date-99999}", "mails-{date-1.csv", "{date:%Y", "{date:%é}"),
    ],
)
def test_dates_gone_wrong_are_refused(text: str):
    with pytest.raises(DateError, match="a date in a path must"):
        check_dates(f"mails/{text}")


def test_a_refusal_names_what_came_and_what_is_allowed():
    with pytest.raises(DateError) as caught:
        check_dates("mails-{dat}.csv")
    assert str(caught.value) == (
        "a date in a path must be {date}, {date-1}, {date+2}, {date:%Y/%m/%d} or "
        "{scheduled:%Y-%m-%dT%H}, got {dat}"
    )


def test_days_are_those_of_the_calendar_when_clocks_change():
    # In Berlin 2026-03-29 has 23 hours and 2026-10-25 has 25: 24 hours before these moments
    # is another day than the day before.
    spring = datetime(2026, 3, 30, 0, 30, tzinfo=BERLIN)
    autumn = datetime(2026, 10, 25, 23, 30, tzinfo=BERLIN)
    in_hours = [(each.astimezone(UTC) - timedelta(hours=24)) for each in (spring, autumn)]
    assert [f"{each.astimezone(BERLIN):%F}" for each in in_hours] == ["2026-03-28", "2026-10-25"]
    assert resolve_dates("{date-1}", spring) == "2026-03-29"
    assert resolve_dates("{date-1}", autumn) == "2026-10-24"
    # 02:30 is not there on the day before: its date is.
    assert resolve_dates("{date-1}", datetime(2026, 3, 30, 2, 30, tzinfo=BERLIN)) == "2026-03-29"


@given(
    seconds=st.integers(2**25, 2**33),  # 1971 to 2242
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Apia"]),
    days=st.integers(-9999, 9999),
)
def test_an_offset_counts_local_dates(seconds: int, zone: str, days: int):
    local = datetime.fromtimestamp(seconds, ZoneInfo(zone))
    expected = date(local.year, local.month, local.day) + timedelta(days=days)
    assert resolve_dates(f"{{date{days:+d}}}", local) == expected.isoformat()


@given(st.text() | st.text("{}date+-19:%Y"))
def test_any_text_is_filled_in_or_refused_in_our_words(text: str):
    try:
        filled = resolve_dates(text, NIGHT)
    except DateError:
        assert "{" in text
    else:
        assert has_dates(text) or filled == text


@given(st.text(string.ascii_letters + "%-:/. ", max_size=12))
def test_any_format_is_written_or_refused_in_our_words(form: str):
    try:
        written = resolve_dates(f"a/{{date:{form}}}", NIGHT)
    except DateError:
        return
    assert ".." not in written.split("/")


def test_zones():
    assert zone_of("Europe/Berlin") is BERLIN
    for name in ("Berlin", "Europe", "../etc/passwd", "/etc/localtime", "", "UTC+1", "a\0b"):
        with pytest.raises(DateError, match="timezone must be one such as Europe/Berlin"):
            zone_of(name)


def test_a_moment_has_the_zone_of_the_dates():
    for text, expected in (
        ("2026-11-01", "2026-10-31T23:00:00+00:00"),
        ("2026-11-01 06:00", "2026-11-01T05:00:00+00:00"),
        ("2026-11-01T06:00Z", "2026-11-01T06:00:00+00:00"),
        ("2026-11-01T06:00+05:30", "2026-11-01T00:30:00+00:00"),
        ("{date-7}", "2026-11-22T23:00:00+00:00"),
        ("{date-1}T12:00", "2026-11-29T11:00:00+00:00"),
    ):
        assert moment_of(text, NIGHT).isoformat() == expected
        assert check_moment(text) == text
    for text in ("yesterday", "1.11.2026", "2026-13-01", "", "0001-01-01T00:00+14:00", "{dat}"):
        with pytest.raises(DateError, match="must be"):
            check_moment(text)


def test_places_without_dates():
    assert refuse_dates("store-{data}.db", "database") == "store-{data}.db"
    with pytest.raises(DateError, match=r"database must be the same every day, .* \{date-1\}"):
        refuse_dates("store-{date-1}.db", "database")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", "mails-{dat}.csv"),
        ("output", "answers-{scheduled}.csv"),
        ("schema", "schema-{date-x}.json"),
        ("timezone", "Berlin"),
        ("since", "last week"),
        ("database", "store-{date}.db"),
    ],
)
def test_a_request_refuses_them_by_the_name_of_the_field(field: str, value: str):
    from pydantic import ValidationError

    from weighbridge.flows import ScoreRequest

    with pytest.raises(ValidationError) as caught:
        ScoreRequest.model_validate({"documents": "a.csv", "schema": "s.json", field: value})
    (error,) = caught.value.errors()
    assert error["loc"] == (field,)
    assert "must " in error["msg"]


def test_the_texts_of_a_schema_are_no_paths():
    from weighbridge.flows import ScoreRequest

    schema = '{"due": {"type": "bool", "description": "Is {date} or {dat} in it?"}}'
    request = ScoreRequest.model_validate({"documents": "a.csv", "schema": schema})
    assert request.schema_ == schema


def test_what_is_filled_in():
    from weighbridge.flows import ScoreRequest
    from weighbridge.flows.resolving import resolve_request

    request = ScoreRequest.model_validate(
        {
            "documents": "in/{date}/*.txt",
            "schema": "schema-{date:%Y}.json",
            "output": "out/{date:%Y/%m}/{date+1}.csv",
            "source": "mails",
            "checkpoint": "checkpoint-{date}",
            "text_field": "{date}: {subject}",
            "timezone": "UTC",
        }
    )
    days = [datetime.now(UTC)]
    resolved = resolve_request(request)
    days.append(datetime.now(UTC))
    assert resolved.request in [
        request.model_copy(
            update={
                "documents": f"in/{day:%Y-%m-%d}/*.txt",
                "schema_": f"schema-{day:%Y}.json",
                "output": f"out/{day:%Y/%m}/{day + timedelta(days=1):%Y-%m-%d}.csv",
                "source": f"mails (in/{day:%Y-%m-%d}/*.txt)",
            }
        )
        for day in days
    ]
    assert resolved.label == resolved.request.source
    assert resolved.parameters == {}


# --- the real server ----------------------------------------------------------------------


def test_without_a_flow_run_it_is_now():
    before = datetime.now(UTC)
    found = scheduled_time("Asia/Tokyo")
    assert before <= found <= datetime.now(UTC)
    assert found.tzinfo == ZoneInfo("Asia/Tokyo")
    assert scheduled_time().utcoffset() == datetime.now().astimezone().utcoffset()


@pytest.mark.prefect
def test_a_late_run_and_its_retry_have_the_date_it_was_scheduled_for(deployed: Any):
    # 22:30 in UTC, which is the next day in Tokyo; three nights ago for a machine that slept.
    three_nights = datetime.now(UTC).replace(hour=22, minute=30, second=0) - timedelta(days=3)
    night = f"{three_nights + timedelta(hours=9):%Y-%m-%d}"
    assert night != f"{three_nights:%Y-%m-%d}"  # the zone matters
    request = {"documents": "in/mails-{date}.jsonl", "timezone": "Asia/Tokyo"}
    run = deployed.create(request, at=three_nights)

    def fail() -> None:
        raise RuntimeError("the first attempt")

    with pytest.raises(RuntimeError):
        deployed.execute(run, during=fail)
    assert deployed.resolved.request.documents == f"in/mails-{night}.jsonl"
    # What a worker gets to see when the run comes back: another state, scheduled for now.
    again = deployed.put_back(run)
    assert again.state.name == "AwaitingRetry"
    assert again.state.state_details.scheduled_time > three_nights + timedelta(days=2)
    assert deployed.execute(again) == f"in/mails-{night}.jsonl"
    assert deployed.read(again).run_count == 2


@pytest.mark.prefect
def test_the_zone_of_the_schedule_is_taken_if_none_is_named(deployed: Any):
    at = datetime(2026, 11, 1, 20, 30, tzinfo=UTC)
    request = {"documents": "{scheduled:%Y-%m-%d %H}.jsonl"}
    here = f"{at.astimezone():%Y-%m-%d %H}.jsonl"
    assert deployed.execute(deployed.create(request, at=at)) == here
    deployed.schedule("0 2 * * *", "Asia/Tokyo")
    assert deployed.execute(deployed.create(request, at=at)) == "2026-11-02 05.jsonl"
    # Of two zones none is taken.
    deployed.schedule("0 2 * * *", "America/Lima")
    assert deployed.execute(deployed.create(request, at=at)) == here


@pytest.mark.prefect
def test_a_run_without_a_deployment_has_the_time_of_its_start(prefect_server: str):
    from prefect import flow

    del prefect_server
    attempts: list[datetime] = []

    @flow(retries=1)
    def scored_by_hand() -> None:
        attempts.append(scheduled_time("UTC"))
        if len(attempts) == 1:
            raise RuntimeError("the first attempt")

    before = datetime.now(UTC)
    scored_by_hand()
    assert before - timedelta(seconds=1) <= attempts[0] <= datetime.now(UTC)
    assert attempts[0] == attempts[1]
