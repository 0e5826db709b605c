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
