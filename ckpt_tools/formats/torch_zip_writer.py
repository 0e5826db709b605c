"""Lays out torch.save zip files: the literal bytes, and the holes where tensor bytes go, without holding any tensor.

Records are stored, their data 64-byte aligned. Holes carry CRC 0: torch and megatron-core do not check it, and computing it would read
every byte a second time. Source: torch 2.13 caffe2/serialize/inline_container.cc; PKWARE appnote 6.3 for zip64.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..dtypes import dtype as dtype_named
from ..errors import CkptError
from . import pickle_writer
from .pickle_values import TensorRef, TensorSpec

__all__ = ["Blob", "TensorSpec", "ZipLayout", "dump_file", "layout", "tensor_blob"]

ALIGN = 64
_LIMIT = 0xFFFFFFFF
_UTF8 = 0x800


@dataclass(frozen=True, slots=True)
class ZipLayout:
    """Where everything goes: literals (offset, bytes), holes (offset, size in bytes, what belongs there), total size. Offsets include
    the base."""

    literals: tuple[tuple[int, bytes], ...]
    holes: tuple[tuple[int, int, TensorSpec | TensorRef], ...]
    size: int


@dataclass(frozen=True, slots=True)
class Blob:
    """A torch.save file of one tensor: `head`, `nbytes` of data at `data_offset` (= len(head)), `tail`; `size` bytes in all."""

    head: bytes
    data_offset: int
    nbytes: int
    tail: bytes
    size: int


class _Zip:
    """A zip being laid out from position 0."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.position = 0
        self.directory = bytearray()
        self.count = 0

    def add(self, name: str, size: int, crc: int) -> bytes:
        """The local header of the next record; afterwards `position` is behind its data."""
        encoded = f"{self.root}/{name}".encode()
        header = self.position
        large = size >= _LIMIT or header >= _LIMIT
        extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
        # torch pads with a private field so that data starts aligned
        padding = -(header + 30 + len(encoded) + len(extra) + 4) % ALIGN
        extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        short, version = (_LIMIT, 45) if large else (size, 0)
        # 1 January 1980, the date zip cannot go below
        local = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", version, _UTF8, 0, 0, 33, crc, short, short, len(encoded), len(extra))
        local += encoded + extra
        central = struct.pack("<HHQQQ", 1, 24, size, size, header) if large else b""
        self.directory += struct.pack("<4sHHHHHHIII", b"PK\x01\x02", version, version, _UTF8, 0, 0, 33, crc, short, short)
        self.directory += struct.pack("<HHHHHII", len(encoded), len(central), 0, 0, 0, 0, _LIMIT if large else header)
        self.directory += encoded + central
        self.count += 1
        self.position = header + len(local) + size
        return local

    def end(self) -> bytes:
        """Directory and end records."""
        start, size, count = self.position, len(self.directory), self.count
        out = bytes(self.directory)
        if start >= _LIMIT or size >= _LIMIT or count >= 0xFFFF:
            out += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
            out += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
            return out + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _LIMIT, _LIMIT, 0)
        return out + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, start, 0)


def _nbytes(spec: TensorSpec | TensorRef) -> int:
    return prod(spec.shape) * dtype_named(spec.dtype).itemsize


def layout(value: object, root: str = "archive", base: int = 0) -> ZipLayout:
    """The torch.save file of a nested value, starting at byte `base` (a multiple of 64) of a file.

    `root` is the folder inside the zip: torch uses the file's stem, or "archive". Tensors are TensorSpecs with their bytes or as holes;
    a TensorRef is a hole to be filled, in row-major order, with the tensor it refers to.
    Errors: E490 for values that cannot be written, a base that is not aligned, or bytes that do not fit dtype and shape.
    """
    if base % ALIGN:
        raise CkptError("E490", "a torch.save file must start at a multiple of 64 bytes", found=str(base))
    tensors: list[TensorSpec | TensorRef] = []
    pickle = pickle_writer.dump(value, tensors)
    literals: list[tuple[int, bytes]] = []
    holes: list[tuple[int, int, TensorSpec | TensorRef]] = []
    archive = _Zip(root)
    pending = bytearray()
    start = 0

    def literal(name: str, data: bytes) -> None:
        pending.extend(archive.add(name, len(data), zlib.crc32(data)))
        pending.extend(data)

    literal("data.pkl", pickle)
    literal("byteorder", b"little")
    for number, spec in enumerate(tensors):
        data = spec.data if isinstance(spec, TensorSpec) else None
        size = _nbytes(spec)
        if data is not None:
            if len(data) != size:
                expected, found = f"{size} bytes", f"{len(data)} bytes"
                raise CkptError("E490", "the bytes of a tensor do not fit its dtype and shape", expected=expected, found=found)
            literal(f"data/{number}", data)
            continue
        pending += archive.add(f"data/{number}", size, 0)
        literals.append((base + start, bytes(pending)))
        pending.clear()
        start = archive.position
        holes.append((base + start - size, size, spec))
    literal("version", b"3\n")
    pending += archive.end()
    literals.append((base + start, bytes(pending)))
    return ZipLayout(tuple(literals), tuple(holes), start + len(pending))


def dump_file(value: object, root: str = "archive") -> bytes:
    """The torch.save file of a value whose tensors all have their bytes. Errors as `layout`, and E490 for a hole."""
    made = layout(value, root)
    if any(size for _, size, _ in made.holes):
        raise CkptError("E490", "a tensor without bytes cannot be written at once")
    return b"".join(data for _, data in made.literals)


def tensor_blob(dtype: str, shape: tuple[int, ...]) -> Blob:
    """The torch.save file of one contiguous tensor around its bytes; E206 for a dtype that has no whole bytes."""
    return _blob(dtype_named(dtype).name, tuple(shape))


@lru_cache(maxsize=4096)
def _blob(dtype: str, shape: tuple[int, ...]) -> Blob:
    pickle = pickle_writer.dump(TensorSpec(dtype, shape), [])
    nbytes = prod(shape) * dtype_named(dtype).itemsize
    archive = _Zip("archive")
    head = b""
    # small records first, so that a reader finds them and the header of the data in its first kilobyte
    for name, data in (("data.pkl", pickle), ("byteorder", b"little"), ("version", b"3\n")):
        head += archive.add(name, len(data), zlib.crc32(data)) + data
    head += archive.add("data/0", nbytes, 0)
    tail = archive.end()
    return Blob(head, len(head), nbytes, tail, len(head) + nbytes + len(tail))
