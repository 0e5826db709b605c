"""Builds tiny GPTModels at any parallel layout and lets them save and load the legacy `torch` format as Megatron-LM does.

    torchrun --standalone --nproc-per-node 4 tests/oracle/legacy_layouts.py JOBS.json

A job takes {"hf": folder with config.json, "output": folder, "tp", "pp", "vpp", "ep", "etp": sizes, "first", "last": layers of the first
and last stage, "layout": pipeline layout string, "embedding", "loss": count as layers, "experts": number, "grouped": GroupedMLP,
"dense": number of first layers without experts, "mtp": number of MTP layers} and either {"save": run folder} or {"checkpoint": iteration
folder}. Saving starts from numbers that depend on the position in the whole tensor only; loading is torch.load(weights_only=True) with
Megatron's own list of safe classes, then load_state_dict(strict=True) into models filled with NaN.
Each job writes OUTPUT/whole_<rank>.safetensors, keyed `<torch_dist key>|<global shape>|<offset>` as megatron-core's own
sharded_state_dict places what the rank holds (as float32), and OUTPUT/logits.safetensors (not with MTP). The first failing job ends the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpt_model
import megatron_args
import optimizer_runs

IDS = [[3, 17, 60, 85, 8, 1, 42, 77, 30, 12], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]


def run(job: dict[str, Any]) -> None:
    """One job; every rank calls it."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from safetensors.torch import save_file

    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    args, chunks = _build(job)
    with torch.no_grad():
        for model in chunks:
            names = gpt_model.global_names(model)
            for name, parameter in model.named_parameters():
                if "checkpoint" in job:
                    parameter.fill_(float("nan"))
                else:
                    optimizer_runs._initialise(parameter, names[name], model)
    if "checkpoint" in job:
        _load(Path(job["checkpoint"]), job, chunks)
    else:
        _save(Path(job["save"]), job, args, chunks)
    held = {}
    for model in chunks:
        for parameter in model.parameters():
            for _, offset, (shape, key, data) in optimizer_runs._sharded(model, parameter, parameter.detach()):
                held[f"{key}|{'.'.join(map(str, shape))}|{'.'.join(map(str, offset))}"] = data.float().clone().contiguous()
    save_file(held, output / f"whole_{dist.get_rank()}.safetensors")
    if not job.get("mtp"):
        answer = gpt_model.logits(chunks, torch.tensor(IDS))
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
        if answer is not None and first:
            save_file({"logits": answer.float().contiguous()}, output / "logits.safetensors")
    dist.barrier()


def _build(job: dict[str, Any]) -> tuple[Any, list[Any]]:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    tp, pp, vpp, ep, etp = (job.get(n) or d for n, d in (("tp", 1), ("pp", 1), ("vpp", None), ("ep", 1), ("etp", None)))
    text = job.get("layout")
    layout = PipelineParallelLayerLayout(text, pp) if text else None
    if layout is not None:
        vpp = layout.virtual_pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size > 1 else None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=vpp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp or tp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    experts, dense, mtp = job.get("experts"), job.get("dense", 0), job.get("mtp")
    more: dict[str, Any] = {
        "data_parallel_size": dist.get_world_size() // (tp * pp),
        "world_size": dist.get_world_size(),
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp or tp,
        "decoder_first_pipeline_num_layers": job.get("first"),
        "decoder_last_pipeline_num_layers": job.get("last"),
        "account_for_embedding_in_pipeline_split": bool(job.get("embedding")),
        "account_for_loss_in_pipeline_split": bool(job.get("loss")),
        "pipeline_model_parallel_layout": layout,
        "num_experts": experts,
        "moe_grouped_gemm": bool(job.get("grouped")),
        "mtp_num_layers": mtp,
        "ckpt_format": "torch",
        "make_vocab_size_divisible_by": 32,
        "padded_vocab_size": -(-90 // (32 * tp)) * 32 * tp,
    }
    changes: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": job.get("first"),
        "num_layers_in_last_pipeline_stage": job.get("last"),
        "account_for_embedding_in_pipeline_split": bool(job.get("embedding")),
        "account_for_loss_in_pipeline_split": bool(job.get("loss")),
        "pipeline_model_parallel_layout": layout,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp or tp,
        "mtp_num_layers": mtp,
    }
    if experts:
        more |= {"moe_ffn_hidden_size": 24, "moe_router_topk": 2, "moe_layer_freq": [0] * dense + [1] * (6 - dense) if dense else 1}
        changes |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_layer_freq": [0] * dense + [1] * (6 - dense) if dense else 1,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": bool(job.get("grouped")),
        }
        optimizer_runs._patch_experts()
    args = megatron_args.from_hf(Path(job["hf"]), tp, pp, vpp, **more)
    config = gpt_model.transformer_config(args, tp, pp, vpp, **changes)
    return args, [_chunk(args, config, stage if vpp else None) for stage in range(vpp or 1)]


def _chunk(args: Any, config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    choices: dict[str, Any] = {"use_transformer_engine": False, "normalization": config.normalization, "vp_stage": stage}
    spec = get_gpt_decoder_block_spec(config, **choices)
    prediction = None
    if args.mtp_num_layers:
        # as Megatron-LM's gpt_builders.py: a stage without decoder layers takes the last layer's spec
        layer = spec if spec.layer_specs else get_gpt_decoder_layer_specs(config, **choices)[-1]
        prediction = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=stage)
    rank, last = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size - 1
    virtual = config.virtual_pipeline_model_parallel_size or 1
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=rank == 0 and not stage,
        post_process=rank == last and (stage or 0) == virtual - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=prediction,
        vp_stage=stage,
    )
    return model.to(config.params_dtype).eval()


def _folder(job: dict[str, Any]) -> str:
    """This rank's folder, as Megatron-LM's get_checkpoint_name says."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if (job.get("pp") or 1) > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    return name + (f"_{parallel_state.get_expert_model_parallel_rank():03d}" if (job.get("ep") or 1) > 1 else "")


def _save(run: Path, job: dict[str, Any], args: Any, chunks: list[Any]) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_rank() == 0 or parallel_state.get_expert_data_parallel_rank() == 0:
        folder = run / "iter_0000005" / _folder(job)
        folder.mkdir(parents=True)
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
        for key, model in zip(gpt_model.chunk_keys(chunks), chunks, strict=True):
            state[key] = model.state_dict_for_save_checkpoint()
        torch.save(state, folder / "model_optim_rng.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (run / "latest_checkpointed_iteration.txt").write_text("5")


def _load(iteration: Path, job: dict[str, Any], chunks: list[Any]) -> None:
    import torch
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    state = torch.load(iteration / _folder(job) / "model_optim_rng.pt", map_location="cpu", weights_only=True)
    if state["checkpoint_version"] != 3.0:
        raise ValueError(f"checkpoint_version {state['checkpoint_version']}")
    for key, model in zip(gpt_model.chunk_keys(chunks), chunks, strict=True):
        model.load_state_dict(state[key], strict=True)


if __name__ == "__main__":
    gpt_model.run_jobs(run)
