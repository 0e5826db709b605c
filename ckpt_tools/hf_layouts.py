"""The HF layouts of one model: fused experts, or names as another release spells them, read as the family's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from .errors import CkptError
from .families.family import Family, Fused
from .tensors import Chunk, TensorMetadata


def family_names(tensors: Mapping[str, TensorMetadata], family: Family, where: str) -> dict[str, TensorMetadata]:
    """HF tensors under the names that the family's mappings use; the chunks point to the same bytes.

    E305 when a fused tensor has not the axes it should have or its rows do not divide.
    """
    fused = [(re.compile(re.escape(f.hf).replace(r"\{l\}", r"(\d+)") + "$"), f) for f in family.fused]
    renamed = [(re.compile(p + "$"), r) for p, r in family.renamed]
    result: dict[str, TensorMetadata] = {}
    for name, tensor in tensors.items():
        for pattern, spec in fused:
            match = pattern.match(name)
            if match:
                result.update(_experts(tensor, spec, match[1], where))
                break
        else:
            new = name
            for pattern, replacement in renamed:
                new = pattern.sub(replacement, new)
            result[new] = tensor if new == name else replace(tensor, fqn=new)
    return result


def _experts(tensor: TensorMetadata, spec: Fused, layer: str, where: str) -> Iterator[tuple[str, TensorMetadata]]:
    shape, count = tensor.shape, len(spec.parts)
    axis = 2 if spec.transposed and len(shape) == 3 else 1  # the rows
    if len(shape) not in (2, 3) or shape[axis] % count:
        raise CkptError(
            "E305",
            f"{tensor.fqn} should hold all experts of a layer",
            where=f"{where}: {tensor.fqn}",
            found=f"shape {list(shape)}",
        )
    if spec.alternating and not tensor.folded:
        tensor = tensor.unfolded(axis, count)
    prefix = spec.hf[: spec.hf.index("{l}")] + layer + "."
    rows, sizes = shape[axis] // count, tensor.global_shape
    axes = (axis, *(a for a in range(1, len(shape)) if a != axis))
    if spec.alternating and axis == 1:
        axes = (1, *(a + 1 for a in axes[1:]))  # after the axis of the parts
    for expert in range(shape[0]):
        for number, part in enumerate(spec.parts):
            offset, box = [0] * len(sizes), list(sizes)
            offset[0], box[0] = expert, 1
            if spec.alternating:
                offset[axis + 1], box[axis + 1] = number, 1
            else:
                offset[axis], box[axis] = number * rows, rows
            chunks: list[Chunk] = []
            for piece in tensor.region(tuple(offset), tuple(box)):
                place = tuple(piece.global_offset[a] - offset[a] for a in axes)
                chunks.append(piece.moved(place, axes))
            name = prefix + part.replace("{e}", str(expert))
            yield name, TensorMetadata(name, tensor.dtype, tuple(box[a] for a in axes), tuple(chunks))


def fuse(tensors: Mapping[str, TensorMetadata], family: Family, *, only: bool = False) -> dict[str, TensorMetadata]:
    """The tensors with the experts of each layer in one, as transformers 5 holds them, where the first of them stood; the chunks point to
    the same bytes. only: just those that the family's files never hold apart.

    E307 when experts of a layer differ in dtype or shape, or some are not there.
    """
    made: dict[str, TensorMetadata] = {}
    whole_of: dict[str, str] = {}
    for spec in family.fused:
        if only and not spec.only:
            continue
        head, _, _ = spec.hf.partition("{l}")
        found: dict[str, dict[int, dict[int, TensorMetadata]]] = {}
        for number, part in enumerate(spec.parts):
            pattern = re.compile(re.escape(head) + r"(\d+)\." + re.escape(part).replace(r"\{e\}", r"(\d+)"))
            for name, tensor in tensors.items():
                if match := pattern.fullmatch(name):
                    found.setdefault(match[1], {}).setdefault(int(match[2]), {})[number] = tensor
        for layer, experts in found.items():
            whole = _together(spec, spec.hf.replace("{l}", layer), experts)
            made[whole.fqn] = whole
            whole_of |= {tensor.fqn: whole.fqn for parts in experts.values() for tensor in parts.values()}
    names = dict.fromkeys(whole_of.get(name, name) for name in tensors)
    return {name: made[name] if name in made else tensors[name] for name in names}


def _together(spec: Fused, name: str, experts: Mapping[int, Mapping[int, TensorMetadata]]) -> TensorMetadata:
    kinds = {(t.dtype, t.global_shape) for parts in experts.values() for t in parts.values()}
    if len(kinds) > 1 or sorted(experts) != list(range(len(experts))) or any(len(p) != len(spec.parts) for p in experts.values()):
        raise CkptError("E307", f"the experts that make up {name} do not fit together", where=name, found=f"{sorted(map(str, kinds))[:2]}")
    kind, shape = kinds.pop()
    count, rows = len(spec.parts), shape[0]
    turned = spec.transposed and len(shape) == 2
    chunks: list[Chunk] = []
    for expert, parts in experts.items():
        for number, tensor in parts.items():
            for chunk in tensor.chunks:
                # axes of the parts, -1 for the experts and for the parts themselves
                first = [(0, chunk.global_offset[0] + (0 if spec.alternating else number * rows))]
                first += [(-1, number)] if spec.alternating else []
                rest = [(a, chunk.global_offset[a]) for a in range(1, len(shape))]
                order = [(-1, expert), *(rest + first if turned else first + rest)]
                chunks.append(chunk.moved(tuple(o for _, o in order), tuple(a for a, _ in order)))
    inner = (rows, count) if spec.alternating else (rows * count,)
    sizes, joined = ((*shape[1:], *inner), (*shape[1:], rows * count)) if turned else ((*inner, *shape[1:]), (rows * count, *shape[1:]))
    folded = (len(experts), *joined) if spec.alternating else ()
    return TensorMetadata(name, kind, (len(experts), *sizes), tuple(chunks), folded)
