"""How the values of two tensors differ: exact counts, distances, angle, read once in bounded blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from ..dtypes import dtype
from ..lazy import read_box
from ..tensors import Shape, TensorMetadata
from .reading import bits, boxes, first_unequal, width
from .result import Values
from .tolerance import Tolerance

if TYPE_CHECKING:
    import numpy as np

MEASURED_BYTES = 2**18  # of a block whose differences are measured: a dozen float64 arrays of its elements are held
CODES = ("float8_e8m0fnu", "float4_e2m1fn_x2")  # no sign bit; two numbers a byte: their bits are taken as whole numbers


def compare_values(
    name: str, a: TensorMetadata, b: TensorMetadata, tolerance: Tolerance, on_bytes: Callable[[int], None] = lambda _: None
) -> Values | None:
    """None when two tensors of the same shape are equal; otherwise how they differ.

    Same dtype: bits are compared, so that +0 and -0 differ and a NaN equals itself. Different dtypes: values, every NaN equal to
    every other. on_bytes gets the bytes of A that were read.
    """
    told = 0

    def tell(count: int) -> None:
        nonlocal told
        told += count
        on_bytes(count)

    if a.dtype == b.dtype and first_unequal(a, b, tell) is None:
        return None
    import numpy as np

    total = _Total(a, b, tolerance)
    done, item = 0, dtype(a.dtype).itemsize
    for offset, shape in boxes(a.global_shape, width(a, b), MEASURED_BYTES):
        with np.errstate(all="ignore"):  # overflow and NaN are what is being looked for
            total.add(offset, shape, read_box(a, offset, shape), read_box(b, offset, shape))
        done += prod(shape) * item
        if done > told:
            tell(done - told)
    return total.result(name) if total.differing else None


class _Total:
    """Running totals of one pair of tensors."""

    def __init__(self, a: TensorMetadata, b: TensorMetadata, tolerance: Tolerance) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        self._narrow = min((a.dtype, b.dtype), key=lambda n: dtype(n).bits)
        self.differing = self.beyond = self.nan_a = self.nan_b = 0
        self.max_abs = self.max_rel = -1.0
        self.max_ulp: int | None = 0
        self.max_abs_at: Shape = ()
        self.first: Shape | None = None
        self.dot = self.norm_a = self.norm_b = 0.0
        self.histogram: dict[int, int] = {}

    def add(self, offset: Shape, shape: Shape, a: np.ndarray, b: np.ndarray) -> None:
        """One block of both sides."""
        import numpy as np

        flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        if self._a.dtype == self._b.dtype == "float4_e2m1fn_x2":
            flat_a, flat_b = bits(flat_a), bits(flat_b)
        wide_a, wide_b = _wide(flat_a, self._a.dtype), _wide(flat_b, self._b.dtype)
        self._angle(wide_a, wide_b)
        differ = self._differ(flat_a, flat_b, wide_a, wide_b)
        count = int(np.count_nonzero(differ))
        if not count:
            return
        where = np.flatnonzero(differ)
        self.differing += count
        if self.first is None:
            self.first = _index(offset, shape, int(where[0]))
        x, y = wide_a[where], wide_b[where]
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        self.nan_a += int(np.count_nonzero(nan_x & ~nan_y))
        self.nan_b += int(np.count_nonzero(nan_y & ~nan_x))
        with np.errstate(all="ignore"):
            apart = _distance(x, y)
            apart = np.where(nan_x & nan_y, 0.0, np.where(nan_x | nan_y, np.inf, np.where(x == y, 0.0, apart)))
            largest = np.maximum(np.abs(x), np.abs(y)).astype(np.float64)
            relative = np.where(apart == 0, 0.0, np.where(np.isinf(apart), np.inf, apart / np.where(largest == 0, 1.0, largest)))
        peak = int(np.argmax(apart))
        if float(apart[peak]) > self.max_abs:
            self.max_abs, self.max_abs_at = float(apart[peak]), _index(offset, shape, int(where[peak]))
        self.max_rel = max(self.max_rel, float(relative.max()))
        ulps = self._ulps(flat_a[where], flat_b[where])
        if ulps is None:
            self.max_ulp = None
        elif self.max_ulp is not None:
            self.max_ulp = max(self.max_ulp, int(ulps.max()))
        self._count_beyond(apart, relative, ulps)
        finite = apart[np.isfinite(apart) & (apart > 0)]
        if finite.size:
            decades, counts = np.unique(np.floor(np.log10(finite)).astype(np.int64), return_counts=True)
            for decade, n in zip(decades.tolist(), counts.tolist(), strict=True):
                self.histogram[decade] = self.histogram.get(decade, 0) + n

    def _differ(self, a: np.ndarray, b: np.ndarray, wide_a: np.ndarray, wide_b: np.ndarray) -> np.ndarray:
        import numpy as np

        if self._a.dtype == self._b.dtype:
            unequal: np.ndarray = bits(a) != bits(b)
            return np.asarray(unequal.any(axis=1)) if unequal.ndim == 2 else unequal
        return np.asarray((wide_a != wide_b) & ~((wide_a != wide_a) & (wide_b != wide_b)))

    def _angle(self, a: np.ndarray, b: np.ndarray) -> None:
        import numpy as np

        if a.dtype.kind != "f":
            a, b = np.abs(a).astype(np.float64), np.abs(b).astype(np.float64)
        with np.errstate(all="ignore"):
            sums = [float(np.dot(x, y)) for x, y in ((a, b), (a, a), (b, b))]
            if not all(map(math.isfinite, sums)):
                usable = np.isfinite(a) & np.isfinite(b)
                a, b = a[usable], b[usable]
                sums = [float(np.dot(x, y)) for x, y in ((a, b), (a, a), (b, b))]
        self.dot, self.norm_a, self.norm_b = self.dot + sums[0], self.norm_a + sums[1], self.norm_b + sums[2]

    def _ulps(self, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
        import numpy as np

        kind = dtype(self._narrow)
        if self._narrow.startswith("complex"):
            return None
        if self._a.dtype != self._b.dtype:
            if not (dtype(self._a.dtype).floating and dtype(self._b.dtype).floating):
                return None
            with np.errstate(all="ignore"):
                a, b = (_wide(a, self._a.dtype).astype(kind.to_numpy()), _wide(b, self._b.dtype).astype(kind.to_numpy()))
        return _apart(_ordered(a, self._narrow), _ordered(b, self._narrow))

    def _count_beyond(self, apart: np.ndarray, relative: np.ndarray, ulps: np.ndarray | None) -> None:
        import numpy as np

        kind, value = self._tolerance.kind, self._tolerance.value
        if value == 0:
            self.beyond += apart.size
        elif kind == "ulp":
            self.beyond += apart.size if ulps is None else int(np.count_nonzero((ulps > value) | ~np.isfinite(apart)))
        else:
            self.beyond += int(np.count_nonzero((apart if kind == "abs" else relative) > value))

    def result(self, name: str) -> Values:
        """The totals as they stand."""
        product = math.sqrt(self.norm_a) * math.sqrt(self.norm_b)
        cosine = max(-1.0, min(1.0, self.dot / product)) if product and math.isfinite(product) else None
        a, b = self._a, self._b
        return Values(
            name,
            a.dtype,
            b.dtype,
            a.global_shape,
            prod(a.global_shape),
            self.differing,
            self.beyond,
            max(0.0, self.max_abs),
            self.max_abs_at,
            max(0.0, self.max_rel),
            self.max_ulp,
            cosine,
            self.nan_a,
            self.nan_b,
            self.norm_a,
            self.norm_b,
            self.first or (),
            self.histogram,
        )


def _wide(flat: np.ndarray, name: str) -> np.ndarray:
    """Elements as numbers in which every value of the dtype is exact (64-bit integers and complex numbers stay what they are)."""
    import numpy as np

    kind = dtype(name)
    if name.startswith("complex") or name in ("int64", "uint64", "float64"):
        return flat
    return flat.astype(np.float64) if kind.bits <= 32 else flat


def _distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y| as float64; of integers without overflow."""
    import numpy as np

    if x.dtype.kind in "iu" and x.dtype == y.dtype:
        unsigned = x.dtype.kind == "u"
        high, low = np.maximum(x, y), np.minimum(x, y)
        return np.asarray((high - low) if unsigned else (high.view(np.uint64) - low.view(np.uint64))).astype(np.float64)
    if "c" in (x.dtype.kind, y.dtype.kind):
        return np.asarray(np.abs(x - y)).astype(np.float64)
    return np.asarray(np.abs(x.astype(np.float64) - y.astype(np.float64)))


def _ordered(flat: np.ndarray, name: str) -> np.ndarray:
    """Numbers whose order and distance are those of the representable values: sign and magnitude of floats as one integer."""
    import numpy as np

    if not dtype(name).floating or name in CODES:
        return flat.astype(np.uint8) if flat.dtype.kind == "b" else flat if flat.dtype.kind in "iu" else bits(flat)
    pattern = bits(flat)
    size = flat.itemsize * 8
    magnitude = (pattern & np.array((1 << (size - 1)) - 1, pattern.dtype)).astype(np.int64)
    return np.asarray(np.where(pattern >> np.array(size - 1, pattern.dtype), -magnitude, magnitude))


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    import numpy as np

    high, low = np.maximum(x, y), np.minimum(x, y)
    if high.dtype.kind == "u":
        return np.asarray(high - low)
    return np.asarray(high.astype(np.int64).view(np.uint64) - low.astype(np.int64).view(np.uint64))


def _index(offset: Shape, shape: Shape, flat: int) -> Shape:
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(o + i for o, i in zip(offset, reversed(index), strict=True))
