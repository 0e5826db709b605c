"""Two tensors read side by side in bounded boxes of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ..dtypes import dtype
from ..errors import CkptError
from ..lazy import read_box
from ..tensors import Shape, TensorMetadata

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 2**20  # of the wider side; some ten times that is held per worker while differences are measured


def boxes(shape: Shape, itemsize: int, limit: int = BLOCK_BYTES) -> Iterator[tuple[Shape, Shape]]:
    """Boxes (offset, shape) in row-major order that cover a tensor, each a run of elements of at most `limit` bytes."""
    if not prod(shape):
        return
    axis, inner = len(shape), itemsize
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    axis -= 1  # the axis that is cut; those before it are walked one by one
    step = max(1, limit // inner)
    outer = shape[:axis]
    for number in range(prod(outer)):
        index, rest = [], number
        for size in reversed(outer):
            index.append(rest % size)
            rest //= size
        lead = tuple(reversed(index))
        for start in range(0, shape[axis], step):
            tail = (0,) * (len(shape) - axis - 1)
            yield (*lead, start, *tail), (*(1,) * axis, min(step, shape[axis] - start), *shape[axis + 1 :])


def width(*tensors: TensorMetadata) -> int:
    """Bytes of an element of the widest of them. E206 for dtypes that numpy cannot hold."""
    return max(dtype(t.dtype).itemsize for t in tensors)


def bits(array: np.ndarray) -> np.ndarray:
    """The elements of a contiguous array as unsigned integers (16-byte ones as pairs), of shape (n,) or (n, 2)."""
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.itemsize == 16:
        return flat.view(np.uint64).reshape(-1, 2)
    return flat.view(f"u{flat.itemsize}")


def first_unequal(a: TensorMetadata, b: TensorMetadata, on_bytes: object = None) -> tuple[Shape, Shape] | None:
    """The first box in which the stored bits of two tensors of the same shape and dtype differ; None when all are equal."""
    import numpy as np

    if a.global_shape != b.global_shape or a.dtype != b.dtype:
        raise CkptError("E490", "tensors of different shape or dtype were compared by their bits", where=f"{a.fqn}, {b.fqn}")
    for offset, shape in boxes(a.global_shape, width(a)):
        if not np.array_equal(bits(read_box(a, offset, shape)), bits(read_box(b, offset, shape))):
            return offset, shape
        if callable(on_bytes):
            on_bytes(prod(shape) * width(a))
    return None


def same_bits(a: TensorMetadata, b: TensorMetadata) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if a.global_shape != b.global_shape or a.dtype != b.dtype:
        return False
    return samples_agree(a, b) and first_unequal(a, b) is None


def first_difference(a: TensorMetadata, b: TensorMetadata) -> tuple[Shape, str, str] | None:
    """(index, A's value, B's value) of the first element whose bits differ; None when all are equal."""
    import numpy as np

    box = first_unequal(a, b)
    if box is None:
        return None
    x, y = (read_box(t, *box).reshape(-1) for t in (a, b))
    unequal = bits(x) != bits(y)
    at = int(np.argmax(unequal if unequal.ndim == 1 else unequal.any(axis=1)))
    index = []
    rest = at
    for size in reversed(box[1]):
        index.append(rest % size)
        rest //= size
    return tuple(o + i for o, i in zip(box[0], reversed(index), strict=True)), str(x[at]), str(y[at])


def samples_agree(a: TensorMetadata, b: TensorMetadata) -> bool:
    """Whether three single rows agree: most wrong guesses end here, without a tensor being read."""
    import numpy as np

    if not a.global_shape or not a.numel:
        return True
    rows = a.global_shape[0]
    for row in sorted({0, rows // 2, rows - 1}):
        for offset, shape in boxes((1, *a.global_shape[1:]), width(a)):
            at = (row, *offset[1:])
            if not np.array_equal(bits(read_box(a, at, shape)), bits(read_box(b, at, shape))):
                return False
            break
    return True
