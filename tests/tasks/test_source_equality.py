"""Whatever holds the records, the same records come out; broken neighbours cost none."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weighbridge.tasks.sources import BadRecord, Document, read_documents

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

kept_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
whole = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
records = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.none() | kept_text,
            "text": st.none() | kept_text,
            "t": st.none() | kept_text,
            "n": st.none() | whole,
            "f": st.none() | finite,
            "b": st.none() | st.booleans(),
            "l": st.none() | st.lists(st.none() | whole, max_size=3),
            "o": st.none() | st.fixed_dictionaries({"k": st.none() | kept_text, "x": finite}),
        }
    ),
    min_size=1,
    max_size=6,
).map(lambda rows: [in_order(row) for row in rows])


def in_order(row: dict[str, Any]) -> dict[str, Any]:
    """Give every record its columns in one order, as a table has them."""
    inner = row["o"] and {name: row["o"][name] for name in ("k", "x")}
    return {**{name: row[name] for name in ("id", "text", "t", "n", "f", "b", "l")}, "o": inner}


def told(found: list[Document | BadRecord]) -> list[Any]:
    """Return what must be equal: all but lines, and messages, which name lines."""
    return [
        (each.position, each.external_id, each.code)
        if isinstance(each, BadRecord)
        else (each.position, each.external_id, each.text, json.dumps(each.metadata))
        for each in found
    ]


def read(path: Path, data: bytes, **options: Any) -> list[Document | BadRecord]:
    path.write_bytes(data)
    return list(read_documents(path, **options))


@same_folder
@given(records, st.sampled_from(["text", "{t}\\n{n} {o} {b}{{}}"]), st.sampled_from([None, 1, 4]))
def test_json_parquet_and_packed_files_give_what_json_lines_give(
    tmp_path: Path, rows: list[dict[str, Any]], text_field: str, indent: int | None
):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    options: dict[str, Any] = {"text_field": text_field}
    wanted = told(read(tmp_path / "a.jsonl", lines, **options))
    array = json.dumps(rows, indent=indent, ensure_ascii=indent == 1).encode()
    assert told(read(tmp_path / "a.json", array, **options)) == wanted
    members = gzip.compress(lines[:7]) + gzip.compress(b"") + gzip.compress(lines[7:])
    assert told(read(tmp_path / "a.jsonl.gz", members, **options)) == wanted
    frames = zstandard.compress(array[:9]) + zstandard.compress(array[9:])
    assert told(read(tmp_path / "a.json.zst", frames, **options)) == wanted
    types = {
        **dict.fromkeys(("id", "text", "t"), pa.string()),
        "n": pa.int64(),
        "f": pa.float64(),
        "b": pa.bool_(),
        "l": pa.list_(pa.int64()),
        "o": pa.struct([("k", pa.string()), ("x", pa.float64())]),
    }
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(types.items())))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert told(list(read_documents(tmp_path / "a.parquet", **options))) == wanted


@same_folder
@given(records, st.sampled_from(["text", "{t}\\n{n} {f}"]))
def test_a_query_gives_what_json_lines_give(
    tmp_path: Path, rows: list[dict[str, Any]], text_field: str
):
    # SQLite has neither booleans, nor lists, nor objects, nor a negative zero.
    rows = [
        {
            **{name: row[name] for name in ("id", "text", "t", "n")},
            "f": None if row["f"] is None else row["f"] + 0.0,
        }
        for row in rows
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    wanted = told(read(tmp_path / "a.jsonl", lines, text_field=text_field))
    path = tmp_path / "a.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("pragma synchronous = off")
    connection.execute("create table d (id text, text text, t text, n integer, f real)")
    connection.executemany("insert into d values (:id, :text, :t, :n, :f)", rows)
    connection.commit()
    connection.close()
    query = "select * from d order by rowid"
    assert told(list(read_documents(path, query=query, text_field=text_field))) == wanted


@same_folder
@given(st.lists(kept_text.filter(lambda text: text.strip() != ""), min_size=1, max_size=5))
def test_text_files_give_what_json_lines_give(tmp_path: Path, texts: list[str]):
    # A file's own byte order mark is no character of its text.
    texts = [text.removeprefix("\ufeff") + "." for text in texts]
    lines = "".join(
        json.dumps({"id": f"{number}.txt", "text": text}) + "\n"
        for number, text in enumerate(texts)
    ).encode()
    wanted = told(read(tmp_path / "a.jsonl", lines))
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    assert told(list(read_documents(folder))) == wanted


# --- broken neighbours in an array --------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | whole | kept_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(kept_text, inner, max_size=3),
    max_leaves=8,
)
elements = st.dictionaries(kept_text, values, max_size=3).map(
    lambda members: {**members, "text": "kept"}
)
broken_elements = st.sampled_from(
    [
        b'{"text": "never closed}',
        b'{"text": "never closed, "m": 1}',
        b'{"text": never opened", "m": 1}',
        b'{"text": "no brace", "m": {"k": [1, 2]}',
        b'{"text": "no bracket", "m": [1, 2}',
        b'{"text" "no colon"}',
        b'{"text": "no comma" "m": {"k": {"deep": 1}, "l": [{"a": 1}, {"b": 2}]}}',
        b'{"text": "\xff"}',
        b'{"text": NaN, "m": [{"a": 1}, {"a": 2}]}',
        b"{text: 'a'}",
        b'{"text": "escaped end\\"}',
        b"nope",
        b"[1, 2]",
        b'"text"',
        b'{"text": "x", }',
        b"{",
        b'{"',
    ]
)


@same_folder
@example([{"text": "kept"}], [(0, b"{"), (0, b'{"'), (0, b"nope")], None)
@given(
    st.lists(elements, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 4), broken_elements), max_size=3),
    st.sampled_from([None, 2]),
)
def test_broken_elements_lose_no_neighbour(
    tmp_path: Path, kept: list[dict[str, Any]], broken: list[tuple[int, bytes]], indent: int | None
):
    parts = [json.dumps(element, indent=indent).encode() for element in kept]
    for at, element in broken:
        parts.insert(min(at, len(parts)), element)
    separator = b",\n" if indent else b", "
    found = read(tmp_path / "a.json", b"[" + separator.join(parts) + b"]")
    metadata = [each.metadata for each in found if isinstance(each, Document)]
    expected = [{k: v for k, v in each.items() if k not in {"id", "text"}} for each in kept]
    assert [each for each in metadata if each in expected] == expected
    # The broken ones are told, and nothing else becomes a document.
    assert len(metadata) == len(expected)
    assert any(isinstance(each, BadRecord) for each in found) == bool(broken)
