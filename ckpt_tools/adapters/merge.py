"""Adding a LoRA adapter to a model, a block of rows at a time: weight + scale * B A in float32, one rounding to the weight's dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from ..dtypes import dtype
from ..errors import CkptError
from ..execution import Progress, Result, execute
from ..lazy import read_box
from ..tensors import TensorMetadata
from .merge_plan import MergePlan, Sum

if TYPE_CHECKING:
    import numpy as np

BLOCK = 2**20  # elements of a weight that a thread holds at a time, in float32


def merge(
    made: MergePlan,
    destination: str,
    *,
    threads: int = 2,
    fsync: bool = True,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Result:
    """Carry out a merge. Memory: the A of one module and a few blocks of rows per thread. Errors: as execution.execute; E544 when a
    factor holds NaN or infinity."""
    overflow = 0
    report = on_progress or (lambda _: None)

    def add(folder: str) -> int:
        nonlocal overflow
        done = made.plan.moved_bytes
        for item in made.sums:
            overflow += _add(made, item, folder, threads)
            done += item.base.nbytes
            report(done)
        if fsync:
            for number in {s.placement.file for s in made.sums}:
                _flush(os.path.join(folder, made.plan.targets[number].path))
        return 0

    result = execute(made.plan, destination, threads=threads, fsync=fsync, overwrite=overwrite, on_progress=report, before_commit=add)
    return replace(result, overflow=result.overflow + overflow, verified=None)


def _add(made: MergePlan, item: Sum, folder: str, threads: int) -> int:
    """Compute one tensor and write it; returns how many values became infinite."""
    from ..kernels.casts import cast, to_float32

    path = os.path.join(folder, made.plan.targets[item.placement.file].path)
    target = dtype(item.placement.dtype).to_numpy()
    shape = item.base.global_shape
    per_row = 1
    for n in shape[1:]:
        per_row *= n
    shared = None if item.pair is None else _factor(item.pair.b if _by_columns(item) else item.pair.a)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def work(span: tuple[int, int]) -> int:
        first, last = span
        rest = shape[1:]
        rows = to_float32(read_box(item.base, (first, *(0 for _ in rest)), (last - first, *rest)))
        if item.pair is not None and shared is not None:
            rows = rows + _product(item, shared, first, last)
        if item.bias is not None:
            rows = rows + to_float32(read_box(item.bias, (first,), (last - first,)))
        block, beyond = cast(rows, target)
        _write(fd, item.placement.offset + first * per_row * target.itemsize, block)
        return beyond

    try:
        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            return sum(pool.map(work, _spans(shape[0], max(1, BLOCK // max(1, per_row)))))
    finally:
        os.close(fd)


def _by_columns(item: Sum) -> bool:
    """Whether the rows of the weight are the columns of A: embeddings [vocabulary, hidden], and weights stored [in, out]."""
    return item.pair is not None and (item.pair.embedding or item.transposed)


def _product(item: Sum, shared: np.ndarray, first: int, last: int) -> np.ndarray:
    """Rows first to last of scale * B A, or of its transpose, in float32."""
    import numpy as np

    assert item.pair is not None
    pair = item.pair
    if _by_columns(item):
        columns = _factor(pair.a, (0, first), (pair.rank, last - first))
        product: np.ndarray = (shared @ columns).T
    else:
        product = _factor(pair.b, (first, 0), (last - first, pair.rank)) @ shared
    scaled: np.ndarray = product * np.float32(pair.scale)
    return scaled


def _factor(tensor: TensorMetadata, offset: tuple[int, int] = (0, 0), shape: tuple[int, int] | None = None) -> np.ndarray:
    import numpy as np

    from ..kernels.casts import to_float32

    rows, columns = tensor.global_shape
    values = to_float32(read_box(tensor, offset, shape or (rows, columns)))
    if not np.isfinite(values).all():
        raise CkptError("E544", "a factor of the adapter holds NaN or infinity", where=tensor.fqn, hint="the training had diverged")
    return values


def _spans(rows: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _write(fd: int, offset: int, block: np.ndarray) -> None:
    import numpy as np

    view = memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    while view:
        count = os.pwrite(fd, view, offset)
        offset, view = offset + count, view[count:]


def _flush(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
