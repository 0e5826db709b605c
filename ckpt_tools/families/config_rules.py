"""The rules between config.json and Megatron arguments, as data: those of every decoder, then those of the dense families.

A family's module puts `extend(BASE_RULES, ...)` together: a rule of its own replaces the base rule for the same argument.
Defaults are those of transformers 5.24 for a field that config.json leaves out.
"""

from __future__ import annotations

from . import rope
from .config_kinds import AnyRule, Choice, Computed, Constant, Derived, Rule, Written, extend

ROPE = Computed("rope", rope.FIELDS, rope.ARGS, (10000.0,))
HEAD_DIM = Rule(("head_dim",), "kv_channels", default=Derived("hidden_size", "num_attention_heads"), shape=True)
# Classes without a head_dim of their own (qwen2) read it all the same; their files have it only when it is not the quotient.
SPARSE_HEAD_DIM = Rule(("head_dim",), "kv_channels", default=Derived("hidden_size", "num_attention_heads"), shape=True, sparse=True)
DTYPE = Rule(("dtype", "torch_dtype"), "params_dtype", type="dtype", default=None, v4="torch_dtype")
SILU = Choice(
    ("hidden_act",),
    (("silu", (("swiglu", True), ("squared_relu", False), ("quick_geglu", False), ("openai_gelu", False))),),
    "this family's MLP is gated by SiLU (Megatron's --swiglu)",
    default="silu",
    shape=True,
)
LENGTH = "max_position_embeddings"

# What makes it a plain decoder. A checkpoint that says otherwise holds weights that mean something else, whatever their shapes.
PLAIN_DECODER: tuple[AnyRule, ...] = (
    Constant("normalization", "RMSNorm"),
    Constant("layernorm_zero_centered_gamma", False),
    Constant("apply_residual_connection_post_layernorm", False),
    Constant("add_bias_linear", False),
    Constant("add_qkv_bias", False),
    Constant("qk_layernorm", False),
    Constant("qk_l2_norm", False),
    Constant("attention_output_gate", False),
    Constant("softmax_type", "vanilla"),
    Constant("rotary_interleaved", False),
    Constant("window_size", None),
    Constant("window_attn_skip_freq", None),
    Computed("no_rope", ("no_rope_layers", "no_rope_layer_interval"), ("no_rope_freq",)),
    Constant("multi_latent_attention", False),
    Constant("linear_attention_freq", None),
    Constant("experimental_attention_variant", None),
    Constant("num_experts", None),
    Constant("mtp_num_layers", None),
)

# What the converted model trains with until someone says otherwise. Megatron's own default is a dropout of 0.1.
TRAINING: tuple[AnyRule, ...] = (
    Rule(("attention_dropout",), "attention_dropout", type="float", default=0.0, quiet=True),
    Constant("hidden_dropout", 0.0, binding=False),
    Constant("add_position_embedding", False, binding=False),
    Constant("group_query_attention", True, binding=False),
    Rule(("initializer_range",), "init_method_std", type="float", default=0.02, quiet=True),
)

UNKNOWN_TOKENS = (
    "the checkpoint does not know the tokenizer's special tokens: bos_token_id and eos_token_id are null until they are put there"
)

BASE_RULES: tuple[AnyRule, ...] = (
    Rule(("num_hidden_layers",), "num_layers", shape=True),
    Rule(("hidden_size",), "hidden_size", shape=True),
    Rule(("intermediate_size",), "ffn_hidden_size", shape=True),
    Rule(("num_attention_heads",), "num_attention_heads", shape=True),
    Rule(("num_key_value_heads",), "num_query_groups", default=Derived("num_attention_heads"), shape=True),
    HEAD_DIM,
    Computed("vocab", ("vocab_size",), ("vocab_size",), shape=True),
    Rule((LENGTH,), "max_position_embeddings", default=2048),
    Rule((LENGTH,), "seq_length", default=2048, quiet=True, forward=True),
    Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-6, older=("norm_epsilon",)),
    Rule(("tie_word_embeddings",), "untie_embeddings_and_output_weights", kind="not", type="bool", default=False, shape=True),
    ROPE,
    SILU,
    DTYPE,
    *PLAIN_DECODER,
    *TRAINING,
    Written("use_cache", True),
    Written("bos_token_id", None),
    Written("eos_token_id", None, UNKNOWN_TOKENS),
)

LLAMA_RULES = extend(
    BASE_RULES,
    Computed("biases", ("attention_bias", "mlp_bias"), ("add_bias_linear", "add_qkv_bias"), ("attention_bias", "mlp_bias"), shape=True),
)

MISTRAL_RULES = extend(
    BASE_RULES,
    Rule((LENGTH,), "max_position_embeddings", default=131072),
    Rule((LENGTH,), "seq_length", default=131072, quiet=True, forward=True),
    Rule(("sliding_window",), "window_size", kind="window", default=4096, nullable=True),
)

# Qwen's windows start at some layer; sizes and defaults are those of transformers' Qwen2Config and Qwen3Config.
QWEN_WINDOWS = Computed(
    "windows",
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    ("window_size", "window_attn_skip_freq"),
    (4096, 28),
)
QWEN_LENGTH: tuple[AnyRule, ...] = (
    Rule((LENGTH,), "max_position_embeddings", default=32768),
    Rule((LENGTH,), "seq_length", default=32768, quiet=True, forward=True),
)

QWEN2_RULES = extend(
    BASE_RULES,
    *QWEN_LENGTH,
    SPARSE_HEAD_DIM,
    Constant("add_qkv_bias", True),
    QWEN_WINDOWS,
)

QWEN3_RULES = extend(
    BASE_RULES,
    *QWEN_LENGTH,
    # Qwen3Config's own default is 128, whatever hidden_size says
    Rule(("head_dim",), "kv_channels", default=128, shape=True),
    Constant("qk_layernorm", True),
    Computed("biases", ("attention_bias",), ("add_bias_linear", "add_qkv_bias"), ("attention_bias",), shape=True),
    QWEN_WINDOWS,
)
