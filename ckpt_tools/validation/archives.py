"""Whether torch itself can open a torch.save record: what its zip reader insists on and ckpt's does not need, read by Python's zipfile."""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Iterator
from io import RawIOBase

from ..formats.torch_dist import TorchDist
from ..formats.torch_legacy import Legacy
from ..source_files import open_source
from .finding import Problem
from .subject import Subject

END, LOCATOR, END64 = 22, 20, 56  # bytes of the end records of a zip
FOLDER = 0x10  # of the external attributes: MS-DOS directory flag, which miniz believes
SMALL = 64  # bytes of the records that hold one word
WORDS = {"version": re.compile(r"\s*[0-9]+\s*"), "byteorder": re.compile("little|big")}


class Slice(RawIOBase):
    """Bytes [offset, offset + length) of an open file, as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = os.pread(self._descriptor, max(0, min(len(view), self._length - self._at)), self._offset + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def unreadable_by_torch(subject: Subject) -> Iterator[Problem]:
    """Records that ckpt reads and torch refuses."""
    for name, path, offset, length in _records(subject):
        descriptor = open_source(path)
        try:
            size = os.fstat(descriptor).st_size - offset if length is None else length
            why = _why_not(Slice(descriptor, offset, size))
        finally:
            os.close(descriptor)
        if why:
            yield Problem(f"torch cannot read this record: {why}", path, name)


def _records(subject: Subject) -> Iterator[tuple[str, str, int, int | None]]:
    """(tensor, object or file name, path, offset, length or None for the rest of the file)."""
    details = subject.state.details if subject.state is not None else None
    if isinstance(details, Legacy):
        for path in details.files:
            folder = os.path.dirname(path)
            yield from ((n, os.path.join(folder, n), 0, None) for n in sorted(os.listdir(folder)) if n.endswith(".pt"))
    elif isinstance(details, TorchDist):
        common = os.path.join(details.directory, "common.pt")
        if os.path.exists(common):
            yield "common.pt", common, 0, None
        for tensor in details.tensors.values():
            for chunk in tensor.chunks:
                if chunk.extent is not None:
                    yield tensor.fqn, chunk.extent.path, chunk.extent.offset, chunk.extent.length
        for stored in details.objects.values():
            yield stored.fqn, stored.extent.path, stored.extent.offset, stored.extent.length


def _ends_disagree(file: Slice) -> str:
    """The two end records of a zip64 against each other: torch believes the large one, ckpt the small one unless it overflows."""
    file.seek(0, 2)
    size = file.tell()
    file.seek(max(0, size - END - LOCATOR - END64))
    tail = file.read(END + LOCATOR + END64)
    if tail is None or len(tail) < END + LOCATOR + END64 or tail[-END:][:4] != b"PK\x05\x06" or tail[END64 : END64 + 4] != b"PK\x06\x07":
        return ""  # no zip64, or a comment at the end: zipfile looks after both
    disk, first, total_disks = struct.unpack_from("<IQI", tail, END64 + 4)
    if tail[:4] != b"PK\x06\x06" or first != size - END - LOCATOR - END64 or disk or total_disks > 1:
        return "its zip64 end record is not where it should be"
    large = struct.unpack_from("<IIQQQQ", tail, 16)
    small = struct.unpack_from("<HHHHII", tail, END64 + LOCATOR + 4)
    limits = (0xFFFF,) * 4 + (0xFFFFFFFF,) * 2
    if any(a != b and b != limit for a, b, limit in zip(large, small, limits, strict=True)):
        return "its two end records do not agree"
    return ""


def _why_not(file: Slice) -> str:
    """Why torch's reader (caffe2/serialize/inline_container.cc) would refuse the zip; "" when it would not."""
    try:
        disagree = _ends_disagree(file)
        if disagree:
            return disagree
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            roots = {n.partition("/")[0] for n in names}
            if len(roots) != 1:
                return f"its entries are in {len(roots)} folders"
            (root,) = roots
            held = {n[len(root) + 1 :]: n for n in names}
            if "data.pkl" not in held or not {"version", ".data/version"} & held.keys():
                return "it has no data.pkl or no version"
            for name, pattern in WORDS.items():
                if name in held:
                    info = archive.getinfo(held[name])
                    with archive.open(info) as record:
                        text = record.read(SMALL).decode("ascii", "replace")
                    if not pattern.fullmatch(text):
                        return f"its {name} is {text[:20]!r}"
            for info in archive.infolist():
                if info.volume or info.external_attr & FOLDER or info.filename.endswith("/"):
                    return f"{info.filename} is marked as a folder, or as part of another volume"
                archive.open(info).close()  # compares the local header with the directory
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError) as error:
        return str(error)[:200]
    return ""
