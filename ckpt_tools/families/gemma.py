"""Gemma, Gemma 2 and the text part of Gemma 3: norms that store gamma - 1, embeddings scaled by the root of their width."""

from __future__ import annotations

from .config_kinds import Computed, Constant, Lacks, Refuse, Rule, extend
from .config_positions import LEARNED
from .config_rules import BASE_RULES
from .deepseek import length
from .dense import EMBEDDING, FC1, FC2, FINAL_NORM, HEAD, HF_LAYER, INPUT_NORM, K_NORM, LAYER, MLP_NORM, PROJ, Q_NORM, QKV, dense
from .family import Family
from .gpt import MLP_ARGS
from .mappings import Copy, Mapping

SCALED = Lacks("Megatron-Core's embedding is not multiplied by sqrt(hidden_size), which Gemma does: your model builder must")
CENTRED = (Constant("layernorm_zero_centered_gamma", True), Constant("apply_layernorm_1p", True))
TIED = Rule(("tie_word_embeddings",), "untie_embeddings_and_output_weights", kind="not", type="bool", default=True, shape=True)
HEAD_DIM = Rule(("head_dim",), "kv_channels", default=256, shape=True)
NO_BIAS = Refuse(("attention_bias",), (False, None), "Megatron-Core has biases on every linear layer or on q, k and v alone")
SOURCES = ("transformers 5.24: models/{0}", "Megatron-LM 0.16.1, 0.19.2", "Megatron-Bridge: models/gemma")

GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    architectures=("GemmaForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(8192),
        *CENTRED,
        TIED,
        HEAD_DIM,
        NO_BIAS,
        Computed("activation", ("hidden_act",), MLP_ARGS, ("hidden_act", "gelu_pytorch_tanh", True, "gelu_tanh")),
        SCALED,
    ),
    tensors=dense(QKV, PROJ),
    verified="names",
    note="GPTModel lacks the embedding's multiplier, so logits were not compared",
    sources=tuple(s.format("gemma") for s in SOURCES),
)

POST_NORMS: tuple[Mapping, ...] = (
    Copy((HF_LAYER + "post_attention_layernorm.weight",), LAYER + "self_attention.linear_proj.post_layernorm.weight", ("H",)),
    Copy((HF_LAYER + "pre_feedforward_layernorm.weight",), MLP_NORM.mcore, ("H",)),
    Copy((HF_LAYER + "post_feedforward_layernorm.weight",), LAYER + "mlp.linear_fc2.post_layernorm.weight", ("H",)),
)
POST = Lacks(
    "Megatron-Core has no norms after attention and MLP; Megatron-Bridge's own modules have them, under the names written here", refuse=True
)
GELU = Computed("activation", ("hidden_activation",), MLP_ARGS, ("hidden_activation", "gelu_pytorch_tanh", True, "gelu_tanh"))
SCALE = Rule(("query_pre_attn_scalar",), "softmax_scale", kind="rsqrt", default=256)
POST_NOTE = "norms after attention and MLP are Megatron-Bridge's; needs --allow-unrepresentable"

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    rules=extend(
        BASE_RULES, *length(8192), *CENTRED, TIED, HEAD_DIM, NO_BIAS, GELU, SCALE, SCALED, POST,
        Computed("layer_windows", ("sliding_window", "layer_types"), ("window_size", "window_attn_skip_freq"), (4096, 2)),
        Refuse(("attn_logit_softcapping",), (None,), "Megatron-Core does not cap attention scores", default=50.0),
        Refuse(("final_logit_softcapping",), (None,), "Megatron-Core does not cap logits", default=30.0),
    ),
    tensors=(EMBEDDING, QKV, PROJ, FC1, FC2, INPUT_NORM, *POST_NORMS, FINAL_NORM, HEAD),
    verified="round trip",
    note=POST_NOTE,
    sources=tuple(s.format("gemma2") for s in SOURCES),
)  # fmt: skip

TWO_ROPES = Computed(
    "two_ropes",
    ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"),
    (*LEARNED, "rotary_base_local"),
    (1000000.0, 10000.0),
)
GEMMA3 = Family(
    name="gemma3_text",
    model_types=("gemma3_text",),
    architectures=("Gemma3ForCausalLM",),
    rules=extend(
        BASE_RULES, *length(131072), *CENTRED, TIED, HEAD_DIM, NO_BIAS, GELU, SCALE, SCALED, POST,
        Constant("qk_layernorm", True),
        TWO_ROPES,
        Computed("layer_windows", ("sliding_window", "layer_types"), ("window_size", "window_attn_skip_freq"), (4096, 6)),
        Refuse(("attn_logit_softcapping",), (None,), "Megatron-Core does not cap attention scores"),
        Refuse(("final_logit_softcapping",), (None,), "Megatron-Core does not cap logits"),
        Refuse(("use_bidirectional_attention",), (False, None), "this is not a causal model"),
    ),
    tensors=(EMBEDDING, QKV, PROJ, Q_NORM, K_NORM, FC1, FC2, INPUT_NORM, *POST_NORMS, FINAL_NORM, HEAD),
    verified="round trip",
    note=POST_NOTE + "; Megatron-Core has one rope base for all layers",
    sources=tuple(s.format("gemma3") for s in SOURCES),
)  # fmt: skip
