"""The GPTModel of Megatron's arguments, as Megatron-LM builds it: core_transformer_config_from_args and the GPT builder.

Every field of TransformerConfig that `args` has under the same name is taken. Fields for which Megatron-LM has no argument (an activation
by name) are what its users' own model builders pass.
"""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

_YARN = {"rotary_scaling_factor": "yarn_rotary_scaling_factor", "mscale": "yarn_mscale", "mscale_all_dim": "yarn_mscale_all_dim"}
_PRECISION = ("fp8", "fp4")  # this trainer computes in the dtype of the parameters
_LAYOUT = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
}


def transformer_engine(spec: str) -> bool:
    """Whether the Transformer Engine layer spec is to be used: asked for, or "auto" on a machine where it works."""
    return spec == "te" or (spec == "auto" and torch.cuda.is_available() and find_spec("transformer_engine") is not None)


def activation(args: Namespace) -> tuple[bool, Any]:
    """(gated, function) of the MLP."""
    known = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": _gelu_tanh,
        "quick_gelu": activations.quick_gelu,
        "squared_relu": activations.squared_relu,
        "relu": F.relu,
    }
    if getattr(args, "swiglu", False):
        return True, F.silu
    if getattr(args, "squared_relu", False):
        return False, activations.squared_relu
    if getattr(args, "quick_geglu", False):
        return True, activations.quick_gelu
    name = getattr(args, "activation_func", None) or "gelu"
    return bool(getattr(args, "gated_linear_unit", False)), known[name]


def _gelu_tanh(x: Any) -> Any:
    return F.gelu(x, approximate="tanh")


def configuration(args: Namespace, dtype: Any, spec: str) -> Any:
    """TransformerConfig or MLATransformerConfig of `args` at the layout that `args` name, computing in `dtype`.

    Fusions are off where they need a GPU: they change how a step computes, not what a checkpoint holds.
    """
    te = transformer_engine(spec)
    kind = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    names = {f.name for f in dataclasses.fields(kind)}
    fields = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    for name in [n for n in fields if "parallel" in n or "pipeline" in n or n.startswith(_PRECISION)]:
        del fields[name]
    if "q_lora_rank" in names:
        fields["q_lora_rank"] = args.q_lora_rank
    for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "virtual_pipeline_model"):
        fields[f"{name}_parallel_size"] = getattr(args, f"{name}_parallel_size")
    fields |= {new: getattr(args, old) for old, new in _LAYOUT.items() if getattr(args, old, None)}
    experts = getattr(args, "num_experts", None)
    gated, function = activation(args)
    fields |= {
        "num_moe_experts": experts,
        "num_query_groups": args.num_query_groups if getattr(args, "group_query_attention", False) else None,
        "layernorm_zero_centered_gamma": bool(getattr(args, "layernorm_zero_centered_gamma", False)),
        "gated_linear_unit": gated,
        "activation_func": function,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "deterministic_mode": False,
        "use_cpu_initialization": True,
        "perform_initialization": True,  # without it parameters are not marked as tensor-parallel, and norms of gradients are wrong
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": True,
    }
    if not torch.cuda.is_available():
        fields |= dict.fromkeys(
            ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "persist_layer_norm"), False
        )
    if experts:
        fields |= {
            "moe_grouped_gemm": te,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_permute_fusion": False,
            "moe_shared_expert_overlap": False,
        }
    if kind is MLATransformerConfig:
        yarn = args.position_embedding_type == "yarn" or getattr(args, "rope_type", None) == "yarn"
        fields["rope_type"] = "yarn" if yarn else "rope"
    if fields["layernorm_zero_centered_gamma"] and not te:
        raise NotImplementedError("norms that store gamma - 1 need Transformer Engine: the local spec's norms do not know them")
    config = kind(**{k: v for k, v in fields.items() if k in names})
    for name, value in vars(args).items():  # 0.16.1 reads yarn's numbers off the config without declaring them
        if name in _YARN or name.startswith("yarn_"):
            setattr(config, _YARN.get(name, name), value)
    return config


def build(args: Namespace, config: Any, spec: str) -> list[Any]:
    """The model chunks of this rank: one, or one per virtual pipeline stage. Parameters are uninitialised."""
    te = transformer_engine(spec)
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp or 1):
        virtual = stage if vpp else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization=config.normalization, vp_stage=virtual)
        more: dict[str, Any] = {}
        if getattr(args, "mtp_num_layers", None):
            more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, block, use_transformer_engine=te, vp_stage=virtual)
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=bool(getattr(args, "use_rope_scaling", False)),
            rope_scaling_factor=getattr(args, "rope_scaling_factor", None) or 8.0,
            seq_len_interpolation_factor=getattr(args, "rotary_seq_len_interpolation_factor", None),
            vp_stage=virtual,
            **more,
        )
        biases = {n: b for n, b in model.named_buffers() if b is not None and n.endswith("expert_bias")}
        model = model.to(config.params_dtype)
        for name, bias in biases.items():  # stay float32, whatever the model's dtype
            owner, _, last_name = name.rpartition(".")
            setattr(model.get_submodule(owner), last_name, bias.float())
        chunks.append(model.to(torch.cuda.current_device()))
    return chunks


def keys(chunks: list[Any]) -> list[str]:
    """Under which key Megatron-LM keeps each chunk in its state dict: `model`, or `model0`, `model1`, ... with virtual stages."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def takes(function: Any, name: str) -> bool:
    """Whether a function of this megatron-core has an argument of that name."""
    return name in inspect.signature(function).parameters
