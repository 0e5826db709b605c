"""The likely causes of differences: each guess is tried on a few rows, believed only when it gives every element, and told once for all
tensors that it explains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ..dtypes import dtype
from ..families.dimensions import Dimensions
from ..lazy import read_box
from ..tensors import TensorMetadata
from .changed import CHANGES, WEAK
from .permuted import rows_permuted, shards_permuted
from .reading import bits, same_bits
from .rearranged import GUESSES, Scene
from .result import Cause, Values

EXAMINED = 400  # tensors whose cause is looked for, evenly spread over all that differ
SAMPLE = 32  # elements by which a tensor is looked up among those of other names
CANDIDATES = 4  # tensors with the same sample that are compared whole
SAME_NORM = 1e-6  # sums of squares of the same numbers in another order agree at least so well in float64
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)|(?<=\.linear_fc[12]\.weight)\d+$|(?<=\.linear_fc[12]\.bias)\d+$")
_GATE_UP = re.compile(r"\.(gate_proj|up_proj|w1|w3)\.")


class _Found:
    """What was found about tensors, put together: (kind, text) -> names."""

    def __init__(self) -> None:
        self.named: dict[tuple[str, str, bool], list[str]] = {}

    def add(self, kind: str, text: str, exact: bool, name: str) -> None:
        self.named.setdefault((kind, text, exact), []).append(name)

    def causes(self) -> list[Cause]:
        made = [Cause(kind, text, tuple(names), exact) for (kind, text, exact), names in self.named.items()]
        return sorted(made, key=lambda c: (not c.exact, -len(c.tensors)))


def find_causes(
    a: Mapping[str, TensorMetadata],
    b: Mapping[str, TensorMetadata],
    dims: Dimensions | None,
    values: Sequence[Values],
    shapes: Sequence[str],
    threads: int = 2,
) -> list[Cause]:
    """Causes of the tensors in `values` (same shape, other values) and `shapes` (other shape), and of names that only one side has."""
    from concurrent.futures import ThreadPoolExecutor

    scene = Scene(a, b, dims)
    found = _Found()
    by_name: dict[str, Values | None] = {v.name: v for v in values} | dict.fromkeys(shapes)
    chosen = _spread(list(by_name), EXAMINED)
    lonely = _spread([n for n in b if n not in a], EXAMINED)
    if not chosen and not lonely:
        return []
    index = _Index(a)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for name, told in zip(chosen, pool.map(lambda n: _explain(n, scene, by_name[n], index), chosen), strict=True):
            if told is not None:
                found.add(*told, name)
        if any(n not in b for n in a):
            for name, other in zip(lonely, pool.map(lambda n: index.find(b[n], absent=b), lonely), strict=True):
                if other is not None:
                    found.add("renamed", _renaming(name, other), True, name)
    return found.causes()


def _spread(names: list[str], count: int) -> list[str]:
    return names if len(names) <= count else [names[i * len(names) // count] for i in range(count)]


def _explain(name: str, scene: Scene, values: Values | None, index: _Index) -> tuple[str, str, bool] | None:
    a, b = scene.a[name], scene.b[name]
    if values is None:
        for guess in GUESSES[0](name, scene):
            if same_bits(guess.view, b):
                return guess.kind, guess.text, True
        return None
    other = index.find(b, but=name)
    if other is not None:
        return _elsewhere(name, other, scene)
    for function in GUESSES:
        for guess in function(name, scene):
            if same_bits(guess.view, b):
                return guess.kind, guess.text, True
    for change in CHANGES:
        told = change(a, b, values)
        if told is not None:
            return told
    if abs(values.squares_a - values.squares_b) <= SAME_NORM * max(values.squares_a, values.squares_b):
        permuted = _permuted(a, b)
        if permuted is not None:
            return permuted
    return next((told for change in WEAK if (told := change(a, b, values)) is not None), None)


def _permuted(a: TensorMetadata, b: TensorMetadata) -> tuple[str, str, bool] | None:
    shards = shards_permuted(a, b)
    if shards is not None:
        axis, order = shards
        along = ("rows", "columns")[axis]
        moved = [i for i, o in enumerate(order) if i != o]
        if len(moved) == 2:
            text = f"has parts {moved[0]} and {moved[1]} of {len(order)} along its {along} exchanged: shards of two ranks"
            return "shards-swapped", text, True
        text = f"cut into {len(order)} parts along its {along}, has them in the order {', '.join(map(str, order))}: shards of ranks"
        return "shards-swapped", text, True
    for axis, what in ((0, "rows"), (1, "columns")):
        places = rows_permuted(a, b, axis)
        if places:
            shown = ", ".join(map(str, places[:4])) + (", ..." if len(places) > 4 else "")
            few = f" ({what} {shown})" if len(places) <= 16 else ""
            return f"{what}-permuted", f"has all {what} of A in another order, {len(places)} of {a.global_shape[axis]} moved{few}", True
    return None


# ---- the same tensor under another name -------------------------------------------------------------------------------------------


class _Index:
    """A's tensors by a sample of their bytes, to find the one that B has under another name."""

    def __init__(self, tensors: Mapping[str, TensorMetadata]) -> None:
        self._tensors = tensors
        self._by_sample: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in tensors.items():
            self._by_sample.setdefault(_sample(tensor), []).append(name)

    def find(self, wanted: TensorMetadata, but: str = "", absent: Mapping[str, TensorMetadata] | None = None) -> str | None:
        """The name of A's tensor that equals `wanted`, other than `but`; with `absent`, one that this mapping lacks."""
        names = [n for n in self._by_sample.get(_sample(wanted), ()) if n != but and (absent is None or n not in absent)]
        if but:  # of equal ones the next layer is likelier than a far one
            names.sort(key=lambda n: abs(_number(_LAYER, n) - _number(_LAYER, but)))
        return next((n for n in names[:CANDIDATES] if same_bits(self._tensors[n], wanted)), None)


def _sample(tensor: TensorMetadata) -> tuple[object, ...]:
    shape = tensor.global_shape
    if not prod(shape) or dtype(tensor.dtype).numpy is None:
        return (tensor.dtype, shape)
    offset, box, left = [], [], SAMPLE
    for size in reversed(shape):
        count = min(size, left)
        offset.append((size - count) // 2)
        box.append(count)
        left = max(1, left // count) if count == size else 1
    return tensor.dtype, shape, bits(read_box(tensor, tuple(reversed(offset)), tuple(reversed(box)))).tobytes()


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.search(name)
    return int(match[0]) if match else 0


def _differences(name: str, other: str) -> Iterator[str]:
    """In what the two names differ: "layer", "expert", "gate", or "name" for anything else."""
    for what, pattern, blank in (("layer", _LAYER, "#"), ("expert", _EXPERT, "#"), ("gate", _GATE_UP, ".#.")):
        x, y = pattern.search(name), pattern.search(other)
        if x and y and x[0] != y[0]:
            yield what
            name, other = pattern.sub(blank, name), pattern.sub(blank, other)
    if name != other:
        yield "name"


def _elsewhere(name: str, other: str, scene: Scene) -> tuple[str, str, bool]:
    how = list(_differences(name, other))
    back = other in scene.b and same_bits(scene.a[name], scene.b[other])
    if how == ["layer"]:
        here, there = _number(_LAYER, name), _number(_LAYER, other)
        if back:
            low, high = sorted((here, there))
            return "layers-swapped", f"has layers {low} and {high} exchanged", True
        far = there - here
        return "layers-shifted", f"has in layer l what A has in layer l{far:+d}", True
    if how == ["expert"]:
        here, there = _number(_EXPERT, name), _number(_EXPERT, other)
        if back:
            low, high = sorted((here, there))
            return "experts-swapped", f"has experts {low} and {high} exchanged", True
        return "experts-moved", "has experts under other numbers than A", True
    if how == ["gate"]:
        if back:
            return "gate-up-swapped", "has gate and up exchanged", True
        return "gate-up-copied", "has gate where up belongs, or up where gate does", True
    if back:
        return "tensors-swapped", f"has {_short(name, other)} exchanged", True
    return "misplaced", f"holds A's {other}", True


def _short(name: str, other: str) -> str:
    """Two names as one text that is the same whichever comes first and whatever the layer."""
    ends = sorted(_LAYER.sub("*", n) for n in (name, other))
    return f"{ends[0]} and {ends[1]}"


def _renaming(name: str, other: str) -> str:
    how = list(_differences(name, other))
    if how == ["layer"]:
        return f"is A's layer l{_number(_LAYER, other) - _number(_LAYER, name):+d} under the name of layer l"
    return f"is A's {_LAYER.sub('*', other)}, called {_LAYER.sub('*', name)}"
