"""Files as streams of bytes, gzip and zstd unpacked on the way, in bounded memory.

What a stream holds is seen by its first bytes, not by its name. Members and frames
that follow each other are one stream. A damaged or cut stream gives every byte before
the damage and then raises `BrokenStream`, so that no record before it is lost.
"""

import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from weighbridge.tasks.errors import SourceError

Compression = Literal["gzip", "zstd"]

BOM = b"\xef\xbb\xbf"
HEAD_BYTES = 64 * 1024

_CHUNK = 64 * 1024
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CUT = "breaks off"
_JSON_START = re.compile(rb"""^[ \t]*\{[ \t]*["}]""", re.MULTILINE)


class BrokenStream(Exception):  # noqa: N818 - named for what the reader meets
    """A compressed stream cannot be read further; what came before has been given out."""


def sniff(path: Path) -> tuple[bytes, Compression | None]:
    """Return the first bytes of a file as they are unpacked, and how it is packed.

    Raises:
        SourceError: It is packed, and nothing can be unpacked.
        OSError: It cannot be read.
    """
    packing = _packing(path)
    unpacked = b""
    with open_stream(path) as stream:
        try:
            while len(unpacked) < HEAD_BYTES and (more := stream.read1(_CHUNK)):
                unpacked += more
        except BrokenStream as error:
            if not unpacked:
                raise SourceError(
                    f"documents must be a whole {packing} file, and {path} {error}",
                    hint="copy or download the file again",
                ) from error
    return unpacked[:HEAD_BYTES], packing


def open_stream(path: Path) -> io.BufferedReader:
    """Open a file for reading, unpacked if it is packed.

    Reading from it raises `BrokenStream` where a packed file is cut or damaged.
    """
    packing = _packing(path)
    return path.open("rb") if packing is None else _unpacked(path, packing)


def shows_json_lines(head: bytes) -> bool:
    """Tell whether a line begins like a JSON object, whatever the others are."""
    return _JSON_START.search(head) is not None


def open_text(path: Path) -> tuple[io.BufferedReader, int]:
    """Open a file after its byte order mark; return it with its position."""
    stream = open_stream(path)
    try:
        if stream.read(len(BOM)) == BOM:
            return stream, len(BOM)
    except BrokenStream:
        pass  # comes again when the first record is read
    stream.close()
    return open_stream(path), 0


def _packing(path: Path) -> Compression | None:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    # The reserved flags of gzip are zero; plain text could begin with the magic alone.
    if head[:3] == b"\x1f\x8b\x08" and len(head) > 3 and not head[3] & 0xE0:
        packing: Compression = "gzip"
    elif head[:4] == _ZSTD_MAGIC or _is_skippable(head[:4]):
        packing = "zstd"
    else:
        return None
    if shows_json_lines(head):
        # A broken first record may look like this too; then nothing can be unpacked.
        with _unpacked(path, packing) as stream:
            try:
                stream.read1(1)
            except BrokenStream:
                return None
    return packing


class _Unpacked(io.RawIOBase):
    """A raw stream over chunks."""

    def __init__(self, file: BinaryIO, chunks: Iterator[bytes]) -> None:
        self._file = file
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _unpacked(path: Path, packing: Compression) -> io.BufferedReader:
    file = path.open("rb")
    chunks = _gunzip(file) if packing == "gzip" else _unzstd(file)
    return io.BufferedReader(_Unpacked(file, chunks), _CHUNK)


# --- gzip (RFC 1952) --------------------------------------------------------------


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    packed = file.read(_CHUNK)
    while packed:
        decoder = zlib.decompressobj(wbits=31)
        while not decoder.eof:
            packed = packed or file.read(_CHUNK)
            before = decoder.copy()
            try:
                chunk = decoder.decompress(packed, _CHUNK)
            except zlib.error as error:
                yield from _before_the_fault(before, packed)
                raise BrokenStream(f"is damaged ({error})") from error
            if not packed and not chunk and not decoder.eof:
                raise BrokenStream(_CUT)
            packed = decoder.unconsumed_tail
            yield chunk
        packed = decoder.unused_data or file.read(_CHUNK)
        # Members may be padded with zeros (tapes, block devices).
        while packed and not (packed := packed.lstrip(b"\0")):
            packed = file.read(_CHUNK)


def _before_the_fault(decoder: Any, packed: bytes) -> Iterator[bytes]:
    """Give what a call that failed would have given before it failed."""
    for at in range(len(packed)):
        try:
            yield decoder.decompress(packed[at : at + 1])
        except zlib.error:
            return


# --- zstd (RFC 8878) --------------------------------------------------------------


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Unpack block by block: a block gives at most 128 KiB, whatever its packed size.

    The library's stream reader ends quietly where a frame is cut; blocks are counted here.
    """
    import zstandard

    while magic := file.read(4):
        if _is_skippable(magic):
            _exactly(file, int.from_bytes(_exactly(file, 4), "little"))
            continue
        if len(magic) < 4:
            raise BrokenStream(_CUT)
        if magic != _ZSTD_MAGIC:
            raise BrokenStream("is damaged (bytes that are not zstd follow)")
        decoder = zstandard.ZstdDecompressor().decompressobj()
        header, checksum = _frame_header(file, magic)
        try:
            decoder.decompress(header)
            last = False
            while not last:
                start = _exactly(file, 3)
                value = int.from_bytes(start, "little")
                last, kind, size = bool(value & 1), value >> 1 & 3, value >> 3
                body = _exactly(file, 1 if kind == 1 else size)
                yield decoder.decompress(start + body)
            if checksum:
                yield decoder.decompress(_exactly(file, 4))
        except zstandard.ZstdError as error:
            raise BrokenStream(f"is damaged ({error})") from error


def _is_skippable(magic: bytes) -> bool:
    return len(magic) == 4 and magic[1:] == b"\x2a\x4d\x18" and magic[0] & 0xF0 == 0x50


def _frame_header(file: BinaryIO, magic: bytes) -> tuple[bytes, bool]:
    """Return the header of a frame, and whether a checksum follows the last block."""
    start = magic + _exactly(file, 1)
    descriptor = start[4]
    single = bool(descriptor & 0x20)
    window = 0 if single else 1
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    return start + _exactly(file, window + dictionary + content), bool(descriptor & 4)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise BrokenStream(_CUT)
    return data
