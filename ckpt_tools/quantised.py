"""Quantised HF weights as tensors that are dequantised while they are read: float8 with one scale per block (DeepSeek's layout), and four
bits (see `packed`).

A weight `x` of dtype float8_e4m3fn lies beside `x_scale_inv`, one float per block of its last two axes (128 x 128; blocks at the edges may
be partial); its value is float8 times scale. Source: transformers 5.24 integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES
from .errors import CkptError
from .notes import Note
from .packed import BLOCKS, GROUP, SCALES, load_packed, unpacked
from .strided import Read, load_block
from .tensors import Decode, TensorMetadata

if TYPE_CHECKING:
    import numpy as np

    from .planning import Scale
    from .tensors import Shape

SUFFIX = "_scale_inv"
KEY = "quantization_config"


def method_of(config: Mapping[str, Any] | None, where: str) -> str | None:
    """"fp8" or "mxfp4", what config.json names; None when the model is not quantised. CkptError E312 for another method than these."""
    said = (config or {}).get(KEY)
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    block = said.get("weight_block_size") if isinstance(said, Mapping) else None
    if method == "mxfp4":
        return "mxfp4"
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise CkptError(
            "E312",
            "the weights are quantised in a way that ckpt does not read",
            where=where,
            expected="quant_method fp8 with a weight_block_size, or mxfp4",
            found=f"quant_method {method!r}, weight_block_size {block!r}"[:200],
            hint="dequantise the model with the tool that quantised it, and convert the result",
        )
    return "fp8"


def dequantised(
    tensors: Mapping[str, TensorMetadata], config: Mapping[str, Any] | None, where: str
) -> tuple[dict[str, TensorMetadata], list[Note]]:
    """The tensors with every quantised one as it is meant, in the dtype that config.json names, and without the scales.

    Errors: E312 another method, E307 a scale without its weight, or of another shape than its weight needs, or of a module that config.json
    says is not converted.
    """
    method = method_of(config, where)
    if method is None or config is None:
        return dict(tensors), []
    meant = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    meant = meant if meant in DTYPES and DTYPES[meant].floating and not meant.startswith("float8") else "bfloat16"
    if method == "mxfp4":
        result, done = unpacked(tensors, meant, where)
        text = f"{len(done)} tensors of 4 bits (MXFP4) -> {meant}, each element times the power of two of its group of {GROUP}"
    else:
        block = tuple(config[KEY]["weight_block_size"])
        result, done = _scaled_all(tensors, block, meant, where)
        stored = sorted({tensors[n].dtype for n in done})
        text = f"{len(done)} tensors {', '.join(stored)} -> {meant}, each element times the scale of its block of {block[0]} x {block[1]}"
    _check_left_out(done, config[KEY], where)
    return result, [Note("cast", ", ".join(done), text)] if done else []


def _check_left_out(quantised: Iterable[str], said: Any, where: str) -> None:
    """What config.json says is not converted must be stored as it is. E307."""
    patterns = said.get("modules_to_not_convert") if isinstance(said, Mapping) else None
    pattern_of = left_out([p for p in patterns if isinstance(p, str)] if isinstance(patterns, list) else [])
    for name in quantised:
        pattern = pattern_of(name.removesuffix(".weight"))
        if pattern is not None:
            raise CkptError(
                "E307",
                "a weight is stored quantised, and config.json says that it is not converted",
                where=f"{where}: {name}",
                expected=f"full precision, as modules_to_not_convert {pattern!r} says",
                hint="config.json and weights are of different models",
            )


def left_out(patterns: Iterable[str]) -> Callable[[str], str | None]:
    """Which pattern of modules_to_not_convert names a module, as the beginning of its name (with `*` for anything) or as its end.

    Source: transformers 5.24 quantizers/quantizers_utils.py (should_convert_module), without its other regular expressions.
    """
    plain = {p.rstrip("."): p for p in patterns if "*" not in p}
    globs = [p for p in patterns if "*" in p]

    def pattern_of(module: str) -> str | None:
        parts = module.split(".")
        heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
        tails = [".".join(parts[i:]) for i in range(1, len(parts))]
        exact = (plain[n] for n in (*heads, *tails) if n in plain)
        return next(exact, None) or next((g for g in globs for h in heads if fnmatchcase(h, g)), None)

    return pattern_of


def meant_name(name: str, method: str | None) -> str | None:
    """The name of the weight that a stored tensor stands for; None for scales, which go into their weight."""
    if method == "mxfp4":
        return None if name.endswith(SCALES) else name.removesuffix(BLOCKS)
    return None if name.endswith(SUFFIX) else name


def _scaled_all(
    tensors: Mapping[str, TensorMetadata], block: tuple[int, int], meant: str, where: str
) -> tuple[dict[str, TensorMetadata], list[str]]:
    result, done = {}, []
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX):
            if name.removesuffix(SUFFIX) not in tensors:
                raise CkptError("E307", "a scale has no weight", where=f"{where}: {name}", expected=name.removesuffix(SUFFIX))
            continue
        scales = tensors.get(name + SUFFIX)
        result[name] = tensor if scales is None else _scaled(tensor, scales, block, meant, where)
        done += [name] if scales is not None else []
    return result, done


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


def load_scaled(read: Read, offset: int, shape: Shape, strides: Shape, stored: str, scale: Scale, read_scales: Read) -> np.ndarray:
    """float32 values of a box of a quantised tensor, read with `read`, its scales with `read_scales`."""
    if scale.packed:
        return load_packed(read, offset, shape, strides, scale, read_scales)
    return apply_scales(load_block(read, offset, shape, strides, stored), scale, read_scales)


def apply_scales(values: np.ndarray, scale: Scale, read: Read) -> np.ndarray:
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

