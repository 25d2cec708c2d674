"""What to do about documents that are not UTF-8: which encoding a file looks like.

It only says so: what was meant is never guessed at while records are read.
"""

import re
import shlex
from pathlib import Path

from weighbridge.tasks.compression import BrokenStream, open_text

_FEWEST = 3
_HEAD_BYTES = 1 << 20
# Letters and signs that texts of Western Europe hold. Other encodings of one byte give other
# signs, or more of them than there are plain letters.
_TYPICAL = set("äöüßÄÖÜàâæçéèêëîïíìñóòôõœúùûÿåøÅØáãÀÂÇÉÈÊÑÓÚ€‚„…‘’“”•–—™«»°§´·¿¡©®£\u00a0")
_ASCII_LETTER = re.compile(rb"[A-Za-z]")


def encoding_hint(
    source: str, not_utf8: int, records: int, *, known_as: str | None = None
) -> str | None:
    """Say how to convert a source of which most records are not UTF-8.

    Args:
        source: Where the documents are.
        not_utf8: Records that were refused with `document.encoding`.
        records: All records.
        known_as: What people know the source as, where it is not the path.

    Returns:
        A hint; None when fewer than three or no more than half of the records were refused,
        or when the bytes are UTF-8 and the fault is another one, such as NUL.
    """
    if not_utf8 < _FEWEST or not_utf8 * 2 <= records:
        return None
    told = f"{not_utf8} of {records} records are not UTF-8"
    path = Path(source)
    if not path.is_file():
        return f"{told}: convert each file with {_iconv('FROM', None)}"
    how = convert_hint(path, named=known_as is None)
    return how and f"{told}; {how}"


def convert_hint(path: Path, *, named: bool = True) -> str | None:
    """Say how to convert a file; None if its bytes are UTF-8."""
    found = looks_like(path)
    if found == "UTF-8":
        return None
    file = path if named else None
    if found is None:
        return f"convert it: {_iconv('FROM', file)}, FROM being the encoding it was saved in"
    return f"the file looks like Windows-1252: {_iconv(found, file)}"


def looks_like(path: Path) -> str | None:
    """Name the encoding that a file looks like: UTF-8, CP1252, or None for any other."""
    try:
        file, _ = open_text(path)
        with file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError, BrokenStream):
        return None
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # A character may be cut at the end of what was read.
        if len(head) == _HEAD_BYTES and error.start > len(head) - 4:
            return "UTF-8"
    else:
        return "UTF-8"
    # Lines that are UTF-8 say nothing about the encoding of the others.
    others = b"\n".join(line for line in head.split(b"\n") if not _is_utf8(line))
    try:
        high = [sign for sign in others.decode("cp1252") if ord(sign) >= 0x80]
    except UnicodeDecodeError:
        return None
    typical = sum(sign in _TYPICAL for sign in high)
    few = len(high) < len(_ASCII_LETTER.findall(others))
    return "CP1252" if few and typical * 10 >= len(high) * 9 else None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _iconv(encoding: str, path: Path | None) -> str:
    if path is None or path.suffix in {".gz", ".zst", ".zstd"}:
        # What was piped in has no name, and iconv does not unpack.
        return f"iconv -f {encoding} -t UTF-8 FILE > utf8-FILE"
    converted = f"{path.stem}-utf8{path.suffix}"
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(converted)}"
