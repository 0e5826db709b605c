"""Boxes of tensors and where their bytes lie: pure arithmetic, no files opened.

A *box* is (offset, shape), one integer per axis. A tensor is described by chunks; each chunk is a box of the tensor together with the
place of its bytes. Views under other names (a layer of a stacked tensor, the query rows of a fused qkv) are the same chunks, cut and
moved: nothing here ever copies a byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from .dtypes import dtype
from .errors import CkptError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of one box lie.

    path     file.
    offset   byte position of element 0 of the box (or of the enclosing entry, while `strides` is None).
    length   bytes from there to the end of the last element (or of the entry).
    strides  bytes from one element to the next, one per axis; None = not looked up yet (a torch_dist entry whose header was not read).
    """

    path: str
    offset: int
    length: int
    strides: Shape | None


@dataclass(frozen=True, slots=True)
class Decode:
    """How stored elements become the tensor's elements when it is more than a cast.

    kind     "add" (stored + value, computed in float32), "scale" (stored x the scale of its block, computed in float32) or "packed" (the
             same of four-bit elements, two to a byte along the axis of the block, along which strides are 0).
    value    the number added.
    stored   dtype of the stored bytes.
    scales   the one chunk of the tensor of scales, whose axes are those of this box; scale_dtype: its dtype.
    block    elements per scale along each axis of this box.
    origin   offset of this box inside the whole stored tensor (needed to find its scales).
    """

    kind: str
    stored: str
    value: float = 0.0
    scales: tuple[Chunk, ...] = ()
    scale_dtype: str = ""
    block: Shape = ()
    origin: Shape = ()

    def turned(self, axes: Sequence[int]) -> Decode:
        """The same for a box whose new axes are the old ones listed, -1 for a new axis of size 1. Old ones not listed have size 1: the
        scales are those of its one index."""
        if not self.origin:
            return self
        gone = {a: o // b for a, (o, b) in enumerate(zip(self.origin, self.block, strict=True)) if a not in axes}

        def pick(values: Shape, new: int) -> Shape:
            return tuple(new if a < 0 else values[a] for a in axes)

        def of_index(chunk: Chunk) -> Chunk:
            offset = tuple(gone.get(a, o) for a, o in enumerate(chunk.global_offset))
            return chunk.cut(offset, tuple(1 if a in gone else n for a, n in enumerate(chunk.local_shape)))

        scales = tuple(of_index(c).moved(pick(c.global_offset, 0), axes) for c in self.scales)
        return replace(self, origin=pick(self.origin, 0), block=pick(self.block, 1), scales=scales)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and its bytes. `extent` None: the box is all zeros and is stored nowhere (padding)."""

    global_offset: Shape
    local_shape: Shape
    extent: Extent | None
    decode: Decode | None = None

    def cut(self, offset: Shape, shape: Shape) -> Chunk:
        """The part of this chunk that is the box (offset, shape), given in the same global coordinates; it must lie inside."""
        if offset == self.global_offset and shape == self.local_shape:
            return self
        decode = self.decode
        if decode is not None and decode.origin:
            inner = tuple(o + a - b for o, a, b in zip(decode.origin, offset, self.global_offset, strict=True))
            decode = replace(decode, origin=inner)
        if self.extent is None:
            return Chunk(offset, shape, None, decode)
        strides = self.extent.strides
        if strides is None:
            raise CkptError("E490", "a chunk was cut before its bytes were located", where=self.extent.path)
        start = self.extent.offset + sum((a - b) * s for a, b, s in zip(offset, self.global_offset, strides, strict=True))
        last = self.extent.offset + self.extent.length
        return Chunk(offset, shape, Extent(self.extent.path, start, min(_span(shape, strides, strides), last - start), strides), decode)

    def moved(self, offset: Shape, axes: Sequence[int] | None = None) -> Chunk:
        """The same bytes at another place: new `offset`; `axes` lists, per new axis, the old axis it comes from, or -1 for a new
        axis of size 1. Old axes not listed must have size 1."""
        if axes is None:
            return Chunk(offset, self.local_shape, self.extent, self.decode)
        shape = tuple(1 if a < 0 else self.local_shape[a] for a in axes)
        decode = self.decode.turned(axes) if self.decode is not None else None
        extent = self.extent
        if extent is not None:
            if extent.strides is None:
                raise CkptError("E490", "a chunk was moved before its bytes were located", where=extent.path)
            old = extent.strides
            extent = Extent(extent.path, extent.offset, extent.length, tuple(0 if a < 0 else old[a] for a in axes))
        return Chunk(offset, shape, extent, decode)


def _span(shape: Shape, strides: Shape, whole: Shape) -> int:
    if not prod(shape):
        return 0
    item = min((s for s in whole if s), default=1)
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + item


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """Name, dtype and global shape of a tensor, and the chunks that make it up (in any order).

    folded  the shape that files and readers know, where it is one in which neighbouring axes of global_shape are one axis: of such a
            tensor a box can be every second column. () = global_shape.
    """

    fqn: str
    dtype: str
    global_shape: Shape
    chunks: tuple[Chunk, ...]
    folded: Shape = ()

    @property
    def shape(self) -> Shape:
        """The shape by which files and readers know the tensor."""
        return self.folded or self.global_shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.global_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in its dtype."""
        return self.numel * dtype(self.dtype).bits // 8

    def with_rows(self, kept: int, rows: int) -> TensorMetadata:
        """The tensor with `rows` rows: its first `kept` (fewer when it has fewer), zeros after them."""
        rest = self.global_shape[1:]
        kept = min(kept, rows, self.global_shape[0])
        chunks = list(self.region((0,) * (1 + len(rest)), (kept, *rest)))
        if rows > kept:
            chunks.append(Chunk((kept, *(0,) * len(rest)), (rows - kept, *rest), None))
        return TensorMetadata(self.fqn, self.dtype, (rows, *rest), tuple(chunks))

    def unfolded(self, axis: int, inner: int) -> TensorMetadata:
        """The same elements with `axis` as two axes, the second of size `inner`. CkptError E305 when it or a chunk cannot be divided so."""
        shape = _split(self.global_shape, axis, inner, self.fqn)
        chunks = tuple(_split_chunk(c, axis, inner, self.fqn) for c in self.chunks)
        return TensorMetadata(self.fqn, self.dtype, shape, chunks, self.shape)

    def region(self, offset: Shape, shape: Shape) -> Iterator[Chunk]:
        """The parts of the chunks that lie in the box (offset, shape)."""
        for chunk in self.chunks:
            box = intersect(chunk.global_offset, chunk.local_shape, offset, shape)
            if box is not None:
                yield chunk.cut(*box)


def _split(sizes: Shape, axis: int, inner: int, name: str) -> Shape:
    if sizes[axis] % inner:
        raise CkptError("E305", f"axis {axis} of {name} cannot be divided by {inner}", where=name, found=f"{list(sizes)}")
    return (*sizes[:axis], sizes[axis] // inner, inner, *sizes[axis + 1 :])


def _split_chunk(chunk: Chunk, axis: int, inner: int, name: str) -> Chunk:
    start = chunk.global_offset[axis]
    if start % inner:
        raise CkptError("E305", f"a stored piece of {name} begins inside what belongs together", where=name, found=f"{chunk.global_offset}")
    offset = (*chunk.global_offset[:axis], start // inner, 0, *chunk.global_offset[axis + 1 :])
    extent, decode = chunk.extent, chunk.decode
    if extent is not None:
        if extent.strides is None:
            raise CkptError("E490", "a chunk was divided before its bytes were located", where=extent.path)
        step = extent.strides[axis]
        extent = replace(extent, strides=(*extent.strides[:axis], step * inner, step, *extent.strides[axis + 1 :]))
    if decode is not None and decode.origin:
        if decode.block[axis] != 1 or decode.origin[axis] % inner:
            raise CkptError("E305", f"the scales of {name} are shared by what would be taken apart", where=name)
        place = (*decode.origin[:axis], decode.origin[axis] // inner, 0, *decode.origin[axis + 1 :])
        block = (*decode.block[:axis], 1, *decode.block[axis:])
        decode = replace(decode, origin=place, block=block, scales=tuple(_split_chunk(c, axis, inner, name) for c in decode.scales))
    return Chunk(offset, _split(chunk.local_shape, axis, inner, name), extent, decode)


def unfolded_alike(a: TensorMetadata, b: TensorMetadata) -> tuple[TensorMetadata, TensorMetadata]:
    """Two tensors of one `shape` with the same axes: what is folded in one is unfolded in the other."""
    if a.global_shape == b.global_shape:
        return a, b
    if len(a.global_shape) > len(b.global_shape):
        second, first = unfolded_alike(b, a)
        return first, second
    axis = next((i for i, (m, n) in enumerate(zip(a.global_shape, b.global_shape, strict=False)) if m != n), len(a.global_shape))
    if len(a.global_shape) == len(b.global_shape) or axis == len(a.global_shape) or a.shape != b.shape:
        raise CkptError("E302", f"{a.fqn} has two shapes", expected=f"{list(a.global_shape)}", found=f"{list(b.global_shape)}")
    return unfolded_alike(a.unfolded(axis, a.global_shape[axis] // b.global_shape[axis]), b)


def contiguous_strides(shape: Sequence[int], itemsize: int) -> Shape:
    """Row-major strides in bytes."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def intersect(offset_a: Shape, shape_a: Shape, offset_b: Shape, shape_b: Shape) -> tuple[Shape, Shape] | None:
    """The common box of two boxes of the same rank, or None when they share no element."""
    start = tuple(map(max, offset_a, offset_b))
    end = tuple(min(oa + na, ob + nb) for oa, na, ob, nb in zip(offset_a, shape_a, offset_b, shape_b, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return None if any(n <= 0 for n in shape) else (start, shape)


def whole(shape: Shape) -> tuple[Shape, Shape]:
    """The box that is the whole tensor."""
    return (0,) * len(shape), shape


def tiling_error(shape: Shape, boxes: Iterable[tuple[Shape, Shape]]) -> str | None:
    """None when the boxes cover a tensor of this shape exactly once; otherwise a sentence naming the first uncovered, doubled or
    outside region."""
    kept = []
    for offset, size in boxes:
        if len(offset) != len(shape) or len(size) != len(shape):
            return f"box at {offset} of {size} has another number of axes than {shape}"
        if any(o < 0 or n < 0 or o + n > total for o, n, total in zip(offset, size, shape, strict=True)):
            return f"box at {offset} of {size} lies outside {shape}"
        if prod(size):
            kept.append((offset, size))
    if not prod(shape):
        return None
    return _tile(shape, kept, ())


def _tile(shape: Shape, boxes: list[tuple[Shape, Shape]], done: tuple[tuple[int, int], ...]) -> str | None:
    axis = len(done)
    where = ", ".join(f"{a}:{b}" for a, b in done + tuple((0, n) for n in shape[axis:]))
    if not boxes:
        return f"[{where}] is not covered"
    if axis == len(shape):
        return None if len(boxes) == 1 else f"[{where}] is covered {len(boxes)} times"
    cuts = sorted({0, shape[axis]} | {o[axis] for o, _ in boxes} | {o[axis] + n[axis] for o, n in boxes})
    slabs: list[list[tuple[Shape, Shape]]] = [[] for _ in range(len(cuts) - 1)]
    for box in boxes:
        first = bisect_left(cuts, box[0][axis])
        for slab in range(first, bisect_left(cuts, box[0][axis] + box[1][axis])):
            slabs[slab].append(box)
    for index, slab_boxes in enumerate(slabs):
        error = _tile(shape, slab_boxes, (*done, (cuts[index], cuts[index + 1])))
        if error:
            return error
    return None


def check_tiling(tensor: TensorMetadata, path: str) -> None:
    """CkptError E207 naming the region when the chunks of a tensor do not cover it exactly once."""
    error = tiling_error(tensor.global_shape, ((c.global_offset, c.local_shape) for c in tensor.chunks))
    if error:
        raise CkptError(
            "E207",
            f"the stored pieces of {tensor.fqn} do not make up the tensor: {error}",
            where=f"{path}: {tensor.fqn}",
            expected=f"pieces that cover {list(tensor.global_shape)} exactly once",
            hint="a rank's file is missing or .metadata was edited; take another iteration",
        )
