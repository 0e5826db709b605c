"""Megatron's optimizer and learning-rate schedule around a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

WEIGHT_DECAY = 0.1


def wrap(chunks: list[Any], *, distributed: bool, rate: float) -> tuple[list[Any], Any]:
    """(model chunks in Megatron's data-parallel wrapper, optimizer): Adam with float32 weights and gradients, clipped at 1."""
    config = chunks[0].config
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = [DistributedDataParallel(config, wrapping, c.train(), disable_bucketing=n > 0) for n, c in enumerate(chunks)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=rate,
            min_lr=rate / 10,
            weight_decay=WEIGHT_DECAY,
            clip_grad=1.0,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        wrapped,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def schedule(optimizer: Any, *, rate: float, samples: int, warmup: int) -> Any:
    """Linear warm-up and cosine decay, counted in samples as Megatron-LM counts them; a checkpoint's own schedule takes precedence."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rate,
        min_lr=rate / 10,
        lr_warmup_steps=warmup,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain (dense and expert parameters), or the one there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def make_state(optimizer: Any) -> None:
    """Give every parameter its moments, all zero: torch's Adam has none before its first step, and 0.16.1 cannot load into that."""
    for one in parts(optimizer):
        inner = one.optimizer
        rates = [(g["lr"], g["weight_decay"]) for g in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for group, (rate, decay) in zip(inner.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
            for parameter in group["params"]:
                parameter.grad = None
    set_steps(optimizer, 0)


def own_steps(optimizer: Any) -> None:
    """A step count of its own for each parameter: 0.16.1 loads one and the same tensor for all, which torch's Adam counts up for each."""
    for one in parts(optimizer):
        for held in one.optimizer.state.values():
            if "step" in held:
                held["step"] = torch.as_tensor(held["step"]).clone()


def steps(optimizer: Any) -> list[int]:
    """The different step counts that the optimizer holds, per parameter (torch's Adam) or per group (the fused ones)."""
    found = set()
    for one in parts(optimizer):
        own = {int(held["step"]) for held in one.optimizer.state.values() if "step" in held}
        found |= own or {int(group["step"]) for group in one.optimizer.param_groups if "step" in group and group["params"]}
    return sorted(found)


def set_steps(optimizer: Any, step: int) -> None:
    """Make the optimizer believe that it has taken so many steps."""
    for one in parts(optimizer):
        for held in one.optimizer.state.values():
            if "step" in held:
                held["step"] = torch.full_like(torch.as_tensor(held["step"]), step)
        for group in one.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def memory(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(model parameter, {"master", "exp_avg", "exp_avg_sq"}: float32 tensors of as many elements), on the ranks that hold them whole.

    The distributed optimizer's pieces are gathered over the data-parallel ranks: every rank must call this to the end. A parameter that
    is float32 itself has no "master" in the other optimizers.
    """
    for one in parts(optimizer):
        if isinstance(one, DistributedOptimizer):
            yield from _cut(one, one.get_parameter_state_dp_zero())
        else:
            yield from _held(one)


def change(optimizer: Any, alter: Callable[[list[tuple[Any, dict[str, Any]]]], None]) -> None:
    """Let `alter` change what `memory` yields in place, and give it back to the optimizer. Every rank calls it."""
    for one in parts(optimizer):
        if isinstance(one, DistributedOptimizer):
            world = one.get_parameter_state_dp_zero()
            alter(list(_cut(one, world)))
            with torch.no_grad():
                one.load_parameter_state_from_dp_zero(world)
        else:
            alter(list(_held(one)))


def _held(one: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    if isinstance(one, FP32Optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, _moments(one.optimizer.state[parameter])
        return
    for halves, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
        for parameter, main in zip(halves, mains, strict=True):
            yield parameter, {"master": main.detach(), **_moments(one.optimizer.state[main])}
    for parameters in one.fp32_from_fp32_groups:
        for parameter in parameters:
            yield parameter, _moments(one.optimizer.state[parameter])


def _moments(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}


def _cut(one: Any, world: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    if world is None:
        return
    for number, buffer in enumerate(one.buffers):
        (tensors,) = world[number].values()
        starts = [0]  # of each bucket, where buckets are joined without the padding at their ends
        for bucket in buffer.buckets:
            starts.append(starts[-1] + bucket.numel_unpadded)
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            begin = start - buffer.buckets[bucket].offset + starts[bucket]
            whole = {state: tensors[state][begin : begin + end - start] for state in ("param", "exp_avg", "exp_avg_sq")}
            yield parameter, {"master": whole.pop("param"), **whole}
