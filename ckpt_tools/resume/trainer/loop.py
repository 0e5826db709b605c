"""The training loop: build, load, step, record, save."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from ..job import Job
from . import data, lora, model, optimizer
from .checkpointing import Run, everything, load, save
from .faults import Fault
from .parallel import rank, split_ranks
from .placement import Placement, initialise
from .state import Recorder


def train(job: Job) -> None:
    """Do one job: build the model at its layout, load or initialise it, train to the last iteration, saving and recording on the way."""
    run = start(job)
    recorder = Recorder(run, job.name, Path(job.output))
    recorder.step({}, dump=run.iteration in job.dumps)
    _tell(job, run)
    while run.iteration < job.until:
        happened = step(run, job)
        recorder.step(happened, dump=run.iteration in job.dumps)
        _tell(job, run)
        for iteration, root in job.saves:
            if iteration == run.iteration:
                save(run, Path(root), job.save_form)
    dist.barrier()


def start(job: Job) -> Run:
    """The run at its first iteration: at its beginning, or where the checkpoint was saved."""
    args = Namespace(**job.args)
    args.params_dtype = getattr(torch, str(args.params_dtype))
    args.transformer_impl = "transformer_engine" if model.transformer_engine(job.spec) else "local"
    split_ranks(args, job.seed)
    config = model.configuration(args, args.params_dtype, job.spec)
    chunks = model.build(args, config, job.spec)
    for chunk in chunks:
        if job.lora:
            lora.adapt(chunk)
        if job.load is None or job.lora:  # what is loaded need not be made first, an adapter's base is not in its checkpoint
            initialise(Placement(chunk))
    distributed = job.optimizer == "distributed"
    wrapped, adam = optimizer.wrap(chunks, distributed=distributed, rate=job.rate)
    warmup = job.sequences * max(1, job.steps // 4)
    scheduler = optimizer.schedule(adam, rate=job.rate, samples=2 * job.sequences * job.steps, warmup=warmup)
    run = Run(args, chunks, wrapped, adam, scheduler, distributed, lora.is_factor if job.lora else everything)
    if job.load is None:
        optimizer.make_state(adam)
    else:
        fault = Fault(job.fault)
        load(run, Path(job.load), job.load_form, fault, Path(job.weights) if job.weights else None)
        fault.after(run)
    return run


def step(run: Run, job: Job) -> dict[str, Any]:
    """One step of Megatron's schedule and optimizer over the next samples; what happened: loss, gradient norm, rate, sample numbers.

    The loss is the mean over the data-parallel ranks and is known on the last pipeline stage only.
    """
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    numbers = data.own_samples(run.consumed, job.sequences, replica, replicas)
    device = torch.cuda.current_device()
    vocabulary = run.args.vocab_size or run.args.padded_vocab_size
    rows = [data.sample(n, job.length, vocabulary, job.seed).to(device)[None] for n in numbers]
    positions = torch.arange(job.length, device=device)[None]
    mask = torch.triu(torch.ones(job.length, job.length, dtype=torch.bool, device=device), 1)[None, None]

    def forward(batches: Any, chunk: Any) -> tuple[Any, Any]:
        row = next(batches)

        def loss(output: Any) -> tuple[Any, dict[str, Any]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}  # the schedule divides the first in place

        return chunk(row[:, :-1], positions, mask, labels=row[:, 1:]), loss

    for chunk in run.wrapped:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    answers = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(rows) for _ in run.wrapped] if len(run.wrapped) > 1 else iter(rows),
        model=run.wrapped,
        num_microbatches=len(rows),
        seq_length=job.length,
        micro_batch_size=1,
        forward_only=False,
    )
    rate, decay = run.optimizer.param_groups[0]["lr"], run.optimizer.param_groups[0]["weight_decay"]
    updated, norm, _ = run.optimizer.step()
    if not updated:
        raise RuntimeError(f"the optimizer skipped the step after iteration {run.iteration}: a gradient was not finite")
    run.scheduler.step(increment=job.sequences)
    run.iteration += 1
    run.consumed += job.sequences
    return {
        "loss": _mean([answer["loss"] for answer in answers]) if answers else None,
        "grad_norm": float(norm),
        "lr": rate,
        "weight_decay": decay,
        "samples": numbers,
    }


def _mean(losses: list[Any]) -> float:
    total = torch.stack([loss.float() for loss in losses]).mean()
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(total, group=group)
    return float(total) / int(dist.get_world_size(group))


def _tell(job: Job, run: Run) -> None:
    if rank() == 0:
        sys.stdout.write(json.dumps({"job": job.name, "iteration": run.iteration, "until": job.until}) + "\n")
        sys.stdout.flush()
