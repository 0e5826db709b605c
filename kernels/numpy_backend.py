"""The reference: every block operation on numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from ..dtypes import dtype as named_dtype
from . import casts, shapes
from .floats import FLOAT32_NAN, float_format
from .tables import check_moves, item_of

if TYPE_CHECKING:
    import numpy as np

    from ..planning import Move

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def move(moves: Iterable[Move], sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
    """Copy every box of the table from the sources into the targets (contiguous arrays, any dtype; the table counts their bytes).

    E490 when a move leaves its arrays, casts, or an array is not contiguous. Boxes that overlap in a target are written in any order.
    """
    import numpy as np

    rows = tuple(moves)
    for array in (*sources, *targets):
        shapes.need_contiguous(array.flags.c_contiguous)
    check_moves(rows, [a.nbytes for a in sources], [a.nbytes for a in targets])
    raw_sources, raw_targets = [_bytes(a) for a in sources], [_bytes(a) for a in targets]
    for m in rows:
        word = f"u{item_of(m)}"
        source = np.ndarray(m.shape, word, raw_sources[m.source], m.source_offset, m.source_strides)
        np.copyto(np.ndarray(m.shape, word, raw_targets[m.target], m.target_offset, m.target_strides), source)


def cast(values: np.ndarray, dtype: str, add: float = 0.0) -> tuple[np.ndarray, int]:
    """`values` as `dtype` (a name), with `add` added in float32 before; and how many finite values became infinite or NaN."""
    return casts.cast(values, named_dtype(dtype).to_numpy(), add)


def dequantise_blocks(values: np.ndarray, scales: np.ndarray, block: tuple[int, int] = (128, 128), dtype: str = "bfloat16") -> np.ndarray:
    """float8 [..., R, C] times the scale of its block, computed in float32 and rounded once to `dtype`.

    scales  any float dtype, [..., ceil(R / block[0]), ceil(C / block[1])], what hub files call weight_scale_inv; blocks at the edges may
            be partial.
    E302 when the shapes do not fit, E206 for a dtype that is not a float.
    """
    import numpy as np

    shapes.check_blocks(values.shape, scales.shape, block)
    float_format(values.dtype.name), float_format(dtype)
    wide_scales = casts.to_float32(scales)
    result = np.empty(values.shape, named_dtype(dtype).to_numpy())
    for index in np.ndindex(*scales.shape[:-1]):  # one row of blocks at a time keeps the float32 copy small
        rows = slice(index[-1] * block[0], (index[-1] + 1) * block[0])
        columns = np.repeat(wide_scales[index], block[1])[: values.shape[-1]]
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            product = casts.to_float32(values[index[:-1]][rows]) * columns
        result[index[:-1]][rows] = _rounded(product, result.dtype)
    return result


def quantise_blocks(values: np.ndarray, block: tuple[int, int] = (128, 128), dtype: str = "float8_e4m3fn") -> tuple[np.ndarray, np.ndarray]:
    """Floats [..., R, C] -> (float8 [..., R, C], float32 scales [..., ceil(R / block[0]), ceil(C / block[1])]); value = float8 * scale.

    The scale of a block is its largest finite magnitude / the largest float8 (448 for float8_e4m3fn), in float32; never below the smallest
    normal float32, and 1 for a block of zeros. Quotients round to nearest even; infinities and NaN stay what they are where the format has
    them (in float8_e4m3fn both are NaN).
    """
    import numpy as np

    shapes.check_matrix(values.shape, block)
    largest = np.float32(float_format(dtype).largest)
    float_format(values.dtype.name)
    result = np.empty(values.shape, named_dtype(dtype).to_numpy())
    scales = np.empty(shapes.scale_shape(values.shape, block), np.float32)
    for index in np.ndindex(*scales.shape):
        part = (
            *index[:-2],
            slice(index[-2] * block[0], (index[-2] + 1) * block[0]),
            slice(index[-1] * block[1], (index[-1] + 1) * block[1]),
        )
        wide = casts.to_float32(values[part])
        top = np.max(np.abs(wide), where=np.isfinite(wide), initial=0)
        scales[index] = max(np.float32(top) / largest, np.finfo(np.float32).tiny) if top else np.float32(1)
        with np.errstate(invalid="ignore", under="ignore"):
            quotient = np.where(np.isnan(wide), wide, wide / scales[index])
        result[part] = casts.narrowed(quotient, result.dtype)
    return result, scales


def dequantise_mxfp4(blocks: np.ndarray, scales: np.ndarray, dtype: str = "bfloat16") -> np.ndarray:
    """MXFP4 blocks uint8 [..., B, 16], two 4-bit floats per byte, low half first, and scales uint8 [..., B] -> [..., 32 * B] as `dtype`.

    value = element * 2 ** (scale - 127); scale 255 is NaN. For gpt-oss the result is [experts, out, in]; transformers' own function also
    transposes it.
    Sources: OCP microscaling formats 1.0; transformers 5.24 integrations/mxfp4.py. E302 when the shapes do not fit.
    """
    import numpy as np

    shapes.check_mxfp4(blocks.shape, scales.shape, blocks.dtype.name, scales.dtype.name)
    values = _fp4_pairs().take(blocks).view(np.float32)
    # 2 ** -127 is subnormal, so its exponent field is 0; 255 gives infinity here and NaN below
    powers = np.where(scales == 0, np.uint32(1 << 22), scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= powers[..., None]
    values[scales == 255] = np.nan
    return _rounded(values, named_dtype(dtype).to_numpy()).reshape(shapes.mxfp4_shape(blocks.shape))


@cache
def _fp4_pairs() -> np.ndarray:
    """The two float32 values in each byte, low half first, as one uint64: three times as fast as taking the halves one by one."""
    import numpy as np

    return np.array([(FP4_VALUES[code & 15], FP4_VALUES[code >> 4]) for code in range(256)], np.float32).view(np.uint64).reshape(256)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("u1")


def _rounded(values: np.ndarray, target: np.dtype) -> np.ndarray:
    """float32 `values`, every NaN made the positive quiet one, as `target`."""
    import numpy as np

    nan = np.isnan(values)
    if nan.any():
        values.view(np.uint32)[nan] = FLOAT32_NAN
    return values if target == np.float32 else casts.narrowed(values, target)
