"""Which part of the state explains that a resumed run is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..diff.causes import find_causes
from ..diff.reading import boxes
from ..diff.tolerance import EXACT
from ..diff.values import compare_values
from ..families.dimensions import Dimensions
from ..lazy import read_box
from ..optimizer.values import compare_masters
from ..tensors import TensorMetadata
from .compare import Runs, unlike
from .records import State
from .result import DIFFERS, Reason, Row

Tensors = Mapping[str, TensorMetadata]


def explain(runs: Runs, rows: list[Row], dims: Dimensions | None) -> list[Reason]:
    """The reasons, the one that makes the others necessary first; none when nothing differs."""
    loaded = {row.component: row for row in rows if row.when == "loaded" and row.verdict == DIFFERS}
    reasons = list(_of_what_was_loaded(runs, loaded, dims))
    trained = [row for row in rows if row.when == "trained" and row.verdict == DIFFERS]
    if trained and not reasons:
        reasons.append(_unexplained(trained))
    return reasons


def _of_what_was_loaded(runs: Runs, loaded: Mapping[str, Row], dims: Dimensions | None) -> Iterator[Reason]:
    here, there = runs.straight.steps[runs.saved], runs.resumed.steps[runs.resumed.first]
    if "iteration" in loaded:
        text = "another iteration was loaded than was saved: everything after it is of another run"
        yield Reason("R101", "iteration", text, expected=str(runs.saved), found=str(runs.resumed.first))
        return
    if "weights" in loaded:
        yield from _changed("R102", "weights", "weights", runs.loaded, dims)
    if _nothing(runs.loaded[1]):
        text = "the optimizer's state was not restored: its moments are zero, as in a run that begins"
        yield Reason("R104", "exp_avg", text, loaded["exp_avg"].tensor if "exp_avg" in loaded else "")
        loaded = {k: v for k, v in loaded.items() if k not in ("exp_avg", "exp_avg_sq", "master weights", "optimizer step")}
    if "master weights" in loaded and "weights" not in loaded:
        yield _masters(runs.loaded[1], loaded["master weights"])
    moments = [name for name in ("exp_avg", "exp_avg_sq") if name in loaded]
    if moments:
        yield from _changed("R105", moments[0], moments[0], runs.loaded, dims)
    if "optimizer step" in loaded:
        text = "the optimizer counts its steps anew: the bias correction of Adam starts again" if there.steps in ((), (0,), (1,)) else (
            "the optimizer's step count is another one"
        )
        yield Reason("R106", "optimizer step", text, expected=_list(here.steps), found=_list(there.steps))
    if "scheduler" in loaded:
        name = loaded["scheduler"].tensor
        text = f"the learning-rate schedule was not restored ({name})"
        expected, found = str(here.scheduler.get(name)), str(there.scheduler.get(name))
        for number, step in runs.resumed.steps.items():
            straight = runs.straight.steps.get(number)
            if straight is not None and step.lr is not None and step.lr != straight.lr:
                expected += f", learning rate {straight.lr:g} at iteration {number}"
                found += f", learning rate {step.lr:g}"
                break
        yield Reason("R107", "scheduler", text, "", expected, found)
    if "random states" in loaded:
        row = loaded["random states"]
        text = f"random states were not restored ({row.differing} of {row.total} generators): dropout draws other masks"
        yield Reason("R108", "random states", text, row.tensor)
    if "consumed samples" in loaded:
        skipped = there.consumed - here.consumed
        what = f"{abs(skipped)} samples are {'skipped' if skipped > 0 else 'seen again'}"
        yield Reason("R109", "consumed samples", f"the data goes on at another place: {what}", "", str(here.consumed), str(there.consumed))


def _nothing(state: State) -> bool:
    """Whether all first moments are zero, or there are none."""
    moments = state.get("exp_avg", {})
    return not any(read_box(t, offset, shape).any() for t in moments.values() for offset, shape in boxes(t.global_shape, 4))


def _masters(state: State, row: Row) -> Reason:
    wrong = compare_masters(state.get("master", {}), state.get("weights", {}))
    text = "the optimizer's float32 weights are not those that were saved"
    if wrong:
        text += f"; those of {len(wrong)} parameters do not even round to the model's weights, which the first step overwrites with them"
    return Reason("R103", "master weights", text, row.tensor)


def _changed(code: str, component: str, key: str, loaded: tuple[State, State], dims: Dimensions | None) -> Iterator[Reason]:
    a, b = (state.get(key, {}) for state in loaded)
    wrong = [n for n in a if n in b and unlike(a[n], b[n])]
    lacking = [n for n in a if n not in b]
    if lacking:
        yield Reason(code, component, f"{len(lacking)} {component} are not there", lacking[0])
    shapes = [n for n in wrong if a[n].global_shape != b[n].global_shape]
    values = [v for n in wrong if n not in shapes and (v := compare_values(n, a[n], b[n], EXACT)) is not None]
    causes = find_causes(a, b, dims, values, shapes)
    told: set[str] = set()
    for cause in causes[:3]:
        told |= set(cause.tensors)
        what = f"{component} as loaded, against those saved (A): {cause.text} ({_count(len(cause.tensors), 'tensor')})"
        yield Reason(code, component, what, cause.tensors[0])
    rest = [n for n in wrong if n not in told]
    if rest:
        more = " more" if told else ""
        yield Reason(code, component, f"{component} as loaded are not those saved: {_count(len(rest), 'tensor')}{more}", rest[0])


def _unexplained(rows: list[Row]) -> Reason:
    first = min(rows, key=lambda r: r.iteration or 0)
    text = f"everything that was loaded is equal, yet {first.component} differs from iteration {first.iteration} on"
    return Reason("R110", first.component, text, first.tensor)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "none"
