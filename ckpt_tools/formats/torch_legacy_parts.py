"""From what each legacy rank stores to whole tensors: local layer and expert numbers become global, parts are put side by side.

Sources: Megatron-LM transformer_block.py, moe/experts.py, checkpointing.py fix_query_key_value_ordering (0.5 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dtypes import dtype
from ..errors import CkptError
from ..layout import cut_of, first_layers, is_expert
from ..model_names import EMBEDDING, GROUPED, HEAD, LAYER, RANK_EXPERT, SEQUENTIAL, TE_GROUPED, bare_name
from ..tensors import Chunk, Extent, Shape, TensorMetadata
from .pickles import TensorRef
from .torch_legacy_ranks import Rank, Sizes, model_chunks


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank stores of a tensor: its global name, dtype, local shape, place in the rank's file."""

    name: str
    dtype: str
    shape: Shape
    extent: Extent
    rank: Rank


@dataclass(frozen=True, slots=True)
class Replica:
    """Two stored copies that must be equal: the tensor as used, as stored elsewhere, and who holds the two."""

    name: str
    used: TensorMetadata
    copy: TensorMetadata
    holders: tuple[str, str]


def layer_offsets(ranks: Sequence[Rank], sizes: Sizes, directory: str) -> dict[tuple[int, int], int]:
    """First global layer of each (pipeline stage, virtual stage): chunks are counted in the order in which activations pass them."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for chunk, tensors in model_chunks(rank.file):
            local = {int(m[1]) for n in tensors if (m := LAYER.match(bare_name(n)))}
            count = len(local)
            if local != set(range(count)) or counts.setdefault((rank.pp, chunk), count) != count:
                raise CkptError(
                    "E224", "the ranks of one pipeline stage hold different layers", where=rank.file.path, found=f"{sorted(local)}"
                )
    total = sum(counts.values())
    if sizes.layers is not None and total != sizes.layers:
        raise CkptError(
            "E224", "the stages do not hold as many layers as the args say", where=directory, expected=f"{sizes.layers}", found=f"{total}"
        )
    return first_layers(counts, sizes.pp)


def rank_parts(rank: Rank, tensors: Mapping[str, Any], first_layer: int, sizes: Sizes) -> Iterator[tuple[Part, str | None]]:
    """The parts in one model chunk of a rank, and for experts the form in which they are stored; helper entries are passed over."""
    for stored, ref in tensors.items():
        name = bare_name(stored)
        if not isinstance(ref, TensorRef) or name.endswith("_extra_state"):
            continue
        layer = LAYER.match(name)
        if layer:
            name = f"decoder.layers.{int(layer[1]) + first_layer}.{name[layer.end() :]}"
        start, strides = rank.file.extent(ref)
        length = sum((n - 1) * s for n, s in zip(ref.shape, strides, strict=True)) + dtype(ref.dtype).itemsize
        whole = Part(name, ref.dtype, ref.shape, Extent(rank.file.path, start, length, strides), rank)
        if is_expert(name):
            yield from _experts(whole, sizes)
        else:
            yield whole, None


def _experts(part: Part, sizes: Sizes) -> Iterator[tuple[Part, str]]:
    """Experts under their global numbers; GroupedMLP's weight1 / weight2 are views (experts, in, out), so each is read transposed."""
    if not sizes.experts or sizes.experts % sizes.ep:
        raise CkptError(
            "E224",
            "the args do not say how many experts there are",
            where=part.rank.file.path,
            found=f"num_experts {sizes.experts}, ep {sizes.ep}",
        )
    local = sizes.experts // sizes.ep
    base = part.rank.ep * local
    match = RANK_EXPERT.match(part.name)
    if match:
        number = int(match["seq"] or match["number"])
        if number >= local:
            raise CkptError(
                "E224", f"{part.name} is one expert too many", where=part.rank.file.path, expected=f"{local} experts on each rank"
            )
        name = f"{match['head']}{match['tail'] or match['grouped']}{base + number}"
        yield replace(part, name=name), SEQUENTIAL if match["seq"] else TE_GROUPED
        return
    head, _, last = part.name.rpartition(".")
    if last in ("weight1", "weight2") and len(part.shape) == 2 and part.shape[last == "weight1"] % local == 0:
        yield from ((p, GROUPED) for p in _grouped(part, head, last, base, local))
        return
    if head.endswith((".linear_fc1", ".linear_fc2")) and last == "weight" and len(part.shape) == 3 and part.shape[0] == local:
        strides = part.extent.strides or ()
        for expert in range(local):
            extent = replace(part.extent, offset=part.extent.offset + expert * strides[0], strides=strides[1:])
            yield replace(part, name=f"{part.name}{base + expert}", shape=part.shape[1:], extent=extent), TE_GROUPED
        return
    raise CkptError(
        "E224", f"{part.name} is no expert weight that ckpt knows", where=part.rank.file.path, found=f"shape {list(part.shape)}"
    )


def _grouped(part: Part, head: str, last: str, base: int, local: int) -> Iterator[Part]:
    item = dtype(part.dtype).itemsize
    if part.extent.strides != (part.shape[1] * item, item):
        raise CkptError("E224", f"{part.name} is not stored row after row", where=part.rank.file.path, found=f"{part.extent.strides}")
    rows, columns = (part.shape[0], part.shape[1] // local) if last == "weight1" else (part.shape[0] // local, part.shape[1])
    size = rows * columns * item
    for expert in range(local):
        extent = Extent(part.extent.path, part.extent.offset + expert * size, size, (item, columns * item))
        yield replace(part, name=f"{head}.linear_fc{last[-1]}.weight{base + expert}", shape=(columns, rows), extent=extent)


def assemble(parts: Mapping[str, list[Part]], sizes: Sizes, directory: str) -> tuple[dict[str, TensorMetadata], list[Replica]]:
    """Whole tensors, and the copies that must be equal to what was taken. E224 when the parts do not make a tensor."""
    tensors: dict[str, TensorMetadata] = {}
    replicas: list[Replica] = []
    for name, found in parts.items():
        if name == HEAD and sizes.tied and EMBEDDING in parts:
            continue  # compared with the embedding below
        tensors[name], copies = _tensor(name, found, sizes, directory)
        replicas.extend(copies)
    if sizes.tied and HEAD in parts and EMBEDDING in tensors:
        copy, more = _tensor(HEAD, parts[HEAD], sizes, directory)
        replicas += [*more, Replica(EMBEDDING, tensors[EMBEDDING], copy, ("the first stage", "output_layer of the last stage"))]
    return tensors, replicas


def _tensor(name: str, found: list[Part], sizes: Sizes, directory: str) -> tuple[TensorMetadata, list[Replica]]:
    expert = is_expert(name)
    count = sizes.etp if expert else sizes.tp
    cut = cut_of(name, sizes.gated)
    by_rank: dict[int, Part] = {}
    replicas = []
    for part in found:
        if (part.dtype, part.shape) != (found[0].dtype, found[0].shape):
            raise CkptError(
                "E224",
                f"{name} has another shape or dtype on some ranks",
                where=part.rank.file.path,
                expected=f"{found[0].dtype} {list(found[0].shape)} as in {found[0].rank.name}",
                found=f"{part.dtype} {list(part.shape)}",
            )
        position = 0 if cut is None else part.rank.etp if expert else part.rank.tp
        other = by_rank.setdefault(position, part)
        if other is not part:
            replicas.append(Replica(name, _whole(other), _whole(part), (other.rank.name, part.rank.name)))
    if cut is not None and len(by_rank) != count:
        raise CkptError(
            "E224", f"{name} is not on every tensor-parallel rank", where=directory, expected=f"{count} ranks", found=f"{sorted(by_rank)}"
        )
    shape = found[0].shape
    if cut is None:
        return _whole(by_rank[0]), replicas
    axis, halves = (0, 2) if cut == "glu" else (int(cut), 1)
    if axis >= len(shape) or shape[axis] % halves:
        raise CkptError("E224", f"{name} cannot be a part of a tensor", where=found[0].rank.file.path, found=f"shape {list(shape)}")
    chunks = [c for position, part in sorted(by_rank.items()) for c in _placed(part, position, count, axis, halves)]
    shape = tuple(n * count if i == axis else n for i, n in enumerate(shape))
    tensor = TensorMetadata(name, found[0].dtype, shape, tuple(chunks))
    if sizes.version < 2 and re.search(r"\.linear_qkv\.(weight|bias)$", name):
        tensor = _old_row_order(tensor, sizes, directory)
    return tensor, replicas


def _whole(part: Part) -> TensorMetadata:
    return TensorMetadata(part.name, part.dtype, part.shape, (Chunk((0,) * len(part.shape), part.shape, part.extent),))


def _placed(part: Part, rank: int, count: int, axis: int, halves: int) -> Iterator[Chunk]:
    """The chunks of a rank's part in the whole tensor: one, or gate and up."""
    step = part.shape[axis] // halves
    shape = tuple(step if i == axis else n for i, n in enumerate(part.shape))
    local = Chunk((0,) * len(part.shape), part.shape, part.extent)

    def at(position: int) -> Shape:
        return tuple(position * step if i == axis else 0 for i in range(len(shape)))

    for half in range(halves):
        piece = local.cut(at(half), shape) if halves > 1 else local
        yield piece.moved(at(half * count + rank))


def _old_row_order(tensor: TensorMetadata, sizes: Sizes, directory: str) -> TensorMetadata:
    """checkpoint_version 0 stores a rank's rows as (3, heads, d), version 1 as (heads, d, 3); both become (heads, 3, d)."""
    if not sizes.heads or tensor.global_shape[0] % (3 * sizes.heads):
        raise CkptError(
            "E224", "checkpoint_version below 2 with grouped queries is not known", where=directory, found=f"version {sizes.version}"
        )
    d = tensor.global_shape[0] // (3 * sizes.heads)
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        if chunk.extent is None or chunk.extent.strides is None:
            continue
        heads = chunk.local_shape[0] // (3 * d)
        row, rest = chunk.extent.strides[0], chunk.extent.strides[1:]
        for head in range(heads):
            for which in range(3):
                first = (which * heads + head) * d if sizes.version < 1 else head * d * 3 + which
                step = row if sizes.version < 1 else 3 * row
                extent = Extent(chunk.extent.path, chunk.extent.offset + first * row, chunk.extent.length - first * row, (step, *rest))
                offset = (chunk.global_offset[0] + (head * 3 + which) * d, *chunk.global_offset[1:])
                chunks.append(Chunk(offset, (d, *chunk.local_shape[1:]), extent))
    return TensorMetadata(tensor.fqn, tensor.dtype, tensor.global_shape, tuple(chunks))
