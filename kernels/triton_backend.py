"""Every block operation as Triton launches on CUDA tensors. Imports torch and triton.

On CPU tensors it works when TRITON_INTERPRET=1 was set before this module was first imported: so the kernels are tested without a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253  - nobody imports this module on the way of a conversion

from ..errors import CkptError
from . import shapes, torch_backend, triton_kernels
from .descriptors import COLUMNS, OUTER, launches
from .floats import FORMATS, float_format
from .torch_backend import name_of, overflow, torch_dtype

if TYPE_CHECKING:
    from ..planning import Move

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_TILE = 4096
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # a fused multiply-add would round once where the reference rounds twice


def move(moves: Iterable[Move], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy every box of the table from the sources into the targets (contiguous tensors of one device; the table counts their bytes).

    All boxes of a kind and word size go in one launch. E490 when a move leaves its tensors or casts, E901 without a GPU.
    """
    rows = tuple(moves)
    torch_backend.check_operands(rows, sources, targets)
    if not rows:
        return
    device = _device(*sources, *targets)
    source_addresses, target_addresses = [t.data_ptr() for t in sources], [t.data_ptr() for t in targets]
    for launch in launches(rows, source_addresses, target_addresses):
        unit = launch.item * launch.lanes
        table = torch.from_numpy(launch.rows)
        for number, offset, addresses in ((0, 1, source_addresses), (2, 3, target_addresses)):
            table[:, offset] += torch.tensor(addresses, dtype=torch.int64)[table[:, number]] // unit
        counts = torch.from_numpy(launch.tiles).to(device)
        total = int(launch.tiles.sum())
        tile_rows = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device=device), counts, output_size=total)
        _launch(
            triton_kernels.move_boxes,
            total,
            device,
            table.to(device),
            tile_rows,
            COLUMNS=COLUMNS,
            OUTER=OUTER,
            KIND=launch.kind,
            ITEM=launch.item,
            LANES=launch.lanes,
            TILE_ROWS=launch.tile[0],
            TILE_COLUMNS=launch.tile[1],
        )


def cast(values: torch.Tensor, dtype: str, add: float = 0.0) -> tuple[torch.Tensor, int]:
    """`values` as `dtype` (a name), with `add` added in float32 before; and how many finite values became infinite or NaN.

    Formats outside `floats.FORMATS` (float64, integers) are cast by torch on the same device.
    """
    target = torch_dtype(dtype)
    if name_of(values.dtype) not in FORMATS or name_of(target) not in FORMATS or (values.dtype == target and not add):
        return torch_backend.cast(values, dtype, add)
    device, contiguous = _device(values), values.contiguous()
    result = torch.empty(values.shape, dtype=target, device=device)
    _launch(
        triton_kernels.cast_elements,
        -(-values.numel() // _TILE),
        device,
        _words(contiguous),
        _words(result),
        values.numel(),
        float(add),
        ADD=bool(add),
        **_format(values.dtype),
        **_format(target, "TO_"),
        TILE=_TILE,
    )
    return result, overflow(values, result) if not add else overflow(values.to(torch.float32), result)


def dequantise_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (128, 128), dtype: str = "bfloat16"
) -> torch.Tensor:
    """float8 [..., R, C] times the scale of its block, in float32, rounded once to `dtype`; as `numpy_backend.dequantise_blocks`."""
    shapes.check_blocks(values.shape, scales.shape, block)
    float_format(name_of(values.dtype)), float_format(dtype)
    device = _device(values, scales)
    result = torch.empty(values.shape, dtype=torch_dtype(dtype), device=device)
    tile = (32, 128)
    uniform = block[0] % tile[0] == 0 and block[1] % tile[1] == 0
    (rows, columns), grid = values.shape[-2:], shapes.batches(values.shape) * prod(shapes.scale_shape(values.shape[-2:], tile))
    _launch(
        triton_kernels.dequantise,
        grid,
        device,
        _words(values.contiguous()),
        torch_backend.to_float32(scales).contiguous(),
        _words(result),
        rows,
        columns,
        *scales.shape[-2:],
        BLOCK_ROWS=block[0],
        BLOCK_COLUMNS=block[1],
        UNIFORM=uniform,
        **_format(values.dtype),
        **_format(result.dtype, "TO_"),
        TILE_ROWS=tile[0],
        TILE_COLUMNS=tile[1],
    )
    return result


def quantise_blocks(
    values: torch.Tensor, block: tuple[int, int] = (128, 128), dtype: str = "float8_e4m3fn"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats [..., R, C] -> (float8 [..., R, C], float32 scales per block); the rule is that of `numpy_backend.quantise_blocks`.

    A block must fit into 65,536 elements once its sides are rounded up to powers of two; larger ones are done by torch.
    """
    shapes.check_matrix(values.shape, block)
    tile = tuple(1 << (b - 1).bit_length() for b in block)
    float_format(dtype), float_format(name_of(values.dtype))
    if prod(tile) > 65536:
        return torch_backend.quantise_blocks(values, block, dtype)
    device = _device(values)
    result = torch.empty(values.shape, dtype=torch_dtype(dtype), device=device)
    scales = torch.empty(shapes.scale_shape(values.shape, block), dtype=torch.float32, device=device)
    _launch(
        triton_kernels.quantise,
        scales.numel(),
        device,
        _words(values.contiguous()),
        _words(result),
        scales,
        *values.shape[-2:],
        float_format(dtype).largest,
        BLOCK_ROWS=block[0],
        BLOCK_COLUMNS=block[1],
        **_format(values.dtype),
        **_format(result.dtype, "TO_"),
        TILE_ROWS=tile[0],
        TILE_COLUMNS=tile[1],
    )
    return result, scales


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: str = "bfloat16") -> torch.Tensor:
    """MXFP4 blocks uint8 [..., B, 16] and scales uint8 [..., B] -> [..., 32 * B] as `dtype`; as `numpy_backend.dequantise_mxfp4`."""
    shapes.check_mxfp4(blocks.shape, scales.shape, name_of(blocks.dtype), name_of(scales.dtype))
    device = _device(blocks, scales)
    result = torch.empty(shapes.mxfp4_shape(blocks.shape), dtype=torch_dtype(dtype), device=device)
    _launch(
        triton_kernels.dequantise_fp4,
        -(-result.numel() // _TILE),
        device,
        blocks.contiguous(),
        scales.contiguous(),
        _words(result),
        result.numel(),
        **_format(result.dtype, "TO_"),
        TILE=_TILE,
    )
    return result


def _launch(kernel: Any, programs: int, device: torch.device, *operands: Any, **constants: Any) -> None:
    if programs >= 2**31:
        raise CkptError(
            "E410",
            "one launch cannot hold so many tiles",
            expected="fewer than 2**31",
            found=str(programs),
            hint="move the tensors in several calls",
        )
    if programs:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(programs,)](*operands, **constants, **_OPTIONS)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_WORDS[tensor.element_size()])


def _format(dtype: torch.dtype, prefix: str = "") -> dict[str, Any]:
    kind = float_format(name_of(dtype))
    return {f"{prefix}E": kind.exponent, f"{prefix}M": kind.mantissa, f"{prefix}F": kind.finite}


def _device(*tensors: torch.Tensor) -> torch.device:
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        raise CkptError("E490", "the tensors of one operation lie on several devices", found=", ".join(sorted(map(str, devices))))
    device = devices.pop()
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise CkptError(
            "E901",
            "Triton needs tensors on a GPU",
            found=str(device),
            hint="use the torch backend, or set TRITON_INTERPRET=1 to try the kernels on a CPU",
        )
    return device
