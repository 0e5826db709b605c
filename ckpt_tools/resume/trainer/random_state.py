"""Random states: what Megatron saves of them and how it restores them (get_rng_state and load_checkpoint of Megatron-LM)."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def collect() -> dict[str, Any]:
    """The state of every generator of this process."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore(state: dict[str, Any]) -> None:
    """Set every generator. Errors: ValueError when the states are those of another kind of device."""
    here = torch.cuda.get_rng_state()
    if state["cuda_rng_state"].numel() != here.numel():
        raise ValueError("the random states of the checkpoint are those of another kind of device")
    random.setstate(state["random_rng_state"])
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def sharded(states: list[Any] | None) -> ShardedObject:
    """The random states as an entry of a torch_dist state dict; None: the entry to ask for."""
    pp, tp = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    place = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject("rng_state", states, (pp, tp, size), (*place, replica), replica_id=0)
    return ShardedObject("rng_state", states, (pp, tp), place, replica_id=replica)


def digest() -> dict[str, str]:
    """A short digest of each generator's state."""
    state = collect()
    trackers = state.pop("rng_tracker_states")
    found = {name.removesuffix("_rng_state"): _of(value) for name, value in state.items()}
    return found | {f"tracker {name}": _of(value) for name, value in trackers.items()}


def _of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.cpu().numpy().tobytes()
    elif isinstance(value, tuple):
        data = repr([v.tolist() if isinstance(v, numpy.ndarray) else v for v in value]).encode()
    else:
        data = repr(value).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
