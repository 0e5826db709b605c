"""Goes on from a run in the legacy `torch` format, as Megatron-LM's load_checkpoint does: model, optimizer, distrib_optim.pt.

    torchrun --standalone --nproc-per-node 4 tests/oracle/legacy_resume.py JOBS.json

A job has the sizes of optimizer_runs.py and {"checkpoint": iteration folder, "output": folder, "steps": steps of the saved run}. It writes
OUTPUT/truth_<steps>_<rank>.safetensors, takes one step, and writes OUTPUT/truth_<steps + 1>_<rank>.safetensors, as optimizer_runs.py does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpt_model
import legacy_layouts
import optimizer_runs


def run(job: dict[str, Any]) -> None:
    """One job; every rank calls it."""
    output = Path(job["output"])
    _, chunks = optimizer_runs._build(job, output)
    wrapped, optimizer = optimizer_runs._optimizer(job, chunks)
    _load(Path(job["checkpoint"]) / legacy_layouts._folder(job), job, chunks, optimizer)
    steps = job.get("steps", 2)
    optimizer_runs._truth(output, steps, chunks, optimizer)
    optimizer_runs._step(wrapped, optimizer, steps)
    optimizer_runs._truth(output, steps + 1, chunks, optimizer)


def _load(folder: Path, job: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    import torch

    optimizer_runs._warm(optimizer)
    for model in chunks:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    state = torch.load(folder / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    for key, model in zip(gpt_model.chunk_keys(chunks), chunks, strict=True):
        model.load_state_dict(state[key], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    if job.get("optimizer", "distributed") == "distributed":
        with torch.no_grad():  # 0.16.1 forgets that float32 parameters are leaves
            optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for held in one.optimizer.state.values():  # 0.16.1 gives all parameters one and the same tensor, which torch counts up for each
            if "step" in held:
                held["step"] = torch.as_tensor(held["step"]).clone()


if __name__ == "__main__":
    gpt_model.run_jobs(run)
