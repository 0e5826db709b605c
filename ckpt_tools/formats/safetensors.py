"""The safetensors container: header in, header out. The file's README is the specification; rules and codes as checked by library 0.8.0."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..dtypes import BY_SAFETENSORS, DTYPES, RANK
from ..errors import CkptError
from ..source_files import opened
from ..tensors import Chunk, Extent, Shape, TensorMetadata, contiguous_strides

HEADER_LIMIT = 100_000_000  # bytes of JSON; the library refuses one more


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says about itself: tensors in file order, `__metadata__` (None when absent), where data starts, file size."""

    tensors: dict[str, TensorMetadata]
    metadata: dict[str, str] | None
    data_offset: int
    size: int
    warnings: tuple[str, ...] = ()


def read_header(path: str, *, tolerant: bool = False) -> Header:
    """Header of a safetensors file, every range checked against the file's size; no tensor byte is read.

    tolerant: bytes after the last tensor are a warning instead of an error (for looking at a file, not for copying it).

    Errors: E205 placeholder (git-lfs pointer, HTML), E210 broken header, E211 ranges that do not partition the data.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        refuse_placeholder(path, head + file.read(64))
        file.seek(8)
        if len(head) < 8:
            raise CkptError("E210", "not a safetensors file: shorter than its 8-byte length field", where=path, found=f"{size} bytes")
        length = int.from_bytes(head, "little")
        if length > HEADER_LIMIT:
            raise CkptError(
                "E210",
                "safetensors header is larger than the format allows",
                where=path,
                expected=f"at most {HEADER_LIMIT} bytes",
                found=f"{length} bytes",
            )
        if 8 + length > size:
            raise CkptError(
                "E210",
                "safetensors file ends inside its header",
                where=path,
                expected=f"at least {8 + length} bytes",
                found=f"{size} bytes",
                hint="the file is truncated; fetch it again",
            )
        raw = file.read(length)
    return parse_header(raw, path, size, tolerant=tolerant)


def parse_header(raw: bytes, path: str, size: int, *, tolerant: bool = False) -> Header:
    """`raw` = the JSON bytes; `size` = bytes of the whole file. See read_header."""
    doubles: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            doubles.extend(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return result

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CkptError("E210", "safetensors header is not valid JSON", where=path, found=str(error)[:200]) from None
    if doubles:
        raise CkptError("E210", f"safetensors header has the key {doubles[0]!r} twice", where=path)
    if not isinstance(table, dict):
        raise CkptError("E210", "safetensors header is not a JSON object", where=path)
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise CkptError("E210", "__metadata__ is not a table of strings", where=path)
    start = 8 + len(raw)
    entries = sorted((_entry(name, value, path) for name, value in table.items()), key=lambda e: (e[1], e[2]))
    position, tensors = 0, {}
    previous = ""
    for name, begin, end, code, shape in entries:
        if begin != position:
            problem = "leave a hole before" if begin > position else f"share bytes of {previous!r} and"
            raise CkptError(
                "E211",
                f"safetensors data ranges {problem} {name!r}",
                where=f"{path}: {name}",
                expected=f"data_offsets starting at {position}",
                found=f"[{begin}, {end}]",
            )
        dtype = BY_SAFETENSORS[code]
        bits = prod(shape) * (4 if code == "F4" else dtype.bits)
        if bits % 8 or bits // 8 != end - begin:
            raise CkptError(
                "E211",
                f"data range of {name!r} does not fit its shape",
                where=f"{path}: {name}",
                expected=f"{bits / 8:g} bytes for {code} {list(shape)}",
                found=f"{end - begin} bytes",
            )
        if code == "F4":  # two elements a byte; torch counts pairs, and so does ckpt
            shape = (*shape[:-1], shape[-1] // 2)
        strides = contiguous_strides(shape, dtype.bits // 8 if dtype.bits % 8 == 0 else 1)
        tensors[name] = TensorMetadata(
            name, dtype.name, shape, (Chunk((0,) * len(shape), shape, Extent(path, start + begin, end - begin, strides)),)
        )
        position, previous = end, name
    if start + position != size:
        extra = size - start - position
        what = f"{extra} bytes are not covered by any tensor" if extra > 0 else "safetensors file is shorter than its header says"
        if tolerant and extra > 0:
            said = f"{os.path.basename(path)}: {what} (safetensors itself refuses the file)"
            return Header(tensors, metadata, start, size, (said,))
        raise CkptError(
            "E211",
            what,
            where=path,
            expected=f"{start + position} bytes",
            found=f"{size} bytes",
            hint="the file is truncated or was appended to; fetch it again",
        )
    return Header(tensors, metadata, start, size)


def _entry(name: str, value: object, path: str) -> tuple[str, int, int, str, Shape]:
    where = f"{path}: {name}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CkptError("E210", f"safetensors entry {name!r} lacks dtype, shape or data_offsets", where=where)
    unknown = value.keys() - {"dtype", "shape", "data_offsets"}
    if unknown:
        raise CkptError("E210", f"safetensors entry {name!r} has unknown fields", where=where, found=", ".join(sorted(unknown)))
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in BY_SAFETENSORS:
        raise CkptError("E210", f"unknown safetensors dtype {code!r}"[:200], where=where, expected=", ".join(BY_SAFETENSORS))
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CkptError(
            "E211",
            f"shape or data_offsets of {name!r} are not valid",
            where=where,
            found=f"shape {shape!r}, data_offsets {offsets!r}"[:200],
        )
    if not name:
        raise CkptError("E210", "a tensor has an empty name", where=path)
    return name, offsets[0], offsets[1], code, tuple(shape)


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in values)


def refuse_placeholder(path: str, head: bytes) -> None:
    """CkptError E205 when the first bytes are those of a git-lfs pointer or of an HTML page in place of the file."""
    text = head.lstrip()[:40].lower()
    if head.startswith(b"version https://git-lfs"):
        raise CkptError(
            "E205",
            "this is a git-lfs pointer, not the file itself",
            where=path,
            hint="run `git lfs pull` in that folder, or download the file again",
        )
    if text.startswith((b"<!doctype", b"<html")):
        raise CkptError(
            "E205",
            "this is an HTML page, not a tensor file",
            where=path,
            hint="the download was answered with an error page; download it again",
        )


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A safetensors file to be written: its header bytes (length field included), tensor name -> (offset in the file, bytes), size."""

    header: bytes
    places: dict[str, tuple[int, int]]
    size: int


def layout_file(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str] | None) -> FileLayout:
    """Place tensors (name, dtype, shape) as the safetensors library 0.8.0 does: higher dtype rank first, then by name; header padded
    with spaces to 8 bytes. So a file written by that library is reproduced byte for byte. CkptError E212 beyond the header limit."""
    ordered = sorted(tensors, key=lambda t: (-RANK[t[1]], t[0]))
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, position = {}, 0
    for name, dtype_name, shape in ordered:
        dtype = DTYPES[dtype_name]
        if dtype.safetensors is None:
            raise CkptError("E212", f"safetensors cannot hold dtype {dtype_name}", where=name)
        nbytes = prod(shape) * dtype.bits // 8
        listed = [*shape[:-1], shape[-1] * 2] if dtype.safetensors == "F4" else list(shape)
        table[name] = {"dtype": dtype.safetensors, "shape": listed, "data_offsets": [position, position + nbytes]}
        places[name] = (position, nbytes)
        position += nbytes
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > HEADER_LIMIT:
        raise CkptError(
            "E212",
            f"a safetensors file of {len(ordered)} tensors needs a header above the format's limit",
            hint="use a smaller --max-shard-size",
        )
    start = 8 + len(raw)
    return FileLayout(len(raw).to_bytes(8, "little") + raw, {n: (start + o, b) for n, (o, b) in places.items()}, start + position)
