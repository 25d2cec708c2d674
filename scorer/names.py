"""What may be the name of a model or of a commit: it is shown, stored and compared."""

from typing import TypeGuard

LONGEST_NAME = 300
"""Code points; hub ids have at most 96, and a path into the hub's cache is longer."""

NAME_RULE = f"(printable, at most {LONGEST_NAME} characters)"


def is_name(value: object) -> TypeGuard[str]:
    """Whether a JSON value can be a name: a text, not blank, printable, not too long.

    Args:
        value: Anything.
    """
    return (
        isinstance(value, str)
        and bool(value.strip())
        and len(value) <= LONGEST_NAME
        and value.isprintable()  # surrogates and terminal escapes are not
    )
