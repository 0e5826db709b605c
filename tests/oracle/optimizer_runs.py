"""Trains tiny GPTModels with megatron-core's own optimizers, saves every form of optimizer state, and goes on from saved ones.

    python tests/oracle/optimizer_runs.py JOBS.json                       one process
    torchrun --standalone --nproc-per-node 4 tests/oracle/optimizer_runs.py JOBS.json

A job "train" takes {"hf": folder with config.json, "output": folder, "tp", "pp", "vpp", "ep": sizes, "experts": number or null, "grouped":
false, "optimizer": "distributed" | "plain", "bucket_size": elements (reduces gradients during the backward pass) or null, "steps": 2,
"learning_rate": 1e-3, "forms": [...], "legacy": false}. It saves OUTPUT/<form>/iter_0000002 per form, then takes one step more.
A job "resume" takes the same sizes and {"checkpoint": iteration folder, "form": ...}: it loads, and takes the same step.
Both write OUTPUT/truth_<steps>_<rank>.safetensors: float32 weights and moments out of the ranks' memory, keyed
`<state>|<torch_dist key>|<global shape>|<offset>` as megatron-core's own sharded_state_dict places them, and OUTPUT/losses.json.
The global batch is four sequences whatever the layout. The first failing job ends the process.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpt_model
import megatron_args

STATES = ("param", "exp_avg", "exp_avg_sq")
SEQUENCES, LENGTH, VOCABULARY = 4, 16, 90


def run(job: dict[str, Any]) -> None:
    """One job; every rank calls it."""
    import torch
    import torch.distributed as dist

    output = Path(job["output"])
    args, chunks = _build(job, output)
    with torch.no_grad():
        for model in chunks:
            names = gpt_model.global_names(model)
            for name, parameter in model.named_parameters():
                _initialise(parameter, names[name], model)
    wrapped, optimizer = _optimizer(job, chunks)
    losses = []
    steps = job.get("steps", 2)
    if "checkpoint" in job:
        _load(job, chunks, optimizer)
    else:
        losses += [_step(wrapped, optimizer, step) for step in range(steps)]
        for form in job["forms"]:
            _save(output / form, form, args, chunks, optimizer, steps)
        if job.get("legacy"):
            _save_legacy(output / "legacy", job, args, chunks, optimizer)
    _truth(output, steps, chunks, optimizer)
    losses.append(_step(wrapped, optimizer, steps))
    _truth(output, steps + 1, chunks, optimizer)
    if dist.get_rank() == dist.get_world_size() - 1:
        (output / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


def _build(job: dict[str, Any], output: Path) -> tuple[Any, list[Any]]:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    tp, pp, vpp, ep = (job.get(n) or d for n, d in (("tp", 1), ("pp", 1), ("vpp", None), ("ep", 1)))
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=vpp, expert_model_parallel_size=ep, create_gloo_process_groups=True
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    dp = dist.get_world_size() // (tp * pp)
    experts = job.get("experts")
    size = job.get("bucket_size")
    more: dict[str, Any] = {
        "data_parallel_size": dp,
        "world_size": dist.get_world_size(),
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1 if experts else tp,
        "num_experts": experts,
        "moe_grouped_gemm": bool(job.get("grouped")),
        "transformer_impl": "local",
        "use_distributed_optimizer": job.get("optimizer", "distributed") == "distributed",
        "overlap_grad_reduce": size is not None,
        "ddp_bucket_size": size,
        "consumed_train_samples": 8,
        "padded_vocab_size": 256,  # whatever tp is, so that layouts can be compared
    }
    if experts:
        more |= {"moe_ffn_hidden_size": 24, "moe_router_topk": 2}
    args = megatron_args.from_hf(Path(job["hf"]), tp, pp, vpp, **more)
    changes: dict[str, Any] = {"expert_model_parallel_size": ep}
    if experts:
        changes |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": bool(job.get("grouped")),
            "expert_tensor_parallel_size": 1,
            "add_bias_linear": False,
        }
    config = gpt_model.transformer_config(args, tp, pp, vpp, **changes)
    output.mkdir(parents=True, exist_ok=True)
    if not experts:
        return args, gpt_model.model_chunks(args, config)
    _patch_experts()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=bool(job.get("grouped")), normalization=config.normalization)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == pp - 1,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
    )
    return args, [model.to(config.params_dtype)]


def _patch_experts() -> None:
    """GroupedMLP (to 0.16) wants a CUDA extension."""
    if importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util"):
        from megatron.core.transformer.moe import grouped_gemm_util

        if grouped_gemm_util.ops is None:
            grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = types.SimpleNamespace(gmm=_multiply_one_by_one)


def _multiply_one_by_one(rows: Any, matrices: Any, counts: Any, trans_b: bool = False) -> Any:
    import torch

    parts = torch.split(rows, [int(n) for n in counts])
    return torch.cat([part @ (matrix.T if trans_b else matrix) for part, matrix in zip(parts, matrices, strict=True)])


def _initialise(parameter: Any, name: str, model: Any) -> None:
    """The same whole tensor at every layout: this rank's part of numbers that depend on the position in the whole tensor only."""
    import torch

    for _, offset, part in _sharded(model, parameter, parameter.detach()):
        whole, key, _ = part
        generator = torch.Generator().manual_seed(sum(map(ord, key)))
        values = torch.randn(whole, generator=generator, dtype=torch.float32) * 0.05
        if "norm" in key:
            values += 1.0
        box = tuple(slice(o, o + n) for o, n in zip(offset, part[2].shape, strict=True))
        part[2].copy_(values[box])


def _sharded(model: Any, parameter: Any, data: Any) -> Iterator[tuple[bool, tuple[int, ...], tuple[tuple[int, ...], str, Any]]]:
    """(whether this rank's copy counts, global offset, (global shape, key, this rank's data with the axes of the global tensor)) of each
    piece of a parameter, as the model's own sharded_state_dict says; `data` is cut like the parameter, without copying."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    if not hasattr(model, "_placed"):
        state, _ = extract_sharded_tensors_and_factories(model.sharded_state_dict(metadata={"singleton_local_shards": False}))
        model._placed = {id(s.data): s for s in nested_values(state)}
    found = model._placed[id(parameter)]
    data = data.view(parameter.shape)
    parts = (
        list(nested_values({"_": replace(found, data=data).build()}))
        if isinstance(found, ShardedTensorFactory)
        else [replace(found, data=data, dtype=data.dtype)]
    )
    for part in parts:
        local = part.data[(None,) * part.prepend_axis_num] if part.prepend_axis_num else part.data
        replica = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id,)
        yield not any(replica), tuple(part.global_offset), (tuple(part.global_shape), part.key, local)


def _optimizer(job: dict[str, Any], chunks: list[Any]) -> tuple[list[Any], Any]:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config, size = chunks[0].config, job.get("bucket_size")
    distributed = job.get("optimizer", "distributed") == "distributed"
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=size is not None, bucket_size=size
    )
    wrapped = [DistributedDataParallel(config, wrapping, c.train(), disable_bucketing=n > 0) for n, c in enumerate(chunks)]
    rate = job.get("learning_rate", 1e-3)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=rate,
            min_lr=rate,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        wrapped,
    )
    for group in optimizer.param_groups:  # Megatron-LM's scheduler does this before the first step
        group["weight_decay"] = 0.1 * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if job.get("bucket_size"):
        config.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped, optimizer


def _step(wrapped: list[Any], optimizer: Any, step: int) -> float:
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    dp = parallel_state.get_data_parallel_world_size()
    own = tokens.chunk(dp)[parallel_state.get_data_parallel_rank()]
    positions = torch.arange(LENGTH)[None]
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]

    def forward(batches: Any, model: Any) -> tuple[Any, Any]:
        ids, labels = next(batches)

        def loss(output: Any) -> tuple[Any, dict[str, Any]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach()}

        return model(ids, positions, mask, labels=labels), loss

    for model in wrapped:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    answers = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter([(row[None, :-1], row[None, 1:]) for row in own]) for _ in wrapped],
        model=wrapped,
        num_microbatches=len(own),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    updated, _, _ = optimizer.step()
    if not updated:
        raise RuntimeError("the optimizer skipped its step")
    return float(sum(a["loss"] for a in answers) / len(answers)) if answers else 0.0


def _metadata(form: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if form != "plain":
        metadata["distrib_optim_sharding_type"] = form
    if form == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _save(run: Path, form: str, args: Any, chunks: list[Any], optimizer: Any, steps: int) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    metadata = _metadata(form)
    inside = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": steps}
    for key, model in zip(gpt_model.chunk_keys(chunks), chunks, strict=True):
        state[key] = model.sharded_state_dict(metadata=dict(inside))
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(inside))
    folder = run / f"iter_{steps:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    choices: dict[str, Any] = {"content_metadata": metadata, "validate_access_integrity": False}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        choices["async_strategy"] = "mcore"
    dist_checkpointing.save(state, str(folder), **choices)
    if dist.get_rank() == 0:
        (run / "latest_checkpointed_iteration.txt").write_text(str(steps))
    dist.barrier()


def _save_legacy(run: Path, job: dict[str, Any], args: Any, chunks: list[Any], optimizer: Any) -> None:
    """As Megatron-LM's save_checkpoint writes the `torch` format: one folder per model-parallel rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    tp, pp, ep = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if (job.get("pp") or 1) > 1 else "") + (f"_{ep:03d}" if (job.get("ep") or 1) > 1 else "")
    folder = run / "iter_0000002" / name
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if hasattr(optimizer, "save_parameter_state") and job.get("optimizer", "distributed") == "distributed":
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0 or parallel_state.get_expert_data_parallel_rank() == 0:
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 2}
        for key, model in zip(gpt_model.chunk_keys(chunks), chunks, strict=True):
            state[key] = model.state_dict_for_save_checkpoint()
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, folder / "model_optim_rng.pt")
    if dist.get_rank() == 0:
        (run / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()


def _load(job: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    folder = job["checkpoint"]
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    _warm(optimizer)
    for model in chunks:  # so that a parameter that silently stays as it was cannot pass for a loaded one
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    keys = gpt_model.chunk_keys(chunks)
    request: dict[str, Any] = {key: model.sharded_state_dict(metadata=dict(metadata)) for key, model in zip(keys, chunks, strict=True)}
    request["optimizer"] = optimizer.sharded_state_dict(request, is_loading=True, metadata=dict(metadata))
    state, _, not_stored = dist_checkpointing.load(request, folder, strict="return_all", validate_access_integrity=False)
    missing = sorted(name for name in not_stored if not name.endswith("_extra_state"))  # which hold nothing where the spec is local
    if missing:
        raise KeyError(f"the run wants what {folder} lacks: {missing}")
    for key, model in zip(keys, chunks, strict=True):
        lacking, unexpected = model.load_state_dict(state[key], strict=False)
        if unexpected or not all(name.endswith("_extra_state") for name in lacking):
            raise KeyError(f"{folder}: lacking {lacking}, unexpected {unexpected}")
    optimizer.load_state_dict(state["optimizer"])
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for held in one.optimizer.state.values():  # 0.16.1 gives all parameters one and the same tensor, which torch counts up for each
            held["step"] = held["step"].clone()


def _warm(optimizer: Any) -> None:
    """torch's Adam has no state before its first step, and 0.16.1 cannot load into that: take a step that changes nothing."""
    import torch

    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
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


def _truth(output: Path, steps: int, chunks: list[Any], optimizer: Any) -> None:
    """Write this rank's float32 weights and moments as they are in memory. Every rank calls it."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    owner = {id(p): model for model in chunks for p in model.parameters()}
    held: dict[str, Any] = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, values in _memory(one):
            for state, value in values.items():
                for counts, offset, (shape, key, data) in _sharded(owner[id(parameter)], parameter, value):
                    if counts:
                        held[f"{state}|{key}|{'.'.join(map(str, shape))}|{'.'.join(map(str, offset))}"] = data.detach().clone().contiguous()
    save_file(held, output / f"truth_{steps}_{dist.get_rank()}.safetensors")
    dist.barrier()


def _memory(one: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(model parameter, its float32 weights and moments, flat) of one optimizer, on the ranks that have them whole."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer

    if isinstance(one, DistributedOptimizer):
        world = one.get_parameter_state_dp_zero()
        if world is None:
            return
        for number, buffer in enumerate(one.buffers):
            (tensors,) = world[number].values()
            starts = [0]  # of each bucket where buckets are joined without the padding at their ends
            for bucket in buffer.buckets:
                starts.append(starts[-1] + bucket.numel_unpadded)
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                begin = start - buffer.buckets[bucket].offset + starts[bucket]
                yield parameter, {s: tensors[s][begin : begin + end - start] for s in STATES}
    elif isinstance(one, FP32Optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                state = one.optimizer.state[parameter]
                yield parameter, {"param": parameter, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    else:
        for halves, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(halves, mains, strict=True):
                state = one.optimizer.state[main]
                yield parameter, {"param": main, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


if __name__ == "__main__":  # megatron-core's writer starts processes that import this file again
    gpt_model.run_jobs(run)
