"""What may be the name of a model or of a commit: it is shown, stored and compared."""

LONGEST_NAME = 300
"""Code points; hub ids have at most 96, and a path into the hub's cache is longer."""


def name_fault(value: object) -> str | None:
    """Say what a name must be that a JSON value is not, None where it can be one.

    Args:
        value: Anything.
    """
    if not isinstance(value, str) or not value.strip():
        return "a text that is not blank"
    # Surrogates and terminal escapes are not printable.
    if len(value) > LONGEST_NAME or not value.isprintable():
        return f"a printable text of at most {LONGEST_NAME} characters"
    return None
