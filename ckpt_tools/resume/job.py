"""What one training run of the experiment is to do, as both sides know it: the command that plans it and the processes that run it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the trainer.

    name        what it is called in progress and files;  output: existing folder for what it records.
    args        Megatron-LM's arguments of the model, plain values (params_dtype a dtype name), including the layout.
    until       the iteration after which it ends; it begins at 0 or at the iteration that it loads.
    load        iteration folder to begin from;  load_form: "torch_dist" or "torch".
    saves       (iteration, run folder) to save;  save_form likewise.
    dumps       iterations after which all weights and optimizer state are written to `output`.
    optimizer   "distributed" or "plain" (Float16 or FP32 optimizer).
    spec        "te", "local" or "auto": Transformer Engine where it works.
    sequences   of one step, over all data-parallel ranks;  length: tokens of one;  samples: consumed before the first step.
    steps       of the whole schedule: warm-up over the first, cosine decay over twice as many;  rate: its peak.
    fault       a mistake to make while loading (faults.py), or None.
    lora        train and save an adapter only, the base being frozen.
    weights     iteration folder to take the model's state from, where that is not the one in `load`.
    """

    name: str
    output: str
    args: dict[str, Any]
    until: int
    load: str | None = None
    load_form: str = "torch_dist"
    saves: tuple[tuple[int, str], ...] = ()
    save_form: str = "torch_dist"
    dumps: tuple[int, ...] = ()
    optimizer: str = "distributed"
    spec: str = "auto"
    seed: int = 1234
    sequences: int = 8
    length: int = 32
    steps: int = 8
    rate: float = 1e-3
    fault: str | None = None
    lora: bool = False
    weights: str | None = None


def write_jobs(path: Path, jobs: Sequence[Job]) -> None:
    """The job list for a process to read."""
    path.write_text(json.dumps([asdict(job) for job in jobs]))


def read_jobs(path: Path) -> list[Job]:
    """The jobs that write_jobs wrote."""
    jobs = json.loads(path.read_text())
    return [Job(**{**job, "saves": tuple(tuple(s) for s in job["saves"]), "dumps": tuple(job["dumps"])}) for job in jobs]
