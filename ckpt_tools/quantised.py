"""Quantised HF weights: float8 with one scale per block (DeepSeek's layout) as tensors that are dequantised while they are read.

A weight `x` of dtype float8_e4m3fn lies beside `x_scale_inv`, one float per block of its last two axes (128 x 128; blocks at the edges may
be partial); its value is float8 times scale. Source: transformers 5.24 integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES
from .errors import CkptError
from .notes import Note
from .strided import load_block
from .tensors import Decode, TensorMetadata

if TYPE_CHECKING:
    import numpy as np

    from .planning import Scale

SUFFIX = "_scale_inv"
KEY = "quantization_config"


def block_of(config: Mapping[str, Any] | None, where: str) -> tuple[int, int] | None:
    """The block size that config.json names, None when the model is not quantised. CkptError E312 for another method than block float8."""
    said = (config or {}).get(KEY)
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    block = said.get("weight_block_size") if isinstance(said, Mapping) else None
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise CkptError(
            "E312",
            "the weights are quantised in a way that ckpt does not read",
            where=where,
            expected="quant_method fp8 with a weight_block_size",
            found=f"quant_method {method!r}, weight_block_size {block!r}"[:200],
            hint="dequantise the model with the tool that quantised it, and convert the result",
        )
    return block[0], block[1]


def dequantised(
    tensors: Mapping[str, TensorMetadata], config: Mapping[str, Any] | None, where: str
) -> tuple[dict[str, TensorMetadata], list[Note]]:
    """The tensors with every block-quantised one as it is meant, in the dtype that config.json names, and without the scales.

    Errors: E312 another method, E307 a scale without its weight or of another shape than its weight needs.
    """
    block = block_of(config, where)
    if block is None:
        return dict(tensors), []
    meant = str((config or {}).get("dtype") or (config or {}).get("torch_dtype") or "bfloat16").removeprefix("torch.")
    meant = meant if meant in DTYPES and DTYPES[meant].floating and not meant.startswith("float8") else "bfloat16"
    result, done = {}, []
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX):
            if name.removesuffix(SUFFIX) not in tensors:
                raise CkptError("E307", "a scale has no weight", where=f"{where}: {name}", expected=name.removesuffix(SUFFIX))
            continue
        scales = tensors.get(name + SUFFIX)
        result[name] = tensor if scales is None else _scaled(tensor, scales, block, meant, where)
        done += [name] if scales is not None else []
    stored = sorted({tensors[n].dtype for n in done})
    text = f"{len(done)} tensors {', '.join(stored)} -> {meant}, each element times the scale of its block of {block[0]} x {block[1]}"
    return result, [Note("cast", ", ".join(done), text)] if done else []


def _scaled(tensor: TensorMetadata, scales: TensorMetadata, block: tuple[int, int], meant: str, where: str) -> TensorMetadata:
    *lead, rows, columns = tensor.global_shape if len(tensor.global_shape) > 1 else (0, 0)
    wanted = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    if (
        scales.global_shape != wanted
        or len(scales.chunks) != 1
        or not DTYPES[scales.dtype].floating
        or not tensor.dtype.startswith("float8")
    ):
        raise CkptError(
            "E307",
            f"the scales of {tensor.fqn} do not fit it",
            where=f"{where}: {scales.fqn}",
            expected=f"float8 {list(tensor.global_shape)} and scales {list(wanted)}",
            found=f"{tensor.dtype} and {scales.dtype} {list(scales.global_shape)}",
        )
    sizes = (*(1 for _ in lead), *block)
    chunks = tuple(
        replace(
            c,
            decode=Decode("scale", tensor.dtype, scales=scales.chunks, scale_dtype=scales.dtype, block=sizes, origin=c.global_offset),
        )
        for c in tensor.chunks
    )
    return TensorMetadata(tensor.fqn, meant, tensor.global_shape, chunks)


def apply_scales(values: np.ndarray, scale: Scale, read: Callable[[int, memoryview], None]) -> np.ndarray:
    """float32 of stored `values` (a box at scale.origin of the stored tensor) times the scales of its blocks, read with `read`."""
    import numpy as np

    from .kernels.casts import to_float32

    rows = [(o + np.arange(n)) // b for o, n, b in zip(scale.origin, values.shape, scale.block, strict=True)]
    first = [int(r[0]) for r in rows]
    counts = tuple(int(r[-1]) - f + 1 for r, f in zip(rows, first, strict=True))
    offset = scale.offset + sum(f * s for f, s in zip(first, scale.strides, strict=True))
    block = to_float32(load_block(read, offset, counts, scale.strides, scale.dtype))
    product: np.ndarray = to_float32(np.ascontiguousarray(values))
    edges = [np.flatnonzero(np.diff(r, prepend=-1, append=-1)) for r in rows[:-1]]  # where along each axis but the last a new scale begins
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for index in np.ndindex(*counts[:-1]):
            box = tuple(slice(int(e[i]), int(e[i + 1])) for e, i in zip(edges, index, strict=True))
            product[box] *= block[index][rows[-1] - first[-1]]
    return product


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the dequantised model."""
    return {k: v for k, v in config.items() if k != KEY}


def holds_scales(names: Mapping[str, Any]) -> bool:
    """Whether tensors of these names are still quantised."""
    return any(n.endswith(SUFFIX) for n in names)
