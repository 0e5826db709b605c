"""Compare two checkpoints: what `ckpt diff` answers, as data.

found = diff("llama/", "runs/llama")
found.equal, found.values[0].max_ulp, found.causes
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..dtypes import dtype
from ..errors import CkptError, nearest
from ..inspection.overview import Opened, open_for_inspection
from ..notes import Note
from ..statistics import adding_up
from ..tensors import TensorMetadata
from .causes import find_causes
from .reading import same_bits
from .result import Difference, Missing, SideFacts, Unlike, Values
from .settings import compare_settings
from .sides import Named, common_naming
from .tolerance import EXACT, Tolerance
from .training import compare_training, optimizer_side
from .values import compare_values

NEAREST_FOR = 200  # names that nearest ones are looked for: each costs a comparison with every name of the other side


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """iteration_a, iteration_b  as for open_checkpoint;   pattern  only tensors whose name matches (glob, or a part of the name).
    optimizer  optimizer state too;   tolerance  how far apart values may be;   values  False: names, shapes, dtypes and settings only.
    ignore  "dtype", "config": what counts as no difference;   family  name of the family where it cannot be told;   threads."""

    iteration_a: str | int = "latest"
    iteration_b: str | int = "latest"
    pattern: str | None = None
    optimizer: bool = False
    tolerance: Tolerance = EXACT
    values: bool = True
    ignore: frozenset[str] = frozenset()
    family: str | None = None
    threads: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Two sides whose tensors carry common names, nothing read yet; nbytes: what will be read of A at least."""

    options: DiffOptions
    opened: tuple[Opened, Opened]
    naming: str
    a: Named
    b: Named
    config: tuple[Unlike, ...]
    notes: tuple[Note, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for n, t in self.a.tensors.items() if n in self.b.tensors) if self.options.values else 0


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], options: DiffOptions | None = None) -> Difference:
    """Compare the checkpoints at two paths. Errors: those of open_checkpoint, E222, E306, E571."""
    return run_diff(prepare_diff(a, b, options or DiffOptions()))


def prepare_diff(a: str | os.PathLike[str], b: str | os.PathLike[str], options: DiffOptions) -> Prepared:
    """Open both sides and bring them under one naming; reads headers only (with optimizer: 256 elements per parameter)."""
    first, second = open_for_inspection(a, options.iteration_a), open_for_inspection(b, options.iteration_b)
    notes = [Note("warning", label, w) for label, o in (("A", first), ("B", second)) for w in o.state.warnings]
    notes += [
        Note("warning", label, "weights are stored twice; those in Megatron's format are compared")
        for label, o in (("A", first), ("B", second))
        if o.twice
    ]
    naming, left, right = common_naming(first, second, options.family)
    config, told = compare_settings(left, right)
    notes += told
    if options.optimizer:
        (state_a, held_a), (state_b, held_b) = optimizer_side(first, options.family), optimizer_side(second, options.family)
        left.tensors.update(state_a)
        right.tensors.update(state_b)
        unlike, told = compare_training(held_a, held_b)
        config, notes = config + unlike, notes + told
    for label, named in (("A", left), ("B", right)):
        notes += [Note(n.kind, f"{label}: {n.subject}" if n.subject else label, n.text) for n in named.notes]
    for side in (left, right):
        for named_tensors in (side.tensors, side.padding):
            for name in [n for n in named_tensors if not matches(n, options.pattern)]:
                del named_tensors[name]
    if options.pattern and not left.tensors and not right.tensors:
        raise CkptError("E572", "no tensor has such a name", found=repr(options.pattern), hint="`ckpt inspect --layers` lists the names")
    return Prepared(options, (first, second), naming, left, right, tuple(config), tuple(notes))


def matches(name: str, pattern: str | None) -> bool:
    """Whether a name matches a glob, or holds a pattern without wildcards as a part."""
    return pattern is None or fnmatchcase(name, pattern if any(c in pattern for c in "*?[") else f"*{pattern}*")


def run_diff(prepared: Prepared, on_progress: Callable[[int], None] | None = None) -> Difference:
    """Compare the two sides. on_progress gets the bytes of A read so far."""
    a, b, options = prepared.a, prepared.b, prepared.options
    both = [n for n in a.tensors if n in b.tensors]
    only_a, only_b = _missing(a.tensors, b.tensors), _missing(b.tensors, a.tensors)
    shapes = [_shape(n, a, b) for n in both if a.tensors[n].global_shape != b.tensors[n].global_shape]
    dtypes = [
        Unlike(n, a.tensors[n].dtype, b.tensors[n].dtype)
        for n in both
        if a.tensors[n].dtype != b.tensors[n].dtype and "dtype" not in options.ignore
    ]
    unlike = {u.name for u in shapes}
    alike = [n for n in both if n not in unlike]
    values: list[Values] = []
    notes = list(prepared.notes)
    causes = []
    if options.values:
        values = [v for v in _all_values(a.tensors, b.tensors, alike, options, on_progress) if v is not None]
        notes += _padding(a, b)
        causes = find_causes(a.tensors, b.tensors, a.dims or b.dims, values, [u.name for u in shapes], options.threads)
    else:
        notes.append(Note("assumed", "", "values were not compared, as asked"))
    return Difference(
        _facts(prepared.opened[0]),
        _facts(prepared.opened[1]),
        prepared.naming,
        len(alike),
        sum(a.tensors[n].numel for n in alike),
        sum(a.tensors[n].nbytes for n in alike),
        tuple(only_a),
        tuple(only_b),
        tuple(shapes),
        tuple(dtypes),
        () if "config" in options.ignore else prepared.config,
        tuple(values),
        tuple(causes),
        tuple(notes),
    )


def _facts(opened: Opened) -> SideFacts:
    place = opened.model.location
    return SideFacts(place.given, place.directory, opened.model.format, opened.state.location.label, opened.state.location.chosen)


def _missing(mine: Mapping[str, TensorMetadata], other: Mapping[str, TensorMetadata]) -> list[Missing]:
    lacking = [n for n in mine if n not in other]
    free = [n for n in other if n not in mine]
    near = {n: tuple(nearest(n, free, 2)) for n in lacking[:NEAREST_FOR]} if free else {}
    return [Missing(n, mine[n].dtype, mine[n].global_shape, near.get(n, ())) for n in lacking]


def _shape(name: str, a: Named, b: Named) -> Unlike:
    return Unlike(name, str(list(a.tensors[name].global_shape)), str(list(b.tensors[name].global_shape)))


def _all_values(
    a: Mapping[str, TensorMetadata],
    b: Mapping[str, TensorMetadata],
    names: list[str],
    options: DiffOptions,
    on_progress: Callable[[int], None] | None,
) -> Iterator[Values | None]:
    """Every tensor, in order; `threads` at a time."""
    from concurrent.futures import ThreadPoolExecutor

    told = adding_up(on_progress)
    for name in names:
        for tensor in (a[name], b[name]):
            dtype(tensor.dtype).to_numpy()  # E206 before anything is read
    with ThreadPoolExecutor(max(1, options.threads)) as pool:
        try:
            yield from pool.map(lambda n: compare_values(n, a[n], b[n], options.tolerance, told), names)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _padding(a: Named, b: Named) -> list[Note]:
    """What became of vocabulary rows that only pad the table: said, never counted."""
    told: dict[str, list[str]] = {}
    for name in {**a.padding, **b.padding}:
        rows = [s.padding[name].global_shape[0] if name in s.padding else 0 for s in (a, b)]
        text = f"padding rows, {rows[0]} in A and {rows[1]} in B, are no part of the model and were not compared"
        if rows[0] == rows[1]:
            equal = same_bits(a.padding[name], b.padding[name])
            text = f"{rows[0]} padding rows are no part of the model; they are {'equal' if equal else 'not equal'}"
        told.setdefault(text, []).append(name)
    return [Note("cut", ", ".join(names), text) for text, names in told.items()]
