"""Families that normalise what attention and MLP give, not what they get: OLMo 2, EXAONE 4. Megatron-Core has no such layer."""

from __future__ import annotations

from .config_kinds import Computed, Constant, Lacks, Refuse, Rule, extend
from .config_rules import BASE_RULES
from .dense import EMBEDDING, FC1, FC2, FINAL_NORM, HEAD, HF_LAYER, K_NORM, LAYER, PROJ, Q_NORM, QKV
from .family import Family
from .mappings import Copy, Mapping

EPSILON = Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",))
AFTER: tuple[Mapping, ...] = (
    Copy((HF_LAYER + "post_attention_layernorm.weight",), LAYER + "self_attention.linear_proj.post_layernorm.weight", ("H",)),
    Copy((HF_LAYER + "post_feedforward_layernorm.weight",), LAYER + "mlp.linear_fc2.post_layernorm.weight", ("H",)),
)
NO_INPUT_NORM = Lacks(
    "Megatron-Core's layers normalise what goes into attention and MLP, this family what comes out: no layer of Megatron-Core is like it",
    refuse=True,
)
WIDE_Q = Copy(Q_NORM.hf, Q_NORM.mcore, ("A*d",))
WIDE_K = Copy(K_NORM.hf, K_NORM.mcore, ("G*d",))
WIDE = Lacks("Megatron-Core normalises the queries and keys of each head, this family those of all heads together", refuse=True)
NO_BIAS = Refuse(("attention_bias",), (False, None), "Megatron-Core has biases on q, k and v alone, or on every linear layer")
NOTE = "no layer of Megatron-Core is like it; needs --allow-unrepresentable, names in the style of Megatron-Bridge's Gemma modules"

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    architectures=("Olmo2ForCausalLM",),
    rules=extend(BASE_RULES, EPSILON, Constant("qk_layernorm", True), NO_BIAS, NO_INPUT_NORM, WIDE),
    tensors=(EMBEDDING, QKV, PROJ, WIDE_Q, WIDE_K, FC1, FC2, *AFTER, FINAL_NORM, HEAD),
    verified="round trip",
    note=NOTE,
    sources=("transformers 5.24: models/olmo2",),
)

EXAONE4 = Family(
    name="exaone4",
    model_types=("exaone4",),
    architectures=("Exaone4ForCausalLM",),
    rules=extend(
        BASE_RULES,
        EPSILON,
        Constant("qk_layernorm", True),
        Computed("layer_windows", ("sliding_window", "layer_types"), ("window_size", "window_attn_skip_freq"), (4096, 4)),
        NO_INPUT_NORM,
    ),
    tensors=(EMBEDDING, QKV, PROJ, Q_NORM, K_NORM, FC1, FC2, *AFTER, FINAL_NORM, HEAD),
    verified="round trip",
    note=NOTE,
    sources=("transformers 5.24: models/exaone4",),
)
