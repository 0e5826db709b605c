"""The experiment: one run that never stops, one that is saved, taken along a path, loaded and continued, and what differs between them.

    verify(Settings(via=(parse_stage("hf"),)), folder).same
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..layout import ParallelLayout
from .compare import Runs, compare_runs
from .completeness import judge
from .inject import stale_copy
from .job import Job
from .launch import check_installed, train
from .model import Beginning, beginning
from .reasons import explain
from .records import Trace, dumped, read_trace
from .result import DIFFERS, EQUAL, Point, Reason, Row, Verified
from .route import Arrival, follow, for_layout, layout_after
from .settings import INJECTIONS, Settings

STRAIGHT, FIRST, RESUMED, OTHER = "straight", "first half", "resumed", "straight, second layout"


@dataclass(frozen=True, slots=True)
class Events:
    """Whom to tell: on_step(job, iteration, last iteration), on_stage(what is happening now)."""

    on_step: Callable[[str, int, int], None] = lambda job, iteration, until: None
    on_stage: Callable[[str], None] = lambda text: None


def verify(settings: Settings, folder: Path, events: Events | None = None) -> Verified:
    """Do the experiment. folder: an existing, empty one for everything that is made on the way.

    Errors: E513 libraries that are missing, E514 a failed process, E515 a path that makes no sense, E516 a model that this trainer cannot
    run, and those of reading and converting checkpoints.
    """
    events = events or Events()
    started = time.monotonic()
    check_installed()
    events.on_stage("looking at the checkpoint" if settings.run else "preparing")
    begin = beginning(settings, folder)
    if begin.missing:
        return _not_resumable(settings, begin, time.monotonic() - started)
    plan = _Plan(settings, begin, folder)
    events.on_stage("training")
    train(plan.first_jobs(), plan.ranks(plan.layout), folder, events.on_step)
    arrived = follow(settings.via, plan.saved_run(), _made(folder / "path"), events.on_stage)
    if settings.inject == "dup-weights":
        stale_copy(arrived, plan.older_run(), folder)
    whole = judge(str(arrived.run), arrived.iteration, family=begin.family, random=plan.exact)
    events.on_stage("training on")
    train(plan.second_jobs(arrived), plan.ranks(plan.resumed_layout), folder, events.on_step)
    events.on_stage("comparing")
    return plan.compared(arrived, whole.reasons, whole.missing, time.monotonic() - started)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class _Plan:
    """Iterations, layouts and jobs of one experiment."""

    def __init__(self, settings: Settings, begin: Beginning, folder: Path) -> None:
        self.settings, self.begin, self.folder = settings, begin, folder
        self.layout = begin.layout
        self.resumed_layout = layout_after(settings.via, self.layout)
        self.exact = self.resumed_layout == self.layout
        self.saved, self.end = begin.iteration + settings.saved_after, begin.iteration + settings.steps

    def ranks(self, layout: ParallelLayout) -> int:
        return int(layout.arguments()["world_size"])

    def job(self, name: str, until: int, layout: ParallelLayout, **more: Any) -> Job:
        settings, begin = self.settings, self.begin
        base: dict[str, Any] = {"load": str(begin.load) if begin.load else None}
        return Job(
            name=name,
            output=str(self.folder),
            args=begin.arguments(layout),
            until=until,
            save_form=settings.form,
            optimizer=begin.optimizer,
            spec=settings.spec,
            seed=settings.seed,
            sequences=settings.sequences,
            length=begin.length,
            steps=settings.steps,
            rate=settings.rate,
            lora=settings.lora,
            **{**base, **more},
        )

    def first_jobs(self) -> list[Job]:
        """The straight run, and the one that saves and ends."""
        saves = [(self.saved, str(self.folder / "run"))]
        if self.settings.inject == "wrong-iteration":
            saves.insert(0, (self.saved - 1, str(self.folder / "run")))
        if self.settings.inject == "dup-weights":
            saves.insert(0, (self.saved - 1, str(self.folder / "older")))
        return [
            self.job(STRAIGHT, self.end, self.layout, dumps=(self.saved, self.end)),
            self.job(FIRST, self.saved, self.layout, saves=tuple(s for s in saves if s[0] > self.begin.iteration)),
        ]

    def saved_run(self) -> Arrival:
        wrong = self.settings.inject == "wrong-iteration"
        return replace(self._at(self.folder / "run", self.saved - int(wrong)), config=self._config())

    def _at(self, run: Path, iteration: int) -> Arrival:
        return Arrival(run, iteration, self.settings.form, self.layout, self.begin.family, self.begin.rows)

    def _config(self) -> Path | None:
        """The base model's config.json, which an adapter needs to be named."""
        if not self.settings.lora:
            return None
        path = self.folder / "base" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(self.settings.config))
        return path

    def older_run(self) -> Arrival:
        return self._at(self.folder / "older", self.saved - 1)

    def second_jobs(self, arrived: Arrival) -> list[Job]:
        """The resumed run, in a process that knows nothing of the first, and where the layout changed a straight run in the new one."""
        in_loader = self.settings.inject not in ("wrong-iteration", "dup-weights")
        resumed = self.job(
            RESUMED,
            self.end,
            self.resumed_layout,
            load=str(arrived.folder),
            load_form=arrived.form,
            weights=str(arrived.weights) if arrived.weights else None,
            dumps=(arrived.iteration, self.end),
            fault=self.settings.inject if in_loader else None,
        )
        if self.exact:
            return [resumed]
        return [resumed, self.job(OTHER, self.end, self.resumed_layout, load=self._beginning_in_second_layout(), dumps=(self.end,))]

    def _beginning_in_second_layout(self) -> str | None:
        """What the other straight run begins with: Megatron loads torch_dist at any TP and PP, but not with another EP."""
        begin = self.begin
        if begin.load is None or self.layout.ep == self.resumed_layout.ep:
            return str(begin.load) if begin.load else None
        here = replace(self._at(begin.load.parent, begin.iteration), form="torch_dist")
        return str(for_layout(here, self.resumed_layout, self.folder / "beginning in the second layout").folder)

    def compared(self, arrived: Arrival, wrong: tuple[Reason, ...], missing: tuple[str, ...], seconds: float) -> Verified:
        here, there = self.ranks(self.layout), self.ranks(self.resumed_layout)
        straight, first = (read_trace(self.folder, name, here) for name in (STRAIGHT, FIRST))
        resumed = read_trace(self.folder, RESUMED, there)
        other = None if self.exact else read_trace(self.folder, OTHER, there)
        runs = Runs(
            straight,
            resumed,
            self.saved,
            self.end,
            (dumped(self.folder, STRAIGHT, self.saved, here), dumped(self.folder, RESUMED, resumed.first, there)),
            (dumped(self.folder, STRAIGHT, self.end, here), dumped(self.folder, RESUMED, self.end, there)),
            other,
            dumped(self.folder, OTHER, self.end, there) if other else None,
        )
        rows = [_repeatable(straight, first, self.saved), *compare_runs(runs)]
        reasons = [*wrong, *explain(runs, rows[1:], self.begin.dims)]
        if missing:
            told = f"what arrived at the end of the path cannot be resumed: {', '.join(missing)} missing"
            reasons.insert(0, Reason("R111", "checkpoint", told))
        if rows[0].verdict == DIFFERS:
            text = "the same steps taken twice gave different numbers: this machine does not compute repeatably, so no bit can be compared"
            reasons.insert(0, Reason("R114", "repeatability", text))
        notes = [*self.begin.notes, *arrived.lost, *resumed.notes]
        if self.settings.inject:
            notes.insert(0, f"a mistake was made on purpose: {INJECTIONS[self.settings.inject]}")
        return Verified(
            self.begin.model,
            self.settings.run or "random weights",
            self.begin.iteration,
            self.saved,
            self.end,
            in_words(self.layout),
            in_words(self.resumed_layout),
            tuple(stage.text for stage in self.settings.via),
            self.exact,
            tuple(rows),
            tuple(reasons),
            tuple(dict.fromkeys(notes)),
            _points(straight),
            _points(resumed),
            _points(other) if other else (),
            seconds=seconds,
        )


def _repeatable(straight: Trace, first: Trace, saved: int) -> Row:
    """Whether the steps before the save, taken twice, were the same."""
    steps = [n for n in straight.steps if n <= saved]
    wrong = [n for n in steps if straight.steps[n].digests != first.steps[n].digests or straight.steps[n].loss != first.steps[n].loss]
    compared = f"the first {len(steps) - 1} steps, taken twice"
    return Row("repeatability", "before", DIFFERS if wrong else EQUAL, compared, wrong[0] if wrong else None, "", len(wrong), len(steps))


def _points(trace: Trace) -> tuple[Point, ...]:
    return tuple(Point(n, step.loss, step.grad_norm, step.lr) for n, step in trace.steps.items() if step.lr is not None)


def _not_resumable(settings: Settings, begin: Beginning, seconds: float) -> Verified:
    text = f"not resumable: {', '.join(begin.missing)} missing; a loader would begin with them anew and say nothing"
    layout = in_words(begin.layout)
    return Verified(
        begin.model,
        settings.run or "",
        begin.iteration,
        begin.iteration,
        begin.iteration,
        layout,
        layout,
        tuple(stage.text for stage in settings.via),
        True,
        (),
        (Reason("R111", "checkpoint", text), *begin.reasons),
        begin.notes,
        missing=begin.missing,
        seconds=seconds,
    )


def in_words(layout: ParallelLayout) -> str:
    """A layout as people write it: TP 2, PP 1, DP 2."""
    sizes = [("TP", layout.tp), ("PP", layout.pp), ("VPP", layout.virtual), ("EP", layout.ep), ("DP", layout.dp)]
    return ", ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "TP")


