"""Loads every tensor and object that an iteration folder holds with megatron.core.dist_checkpointing, asking for no model weights.

    python tests/oracle/load_state_in_mcore.py JOBS.json

JOBS.json is a list of {"checkpoint": iteration folder, "output": folder}. OUTPUT/state.pt gets {"common", "tensors", "objects"}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpt_model


def load(job: dict[str, Any]) -> None:
    """One job: request the optimizer tensors under their stored names, whole."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    folder = job["checkpoint"]
    common = dist_checkpointing.load_common_state_dict(folder)
    stored = load_sharded_metadata(folder)
    request: dict[str, Any] = {}
    for name, entry in stored.items():
        if isinstance(entry, ShardedTensor):
            request[name] = ShardedTensor.from_rank_offsets(entry.key, torch.empty(entry.global_shape, dtype=entry.dtype))
        elif entry.key not in ("common_state",):
            request[name] = ShardedObject(entry.key, None, entry.global_shape, entry.global_offset)
    # Megatron's words are the other way round: see load_in_mcore.py
    state, not_asked_for, not_stored = dist_checkpointing.load(request, folder, strict="return_all")
    if not_stored or {name.partition("/")[0] for name in not_asked_for} - {"common_state"}:
        raise KeyError(f"not stored: {sorted(not_stored)}; not asked for: {sorted(not_asked_for)}")
    kinds = {n: isinstance(stored[n], ShardedTensor) for n in request}
    Path(job["output"]).mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "common": common,
            "tensors": {n: state[n] for n, is_tensor in kinds.items() if is_tensor},
            "objects": {n: state[n] for n, is_tensor in kinds.items() if not is_tensor},
        },
        Path(job["output"]) / "state.pt",
    )


if __name__ == "__main__":
    gpt_model.run_jobs(load)
