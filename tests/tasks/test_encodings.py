"""Documents that are not UTF-8: what the hint says, and when there is none."""

import gzip
from pathlib import Path

import pytest

from weighbridge.tasks.encodings import encoding_hint, looks_like
from weighbridge.tasks.errors import SourceError
from weighbridge.tasks.sources import read_documents

GERMAN = "id;text\n" + "".join(f"T-{n};Die Übergabe fällt aus – “müde”, 5 €\n" for n in range(5))
RUSSIAN = "id;text\n" + "".join(f"T-{n};Почему мой заказ не пришёл\n" for n in range(5))
POLISH = "id;text\n" + "".join(f"T-{n};Zażółć gęślą jaźń, proszę\n" for n in range(5))


@pytest.mark.parametrize(
    ("text", "encoding", "found"),
    [
        (GERMAN, "utf-8", "UTF-8"),
        (GERMAN, "cp1252", "CP1252"),
        (POLISH, "cp1250", None),
        (RUSSIAN, "cp1251", None),
        (RUSSIAN, "koi8-r", None),
        ("id;text\n1;d\u00e9j\u00e0 vu\n", "mac-roman", None),
    ],
)
def test_what_a_file_looks_like(text: str, encoding: str, found: str | None, tmp_path: Path):
    path = tmp_path / "tickets.csv"
    path.write_bytes(text.encode(encoding, "replace"))
    assert looks_like(path) == found


def test_lines_of_utf8_do_not_hide_the_others(tmp_path: Path):
    path = tmp_path / "mixed.csv"
    path.write_bytes("id;text\n1;Übergabe\n".encode() + "2;Übergabe für alle\n".encode("cp1252"))
    assert looks_like(path) == "CP1252"


def test_a_character_that_is_cut_is_no_fault(tmp_path: Path):
    path = tmp_path / "long.txt"
    # An odd byte in front puts the middle of a character at the end of the first MiB.
    path.write_bytes(b"x" + "é".encode() * (1 << 20))
    assert looks_like(path) == "UTF-8"


def test_the_hint_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("my tickets.csv").write_bytes(GERMAN.encode("cp1252"))
    told = encoding_hint("my tickets.csv", 59, 61)
    assert told == (
        "59 of 61 records are not UTF-8; the file looks like Windows-1252: "
        "iconv -f CP1252 -t UTF-8 'my tickets.csv' > 'my tickets-utf8.csv'"
    )
    piped = encoding_hint("my tickets.csv", 59, 61, known_as="stdin")
    assert piped is not None
    assert piped.endswith("iconv -f CP1252 -t UTF-8 FILE > utf8-FILE")
    Path("russian.csv").write_bytes(RUSSIAN.encode("koi8-r"))
    told = encoding_hint("russian.csv", 5, 5)
    assert told is not None
    assert "looks like" not in told
    assert "iconv -f FROM -t UTF-8 russian.csv > russian-utf8.csv" in told
    Path("packed.csv.gz").write_bytes(gzip.compress(GERMAN.encode("cp1252")))
    told = encoding_hint("packed.csv.gz", 5, 5)
    assert told is not None
    assert "Windows-1252: iconv -f CP1252 -t UTF-8 FILE" in told


def test_few_records_or_another_fault_give_no_hint(tmp_path: Path):
    path = tmp_path / "tickets.csv"
    path.write_bytes(GERMAN.encode("cp1252"))
    assert encoding_hint(str(path), 2, 2) is None
    assert encoding_hint(str(path), 5, 10) is None
    path.write_bytes(b"id,text\n" + b"1,a\0b\n" * 5)
    assert encoding_hint(str(path), 5, 5) is None


def test_a_header_that_is_not_utf8_has_the_same_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("tickets.csv").write_bytes("Schlüssel;text\n1;a\n".encode("cp1252"))
    with pytest.raises(SourceError) as caught:
        read_documents("tickets.csv")
    assert caught.value.hint is not None
    assert "iconv -f CP1252 -t UTF-8 tickets.csv > tickets-utf8.csv" in caught.value.hint
