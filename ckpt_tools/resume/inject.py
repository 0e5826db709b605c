"""The mistake that is made on disk rather than in the loader: an older copy of the weights beside the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from .route import Arrival, convert


def stale_copy(arrived: Arrival, older: Arrival, folder: Path) -> None:
    """Put the weights of `older` as safetensors into the root of the run that `arrived` names."""
    made = folder / "older_hf"
    convert(older.run, made, older.options("hf"), older.iteration)
    for path in made.iterdir():
        shutil.copyfile(path, arrived.run / path.name)
