"""Megatron-LM's `args` as a checkpoint holds them: reading what releases call differently, and the whole set to store.

Source: load_args_from_checkpoint, check_checkpoint_args and load_checkpoint in megatron/training/checkpointing.py, 0.13.1 to 0.19.2,
and the arguments of checkpoints that Megatron-LM 0.16.1 wrote (their defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dtypes import dtype as dtype_named
from ..errors import CkptError

# Attributes whose value in a real checkpoint is a torch.dtype; here and in checkpoint_args a ckpt dtype name.
DTYPE_ATTRIBUTES = ("params_dtype",)

# Read by load_args_from_checkpoint (--use-checkpoint-args), with the value of a plain GPT model for those that no rule gives. None is
# "not provided" to the loader, which then keeps the command line's value.
MODEL: dict[str, Any] = {
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "seq_length": None,
    "num_attention_heads": None,
    "num_query_groups": None,
    "group_query_attention": None,
    "kv_channels": None,
    "max_position_embeddings": None,
    "position_embedding_type": "rope",
    "add_position_embedding": False,
    "use_rotary_position_embeddings": False,  # deprecated since position_embedding_type; True prints a warning
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "squared_relu": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "apply_layernorm_1p": False,
    "normalization": "RMSNorm",
    "apply_query_key_layer_scaling": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "padded_vocab_size": None,
}
MOE: dict[str, Any] = {
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_pre_softmax": False,
    "moe_grouped_gemm": False,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_latent_size": None,
}
OTHER_MODELS: dict[str, Any] = {
    "spec": None,
    "mtp_num_layers": None,
    "mtp_use_repeated_layer": False,
    "mtp_hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
    "is_hybrid_model": False,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
}
TOKENIZER: dict[str, Any] = {"tokenizer_model": None, "tokenizer_type": None, "tiktoken_pattern": None}
# Taken by the loader only with --use-mp-args-from-checkpoint-args, and compared by it to decide about random states.
PARALLEL: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "context_parallel_size": 1,
    "data_parallel_size": 1,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "sequence_parallel": False,
}
# Read by load_checkpoint and check_checkpoint_args. no_save_*: the checkpoint has no optimizer and random states to look for.
RUN: dict[str, Any] = {
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "skipped_train_samples": 0,
    "global_batch_size": None,
    "data_parallel_random_init": False,
    "use_distributed_optimizer": False,
    "use_dist_ckpt": True,
    "ckpt_fully_parallel_save": True,
    "async_save": False,
    "transformer_impl": "transformer_engine",
    "vocab_size": None,
    "make_vocab_size_divisible_by": 128,
}
# Part of the model, but not restored by --use-checkpoint-args in any release up to 0.19.2: (attribute, flag, value that needs no flag).
NOT_RESTORED: tuple[tuple[str, str, Any], ...] = (
    ("qk_layernorm", "--qk-layernorm", False),
    ("layernorm_epsilon", "--norm-epsilon", 1e-5),
    ("layernorm_zero_centered_gamma", "--apply-layernorm-1p", False),
    ("window_size", "--window-size", None),
    ("window_attn_skip_freq", "--window-attn-skip-freq", None),
    ("use_rope_scaling", "--use-rope-scaling", False),
    ("rope_scaling_factor", "--rope-scaling-factor", 8.0),
    ("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor", None),
    ("softmax_type", "--softmax-type", "vanilla"),
    ("quick_geglu", "--quick-geglu", False),
    ("glu_linear_offset", "--glu-linear-offset", 0.0),
    ("activation_func_clamp_value", "--activation-func-clamp-value", None),
    ("init_method_std", "--init-method-std", 0.02),
    ("bf16", "--bf16", False),
    ("fp16", "--fp16", False),
)
YARN_NOT_RESTORED: tuple[tuple[str, str, Any], ...] = (
    ("rotary_scaling_factor", "--rotary-scaling-factor", 1.0),
    ("yarn_original_max_position_embeddings", "--yarn-original-max-position-embeddings", 4096),
    ("yarn_beta_fast", "--yarn-beta-fast", 32.0),
    ("yarn_beta_slow", "--yarn-beta-slow", 1.0),
    ("mscale", "--mscale", 1.0),
    ("mscale_all_dim", "--mscale-all-dim", 0.0),
)


def checkpoint_args(
    args: Mapping[str, Any], *, layout: Mapping[str, int], iteration: int, ckpt_format: str = "torch_dist", weights_only: bool = True
) -> dict[str, Any]:
    """Every attribute to store as argparse.Namespace `args`, so that Megatron-LM's --use-checkpoint-args finds the model.

    args          of the model (args_from_config, or those of a source checkpoint, whose other plain attributes are kept).
    layout        tensor_model_parallel_size, pipeline_model_parallel_size, ... of the checkpoint written; what is not named is 1.
    weights_only  no optimizer and random states are written: Megatron then looks for none, and counts samples from 0.
    Values are plain; those of DTYPE_ATTRIBUTES are dtype names that the writer stores as torch dtypes.
    Errors: E301 when a size that Megatron needs is missing.
    """
    known = effective_args(args)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"):
        if known.get(name) is None:
            raise CkptError("E301", f"the model's arguments lack {name}", hint="give the HF config with --hf-config DIR")
    out: dict[str, Any] = {**MODEL, **MOE, **OTHER_MODELS, **TOKENIZER, **RUN, "rope_scaling_factor": 8.0}
    out |= {name: value for name, value in known.items() if value is not None or name not in out if plain(value)}
    if out.get("seq_length") is None:
        out["seq_length"] = out["max_position_embeddings"]
    out["moe_ffn_hidden_size"] = out["moe_ffn_hidden_size"] if out["num_experts"] else None
    out["layernorm_epsilon"] = out["norm_epsilon"] = out.get("layernorm_epsilon", 1e-5)  # named norm_epsilon up to 0.15
    params = dtype_named(str(known.get("params_dtype") or "float32")).name
    out |= {"params_dtype": params, "bf16": params == "bfloat16", "fp16": params == "float16"}
    out |= {**PARALLEL, **layout}
    model_ranks = out["tensor_model_parallel_size"] * out["pipeline_model_parallel_size"] * out["context_parallel_size"]
    out["world_size"] = layout.get("world_size", model_ranks * out["data_parallel_size"])
    out["ckpt_format"], out["iteration"] = ckpt_format, iteration
    out["use_dist_ckpt"] = ckpt_format != "torch"
    if weights_only:
        out |= {
            "no_save_optim": True,
            "no_save_rng": True,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "skipped_train_samples": 0,
        }
    return out


def is_gated(args: Mapping[str, Any]) -> bool:
    """Whether linear_fc1 is [gate; up]."""
    return bool(args.get("gated_linear_unit") or args.get("quick_geglu") or args.get("swiglu", True))


def flags_not_restored(args: Mapping[str, Any]) -> tuple[str, ...]:
    """The command-line flags that --use-checkpoint-args does not set and this model needs, as one would type them."""
    known = effective_args(args)
    table = NOT_RESTORED + (YARN_NOT_RESTORED if known.get("position_embedding_type") == "yarn" else ())
    flags = [f"{flag}{_typed(known[name])}" for name, flag, usual in table if known.get(name) is not None and known[name] != usual]
    if known.get("mrope_section"):
        flags.append(f"--mrope-section {' '.join(map(str, known['mrope_section']))}")
    if known.get("yarn_correction_range_round_to_int") is False:
        flags.append("--no-yarn-correction-range-round-to-int")
    return tuple(flags)


def _typed(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, tuple) and len(value) == 2:
        return " " + ",".join(str(v) for v in value)
    return " " + str(value).replace(" ", "")


def effective_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `args` in which what releases of Megatron-LM say differently is said as 0.16 does, and implied values are filled in."""
    out = dict(args)
    if out.get("layernorm_epsilon") is None and out.get("norm_epsilon") is not None:
        out["layernorm_epsilon"] = out["norm_epsilon"]
    if out.get("num_experts") is None and out.get("num_moe_experts") is not None:
        out["num_experts"] = out["num_moe_experts"]
    for name in ("num_experts", "mtp_num_layers"):
        if out.get(name) == 0:
            out[name] = None
    if isinstance(out.get("disable_bias_linear"), bool) and out.get("add_bias_linear") is None:
        out["add_bias_linear"] = not out["disable_bias_linear"]
    if out.get("apply_layernorm_1p") is True:
        out["layernorm_zero_centered_gamma"] = True
    if out.get("use_rotary_position_embeddings") is True and out.get("position_embedding_type") in (None, "learned_absolute"):
        out["position_embedding_type"] = "rope"
    heads, hidden = out.get("num_attention_heads"), out.get("hidden_size")
    if (
        out.get("group_query_attention") is False or out.get("num_query_groups") is None
    ):  # the option's default is 1, which then means nothing
        out["num_query_groups"] = heads
    if out.get("kv_channels") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden % heads == 0:
        out["kv_channels"] = hidden // heads
    return out


def plain(value: Any) -> bool:
    """Whether a value consists of nothing but None, booleans, numbers, strings, lists, tuples and dicts."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(plain(k) and plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)
