"""What the judges share: tiny models by transformers, converted by ckpt, loaded and saved by real megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import ckpt

IDS = [[3, 17, 101, 250, 508, 1, 42, 77, 300, 12], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]


@dataclass(frozen=True)
class Case:
    """One conversion of one model: name of the tiny model, options of ckpt, and the layout that loads it (tp, pp)."""

    model: str
    options: tuple[str, ...] = ()
    tp: int = 1
    pp: int = 1

    @property
    def key(self) -> str:
        return f"{self.model}{''.join(self.options).replace('-', '_')}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """name -> (folder, logits of IDS by transformers) of every tiny model, in float32."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch
    from oracle import tiny_models

    made = {}
    for name in tiny_models.NAMES:
        folder = tmp_path_factory.mktemp("hf") / name
        model = tiny_models.write(name, folder)
        with torch.no_grad():
            made[name] = (folder, model(torch.tensor(IDS)).logits)
    return made


def converted(models: dict[str, Any], case: Case, base: Path) -> Path:
    """Run folder of one case, converted once."""
    run = base / case.key
    if not run.exists():
        done = ckpt("convert", models[case.model][0], run, "--to", "torch_dist", "--verify", *case.options)
        assert done.returncode == 0, done.stderr
    return run


def iteration_folder(run: Path) -> Path:
    """The one iteration folder of a run."""
    return next(p for p in run.iterdir() if p.is_dir())
