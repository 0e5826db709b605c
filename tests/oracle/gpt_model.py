"""Builds megatron-core's GPTModel from the `args` of a checkpoint, as Megatron-LM does, and starts the process groups it needs.

`transformer_config` and `model_chunks` follow core_transformer_config_from_args and the GPT builder of Megatron-LM (core_v0.16.1;
megatron.training 0.19.2). Every field of `args` that decides the model is read without a default: an `args` that lacks one must
fail here, because Megatron-LM would fail or, worse, guess.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckpt_tools.resume.trainer import cpu_shim


def run_jobs(do: Callable[[dict[str, Any]], None]) -> None:
    """The main program of a runner: `do` each job of the JSON list in sys.argv[1], on every rank; a failing job ends the process.

    JOBS.done beside JOBS.json holds how many were finished, so that whoever started the program knows which one failed.
    """
    import torch.distributed as dist

    cpu_shim.install()
    start_processes()
    path = Path(sys.argv[1])
    for number, job in enumerate(json.loads(path.read_text()), 1):
        do(job)
        if dist.get_rank() == 0:
            path.with_suffix(".done").write_text(str(number))
    dist.destroy_process_group()


def start_processes(seed: int = 1) -> None:
    """gloo over the ranks torchrun started, or a group of one without it; no port, no network where the world is one process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=limit)
    else:
        dist.init_process_group("gloo", timeout=limit, rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(seed)


def split_ranks(tp: int, pp: int, vpp: int | None = None, seed: int = 1) -> None:
    """(Re)make Megatron's model-parallel groups over the running processes; what tp * pp does not use is data parallel."""
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=vpp)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def transformer_config(args: Namespace, tp: int, pp: int, vpp: int | None = None, **changes: Any) -> Any:
    """TransformerConfig of `args` at the asked layout instead of the one the checkpoint was written at; `changes` goes last."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not args.swiglu:
        raise ValueError("this runner builds gated SiLU models only, and args.swiglu is false")
    fields: dict[str, Any] = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "kv_channels": args.kv_channels,
        "normalization": args.normalization,
        "layernorm_epsilon": args.layernorm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": args.add_bias_linear,
        "add_qkv_bias": args.add_qkv_bias,
        "qk_layernorm": args.qk_layernorm,
        "rotary_interleaved": args.rotary_interleaved,
        "attention_dropout": args.attention_dropout,
        "hidden_dropout": args.hidden_dropout,
        "params_dtype": args.params_dtype,
        "bf16": args.params_dtype == torch.bfloat16,
        "fp16": args.params_dtype == torch.float16,
        # how this run computes, not what the model is
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "pipeline_dtype": args.params_dtype,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**{**fields, **changes})


def model_chunks(args: Namespace, config: Any, *, whole_logits: bool = False) -> list[Any]:
    """The GPTModel of this rank (local layer spec), one per virtual pipeline stage.

    `whole_logits` gathers the vocabulary over tensor-parallel ranks, for looking at; training needs it not to.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    chunks = []
    pp_rank, pp = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size
    for stage in range(vpp or 1):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pp_rank == 0 and stage == 0,
            post_process=pp_rank == pp - 1 and stage == (vpp or 1) - 1,
            parallel_output=not whole_logits,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            vp_stage=stage if vpp else None,
        )
        chunks.append(model.to(config.params_dtype).eval())
    return chunks


def chunk_keys(chunks: list[Any]) -> list[str]:
    """Under which key Megatron-LM keeps each chunk in its state dict: `model`, or `model0`, `model1`, ... with virtual stages."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def global_names(model: Any) -> dict[str, str]:
    """Parameter name in this chunk -> the same name with the layer's number in the whole model."""
    names = {}
    for name, _ in model.named_parameters():
        start, _, rest = name.partition("decoder.layers.")
        if rest:
            index, _, rest = rest.partition(".")
            number = model.decoder.layers[int(index)].layer_number - 1
            names[name] = f"{start}decoder.layers.{number}.{rest}"
        else:
            names[name] = name
    return names


def logits(chunks: list[Any], ids: Any) -> Any:
    """Logits (batch, sequence, padded vocabulary) of token `ids` (batch, sequence) on the last pipeline stage, None on the others.

    Activations go from stage to stage with plain send and receive, so that nothing of Megatron's schedules is needed for a forward.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    batch, length = ids.shape
    positions = torch.arange(length)[None].expand(batch, -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    here, stages = dist.get_rank(group), len(ranks)
    output = None
    with torch.no_grad():
        for step in range(stages * len(chunks)):
            if step % stages != here:
                continue
            model = chunks[step // stages]
            if step > 0 and stages > 1:
                received = torch.empty(length, batch, model.config.hidden_size, dtype=model.config.params_dtype)
                dist.recv(received, ranks[(here - 1) % stages], group=group)
                model.set_input_tensor(received)
            elif step > 0:
                model.set_input_tensor(output)
            of_three = model.position_embedding_type == "mrope"  # time, height, width: of text all the same
            output = model(ids, positions[None].expand(3, -1, -1) if of_three else positions, mask)
            if step < stages * len(chunks) - 1 and stages > 1:
                dist.send(output.contiguous(), ranks[(here + 1) % stages], group=group)
    return output if here == stages - 1 else None
