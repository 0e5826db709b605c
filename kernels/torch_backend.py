"""Every block operation on torch tensors, on any device, in plain torch: the fallback of Triton and its second judge. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch  # noqa: TID253  - nobody imports this module on the way of a conversion

from ..dtypes import dtype as named_dtype
from ..errors import CkptError
from . import shapes
from .floats import FLOAT32_INFINITY, FLOAT32_NAN, FORMATS, float_format
from .numpy_backend import FP4_VALUES
from .tables import check_moves, item_of

if TYPE_CHECKING:
    from ..planning import Move

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix, which is the name ckpt uses."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; CkptError E206 for a name that torch lacks."""
    found = getattr(torch, named_dtype(name).name, None)
    if not isinstance(found, torch.dtype):
        raise CkptError("E206", f"this torch has no dtype {name}", found=torch.__version__)
    return found


def move(moves: Iterable[Move], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy every box of the table from the sources into the targets (contiguous tensors, any dtype; the table counts their bytes).

    E490 when a move leaves its tensors, casts, or a tensor is not contiguous.
    """
    rows = tuple(moves)
    check_operands(rows, sources, targets)
    for m in rows:
        item = item_of(m)
        target = _box(targets[m.target], item, m.shape, m.target_offset, m.target_strides)
        target.copy_(_box(sources[m.source], item, m.shape, m.source_offset, m.source_strides))


def check_operands(moves: Sequence[Move], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """CkptError E490 unless all tensors are contiguous and aligned to the table's elements, and every move stays inside them."""
    widest = max(map(item_of, moves), default=1)
    for tensor in (*sources, *targets):
        shapes.need_contiguous(tensor.is_contiguous())
        if tensor.data_ptr() % widest:
            raise CkptError("E490", "a tensor is not aligned to the elements of the table", expected=f"a multiple of {widest} bytes")
    check_moves(moves, [t.nbytes for t in sources], [t.nbytes for t in targets])


def _box(tensor: torch.Tensor, item: int, shape: Sequence[int], offset: int, strides: Sequence[int]) -> torch.Tensor:
    """A view of the tensor's bytes as integers of `item` bytes; offset and strides in bytes."""
    start = tensor.storage_offset() * tensor.element_size() + offset
    words = torch.empty(0, dtype=_WORDS[item], device=tensor.device)
    return words.set_(tensor.untyped_storage(), start // item, tuple(shape), tuple(s // item for s in strides))


def cast(values: torch.Tensor, dtype: str, add: float = 0.0) -> tuple[torch.Tensor, int]:
    """`values` as `dtype` (a name), with `add` added in float32 before; and how many finite values became infinite or NaN.

    On a GPU the count waits for the device.
    """
    if add:
        wide = to_float32(values)
        values = torch.where(torch.isnan(wide), _float32(_bits(wide) | (FLOAT32_NAN - FLOAT32_INFINITY)), wide + add)
    target = torch_dtype(dtype)
    if values.dtype == target:
        return values.contiguous(), 0
    if name_of(target) in FORMATS and target != torch.float32:
        result = _narrowed(_odd_float32(values), name_of(target))
    elif name_of(values.dtype) in FORMATS:
        result = to_float32(values).to(target)
    else:
        result = values.to(target)
    result = result.contiguous()
    return result, overflow(values, result)


def overflow(values: torch.Tensor, result: torch.Tensor) -> int:
    """How many finite values are infinite or NaN in a cast of them; 0 without looking when the target's range holds the source's."""
    target = FORMATS.get(name_of(result.dtype))
    if target is None:
        return 0
    source = FORMATS.get(name_of(values.dtype))
    if source and source.largest <= target.largest:
        return 0
    beyond = _not_finite(result)
    return beyond - _not_finite(values) if beyond else 0


def _not_finite(values: torch.Tensor) -> int:
    kind = FORMATS.get(name_of(values.dtype))
    if kind is None:
        return 0 if not values.is_floating_point() else int((~torch.isfinite(values)).sum())
    words = values.contiguous().view(_WORDS[values.element_size()])
    return int(torch.count_nonzero((words & ((1 << (kind.bits - 1)) - 1)) >= kind.first_beyond))


def to_float32(values: torch.Tensor) -> torch.Tensor:
    """float32 of `values`; exact, NaN bits included, from the formats of `floats`."""
    if values.dtype == torch.float32:
        return values
    wide = values.to(torch.float32)
    kind = FORMATS.get(name_of(values.dtype))
    nan = torch.isnan(wide)
    if kind is None or not nan.any():
        return wide
    bits = _bits(values)
    widened = ((bits >> (kind.bits - 1)) & 1) << 31 | FLOAT32_INFINITY | (bits & ((1 << kind.mantissa) - 1)) << (23 - kind.mantissa)
    return torch.where(nan, _float32(widened), wide)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns as int32 (those of 32-bit values with their sign)."""
    return values.contiguous().view(_WORDS[values.element_size()]).to(torch.int32)


def _float32(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _odd_float32(values: torch.Tensor) -> torch.Tensor:
    """float32 of `values`; float64 is rounded to odd, so that a second rounding to fewer bits is the right one."""
    if values.dtype != torch.float64:
        return to_float32(values)
    narrow = values.to(torch.float32)
    wide, bits = narrow.double(), _bits(narrow)
    inexact = (wide != values) & torch.isfinite(values)
    bits = torch.where(inexact & (wide.abs() > values.abs()), bits - 1, bits)
    return _float32(torch.where(inexact, bits | 1, bits))


def _narrowed(values: torch.Tensor, name: str) -> torch.Tensor:
    """float32 `values` rounded to a smaller format."""
    kind = float_format(name)
    result = values.to(torch_dtype(name)).contiguous()
    odd = torch.isnan(values)
    if kind.finite:  # torch 2.13 saturates
        odd = odd | (values.abs() > kind.last_tie)
    if odd.any():
        bits = _bits(values)
        payload = torch.zeros_like(bits) if kind.finite else (bits >> (23 - kind.mantissa)) & ((1 << kind.mantissa) - 1)
        patterns = ((bits >> 31) & 1) << (kind.bits - 1) | kind.quiet | payload
        words = result.view(_WORDS[result.element_size()])
        result = torch.where(odd, patterns.to(words.dtype), words).view(result.dtype)
    return result


def dequantise_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (128, 128), dtype: str = "bfloat16"
) -> torch.Tensor:
    """float8 [..., R, C] times the scale of its block, in float32, rounded once to `dtype`; as `numpy_backend.dequantise_blocks`."""
    shapes.check_blocks(values.shape, scales.shape, block)
    float_format(name_of(values.dtype)), float_format(dtype)
    wide_scales = to_float32(scales)
    result = torch.empty(values.shape, dtype=torch_dtype(dtype), device=values.device)
    for row in range(scales.shape[-2]):
        rows = slice(row * block[0], (row + 1) * block[0])
        columns = wide_scales[..., row, None, :].repeat_interleave(block[1], -1)[..., : values.shape[-1]]
        result[..., rows, :] = _rounded(to_float32(values[..., rows, :]) * columns, dtype)
    return result


def quantise_blocks(
    values: torch.Tensor, block: tuple[int, int] = (128, 128), dtype: str = "float8_e4m3fn"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats [..., R, C] -> (float8 [..., R, C], float32 scales per block); the rule is that of `numpy_backend.quantise_blocks`."""
    shapes.check_matrix(values.shape, block)
    largest = float_format(dtype).largest
    float_format(name_of(values.dtype))
    result = torch.empty(values.shape, dtype=torch_dtype(dtype), device=values.device)
    scales = torch.empty(shapes.scale_shape(values.shape, block), dtype=torch.float32, device=values.device)
    tiny = torch.finfo(torch.float32).tiny
    for row in range(scales.shape[-2]):
        rows = slice(row * block[0], (row + 1) * block[0])
        wide = to_float32(values[..., rows, :])
        magnitude = torch.where(torch.isfinite(wide), wide.abs(), 0.0).amax(-2)
        width = magnitude.shape[-1]
        padded = torch.nn.functional.pad(magnitude, (0, -width % block[1]))
        top = padded.unflatten(-1, (-1, block[1])).amax(-1)
        scales[..., row, :] = torch.where(top > 0, (top / largest).clamp(min=tiny), 1.0)
        quotient = wide / scales[..., row, None, :].repeat_interleave(block[1], -1)[..., :width]
        result[..., rows, :] = _narrowed(torch.where(torch.isnan(wide), wide, quotient), dtype)
    return result, scales


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: str = "bfloat16") -> torch.Tensor:
    """MXFP4 blocks uint8 [..., B, 16] and scales uint8 [..., B] -> [..., 32 * B] as `dtype`; as `numpy_backend.dequantise_mxfp4`."""
    shapes.check_mxfp4(blocks.shape, scales.shape, name_of(blocks.dtype), name_of(scales.dtype))
    table = torch.tensor(FP4_VALUES, dtype=torch.float32, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).to(torch.int32)
    exponents = scales.to(torch.int32)
    powers = _float32(torch.where(exponents == 0, 1 << 22, exponents << 23))  # 2 ** -127 is subnormal, and 255 gives infinity
    values = torch.where(exponents[..., None] == 255, torch.nan, table[codes] * powers[..., None])
    return _rounded(values, dtype).reshape(shapes.mxfp4_shape(blocks.shape))


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    plain = torch.where(torch.isnan(values), _float32(torch.full_like(values, FLOAT32_NAN, dtype=torch.int32)), values)
    return cast(plain, dtype)[0]
