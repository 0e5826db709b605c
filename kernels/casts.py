"""Casts between floating dtypes on numpy arrays, with round to nearest even and quiet NaNs that keep their payload where it fits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ..dtypes import dtype
from .floats import FLOAT32_INFINITY, FORMATS, FloatFormat

if TYPE_CHECKING:
    import numpy as np


def cast(values: np.ndarray, target: np.dtype, add: float = 0.0) -> tuple[np.ndarray, int]:
    """`values` as dtype `target`, with `add` added in float32 before, and the number of finite values that became infinite or NaN.

    Any shape and strides in, contiguous out. NaN and overflow follow the rule in `floats`; float64 -> a smaller float rounds once
    (no double rounding through float32).
    """
    import numpy as np

    if add:
        with np.errstate(over="ignore", invalid="ignore"):
            values = to_float32(values) + np.float32(add)
    if values.dtype == target:
        return np.ascontiguousarray(values), 0
    with np.errstate(over="ignore", invalid="ignore"):
        if target.name in FORMATS and target != np.float32:
            result = narrowed(_odd_float32(values), target)
        elif values.dtype.name in FORMATS:
            wide = to_float32(values)
            result = wide if target == np.float32 else wide.astype(target)
        else:
            result = values.astype(target)
    result = np.ascontiguousarray(result)
    if target.name in FORMATS and FORMATS[target.name].largest < _largest(values.dtype) and (beyond := not_finite(result)):
        return result, beyond - not_finite(values)
    return result, 0


def to_float32(values: np.ndarray) -> np.ndarray:
    """float32 of `values`; exact, NaN bits included, from the formats of `floats`."""
    import numpy as np

    if values.dtype == np.float32:
        return values
    if values.dtype.name == "bfloat16":
        return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if values.dtype.name.startswith("float8") and values.dtype.name in FORMATS:
        return _float8_table(values.dtype.name).take(np.ascontiguousarray(values).view(np.uint8))
    return _widened(values)


def _widened(values: np.ndarray) -> np.ndarray:
    """float32 of `values` as numpy and ml_dtypes have it, with the NaN of a known format as `floats` says."""
    import numpy as np

    wide: np.ndarray = np.ascontiguousarray(values.astype(np.float32))
    nan = np.isnan(wide)
    if values.dtype.name in FORMATS and nan.any():
        kind = FORMATS[values.dtype.name]
        bits = _bits(np.ascontiguousarray(values))[nan].astype(np.uint32)
        sign = (bits >> (kind.bits - 1)) << 31
        wide.view(np.uint32)[nan] = sign | FLOAT32_INFINITY | ((bits & ((1 << kind.mantissa) - 1)) << (23 - kind.mantissa))
    return wide


@cache
def _float8_table(name: str) -> np.ndarray:
    """float32 of every pattern of a float8: three times as fast as converting."""
    import numpy as np

    return _widened(np.arange(256, dtype=np.uint8).view(dtype(name).to_numpy()))


def not_finite(values: np.ndarray) -> int:
    """How many elements are infinite or NaN."""
    import numpy as np

    kind = FORMATS.get(values.dtype.name)
    if kind is None:
        return 0 if values.dtype.kind in "iub" else int(np.count_nonzero(~np.isfinite(values)))
    return int(np.count_nonzero((_bits(np.ascontiguousarray(values)) & ((1 << (kind.bits - 1)) - 1)) >= kind.first_beyond))


def _largest(kind: np.dtype) -> float:
    """Upper bound of the finite values of a dtype, to tell whether a cast can overflow."""
    import numpy as np

    if kind.name in FORMATS:
        return FORMATS[kind.name].largest
    return float(np.finfo(kind).max) if kind.kind == "f" else float("inf")


def _bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns of contiguous `values` as unsigned integers."""
    return values.view(f"u{values.dtype.itemsize}")


def _odd_float32(values: np.ndarray) -> np.ndarray:
    """float32 of `values`; float64 is rounded to odd, so that a second rounding to fewer bits is the right one."""
    import numpy as np

    if values.dtype != np.float64:
        return np.ascontiguousarray(to_float32(values))
    narrow = np.ascontiguousarray(values.astype(np.float32))
    bits = narrow.view(np.uint32)
    wide = narrow.astype(np.float64)
    inexact = (wide != values) & np.isfinite(values)
    too_big = inexact & (np.abs(wide) > np.abs(values))
    bits = np.where(too_big, bits - 1, bits)
    return np.where(inexact, bits | 1, bits).astype(np.uint32).view(np.float32)


def narrowed(values: np.ndarray, target: np.dtype) -> np.ndarray:
    """Contiguous float32 `values` rounded to a smaller format of `floats`."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(target)
    nan = np.isnan(values)
    if nan.any():  # numpy and ml_dtypes each have their own habits with NaN
        _bits(result)[nan] = _narrowed_nan(values.view(np.uint32)[nan], FORMATS[target.name])
    return result


def _narrowed_nan(bits: np.ndarray, kind: FloatFormat) -> np.ndarray:
    """Patterns of `kind` for the uint32 `bits` of float32 NaNs: sign, quiet bit, upper payload bits."""
    kept: np.ndarray = (bits >> 31) << (kind.bits - 1)
    if not kind.finite:
        kept |= (bits >> (23 - kind.mantissa)) & ((1 << kind.mantissa) - 1)
    kept |= kind.quiet
    return kept
