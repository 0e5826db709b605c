"""Compare a resumed run with one that never stopped: as it was loaded, and at every step.

Where the layout stays, every bit must be the same. Where it changes, sums are taken in another order: what was loaded must still be the
same to the bit, and the steps after it may differ no more than two runs that never stopped, one in each layout, differ from each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..diff.reading import boxes, same_bits
from ..lazy import read_box
from ..tensors import TensorMetadata
from .records import COMPONENTS, State, Step, Trace, component_of, tensor_of
from .result import DIFFERS, EQUAL, NOISE, SKIPPED, Row

NAMES = {"weights": "weights", "master": "master weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs to compare and their states when loaded and at the end; other: the straight run in the resumed one's layout."""

    straight: Trace
    resumed: Trace
    saved: int
    end: int
    loaded: tuple[State, State]
    ended: tuple[State, State]
    other: Trace | None = None
    other_ended: State | None = None

    @property
    def exact(self) -> bool:
        """Whether both ran in the same layout."""
        return self.other is None


def compare_runs(runs: Runs) -> list[Row]:
    """All rows, in the order in which one reads them."""
    return [*_loaded(runs), *_trained(runs)]


# ---- as loaded ----------------------------------------------------------------------------------------------------------------------


def _loaded(runs: Runs) -> Iterable[Row]:
    here, there = runs.straight.steps[runs.saved], runs.resumed.steps[runs.resumed.first]
    yield _fact("iteration", "the number it goes on from", runs.saved, runs.resumed.first, runs.saved)
    yield _fact("consumed samples", "how many samples were consumed", here.consumed, there.consumed, runs.saved)
    for component in COMPONENTS:
        a, b = (state.get(component, {}) for state in runs.loaded)
        if a or b:
            yield _tensors(component, a, b, runs.saved)
    yield _fact("optimizer step", "step counts of the optimizer", here.steps, there.steps, runs.saved)
    yield _mapping("scheduler", "state of the learning-rate schedule", here.scheduler, there.scheduler, runs.saved)
    if runs.exact:
        yield _mapping("random states", "every generator of every rank", here.rng, there.rng, runs.saved)
    else:
        yield Row("random states", "loaded", SKIPPED, "they belong to the ranks of a layout, which changed")


def _fact(component: str, compared: str, a: object, b: object, iteration: int) -> Row:
    same = a == b
    return Row(component, "loaded", EQUAL if same else DIFFERS, compared, None if same else iteration, "", int(not same), 1)


def _mapping(component: str, compared: str, a: Mapping[str, object], b: Mapping[str, object], iteration: int) -> Row:
    names = sorted({*a, *b})
    wrong = [n for n in names if a.get(n) != b.get(n)]
    first = wrong[0] if wrong else ""
    return Row(component, "loaded", DIFFERS if wrong else EQUAL, compared, iteration if wrong else None, first, len(wrong), len(names))


def _tensors(component: str, a: Mapping[str, TensorMetadata], b: Mapping[str, TensorMetadata], iteration: int) -> Row:
    names = list(dict.fromkeys((*a, *b)))
    wrong = [n for n in names if n not in a or n not in b or unlike(a[n], b[n])]
    comparable = [n for n in wrong if n in a and n in b and a[n].global_shape == b[n].global_shape]
    largest = max((_distance(a[n], b[n])[0] for n in comparable), default=0.0)
    return Row(
        NAMES[component],
        "loaded",
        DIFFERS if wrong else EQUAL,
        "every bit of every tensor",
        iteration if wrong else None,
        wrong[0] if wrong else "",
        len(wrong),
        len(names),
        largest if wrong else None,
    )


def unlike(a: TensorMetadata, b: TensorMetadata) -> bool:
    """Whether two tensors differ in anything."""
    return (a.dtype, a.global_shape) != (b.dtype, b.global_shape) or not same_bits(a, b)


def _distance(a: TensorMetadata, b: TensorMetadata) -> tuple[float, float, int]:
    """(largest |a - b|, sum of squares of a - b, elements)."""
    import numpy as np

    largest, squares, count = 0.0, 0.0, 0
    for offset, shape in boxes(a.global_shape, 4, BLOCK):
        x, y = (read_box(t, offset, shape).astype(np.float64) for t in (a, b))
        apart = np.abs(x - y)
        apart[np.isnan(x) & np.isnan(y)] = 0.0
        apart[np.isnan(apart)] = math.inf
        largest = max(largest, float(apart.max(initial=0.0)))
        squares += float(np.square(apart).sum())
        count += apart.size
    return largest, squares, count


# ---- while training -----------------------------------------------------------------------------------------------------------------


def _trained(runs: Runs) -> Iterable[Row]:
    steps = [n for n in range(runs.saved + 1, runs.end + 1) if n in runs.resumed.steps]
    pairs = [(runs.straight.steps[n], runs.resumed.steps[n]) for n in steps]
    over = f"{len(steps)} steps"
    if len(steps) < runs.end - runs.saved:
        yield Row("steps", "trained", DIFFERS, "how many steps were taken", runs.saved + 1, "", 1, 1)
    yield _series("samples", f"sample numbers of {over}", pairs, lambda s: s.samples)
    yield _series("learning rate", over, pairs, lambda s: s.lr)
    yield _series("weight decay", over, pairs, lambda s: s.weight_decay)
    yield _series("optimizer step", over, pairs, lambda s: s.steps)
    yield from _numbers(runs, steps, over)
    if runs.exact:
        for component in COMPONENTS:
            yield from _pieces(component, pairs, over)
        yield _series("random states", f"every generator of every rank, {over}", pairs, lambda s: s.rng)
    else:
        for component in COMPONENTS:
            yield from _ends(runs, component)


def _series(component: str, compared: str, pairs: list[tuple[Step, Step]], value: Callable[[Step], object]) -> Row:
    wrong = [a.iteration for a, b in pairs if value(a) != value(b)]
    largest = None
    if wrong and all(isinstance(value(s), float) for pair in pairs for s in pair):
        largest = max(abs(float(value(a)) - float(value(b))) for a, b in pairs)  # type: ignore[arg-type]
    verdict = DIFFERS if wrong else EQUAL
    return Row(component, "trained", verdict, compared, wrong[0] if wrong else None, "", len(wrong), len(pairs), largest)


def _loss(step: Step) -> float | None:
    return step.loss


def _norm(step: Step) -> float | None:
    return step.grad_norm


def _numbers(runs: Runs, steps: list[int], over: str) -> Iterable[Row]:
    for component, value in (("loss", _loss), ("gradient norm", _norm)):
        exact = _series(component, over, [(runs.straight.steps[n], runs.resumed.steps[n]) for n in steps], value)
        if runs.other is None or exact.verdict == EQUAL:
            yield exact
            continue
        to_straight, to_other, floor = (
            max(abs((value(a.steps[n]) or 0.0) - (value(b.steps[n]) or 0.0)) for n in steps)
            for a, b in ((runs.straight, runs.resumed), (runs.other, runs.resumed), (runs.straight, runs.other))
        )
        yield _against_noise(component, f"{over}, against the noise of the layout", min(to_straight, to_other), floor, runs.end)


def _against_noise(component: str, compared: str, apart: float, floor: float, iteration: int) -> Row:
    """The resumed run must not be farther from the nearer straight run than the two are from each other."""
    if apart <= floor:
        return Row(component, "trained", NOISE, compared, None, "", 0, 1, apart, floor)
    return Row(component, "trained", DIFFERS, compared, iteration, "", 1, 1, apart, floor)


def _pieces(component: str, pairs: list[tuple[Step, Step]], over: str) -> Iterable[Row]:
    first, name, wrong, total = None, "", 0, 0
    for a, b in pairs:
        labels = [label for label in dict.fromkeys((*a.digests, *b.digests)) if component_of(label) == component]
        unequal = sorted({tensor_of(label) for label in labels if a.digests.get(label) != b.digests.get(label)})
        total = max(total, len({tensor_of(label) for label in labels}))
        wrong = max(wrong, len(unequal))
        if unequal and first is None:
            first, name = a.iteration, unequal[0]
    if total:
        verdict = EQUAL if first is None else DIFFERS
        yield Row(NAMES[component], "trained", verdict, f"every bit of every tensor, {over}", first, name, wrong, total)


def _ends(runs: Runs, component: str) -> Iterable[Row]:
    straight, resumed = (state.get(component, {}) for state in runs.ended)
    other = (runs.other_ended or {}).get(component, {})
    if not straight:
        return
    names = [n for n in straight if n in resumed and n in other]
    lacking = [n for n in straight if n not in resumed]
    if lacking:
        yield Row(NAMES[component], "trained", DIFFERS, "every tensor at the end", runs.end, lacking[0], len(lacking), len(straight))
        return
    to_straight, to_other, floor = (
        _root_mean_square([(a[n], b[n]) for n in names]) for a, b in ((straight, resumed), (other, resumed), (straight, other))
    )
    compared = "root mean square of the difference at the end, against the noise of the layout"
    if to_straight == 0.0:
        yield Row(NAMES[component], "trained", EQUAL, "every tensor at the end", None, "", 0, len(names))
    else:
        yield _against_noise(NAMES[component], compared, min(to_straight, to_other), floor, runs.end)


def _root_mean_square(pairs: list[tuple[TensorMetadata, TensorMetadata]]) -> float:
    squares, count = 0.0, 0
    for a, b in pairs:
        _, more, elements = _distance(a, b)
        squares, count = squares + more, count + elements
    return math.sqrt(squares / count) if count else 0.0
