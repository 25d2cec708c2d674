"""Rows of Parquet files: types kept, values refused one by one, damage counted."""

import datetime as dt
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weighbridge.tasks import parquet
from weighbridge.tasks.sources import BadRecord, Document, SourceError, read_documents


def read(tmp_path: Path, columns: dict[str, Any], **options: Any) -> list[Document | BadRecord]:
    path = tmp_path / "docs.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return list(read_documents(path))


def kept(tmp_path: Path, column: Any) -> list[Any]:
    """Return what becomes of a column beside texts; codes where it refuses."""
    found = read(tmp_path, {"text": ["a"] * len(column), "m": column})
    return [each.metadata["m"] if isinstance(each, Document) else each.code for each in found]


NOON = dt.datetime(2024, 2, 29, 12, 0, 0, 123456)  # noqa: DTZ001 - of no zone on purpose
BERLIN = dt.timezone(dt.timedelta(hours=1))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([1, None], pa.int8()), [1, None]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([1.5, None]), [1.5, None]),
        (pa.array([0.5], pa.float16()), [0.5]),
        (pa.array([True, False, None]), [True, False, None]),
        (pa.array([None], pa.null()), [None]),
        (pa.array(["a", "a", "b"]).dictionary_encode(), ["a", "a", "b"]),
        (pa.array(["ü"], pa.large_string()), ["ü"]),
        (pa.array([decimal.Decimal("1.50")]), ["1.50"]),
        (pa.array([dt.date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([dt.date(1, 1, 1)], pa.date64()), ["0001-01-01"]),
        (pa.array([NOON]), ["2024-02-29T12:00:00.123456"]),
        (pa.array([NOON.replace(microsecond=0)], pa.timestamp("s")), ["2024-02-29T12:00:00"]),
        # In UTC, whatever the zone is called.
        (
            pa.array([NOON.replace(tzinfo=BERLIN)], pa.timestamp("us", "Europe/Berlin")),
            ["2024-02-29T11:00:00.123456+00:00"],
        ),
        (pa.array([1], pa.timestamp("ns")), ["1970-01-01T00:00:00.000000001"]),
        (pa.array([-1], pa.timestamp("ns")), ["1969-12-31T23:59:59.999999999"]),
        (pa.array([dt.time(1, 2, 3)]), ["01:02:03"]),
        (pa.array([dt.timedelta(seconds=90, microseconds=5)]), ["PT90.000005S"]),
        (pa.array([dt.timedelta(seconds=-1)]), ["PT-1S"]),
        (pa.array([[1, None], [], None]), [[1, None], [], None]),
        (pa.array([[NOON.date()]]), [["2024-02-29"]]),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), [[1, 2]]),
        (
            pa.array([{"a": 1, "b": {"c": [NOON]}}, None]),
            [{"a": 1, "b": {"c": ["2024-02-29T12:00:00.123456"]}}, None],
        ),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), [{"k": 1}]),
        (pa.array([[(1, "v")]], pa.map_(pa.int64(), pa.string())), [{"1": "v"}]),
        (
            pa.array([uuid.UUID(int=1).bytes], pa.uuid()),
            ["00000000-0000-0000-0000-000000000001"],
        ),
    ],
)
def test_types_are_kept_as_json(tmp_path: Path, column: Any, values: list[Any]):
    found = kept(tmp_path, column)
    assert found == values
    assert json.loads(json.dumps(found, allow_nan=False)) == values


@pytest.mark.parametrize(
    ("column", "codes"),
    [
        (pa.array([b"a", None]), ["document.bad_value", None]),
        (pa.array([[b"a"], []]), ["document.bad_value", []]),
        (pa.array([float("nan"), float("inf"), 1.0]), ["document.bad_value"] * 2 + [1.0]),
        (pa.array([[float("nan")], [1.0]]), ["document.bad_value", [1.0]]),
        # The year 294247: no calendar of Python's reaches so far.
        (
            pa.array([2**63 - 1, 0], pa.timestamp("us")),
            ["document.bad_value", "1970-01-01T00:00:00"],
        ),
        (
            pa.array([[("k", 1), ("k", 2)], [("k", 1)]], pa.map_(pa.string(), pa.int64())),
            ["document.bad_value", {"k": 1}],
        ),
        (pa.array(["a\0", "b"]), ["document.encoding", "b"]),
    ],
)
def test_a_value_that_json_cannot_hold_refuses_its_row(
    tmp_path: Path, column: Any, codes: list[Any]
):
    assert kept(tmp_path, column) == codes


def test_refusals_name_the_row_and_hold_no_value(tmp_path: Path):
    found = read(tmp_path, {"id": [1, 2], "text": ["a", "S3CRET"], "m": [None, b"S3CRET"]})
    bad = found[1]
    assert isinstance(bad, BadRecord)
    assert '"m" in row 2' in bad.message
    assert (bad.external_id, bad.line) == ("2", None)
    assert "S3CRET" not in str(bad)


def test_a_damaged_row_group_refuses_its_rows_and_no_others(tmp_path: Path):
    path = tmp_path / "docs.parquet"
    texts = [f"text {number} " + "x" * 50 for number in range(400)]
    table = pa.table({"id": range(400), "text": texts})
    pq.write_table(table, path, row_group_size=100, compression="zstd", use_dictionary=False)
    about = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = about.data_page_offset + about.total_compressed_size // 2
    data[start : start + 20] = b"\xff" * 20
    path.write_bytes(data)
    found = list(read_documents(path))
    # A column chunk is one page here: all of the second group is lost, and is counted.
    assert [each.position for each in found] == list(range(400))
    assert [each.text for each in found if isinstance(each, Document)] == (
        texts[:100] + texts[200:]
    )
    assert {each.code for each in found if isinstance(each, BadRecord)} == {"document.unreadable"}


@pytest.mark.parametrize("cut", [1, 20, 500])
def test_a_cut_file_is_refused_as_a_whole(tmp_path: Path, cut: int):
    # The names of the columns and the places of the rows stand at its end.
    path = tmp_path / "docs.parquet"
    pq.write_table(pa.table({"text": [f"text {n}" for n in range(1000)]}), path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceError, match="damaged"):
        read_documents(path)


def test_columns_must_be_there_once(tmp_path: Path):
    path = tmp_path / "docs.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["a"]}), path)
    with pytest.raises(SourceError) as caught:
        read_documents(path)
    assert 'it has "id", "body"' in str(caught.value.hint)
    pq.write_table(pa.table([pa.array(["a"])] * 2, names=["text", "text"]), path)
    with pytest.raises(SourceError, match="different names"):
        read_documents(path)
    with pytest.raises(SourceError, match='"TEXT"'):
        read_documents(path, text_field="{TEXT} {text}")


def test_a_long_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parquet, "MAX_RECORD_BYTES", 10)
    found = read(tmp_path, {"text": ["a" * 10, "a" * 11]})
    assert isinstance(found[0], Document)
    assert isinstance(found[1], BadRecord)
    assert found[1].code == "document.too_long"


def test_no_rows_and_packed_files(tmp_path: Path):
    assert read(tmp_path, {"text": pa.array([], pa.string())}) == []
    import gzip

    packed = tmp_path / "docs.parquet.gz"
    packed.write_bytes(gzip.compress((tmp_path / "docs.parquet").read_bytes()))
    with pytest.raises(SourceError, match="must not be packed again"):
        read_documents(packed)


def test_a_suffix_says_parquet_and_so_do_the_first_bytes(tmp_path: Path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "stdin")
    assert len(list(read_documents(tmp_path / "stdin"))) == 1
    (tmp_path / "fake.parquet").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(SourceError, match="damaged"):
        read_documents(tmp_path / "fake.parquet")
