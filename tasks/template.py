r"""Which columns make the text of a document: one, or several in a template. A leaf.

A text field without braces is the name of a column. With braces it is a template:

- `{subject}` stands for a column, and `{"a {strange} name"}` for one whose name holds
  braces or begins with a quote (a JSON string; also for a single such column);
- `{{` and `}}` are braces; `\n`, `\t` and `\\`, which shells pass on as two
  characters, are a new line, a tab and a backslash.

A column that is null is an empty string, a number or any other value its JSON. A record
without one of the columns is refused, since a misspelt name would else go unseen; so is
one in which all of them are null.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.refusals import kind_of, quoted, refuse

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\", "{{": "{", "}}": "}"}
_PART = re.compile(
    r"""(?P<escape>\\[nt\\]|\{\{|\}\})
    |\{(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<name>[^{}"][^{}]*))\}
    |(?P<brace>[{}])
    |(?P<literal>[^{}\\]+|\\)""",
    re.VERBOSE | re.DOTALL,
)
_HINT = (
    "write a column as {subject}, a brace as {{ or }}, and a column whose name holds braces "
    'as {"its {name}"}'
)


class _Column(NamedTuple):
    name: str


@dataclass(frozen=True, slots=True)
class TextField:
    """What the text of a document is made of.

    Attributes:
        columns: The columns, in the order of their first use.
        parts: Columns and what stands between them; None for a single column.
    """

    columns: tuple[str, ...]
    parts: tuple[str | _Column, ...] | None = None

    def text_of(self, values: dict[str, Any], where: str) -> str:
        """Return the text of a record.

        Raises:
            Refusal: A column is missing or of the wrong type, or there is no text.
        """
        self._require_columns(values, where)
        if self.parts is None:
            text = values[self.columns[0]]
            if not isinstance(text, str):
                column = quoted(self.columns[0])
                refuse("document.not_text", f"{column} {where} must be text, got {kind_of(text)}")
        else:
            text = "".join(
                _rendered(values[part.name]) if isinstance(part, _Column) else part
                for part in self.parts
            )
        blank = not text.strip()
        if blank or not any(_rendered(values[name]).strip() for name in self.columns):
            columns = ", ".join(map(quoted, self.columns))
            came = "only white space" if any(map(values.get, self.columns)) else "no characters"
            refuse("document.empty", f"{columns} {where} must not be blank, got {came}")
        return text

    def _require_columns(self, values: dict[str, Any], where: str) -> None:
        for name in self.columns:
            if name not in values:
                refuse(
                    "document.missing_text",
                    f"the record {where} must have {quoted(name)}, and {_listed(values)}",
                )
        if all(values[name] is None for name in self.columns):
            columns = " or ".join(map(quoted, self.columns))
            are = "is null" if len(self.columns) == 1 else "all are null"
            refuse("document.missing_text", f"the record {where} must have {columns}, and {are}")


def parse_text_field(text_field: str) -> TextField:
    """Read the name of a column, or a template.

    Raises:
        SourceError: A brace is alone, a name is empty, or no column is named.
    """
    if "{" not in text_field and "}" not in text_field:
        return TextField((text_field,))
    parts: list[str | _Column] = []
    for found in _PART.finditer(text_field):
        if found["brace"]:
            raise SourceError(
                "a template must have matching braces around names of columns, got "
                f"{quoted(text_field)} with a lone {found['brace']} at character "
                f"{found.start() + 1}",
                hint=_HINT,
            )
        if found["name"]:
            parts.append(_Column(found["name"]))
        elif found["quoted"]:
            parts.append(_Column(_unquoted(text_field, found["quoted"])))
        else:
            parts.append(_ESCAPES.get(found[0], found[0]))
    columns = tuple(dict.fromkeys(part.name for part in parts if isinstance(part, _Column)))
    if not columns:
        raise SourceError(
            f"a template must name at least one column, got {quoted(text_field)}", hint=_HINT
        )
    if len(parts) == 1:
        return TextField(columns)
    return TextField(columns, tuple(parts))


def _unquoted(template: str, name: str) -> str:
    try:
        return json.loads(name)
    except ValueError as error:
        raise SourceError(
            f"a quoted column of a template must be a JSON string, got {quoted(template)}",
            hint=_HINT,
        ) from error


def _rendered(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _listed(values: dict[str, Any]) -> str:
    names = [quoted(name) for name in list(values)[:8]]
    return f"has {', '.join(names) or 'no columns'}{', …' if len(values) > 8 else ''}"
