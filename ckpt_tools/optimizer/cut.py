"""Cuts the flat buffers of a distributed optimizer into canonical tensors: ranks, buffers and buckets are matched, checked, then cut.

Nothing is trusted that does not fit: number, dtype and size of buffers and buckets, and the places where stored pieces begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CkptError
from ..memory.names import Rank
from ..tensors import Chunk, TensorMetadata, check_tiling
from .buckets import ALIGN, Buckets, Item, default_bucket_size, end_divisor, fit, recompute
from .flat import Flat
from .order import Parameter, Piece

QUANTIZED = "uint8"  # what Megatron calls the dtype of FP8 parameters in buffers


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of one rank: dtype of its parameters; per state (exp_avg, ...) one Flat per bucket, or one for all of them joined
    without padding; recorded sizes of the buckets, where the file has them."""

    dtype: str
    states: Mapping[str, tuple[Flat, ...]]
    joined: bool
    unpadded: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements of one state."""
        return sum(f.numel for f in next(iter(self.states.values()), ()))


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """The buffers of one optimizer on one rank, and the parameters they hold: one list per model chunk, in registration order."""

    name: str
    place: Rank
    chunks: Sequence[Sequence[Parameter]]
    buffers: Sequence[Buffer]
    dp: int


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """How the run divided its buffers. size None: `tried` are tried (None = one bucket); dp None: what the arguments say."""

    size: int | None = None
    dp: int | None = None
    tried: tuple[int | None, ...] = (None,)
    high_bandwidth: bool = False


@dataclass(slots=True)
class Cut:
    """Canonical tensors per state while they are collected."""

    chunks: dict[str, dict[str, list[Chunk]]] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, state: str, piece: Piece, flat: Flat, start: int) -> None:
        """Add what `flat` holds of a parameter's piece; `start` = first element of the parameter."""
        if self.dtypes.setdefault((state, piece.name), flat.dtype) != flat.dtype:
            raise CkptError("E307", f"the {state} of {piece.name} has another dtype on some ranks", where=flat.name, found=flat.dtype)
        found = self.chunks.setdefault(state, {}).setdefault(piece.name, [])
        found.extend(placed(piece, flat.chunks(piece.stored, start + piece.start)))

    def tensors(self, model: Mapping[str, TensorMetadata], where: str) -> dict[str, dict[str, TensorMetadata]]:
        """The canonical tensors; E207 when one is not covered exactly once."""
        result: dict[str, dict[str, TensorMetadata]] = {}
        for state, named in self.chunks.items():
            result[state] = {}
            for name in (n for n in model if n in named):
                tensor = TensorMetadata(name, self.dtypes[state, name], model[name].global_shape, tuple(named[name]))
                check_tiling(tensor, f"{where}: {state}")
                result[state][name] = tensor
        return result


def placed(piece: Piece, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Chunks of a local piece (as stored) as chunks of its canonical tensor."""
    axes = tuple(reversed(range(len(piece.stored)))) if piece.turned else None
    shape = piece.stored[::-1] if piece.turned else piece.stored
    local = []
    for chunk in chunks:
        offset = chunk.global_offset[::-1] if axes else chunk.global_offset
        local.append(chunk.moved(offset, axes) if axes else chunk)
    tensor = TensorMetadata(piece.name, "float32", shape, tuple(local))
    for inner, outer, size in piece.boxes:
        for part in tensor.region(inner, size):
            yield part.moved(tuple(p - i + o for p, i, o in zip(part.global_offset, inner, outer, strict=True)))


def buffers_of(chunks: Sequence[Sequence[Parameter]], quantized: bool) -> list[tuple[str, int, list[Parameter]]]:
    """(dtype, model chunk, parameters) of the buffers that a rank makes: one per model chunk and dtype, in order of first appearance."""
    result: list[tuple[str, int, list[Parameter]]] = []
    for number, chunk in enumerate(chunks):
        groups: dict[str, list[Parameter]] = {}
        for parameter in chunk:
            kind = QUANTIZED if quantized and _is_quantized(parameter) else parameter.dtype
            groups.setdefault(kind, []).append(parameter)
        result.extend((kind, number, found) for kind, found in groups.items())
    return result


def _is_quantized(parameter: Parameter) -> bool:
    # FP8 training keeps the matrices of the layers' linear modules in FP8, nothing else (Transformer Engine fp8_model_init)
    return ".layers." in parameter.name and any(m in parameter.name for m in (".linear_", ".mlp.experts.")) and "norm" not in parameter.name


@dataclass(frozen=True, slots=True)
class Matched:
    """A buffer whose layout is known: parameters in registration order and their slots."""

    buffer: Buffer
    parameters: Sequence[Parameter]
    layout: Buckets


def match(rank: RankBuffers, options: BucketOptions) -> list[Matched]:
    """Fit one rank's parameters to its buffers. CkptError E226 saying what does not fit."""
    quantized = any(b.dtype == QUANTIZED for b in rank.buffers)
    expected = buffers_of(rank.chunks, quantized)
    if [b.dtype for b in rank.buffers] != [kind for kind, *_ in expected]:
        raise _misfit(
            rank,
            f"buffers of {[kind for kind, *_ in expected]}, one per model chunk and dtype",
            f"buffers of {[b.dtype for b in rank.buffers]}",
        )
    return [
        _match_buffer(rank, number, buffer, chunk, parameters, options)
        for number, (buffer, (_, chunk, parameters)) in enumerate(zip(rank.buffers, expected, strict=True))
    ]


def _match_buffer(
    rank: RankBuffers, number: int, buffer: Buffer, chunk: int, parameters: Sequence[Parameter], options: BucketOptions
) -> Matched:
    items = [Item(p.numel, p.shared) for p in parameters]
    total = f"{len(items)} parameters of {sum(i.numel for i in items)} elements"
    if buffer.unpadded is not None:
        padded = buffer.padded or buffer.unpadded
        for align in (ALIGN, 1):
            layout = fit(items, buffer.unpadded, padded, align)
            if layout is not None and _begins(buffer, layout):
                return Matched(buffer, parameters, layout)
        text = f"buckets of {list(buffer.unpadded)[:8]} elements"
        if any(fit(items, buffer.unpadded, padded, a) for a in (ALIGN, 1)):
            text += ", cut at other places than between the parameters"
        raise _misfit(rank, f"buffer {number} ({buffer.dtype}) of {total}", text)
    single = rank.place.pp > 0 or chunk > 0  # Megatron divides buffers on the first stage and for the first model chunk only
    divisor = end_divisor(options.dp or rank.dp, options.high_bandwidth)
    for size in (None,) if single else tuple(dict.fromkeys(sizes_to_try(options, rank.dp))):
        for align in (ALIGN, 1):
            layout = recompute(items, size, divisor, align)
            if layout.numel == buffer.numel and _begins(buffer, layout):
                return Matched(buffer, parameters, layout)
    raise _misfit(
        rank,
        f"buffer {number} ({buffer.dtype}) of {total}, with the gaps of bucket sizes {list(sizes_to_try(options, rank.dp))}: "
        f"{recompute(items, None, divisor).numel} elements in one bucket",
        f"{buffer.numel} elements",
    )


def sizes_to_try(options: BucketOptions, dp: int) -> tuple[int | None, ...]:
    """Bucket sizes in the order in which they are tried."""
    return (options.size,) if options.size is not None else (*options.tried, None, default_bucket_size(options.dp or dp))


def _begins(buffer: Buffer, layout: Buckets) -> bool:
    """Whether every parameter begins where a stored piece begins, which Megatron's writers guarantee (a piece never spans two)."""
    for flats in buffer.states.values():
        if buffer.joined:
            continue
        if len(flats) != len(layout.unpadded):
            return False
        starts = [flat.starts() for flat in flats]
        if any(start not in starts[bucket] for bucket, start in layout.slots):
            return False
    return True


def _misfit(rank: RankBuffers, expected: str, found: str) -> CkptError:
    return CkptError(
        "E226",
        "the optimizer's flat buffers do not fit the model's parameters, so they cannot be cut",
        where=rank.name,
        expected=expected,
        found=found,
        hint="give --bucket-size and --dp as the run had them; if the model was changed since, the state cannot be used",
    )


def cut_buffers(
    ranks: Iterable[RankBuffers], options: BucketOptions, model: Mapping[str, TensorMetadata], where: str
) -> dict[str, dict[str, TensorMetadata]]:
    """state -> canonical name -> tensor, from the buffers of all ranks. Errors: E226 what does not fit, E207 what is not covered."""
    cut = Cut()
    for rank in ranks:
        for matched in match(rank, options):
            add_matched(cut, matched)
    return cut.tensors(model, where)


def add_matched(cut: Cut, matched: Matched) -> None:
    """Cut one buffer; copies that another rank holds too are left out."""
    buffer, layout = matched.buffer, matched.layout
    for state, flats in buffer.states.items():
        for index, parameter in enumerate(matched.parameters):
            if parameter.copy:
                continue
            bucket, start = layout.slots[index]
            flat = flats[0] if buffer.joined else flats[bucket]
            begin = layout.compact(index) if buffer.joined else start
            for piece in parameter.pieces:
                cut.add(state, piece, flat, begin)
