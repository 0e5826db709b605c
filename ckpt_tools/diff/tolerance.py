"""How much two elements may be apart and still count as equal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..errors import CkptError

_TEXT = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*(?P<unit>|abs|rel|ulp|%)")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """kind: "abs" (|a - b|), "rel" (|a - b| / max(|a|, |b|)) or "ulp" (representable values apart); value: the most that is allowed."""

    kind: str
    value: float


EXACT = Tolerance("abs", 0.0)


def parse_tolerance(text: str) -> Tolerance:
    """ "1e-6" and "1e-6abs" absolute, "1e-3rel" and "0.1%" relative, "2ulp" in representable values. CkptError E570."""
    match = _TEXT.fullmatch(text.strip())
    value = float(match["number"]) if match else math.nan
    if match is None or not math.isfinite(value):
        raise CkptError("E570", "this is not a tolerance", found=repr(text[:60]), expected="1e-6, 1e-3rel, 0.1% or 2ulp")
    if match["unit"] == "%":
        return Tolerance("rel", value / 100)
    return Tolerance(match["unit"] or "abs", value)
