"""Ways in which one tensor may hold the elements of others in the wrong places, each as a view of A that B would then be equal to.

Every function takes (name, Scene) and yields guesses: (kind, sentence about B, view of A). A guess is cheap: it is arithmetic on boxes;
whoever asked compares a few rows of it with B and reads the rest only when these agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..families.dimensions import Dimensions
from ..tensors import Shape, TensorMetadata

MANY = 1 << 16  # pieces of a view beyond which a guess is not worth its arithmetic
SHARDS = (2, 4, 8)
_QKV = re.compile(r"(?P<head>.*self_attn\.)(?P<which>[qkv])_proj\.(?P<kind>weight|bias)$")
_MLP = re.compile(r"(?P<head>.*\.)(?P<which>gate_proj|up_proj|w1|w3)\.(?P<kind>weight|bias)$")
_PARTNER = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_FUSED_QKV = re.compile(r".*self_attention\.linear_qkv\.(weight|bias)$")
_FUSED_FC1 = re.compile(r".*mlp\..*linear_fc1\.(weight|bias)\d*$|.*mlp\.linear_fc1\.(weight|bias)$")


class Guess(NamedTuple):
    """kind and text of a cause, and what B's tensor would be equal to if it were the one."""

    kind: str
    text: str
    view: TensorMetadata


@dataclass(frozen=True, slots=True)
class Scene:
    """What guesses are made from: tensors of both sides under common names, sizes of the model where known."""

    a: Mapping[str, TensorMetadata]
    b: Mapping[str, TensorMetadata]
    dims: Dimensions | None


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, start + count) of a source tensor."""

    source: TensorMetadata
    start: int
    count: int


def stacked(parts: Sequence[Part]) -> TensorMetadata:
    """One tensor whose rows are those of the parts (at least one), in order; all have the same other axes and dtype."""
    chunks, at, first = [], 0, parts[0].source
    rest = first.global_shape[1:]
    for part in parts:
        for piece in part.source.region((part.start, *(0,) * len(rest)), (part.count, *rest)):
            chunks.append(piece.moved((piece.global_offset[0] - part.start + at, *piece.global_offset[1:])))
        at += part.count
    return TensorMetadata(first.fqn, first.dtype, (at, *rest), tuple(chunks))


def turned(tensor: TensorMetadata) -> TensorMetadata:
    """The transpose of a matrix."""
    chunks = tuple(c.moved((c.global_offset[1], c.global_offset[0]), (1, 0)) for c in tensor.chunks)
    return TensorMetadata(tensor.fqn, tensor.dtype, tensor.global_shape[::-1], chunks)


def transposed(name: str, scene: Scene) -> Iterator[Guess]:
    """The matrix with rows and columns exchanged."""
    a = scene.a[name]
    if len(a.global_shape) == 2 and a.global_shape[::-1] == scene.b[name].global_shape:
        yield Guess("transposed", "is transposed", turned(a))


def halves_swapped(name: str, scene: Scene) -> Iterator[Guess]:
    """Megatron's linear_fc1 as [up; gate]."""
    a = scene.a[name]
    if _FUSED_FC1.match(name) and a.global_shape and a.global_shape[0] % 2 == 0:
        half = a.global_shape[0] // 2
        yield Guess("gate-up-swapped", "has gate and up exchanged", stacked([Part(a, half, half), Part(a, 0, half)]))


def gate_up_by_rank(name: str, scene: Scene) -> Iterator[Guess]:
    """Rank after rank [gate; up] joined without taking them apart, or a whole [gate; up] cut for ranks as if it were so joined."""
    pair = _gate_up(name, scene)
    if pair is None:
        return
    gate, up, wanted = pair
    rows = gate.count
    for ranks in SHARDS:
        if rows % ranks:
            continue
        step = rows // ranks
        joined = [p for r in range(ranks) for p in (_part(gate, r * step, step), _part(up, r * step, step))]
        text = f"holds [gate; up] of {ranks} tensor-parallel ranks one after the other, as if gate and up had not been cut apart"
        yield Guess("gate-up-by-rank", text, _rows(joined, wanted))
        both = [gate, up]
        whole = stacked(both)
        back = [Part(whole, (2 * r + half) * step, step) for half in (0, 1) for r in range(ranks)]
        text = f"has gate and up mixed, as if A's were stored for {ranks} tensor-parallel ranks one after the other"
        yield Guess("gate-up-by-rank", text, _rows(back, wanted))


def qkv_order(name: str, scene: Scene) -> Iterator[Guess]:
    """Query, key and value rows one after the other where Megatron interleaves them by query group, or the other way round."""
    found = _qkv(name, scene)
    if found is None or scene.dims is None:
        return
    parts, which, fused = found
    groups, per, size = (scene.dims.symbols[s] for s in ("G", "R", "d"))
    if groups < 2:
        return
    heads = (per * size, size, size)
    interleaved = [_part(p, g * n, n) for g in range(groups) for p, n in zip(parts, heads, strict=True)]
    joined = list(parts)
    texts = (
        "has q, k and v one after the other where they should be interleaved by query group",
        "has q, k and v interleaved by query group where they should stand one after the other",
    )
    if fused is not None:
        yield Guess("qkv-not-interleaved", texts[0], stacked(joined))
        whole, starts = fused, [0, *_sums(h * groups for h in heads)]
        mixed = [Part(whole, starts[i] + g * n, n) for g in range(groups) for i, n in enumerate(heads)]
        yield Guess("qkv-not-interleaved", texts[1], stacked(mixed))
        return
    # B's projection was cut out of a fused tensor T by the wrong rule.
    whole, width, before = stacked(joined), sum(heads), sum(heads[:which])
    yield Guess("qkv-not-interleaved", texts[0], stacked([Part(whole, g * width + before, heads[which]) for g in range(groups)]))
    whole, start = stacked(interleaved), sum(h * groups for h in heads[:which])
    yield Guess("qkv-not-interleaved", texts[1], stacked([Part(whole, start, heads[which] * groups)]))


def rotary_order(name: str, scene: Scene) -> Iterator[Guess]:
    """Rows of each q and k head in pairs (Meta's original files) where Hugging Face has halves, or the other way round."""
    found = _qkv(name, scene)
    if found is None or scene.dims is None:
        return
    parts, which, fused = found
    groups, per, size = (scene.dims.symbols[s] for s in ("G", "R", "d"))
    if size % 2 or size < 4 or (fused is None and which == 2):
        return
    half = size // 2
    to_pairs = [i // 2 + (i % 2) * half for i in range(size)]  # new row i is that row of halves
    to_halves = [2 * (i % half) + i // half for i in range(size)]
    for order, text in (
        (to_pairs, "has the rows of each head in pairs, as Meta's original files, where A has halves"),
        (to_halves, "has the rows of each head in halves, as Hugging Face, where A has pairs"),
    ):
        if fused is None:
            source, heads = parts[which], groups * (per if which == 0 else 1)
            if heads * size > MANY:
                return
            rows = [_part(source, h * size + i, 1) for h in range(heads) for i in order]
        else:
            if fused.global_shape[0] > MANY:
                return
            blocks = per + 2
            rows = []
            for g in range(groups):
                for block in range(blocks):
                    start = (g * blocks + block) * size
                    rows += [Part(fused, start + (i if block < per + 1 else n), 1) for n, i in enumerate(order)]
        yield Guess("rotary-order", text, stacked(rows))


def _part(whole: Part, start: int, count: int) -> Part:
    return Part(whole.source, whole.start + start, count)


def _rows(parts: Sequence[Part], wanted: tuple[int, int] | None) -> TensorMetadata:
    """All rows of the parts, or rows [start, start + count) of them."""
    whole = stacked(parts)
    return whole if wanted is None else stacked([Part(whole, *wanted)])


def _sums(values: Iterable[int]) -> list[int]:
    total, result = 0, []
    for value in values:
        total += value
        result.append(total)
    return result


def _gate_up(name: str, scene: Scene) -> tuple[Part, Part, tuple[int, int] | None] | None:
    """(A's gate rows, its up rows, which rows of [gate; up] this tensor is or None for all)."""
    a = scene.a[name]
    if _FUSED_FC1.match(name) and a.global_shape and a.global_shape[0] % 2 == 0:
        half = a.global_shape[0] // 2
        return Part(a, 0, half), Part(a, half, half), None
    match = _MLP.match(name)
    if match is None:
        return None
    other = scene.a.get(f"{match['head']}{_PARTNER[match['which']]}.{match['kind']}")
    if other is None or other.global_shape != a.global_shape or other.dtype != a.dtype:
        return None
    rows, first = a.global_shape[0], match["which"] in ("gate_proj", "w1")
    gate, up = (a, other) if first else (other, a)
    return Part(gate, 0, rows), Part(up, 0, rows), (0 if first else rows, rows)


def _qkv(name: str, scene: Scene) -> tuple[tuple[Part, Part, Part], int, TensorMetadata | None] | None:
    """(A's q, k, v as row ranges, which of them this tensor is, the fused tensor if it is that). Of a fused one q, k and v are not ranges
    of rows unless there is one group: the parts then are views."""
    a, dims = scene.a[name], scene.dims
    if dims is None or not a.global_shape:
        return None
    groups, per, size = (dims.symbols[s] for s in ("G", "R", "d"))
    rows = (groups * per * size, groups * size, groups * size)
    if _FUSED_QKV.match(name):
        if a.global_shape[0] != sum(rows):
            return None
        width, at = (per + 2) * size, (0, per * size, (per + 1) * size)
        views = [stacked([Part(a, g * width + s, n // groups) for g in range(groups)]) for s, n in zip(at, rows, strict=True)]
        q, k, v = (Part(t, 0, n) for t, n in zip(views, rows, strict=True))
        return (q, k, v), 0, a
    match = _QKV.match(name)
    if match is None:
        return None
    found = [scene.a.get(f"{match['head']}{w}_proj.{match['kind']}") for w in "qkv"]
    tensors = [t for t in found if t is not None and t.dtype == a.dtype]
    if len(tensors) < 3 or any(t.global_shape[:1] != (n,) for t, n in zip(tensors, rows, strict=True)):
        return None
    q, k, v = (Part(t, 0, n) for t, n in zip(tensors, rows, strict=True))
    return (q, k, v), "qkv".index(match["which"]), None


def parts_along(tensor: TensorMetadata, axis: int, order: Sequence[int]) -> TensorMetadata:
    """The tensor cut into len(order) equal parts along an axis and put together in that order."""
    step = tensor.global_shape[axis] // len(order)
    chunks = []
    for at, part in enumerate(order):
        offset, shape = [0] * len(tensor.global_shape), list(tensor.global_shape)
        offset[axis], shape[axis] = part * step, step
        for piece in tensor.region(tuple(offset), tuple(shape)):
            moved = list(piece.global_offset)
            moved[axis] += (at - part) * step
            chunks.append(piece.moved(tuple(moved)))
    return TensorMetadata(tensor.fqn, tensor.dtype, tensor.global_shape, tuple(chunks))


GUESSES: tuple[Callable[[str, Scene], Iterator[Guess]], ...] = (
    transposed,
    halves_swapped,
    qkv_order,
    rotary_order,
    gate_up_by_rank,
)
__all__ = ["GUESSES", "Guess", "Scene", "Shape", "parts_along"]
