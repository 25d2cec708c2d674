"""Folders, globs and single text files: each file is one document."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

from weighbridge.tasks import text_files
from weighbridge.tasks.sources import BadRecord, Document, SourceError, read_documents


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def ids(source: Path | str, **options: Any) -> list[str | None]:
    return [each.external_id for each in read_documents(source, **options)]


def test_a_folder_is_read_in_order_without_what_is_hidden(tmp_path: Path):
    fill(
        tmp_path,
        {
            "b.txt": b"b",
            "a/z.md": b"z",
            "a/b/c.TEXT": b"c",
            "a.rst": b"r",
            "Ü – name\n?.txt": b"u",
            "packed.txt.gz": gzip.compress(b"packed"),
            "packed.md.zst": zstandard.compress(b"packed"),
            ".hidden.txt": b"h",
            ".git/x.txt": b"h",
            "image.png": b"p",
            "rows.jsonl": b"{}",
        },
    )
    (tmp_path / "folder.txt").mkdir()
    found = list(read_documents(tmp_path))
    assert [each.external_id for each in found] == [
        "a.rst",
        "a/b/c.TEXT",
        "a/z.md",
        "b.txt",
        "packed.md.zst",
        "packed.txt.gz",
        "Ü – name\n?.txt",
    ]
    assert [each.text for each in found if isinstance(each, Document)] == [
        *"rczb",
        "packed",
        "packed",
        "u",
    ]
    assert {each.line for each in found} == {None}


def test_a_glob_takes_what_it_matches(tmp_path: Path):
    fill(tmp_path, {"d/a.html": b"a", "d/e/b.html": b"b", "d/c.txt": b"c", "d/.x.html": b"x"})
    assert ids(f"{tmp_path}/d/*.html") == ["a.html"]
    assert ids(f"{tmp_path}/**/*.html") == ["d/a.html", "d/e/b.html"]
    assert ids(f"{tmp_path}/d/[ac].*") == ["a.html", "c.txt"]
    with pytest.raises(SourceError, match="matches none"):
        read_documents(f"{tmp_path}/*.pdf")


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path):
    fill(tmp_path, {"[1].txt": b'{"text": "a"}\n', "d[1]/a.txt": b"a"})
    (found,) = read_documents(tmp_path / "[1].txt")
    assert isinstance(found, Document)
    assert found.text == "a"
    assert ids(tmp_path / "d[1]") == ["a.txt"]


def test_a_glob_finds_a_file_once(tmp_path: Path):
    fill(tmp_path, {"a/b/y.txt": b"y", "x.txt": b"x"})
    # Two ** meet each folder in several ways.
    assert ids(f"{tmp_path}/**/**/*.txt") == ["a/b/y.txt", "x.txt"]


def test_a_glob_of_record_files_needs_the_format_named(tmp_path: Path):
    fill(tmp_path, {"a.jsonl": b"{}", "b.csv.gz": b"x"})
    for pattern in ("*.jsonl", "*.gz"):
        with pytest.raises(SourceError, match="a file of records") as caught:
            read_documents(f"{tmp_path}/{pattern}")
        assert "--format text" in str(caught.value.hint)
    assert ids(f"{tmp_path}/*.jsonl", format="text") == ["a.jsonl"]


def test_a_single_file_is_one_text_if_it_says_so(tmp_path: Path):
    fill(tmp_path, {"note.md": b"# Note\n", "note.txt": b"a note"})
    assert ids(tmp_path / "note.md") == ["note.md"]
    assert ids(tmp_path / "note.txt", format="text") == ["note.txt"]
    # Else a .txt file is looked at as records, and the error says what to do.
    with pytest.raises(SourceError) as caught:
        read_documents(tmp_path / "note.txt")
    assert "--format text" in str(caught.value.hint)


def test_what_cannot_be_read_is_one_bad_record_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 20)
    fill(
        tmp_path,
        {
            "a.txt": b"\xef\xbb\xbfgood",
            "b.txt": b"bad \xff",
            "c.txt": b"a\0",
            "d.txt": "wide".encode("utf-16"),
            "e.txt": b"x" * 21,
            "f.txt": b"\n",
            "g.txt.gz": gzip.compress(b"text")[:-1],
            "h.txt.gz": gzip.compress(b"x" * 10**6),
            "z.txt": b"last",
        },
    )
    os.mkfifo(tmp_path / "i.txt")
    (tmp_path / "j.txt").symlink_to(tmp_path / "none")
    found = list(read_documents(tmp_path))
    assert [each.code if isinstance(each, BadRecord) else each.text for each in found] == [
        "good",
        "document.encoding",
        "document.encoding",
        "document.encoding",
        "document.too_long",
        "document.empty",
        "document.unreadable",
        "document.too_long",
        "document.unreadable",
        "document.unreadable",
        "last",
    ]
    bad = found[1]
    assert isinstance(bad, BadRecord)
    assert "0xff at offset 4 of the record (4 of the file)" in bad.message
    assert bad.external_id == "b.txt"


def test_a_name_that_is_not_utf8_refuses_its_file(tmp_path: Path):
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("a")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    fill(tmp_path, {"a.txt": b"a"})
    assert [getattr(each, "code", None) for each in read_documents(tmp_path)] == [
        None,
        "document.encoding",
    ]


def test_folders_that_are_no_source(tmp_path: Path):
    (tmp_path / "a.csv").write_text("id,text\n")
    with pytest.raises(SourceError, match="holds none") as caught:
        read_documents(tmp_path)
    assert "glob" in str(caught.value.hint)
    with pytest.raises(SourceError, match="the format named is csv"):
        read_documents(tmp_path, format="csv")
    with pytest.raises(SourceError, match="does not exist"):
        read_documents(tmp_path / "none.md")
    with pytest.raises(SourceError, match="does not exist"):
        read_documents(tmp_path / "none", format="text")


def test_links_do_not_lead_in_circles(tmp_path: Path):
    fill(tmp_path, {"d/a.txt": b"a"})
    (tmp_path / "d" / "again").symlink_to(tmp_path)
    assert ids(tmp_path) == ["d/a.txt"]


def test_text_files_have_two_columns(tmp_path: Path):
    fill(tmp_path, {"a.txt": b"a"})
    (found,) = read_documents(tmp_path, text_field="{id}: {text}")
    assert isinstance(found, Document)
    assert found.text == "a.txt: a"
    with pytest.raises(SourceError, match='a text file must have a column "body"'):
        read_documents(tmp_path, text_field="body")
