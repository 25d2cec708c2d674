"""Memory stays flat: a file of 60 MB is read in a process of its own, and its peak looked at."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 60_000
TEXT = "naïve words and 価格, " * 45  # about 1 kB

READ = """
import sys
from weighbridge.tasks.sources import read_documents

def peak():
    # VmHWM is of this process alone; ru_maxrss would inherit that of its parent.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

next(read_documents(sys.argv[1]))  # what is imported only once
before = peak()
count = sum(1 for _ in read_documents(sys.argv[1]))
print(count, peak() - before)
"""


def write_jsonl(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            row = {"id": number, "text": f"{number} {TEXT}"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_json(path: Path) -> None:
    # One line, so that no line ends either.
    with path.open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            row = {"id": number, "text": f"{number} {TEXT}"}
            file.write(("[" if number == 0 else ", ") + json.dumps(row, ensure_ascii=False))
        file.write("]")


def write_parquet(path: Path) -> None:
    # One row group that holds everything: the worst case for a reader of row groups.
    ids = range(ROWS)
    table = pa.table({"id": ids, "text": [f"{number} {TEXT}" for number in ids]})
    pq.write_table(table, path, row_group_size=ROWS, compression="none", use_dictionary=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_jsonl), ("a.json", write_json), ("a.parquet", write_parquet)],
)
def test_memory_is_bounded_by_records_not_by_the_file(
    tmp_path: Path, name: str, write: Callable[[Path], None]
):
    path = tmp_path / name
    write(path)
    assert path.stat().st_size > 55 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == ROWS
    # In kB. Measured: below 1 MB for lines, some 10 MB for Parquet's buffers.
    assert grown < 24 * 1024
