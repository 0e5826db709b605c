"""Puts right what Megatron-Core 0.15.0 to 0.19.x saved shifted: fully_reshardable state of runs whose gradient buckets were padded.

There the states of all buckets are joined without the padding at their ends, but parameters are cut out by positions that count it. The
parameter at [a, e) got world[a:e] instead of world[a-P : e-P], P being the padding of earlier buckets. Nearly all elements are therefore in
the file, under a neighbour's name. Source: distrib_optimizer.py, sharded_param_state_fully_reshardable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ..dtypes import dtype
from ..errors import CkptError
from ..notes import Note
from ..tensors import Chunk, Decode, Extent, Shape, TensorMetadata, contiguous_strides
from .buckets import Buckets, Item, end_divisor, recompute
from .cut import BucketOptions, Cut, buffers_of, sizes_to_try
from .flat import Flat, make_flat
from .order import Model, Parameter, Piece
from .sources import assigned
from .state import MASTER, OptimizerState
from .values import compare_masters

Named = dict[str, dict[str, TensorMetadata]]


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did. parameters: how many had been shifted;  elements: of all states;  lost: how many of them were never saved
    (float32 weights are taken from the model's weights, moments are zero);  bucket_size, dp: the layout that explains the file."""

    parameters: int
    elements: int
    lost: int
    bucket_size: int | None
    dp: int


def repair_shifted(
    state: OptimizerState,
    weights: Mapping[str, TensorMetadata],
    model: Model,
    orders: Sequence[tuple[str, str]],
    options: BucketOptions,
    chain: int,
    where: str,
) -> tuple[OptimizerState, Repair]:
    """The state with every element under its own parameter, as chunk views into the same files.

    orders   (spec, form of the experts) in which the model may have been built, the likeliest first.     chain  number of optimizers.
    A layout counts only if the float32 weights it gives round to the model's weights; of several, the one that loses least.
    CkptError E226 when none does: the state is wrong for another reason, or --bucket-size and --dp must be said.
    """
    if MASTER not in state.tensors:
        raise CkptError("E226", "there are no float32 weights to check a repair by", where=where)
    best: tuple[int, Named, Repair] | None = None
    tried = []
    for spec, experts in orders:
        ranks = assigned({}, model, spec, experts, where, chain)
        default = ranks[0].dp
        for size in dict.fromkeys(sizes_to_try(options, default)):
            dp = options.dp or default
            buffers = [
                (rank.place.pp > 0 or chunk > 0, options.dp or rank.dp, parameters)
                for rank in ranks
                for _, chunk, parameters in buffers_of(rank.chunks, False)
            ]
            layouts = [
                (parameters, _layout(parameters, None if single else size, sharing, options.high_bandwidth))
                for single, sharing, parameters in buffers
            ]
            if not any(_padding(layout) for _, layout in layouts):
                continue
            tried.append(f"bucket size {size}, dp {dp}, {spec}")
            try:
                tensors, lost = _reassembled(state, weights, model, layouts, where)
            except CkptError:
                continue
            if compare_masters(tensors[MASTER], weights):
                continue
            moved = sum(1 for parameters, layout in layouts for i, _ in enumerate(parameters) if layout.full(i) != layout.compact(i))
            repair = Repair(moved, sum(t.numel for named in tensors.values() for t in named.values()), lost, size, dp)
            if best is None or lost < best[0]:
                best = (lost, tensors, repair)
    if best is None:
        raise CkptError(
            "E226",
            "the optimizer state is not what the known padding error makes of a good one, so it cannot be repaired",
            where=where,
            expected="float32 weights that round to the model's weights after the padding of gradient buckets is taken out",
            found=f"none of the layouts tried explains the file: {'; '.join(tried[:6]) or 'no layout has padding'}",
            hint="give --bucket-size and --dp as the run had them",
        )
    _, tensors, repair = best
    text = (
        f"{repair.parameters} parameters had been saved shifted by the padding of gradient buckets (mcore 0.15 to 0.19); put right. "
        f"{repair.lost} of {repair.elements} elements were never saved: float32 weights are the model's there, moments are 0"
    )
    return replace(state, tensors=tensors, notes=(*state.notes, Note("warning", "optimizer", text)), problems=()), repair


def _layout(parameters: Sequence[Parameter], size: int | None, dp: int, high_bandwidth: bool) -> Buckets:
    return recompute([Item(p.numel, p.shared) for p in parameters], size, end_divisor(dp, high_bandwidth))


def _padding(layout: Buckets) -> int:
    """Elements of padding before the last bucket: what shifts parameters."""
    return sum(layout.padded[:-1]) - sum(layout.unpadded[:-1])


def _reassembled(
    state: OptimizerState,
    weights: Mapping[str, TensorMetadata],
    model: Model,
    layouts: Sequence[tuple[Sequence[Parameter], Buckets]],
    where: str,
) -> tuple[Named, int]:
    """Canonical tensors cut at the right places out of the joined buffers that the file's tensors are pieces of, and how much is lost."""
    cut = Cut()
    for parameters, layout in layouts:
        for key, named in state.tensors.items():
            if any(piece.name not in named for p in parameters for piece in p.pieces if not p.copy):
                raise CkptError("E226", f"some parameters have no {key}", where=where)
            world = _world(key, named, parameters, layout)
            for index, parameter in enumerate(parameters):
                if parameter.copy:
                    continue
                for piece in parameter.pieces:
                    cut.add(key, piece, world, layout.compact(index))
    tensors = cut.tensors(model.tensors, where)
    lost = sum(prod(c.local_shape) for named in tensors.values() for t in named.values() for c in t.chunks if c.extent is None)
    tensors[MASTER] = {n: _filled(t, weights[n]) for n, t in tensors[MASTER].items()}
    return tensors, lost


def _world(key: str, named: Mapping[str, TensorMetadata], parameters: Sequence[Parameter], layout: Buckets) -> Flat:
    """The joined buffer as far as the file holds it: under each parameter's name lies world[full start : full end]; gaps are zeros."""
    pieces: list[tuple[int, int, Extent | None]] = []
    kind = "float32"
    for index, parameter in enumerate(parameters):
        if parameter.copy:  # another rank's copy was saved
            continue
        for piece in parameter.pieces:
            kind = named[piece.name].dtype
            for start, count, extent in _runs(piece, named[piece.name]):
                begin = layout.full(index) + piece.start + start
                kept = min(count, layout.numel - begin)  # beyond the end zeros were written
                if kept > 0 and extent is not None:
                    pieces.append((begin, kept, extent))
    pieces.sort(key=lambda p: p[0])
    filled: list[tuple[int, int, Extent | None]] = []
    end = 0
    for begin, count, extent in [*pieces, (layout.numel, 0, None)]:
        if begin > end:
            filled.append((end, begin - end, None))
        if count:
            filled.append((begin, count, extent))
        end = begin + count
    return make_flat(key, kind, layout.numel, filled)


def _runs(piece: Piece, tensor: TensorMetadata) -> Iterator[tuple[int, int, Extent | None]]:
    """(first element, number, where) of the runs of a local piece, row-major as stored in the buffer, that lie end to end in the file."""
    item = dtype(tensor.dtype).itemsize
    steps = contiguous_strides(piece.stored, 1)
    for inner, outer, size in piece.boxes:
        for chunk in tensor.region(outer, size):
            offset = tuple(c - o + i for c, o, i in zip(chunk.global_offset, outer, inner, strict=True))
            shape, strides = chunk.local_shape, None if chunk.extent is None else chunk.extent.strides
            if piece.turned:
                offset, shape, strides = offset[::-1], shape[::-1], None if strides is None else strides[::-1]
            run, axis = _run(shape, piece.stored, strides, item)
            for index in product(*(range(n) for n in shape[:axis])):
                at = sum((o + i) * s for o, i, s in zip(offset, (*index, *(0 for _ in shape[axis:])), steps, strict=True))
                if chunk.extent is None or strides is None:
                    yield at, run, None
                    continue
                start = chunk.extent.offset + sum(i * s for i, s in zip(index, strides, strict=False))
                yield at, run, Extent(chunk.extent.path, start, run * item, (item,))


def _run(shape: Shape, stored: Shape, strides: Shape | None, item: int) -> tuple[int, int]:
    """(elements in a run, number of axes before it) of a box of `shape` in a row-major tensor of shape `stored`."""
    run, axis = 1, len(shape)
    while axis:
        if strides is not None and shape[axis - 1] > 1 and strides[axis - 1] != run * item:
            break
        run *= shape[axis - 1]
        axis -= 1
        if shape[axis] != stored[axis]:
            break
    return run, axis


def _filled(tensor: TensorMetadata, weight: TensorMetadata) -> TensorMetadata:
    """The tensor with boxes that are stored nowhere taken from the model's weights."""
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        if chunk.extent is not None:
            chunks.append(chunk)
            continue
        for part in weight.region(chunk.global_offset, chunk.local_shape):
            decode = part.decode if weight.dtype == tensor.dtype else part.decode or Decode("add", weight.dtype)
            chunks.append(replace(part, decode=decode))
    return replace(tensor, chunks=tuple(chunks))


__all__ = ["Repair", "repair_shifted"]
