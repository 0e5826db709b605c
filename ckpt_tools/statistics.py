"""Smallest, largest and mean value, NaNs, infinities and zeros of tensors, read once in bounded blocks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .dtypes import dtype
from .errors import CkptError
from .source_files import open_source
from .tensors import Extent, Shape, TensorMetadata

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 2**20  # bytes read at a time; a few times that is held per worker


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one tensor. minimum, maximum, mean: over its finite elements (None when there is none, or they have no order);
    nans, infinities, zeros: counts (None when the dtype cannot be read as numbers)."""

    count: int
    minimum: float | int | None
    maximum: float | int | None
    mean: float | None
    nans: int | None
    infinities: int | None
    zeros: int | None


def statistics(
    tensors: Mapping[str, TensorMetadata], *, threads: int = 2, on_progress: Callable[[int], None] | None = None
) -> Iterator[tuple[str, Statistics]]:
    """(name, Statistics) of every tensor, in order, each as soon as it is known; tensors must be located (Checkpoint.locate_all).

    on_progress gets the bytes read so far. Errors: E406 a file became shorter.
    """
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    told = adding_up(on_progress)
    waiting: deque[tuple[str, Future[Statistics]]] = deque()
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for name, tensor in tensors.items():
                waiting.append((name, pool.submit(statistics_of, tensor, told)))
                if len(waiting) > 4 * threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def adding_up(on_progress: Callable[[int], None] | None) -> Callable[[int], None]:
    """A function that takes bytes done since its last call, from any thread, and tells `on_progress` their sum."""
    if on_progress is None:
        return lambda _: None
    from threading import Lock

    told, lock, done = on_progress, Lock(), 0

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
        told(done)

    return add


def statistics_of(tensor: TensorMetadata, on_progress: Callable[[int], None] = lambda _: None) -> Statistics:
    """Statistics of one located tensor; on_progress gets the bytes of each block."""
    kind = dtype(tensor.dtype)
    total = _Total()
    if kind.numpy is None or kind.bits % 8:
        return Statistics(tensor.numel, None, None, None, None, None, None)
    files: dict[str, int] = {}
    try:
        for chunk in tensor.chunks:
            extent = chunk.extent
            if extent is None:  # padding, stored nowhere
                total.add_zeros(prod(chunk.local_shape))
                continue
            if extent.path not in files:
                files[extent.path] = open_source(extent.path)
            stored = tensor.dtype if chunk.decode is None else chunk.decode.stored
            for raw in _blocks(files[extent.path], extent, chunk.local_shape, dtype(stored).itemsize):
                total.add(_numbers(raw, stored))
                on_progress(raw.size * raw.itemsize)
    finally:
        for fd in files.values():
            os.close(fd)
    return total.result(tensor.dtype)


class _Total:
    """Running totals of one tensor."""

    def __init__(self) -> None:
        self.count = self.finite = self.nans = self.infinities = self.zeros = 0
        self.minimum, self.maximum, self.sum = math.inf, -math.inf, 0.0
        self.ordered = True

    def add_zeros(self, count: int) -> None:
        if count:
            self.count += count
            self.finite += count
            self.zeros += count
            self.minimum, self.maximum = min(self.minimum, 0), max(self.maximum, 0)

    def add(self, block: np.ndarray) -> None:
        import numpy as np

        if not block.size:
            return
        self.count += block.size
        self.zeros += block.size - int(np.count_nonzero(block))
        if block.dtype.kind == "c":
            self.ordered = False
            self.nans += int(np.count_nonzero(np.isnan(block)))
            self.infinities += int(np.count_nonzero(np.isinf(block)))
            return
        # A sum in float64 of smaller floats cannot overflow: it is finite exactly when every element is.
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.reduce(block, dtype=np.float64))
        if not math.isfinite(total):
            nans = np.isnan(block)
            infinite = np.isinf(block)
            self.nans += int(np.count_nonzero(nans))
            self.infinities += int(np.count_nonzero(infinite))
            block = block[~(nans | infinite)]
            if not block.size:
                return
            with np.errstate(over="ignore"):
                total = float(np.add.reduce(block, dtype=np.float64))
        self.finite += block.size
        self.sum += total
        self.minimum, self.maximum = min(self.minimum, block.min().item()), max(self.maximum, block.max().item())

    def result(self, name: str) -> Statistics:
        floating = dtype(name).floating
        if not self.finite or not self.ordered:
            return Statistics(self.count, None, None, None, self.nans, self.infinities, self.zeros)
        low, high = (float(self.minimum), float(self.maximum)) if floating else (int(self.minimum), int(self.maximum))
        mean = self.sum / self.finite  # infinite when float64 elements add up to more than float64 holds
        return Statistics(self.count, low, high, mean if math.isfinite(mean) else None, self.nans, self.infinities, self.zeros)


def _numbers(raw: np.ndarray, name: str) -> np.ndarray:
    """Raw elements (unsigned integers of the dtype's size) as numbers numpy computes with quickly; exact."""
    import numpy as np

    values: np.ndarray
    if name == "bfloat16":
        values = np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
    elif name == "float4_e2m1fn_x2":  # two elements a byte
        table = np.arange(16, dtype=np.uint8).view(dtype(name).to_numpy()).astype(np.float32)
        values = np.concatenate((table[raw & 15], table[raw >> 4]))
    elif name == "bool":
        values = raw
    else:
        values = raw.view(dtype(name).to_numpy())
        if dtype(name).ml or name == "float16":
            values = values.astype(np.float32)
    return values


def _blocks(fd: int, extent: Extent, shape: Shape, itemsize: int) -> Iterator[np.ndarray]:
    """The elements of a stored box, in any order, as flat arrays of unsigned integers ("V" kinds for 16 bytes), about BLOCK_BYTES each."""
    import numpy as np

    strides = extent.strides
    if strides is None:
        raise CkptError("E490", "statistics of a tensor whose bytes were not located", where=extent.path)
    unit = np.dtype(f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}")
    wanted = prod(shape) * itemsize
    if not wanted:
        return
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
    if reach == wanted:  # no gaps: whatever the order of the axes, these are the bytes
        step = BLOCK_BYTES // itemsize * itemsize
        for start in range(0, wanted, step):
            yield np.frombuffer(_read(fd, min(step, wanted - start), extent.offset + start, extent.path), unit)
        return
    if reach <= BLOCK_BYTES and wanted <= BLOCK_BYTES:
        yield np.ndarray(shape, unit, buffer=_read(fd, reach, extent.offset, extent.path), strides=strides).reshape(-1)
        return
    axis = max((i for i, n in enumerate(shape) if n > 1), key=lambda i: strides[i])
    half = shape[axis] // 2
    for start, size in ((0, half), (half, shape[axis] - half)):
        part = Extent(extent.path, extent.offset + start * strides[axis], extent.length, strides)
        yield from _blocks(fd, part, (*shape[:axis], size, *shape[axis + 1 :]), itemsize)


def _read(fd: int, size: int, offset: int, path: str) -> bytes:
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise CkptError("E406", "the file is shorter than its index says", where=path, expected=f"bytes at {offset + len(data)}")
        data += more
    return data
