"""Loads torch_dist checkpoints into real GPTModels with megatron.core.dist_checkpointing and writes down what arrived.

    python tests/oracle/load_in_mcore.py JOBS.json                       one process
    torchrun --standalone --nproc-per-node 4 tests/oracle/load_in_mcore.py JOBS.json

JOBS.json is a list of {"checkpoint": iteration folder, "output": folder, "ids": [[token, ...]], "tp": 1, "pp": 1, "vpp": null}. Each
job gets OUTPUT/rankN.safetensors (parameters of that rank under global layer numbers; `logits` on the first rank of the last stage)
and, last, OUTPUT/report.json. The model is built from the `args` inside the checkpoint. A tensor or object that the model wants and
the checkpoint lacks raises; what the checkpoint holds and the model did not ask for is reported as `unexpected`. The first failing
job ends the process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpt_model


def load(job: dict[str, Any]) -> None:
    """One job; every rank calls it."""
    import torch
    import torch.distributed as dist
    from megatron.core import __version__, dist_checkpointing, parallel_state
    from safetensors.torch import save_file

    tp, pp, vpp = job.get("tp", 1), job.get("pp", 1), job.get("vpp")
    folder, output = job["checkpoint"], Path(job["output"])
    gpt_model.split_ranks(tp, pp, vpp)
    common = dist_checkpointing.load_common_state_dict(folder)
    args = common["args"]
    chunks = gpt_model.model_chunks(args, gpt_model.transformer_config(args, tp, pp, vpp), whole_logits=True)
    for model in chunks:  # so that a parameter that silently stays as it was cannot pass for a loaded one
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    keys = gpt_model.chunk_keys(chunks)
    metadata = (
        dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    )  # as Megatron-LM: says whether keys are per layer
    request = {key: model.sharded_state_dict(metadata=dict(metadata)) for key, model in zip(keys, chunks, strict=True)}
    # Megatron's words are the other way round: its `missing` is stored but not asked for, its `unexpected` is asked for but not stored
    state, not_asked_for, not_stored = dist_checkpointing.load(request, folder, strict="return_all")
    if not_stored:
        raise KeyError(f"the model wants what {folder} lacks: {sorted(not_stored)}")
    for key, model in zip(keys, chunks, strict=True):
        model.load_state_dict(state[key], strict=True)

    held: dict[str, Any] = {}
    for model in chunks:
        names = gpt_model.global_names(model)
        held.update({names[name]: parameter.detach().clone().contiguous() for name, parameter in model.named_parameters()})
    answer = gpt_model.logits(chunks, torch.tensor(job["ids"])) if job.get("ids") else None
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if answer is not None and tp_rank == 0 and parallel_state.get_data_parallel_rank() == 0:
        held["logits"] = answer.contiguous()
    output.mkdir(parents=True, exist_ok=True)
    position = {"tp_rank": tp_rank, "tp": tp, "pp_rank": parallel_state.get_pipeline_model_parallel_rank(), "pp": pp}
    save_file(held, output / f"rank{dist.get_rank()}.safetensors", {name: str(value) for name, value in position.items()})
    dist.barrier()
    if dist.get_rank() == 0:
        report = {
            "megatron_core": __version__,
            "unexpected": sorted(set(map(str, not_asked_for)) - {"common_state"}),
            "padded_vocab_size": args.padded_vocab_size,
            "iteration": common.get("iteration"),
            "checkpoint_version": common.get("checkpoint_version"),
            "content_metadata": {name: repr(value) for name, value in metadata.items()},
        }
        (output / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":  # megatron-core's writer starts processes that import this file again
    gpt_model.run_jobs(load)
