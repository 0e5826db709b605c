"""Reads torch.save zip files, alone or inside a .distcp, without unpickling anything but inert data and without copying tensors.

Everything goes through the central directory (local headers written by torch carry no sizes). Every offset and length is checked
against the bytes that are there. Source: torch 2.13 caffe2/serialize/inline_container.cc, miniz.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dtypes import DTYPES, dtype
from ..errors import CkptError
from ..source_files import opened
from ..tensors import contiguous_strides
from . import pickles
from .pickle_values import TensorRef

if TYPE_CHECKING:
    import numpy as np

TAIL = 1024  # bytes read first: end record and, for a single tensor, the whole directory
HEAD = 1024  # bytes at the start of a single tensor's record: its pickle and the local header of its data
MAX_DIRECTORY = 256 * 2**20
MAX_SMALL_READ = 256 * 2**20
_END, _LOCATOR, _END64, _ENTRY, _LOCAL = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06", b"PK\x01\x02", b"PK\x03\x04"
_ENTRY_FIELDS = struct.Struct("<4sHHHHHHIIIHHHHHII")
# Opening of torch <1.6 files: protocol 2, LONG1 of 10 bytes, the magic number 0x1950a86a20f9469cfc6c.
_OLD_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of the zip: absolute byte offset of its data, size in bytes, CRC-32 from the directory (0: usually not recorded)."""

    data_offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The tensor of a .distcp entry: strides in bytes, absolute byte offset of element 0."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data_offset: int


@dataclass(frozen=True, slots=True)
class CrcResult:
    """What reading one record found: CRC-32 from the directory (None: not recorded) against the one of the bytes."""

    record: str
    size: int
    expected: int | None
    found: int

    @property
    def ok(self) -> bool:
        """False when a recorded checksum differs from the bytes."""
        return self.expected is None or self.expected == self.found


class _Window:
    """Bytes of a file from `offset`, `length` of them; reads are checked and the first and last kilobytes are kept."""

    __slots__ = ("fd", "head", "length", "offset", "tail", "where")

    def __init__(self, fd: int, offset: int, length: int, where: str, head: int) -> None:
        self.fd, self.offset, self.length, self.where = fd, offset, length, where
        if offset < 0 or length < 22:
            raise _damaged(where, "it is too short to be a torch.save file")
        if offset + length > os.fstat(fd).st_size:
            raise _damaged(where, "the file ends before the record does")
        self.tail = self._read(max(0, length - TAIL), min(TAIL, length))
        self.head = self._read(0, min(head, length)) if head else b""

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self.fd, size, self.offset + at)
        if len(data) != size:
            raise _damaged(self.where, "the file ends before the record does")
        return data

    def read(self, at: int, size: int) -> bytes:
        """`size` bytes at `at` (relative to the window)."""
        if at < 0 or size < 0 or at + size > self.length:
            raise _damaged(self.where, "a position in it lies outside the file")
        if at + size <= len(self.head):
            return self.head[at : at + size]
        start = self.length - len(self.tail)
        if at >= start:
            return self.tail[at - start : at - start + size]
        return self._read(at, size)


def _damaged(where: str, why: str, **more: str) -> CkptError:
    return CkptError("E203", f"the torch.save file is damaged: {why}", where=where, hint="copy the file again; it may be truncated", **more)


def _entries(window: _Window) -> list[tuple[str, int, int, int]]:
    """(name without the root folder, position of the local header, size, crc) from the central directory."""
    where, tail = window.where, window.tail
    end = len(tail) - 22
    if tail[end : end + 4] != _END:
        end = tail.rfind(_END)
        if end < 0 or end + 22 > len(tail):
            raise _not_a_zip(window)
    at = window.length - len(tail) + end
    disk, first_disk, _, count, size, start = struct.unpack_from("<HHHHII", tail, end + 4)
    if count == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF:
        locator = window.read(at - 20, 20)
        if locator[:4] == _LOCATOR:
            position = struct.unpack_from("<Q", locator, 8)[0]
            record = window.read(position, 56)
            if record[:4] != _END64:
                raise _damaged(where, "its zip64 end record is not where it should be")
            disk, first_disk, _, count, size, start = struct.unpack_from("<IIQQQQ", record, 16)
            at = position
    if disk or first_disk:
        raise CkptError("E204", "the torch.save file is part of a multi-volume zip", where=where)
    if start + size > at or count * 46 > size:
        raise _damaged(where, "its directory lies outside the file")
    if size > MAX_DIRECTORY:
        raise CkptError("E204", "the torch.save file has an unreasonably large directory", where=where, found=f"{size} bytes")
    directory = window.read(start, size)
    entries = []
    position = 0
    for _ in range(count):
        if position + 46 > size:
            raise _damaged(where, "its directory is cut off")
        fields = _ENTRY_FIELDS.unpack_from(directory, position)
        signature, _, _, flags, method, _, _, crc, packed, plain, name_size, extra_size, comment_size, _, _, _, header = fields
        after = position + 46 + name_size
        if signature != _ENTRY or after + extra_size + comment_size > size:
            raise _damaged(where, "its directory is garbled")
        name = directory[position + 46 : after].decode("utf-8", "replace")
        if 0xFFFFFFFF in (packed, plain, header):
            plain, packed, header = _large(directory[after : after + extra_size], plain, packed, header, where)
        if method or packed != plain or flags & 1:
            raise CkptError("E204", "the torch.save file is compressed or encrypted, which torch.save never does", where=f"{where}: {name}")
        if header + 30 + plain > start:
            raise _damaged(where, f"record {name!r} lies outside the file")
        entries.append((name.partition("/")[2], header, plain, crc))
        position = after + extra_size + comment_size
    return entries


def _large(extra: bytes, plain: int, packed: int, header: int, where: str) -> tuple[int, int, int]:
    """The 64-bit values that the zip64 extra field (id 1) gives for those that are 0xFFFFFFFF."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            plain, packed, header = (next(values, v) if v == 0xFFFFFFFF else v for v in (plain, packed, header))
            return plain, packed, header
        at += 4 + size
    return plain, packed, header


def _not_a_zip(window: _Window) -> CkptError:
    start = window.read(0, min(16, window.length))
    if start.startswith(_OLD_MAGIC):
        hint = "load and save it once with any torch since 1.6: torch.save(torch.load(f, weights_only=True), f)"
        what = "this is a torch.save file from before torch 1.6, which is not a zip and is not read"
        return CkptError("E204", what, where=window.where, hint=hint)
    if start.startswith(_LOCAL):
        return _damaged(window.where, "its end is missing")
    if start.startswith(b"\x80"):
        return CkptError("E204", "this is a bare pickle, not a torch.save file", where=window.where)
    return CkptError("E203", "this is not a torch.save file", where=window.where, found=f"a file beginning with {start[:8]!r}")


def _data_position(window: _Window, name: str, header: int, size: int) -> int:
    """Where the data of a record begins, relative to the window; its length fields are in the local header only."""
    local = window.read(header, 30)
    if local[:4] != _LOCAL:
        raise _damaged(window.where, f"the header of record {name!r} is not where the directory says")
    name_size, extra_size = struct.unpack_from("<HH", local, 26)
    position: int = header + 30 + name_size + extra_size
    if position + size > window.length:
        raise _damaged(window.where, f"record {name!r} lies outside the file")
    return position


def read_directory(fd: int, offset: int, length: int, where: str) -> dict[str, ZipRecord]:
    """The records of the torch.save zip in bytes [offset, offset + length) of an open file, by name without the root folder.

    Errors: E203 damaged or truncated, E204 compressed, multi-volume or not a zip.
    """
    return _records(_Window(fd, offset, length, where, 0))


def _records(window: _Window) -> dict[str, ZipRecord]:
    records: dict[str, ZipRecord] = {}
    for name, header, size, crc in _entries(window):
        if name in records:
            raise _damaged(window.where, f"record {name!r} is there twice")
        records[name] = ZipRecord(window.offset + _data_position(window, name, header, size), size, crc)
    return records


_SEEN: dict[bytes, TensorRef] = {}  # pickles of single tensors: a checkpoint has few different ones, each many times


def read_tensor_entry(fd: int, offset: int, length: int, where: str) -> TensorEntry:
    """The single tensor stored in bytes [offset, offset + length) of an open .distcp file; usually two small reads.

    Errors: E203 damaged, or not a tensor, or a tensor that reaches beyond its storage; E204 compressed; E206 unsupported dtype.
    """
    window = _Window(fd, offset, length, where, HEAD)
    entries = {name: (header, size) for name, header, size, _ in _entries(window)}
    found = entries.get("data.pkl")
    if found is None:
        raise _damaged(where, "it has no data.pkl")
    header, size = found
    if size > 65536:
        raise _damaged(where, "its data.pkl is too large for one tensor")
    pickled = window.read(_data_position(window, "data.pkl", header, size), size)
    value = _SEEN.get(pickled)
    if value is None:
        value = pickles.load(pickled, where=where)
        if type(value) is not TensorRef:
            raise _damaged(where, "it does not hold a tensor", found=type(value).__name__)
        if len(_SEEN) < 4096 and size < 1024:
            _SEEN[pickled] = value
    record = entries.get(f"data/{value.key}")
    if record is None:
        raise _damaged(where, f"record data/{value.key} is missing")
    position = offset + _data_position(window, "data", *record)
    start, strides = _extent(value, position, record[1], where)
    return TensorEntry(value.dtype, value.shape, strides, start)


def _extent(ref: TensorRef, position: int, size: int, where: str) -> tuple[int, tuple[int, ...]]:
    """Absolute position of element 0 and byte strides of a tensor whose storage is `size` bytes at `position`."""
    item = dtype(ref.dtype).itemsize
    if all(ref.shape):
        last = ref.storage_offset + sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
        if (last + 1) * item > size:
            expected, found = f"{(last + 1) * item} bytes", f"{size} bytes"
            raise _damaged(where, f"the tensor in data/{ref.key} is larger than its bytes", expected=expected, found=found)
    return position + ref.storage_offset * item, tuple(s * item for s in ref.strides)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """An opened torch.save file: `value` is inert data in which tensors are TensorRefs, `records` says where their bytes lie."""

    path: str
    where: str
    value: Any
    records: dict[str, ZipRecord]

    def extent(self, ref: TensorRef) -> tuple[int, tuple[int, ...]]:
        """Absolute byte offset of element 0 in the file, and strides in bytes. E203 when it reaches beyond its bytes."""
        record = self.records.get(f"data/{ref.key}")
        if record is None:
            raise _damaged(self.where, f"record data/{ref.key} is missing")
        return _extent(ref, record.data_offset, record.size, self.where)

    def read(self, ref: TensorRef) -> bytes:
        """The elements of a small tensor in row-major order; E502 above 256 MiB."""
        start, strides = self.extent(ref)
        item = DTYPES[ref.dtype].itemsize
        total = item
        for n in ref.shape:
            total *= n
        span = item + sum((n - 1) * s for n, s in zip(ref.shape, strides, strict=True)) if total else 0
        if max(total, span) > MAX_SMALL_READ:
            found = f"{max(total, span)} bytes"
            raise CkptError("E502", "a value is too large to be read into memory at once", where=self.where, found=found)
        with opened(self.path) as file:
            raw = os.pread(file.fileno(), span, start)
        if len(raw) != span:
            raise _damaged(self.where, "the file ends before the tensor does")
        return _gather(raw, ref.shape, strides, item) if total else b""

    def check_crc(self) -> Iterator[CrcResult]:
        """Reads every record and compares its CRC-32; at most 1 MiB in memory."""
        with opened(self.path) as file:
            for name, record in self.records.items():
                file.seek(record.data_offset)
                left, found = record.size, 0
                while left:
                    piece = file.read(min(left, 2**20))
                    if not piece:
                        raise _damaged(f"{self.where}: {name}", "the file ends before the record does")
                    found = zlib.crc32(piece, found)
                    left -= len(piece)
                yield CrcResult(name, record.size, record.crc or (0 if not record.size else None), found)


def _gather(raw: bytes, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bytes:
    """The elements of a strided tensor in row-major order. shape, strides: one per axis, strides in bytes."""
    if strides == contiguous_strides(shape, item):
        return raw
    import numpy

    elements: np.ndarray[tuple[int, ...], np.dtype[np.void]] = numpy.ndarray(shape, dtype=f"V{item}", buffer=raw, strides=strides)
    return elements.tobytes()


def open_torch_file(path: str | os.PathLike[str], offset: int = 0, length: int | None = None, *, where: str | None = None) -> TorchFile:
    """Opens a torch.save file, or the one in bytes [offset, offset + length) of a file. Reads its directory and pickle only.

    Errors: E203 damaged, E204 not a (stored) zip, E501 foreign code in its pickle, E502 unreasonably large, E206 unsupported dtype.
    """
    name = os.fspath(path)
    where = where or name
    with opened(name) as file:
        size = os.fstat(file.fileno()).st_size
        window = _Window(file.fileno(), offset, size - offset if length is None else length, where, 0)
        records = _records(window)
        found = records.get("data.pkl")
        if found is None:
            what = "a TorchScript archive" if "code/__torch__.py" in records or "constants.pkl" in records else "a zip"
            raise CkptError("E204", f"this is {what}, not a torch.save file", where=where, expected="a record named data.pkl")
        if found.size > pickles.MAX_BYTES:
            raise CkptError("E502", "the pickle is larger than ckpt accepts", where=where, found=f"{found.size} bytes")
        order = records.get("byteorder")
        if order is not None and order.size < 16 and window.read(order.data_offset - offset, order.size) == b"big":
            raise CkptError("E204", "the file was written on a big-endian machine", where=where)
        value = pickles.load(window.read(found.data_offset - offset, found.size), where=where)
    return TorchFile(name, where, value, records)
