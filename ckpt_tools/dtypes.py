"""One table of dtypes: the name used everywhere in ckpt, its size, and what each file format calls it.

The name is torch's without the `torch.` prefix ("bfloat16", "float8_e4m3fn"). numpy and ml_dtypes are imported only when
an array is asked for, so that listing and planning cost neither.
Sources: safetensors 0.8.0 (codes), torch 2.13 (storage class names), ml-dtypes 0.5 (numpy types).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CkptError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype: `bits` per element, `safetensors` code or None, `storage` = torch's typed storage class or None,
    `numpy` = attribute of numpy or (with `ml`) of ml_dtypes."""

    name: str
    bits: int
    safetensors: str | None
    storage: str | None
    numpy: str | None
    ml: bool = False
    floating: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element; sub-byte types raise because they have no address."""
        if self.bits % 8:
            raise CkptError("E206", f"dtype {self.name} packs several elements into a byte and cannot be addressed")
        return self.bits // 8

    def to_numpy(self) -> np.dtype:
        """The numpy dtype (from ml_dtypes for the small floats)."""
        if self.numpy is None:
            raise CkptError("E206", f"dtype {self.name} has no numpy equivalent")
        if self.ml:
            import ml_dtypes

            return np_dtype(getattr(ml_dtypes, self.numpy))
        return np_dtype(self.numpy)


def np_dtype(value: object) -> np.dtype:
    """numpy.dtype(value), with numpy imported on first use."""
    import numpy

    return numpy.dtype(value)  # type: ignore[call-overload, no-any-return]


# In the order in which the safetensors library ranks dtypes (its writer stores higher ranks first).
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("bool", 8, "BOOL", "BoolStorage", "bool"),
        DType("float4_e2m1fn_x2", 8, "F4", None, "float4_e2m1fn", ml=True, floating=True),
        DType("float6_e2m3fn", 6, "F6_E2M3", None, None, floating=True),
        DType("float6_e3m2fn", 6, "F6_E3M2", None, None, floating=True),
        DType("uint8", 8, "U8", "ByteStorage", "uint8"),
        DType("int8", 8, "I8", "CharStorage", "int8"),
        DType("float8_e5m2", 8, "F8_E5M2", None, "float8_e5m2", ml=True, floating=True),
        DType("float8_e4m3fn", 8, "F8_E4M3", None, "float8_e4m3fn", ml=True, floating=True),
        DType("float8_e8m0fnu", 8, "F8_E8M0", None, "float8_e8m0fnu", ml=True, floating=True),
        DType("float8_e4m3fnuz", 8, "F8_E4M3FNUZ", None, "float8_e4m3fnuz", ml=True, floating=True),
        DType("float8_e5m2fnuz", 8, "F8_E5M2FNUZ", None, "float8_e5m2fnuz", ml=True, floating=True),
        DType("int16", 16, "I16", "ShortStorage", "int16"),
        DType("uint16", 16, "U16", None, "uint16"),
        DType("float16", 16, "F16", "HalfStorage", "float16", floating=True),
        DType("bfloat16", 16, "BF16", "BFloat16Storage", "bfloat16", ml=True, floating=True),
        DType("int32", 32, "I32", "IntStorage", "int32"),
        DType("uint32", 32, "U32", None, "uint32"),
        DType("float32", 32, "F32", "FloatStorage", "float32", floating=True),
        DType("complex64", 64, "C64", "ComplexFloatStorage", "complex64"),
        DType("float64", 64, "F64", "DoubleStorage", "float64", floating=True),
        DType("int64", 64, "I64", "LongStorage", "int64"),
        DType("uint64", 64, "U64", None, "uint64"),
        DType("complex128", 128, None, "ComplexDoubleStorage", "complex128"),
    )
}
RANK: dict[str, int] = {name: rank for rank, name in enumerate(DTYPES)}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
BY_STORAGE: dict[str, DType] = {d.storage: d for d in DTYPES.values() if d.storage}
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def dtype(name: str) -> DType:
    """The DType called `name` ("bfloat16", "torch.bfloat16", "bf16"); CkptError E206 when there is none."""
    short = name.removeprefix("torch.")
    short = ALIASES.get(short, short)
    try:
        return DTYPES[short]
    except KeyError:
        raise CkptError("E206", f"unknown dtype {name!r}", expected=", ".join(DTYPES)) from None
