"""Dates in paths, from the time that a flow run was scheduled for.

`{date}` is the day, `{date-1}` the day before, `{date+2}` two days later; a format of
strftime writes another form, also a folder per month: `{date:%Y/%m/%d}`,
`{scheduled:%Y-%m-%dT%H}`, `{scheduled-1:%d.%m.%Y}`.

A retry after midnight and a run that a sleeping machine did late have the date of the night
they were scheduled for: Prefect sets `expected_start_time` once, with a run's first state,
whereas the time of a state moves with each retry. A run that nothing scheduled has the time
it was started. Days are counted in local dates, so that a day of 23 hours is one.

Knows Prefect's runtime and its deployments. Does not know requests, nor which of their
fields may hold a date (see `resolving`).
"""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import NoSchedule
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run

from weighbridge.tasks.errors import TaskError

ALLOWED: Final = "{date}, {date-1}, {date+2}, {date:%Y/%m/%d} or {scheduled:%Y-%m-%dT%H}"

_DATE: Final = re.compile(r"\{(date|scheduled)([+-][0-9]{1,4})?(?::([^{}]*))?\}")
_BRACES: Final = re.compile(r"\{([^{}]*)(\}|$)")
# What people write who mean a date; {data} and {id} are names of somebody's own.
_MEANT: Final = re.compile(r"(date|sched|(dat|day|now|today|yesterday|tomorrow)\b)|.*%[a-z]", re.I)
_DIRECTIVE: Final = re.compile(r"%(-?)(.?)", re.DOTALL)
# Those of Python, without %c, %x and %X, whose order and slashes depend on the machine.
_DIRECTIVES: Final = frozenset("aAwdbBmyYHIpMSfzZjUWGuV%")


class DateError(TaskError, ValueError):
    """A path holds what looks like a date and is none, or a time zone that is none.

    A ValueError too, so that the form of a deployment and the server refuse it.
    """


def has_dates(text: str) -> bool:
    """Tell whether a text holds a date to fill in."""
    return _DATE.search(text) is not None


def check_dates(text: str) -> str:
    """Return a text whose dates can be filled in, as it came.

    Raises:
        DateError: It holds braces that look like a date and are none.
    """
    resolve_dates(text, datetime.now(UTC))
    return text


def refuse_dates(text: str, what: str) -> str:
    """Return a text that holds no date.

    Args:
        text: The text.
        what: What it is, for the message.

    Raises:
        DateError: It holds one.
    """
    if found := _DATE.search(text):
        raise DateError(f"{what} must be the same every day, and holds {found[0]}")
    return text


def resolve_dates(text: str, scheduled: datetime) -> str:
    """Fill in the dates of a path or glob; all other braces stay as they are.

    Args:
        text: The path.
        scheduled: What the dates are counted from, in the zone whose dates they are.

    Raises:
        DateError: Braces look like a date and are none, or a format is none.
    """
    for braces in _BRACES.finditer(text):
        if not _DATE.fullmatch(braces[0]) and _MEANT.match(braces[1].strip()):
            raise DateError(f"a date in a path must be {ALLOWED}, got {braces[0]}")
    return _DATE.sub(lambda found: _written(found, scheduled), text)


def _written(found: re.Match[str], scheduled: datetime) -> str:
    name, offset, form = found.groups()
    if form is None and name == "date":
        form = "%Y-%m-%d"
    if form is None or not _DIRECTIVE.search(form):
        raise DateError(
            f"a date in a path must have a format with parts such as %Y, got {found[0]}; "
            f"allowed: {ALLOWED}"
        )
    for dash, letter in _DIRECTIVE.findall(form):
        if letter not in _DIRECTIVES or (dash and letter == "%"):
            raise DateError(
                f"the format of a date in a path must have parts such as %Y, %m, %d, %H, %M, %j, "
                f"%G and %V, got %{dash}{letter} in {found[0]}"
            )
    if ".." in form.split("/") or "\0" in form:
        raise DateError(f"a date in a path must stay in its folder, got {found[0]}")
    try:
        # On the clock of the zone: the same hour, however long the days between are.
        return (scheduled + timedelta(days=int(offset or 0))).strftime(form)
    except UnicodeEncodeError:
        raise DateError(f"a date in a path must be UTF-8 text, got {found[0]!a}") from None
    except OverflowError:
        raise DateError(
            f"a date in a path must be in the years 1 to 9999, got {found[0]}"
        ) from None


def check_moment(text: str) -> str:
    """Return the text of a moment (see `moment_of`) as it came.

    Raises:
        DateError: It is none.
    """
    moment_of(text, datetime.now(UTC))
    return text


def moment_of(text: str, scheduled: datetime) -> datetime:
    """Return a moment in UTC.

    Args:
        text: A date or date and time of ISO 8601, in which dates are filled in; without an
            offset in the zone of `scheduled`.
        scheduled: What dates are counted from.

    Raises:
        DateError: It is none.
    """
    filled = resolve_dates(text, scheduled)
    try:
        moment = datetime.fromisoformat(filled)
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=scheduled.tzinfo)
        return zoned.astimezone(UTC)  # the years 1 and 9999 may have no counterpart there
    except (ValueError, OverflowError):
        raise DateError(
            "a moment must be a date such as 2026-11-01, 2026-11-01T06:00+01:00 or {date-7}, "
            f"got {text!r:.80}"
        ) from None


def check_zone(name: str) -> str:
    """Return the name of a time zone as it came, if there is one of that name.

    Raises:
        DateError: There is none.
    """
    zone_of(name)
    return name


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its name.

    Raises:
        DateError: There is none of that name.
    """
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise DateError(
            f"timezone must be one such as Europe/Berlin or UTC, got {name!r:.80}"
        ) from None


def scheduled_time(timezone: str | None = None) -> datetime:
    """Return what the dates of this flow run are counted from.

    Args:
        timezone: The zone of the dates; None takes that of the deployment's schedules, where
            they have one in common, else that of this machine.

    Returns:
        The time this flow run was scheduled for, the same in each retry; without a schedule
        the time it was started; without a flow run the present.

    Raises:
        DateError: There is no such time zone.
    """
    zone = zone_of(timezone) if timezone else _zone_of_schedules()
    # One of Python's own: Prefect's counts days in another way.
    utc = datetime.fromtimestamp(flow_run.scheduled_start_time.timestamp(), UTC)
    return utc.astimezone(zone)


def _zone_of_schedules() -> tzinfo | None:
    if deployment.id is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            schedules = client.read_deployment(deployment.id).schedules
    except ObjectNotFound:
        return None  # it was deleted meanwhile
    zones = {
        each.schedule.timezone
        for each in schedules
        if not isinstance(each.schedule, NoSchedule) and each.schedule.timezone
    }
    return zone_of(zones.pop()) if len(zones) == 1 else None
