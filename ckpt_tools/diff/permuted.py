"""Whether a tensor holds the same shards, rows or columns as another in another order: told by hashes, in memory of one number a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import read_box
from ..tensors import Shape, TensorMetadata
from .reading import bits, boxes, same_bits, width
from .rearranged import parts_along

if TYPE_CHECKING:
    import numpy as np

PARTS = (2, 3, 4, 6, 8, 12, 16, 32, 64)  # numbers of tensor-parallel ranks that are tried, and their doubles (gate and up)
CORNER = 64  # elements of a part that tell it from the others
MULTIPLIER, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # of splitmix64


def shards_permuted(a: TensorMetadata, b: TensorMetadata) -> tuple[int, tuple[int, ...]] | None:
    """(axis, order) when B is A cut into equal parts and put together in another order; the fewest parts count."""
    shape = a.global_shape
    if len(shape) not in (1, 2) or shape != b.global_shape or a.dtype != b.dtype:
        return None
    for count in PARTS:
        for axis in range(len(shape)):
            if shape[axis] % count or shape[axis] // count < 2:
                continue
            mine, other = _corners(a, axis, count), _corners(b, axis, count)
            if mine == other or len(set(mine)) < count or set(mine) != set(other):
                continue
            order = tuple(mine.index(c) for c in other)
            if same_bits(parts_along(a, axis, order), b):
                return axis, order
    return None


def _corners(tensor: TensorMetadata, axis: int, count: int) -> list[bytes]:
    step = tensor.global_shape[axis] // count
    if len(tensor.global_shape) == 1:
        shape: Shape = (min(step, CORNER),)
    else:
        shape = (1, min(tensor.global_shape[1], CORNER)) if axis == 0 else (min(tensor.global_shape[0], 8), min(step, CORNER))
    corners = []
    for part in range(count):
        offset = [0] * len(shape)
        offset[axis] = part * step
        corners.append(bits(read_box(tensor, tuple(offset), shape)).tobytes())
    return corners


def rows_permuted(a: TensorMetadata, b: TensorMetadata, axis: int) -> list[int] | None:
    """Positions along `axis` at which B holds another row (or column) of A, when B holds all of them; None when it does not."""
    import numpy as np

    shape = a.global_shape
    if axis >= len(shape) or len(shape) > 2 or shape != b.global_shape or a.dtype != b.dtype or shape[axis] < 2:
        return None
    mine, other = _hashes(a, axis), _hashes(b, axis)
    if not np.array_equal(np.sort(mine), np.sort(other)):
        return None
    return [int(i) for i in np.flatnonzero(mine != other)]


def _hashes(tensor: TensorMetadata, axis: int) -> np.ndarray:
    """One 64-bit number per row (axis 0) or column (axis 1): a sum over its elements, each mixed with its place."""
    import numpy as np

    result = np.zeros(tensor.global_shape[axis], np.uint64)
    for offset, shape in boxes(tensor.global_shape, width(tensor)):
        block = bits(read_box(tensor, offset, shape))
        flat = block[:, 0] ^ block[:, 1] if block.ndim == 2 else block
        mixed = flat.astype(np.uint64).reshape(shape)
        at = _places(offset, shape, 1 - axis)
        mixed = (mixed + np.uint64(1)) * at
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(MIX)
        sums = mixed.sum(axis=1 - axis, dtype=np.uint64) if mixed.ndim == 2 else mixed
        result[offset[axis] : offset[axis] + shape[axis]] += sums
    return result


def _places(offset: Shape, shape: Shape, axis: int) -> np.ndarray:
    import numpy as np

    if len(shape) == 1:
        return np.array([MULTIPLIER], np.uint64)
    numbers = np.arange(offset[axis] + 1, offset[axis] + shape[axis] + 1, dtype=np.uint64) * np.uint64(MULTIPLIER) | np.uint64(1)
    return np.asarray(numbers.reshape((-1, 1) if axis == 0 else (1, -1)))
