"""Plan a reshard of tensors in memory: from shapes and dtypes alone, the tensors to allocate and the table of boxes to move. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from ..dtypes import dtype
from ..errors import CkptError
from ..layout import ParallelLayout, cut_of, expert_of, is_expert, layer_of, rank_boxes
from ..model_names import EMBEDDING, HEAD
from ..planning import Move, merge_axes
from ..tensors import Chunk, Extent, Shape, TensorMetadata, contiguous_strides, tiling_error
from .names import FORMS, Held, Rank, Stages, experts_by_mixture, held, layer_count, ranks, renumbered, shown, split_chunk, stages


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor of one rank: name, shape and dtype name. Contiguous."""

    rank: Rank
    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """sources / targets: the arrays that Move.source / Move.target number, in order. copies: pairs of sources that must be equal."""

    sources: tuple[Array, ...]
    targets: tuple[Array, ...]
    moves: tuple[Move, ...]
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Options:
    """gated: fc1 is [gate; up]. tied: output_layer.weight is a copy of the embedding, held at the end of the pipeline.
    local_names: shards are keyed as the rank's own module names them (layers and experts from 0; chunks "model0." ... when a stage has
    several), else globally. expert_form: of the result, one of memory.names.FORMS (None = as the source has it). wanted: target ranks to
    make (None = all)."""

    gated: bool = True
    tied: bool = False
    local_names: bool = False
    expert_form: str | None = None
    wanted: frozenset[Rank] | None = None


@dataclass(slots=True)
class _Sources:
    """Growing index of the source tensors in canonical coordinates."""

    arrays: list[Array] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    pieces: dict[str, dict[tuple[Shape, Shape], Chunk]] = field(default_factory=dict)
    shapes: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    form: str | None = None


def plan_reshard(arrays: Iterable[Array], source: ParallelLayout, target: ParallelLayout, options: Options) -> MemoryPlan:
    """The plan that turns the shards of `source` into those of `target`.

    Errors: E404 a rank or a piece of a tensor is missing, E307 shards of one tensor disagree, E401-E403 the target cannot be cut so,
    E305 a name or form that the target cannot have.
    """
    if options.expert_form not in (None, *FORMS):
        raise CkptError("E305", f"there is no form of experts called {options.expert_form!r}", expected=", ".join(FORMS))
    shards: dict[Rank, list[Array]] = {rank: [] for rank in ranks(source)}
    for array in arrays:
        if array.rank not in shards:
            raise CkptError(
                "E404",
                f"a shard is keyed {array.rank}, which the source layout does not have",
                expected=f"one of {len(shards)} ranks such as {next(iter(shards))}",
            )
        if not array.name.endswith("_extra_state"):
            shards[array.rank].append(array)
    absent = [rank for rank, found in shards.items() if not found]
    if absent:
        raise CkptError(
            "E404", "the source lacks shards", expected=f"{len(shards)} ranks", found=f"nothing for {', '.join(map(str, absent[:4]))}"
        )
    layers = layer_count({rank: [a.name for a in found] for rank, found in shards.items()}, options.local_names)
    index = _index(shards, source, stages(source, layers), options)
    tensors = {name: _tensor(index, name) for name in index.shapes}
    return _targets(tensors, index, target, stages(target, layers), options)


def _index(shards: Mapping[Rank, list[Array]], layout: ParallelLayout, placed: Stages, options: Options) -> _Sources:
    index = _Sources()
    for rank, arrays in shards.items():
        experts = _local_experts(arrays, layout)
        for array in arrays:
            number = len(index.arrays)
            index.arrays.append(array)
            item = held(array.name)
            index.form = index.form or item.form
            offset = rank.ep * experts.get(item.mixture, 0) if options.local_names or item.form == "grouped" else 0
            for part in _parts(item, array, experts.get(item.mixture, 0)):
                expert = None if part.expert is None else offset + part.expert
                _add(index, number, _global(part.name, expert, rank, placed, options), rank, layout, part, options)
    return index


@dataclass(frozen=True, slots=True)
class _Part:
    """A whole tensor inside a source array: its name, expert number, shape, and where its elements lie (bytes)."""

    name: str
    expert: int | None
    shape: Shape
    offset: int
    strides: Shape


def _local_experts(arrays: Iterable[Array], layout: ParallelLayout) -> dict[str, int]:
    """Mixture -> experts in this rank."""
    counts: dict[str, int] = {}
    names = {a.name: a for a in arrays}
    for name in names:
        item = held(name)
        if item.expert is not None:
            counts[item.mixture] = max(counts.get(item.mixture, 0), item.expert + 1)
        elif item.form == "grouped":
            router = names.get(item.mixture + "router.weight")
            if router is None or not router.shape or router.shape[0] % layout.ep:
                raise CkptError(
                    "E404",
                    "grouped experts come without their router, whose rows tell how many there are",
                    where=name,
                    expected=f"a multiple of ep {layout.ep} rows",
                    found=str(router and list(router.shape)),
                )
            counts[item.mixture] = router.shape[0] // layout.ep
    return counts


def _parts(item: Held, array: Array, experts: int) -> Iterator[_Part]:
    """The array itself, or the experts inside GroupedMLP's weight1 / weight2, which are used as (experts, in, out) whatever their shape."""
    size = dtype(array.dtype).itemsize
    if item.form != "grouped":
        yield _Part(item.name, item.expert, array.shape, 0, contiguous_strides(array.shape, size))
        return
    axis = 1 if ".linear_fc1." in item.name else 0
    if len(array.shape) != 2 or array.shape[axis] % experts:
        raise CkptError(
            "E307",
            "grouped experts have not the shape that their router promises",
            where=array.name,
            expected=f"a multiple of {experts} along axis {axis}",
            found=str(list(array.shape)),
        )
    inputs, outputs = (n // experts if a == axis else n for a, n in enumerate(array.shape))
    for expert in range(experts):
        yield _Part(item.name, expert, (outputs, inputs), expert * inputs * outputs * size, (size, outputs * size))


def _global(name: str, expert: int | None, rank: Rank, placed: Stages, options: Options) -> str:
    """The canonical name of what this rank calls `name`."""
    chunk, name = split_chunk(name) if options.local_names else (0, name)
    layer = layer_of(name)
    if options.local_names and layer is not None:
        found = placed.chunks[rank.pp]
        if chunk >= len(found) or layer >= len(found[chunk]):
            raise CkptError(
                "E404",
                "a shard has a layer that its stage does not hold",
                where=name,
                expected=f"stage {rank.pp} with layers {found}",
                found=f"chunk {chunk}, layer {layer} of it",
            )
        name = renumbered(name, layer=found[chunk][layer])
    name = renumbered(name, expert=expert)
    return EMBEDDING if options.tied and name == HEAD else name


def _add(index: _Sources, number: int, name: str, rank: Rank, layout: ParallelLayout, part: _Part, options: Options) -> None:
    """Enter a part into the index at the boxes that its rank holds."""
    tp, size = (rank.etp, layout.expert_tp) if is_expert(name) else (rank.tp, layout.tp)
    cut = cut_of(name, options.gated)
    shape = part.shape
    if cut is not None and shape:
        axis = 0 if cut == "glu" else int(cut)
        if axis >= len(shape):
            raise CkptError("E307", f"{name} has too few axes", where=name, found=str(list(shape)))
        shape = (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])
    known = index.shapes.setdefault(name, (shape, index.arrays[number].dtype))
    if known != (shape, index.arrays[number].dtype):
        raise CkptError(
            "E307",
            f"the shards of {name} do not fit together",
            where=f"{rank}: {name}",
            expected=f"{known[1]} {list(known[0])}",
            found=f"{index.arrays[number].dtype} {list(shape)}",
        )
    pieces, at = index.pieces.setdefault(name, {}), part.offset
    for offset, box in _own_boxes(name, shape, tp, size, options.gated):
        length = sum((n - 1) * s for n, s in zip(box, part.strides, strict=True)) + dtype(known[1]).itemsize if prod(box) else 0
        chunk = Chunk(offset, box, Extent(str(number), at, length, part.strides))
        first = pieces.setdefault((offset, box), chunk)
        if first is not chunk and first.extent is not None and (int(first.extent.path), number) not in index.copies[-1:]:
            index.copies.append((int(first.extent.path), number))
        at += box[0] * part.strides[0] if box else 0  # the gate and up halves follow each other along axis 0


def _own_boxes(name: str, shape: Shape, tp: int, size: int, gated: bool) -> list[tuple[Shape, Shape]]:
    """(offset, shape) of the boxes of tensor-parallel rank `tp` of `size`; a tensor that is not cut is held whole by every rank."""
    boxes = rank_boxes(name, shape, size, gated)
    return [(offset, box) for rank, offset, box in boxes if rank == tp or cut_of(name, gated) is None]


def _tensor(index: _Sources, name: str) -> TensorMetadata:
    shape, kind = index.shapes[name]
    chunks = tuple(index.pieces[name].values())
    error = tiling_error(shape, ((c.global_offset, c.local_shape) for c in chunks))
    if error:
        raise CkptError(
            "E404", f"the shards do not make up {name}: {error}", where=name, expected=f"pieces that cover {list(shape)} exactly once"
        )
    return TensorMetadata(name, kind, shape, chunks)


def _targets(
    tensors: Mapping[str, TensorMetadata], index: _Sources, layout: ParallelLayout, placed: Stages, options: Options
) -> MemoryPlan:
    everyone = ranks(layout)
    unknown = (options.wanted or frozenset()) - set(everyone)
    if unknown:
        raise CkptError("E404", f"the target layout has no {min(unknown)}", expected=f"one of {len(everyone)} ranks such as {everyone[-1]}")
    chosen = [r for r in everyone if options.wanted is None or r in options.wanted]
    experts = experts_by_mixture(tensors)
    for mixture, count in experts.items():
        if count % layout.ep:
            raise CkptError("E401", f"{count} experts cannot be spread evenly over ep {layout.ep}", where=mixture)
    form = options.expert_form or index.form or "numbered"
    slots: dict[tuple[Rank, str], int] = {}
    arrays: list[Array] = []
    moves: list[Move] = []
    for tensor in tensors.values():
        local = experts.get(held(tensor.fqn).mixture, layout.ep) // layout.ep
        number = expert_of(tensor.fqn)
        size = layout.expert_tp if is_expert(tensor.fqn) else layout.tp
        boxes = [_own_boxes(tensor.fqn, tensor.global_shape, tp, size, options.gated) for tp in range(size)]
        for stage, chunk, name in _stages_of(tensor.fqn, placed, tensors, options):
            for rank in chosen:
                if rank.pp != stage or (number is not None and number // local != rank.ep):
                    continue
                own = boxes[rank.etp if is_expert(tensor.fqn) else rank.tp]
                place = _place(name, number, own, dtype(tensor.dtype).itemsize, form, local, options)
                key = (rank, f"model{chunk}.{place.name}" if options.local_names and len(placed.chunks[stage]) > 1 else place.name)
                if key not in slots:
                    slots[key] = len(arrays)
                    arrays.append(Array(*key, place.shape, tensor.dtype))
                at = place.offset
                for origin, box in own:
                    moves.extend(_moves(tensor, origin, box, slots[key], at, place.strides))
                    at += box[0] * place.strides[0] if box else 0
    return MemoryPlan(tuple(index.arrays), tuple(arrays), tuple(moves), tuple(index.copies))


def _place(name: str, number: int | None, boxes: list[tuple[Shape, Shape]], item: int, form: str, local: int, options: Options) -> _Part:
    """Where a rank keeps its boxes of a tensor: name, shape of the whole target array, offset and strides of the part in it."""
    shape = boxes[0][1] if len(boxes) == 1 else (sum(b[0] for _, b in boxes), *boxes[0][1][1:])
    if number is None:
        return _Part(name, None, shape, 0, contiguous_strides(shape, item))
    slot = number % local
    name = shown(name, form, slot if options.local_names else number)
    if form != "grouped":
        return _Part(name, slot, shape, 0, contiguous_strides(shape, item))
    outputs, inputs = shape
    whole = (inputs, outputs * local) if name.endswith("weight1") else (inputs * local, outputs)
    return _Part(name, slot, whole, slot * outputs * inputs * item, (item, outputs * item))


def _stages_of(name: str, placed: Stages, tensors: Mapping[str, TensorMetadata], options: Options) -> Iterator[tuple[int, int, str]]:
    """(stage, chunk, name there) of every stage that holds a tensor: one, or two for an embedding that the last stage needs as well."""
    layer = layer_of(name)
    if layer is not None:
        stage, chunk, local = placed.place(layer)
        yield stage, chunk, renumbered(name, layer=local) if options.local_names else name
        return
    if not name.startswith("embedding."):
        yield *placed.last, name
        return
    yield 0, 0, name
    if placed.last != (0, 0) and name == EMBEDDING:
        if any(n.startswith("mtp.") for n in tensors):
            yield *placed.last, name
        if options.tied:
            yield *placed.last, HEAD


def _moves(tensor: TensorMetadata, origin: Shape, box: Shape, target: int, offset: int, strides: Shape) -> Iterator[Move]:
    """Moves that fill one box of a target array whose element `origin` lies at byte `offset`."""
    item = dtype(tensor.dtype).itemsize
    for part in tensor.region(origin, box):
        if part.extent is None or part.extent.strides is None:
            continue
        at = offset + sum((a - b) * s for a, b, s in zip(part.global_offset, origin, strides, strict=True))
        shape, from_strides, to_strides = merge_axes(part.local_shape, part.extent.strides, strides, item, item)
        yield Move(int(part.extent.path), part.extent.offset, target, at, shape, from_strides, to_strides, tensor.dtype, tensor.dtype)
