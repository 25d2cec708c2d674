"""Reading documents: records a second and memory, on files far larger than it should take.

Makes files of about 500 MB in a temporary folder, reads each in a process of its own,
and removes them. What a file adds to the peak of that process is what the kernel says
(VmHWM in /proc, Linux only), after one record of the same file has been read.

    python benchmarks/sources.py [--megabytes 500] [KIND ...]
"""

import argparse
import csv
import gzip
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from weighbridge.tasks.sources import Document, read_documents

TEXT = "the printer on floor three is offline again and nobody can print naïvely – 価格"
ROW_BYTES = 1000
QUERY = "select id, text, team, share from tickets order by id"


def rows(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        text = " ".join([str(number)] + [TEXT] * 10)[:850]
        yield {"id": number, "text": text, "team": f"team-{number % 7}", "share": number / count}


def write_jsonl(path: Path, count: int) -> None:
    opened: Any = {".gz": gzip.open, ".zst": zstandard.open}.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8") as file:
        for row in rows(count):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_json(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows(count):
            file.write((", " if row["id"] else "[") + json.dumps(row, ensure_ascii=False))
        file.write("]")


def write_csv(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "team", "share"])
        writer.writeheader()
        writer.writerows(rows(count))


def write_parquet(path: Path, count: int) -> None:
    # Uncompressed, or these texts would be a small file; a million rows in one row group.
    schema = pa.schema(
        {"id": pa.int64(), "text": pa.string(), "team": pa.string(), "share": pa.float64()}
    )
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(pa.Table.from_pylist(list(rows(count)), schema), row_group_size=10**6)


def write_sqlite(path: Path, count: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table tickets (id integer primary key, text, team, share)")
    connection.executemany("insert into tickets values (:id, :text, :team, :share)", rows(count))
    connection.commit()
    connection.close()


KINDS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "jsonl": ("tickets.jsonl", write_jsonl),
    "parquet": ("tickets.parquet", write_parquet),
    "json": ("tickets.json", write_json),
    "csv": ("tickets.csv", write_csv),
    "gzip": ("tickets.jsonl.gz", write_jsonl),
    "zstd": ("tickets.jsonl.zst", write_jsonl),
    "sqlite": ("tickets.db", write_sqlite),
}


def measure(path: str) -> None:
    """Read a file in this process and print what it took, as JSON."""
    query = QUERY if path.endswith(".db") else None
    next(read_documents(path, query=query))
    before = peak_bytes()
    started = time.perf_counter()
    count = sum(isinstance(each, Document) for each in read_documents(path, query=query))
    seconds = time.perf_counter() - started
    grown = peak_bytes() - before
    print(json.dumps({"count": count, "seconds": seconds, "before": before, "grown": grown}))


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of: {', '.join(KINDS)}; all if left out")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
        return 0
    if not Path("/proc/self/status").exists():
        print("memory is measured on Linux only")
        return 1
    count = given.megabytes * 10**6 // ROW_BYTES
    print(
        f"machine: {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, pyarrow {pa.__version__}"
    )
    print(f"{'kind':<8} {'MB':>6} {'records':>9} {'records/s':>10} {'peak growth, MB':>16}")
    for kind in given.kinds or KINDS:
        name, _ = KINDS[kind]
        folder = Path(tempfile.mkdtemp(prefix="bench-sources-"))
        try:
            # Written in another process: what writing takes is none of the reader's.
            write_apart(folder / name, kind, count)
            done = subprocess.run(
                [sys.executable, __file__, "--measure", str(folder / name)],
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout)
            assert found["count"] == count, found
            print(
                f"{kind:<8} {(folder / name).stat().st_size / 1e6:>6.0f} {count:>9,} "
                f"{count / found['seconds']:>10,.0f} {found['grown'] / 1e6:>16.1f}",
                flush=True,
            )
        finally:
            shutil.rmtree(folder)
    return 0


def write_apart(path: Path, kind: str, count: int) -> None:
    pid = os.fork()
    if pid == 0:
        KINDS[kind][1](path, count)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"could not write {path}")


if __name__ == "__main__":
    sys.exit(main())
