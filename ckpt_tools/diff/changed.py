"""Ways in which the numbers of one tensor may have been changed: rounded through another dtype, scaled, shifted, zeroed, damaged.

Every function takes (A's tensor, B's tensor, how they differ) and gives (kind, sentence about B, whether it holds exactly) or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..dtypes import dtype
from ..lazy import read_box
from ..tensors import TensorMetadata
from .reading import bits, boxes, width
from .result import Values

if TYPE_CHECKING:
    import numpy as np

Told = tuple[str, str, bool]
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
BLOCK = 2**18


def _holds(a: TensorMetadata, b: TensorMetadata, relation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> bool:
    """Whether a relation is true of every element; ends at the first block with one of which it is not."""
    import numpy as np

    with np.errstate(all="ignore"):
        for offset, shape in boxes(a.global_shape, width(a, b), BLOCK):
            if not bool(np.all(relation(read_box(a, offset, shape), read_box(b, offset, shape)))):
                return False
    return True


def _equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Equality of values, NaN equal to NaN."""
    import numpy as np

    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.asarray((x == y) | ((x != x) & (y != y)))


def _both_float(a: TensorMetadata, b: TensorMetadata) -> bool:
    return all(dtype(t.dtype).floating and dtype(t.dtype).bits >= 8 and t.dtype != "float4_e2m1fn_x2" for t in (a, b))


def relabelled(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """The same bits under the name of another dtype."""
    if a.dtype == b.dtype or width(a) != width(b) or not _holds(a, b, lambda x, y: bits(x) == bits(y)):
        return None
    return "relabelled", f"holds the bits of A's {a.dtype}, labelled {b.dtype}", True


def byteswapped(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Bytes of every element in the other order."""
    if a.dtype != b.dtype or width(a) not in (2, 4, 8) or not _holds(a, b, lambda x, y: bits(x).byteswap() == bits(y)):
        return None
    return "byte-order", "has the bytes of every element in the opposite order (big-endian)", True


def cast(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Rounded to or through a narrower dtype, on either side."""
    if not _both_float(a, b):
        return None
    if a.dtype != b.dtype:
        wide, narrow = (a, b) if width(a) >= width(b) else (b, a)
        kind = dtype(narrow.dtype).to_numpy()
        if _holds(wide, narrow, lambda x, y: _equal(x.astype(kind), y)):
            return "cast", f"is {'A' if narrow is b else 'what A was before it was'} rounded to {narrow.dtype}", True
    for name in NARROW:
        if _is_rounded(a, b, name):
            return f"cast-{name}", f"is A cast through {name}", True
        if _is_rounded(b, a, name):
            return f"cast-{name}", f"is what A was before A was cast through {name}", True
    return None


def _is_rounded(before: TensorMetadata, after: TensorMetadata, name: str) -> bool:
    kind = dtype(name)
    if name == before.dtype or kind.bits > dtype(before.dtype).bits:
        return False
    return _holds(before, after, lambda x, y: _equal(_through(x, kind.to_numpy()), y))


def _through(x: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Rounded to `kind` and back; via float32, as torch and ckpt cast between the small floats."""
    import numpy as np

    wide = x if x.dtype.itemsize >= 4 else x.astype(np.float32)
    return np.asarray(wide.astype(kind).astype(np.float32).astype(x.dtype))


def truncated(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """float32 cut off to bfloat16 instead of rounded."""
    import numpy as np

    if a.dtype != "float32" or b.dtype not in ("float32", "bfloat16"):
        return None

    def upper(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((bits(x) & np.uint32(0xFFFF0000)) == bits(y.astype(np.float32)))

    return ("truncated-bfloat16", "is A cut off to bfloat16 instead of rounded", True) if _holds(a, b, upper) else None


def scaled(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Every element times one number."""
    import numpy as np

    if not _both_float(a, b) or not values.squares_a or not values.squares_b or values.nan_a or values.nan_b or values.cosine is None:
        return None
    if abs(values.cosine) < 0.999:
        return None
    size = math.sqrt(values.squares_b / values.squares_a) * (1 if values.cosine > 0 else -1)
    step = max(_epsilon(a.dtype), _epsilon(b.dtype))
    if not math.isfinite(size) or abs(size - 1) <= step:
        return None
    kind = dtype(b.dtype).to_numpy()
    for factor in dict.fromkeys((_round_factor(size), size)):
        for wide in (np.float64, np.float32):  # as numpy and as torch multiply
            if _holds(a, b, lambda x, y, f=factor, w=wide: _equal((x.astype(w) * w(f)).astype(kind), y)):  # type: ignore[misc]
                return "scaled", f"is A times {factor:.6g}" if factor != -1 else "is A with the sign changed", True
    # The factor is read off rounded numbers, and the product was rounded once more: two units in the last place are no disagreement.
    limit = 2 * step
    if _holds(a, b, lambda x, y: _apart(x, y, size) <= limit * np.abs(y.astype(np.float64)) + 1e-38):
        return "scaled", f"is A times about {size:.6g}", False
    return None


def _apart(x: np.ndarray, y: np.ndarray, factor: float) -> np.ndarray:
    import numpy as np

    return np.asarray(np.abs(x.astype(np.float64) * factor - y.astype(np.float64)))


def _epsilon(name: str) -> float:
    import numpy as np

    kind = dtype(name)
    if kind.ml:
        import ml_dtypes

        return float(ml_dtypes.finfo(kind.to_numpy()).eps)
    return float(np.finfo(kind.to_numpy()).eps)


def _round_factor(size: float) -> float:
    """A whole number, its reciprocal, or the square root of either, when that is what `size` is but for rounding."""
    for value in (size, 1 / size):
        nearest = round(value)
        if nearest and abs(value - nearest) < 2e-3 * abs(nearest):
            return float(nearest) if value == size else 1.0 / nearest
    square, sign = size * size, math.copysign(1, size)
    for value in (square, 1 / square):
        nearest = round(value)
        if nearest and abs(value - nearest) < 2e-3 * nearest:
            return sign * math.sqrt(nearest if value == square else 1.0 / nearest)
    return size


def shifted(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """One added or taken away: norms that are stored around zero."""
    import numpy as np

    if not _both_float(a, b) or not 0.9 < values.max_abs < 1.1:
        return None
    kind = dtype(b.dtype).to_numpy()
    for step in (1.0, -1.0):
        if _holds(a, b, lambda x, y, s=step: _equal((x.astype(np.float32) + np.float32(s)).astype(kind), y)):  # type: ignore[misc]
            how = "is A plus 1" if step > 0 else "is A minus 1"
            return "shifted", f"{how} (a norm stored as gamma - 1 on one side: layernorm_zero_centered_gamma)", True
    return None


def all_zero(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Nothing but zeros on one side."""
    if values.squares_b == 0 and not values.nan_b:
        return "zeros", "is all zeros", True
    if values.squares_a == 0 and not values.nan_a:
        return "zeros", "has numbers where A is all zeros", True
    return None


def zeroed(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Zeros in some rows of one side."""
    for who, zero in (("B", lambda x, y: y == 0), ("A", lambda x, y: x == 0)):
        if _holds(a, b, lambda x, y, z=zero: _equal(x, y) | z(x, y)):  # type: ignore[misc]
            rows = differing_rows(a, b)
            return "zeros", f"is zero in {who} wherever the two differ, {_ranges(rows, a.global_shape[0] if a.global_shape else 1)}", True
    return None


def bit_flipped(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """One bit of one element."""
    if values.differing != 1 or a.dtype != b.dtype or width(a) > 8:
        return None
    one = (1,) * len(a.global_shape)
    x, y = (int(bits(read_box(t, values.first, one))[0]) for t in (a, b))
    if (x ^ y).bit_count() != 1:
        return None
    return "bit-flip", f"differs in one bit of one element, {list(values.first)}: one of the files is damaged", True


def few_rows(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Differences that keep to some rows."""
    rows = differing_rows(a, b)
    total = a.global_shape[0] if a.global_shape else 1
    if len(rows) * 4 > total or total < 8:
        return None
    return "some-rows", f"differs only in {_ranges(rows, total)}", False


def close_or_unrelated(a: TensorMetadata, b: TensorMetadata, values: Values) -> Told | None:
    """Nothing structural: other rounding, other training step, or another model."""
    if values.cosine is None or values.nan_a or values.nan_b:
        return None
    if values.max_ulp is not None and values.max_ulp <= 1 and a.dtype == b.dtype:
        return "rounding", "differs by single units in the last place: computed or rounded differently", False
    if values.cosine > 0.99:
        return "drifted", "differs by little everywhere: another training step, or computed in another precision", False
    if abs(values.cosine) < 0.1 and values.differing * 2 > values.count:
        return "unrelated", "has nothing in common with A: another model, another initialisation, or elements in another order", False
    return None


def differing_rows(a: TensorMetadata, b: TensorMetadata) -> list[int]:
    """Numbers of the rows (along the first axis) in which the tensors differ."""
    import numpy as np

    found: set[int] = set()
    for offset, shape in boxes(a.global_shape, width(a, b), BLOCK):
        x, y = read_box(a, offset, shape), read_box(b, offset, shape)
        unequal = (bits(x) != bits(y)) if a.dtype == b.dtype else ~_equal(x, y).reshape(-1)
        lines = unequal.reshape(shape[0] if shape else 1, -1).any(axis=1)
        found.update(int(i) + (offset[0] if offset else 0) for i in np.flatnonzero(lines))
    return sorted(found)


def _ranges(rows: list[int], total: int) -> str:
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][1] == row - 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    told = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs[:4]) + (", ..." if len(runs) > 4 else "")
    return f"{len(rows)} of {total} rows ({told})"


Change = Callable[[TensorMetadata, TensorMetadata, Values], Told | None]
CHANGES: tuple[Change, ...] = (relabelled, bit_flipped, all_zero, cast, truncated, scaled, shifted, zeroed, byteswapped)
WEAK: tuple[Change, ...] = (few_rows, close_or_unrelated)
