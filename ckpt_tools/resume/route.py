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
from ..reshard import changed_layout, plan_reshard
from .settings import Stage


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a checkpoint is.

    run, iteration   run folder and iteration;   form: "torch_dist" or "torch";   layout: that it is for.
    family           the model's (None: as the checkpoint says);   vocabulary: padded rows, which must stay as the trainer has them.
    config           the base model's config.json, for an adapter;   weights: iteration folder with its factors, when they came another way.
    lost             what the way there dropped, as the conversions reported it.
    """

    run: Path
    iteration: int
    form: str
    layout: ParallelLayout
    family: str | None = None
    vocabulary: int | None = None
    config: Path | None = None
    weights: Path | None = None
    lost: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The iteration folder."""
        return self.run / f"iter_{self.iteration:07d}"

    def options(self, to: str) -> ConvertOptions:
        """How to convert it into another form for the same layout."""
        return ConvertOptions(to=to, layout=self.layout, family=self.family, padded_vocab=None if to == "hf" else self.vocabulary)


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


def convert(source: Path, target: Path, options: ConvertOptions, iteration: int | None) -> tuple[str, ...]:
    """One verified conversion; what it dropped. Nothing is flushed to disk: all of it is thrown away."""
    checkpoint = open_checkpoint(str(source), "latest" if iteration is None else iteration)
    plan = plan_conversion(checkpoint, options)
    run_conversion(plan, checkpoint, str(target), options, fsync=False, verify=True)
    return tuple(f"{note.subject}: {note.text}" for note in plan.notes if note.kind == "dropped")


def for_layout(here: Arrival, layout: ParallelLayout, target: Path) -> Arrival:
    """The checkpoint for another layout, in the form it has."""
    checkpoint = open_checkpoint(str(here.run), here.iteration)
    options = replace(here.options(here.form), layout=layout)
    plan = plan_reshard(checkpoint, options)
    run_conversion(plan, checkpoint, str(target), options, fsync=False, verify=True)
    lost = tuple(f"{note.subject}: {note.text}" for note in plan.notes if note.kind == "dropped")
    return replace(here, run=target, layout=layout, lost=(*here.lost, *lost))


def _reshard(here: Arrival, stage: Stage, target: Path) -> Arrival:
    return for_layout(here, changed_layout(here.layout, stage.changes), target)


def _to_form(here: Arrival, stage: Stage, target: Path) -> Arrival:
    if stage.kind == here.form:
        raise CkptError("E515", f"the checkpoint already has the form {here.form} before this stage", found=f"--via {stage.text}")
    lost = convert(here.run, target, here.options(stage.kind), here.iteration)
    return replace(here, run=target, form=stage.kind, lost=(*here.lost, *lost))


def _split(here: Arrival, stage: Stage, target: Path) -> Arrival:
    """Weights as safetensors beside the rest, and both joined again."""
    apart = target / "split"
    lost = convert(here.run, apart, here.options("split"), here.iteration)
    return _joined(here, apart, target / "joined", lost)


def _hf(here: Arrival, stage: Stage, target: Path) -> Arrival:
    """The weights through an HF folder; everything else waits beside them, as it must."""
    folder, apart = target / "hf", target / "state"
    convert(here.run, folder, here.options("hf"), here.iteration)
    lost = convert(here.run, apart, here.options("split"), here.iteration)
    for name in os.listdir(apart):
        if (apart / name).is_file() and name.endswith((".safetensors", ".json")):
            (apart / name).unlink()
    for name in os.listdir(folder):
        shutil.move(folder / name, apart / name)
    return _joined(here, apart, target / "joined", lost)


def _joined(here: Arrival, apart: Path, target: Path, lost: tuple[str, ...]) -> Arrival:
    again = convert(apart, target, here.options("torch_dist"), here.iteration)
    return replace(here, run=target, form="torch_dist", lost=(*here.lost, *lost, *again))


def _lora(here: Arrival, stage: Stage, target: Path) -> Arrival:
    """The factors of an adapter through a PEFT folder; the optimizer's state waits, as it must."""
    base = str(here.config) if here.config else None
    told = convert(here.run, target / "peft", ConvertOptions(to="peft", hf_config=base, family=here.family), here.iteration)
    options = ConvertOptions(to="torch_dist", hf_config=base, family=here.family, iteration=here.iteration)
    convert(target / "peft", target / "megatron", options, None)
    lost = tuple(text for text in told if not text.startswith("training state"))
    return replace(here, weights=target / "megatron" / f"iter_{here.iteration:07d}", lost=(*here.lost, *lost))


_STAGES: dict[str, Callable[[Arrival, Stage, Path], Arrival]] = {
    "reshard": _reshard,
    "torch": _to_form,
    "torch_dist": _to_form,
    "split": _split,
    "hf": _hf,
    "lora": _lora,
}


