"""The reversible relations between HF tensors and Megatron tensors from which every family is built.

A mapping says, for one Megatron tensor, which boxes of which HF tensors lie where in it. It is declared once and read in both
directions; it holds no bytes and knows no file format. Megatron names are canonical: Transformer Engine spelling, global layer and
expert numbers, nothing cut by a parallel layout. `{l}` stands for the layer, `{e}` for the expert.

Sizes are written as text, e.g. "A*d+2*G*d": sums of products of the symbols of Dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ..tensors import Shape
from .dimensions import Dimensions


@dataclass(frozen=True, slots=True)
class Piece:
    """One box that the two sides share.

    source   index into the mapping's HF names.
    hf       offset of the box in the HF tensor;    mcore  offset in the Megatron tensor.
    shape    size of the box along the HF tensor's axes.
    axes     for each Megatron axis the HF axis it is, or -1 for an axis of size 1; None = same axes.
    """

    source: int
    hf: Shape
    mcore: Shape
    shape: Shape
    axes: tuple[int, ...] | None = None


class Mapping(Protocol):
    """hf: HF name templates; mcore: Megatron name template; when: condition on the layer or model ("" = always, see
    Dimensions.holds); optional: may be absent, decided by the tensors that are there; keep_dtype: never cast by --dtype."""

    @property
    def hf(self) -> tuple[str, ...]: ...
    @property
    def mcore(self) -> str: ...
    @property
    def when(self) -> str: ...
    @property
    def optional(self) -> bool: ...
    @property
    def keep_dtype(self) -> bool: ...

    def hf_shapes(self, dims: Dimensions) -> tuple[Shape, ...]:
        """Shape of each HF tensor."""

    def mcore_shape(self, dims: Dimensions) -> Shape:
        """Shape of the whole Megatron tensor."""

    def pieces(self, dims: Dimensions) -> Iterator[Piece]:
        """The boxes; together they cover every HF tensor exactly once, and the Megatron tensor except for padding."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor of a part that Megatron's model does not have: the same name and bytes on both sides, whatever its shape."""

    hf: tuple[str, ...]
    mcore: str
    shape: Shape
    when: str = ""
    optional: bool = True
    keep_dtype: bool = True

    def hf_shapes(self, dims: Dimensions) -> tuple[Shape, ...]:
        return (self.shape,)

    def mcore_shape(self, dims: Dimensions) -> Shape:
        return self.shape

    def pieces(self, dims: Dimensions) -> Iterator[Piece]:
        start = (0,) * len(self.shape)
        yield Piece(0, start, start, self.shape)


@dataclass(frozen=True, slots=True)
class Copy:
    """The same tensor under another name. shape is Megatron's; transposed: HF has it with its axes in the opposite order (Conv1D)."""

    hf: tuple[str, ...]
    mcore: str
    shape: tuple[str, ...]
    when: str = ""
    optional: bool = False
    keep_dtype: bool = False
    transposed: bool = False

    def hf_shapes(self, dims: Dimensions) -> tuple[Shape, ...]:
        shape = dims.shape(self.shape)
        return (shape[::-1] if self.transposed else shape,)

    def mcore_shape(self, dims: Dimensions) -> Shape:
        return dims.shape(self.shape)

    def pieces(self, dims: Dimensions) -> Iterator[Piece]:
        (shape,) = self.hf_shapes(dims)
        axes = tuple(range(len(shape)))[::-1] if self.transposed else None
        yield Piece(0, (0,) * len(shape), (0,) * len(shape), shape, axes)


@dataclass(frozen=True, slots=True)
class Vocab:
    """A table of `vocab` rows in HF and of `padded_vocab` rows in Megatron; the rows after `vocab` are zeros."""

    hf: tuple[str, ...]
    mcore: str
    shape: tuple[str, ...] = ("V", "H")
    when: str = ""
    optional: bool = False
    keep_dtype: bool = False

    def hf_shapes(self, dims: Dimensions) -> tuple[Shape, ...]:
        return (dims.shape(self.shape),)

    def mcore_shape(self, dims: Dimensions) -> Shape:
        return (dims.padded_vocab, *dims.shape(self.shape)[1:])

    def pieces(self, dims: Dimensions) -> Iterator[Piece]:
        shape = dims.shape(self.shape)
        yield Piece(0, (0,) * len(shape), (0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Rows:
    """HF tensors interleaved along axis 0: `groups` times [rows of the first, rows of the second, ...].

    rows  rows per group of each HF tensor; rest = the other axes. One group makes a plain concatenation (gate, up); query groups
    make Megatron's linear_qkv (q heads of the group, its k head, its v head).
    joined      HF has them in one tensor, one after the other;   transposed  with its axes in the opposite order (Conv1D).
    """

    hf: tuple[str, ...]
    mcore: str
    rows: tuple[str, ...]
    rest: tuple[str, ...]
    groups: str = "1"
    when: str = ""
    optional: bool = False
    keep_dtype: bool = False
    joined: bool = False
    transposed: bool = False

    def hf_shapes(self, dims: Dimensions) -> tuple[Shape, ...]:
        groups, rest = dims.size(self.groups), dims.shape(self.rest)
        shapes: tuple[Shape, ...] = tuple((groups * dims.size(r), *rest) for r in self.rows)
        if self.joined:
            shapes = ((sum(s[0] for s in shapes), *rest),)
        return tuple(s[::-1] for s in shapes) if self.transposed else shapes

    def mcore_shape(self, dims: Dimensions) -> Shape:
        return (dims.size(self.groups) * sum(dims.size(r) for r in self.rows), *dims.shape(self.rest))

    def pieces(self, dims: Dimensions) -> Iterator[Piece]:
        rest, position, groups = dims.shape(self.rest), 0, dims.size(self.groups)
        zeros = (0,) * len(rest)
        axes = tuple(range(1 + len(rest)))[::-1] if self.transposed else None
        sizes = [dims.size(r) for r in self.rows]
        starts = [groups * sum(sizes[:i]) if self.joined else 0 for i in range(len(sizes))]
        for group in range(groups):
            for source, size in enumerate(sizes):
                offset, shape = (starts[source] + group * size, *zeros), (size, *rest)
                if self.transposed:
                    offset, shape = offset[::-1], shape[::-1]
                yield Piece(0 if self.joined else source, offset, (position, *zeros), shape, axes)
                position += size


def qkv(attention: str, suffix: str = "weight", *, optional: bool = False, q: str = "q_proj", k: str = "k_proj", v: str = "v_proj") -> Rows:
    """q, k, v projections of `attention` (an HF prefix) -> linear_qkv, per query group: R query heads, one key head, one value head."""
    rest = ("H",) if suffix == "weight" else ()
    hf = tuple(f"{attention}.{name}.{suffix}" for name in (q, k, v))
    return Rows(hf, f"decoder.layers.{{l}}.self_attention.linear_qkv.{suffix}", ("R*d", "d", "d"), rest, groups="G", optional=optional)


def joined_qkv(name: str, mcore: str, *, transposed: bool = False) -> Rows:
    """One HF tensor of all query rows, all key rows, all value rows -> linear_qkv; a weight when `mcore` ends so, else a bias."""
    rest = ("H",) if mcore.endswith("weight") else ()
    return Rows((name,), mcore, ("R*d", "d", "d"), rest, groups="G", joined=True, transposed=transposed and bool(rest))


def gate_up(hf: tuple[str, str], mcore: str, ffn: str = "F", *, when: str = "", bias: bool = False, optional: bool = False) -> Rows:
    """gate and up projections -> linear_fc1 = [gate; up]."""
    return Rows(hf, mcore, (ffn, ffn), () if bias else ("H",), when=when, optional=optional)
