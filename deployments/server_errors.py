"""What a Prefect server answers when it refuses, as sentences for the reader."""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from weighbridge.deployments.errors import CommandError

_FIELD = re.compile(r"field '(?P<field>[^']+)'\. Failure reason: (?P<reason>.*)", re.DOTALL)
_REFUSED = {400, 409, 422}
# Behind what stands before it, Prefect repeats the value and the form that it did not fit.
_LONGEST = 300


@contextmanager
def server_errors(doing: str) -> Generator[None]:
    """Turn what the server refuses within this block into errors of ours.

    Args:
        doing: What is being done, as "trigger nightly".

    Raises:
        CommandError: The server refuses, or does not answer.
    """
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        reason = _reason(error.response)
        if status in _REFUSED:
            raise CommandError(f"the server refuses to {doing}: {reason}") from error
        hint = "set PREFECT_API_AUTH_STRING" if status in {401, 403} else None
        raise CommandError(
            f"the Prefect API must {doing}, and answers {status}: {reason}", hint=hint
        ) from error
    except httpx.HTTPError as error:
        raise CommandError(
            f"the Prefect API must answer to {doing}, and it does not: {reason_of(error)}",
            hint="start it with: prefect server start",
        ) from error


def reason_of(error: BaseException) -> str:
    """Return what an error says, its name if it says nothing."""
    return str(error) or type(error).__name__


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Give the errors of a group one after the other; any other error is its own."""
    if isinstance(error, BaseExceptionGroup):
        for each in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(each)
    else:
        yield error


def _reason(response: Any) -> str:
    try:
        answer: dict[str, Any] = response.json()
        detail = cast("object", answer.get("detail") or answer.get("exception_detail"))
    except (ValueError, AttributeError):
        return _short(response.text)
    if isinstance(detail, list):  # of FastAPI: one entry for each field
        for first in cast("list[dict[str, Any]]", detail):
            place = ".".join(str(each) for each in first.get("loc", ()))
            return _short(f"{place}: {first.get('msg', '')}")
    text = detail if isinstance(detail, str) else response.text
    if found := _FIELD.search(text):
        field = found["field"].removeprefix("request.")
        return _short(f"{field}: {found['reason']}")
    return _short(text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
