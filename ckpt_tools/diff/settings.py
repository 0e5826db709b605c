"""Where two sides disagree about the model itself: arguments and config fields that change what it computes, not how it was trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..families.config_kinds import same
from ..notes import Note
from .result import Unlike
from .sides import Named

# What a model computes depends on these. Not among them: precision and initialisation of training, dropout, sequence length, loss terms.
MODEL_ARGS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size",
    "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm",
    "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
    "use_rope_scaling", "no_rope_freq", "swiglu", "squared_relu", "openai_gelu", "quick_geglu", "add_bias_linear", "add_qkv_bias",
    "qk_layernorm", "qk_l2_norm", "untie_embeddings_and_output_weights", "window_size", "window_attn_skip_freq", "softmax_type",
    "glu_linear_offset", "activation_func_clamp_value",
    "attention_output_gate", "multi_latent_attention", "num_experts", "mtp_num_layers",
)  # fmt: skip
# These are stored with some default also by models that have no use for them: they count when both sides have the switch on.
SWITCHED: tuple[tuple[Callable[[Mapping[str, Any]], bool], tuple[str, ...]], ...] = (
    (lambda args: bool(args.get("use_rope_scaling")), ("rope_scaling_factor",)),
    (
        lambda args: bool(args.get("multi_latent_attention")),
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mscale", "mscale_all_dim"),
    ),
    (
        lambda args: args.get("position_embedding_type") == "yarn" or bool(args.get("multi_latent_attention")),
        ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    ),
    (
        lambda args: bool(args.get("num_experts")),
        (
            "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups",
            "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_shared_expert_gate",
            "moe_shared_expert_intermediate_size", "moe_layer_freq",
        ),
    ),
)  # fmt: skip
# Of config.json, when its family is not known: who wrote it, for which software, with which precision, how text is generated.
NOT_THE_MODEL = frozenset(
    (
        "transformers_version", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache", "initializer_range",
        "attention_dropout", "hidden_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "pretraining_tp",
        "router_aux_loss_coef", "output_router_logits", "_attn_implementation",
    )
)  # fmt: skip


def compare_settings(a: Named, b: Named) -> tuple[list[Unlike], list[Note]]:
    """Settings that differ, and notes about what could not be compared. A setting that only one side states is not compared."""
    if a.args is not None and b.args is not None:
        names: tuple[str, ...] = MODEL_ARGS
        for applies, more in SWITCHED:
            names += more if applies(a.args) and applies(b.args) else ()
        return _unlike(a.args, b.args, names), []
    if a.config is not None and b.config is not None:
        return _unlike(a.config, b.config, sorted((a.config.keys() & b.config.keys()) - NOT_THE_MODEL)), []
    lacking = " and ".join(label for label, side in (("A", a), ("B", b)) if side.args is None and side.config is None)
    return [], [Note("warning", "", f"settings were not compared: {lacking or 'one side'} says none that ckpt can read")]


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, ...] | list[str]) -> list[Unlike]:
    return [
        Unlike(n, _brief(a[n]), _brief(b[n])) for n in names if n in a and n in b and None not in (a[n], b[n]) and not same(a[n], b[n])
    ] + [
        # of None against a value only sizes and switches say something: elsewhere None means that a release did not know the option
        Unlike(n, _brief(a[n]), _brief(b[n]))
        for n in ("num_experts", "mtp_num_layers")
        if n in names and n in a and n in b and (a[n] is None) != (b[n] is None)
    ]


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
