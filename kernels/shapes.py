"""What the kernels demand of the shapes and dtypes of their operands, checked once for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from ..errors import CkptError
from ..tensors import Shape


def check_matrix(shape: Sequence[int], block: Sequence[int]) -> None:
    """CkptError E302 unless `shape` has at least two axes and `block` two positive sizes."""
    if len(shape) < 2 or len(block) != 2 or min(block) < 1:
        raise CkptError(
            "E302",
            "blocks need a matrix",
            expected="shape [..., rows, columns] and two positive block sizes",
            found=f"{list(shape)}, block {list(block)}",
        )


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> Shape:
    """Shape of the scales of a tensor [..., R, C]: [..., ceil(R / block[0]), ceil(C / block[1])]."""
    return (*shape[:-2], ceil(shape[-2] / block[0]), ceil(shape[-1] / block[1]))


def check_blocks(shape: Sequence[int], scales: Sequence[int], block: Sequence[int]) -> None:
    """CkptError E302 unless there is one scale per block."""
    check_matrix(shape, block)
    if tuple(scales) != scale_shape(shape, block):
        raise CkptError(
            "E302",
            "the scales do not fit the blocks of the weight",
            expected=f"{list(scale_shape(shape, block))} for {list(shape)} in blocks of {list(block)}",
            found=str(list(scales)),
        )


def mxfp4_shape(blocks: Sequence[int]) -> Shape:
    """Shape of the values in MXFP4 blocks [..., B, 16]: [..., 32 * B]."""
    return (*blocks[:-2], blocks[-2] * 32)


def check_mxfp4(blocks: Sequence[int], scales: Sequence[int], blocks_dtype: str, scales_dtype: str) -> None:
    """CkptError E302 unless the blocks are uint8 [..., B, 16] and the scales uint8 [..., B]."""
    if len(blocks) < 2 or blocks[-1] != 16 or tuple(scales) != tuple(blocks[:-1]) or blocks_dtype != "uint8" or scales_dtype != "uint8":
        raise CkptError(
            "E302",
            "these are not MXFP4 blocks and scales",
            expected="uint8 [..., B, 16] and uint8 [..., B]",
            found=f"{blocks_dtype} {list(blocks)} and {scales_dtype} {list(scales)}",
        )


def need_contiguous(contiguous: bool) -> None:
    """CkptError E490 when an array that is to be moved has holes or turned axes."""
    if not contiguous:
        raise CkptError("E490", "only contiguous arrays can be moved", hint="pass a contiguous copy; the table carries the strides")


def batches(shape: Sequence[int]) -> int:
    """Matrices in a tensor [..., R, C]."""
    return prod(shape[:-2])
