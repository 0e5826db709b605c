"""Flat ranges of row-major tensors as boxes: what a distributed optimizer stores end to end, seen again as pieces of tensors.

Nothing here knows of files beyond Extents; no bytes are touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..dtypes import dtype
from ..errors import CkptError
from ..tensors import Chunk, Extent, Shape, TensorMetadata, contiguous_strides


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[tuple[Shape, Shape]]:
    """The elements [start, stop) of a row-major tensor of `shape` as boxes (offset, shape), in order.

    At most 2 * rank - 1 boxes for rank >= 1. ValueError when the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"[{start}, {stop}) is not a range of {shape}")
    return list(_boxes(shape, start, stop))


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = prod(shape[1:]), shape[1:]
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # within one row
        for offset, size in _boxes(rest, head, tail):
            yield (first, *offset), (1, *size)
        return
    if head:
        for offset, size in _boxes(rest, head, row):
            yield (first, *offset), (1, *size)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if tail:
        for offset, size in _boxes(rest, 0, tail):
            yield (last, *offset), (1, *size)


def boxes_at(shape: Shape, start: int, stop: int, extent: Extent, item: int) -> Iterator[Chunk]:
    """The chunks of a row-major tensor whose elements [start, stop) lie end to end at `extent`, `item` bytes each."""
    strides = contiguous_strides(shape, item)
    for offset, size in boxes_of_range(shape, start, stop):
        at = sum(o * s for o, s in zip(offset, strides, strict=True)) - start * item
        span = item + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
        yield Chunk(offset, size, Extent(extent.path, extent.offset + at, span, strides))


@dataclass(frozen=True, slots=True)
class Flat:
    """Flat storage: elements of `dtype` in pieces, each (first element, number of elements, where); sorted, without overlap.

    where None: zeros that are stored nowhere. The pieces may leave gaps.
    """

    name: str
    dtype: str
    numel: int
    pieces: tuple[tuple[int, int, Extent | None], ...]

    def chunks(self, shape: Shape, start: int) -> list[Chunk]:
        """The tensor of `shape` that begins at element `start`, as chunks; what no piece holds is left out."""
        result: list[Chunk] = []
        item, stop = dtype(self.dtype).itemsize, start + prod(shape)
        first = max(0, bisect_right(self.pieces, start, key=lambda p: p[0]) - 1)
        for begin, count, extent in self.pieces[first:]:
            if begin >= stop:
                break
            low, high = max(begin, start), min(begin + count, stop)
            if low >= high:
                continue
            if extent is None:
                result.extend(Chunk(o, n, None) for o, n in boxes_of_range(shape, low - start, high - start))
                continue
            at = Extent(extent.path, extent.offset + (low - begin) * item, (high - low) * item, (item,))
            result.extend(boxes_at(shape, low - start, high - start, at, item))
        return result

    def starts(self) -> set[int]:
        """First elements of the pieces."""
        return {begin for begin, _, _ in self.pieces}


def flat_of(tensor: TensorMetadata) -> Flat:
    """A located tensor as flat storage: one axis, or (data-parallel rank, elements of that rank) as bucket space was once stored.

    CkptError E226 when it has other axes, E207 when pieces overlap or lie outside.
    """
    shape, item = tensor.global_shape, dtype(tensor.dtype).itemsize
    pieces = []
    for chunk in tensor.chunks:
        if not 1 <= len(shape) <= 2 or (len(shape) == 2 and chunk.local_shape[0] != 1):
            raise CkptError("E226", f"{tensor.fqn} is not a flat buffer", where=tensor.fqn, found=f"shape {list(shape)}")
        begin = chunk.global_offset[-1] + (chunk.global_offset[0] * shape[1] if len(shape) == 2 else 0)
        count, extent = chunk.local_shape[-1], chunk.extent
        if extent is not None:
            if extent.strides is None:
                raise CkptError("E490", f"{tensor.fqn} was read before its bytes were located", where=extent.path)
            if count > 1 and extent.strides[-1] != item:
                raise CkptError("E226", f"{tensor.fqn} is not stored end to end", where=f"{extent.path}: {tensor.fqn}")
        if count:
            pieces.append((begin, count, extent))
    return make_flat(tensor.fqn, tensor.dtype, prod(shape), pieces)


def make_flat(name: str, kind: str, numel: int, pieces: Iterable[tuple[int, int, Extent | None]]) -> Flat:
    """Flat storage from pieces in any order. CkptError E207 when they overlap or reach outside."""
    ordered = sorted(pieces, key=lambda p: p[0])
    end = 0
    for begin, count, _ in ordered:
        if begin < end or begin + count > numel:
            raise CkptError(
                "E207", f"the stored pieces of {name} overlap or reach beyond it", where=name, found=f"[{begin}, {begin + count})"
            )
        end = begin + count
    return Flat(name, kind, numel, tuple(ordered))


def joined(parts: Sequence[Flat]) -> Flat:
    """Flat storages one after the other as one."""
    pieces: list[tuple[int, int, Extent | None]] = []
    base = 0
    for part in parts:
        pieces.extend((base + begin, count, extent) for begin, count, extent in part.pieces)
        base += part.numel
    return Flat(parts[0].name, parts[0].dtype, base, tuple(pieces))


def unflatten(tensor: TensorMetadata, original: Shape) -> TensorMetadata:
    """A tensor of `fully_sharded_model_space` (Megatron-Core 0.8 to 0.15) in its original shape.

    Stored shape: (grid of local shards, one axis each; elements of a local shard, row-major). Local shape = original // grid.
    CkptError E226 when grid and original shape do not fit together.
    """
    grid, elements = tensor.global_shape[:-1], tensor.global_shape[-1]
    local = tuple(n // g if g else 0 for n, g in zip(original, grid, strict=False))
    if len(grid) != len(original) or prod(local) != elements or any(a * b != n for a, b, n in zip(local, grid, original, strict=True)):
        raise CkptError(
            "E226",
            f"{tensor.fqn} was flattened in a way that ckpt does not know",
            where=tensor.fqn,
            expected=f"(grid of shards, elements of a shard) of {list(original)}",
            found=f"{list(tensor.global_shape)}",
        )
    item = dtype(tensor.dtype).itemsize
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        start, count = chunk.global_offset[-1], chunk.local_shape[-1]
        if any(n != 1 for n in chunk.local_shape[:-1]):
            raise CkptError(
                "E226", f"a stored piece of {tensor.fqn} covers several shards", where=tensor.fqn, found=f"{list(chunk.local_shape)}"
            )
        base = tuple(g * n for g, n in zip(chunk.global_offset[:-1], local, strict=True))
        if chunk.extent is None:
            parts: Iterable[Chunk] = (Chunk(o, n, None) for o, n in boxes_of_range(local, start, start + count))
        else:
            parts = boxes_at(local, start, start + count, chunk.extent, item)
        chunks.extend(p.moved(tuple(a + b for a, b in zip(p.global_offset, base, strict=True))) for p in parts)
    return TensorMetadata(tensor.fqn, tensor.dtype, original, tuple(chunks))
