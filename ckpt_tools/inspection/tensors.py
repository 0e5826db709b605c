"""The tensors of a checkpoint as a person looks at them: folded over layers, listed, one layer at a time, or grouped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from ..checkpoint import Checkpoint, is_optimizer
from ..dtypes import DTYPES
from ..naming import StoredKey, parse_key
from ..tensors import Chunk, Shape, TensorMetadata

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.|$)")
_GROUPED_EXPERT = re.compile(r"(?<=\.mlp\.experts\.linear_fc[12]\.)(weight|bias)[0-9]+$")  # Transformer Engine's grouped linear layers
_BUCKET_NUMBER = re.compile(r"(?<=_idx_)[0-9]+")
_FIRST_NUMBER = re.compile(r"(?<=\.)([0-9]{1,9}|\*)(?=\.|$)")
_DIGITS = re.compile(r"([0-9]{1,18})")
_STATE_PREFIX = re.compile(r"^(?P<prefix>(?:chained_\d+\.)?optimizer\.state\.(?P<state>[a-z0-9_]+)\.)")


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that differ only in their layer and expert number.

    part        "weights" or "optimizer";   state  optimizer state they are ("exp_avg", ...), "" for weights and flat buffers.
    name        canonical name with `*` for the numbers;   shape  of one of them.
    count       how many there are;   stored  in how many stored tensors (fewer when layers or experts are stacked).
    numbers     the values of the first `*`, in order;   inner  how many there are per value (experts), 0 when that differs.
    """

    part: str
    state: str
    name: str
    dtype: str
    shape: Shape
    count: int
    stored: int
    numbers: tuple[int, ...]
    inner: int

    @property
    def parameters(self) -> int:
        """Elements of all of them."""
        return prod(self.shape) * self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.parameters * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a listing: a stored tensor, or one layer and expert of it. pieces: stored boxes; files: names of the files they lie in."""

    part: str
    name: str
    dtype: str
    shape: Shape
    nbytes: int
    pieces: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A line of `--by`: what is grouped, how many stored tensors (by file: pieces), their elements and bytes; size of the file, if one."""

    name: str
    tensors: int
    parameters: int
    nbytes: int
    file_size: int | None = None


def matches(name: str, pattern: str | None) -> bool:
    """Whether a name matches a shell pattern, whose `*` also passes dots; without a wildcard, a part of the name is enough."""
    if not pattern:
        return True
    if not any(c in pattern for c in "*?["):
        return pattern in name
    return fnmatchcase(name, pattern)


def select(tensors: Mapping[str, TensorMetadata], pattern: str | None, *, hf: bool) -> dict[str, TensorMetadata]:
    """The tensors whose stored or canonical name (of any layer) matches `pattern`."""
    if not pattern:
        return dict(tensors)
    return {n: t for n, t in tensors.items() if matches(n, pattern) or any(matches(c, pattern) for c, _ in canonical_names(t, hf))}


def part_of(name: str) -> str:
    """ "weights" or "optimizer"."""
    return "optimizer" if is_optimizer(name) else "weights"


LAYERS, LAYERS_AND_EXPERTS = 2**14, 2**20  # more than any model has
_HF = StoredKey("", "", False, False, "")


def leading_axes(tensor: TensorMetadata, hf: bool) -> tuple[StoredKey, int]:
    """The key taken apart, and how many leading axes stand for layers and experts: 0 when it is not stored that way (HF never is)."""
    if hf:
        return _HF, 0
    key = parse_key(tensor.fqn)
    lead = key.layers + key.experts
    sizes = tensor.global_shape[:lead]
    # A shape is only a claim: nobody is to write down a billion layers because an index says so.
    return key, lead if len(sizes) == lead and prod(sizes) <= LAYERS_AND_EXPERTS and (not sizes or sizes[0] <= LAYERS) else 0


def canonical_names(tensor: TensorMetadata, hf: bool) -> Iterator[tuple[str, Shape]]:
    """(canonical name, index along the leading axes) of every layer and expert that a stored tensor holds."""
    key, lead = leading_axes(tensor, hf)
    if not lead:
        yield tensor.fqn, ()
        return
    layers = range(tensor.global_shape[0]) if key.layers else (None,)
    experts = range(tensor.global_shape[lead - 1]) if key.experts else (None,)
    for layer in layers:
        for expert in experts:
            name = key.prefix + key.template.replace("{l}", str(layer)).replace("{e}", str(expert)) + key.half
            yield name, tuple(i for i in (layer, expert) if i is not None)


def fold(tensors: Mapping[str, TensorMetadata], *, hf: bool) -> list[Kind]:
    """The kinds of tensors in people's order: weights before optimizer state, the embedding first, attention before MLP."""
    found: dict[tuple[str, str, Shape], tuple[set[int], int, int]] = {}
    for fqn, tensor in tensors.items():
        key, lead = leading_axes(tensor, hf)
        shape = tensor.global_shape[lead:]
        count = prod(tensor.global_shape[:lead])
        if lead:
            name = key.template.replace("{l}", "*").replace("{e}", "*")
            first = range(tensor.global_shape[0])
            name = key.prefix + _GROUPED_EXPERT.sub(r"\1*", _NUMBER.sub("*", name)) + key.half
            if not key.layers:  # the layer is in the key, the axis is the experts'
                match = _NUMBER.search(key.template)
                first = range(int(match[0]), int(match[0]) + 1) if match else first
        else:
            numbers = _NUMBER.findall(fqn)
            name = _BUCKET_NUMBER.sub("*", _GROUPED_EXPERT.sub(r"\1*", _NUMBER.sub("*", fqn)))
            first = range(int(numbers[0]), int(numbers[0]) + 1) if numbers else range(0)
        at = (name, tensor.dtype, shape)
        known, total, stored = found.get(at, (set(), 0, 0))
        known.update(first)
        found[at] = known, total + count, stored + 1
    kinds = []
    for (name, dtype, shape), (known, count, stored) in found.items():
        match = _STATE_PREFIX.match(name)
        inner = count // len(known) if known and count % len(known) == 0 else 0 if known else count
        kinds.append(Kind(part_of(name), match["state"] if match else "", name, dtype, shape, count, stored, tuple(sorted(known)), inner))
    return sorted(kinds, key=lambda k: _place(k.name))


def _place(name: str) -> tuple[object, ...]:
    """Sort key of people's order: weights, then optimizer state; embedding, layers, final norm, head; attention before MLP; 2 before 10."""
    state = _STATE_PREFIX.match(name)
    bare = name[state.end() :] if state else name
    stack, layered, inside = _FIRST_NUMBER.split(bare, maxsplit=1) if _FIRST_NUMBER.search(bare) else (bare, "", "")
    where = 1 if layered else 0 if "embed" in bare else 3 if "head" in bare or "output_layer" in bare else 2
    module = inside.lstrip(".").partition(".")[0]
    step = 0 if module.startswith("input") else 2 if "norm" in module else 1 if "att" in module else 3
    words = tuple((0, int(w), "") if _DIGITS.fullmatch(w) else (1, 0, w) for w in _DIGITS.split(inside or bare))
    layer = int(layered) if layered.isdecimal() else -1
    return is_optimizer(name), state["prefix"] if state else "", where, stack if layered else "", layer, step, words


def span(numbers: Iterable[int]) -> str:
    """ "0-25", "0, 2, 4" or "0-2, 27": numbers in order, runs joined."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def entries(tensors: Mapping[str, TensorMetadata], pattern: str | None = None, *, hf: bool, layers: bool = False) -> list[Entry]:
    """A listing of the stored tensors, or with `layers` of every layer and expert under its canonical name, in people's order.

    No tensor file is opened.
    """
    return sorted(_entries(tensors, pattern, hf, layers), key=lambda e: _place(e.name))


def _entries(tensors: Mapping[str, TensorMetadata], pattern: str | None, hf: bool, layers: bool) -> Iterator[Entry]:
    for fqn, tensor in tensors.items():
        bits = DTYPES[tensor.dtype].bits
        lead = leading_axes(tensor, hf)[1] if layers else 0
        if not lead:
            if matches(fqn, pattern):
                size = tensor.numel * bits // 8
                yield Entry(part_of(fqn), fqn, tensor.dtype, tensor.global_shape, size, len(tensor.chunks), _files(tensor.chunks))
            continue
        shape = tensor.global_shape[lead:]
        pieces: dict[Shape, list[Chunk]] = {}
        for chunk in tensor.chunks:
            for index in _indexes(chunk, lead):
                pieces.setdefault(index, []).append(chunk)
        for name, index in canonical_names(tensor, hf):
            if matches(name, pattern):
                chunks = pieces.get(index, [])
                yield Entry(part_of(fqn), name, tensor.dtype, shape, prod(shape) * bits // 8, len(chunks), _files(chunks))


def _indexes(chunk: Chunk, lead: int) -> Iterator[Shape]:
    first = range(chunk.global_offset[0], chunk.global_offset[0] + chunk.local_shape[0])
    if lead == 1:
        yield from ((i,) for i in first)
        return
    second = range(chunk.global_offset[1], chunk.global_offset[1] + chunk.local_shape[1])
    yield from ((i, j) for i in first for j in second)


def _files(chunks: Iterable[Chunk]) -> tuple[str, ...]:
    return tuple(sorted({os.path.basename(c.extent.path) for c in chunks if c.extent is not None}))


def group(tensors: Mapping[str, TensorMetadata], how: str, *, hf: bool) -> list[Group]:
    """Stored tensors grouped by "module", "dtype" or "file", largest first (files by name)."""
    if how == "file":
        return _by_file(tensors)
    totals: dict[str, list[int]] = {}
    for kind in fold(tensors, hf=hf):
        name = kind.dtype if how == "dtype" else _module(kind)
        total = totals.setdefault(name, [0, 0, 0])
        for i, value in enumerate((kind.stored, kind.parameters, kind.nbytes)):
            total[i] += value
    groups = [Group(name, count, elements, size) for name, (count, elements, size) in totals.items()]
    return sorted(groups, key=lambda g: -g.nbytes) if how == "dtype" else groups


def _module(kind: Kind) -> str:
    if kind.part == "optimizer":
        return f"optimizer.state.{kind.state}" if kind.state else kind.name.rpartition(".")[0]
    return kind.name.rpartition(".")[0] or kind.name


def _by_file(tensors: Mapping[str, TensorMetadata]) -> list[Group]:
    totals: dict[str, list[int]] = {}
    for tensor in tensors.values():
        bits = DTYPES[tensor.dtype].bits
        for chunk in tensor.chunks:
            if chunk.extent is None:
                continue
            total = totals.setdefault(chunk.extent.path, [0, 0, 0])
            elements = prod(chunk.local_shape)
            total[0] += 1
            total[1] += elements
            total[2] += elements * bits // 8
    return [Group(os.path.basename(p), pieces, elements, size, _size(p)) for p, (pieces, elements, size) in sorted(totals.items())]


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def located(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorMetadata], pattern: str | None = None, *, hf: bool, layers: bool = False
) -> dict[str, TensorMetadata]:
    """Tensors of a checkpoint with their bytes located, in people's order; with `layers` every layer and expert on its own, those matching.

    Errors: E207, E217, E220 when pieces are missing or are not what the index says.
    """
    found = checkpoint.locate_all(list(tensors))
    if layers:
        found = {n: t for tensor in found.values() for n, t in _taken_apart(tensor, hf) if matches(n, pattern)}
    return {n: found[n] for n in sorted(found, key=_place)}


def _taken_apart(tensor: TensorMetadata, hf: bool) -> Iterator[tuple[str, TensorMetadata]]:
    lead = leading_axes(tensor, hf)[1]
    if not lead:
        yield tensor.fqn, tensor
        return
    rest = tuple(range(lead, len(tensor.global_shape)))
    parts: dict[Shape, list[Chunk]] = {}
    for chunk in tensor.chunks:
        offset, shape = chunk.global_offset[lead:], chunk.local_shape[lead:]
        for index in _indexes(chunk, lead):
            parts.setdefault(index, []).append(chunk.cut((*index, *offset), (*(1,) * lead, *shape)).moved(offset, rest))
    for name, index in canonical_names(tensor, hf):
        yield name, TensorMetadata(name, tensor.dtype, tensor.global_shape[lead:], tuple(parts.get(index, ())))
