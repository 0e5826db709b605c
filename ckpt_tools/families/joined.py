"""Families whose HF files join projections: Phi-3 (q, k, v in one tensor; gate and up in one), GLM-4 (gate and up in one)."""

from __future__ import annotations

from dataclasses import replace

from . import rope
from .config_kinds import Computed, Constant, Lacks, Rule, extend
from .config_rules import BASE_RULES
from .deepseek import length
from .dense import (
    EMBEDDING,
    FC2,
    FINAL_NORM,
    HEAD,
    HF_LAYER,
    INPUT_NORM,
    JOINED_FC1,
    LAYER,
    MLP_NORM,
    PROJ,
    QKV,
    QKV_BIAS,
)
from .family import Family
from .mappings import Copy, Mapping, joined_qkv

SOURCES = ("transformers 5.24: models/{0}", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer")

PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(4096),
        Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",)),
        Rule(("sliding_window",), "window_size", kind="window", default=None, nullable=True, quiet=True),
        Rule(("resid_pdrop",), "hidden_dropout", type="float", default=0.0, quiet=True),
    ),
    tensors=(
        EMBEDDING,
        PROJ,
        joined_qkv(HF_LAYER + "self_attn.qkv_proj.weight", LAYER + "self_attention.linear_qkv.weight"),
        JOINED_FC1,
        FC2,
        INPUT_NORM,
        MLP_NORM,
        FINAL_NORM,
        HEAD,
    ),
    verified="logits",
    note="rope of type longrope is refused: Megatron-Core has none",
    sources=tuple(s.format("phi3") for s in SOURCES),
)

GLM_BODY = (EMBEDDING, QKV, replace(QKV_BIAS, when="add_qkv_bias"), PROJ, JOINED_FC1, FC2, INPUT_NORM, MLP_NORM)
GLM_RULES = extend(
    BASE_RULES,
    *length(131072),
    Rule(("head_dim",), "kv_channels", default=128, shape=True),
    Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1.5625e-07, older=("norm_epsilon",)),
    Rule(("attention_bias",), "add_qkv_bias", type="bool", default=True, shape=True),
    Computed("rope", rope.FIELDS, rope.ARGS, (10000.0, 0.5)),
    Constant("rotary_interleaved", True),
)
GLM = Family(
    name="glm",
    model_types=("glm",),
    architectures=("GlmForCausalLM",),
    rules=GLM_RULES,
    tensors=(*GLM_BODY, FINAL_NORM, HEAD),
    verified="logits",
    sources=tuple(s.format("glm") for s in SOURCES),
)

GLM4_NORMS: tuple[Mapping, ...] = (
    Copy((HF_LAYER + "post_self_attn_layernorm.weight",), LAYER + "post_self_attn_layernorm.weight", ("H",)),
    Copy((HF_LAYER + "post_mlp_layernorm.weight",), LAYER + "post_mlp_layernorm.weight", ("H",)),
)
GLM4 = Family(
    name="glm4",
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    rules=(
        *GLM_RULES,
        Lacks(
            "Megatron-Core has no norms after attention and MLP; slime's layers have them, under the names written here",
            refuse=True,
        ),
    ),
    tensors=(*GLM_BODY, *GLM4_NORMS, FINAL_NORM, HEAD),
    verified="round trip",
    note="norms after attention and MLP are slime's; needs --allow-unrepresentable",
    sources=(*(s.format("glm4") for s in SOURCES), "slime: slime_plugins/models/glm4.py"),
)
