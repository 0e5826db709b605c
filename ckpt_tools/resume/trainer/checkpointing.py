"""Saving and loading as Megatron-LM does: torch_dist through megatron.core.dist_checkpointing, and the legacy `torch` form.

Source: save_checkpoint, load_checkpoint and generate_state_dict in megatron/training/checkpointing.py, 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from . import random_state
from .model import keys, takes
from .optimizer import make_state, own_steps
from .parallel import rank

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(slots=True)
class Run:
    """A run in progress: its arguments, model chunks, optimizer and schedule, and how far it is.

    stored: whether a checkpoint of it holds a key of the model's state dict: all of them, or only those of an adapter.
    notes: what was not restored although it was there, and why.
    """

    args: Namespace
    chunks: list[Any]
    wrapped: list[Any]
    optimizer: Any
    scheduler: Any
    distributed: bool
    stored: Callable[[str], bool]
    iteration: int = 0
    consumed: int = 0
    notes: list[str] = field(default_factory=list)


def everything(name: str) -> bool:
    """A checkpoint of a whole model holds all of its state dict."""
    return True


def save(run: Run, root: Path, form: str) -> None:
    """Write ROOT/iter_XXXXXXX and then the tracker. Every rank calls it."""
    folder = root / f"iter_{run.iteration:07d}"
    if rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    run.args.consumed_train_samples, run.args.iteration = run.consumed, run.iteration
    (_save_legacy if form == "torch" else _save_torch_dist)(run, folder)
    dist.barrier()
    if rank() == 0:
        (root / TRACKER).write_text(str(run.iteration))
    dist.barrier()


def _common(run: Run) -> dict[str, Any]:
    return {
        "args": run.args,
        "checkpoint_version": 3.0,
        "iteration": run.iteration,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": run.scheduler.state_dict(),
    }


def _metadata(run: Run) -> dict[str, Any]:
    """What the file says about the forms it stores, so that a loader asks for the same."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if run.distributed:
        metadata |= {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    return metadata


def _with_group(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _save_torch_dist(run: Run, folder: Path) -> None:
    metadata = _metadata(run)
    state = _common(run)
    for key, model in zip(keys(run.chunks), run.chunks, strict=True):
        state[key] = _model_state(run, model, metadata)
    state["optimizer"] = run.optimizer.sharded_state_dict(state, metadata=_with_group(metadata))
    state["rng_state"] = random_state.sharded([random_state.collect()])
    choices: dict[str, Any] = {"content_metadata": metadata, "validate_access_integrity": False}
    if takes(dist_checkpointing.save, "async_strategy"):
        choices["async_strategy"] = "mcore"
    dist_checkpointing.save(state, str(folder), **choices)


def _model_state(run: Run, model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in model.sharded_state_dict(metadata=_with_group(metadata)).items() if run.stored(name)}


def rank_folder(args: Namespace) -> str:
    """The folder of this rank's model-parallel part in the legacy form."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def _save_legacy(run: Run, folder: Path) -> None:
    own = folder / rank_folder(run.args)
    own.mkdir(exist_ok=True)
    dist.barrier()
    if run.distributed:
        run.optimizer.save_parameter_state(str(own / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0 or parallel_state.get_expert_data_parallel_rank() == 0:
        state = _common(run) | {"optimizer": run.optimizer.state_dict(), "rng_state": [random_state.collect()]}
        for key, model in zip(keys(run.chunks), run.chunks, strict=True):
            state[key] = {name: value for name, value in model.state_dict_for_save_checkpoint().items() if run.stored(name)}
        torch.save(state, own / "model_optim_rng.pt")


def load(run: Run, folder: Path, form: str, fault: Any, weights: Path | None = None) -> None:
    """Put the run where the checkpoint was: weights, optimizer, schedule, random states, counters. Every rank calls it.

    fault    what the loader is to do wrong (faults.py).
    weights  another iteration folder (torch_dist) to take the model's state from.

    Errors: KeyError names what the checkpoint lacks.
    """
    make_state(run.optimizer)
    with torch.no_grad():
        for model in run.chunks:  # so that a parameter which silently stays as it was cannot pass for a loaded one
            for name, parameter in model.named_parameters():
                if run.stored(name):
                    parameter.fill_(float("nan"))
    if weights is not None:
        _load_weights(run, weights)
    state = _load_legacy(run, folder, fault) if form == "torch" else _load_torch_dist(run, folder, fault, weights is None)
    if not fault.restores("optimizer"):
        run.optimizer.reload_model_params()  # as Megatron-LM does with --no-load-optim
    own_steps(run.optimizer)
    if fault.restores("scheduler") and state.get("opt_param_scheduler"):
        _restore_schedule(run.scheduler, state["opt_param_scheduler"])
    run.iteration = int(state["iteration"])
    run.consumed = int(state["args"].consumed_train_samples)
    states = state.get("rng_state")
    if states and fault.restores("rng"):
        _restore_random(run, states)


def _restore_schedule(scheduler: Any, held: dict[str, Any]) -> None:
    """Megatron's load_state_dict sets the weight decay of the next step before it takes the checkpoint's values for it (0.16.1, 0.19.2): a
    run whose command line says another decay than the checkpoint takes one step with it. Here the checkpoint's values are there first."""
    for name in ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"):
        if name in held:
            setattr(scheduler, name, held[name])
    scheduler.load_state_dict(held)


def _restore_random(run: Run, states: list[Any]) -> None:
    own = states[parallel_state.get_data_parallel_rank() if len(states) > 1 else 0]
    try:
        random_state.restore(own)
    except ValueError as error:
        run.notes.append(str(error))


def _load_torch_dist(run: Run, folder: Path, fault: Any, with_model: bool) -> dict[str, Any]:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
    names = keys(run.chunks)
    request: dict[str, Any] = {key: _model_state(run, model, metadata) for key, model in zip(names, run.chunks, strict=True)}
    if fault.restores("optimizer"):
        request["optimizer"] = run.optimizer.sharded_state_dict(request, is_loading=True, metadata=_with_group(metadata))
    if not with_model:
        request = {key: entry for key, entry in request.items() if key not in names}
    stored = common["args"]
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    if all(getattr(stored, size) == getattr(run.args, size) for size in sizes):
        request["rng_state"] = random_state.sharded(None)
    else:
        run.notes.append("random states were not restored: they belong to the ranks of another layout")
    state, _, not_stored = dist_checkpointing.load(request, str(folder), strict="return_all", validate_access_integrity=False)
    missing = sorted(name for name in not_stored if "_extra_state" not in name and not name.startswith("rng_state"))
    if missing:
        raise KeyError(f"{folder} lacks {len(missing)} tensors that the run needs: {', '.join(missing[:8])}")
    if any(name.startswith("rng_state") for name in not_stored):
        state.pop("rng_state", None)
        run.notes.append("the checkpoint holds no random states")
    for key, model in zip(names, run.chunks, strict=True):
        if with_model:
            _into(run, model, state[key], folder)
    if "optimizer" in state and fault.restores("optimizer"):
        run.optimizer.load_state_dict(state["optimizer"])
    return dict(state)


def _load_weights(run: Run, folder: Path) -> None:
    metadata = dict(dist_checkpointing.load_content_metadata(checkpoint_dir=str(folder)) or {})
    names = keys(run.chunks)
    request = {key: _model_state(run, model, metadata) for key, model in zip(names, run.chunks, strict=True)}
    state = dist_checkpointing.load(request, str(folder), validate_access_integrity=False)
    for key, model in zip(names, run.chunks, strict=True):
        _into(run, model, state[key], folder)


def _into(run: Run, model: Any, state: dict[str, Any], folder: Path) -> None:
    lacking, unexpected = model.load_state_dict(state, strict=False)
    wrong = [*unexpected, *(name for name in lacking if run.stored(name) and not name.endswith("_extra_state"))]
    if wrong:
        raise KeyError(f"{folder} and the model do not agree about {', '.join(wrong[:8])}")


def _load_legacy(run: Run, folder: Path, fault: Any) -> dict[str, Any]:
    own = folder / rank_folder(run.args)
    state = torch.load(own / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    for key, model in zip(keys(run.chunks), run.chunks, strict=True):
        _into(run, model, state[key], folder)
    if fault.restores("optimizer"):
        run.optimizer.load_state_dict(state["optimizer"])
        if run.distributed:
            with torch.no_grad():  # 0.16.1 forgets that float32 parameters are leaves
                run.optimizer.load_parameter_state(str(own / "distrib_optim.pt"))
    if "rng_state" not in state:
        run.notes.append("the checkpoint holds no random states")
    return dict(state)
