"""A hash of what a checkpoint's weights are, whatever format, layout or stacking they are stored in.

It is the SHA-256 of one line per tensor, sorted by name: "name dtype AxBxC sha256-of-its-bytes\\n" (bytes in row-major order, little
endian). Where the model family is known the names are Hugging Face's and vocabulary padding is left out, so that a model has the same
fingerprint as HF folder and as torch_dist of any layout; otherwise they are the stored ones.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..dtypes import dtype
from ..errors import CkptError
from ..source_files import open_source
from ..statistics import adding_up
from ..tensors import Shape, TensorMetadata, contiguous_strides
from .overview import Opened

BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256: the hash; naming: "hf" or "stored"; why: what decided the naming; tensors: name -> SHA-256 of its bytes, sorted."""

    sha256: str
    naming: str
    why: str
    nbytes: int
    tensors: dict[str, str]


def fingerprint(opened: Opened, *, threads: int = 2, on_progress: Callable[[int], None] | None = None) -> Fingerprint:
    """Hash the weights (not the optimizer state). on_progress gets the bytes hashed so far. Errors: E222 no weights."""
    from concurrent.futures import ThreadPoolExecutor

    tensors, naming, why = named_weights(opened)
    told = adding_up(on_progress)
    ordered = sorted(tensors)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        digests = dict(zip(ordered, pool.map(lambda n: digest(tensors[n], told), ordered), strict=True))
    whole = hashlib.sha256()
    for name in ordered:
        shape = "x".join(str(n) for n in tensors[name].shape)
        whole.update(f"{name} {tensors[name].dtype} {shape} {digests[name]}\n".encode("utf-8", "surrogatepass"))
    return Fingerprint(whole.hexdigest(), naming, why, sum(t.nbytes for t in tensors.values()), digests)


def named_weights(opened: Opened) -> tuple[dict[str, TensorMetadata], str, str]:
    """(located weights by the names that are hashed, "hf" or "stored", why). CkptError E222 when there are none."""
    from ..views import as_hf

    checkpoint = opened.model
    weights = checkpoint.weights
    if not weights:
        raise CkptError("E222", "no model weights in this checkpoint", where=checkpoint.location.directory)
    try:
        if checkpoint.format == "hf":
            return _without_copies(opened), "hf", "the names and tensors of its family"
        view = as_hf(checkpoint)
    except CkptError as error:
        if error.code[:2] != "E3":
            raise
        return checkpoint.locate_all(list(weights)), "stored", f"stored names, because {error.what}"
    said = "; ".join(n.text for n in view.notes if n.kind == "assumed" and "padding" in n.text)
    name = view.family.name if view.family else "Megatron"
    return view.tensors, "hf", f"as a {name} model under its Hugging Face names" + (f"; {said}" if said else "")


def _without_copies(opened: Opened) -> dict[str, TensorMetadata]:
    """HF tensors without those that carry no weight of their own (a tied head stored again, rotary frequencies)."""
    from ..families import family_of_config
    from ..families.config import args_from_config
    from ..families.dimensions import dimensions
    from ..families.family import bind

    checkpoint = opened.model
    where = checkpoint.location.directory
    if checkpoint.config is None:
        raise CkptError("E306", "there is no config.json beside the weights", where=where)
    family = family_of_config(checkpoint.config, where)
    args, _ = args_from_config(checkpoint.config, family.rules, allow_unrepresentable=True)
    bound = bind(family, dimensions(args), checkpoint.tensors, "hf", where)
    left_out = {name for name, _ in bound.left_out}
    return {n: t for n, t in checkpoint.tensors.items() if n not in left_out}


def digest(tensor: TensorMetadata, on_progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a located tensor's bytes in row-major order, in bounded memory."""
    hashed = hashlib.sha256()
    for block in row_major(tensor):
        hashed.update(block)
        on_progress(len(block))
    return hashed.hexdigest()


def row_major(tensor: TensorMetadata) -> Iterator[memoryview | bytes]:
    """The bytes of a tensor in row-major order, about BLOCK_BYTES at a time."""
    if not tensor.numel:
        return
    whole = _in_one_piece(tensor)
    if whole is not None:
        yield from _file_bytes(*whole)
        return
    from ..lazy import read_box

    for offset, shape in _boxes((), tensor.global_shape, dtype(tensor.dtype).itemsize):
        yield read_box(tensor, offset, shape).reshape(-1).view("u1").data


def _in_one_piece(tensor: TensorMetadata) -> tuple[str, int, int] | None:
    """(path, offset, bytes) when the tensor lies in one file exactly as it is hashed."""
    if len(tensor.chunks) != 1 or tensor.chunks[0].decode is not None or tensor.chunks[0].extent is None:
        return None
    extent, kind = tensor.chunks[0].extent, dtype(tensor.dtype)
    if extent.strides != contiguous_strides(tensor.global_shape, kind.bits // 8 if kind.bits % 8 == 0 else 1):
        return None
    return extent.path, extent.offset, tensor.nbytes


def _file_bytes(path: str, offset: int, length: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(length, BLOCK_BYTES)))
    fd = open_source(path)
    try:
        while length:
            count = os.preadv(fd, [buffer[: min(length, len(buffer))]], offset)
            if not count:
                raise CkptError("E406", "the file is shorter than its index says", where=path, expected=f"bytes at {offset}")
            yield buffer[:count]
            offset, length = offset + count, length - count
    finally:
        os.close(fd)


def _boxes(start: Shape, shape: Shape, itemsize: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes that together are the tensor below the leading index `start`, in row-major order, each at most BLOCK_BYTES if it can be."""
    axis = len(start)
    rest = shape[axis:]
    ones = (1,) * axis
    if not rest or prod(rest) * itemsize <= BLOCK_BYTES:
        yield (*start, *(0,) * len(rest)), (*ones, *rest)
        return
    below = prod(rest[1:]) * itemsize
    if below > BLOCK_BYTES:
        for index in range(rest[0]):
            yield from _boxes((*start, index), shape, itemsize)
        return
    rows = max(1, BLOCK_BYTES // below)
    for first in range(0, rest[0], rows):
        yield (*start, first, *(0,) * (len(rest) - 1)), (*ones, min(rows, rest[0] - first), *rest[1:])


def digests_differ(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Names whose digests differ or that only one side has, sorted."""
    return sorted(n for n in {*a, *b} if a.get(n) != b.get(n))
