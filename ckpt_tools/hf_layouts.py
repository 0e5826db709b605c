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

    E305 when a fused tensor has not three axes or its rows do not divide.
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
    if len(tensor.global_shape) != 3 or tensor.global_shape[2 if spec.transposed else 1] % len(spec.parts):
        raise CkptError(
            "E305",
            f"{tensor.fqn} should hold all experts of a layer",
            where=f"{where}: {tensor.fqn}",
            found=f"shape {list(tensor.global_shape)}",
        )
    prefix = spec.hf[: spec.hf.index("{l}")] + layer + "."
    count, first, second = tensor.global_shape
    rows, columns = (second, first) if spec.transposed else (first, second)
    rows //= len(spec.parts)
    for expert in range(count):
        for number, part in enumerate(spec.parts):
            start = number * rows
            box = ((expert, 0, start), (1, columns, rows)) if spec.transposed else ((expert, start, 0), (1, rows, columns))
            axes = (2, 1) if spec.transposed else (1, 2)
            chunks: list[Chunk] = []
            for piece in tensor.region(*box):
                offset = [piece.global_offset[a] for a in axes]
                offset[0] -= start
                chunks.append(piece.moved(tuple(offset), axes))
            name = prefix + part.replace("{e}", str(expert))
            yield name, TensorMetadata(name, tensor.dtype, (rows, columns), tuple(chunks))


def fuse(tensors: Mapping[str, TensorMetadata], family: Family) -> dict[str, TensorMetadata]:
    """The tensors with the experts of each layer in one, as transformers 5 holds them; the chunks point to the same bytes.

    E307 when experts of a layer differ in dtype or shape, or some are not there.
    """
    result = dict(tensors)
    for spec in family.fused:
        head, _, _ = spec.hf.partition("{l}")
        found: dict[str, dict[int, dict[int, TensorMetadata]]] = {}
        for number, part in enumerate(spec.parts):
            pattern = re.compile(re.escape(head) + r"(\d+)\." + re.escape(part).replace(r"\{e\}", r"(\d+)"))
            for name, tensor in tensors.items():
                if match := pattern.fullmatch(name):
                    found.setdefault(match[1], {}).setdefault(int(match[2]), {})[number] = tensor
        for layer, experts in found.items():
            whole = _together(spec, spec.hf.replace("{l}", layer), experts)
            for parts in experts.values():
                for tensor in parts.values():
                    result.pop(tensor.fqn, None)
            result[whole.fqn] = whole
    return result


def _together(spec: Fused, name: str, experts: Mapping[int, Mapping[int, TensorMetadata]]) -> TensorMetadata:
    kinds = {(t.dtype, t.global_shape) for parts in experts.values() for t in parts.values()}
    if len(kinds) > 1 or sorted(experts) != list(range(len(experts))) or any(len(p) != len(spec.parts) for p in experts.values()):
        raise CkptError("E307", f"the experts that make up {name} do not fit together", where=name, found=f"{sorted(map(str, kinds))[:2]}")
    kind, (rows, columns) = kinds.pop()
    chunks: list[Chunk] = []
    for expert, parts in experts.items():
        for number, tensor in parts.items():
            for chunk in tensor.chunks:
                row, column = chunk.global_offset[0] + number * rows, chunk.global_offset[1]
                place, axes = ((expert, column, row), (-1, 1, 0)) if spec.transposed else ((expert, row, column), (-1, 0, 1))
                chunks.append(chunk.moved(place, axes))
    inner = (columns, rows * len(spec.parts)) if spec.transposed else (rows * len(spec.parts), columns)
    return TensorMetadata(name, kind, (len(experts), *inner), tuple(chunks))
