"""What a comparison found: pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..notes import Note
from ..tensors import Shape


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor that only one side has. nearest: the most similar names of the other side that it lacks here."""

    name: str
    dtype: str
    shape: Shape
    nearest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unlike:
    """Something that both sides have and that differs without looking at values: a shape, a dtype, a setting; as text."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Values:
    """How the values of one tensor differ.

    count      elements compared;    differing   of these, how many differ (bits when the dtypes are the same, else values).
    beyond     of the differing ones, how many by more than the tolerance.
    max_abs    largest |a - b| (infinite between a NaN and a number), and at which index;    max_rel  largest |a - b| / max(|a|, |b|).
    max_ulp    most representable values between a and b (of the narrower dtype when they differ); None for complex numbers.
    cosine     of the angle between a and b as vectors, over elements finite in both; None when one of them is all zero.
    nan_a, nan_b   NaN on this side only;     squares_a, squares_b  sum of squares.
       histogram  floor(log10 |a - b|) -> elements, for finite differences that are not 0.
    first      index of the first differing element.
    """

    name: str
    dtype_a: str
    dtype_b: str
    shape: Shape
    count: int
    differing: int
    beyond: int
    max_abs: float
    max_abs_at: Shape
    max_rel: float
    max_ulp: int | None
    cosine: float | None
    nan_a: int
    nan_b: int
    squares_a: float
    squares_b: float
    first: Shape
    histogram: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely reason. kind: stable name ("transposed", "gate-up-swapped", ...); text: one sentence about B as seen from A; tensors:
    names it explains; exact: whether it gives every element of them."""

    kind: str
    text: str
    tensors: tuple[str, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class SideFacts:
    """One side: path as given, folder that was read, format, iteration and how it was chosen."""

    given: str
    directory: str
    format: str
    label: str | None
    chosen: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The whole answer. naming: "hf" or "mcore"; tensors, elements, nbytes: what was compared (bytes of A)."""

    a: SideFacts
    b: SideFacts
    naming: str
    tensors: int
    elements: int
    nbytes: int
    only_a: tuple[Missing, ...]
    only_b: tuple[Missing, ...]
    shapes: tuple[Unlike, ...]
    dtypes: tuple[Unlike, ...]
    config: tuple[Unlike, ...]
    values: tuple[Values, ...]
    causes: tuple[Cause, ...]
    notes: tuple[Note, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        structure = self.only_a or self.only_b or self.shapes or self.dtypes or self.config
        return not structure and not any(v.beyond for v in self.values)

    @property
    def differing(self) -> int:
        """Elements that differ, of all tensors."""
        return sum(v.differing for v in self.values)

    @property
    def histogram(self) -> dict[int, int]:
        """Decade of |a - b| -> elements, of all tensors."""
        total: dict[int, int] = {}
        for values in self.values:
            for decade, count in values.histogram.items():
                total[decade] = total.get(decade, 0) + count
        return dict(sorted(total.items()))
