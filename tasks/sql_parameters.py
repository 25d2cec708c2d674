"""Which parameters a SQL statement has: `:name` outside of texts, names and comments. A leaf."""

import re
from typing import Final

# As SQLAlchemy finds them, which would also look into texts and comments.
_PARAMETER: Final = r"(?<![:\w\\]):(?P<name>\w+)(?![:\w])"
_TOKEN: Final = re.compile(
    r"'(?:[^']|'')*'"  # a text
    r'|"(?:[^"]|"")*"|`[^`]*`'  # a name
    r"|--[^\n]*|/\*.*?\*/"  # a comment
    r"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"  # a text, as PostgreSQL quotes it
    f"|{_PARAMETER}",
    re.DOTALL,
)


def parameters_of(query: str) -> frozenset[str]:
    """Return the names of a statement's parameters."""
    return frozenset(found["name"] for found in _TOKEN.finditer(query) if found["name"])


def parameters_alone(query: str) -> str:
    r"""Return a statement in which SQLAlchemy finds its parameters and no others.

    A `:name` in a text, a name or a comment comes back as `\:name`, which SQLAlchemy gives to
    the database as it was.
    """
    return _TOKEN.sub(
        lambda found: found[0] if found["name"] else re.sub(_PARAMETER, r"\\\g<0>", found[0]), query
    )
