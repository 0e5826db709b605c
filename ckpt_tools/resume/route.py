"""The path between saving and loading: ckpt's own conversions, one after the other, each verified."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import open_checkpoint
from ..conversion import plan_conversion, run_conversion
from ..errors import CkptError
from ..layout import ParallelLayout
from ..options import ConvertOptions
from ..reshard import changed_layout, layout_of, plan_reshard
from .settings import Stage


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a checkpoint is: run folder, iteration, the form it has ("torch_dist" or "torch"), the layout it is for, and what the way
    there lost, as the conversions reported it."""

    run: Path
    iteration: int
    form: str
    layout: ParallelLayout
    lost: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The iteration folder."""
        return self.run / f"iter_{self.iteration:07d}"


def follow(stages: tuple[Stage, ...], start: Arrival, folder: Path, on_stage: Callable[[str], None]) -> Arrival:
    """Take the checkpoint along the path. folder: an existing one for what is made on the way.

    Errors: as the conversions; E515 when a stage makes no sense where it stands.
    """
    here = start
    for number, stage in enumerate(stages, 1):
        on_stage(stage.text)
        here = _STAGES[stage.kind](here, stage, folder / f"{number}_{stage.kind}")
    return here


def layout_after(stages: tuple[Stage, ...], layout: ParallelLayout) -> ParallelLayout:
    """The layout in which the run goes on."""
    for stage in stages:
        if stage.kind == "reshard":
            layout = changed_layout(layout, stage.changes)
    return layout


def convert(source: Path, target: Path, options: ConvertOptions, iteration: int) -> tuple[str, ...]:
    """One verified conversion; what it dropped. Nothing is flushed to disk: all of it is thrown away."""
    checkpoint = open_checkpoint(str(source), iteration)
    plan = plan_conversion(checkpoint, options)
    run_conversion(plan, checkpoint, str(target), options, fsync=False, verify=True)
    return tuple(f"{note.subject}: {note.text}" for note in plan.notes if note.kind == "dropped")


def _reshard(here: Arrival, stage: Stage, target: Path) -> Arrival:
    checkpoint = open_checkpoint(str(here.run), here.iteration)
    layout = changed_layout(layout_of(checkpoint), stage.changes)
    options = ConvertOptions(to=here.form, layout=layout)
    plan = plan_reshard(checkpoint, options)
    run_conversion(plan, checkpoint, str(target), options, fsync=False, verify=True)
    lost = tuple(f"{note.subject}: {note.text}" for note in plan.notes if note.kind == "dropped")
    return replace(here, run=target, layout=layout, lost=(*here.lost, *lost))


def _to_form(here: Arrival, stage: Stage, target: Path) -> Arrival:
    if stage.kind == here.form:
        raise CkptError("E515", f"the checkpoint already has the form {here.form} before this stage", found=f"--via {stage.text}")
    lost = convert(here.run, target, ConvertOptions(to=stage.kind, layout=here.layout), here.iteration)
    return replace(here, run=target, form=stage.kind, lost=(*here.lost, *lost))


def _split(here: Arrival, stage: Stage, target: Path) -> Arrival:
    """Weights as safetensors beside the rest, and both joined again."""
    apart = target / "split"
    lost = convert(here.run, apart, ConvertOptions(to="split", layout=here.layout), here.iteration)
    return _joined(here, apart, target / "joined", lost)


def _hf(here: Arrival, stage: Stage, target: Path) -> Arrival:
    """The weights through an HF folder; everything else waits beside them, as it must."""
    folder, apart = target / "hf", target / "state"
    convert(here.run, folder, ConvertOptions(to="hf"), here.iteration)
    lost = convert(here.run, apart, ConvertOptions(to="split", layout=here.layout), here.iteration)
    for name in os.listdir(apart):
        if (apart / name).is_file() and name.endswith((".safetensors", ".json")):
            (apart / name).unlink()
    for name in os.listdir(folder):
        shutil.move(folder / name, apart / name)
    return _joined(here, apart, target / "joined", lost)


def _joined(here: Arrival, apart: Path, target: Path, lost: tuple[str, ...]) -> Arrival:
    again = convert(apart, target, ConvertOptions(to="torch_dist", layout=here.layout), here.iteration)
    return replace(here, run=target, form="torch_dist", lost=(*here.lost, *lost, *again))


def _lora(here: Arrival, stage: Stage, target: Path) -> Arrival:
    raise CkptError("E515", "a run that trains an adapter cannot be made yet", found=f"--via {stage.text}")


_STAGES: dict[str, Callable[[Arrival, Stage, Path], Arrival]] = {
    "reshard": _reshard,
    "torch": _to_form,
    "torch_dist": _to_form,
    "split": _split,
    "hf": _hf,
    "lora": _lora,
}


