"""Casts between floating dtypes on numpy arrays, with round to nearest even and quiet NaNs that keep their payload where it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def cast(values: np.ndarray, target: np.dtype, add: float = 0.0) -> tuple[np.ndarray, int]:
    """`values` as dtype `target`, with `add` added in float32 before, and the number of finite values that became infinite.

    Any shape and strides in, contiguous out. float32 -> bfloat16 keeps the upper payload bits of NaNs and sets the quiet bit;
    float64 -> bfloat16/float16 rounds once (no double rounding through float32).
    """
    import numpy as np

    if add:
        values = values.astype(np.float32) + np.float32(add)
    if values.dtype == target:
        return np.ascontiguousarray(values), 0
    small = target.itemsize < values.dtype.itemsize or target.name.startswith("float8")
    with np.errstate(over="ignore", invalid="ignore"):
        if target.name == "bfloat16":
            result = _to_bfloat16(_odd_float32(values)).view(target)
        elif values.dtype == np.float64 and small and target != np.float32:
            result = _odd_float32(values).astype(target)
        elif values.dtype.name == "bfloat16":
            wide = (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            result = wide if target == np.float32 else wide.astype(target)
        else:
            result = values.astype(target)
        if not small and target.itemsize >= 4:
            return np.ascontiguousarray(result), 0
        lost = int(np.count_nonzero(np.isinf(result.astype(np.float32)) & np.isfinite(values.astype(np.float64 if values.dtype == np.float64 else np.float32))))
    return np.ascontiguousarray(result), lost


def _odd_float32(values: np.ndarray) -> np.ndarray:
    """float32 of `values`; float64 is rounded to odd, so that a second rounding to fewer bits is the right one."""
    import numpy as np

    if values.dtype != np.float64:
        if values.dtype.name == "bfloat16":
            return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(values.astype(np.float32))
    narrow = np.ascontiguousarray(values.astype(np.float32))
    bits = narrow.view(np.uint32)
    wide = narrow.astype(np.float64)
    inexact = (wide != values) & np.isfinite(values)
    too_big = inexact & (np.abs(wide) > np.abs(values))
    bits = np.where(too_big, bits - 1, bits)
    return np.where(inexact, bits | 1, bits).astype(np.uint32).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of float32 `values` rounded to nearest even; NaN stays NaN (quiet, upper payload bits kept)."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded[nan] = ((bits[nan] >> 16) | 0x40).astype(np.uint16)
    return rounded
