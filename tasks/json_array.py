r"""The elements of a JSON array, cut one by one in bounded memory.

Only the borders of elements are found here; each element is then parsed by the very
parser of JSON lines. So one that is broken is one bad record, if reading can find where
the next one begins:

- Brackets are counted outside strings. What shows that an element is broken is seen at
  once: a string that does not end on its line or before `,`, `:`, `}` or `]`, a bracket
  that closes another kind, an object where a key or an operator must stand.
- From the start of a broken element the next one is looked for: a brace and a key, behind
  a comma, a brace or white space (a quote inside a string is escaped, so no text looks
  like that). An object inside the broken element is told from an element by what
  follows: it closes the one around it. Where elements begin on lines of their own, the
  next line with the same indentation and a brace is an element in any case.
- A missing or superfluous comma costs nothing. Arrays behind each other are read as one.
  What follows the last `]`, and a file that ends without one, is one bad record.

`ijson` would have been shorter, and ends at the first fault.
"""

import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from weighbridge.tasks.compression import BrokenStream, open_text
from weighbridge.tasks.records import json_record, unreadable_rest
from weighbridge.tasks.refusals import MAX_RECORD_BYTES, Record, Refusal, too_long

_CHUNK = 64 * 1024
_BLANK = re.compile(rb"[ \t\r\n]*+")
_BETWEEN = re.compile(rb"[ \t\r\n,]*+")
# A raw line break ends a string, since JSON allows none inside.
_STRING = rb'"(?:[^"\\\n]++|\\.)*+"'
_WHOLE = re.compile(_STRING)
_INSIDE = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb"(?=[ \t\r\n]*+[,:}\]]))*+")
_OUTSIDE = re.compile(rb'(?:[^"{}\[\],]++|' + _STRING + rb"(?=[ \t\r\n]*+[,:}\]]))*+")
_OBJECT = re.compile(rb"(?<=[ \t\r\n,}])\{[ \t\r\n]*+(?:" + _STRING + rb"[ \t\r\n]*+:|\})")
_OPENERS = {ord("}"): ord("{"), ord("]"): ord("[")}
_BEFORE_OPENER = {ord("{"): b":", ord("["): b"[,"}
_LOOK_AHEAD = 64
_OVERLAP = 4096


class _Incomplete(Exception):  # noqa: N818
    """The border of an element is not in the buffer yet."""


class _Broken(Exception):  # noqa: N818
    """The element is not JSON, and where it seems to end means nothing."""


class _ClosesTooMuch(_Broken):
    """A brace is closed that was opened before the element."""


class _Window:
    """A part of a file, from the element at hand on."""

    def __init__(self, file: BufferedReader, offset: int) -> None:
        self._file = file
        self.data = b""
        self.at = 0
        self.offset = offset
        self.line = 1
        self.ended = False
        self.fault: BrokenStream | None = None

    @property
    def size(self) -> int:
        return len(self.data) - self.at

    def more(self) -> None:
        """Read on, as much again as is there, so that long elements take linear time."""
        parts = [self.data[self.at :]]
        wanted = max(_CHUNK, len(parts[0]))
        try:
            while wanted > 0 and not self.ended:
                parts.append(self._file.read1(_CHUNK))
                wanted -= len(parts[-1])
                self.ended = not parts[-1]
        except BrokenStream as error:
            self.ended, self.fault = True, error
        self.data, self.at = b"".join(parts), 0

    def take(self, end: int) -> bytes:
        """Take what stands before a place in the data."""
        taken = self.data[self.at : end]
        self.at = end
        self.offset += len(taken)
        self.line += taken.count(b"\n")
        return taken

    def skip(self, pattern: re.Pattern[bytes]) -> bytes:
        """Take what a pattern of single bytes matches; return the end of it."""
        skipped = b""
        while True:
            match = pattern.match(self.data, self.at)
            skipped = (skipped + self.take(match.end() if match else self.at))[-_OVERLAP:]
            if self.size or self.ended:
                return skipped
            self.more()


def json_records(path: Path) -> Iterator[Record]:
    """Yield one record per element of the array that a file holds."""
    file, start = open_text(path)
    with file:
        yield from _Elements(_Window(file, start)).records()


class _Elements:
    """Cuts a window into the elements of the array."""

    def __init__(self, window: _Window) -> None:
        self._window = window
        self._indent: bytes | None = None

    def records(self) -> Iterator[Record]:
        window = self._window
        closed = True
        while True:
            blank = window.skip(_BLANK if closed else _BETWEEN)
            self._indent = blank.rpartition(b"\n")[2] if b"\n" in blank else None
            if not window.size:
                break
            sign = window.data[window.at]
            if sign == ord("]") and not closed:
                closed = True
                window.take(window.at + 1)
            elif closed:
                closed = False
                if sign == ord("["):
                    window.take(window.at + 1)
                else:  # what follows may be records: they are not lost
                    yield _fault(window.line, "nothing may follow the last ] but another array")
            else:
                line, offset = window.line, window.offset
                raw = self._element()
                record = (
                    json_record(raw.rstrip(b" \t\r\n,"), line, offset)
                    if len(raw) <= MAX_RECORD_BYTES
                    else Record(line, {}, too_long(f"on line {line}"))
                )
                if record.refusal and window.ended and not window.size:
                    # It ends with the file, and stands for the end that is missing too.
                    yield unreadable_rest(window.fault, line) if window.fault else record
                    return
                yield record
        if window.fault:
            yield unreadable_rest(window.fault, window.line)
        elif not closed:
            yield _fault(window.line, "an array must end with ], and the file ends before it")

    def _element(self) -> bytes:
        """Take one element, more than `MAX_RECORD_BYTES` of one that is too long."""
        window = self._window
        while True:
            try:
                return window.take(_border(window.data, window.at))
            except _Incomplete:
                if window.ended or window.size > MAX_RECORD_BYTES:
                    return self._broken()
                window.more()
            except _Broken:
                return self._broken()

    def _broken(self) -> bytes:
        """Take everything before the next element; of what is too long only the start."""
        window = self._window
        start = b""
        while True:
            enough = window.ended or window.size > MAX_RECORD_BYTES
            at = self._next_start(enough)
            if at is None and window.ended:
                at = len(window.data)
            if at is not None:
                return start + window.take(at)
            if enough:
                start = start or window.data[window.at : window.at + MAX_RECORD_BYTES + 1]
                window.take(len(window.data) - _OVERLAP)
            window.more()

    def _next_start(self, enough: bool) -> int | None:
        """Return where an element after the one at hand begins, if that can be told."""
        data, at = self._window.data, self._window.at
        on_line = None
        if self._indent is not None:
            found = re.compile(rb"\n" + re.escape(self._indent) + rb"(?=\{)").search(data, at)
            on_line = found.end() if found else None
        if on_line is None and not enough and self._indent is not None:
            return None
        until = len(data) if on_line is None else on_line
        for found in _OBJECT.finditer(data, at + 1, until):
            try:
                if _is_element(data, found.start(), until):
                    return found.start()
            except _Incomplete:
                return found.start() if enough else None
        return on_line


def _border(data: bytes, start: int) -> int:
    """Return where the element that begins at `start` ends: at a comma or a closing bracket.

    Raises:
        _Incomplete: Not before the end of the data.
        _Broken: Brackets or strings are not as they must be.
    """
    open_brackets = bytearray()
    at = start
    while True:
        match = (_INSIDE if open_brackets else _OUTSIDE).match(data, at)
        at = match.end() if match else at
        if at == len(data):
            raise _Incomplete
        sign = data[at]
        if sign == ord('"'):
            whole = _WHOLE.match(data, at)
            if whole and _BLANK.fullmatch(data, whole.end()):
                raise _Incomplete
            raise _Broken if whole or b"\n" in data[at:] else _Incomplete
        if not open_brackets and sign in b",]":
            return at
        if sign in b"{[":
            if at > start and not (
                open_brackets and _sign_before(data, at) in _BEFORE_OPENER[open_brackets[-1]]
            ):
                raise _Broken
            open_brackets.append(sign)
        elif not open_brackets:
            raise _ClosesTooMuch
        elif open_brackets.pop() != _OPENERS[sign]:
            raise _Broken
        at += 1


def _sign_before(data: bytes, at: int) -> int:
    while data[at - 1] in b" \t\r\n":
        at -= 1
    return data[at - 1]


def _is_element(data: bytes, start: int, until: int) -> bool:
    """Tell an element of the array from an object inside a broken one.

    What follows an object inside another one closes that other one before the next
    element of the array begins.

    Raises:
        _Incomplete: The data ends before that can be told.
    """
    if _sign_before(data, start) == ord(":"):
        return False
    at = start
    for _ in range(_LOOK_AHEAD):
        if at >= until:
            break
        try:
            at = _border(data, at)
        except _Broken as error:
            return not isinstance(error, _ClosesTooMuch)
        if data[at] == ord("]"):
            rest = _BLANK.match(data, at + 1)
            return rest is not None and data[rest.end() : rest.end() + 1] in {b"", b"["}
        between = _BETWEEN.match(data, at)
        at = between.end() if between else at
    return True


def _fault(line: int, reason: str) -> Record:
    return Record(line, {}, Refusal("document.bad_json", f"{reason} (line {line})"))
