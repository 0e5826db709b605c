"""What a rank records of a run: a line per step with a digest of everything a resume must restore, and now and then everything itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file

from . import random_state
from .checkpointing import Run
from .optimizer import memory, steps
from .parallel import rank
from .placement import Piece, Placement


class Recorder:
    """Writes OUTPUT/<name>.<rank>.jsonl and OUTPUT/<name>.<iteration>.<rank>.safetensors."""

    def __init__(self, run: Run, name: str, output: Path) -> None:
        self._run, self._name, self._output = run, name, output
        self._placements = [Placement(model) for model in run.chunks]
        self._owner = {id(p): place for place, model in zip(self._placements, run.chunks, strict=True) for p in model.parameters()}
        self._path = output / f"{name}.{rank()}.jsonl"
        self._path.unlink(missing_ok=True)

    def step(self, happened: dict[str, Any], dump: bool) -> None:
        """Record the run as it is now; happened: what the step says of itself. Every rank calls it."""
        held = {label: piece.data for label, piece in self._pieces()}
        line = {
            "iteration": self._run.iteration,
            "consumed": self._run.consumed,
            "steps": steps(self._run.optimizer),
            "scheduler": {k: v for k, v in self._run.scheduler.state_dict().items() if isinstance(v, int | float | str)},
            "rng": random_state.digest(),
            "digests": {label: _digest(data) for label, data in held.items()},
            "place": {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
            },
            "notes": self._run.notes,
            **happened,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if dump:
            whole = {label: data.detach().clone().contiguous().cpu() for label, data in held.items()}
            save_file(whole, self._output / f"{self._name}.{self._run.iteration}.{rank()}.safetensors")

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        """`component|key|global shape|offset` and the piece, for weights, master weights and moments, without other ranks' copies."""
        for placement in self._placements:
            for piece in placement.all():
                if piece.counts:
                    yield _label("weights", piece), piece
        for parameter, states in memory(self._run.optimizer):
            for name, value in states.items():
                for piece in self._owner[id(parameter)].pieces(parameter, value):
                    if piece.counts:
                        yield _label(name, piece), piece


def _label(component: str, piece: Piece) -> str:
    return f"{component}|{piece.key}|{'.'.join(map(str, piece.shape))}|{'.'.join(map(str, piece.offset))}"


def _digest(data: Any) -> str:
    flat = data.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy(), digest_size=8).hexdigest()
