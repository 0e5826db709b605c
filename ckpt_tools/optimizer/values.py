"""Whether the optimizer's float32 weights are what the model's weights were rounded from: tells shifted, stale and wrongly cut state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ..dtypes import dtype
from ..lazy import read_box
from ..tensors import Shape, TensorMetadata

SAMPLE = 256  # elements looked at per tensor unless all are
BLOCK = 1 << 20  # elements in memory at once


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A parameter whose float32 weights, rounded to nearest even, are not its weights: how many of the elements looked at, by how much."""

    name: str
    differing: int
    looked_at: int
    largest: float


def compare_masters(
    masters: Mapping[str, TensorMetadata],
    weights: Mapping[str, TensorMetadata],
    *,
    sample: int | None = SAMPLE,
    names: Iterable[str] | None = None,
) -> list[Mismatch]:
    """Parameters whose float32 weights do not round to the model's weights; reads `sample` elements of each (None: all, block by block).

    Not meaningful for weights that were stored dequantised from FP8. Parameters that only one side has, or whose weights are not
    floating, are left out.
    """
    result = []
    for name in masters if names is None else names:
        master, weight = masters.get(name), weights.get(name)
        if master is None or weight is None or not dtype(weight.dtype).floating or master.global_shape != weight.global_shape:
            continue
        differing = looked_at = 0
        largest = 0.0
        for offset, shape in _blocks(master.global_shape, sample):
            count, by = _differing(master, weight, offset, shape)
            differing, looked_at, largest = differing + count, looked_at + prod(shape), max(largest, by)
        if differing:
            result.append(Mismatch(name, differing, looked_at, largest))
    return result


def _differing(master: TensorMetadata, weight: TensorMetadata, offset: Shape, shape: Shape) -> tuple[int, float]:
    import numpy as np

    wide, narrow = read_box(master, offset, shape), read_box(weight, offset, shape)
    with np.errstate(all="ignore"):
        rounded = wide.astype(narrow.dtype)
        wrong = (rounded != narrow) & ~((rounded != rounded) & (narrow != narrow))  # NaN counts as equal to NaN
        count = int(np.count_nonzero(wrong))
        if not count:
            return 0, 0.0
        apart = np.abs(rounded.astype(np.float64) - narrow.astype(np.float64))
        return count, float(np.nanmax(np.where(wrong, apart, 0.0)))


def _blocks(shape: Shape, sample: int | None) -> Iterable[tuple[Shape, Shape]]:
    """Boxes to look at: one of about `sample` elements at the start, or boxes of whole rows that cover everything."""
    if not prod(shape):
        return
    zero = (0,) * len(shape)
    if sample is not None:
        left, box = sample, []
        for size in reversed(shape):
            box.append(max(1, min(size, left)))
            left = max(1, left // max(1, size))
        yield zero, tuple(reversed(box))
        return
    if not shape:
        yield (), ()
        return
    rows = max(1, BLOCK // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield (start, *zero[1:]), (min(rows, shape[0] - start), *shape[1:])
