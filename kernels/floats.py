"""The small floating formats as numbers, and the one rule for NaN that every backend follows.

Rule: rounding is to nearest even; what lies beyond the largest finite value becomes infinity (NaN in float8_e4m3fn, which has no
infinity; torch 2.13 saturates there, ml_dtypes does not). A NaN that is widened keeps its bits, shifted up; a NaN that is narrowed becomes
quiet and keeps the upper bits of its payload. What arithmetic makes NaN (dequantisation) is always the positive quiet NaN with payload
zero, because processors disagree about its bits.
Sources: IEEE 754-2019 section 6.2; OCP 8-bit floating point specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CkptError

FLOAT32_INFINITY = 0x7F800000
FLOAT32_NAN = 0x7FC00000


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Bits of the exponent and of the mantissa after the sign; finite = there is no infinity and only all ones is NaN."""

    exponent: int
    mantissa: int
    finite: bool = False

    @property
    def bits(self) -> int:
        """Bits per element."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is added to an exponent to store it."""
        return int(2 ** (self.exponent - 1)) - 1

    @property
    def first_beyond(self) -> int:
        """The pattern that follows the largest finite value: infinity, or the NaN of a finite format."""
        top = ((1 << self.exponent) - 1) << self.mantissa
        return top | ((1 << self.mantissa) - 1) if self.finite else top

    @property
    def quiet(self) -> int:
        """Bits that a narrowed NaN always has; the rest of its mantissa is the upper payload."""
        top = ((1 << self.exponent) - 1) << self.mantissa
        return self.first_beyond if self.finite else top | (1 << (self.mantissa - 1))

    @property
    def largest(self) -> float:
        """The largest finite value."""
        pattern = self.first_beyond - 1
        fraction = pattern & ((1 << self.mantissa) - 1)
        return float(2.0 ** ((pattern >> self.mantissa) - self.bias) * (1 + fraction / 2**self.mantissa))

    @property
    def last_tie(self) -> float:
        """Halfway from the largest finite value to what would follow it."""
        exponent = ((self.first_beyond - 1) >> self.mantissa) - self.bias
        return self.largest + float(2.0 ** (exponent - self.mantissa - 1))


FORMATS: dict[str, FloatFormat] = {
    "float32": FloatFormat(8, 23),
    "bfloat16": FloatFormat(8, 7),
    "float16": FloatFormat(5, 10),
    "float8_e4m3fn": FloatFormat(4, 3, finite=True),
    "float8_e5m2": FloatFormat(5, 2),
}


def float_format(name: str) -> FloatFormat:
    """The format called `name`; CkptError E206 for a dtype that the kernels do not compute with."""
    try:
        return FORMATS[name]
    except KeyError:
        raise CkptError("E206", f"the kernels do not compute with {name}", expected=", ".join(FORMATS)) from None
