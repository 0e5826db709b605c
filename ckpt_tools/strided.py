"""Reading a strided block of a file into an array."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from .dtypes import dtype
from .tensors import Shape

if TYPE_CHECKING:
    import numpy as np

Read = Callable[[int, memoryview], None]  # read(position, view) fills a view from a file
LARGE = 1 << 20  # bytes; larger buffers come from mmap, so that their pages go back when the array is dropped
WASTE = 4  # a span is read in one piece while at least one byte in four of it is wanted


def load_block(read: Read, offset: int, shape: Shape, strides: Shape, name: str) -> np.ndarray:
    """The block of elements of dtype `name` at `offset` of a file, `strides` in bytes per axis.

    The span is read in one piece, or axis by axis when most of it is not wanted.
    """
    import numpy as np

    kind = dtype(name)
    wanted, span = kind.itemsize, kind.itemsize
    for n, s in zip(shape, strides, strict=True):
        wanted *= n
        span += (n - 1) * s
    if not wanted:
        nothing: np.ndarray = np.empty(shape, kind.to_numpy())
        return nothing
    if span <= WASTE * wanted or len(shape) < 2:
        raw = memoryview(mmap.mmap(-1, span)) if span > LARGE else memoryview(bytearray(span))
        read(offset, raw)
        block: np.ndarray = np.ndarray(shape, kind.to_numpy(), buffer=raw, strides=strides)
        return block
    axis = max(range(len(shape)), key=lambda i: strides[i])
    result: np.ndarray = np.empty(shape, kind.to_numpy())
    rest_shape, rest_strides = shape[:axis] + shape[axis + 1 :], strides[:axis] + strides[axis + 1 :]
    for index in range(shape[axis]):
        result[(slice(None),) * axis + (index,)] = load_block(read, offset + index * strides[axis], rest_shape, rest_strides, name)
    return result
