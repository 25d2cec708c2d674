"""Every kind of source: 10,000 records, five of them broken, each in its own way.

The files are written here by json, csv, pyarrow, sqlite3, gzip and zstandard, never by
the readers' own code.
"""

import csv
import gzip
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from weighbridge.tasks.sources import BadRecord, Document, read_documents

COUNT = 10_000
# First and last, neighbours, and two far apart.
BROKEN = (0, 4999, 5000, 7777, 9999)


def text_of(number: int) -> str:
    return f'Ticket {number}: it\'s "broken" – naïve, 価格; {{[x]}}'


def fields(number: int) -> dict[str, Any]:
    return {"id": f"t-{number}", "text": text_of(number), "n": number}


def expect(
    found: list[Document | BadRecord],
    codes: tuple[str, ...],
    line_of: Callable[[int], int | None],
    metadata: Callable[[int], dict[str, Any]] = lambda number: {"n": number},
) -> None:
    wanted = dict(zip(BROKEN, codes, strict=True))
    assert [each.position for each in found] == list(range(COUNT))
    assert [each.line for each in found] == [line_of(number) for number in range(COUNT)]
    assert {each.position: each.code for each in found if isinstance(each, BadRecord)} == wanted
    for number, each in enumerate(found):
        if isinstance(each, Document):
            assert (each.external_id, each.text) == (f"t-{number}", text_of(number))
            assert each.metadata == metadata(number)


# --- text kinds, plain and packed -----------------------------------------------------


def jsonl_file() -> tuple[bytes, tuple[str, ...], Callable[[int], int]]:
    lines = [json.dumps(fields(number)).encode() for number in range(COUNT)]
    lines[0] = b'{"id": "t-0", "text": "cut'
    lines[4999] = b'{"id": "t-4999", "text": "\xe9"}'
    lines[5000] = b'{"id": "t-5000", "text": null}'
    lines[7777] = b'{"id": "t-7777", "text": 7}'
    lines[9999] = b'{"id": "t-9999", "text": " "}'
    codes = ("bad_json", "encoding", "missing_text", "not_text", "empty")
    # A blank line behind the first hundred.
    data = b"\n".join([*lines[:100], b"", *lines[100:]])
    return data, codes, lambda number: number + (1 if number < 100 else 2)


def json_elements() -> tuple[list[bytes], tuple[str, ...]]:
    elements = [json.dumps(fields(number)).encode() for number in range(COUNT)]
    elements[0] = b'{"id": "t-0", "text": "never closed}'
    elements[4999] = b'{"id": "t-4999", "text": "no brace", "m": {"k": [1, 2]}'
    elements[5000] = b'{"id": "t-5000" "text": "no comma", "m": [{"id": 1}, {"id": 2}]}'
    elements[7777] = b'{"id": "t-7777", "text": "\xff"}'
    elements[9999] = b'{"id": "t-9999", "text": ["[", "{"]}'
    return elements, ("bad_json", "bad_json", "bad_json", "encoding", "not_text")


def json_by_line() -> tuple[bytes, tuple[str, ...], Callable[[int], int]]:
    elements, codes = json_elements()
    return b"[\n" + b",\n".join(elements) + b"\n]\n", codes, lambda number: number + 2


def json_on_one_line() -> tuple[bytes, tuple[str, ...], Callable[[int], int]]:
    elements, codes = json_elements()
    return b"\xef\xbb\xbf[" + b", ".join(elements) + b"]", codes, lambda _: 1


def json_indented() -> tuple[bytes, tuple[str, ...], Callable[[int], int]]:
    good = [json.dumps(fields(number), indent=2).encode() for number in range(COUNT)]
    # The broken ones on five lines too, so that lines are easy to tell.
    good[0] = b'{\n"id": "t-0",\n"text": "never closed,\n"n": 1\n}'
    good[4999] = b'{\n"id": "t-4999",\n"text": "a",\n"n": [{"id": 1\n}'
    good[5000] = b'{\n"id": "t-5000",\n"text": nope,\n"n": 1\n}'
    good[7777] = b'{\n"id": "t-7777",\n"text": "\xff",\n"n": 1\n}'
    good[9999] = b'{\n"id": "t-9999",\n"other": "a",\n"n": 1\n}'
    body = b",\n".join(b"  " + each.replace(b"\n", b"\n  ") for each in good)
    codes = ("bad_json", "bad_json", "bad_json", "encoding", "missing_text")
    return b"[\n" + body + b"\n]\n", codes, lambda number: 2 + 5 * number


def separated(separator: str) -> tuple[bytes, tuple[str, ...], Callable[[int], int]]:
    rows: list[bytes] = []
    for number in range(COUNT):
        out = io.StringIO(newline="")
        csv.writer(out, delimiter=separator, quoting=csv.QUOTE_ALL).writerow(
            fields(number).values()
        )
        rows.append(out.getvalue().encode())
    cut = separator.encode()
    rows[0] = cut.join([b"t-0", b"one", b"two", b"three"]) + b"\r\n"
    rows[4999] = cut.join([b"t-4999", b'"never closed', b"4999"]) + b"\r\n"
    rows[5000] = cut.join([b"t-5000", b"a\xe9", b"5000"]) + b"\r\n"
    rows[7777] = cut.join([b"t-7777", b"a\x00", b"7777"]) + b"\r\n"
    rows[9999] = cut.join([b"t-9999", b"", b"9999"])
    codes = ("bad_csv", "bad_csv", "encoding", "encoding", "empty")
    return cut.join([b"id", b"text", b"n"]) + b"\n" + b"".join(rows), codes, lambda n: n + 2


TEXT_KINDS = {
    "lines.jsonl": jsonl_file,
    "by_line.json": json_by_line,
    "one_line.json": json_on_one_line,
    "indented.json": json_indented,
    "commas.csv": lambda: separated(","),
    "semicolons.csv": lambda: separated(";"),
    "tabs.tsv": lambda: separated("\t"),
}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": lambda data: zstandard.ZstdCompressor(level=1).compress(data),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", TEXT_KINDS)
def test_ten_thousand_records_of_text(tmp_path: Path, name: str, packing: str):
    data, codes, line_of = TEXT_KINDS[name]()
    path = tmp_path / (name + packing)
    path.write_bytes(PACKINGS[packing](data))
    as_text = name.endswith(("csv", "tsv"))
    expect(
        list(read_documents(path)),
        tuple(f"document.{code}" for code in codes),
        line_of,
        lambda number: {"n": str(number) if as_text else number},
    )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["lines.jsonl", "one_line.json", "commas.csv"])
def test_a_pipe_has_no_name_to_go_by(tmp_path: Path, name: str, packing: str):
    # Broken first records must not hide what kind of file it is.
    data, codes, _ = TEXT_KINDS[name]()
    path = tmp_path / "stdin"
    path.write_bytes(PACKINGS[packing](data))
    found = list(read_documents(path))
    assert len(found) == COUNT
    assert [each.code for each in found if isinstance(each, BadRecord)] == [
        f"document.{code}" for code in codes
    ]


# --- tables ---------------------------------------------------------------------------


def test_ten_thousand_rows_of_parquet(tmp_path: Path):
    texts: list[bytes | None] = [text_of(number).encode() for number in range(COUNT)]
    texts[0], texts[4999], texts[5000] = None, b"a\xe9", b"  "
    # Arrow itself checks no UTF-8, so a text column can hold anything.
    column = unchecked(texts)
    blobs: list[bytes | None] = [None] * COUNT
    blobs[7777] = b"bytes"
    floats = [0.5] * COUNT
    floats[9999] = float("nan")
    table = pa.table(
        {
            "id": [f"t-{number}" for number in range(COUNT)],
            "text": column,
            "n": pa.array(range(COUNT), pa.int32()),
            "blob": pa.array(blobs, pa.binary()),
            "share": pa.array(floats, pa.float64()),
        }
    )
    path = tmp_path / "docs.parquet"
    pq.write_table(table, path, row_group_size=3000)
    codes = ("missing_text", "encoding", "empty", "bad_value", "bad_value")
    expect(
        list(read_documents(path)),
        tuple(f"document.{code}" for code in codes),
        lambda _: None,
        lambda number: {"n": number, "blob": None, "share": 0.5},
    )


def unchecked(texts: list[bytes | None]) -> Any:
    binary = pa.array(texts, pa.binary())
    return pa.StringArray.from_buffers(len(texts), *binary.buffers()[1:], binary.buffers()[0])


@pytest.mark.parametrize("as_url", [False, True])
def test_ten_thousand_rows_of_a_query(tmp_path: Path, as_url: bool):
    path = tmp_path / "tickets.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table tickets (id, text, n)")
        rows: list[tuple[Any, ...]] = [tuple(fields(number).values()) for number in range(COUNT)]
        rows[0] = ("t-0", None, 0)
        rows[5000] = ("t-5000", 12, 5000)
        rows[7777] = ("t-7777", b"blob", 7777)
        rows[9999] = ("t-9999", "a", float("inf"))
        connection.executemany("insert into tickets values (?, ?, ?)", rows)
        connection.execute("update tickets set text = cast(x'61e9' as text) where n = 4999")
    connection.close()
    source = f"sqlite:///{path}" if as_url else path
    query = "select id, text, n from tickets order by rowid"
    codes = ("missing_text", "encoding", "not_text", "bad_value", "bad_value")
    expect(
        list(read_documents(source, query=query)),
        tuple(f"document.{code}" for code in codes),
        lambda _: None,
    )


def test_ten_thousand_text_files(tmp_path: Path):
    folder = tmp_path / "docs"
    for hundred in range(100):
        (folder / f"{hundred:02}").mkdir(parents=True)
    names = [f"{number // 100:02}/{number:04}.txt" for number in range(COUNT)]
    for number, name in enumerate(names):
        (folder / name).write_text(text_of(number), encoding="utf-8")
    (folder / names[0]).write_bytes("UTF-16".encode("utf-16"))
    (folder / names[4999]).write_bytes(b"a\xe9")
    (folder / names[5000]).write_bytes(b"")
    (folder / names[7777]).unlink()
    (folder / names[7777]).symlink_to("nowhere")
    (folder / names[9999]).write_bytes(gzip.compress(b"text")[:-9])
    found = list(read_documents(folder))
    codes = ("encoding", "encoding", "empty", "unreadable", "unreadable")
    assert {each.position: each.code for each in found if isinstance(each, BadRecord)} == {
        number: f"document.{code}" for number, code in zip(BROKEN, codes, strict=True)
    }
    assert [each.external_id for each in found] == names
    assert {each.line for each in found} == {None}
    assert all(
        each.text == text_of(number) and each.metadata == {}
        for number, each in enumerate(found)
        if isinstance(each, Document)
    )


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;\r", "\ufeffsep=;"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "piped"])
def test_a_first_line_names_the_separator(first: str, name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(f"{first}\nid;text\n1;a,b,text\n")
    (found,) = read_documents(path)
    assert found == Document(0, 3, "1", "a,b,text", {})


def test_such_a_line_further_down_is_a_record(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("text\nsep=;\nsep=|\n")
    assert [each.line for each in read_documents(path)] == [2, 3]


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ";"), ("a.csv", ","), ("a.tsv", "\t")])
def test_rows_without_a_cell_are_blank_lines(name: str, sign: str, tmp_path: Path):
    path = tmp_path / name
    empty = sign * 2
    # In front of the header, between records, with another number of cells, and at the end.
    lines = [empty, f"id{sign}text{sign}n", empty, f"1{sign}a{sign}", sign * 7, f"2{sign * 2}3"]
    path.write_text("\n".join([*lines, empty, empty, ""]))
    found = list(read_documents(path))
    assert [(each.position, each.line, each.external_id) for each in found] == [
        (0, 4, "1"),
        (1, 6, "2"),
    ]
    # A row with anything in it stays a record.
    assert isinstance(found[1], BadRecord)
