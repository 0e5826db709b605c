"""Saves Hugging Face folders as torch_dist checkpoints with real GPTModels and megatron.core.dist_checkpointing.

    python tests/oracle/save_in_mcore.py JOBS.json                       one process
    torchrun --standalone --nproc-per-node 2 tests/oracle/save_in_mcore.py JOBS.json

JOBS.json is a list of {"hf": folder, "output": run folder, "tp": 1, "pp": 1, "vpp": null, "per_layer": false,
"iteration": 5 | "release", "first_stage_layers": null, "optimizer": null | "plain" | "distributed"}. With an optimizer the model takes
two training steps at learning rate 0 first, so the optimizer's state is real and the weights keep every bit. Weights get into the
model through hf_weights, `args` through megatron_args, neither of which knows ckpt. Padding rows of the vocabulary hold 0.125, so
that they show where they do not belong. The first failing job ends the process.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import gpt_model
import hf_weights
import megatron_args

PADDING = 0.125


def fill(model: Any, hf: hf_weights.HfWeights, padded_vocabulary: int) -> None:
    """Put this rank's part of `hf` into every parameter of `model`."""
    import torch
    from megatron.core import parallel_state

    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    names = gpt_model.global_names(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = hf_weights.parameter(names[name], hf, rank, size, padded_vocabulary)
            if value.shape[1:] != parameter.shape[1:] or value.dtype != parameter.dtype:
                raise ValueError(f"{name}: {value.dtype} {tuple(value.shape)} for {parameter.dtype} {tuple(parameter.shape)}")
            if value.shape[0] < parameter.shape[0]:
                parameter.fill_(PADDING)
            parameter[: value.shape[0]].copy_(value)


def save(job: dict[str, Any]) -> None:
    """One job; every rank calls it."""
    import torch.distributed as dist
    import train_steps
    from megatron.core import dist_checkpointing

    tp, pp, vpp = job.get("tp", 1), job.get("pp", 1), job.get("vpp")
    source, run, iteration = Path(job["hf"]), Path(job["output"]), job.get("iteration", 5)
    first = job.get("first_stage_layers")
    gpt_model.split_ranks(tp, pp, vpp)
    args = megatron_args.from_hf(source, tp, pp, vpp, decoder_first_pipeline_num_layers=first, save=str(run), iteration=iteration)
    chunks = gpt_model.model_chunks(args, gpt_model.transformer_config(args, tp, pp, vpp, num_layers_in_first_pipeline_stage=first))
    hf = hf_weights.read(source)
    for model in chunks:
        fill(model, hf, args.padded_vocab_size)
    optimizer, kind = None, job.get("optimizer")
    if kind:
        optimizer, _ = train_steps.train(chunks, steps=2, learning_rate=0.0, distributed_optimizer=kind == "distributed")
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if kind == "distributed":
        metadata |= {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    if job.get("per_layer"):
        metadata["non_homogeneous_layers"] = True
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0 if iteration == "release" else iteration,
        "num_floating_point_operations_so_far": 0,
    }
    for key, model in zip(gpt_model.chunk_keys(chunks), chunks, strict=True):
        state[key] = model.sharded_state_dict(metadata=dict(metadata))
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(metadata))
    folder = run / ("release" if iteration == "release" else f"iter_{iteration:07d}")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    choices: dict[str, Any] = {"content_metadata": metadata}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        choices["async_strategy"] = "mcore"  # 0.19.2's default asks for nvidia-resiliency-ext
    dist_checkpointing.save(state, str(folder), **choices)
    if dist.get_rank() == 0:
        (run / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


if __name__ == "__main__":  # megatron-core's writer starts processes that import this file again
    gpt_model.run_jobs(save)
