"""Four-bit HF weights (MXFP4) as tensors that are dequantised while they are read.

A weight `x` lies as `x_blocks` uint8 [..., out, groups, 16], two elements to a byte, the low half first, and `x_scales` uint8
[..., out, groups], the exponent of a power of two for every 32 elements along `in`. Files of full precision hold `x` as [..., in, out], and
so does what is made here. Source: transformers 5.24 integrations/mxfp4.py (convert_moe_packed_tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import CkptError
from .strided import Read, load_block
from .tensors import Chunk, Decode, TensorMetadata

if TYPE_CHECKING:
    import numpy as np

    from .planning import Scale
    from .tensors import Shape

BLOCKS, SCALES = "_blocks", "_scales"
GROUP, BYTES = 32, 16  # elements that share a scale, and the bytes they take up


def unpacked(tensors: Mapping[str, TensorMetadata], meant: str, where: str) -> tuple[dict[str, TensorMetadata], list[str]]:
    """The tensors with blocks and scales replaced by what they stand for, as dtype `meant`, and the names of those that were.

    CkptError E307 when blocks and scales do not fit together, or one is without the other.
    """
    result, done = {}, []
    for name, tensor in tensors.items():
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if stem == name:
            result[name] = tensor
            continue
        blocks, scales = tensors.get(stem + BLOCKS), tensors.get(stem + SCALES)
        if blocks is None or scales is None:
            raise CkptError(
                "E307",
                "blocks and scales of a weight are stored together",
                where=f"{where}: {name}",
                expected=f"{stem}{BLOCKS} and {stem}{SCALES}",
                found="one of them",
            )
        if name.endswith(BLOCKS):
            result[stem] = _unpacked(stem, blocks, scales, meant, where)
            done.append(stem)
    return result, done


def _unpacked(name: str, blocks: TensorMetadata, scales: TensorMetadata, meant: str, where: str) -> TensorMetadata:
    shape = blocks.global_shape
    if (
        len(shape) < 3
        or shape[-1] != BYTES
        or scales.global_shape != shape[:-1]
        or (blocks.dtype, scales.dtype) != ("uint8", "uint8")
        or len(blocks.chunks) != 1
        or len(scales.chunks) != 1
    ):
        raise CkptError(
            "E307",
            f"the scales of {name} do not fit its blocks",
            where=f"{where}: {name}{SCALES}",
            expected=f"uint8 [..., out, groups, {BYTES}] and uint8 [..., out, groups]",
            found=f"{blocks.dtype} {list(shape)} and {scales.dtype} {list(scales.global_shape)}",
        )
    wide = (*shape[:-2], shape[-2] * GROUP)
    extent = blocks.chunks[0].extent
    if extent is not None and extent.strides is not None:  # half a byte has no stride: where a box begins is in Decode.origin
        extent = replace(extent, strides=(*extent.strides[:-2], 0))
    rank, start = len(wide), (0,) * len(wide)
    decode = Decode("packed", "uint8", scales=scales.chunks, scale_dtype="uint8", block=(*(1,) * (rank - 1), GROUP), origin=start)
    axes = (*range(rank - 2), rank - 1, rank - 2)
    return TensorMetadata(name, meant, tuple(wide[a] for a in axes), (Chunk(start, wide, extent, decode).moved(start, axes),))


def load_packed(read: Read, offset: int, shape: Shape, strides: Shape, scale: Scale, read_scales: Read) -> np.ndarray:
    """float32 values of a box at scale.origin of a packed tensor; offset and strides are those of its bytes, 0 along the packed axis."""
    import numpy as np

    from .kernels.numpy_backend import dequantise_mxfp4

    packed = scale.block.index(GROUP)
    others = [a for a in range(len(shape)) if a != packed]
    start, stop = scale.origin[packed], scale.origin[packed] + shape[packed]
    first, last = start // GROUP, -(-stop // GROUP)
    sizes, steps = tuple(shape[a] for a in others), tuple(strides[a] for a in others)
    blocks = load_block(read, offset + first * BYTES, (*sizes, (last - first) * BYTES), (*steps, 1), "uint8")
    at = scale.offset + first * scale.strides[packed] + sum(scale.origin[a] * scale.strides[a] for a in others)
    exponents = load_block(read_scales, at, (*sizes, last - first), (*(scale.strides[a] for a in others), scale.strides[packed]), "uint8")
    values = dequantise_mxfp4(blocks.reshape(*sizes, last - first, BYTES), exponents, "float32")
    return np.moveaxis(values[..., start - first * GROUP : stop - first * GROUP], -1, packed)
