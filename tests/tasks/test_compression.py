"""Packed sources: cut or damaged anywhere, they give what is whole and say what is not."""

import gzip
import json
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.tasks.sources import BadRecord, Document, SourceError, read_documents

ZSTD = zstandard.ZstdCompressor(write_checksum=True)
LINES = [json.dumps({"id": number, "text": f"text {number} ü"}) for number in range(40)]
DATA = "\n".join(LINES).encode() + b"\n"
HALF = DATA.index(b"\n", 500) + 1  # members may end anywhere; here between two records
PACKED = {
    ".gz": gzip.compress(DATA),
    # Members and frames behind each other, with what the formats allow between them.
    ".gz two": gzip.compress(DATA[:HALF]) + b"\0" * 9 + gzip.compress(DATA[HALF:]),
    ".zst": ZSTD.compress(DATA),
    ".zst two": ZSTD.compress(DATA[:HALF])
    + b"\x53\x2a\x4d\x18\x03\x00\x00\x00abc"
    + zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(DATA[HALF:]),
}


def read(path: Path, data: bytes) -> list[Document | BadRecord]:
    path.write_bytes(data)
    return list(read_documents(path))


def texts(found: list[Document | BadRecord]) -> list[str]:
    return [each.text for each in found if isinstance(each, Document)]


@pytest.mark.parametrize("name", PACKED)
def test_packed_files_are_read_whole(tmp_path: Path, name: str):
    assert len(texts(read(tmp_path / "a.jsonl", PACKED[name]))) == 40


@pytest.mark.parametrize("name", PACKED)
def test_a_file_cut_anywhere_keeps_what_is_whole_and_tells_one_bad_record(
    tmp_path: Path, name: str
):
    packed = PACKED[name]
    for size in range(len(packed)):
        try:
            found = read(tmp_path / "a.jsonl", packed[:size])
        except SourceError:
            # Nothing shows yet that it is packed, or nothing could be unpacked: of a zstd
            # frame not before its first block is whole, which is all of this one.
            if size > 3 and name.startswith(".gz"):
                assert zlib.decompressobj(31).decompress(packed[:size]) == b""
            continue
        good = texts(found)
        assert good == [f"text {number} ü" for number in range(len(good))]
        if size == 0 or not good or len(found) == len(good):
            # A cut between two members leaves a whole, shorter file.
            continue
        (bad,) = found[len(good) :]
        assert isinstance(bad, BadRecord)
        assert (bad.code, bad.line) == ("document.unreadable", len(good) + 1)
        assert "breaks off" in bad.message


def test_a_cut_is_seen_even_between_records(tmp_path: Path):
    # All 40 records are there, the checksum is not: something may be missing.
    for packed in (PACKED[".gz"][:-8], PACKED[".zst"][:-4]):
        found = read(tmp_path / "a.jsonl", packed)
        assert len(texts(found)) == 40
        assert isinstance(found[-1], BadRecord)


@pytest.mark.parametrize("name", PACKED)
def test_any_flipped_byte_ends_in_records_and_refusals(tmp_path: Path, name: str):
    changes = random.Random(7)
    for _ in range(150):
        damaged = bytearray(PACKED[name])
        damaged[changes.randrange(4, len(damaged))] ^= 1 << changes.randrange(8)
        try:
            found = read(tmp_path / "a.jsonl", bytes(damaged))
        except SourceError:
            continue
        assert [each.position for each in found] == list(range(len(found)))
        # Damage may turn into other records before a checksum tells; it always tells in the end.
        last = found[-1]
        damaged_told = isinstance(last, BadRecord) and last.code == "document.unreadable"
        assert damaged_told or texts(found) == [f"text {number} ü" for number in range(40)]


def test_damage_far_behind_keeps_everything_before(tmp_path: Path):
    rows = [json.dumps({"text": random.Random(n).randbytes(300).hex()}) for n in range(3000)]
    data = ("\n".join(rows) + "\n").encode()
    packed = bytearray(gzip.compress(data))
    at = len(packed) // 2
    packed[at : at + 64] = b"\xff" * 64
    found = read(tmp_path / "a.jsonl.gz", bytes(packed))
    # zlib sees damage some hundred bytes late at most; half of the rows stand before it.
    assert texts(found)[:1490] == [json.loads(row)["text"] for row in rows[:1490]]
    assert isinstance(found[-1], BadRecord)
    assert found[-1].code == "document.unreadable"


@pytest.mark.parametrize("pack", [gzip.compress, ZSTD.compress])
def test_a_cut_csv_cell_and_array_end_in_bad_records(tmp_path: Path, pack):
    rows = "".join(f'{n},"text {n}"\n' for n in range(40_000))
    cut = pack(("id,text\n" + rows).encode())[:-200]
    found = read(tmp_path / "a.csv", cut)
    good = texts(found)
    assert good == [f"text {number}" for number in range(len(good))]
    assert 1 <= len(found) - len(good) <= 2  # a cell cut within its quotes, and the rest
    array = json.dumps([{"text": f"text {n}"} for n in range(40_000)]).encode()
    found = read(tmp_path / "a.json", pack(array)[:-200])
    good = texts(found)
    assert good == [f"text {number}" for number in range(len(good))]
    assert [each.code for each in found if isinstance(each, BadRecord)] == ["document.unreadable"]


def test_text_that_begins_like_a_packed_file_is_text(tmp_path: Path):
    for first in (
        b"\x1f\x8b",
        b"\x1f\x8b\x08",
        b"\x28\xb5\x2f\xfd",
        b"\x53\x2a\x4d\x18",
        b"PK\x03\x04",
    ):
        found = read(tmp_path / "a.jsonl", first + b'\n{"text": "kept"}\n')
        assert texts(found) == ["kept"]
        assert len(found) == 2


def test_other_containers_are_refused_with_a_way_out(tmp_path: Path):
    for data in (b"BZh91AY&SY", b"\xfd7zXZ\x00\x00", gzip.compress(b"PK\x03\x04\x14\x00")):
        with pytest.raises(SourceError) as caught:
            read(tmp_path / "a.csv", data)
        assert "gzip and zstd are read" in str(caught.value.hint)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.binary(max_size=400), max_size=4), st.booleans())
def test_members_and_frames_are_one_stream(tmp_path: Path, parts: list[bytes], gz: bool):
    from weighbridge.tasks.compression import open_stream

    pack = gzip.compress if gz else ZSTD.compress
    path = tmp_path / "a"
    path.write_bytes(b"".join(pack(part) for part in parts))
    with open_stream(path) as stream:
        assert stream.read() == b"".join(parts)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_bomb_stays_small(tmp_path: Path, packing: str):
    # 500 MB of one line in some kilobytes: refused as one record, in little memory.
    path = tmp_path / f"bomb.jsonl.{packing}"
    chunk = b"a" * 2**20
    if packing == "gz":
        with gzip.open(path, "wb", compresslevel=9) as file:
            for _ in range(500):
                file.write(chunk)
            file.write(b'\n{"text": "after"}\n')
    else:
        with path.open("wb") as raw, ZSTD.stream_writer(raw) as file:
            for _ in range(500):
                file.write(chunk)
            file.write(b'\n{"text": "after"}\n')
    code = (
        "import sys\n"
        "from weighbridge.tasks.sources import read_documents\n"
        "found = list(read_documents(sys.argv[1], format='jsonl'))\n"
        # ru_maxrss would begin with what the process that forked had.
        "status = open('/proc/self/status').read()\n"
        "peak = status.partition('VmHWM:')[2].split()[0]\n"
        "print(*[getattr(each, 'code', 'good') for each in found], peak)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    first, second, peak = done.stdout.split()
    assert (first, second) == ("document.too_long", "good")
    # Two copies of the longest record, and Python; the line has 500 MB.
    assert int(peak) < 200 * 1024
