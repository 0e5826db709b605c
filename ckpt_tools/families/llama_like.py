"""Families of llama's shape that differ in a few fields: Seed-OSS, ERNIE 4.5, Hunyuan, Granite, InternLM 2 and 3, Baichuan."""

from __future__ import annotations

from dataclasses import replace

from .config_kinds import Computed, Constant, Lacks, Refuse, Rule, extend
from .config_rules import BASE_RULES, LLAMA_RULES
from .deepseek import length
from .dense import (
    EMBEDDING,
    FC1,
    FC2,
    HEAD,
    HF_LAYER,
    K_NORM,
    LAYER,
    OPTIONAL_FC1_BIAS,
    OPTIONAL_FC2_BIAS,
    OPTIONAL_PROJ_BIAS,
    OPTIONAL_QKV_BIAS,
    PROJ,
    Q_NORM,
    QKV,
    QKV_BIAS,
    dense,
    linear,
    norms,
)
from .family import Family
from .mappings import Mapping, Vocab, gate_up, joined_qkv

SOURCES = ("transformers 5.24: models/{0}", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer")
EPSILON = Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",))
HEADS = Rule(("head_dim",), "kv_channels", default=128, shape=True)

SEED_OSS = Family(
    name="seed_oss",
    model_types=("seed_oss",),
    architectures=("SeedOssForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(524288),
        HEADS,
        Rule(("attention_bias",), "add_qkv_bias", type="bool", default=True, shape=True),
        Rule(("residual_dropout",), "hidden_dropout", type="float", default=0.1, quiet=True),
        Refuse(("attention_out_bias",), (False, None), "Megatron-Core has biases on q, k and v alone, or on every linear layer"),
        Refuse(("mlp_bias",), (False, None), "Megatron-Core has biases on q, k and v alone, or on every linear layer"),
    ),
    tensors=dense(QKV, replace(QKV_BIAS, when="add_qkv_bias"), PROJ),
    verified="logits",
    sources=tuple(s.format("seed_oss") for s in SOURCES),
)

ERNIE4_5 = Family(
    name="ernie4_5",
    model_types=("ernie4_5",),
    architectures=("Ernie4_5ForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(131072),
        HEADS,
        EPSILON,
        Rule(("tie_word_embeddings",), "untie_embeddings_and_output_weights", kind="not", type="bool", default=True, shape=True),
        Constant("rotary_interleaved", True),
        Refuse(("use_bias",), (False, None), "ckpt maps this family without biases only, as all its released models are"),
    ),
    tensors=dense(QKV, PROJ),
    verified="logits",
    sources=tuple(s.format("ernie4_5") for s in SOURCES),
)

NORM_AFTER_ROPE = Lacks(
    "this family normalises queries and keys after rotating them, Megatron-Core before: the weights fit, the results differ", refuse=True
)
LATE_NORMS: tuple[Mapping, ...] = (
    replace(Q_NORM, hf=(HF_LAYER + "self_attn.query_layernorm.weight",)),
    replace(K_NORM, hf=(HF_LAYER + "self_attn.key_layernorm.weight",)),
)
HUNYUAN_V1_DENSE = Family(
    name="hunyuan_v1_dense",
    model_types=("hunyuan_v1_dense",),
    architectures=("HunYuanDenseV1ForCausalLM",),
    rules=extend(
        BASE_RULES,
        EPSILON,
        Constant("qk_layernorm", True),
        Refuse(("attention_bias",), (False, None), "Megatron-Core has biases on q, k and v alone, or on every linear layer"),
        NORM_AFTER_ROPE,
    ),
    tensors=dense(QKV, PROJ, *LATE_NORMS),
    verified="names",
    note="Megatron-Core normalises queries and keys before the rotation: needs --allow-unrepresentable, and computes something else",
    sources=tuple(s.format("hunyuan_v1_dense") for s in SOURCES),
)

GRANITE = Family(
    name="granite",
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    rules=extend(
        LLAMA_RULES,
        Rule(("attention_multiplier",), "softmax_scale", type="float", default=1.0),
        Refuse(("embedding_multiplier",), (1.0, 1), "Megatron-Core does not scale embeddings", default=1.0),
        Refuse(("residual_multiplier",), (1.0, 1), "Megatron-Core does not scale what a layer adds", default=1.0),
        Refuse(("logits_scaling",), (1.0, 1), "Megatron-Core does not scale logits", default=1.0),
    ),
    tensors=dense(QKV, OPTIONAL_QKV_BIAS, PROJ, OPTIONAL_PROJ_BIAS, mlp=(FC1, OPTIONAL_FC1_BIAS, FC2, OPTIONAL_FC2_BIAS)),
    verified="logits",
    note="multipliers of embedding, residual and logits other than 1 are refused: Megatron-Core has none",
    sources=tuple(s.format("granite") for s in SOURCES),
)

SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    rules=extend(
        LLAMA_RULES,
        *length(32768),
        Rule(("tie_word_embeddings",), "untie_embeddings_and_output_weights", kind="not", type="bool", default=True, shape=True),
        Computed("no_rope", ("no_rope_layers", "no_rope_layer_interval"), ("no_rope_freq",), (4,)),
        Refuse(("use_sliding_window",), (False, None), "ckpt maps this family without windows only, as its released models are"),
    ),
    tensors=dense(QKV, OPTIONAL_QKV_BIAS, PROJ, OPTIONAL_PROJ_BIAS, mlp=(FC1, OPTIONAL_FC1_BIAS, FC2, OPTIONAL_FC2_BIAS)),
    verified="logits",
    sources=tuple(s.format("smollm3") for s in SOURCES),
)

# Remote code: these have no class in transformers; names from the model repositories' own files.
INTERNLM3 = Family(
    name="internlm3",
    model_types=("internlm3",),
    architectures=("InternLM3ForCausalLM",),
    spelling="v4",
    rules=extend(
        BASE_RULES,
        *length(32768),
        Rule(("qkv_bias",), "add_qkv_bias", type="bool", default=False, shape=True),
        Refuse(("bias",), (False, None), "Megatron-Core has biases on q, k and v alone, or on every linear layer"),
    ),
    tensors=dense(QKV, replace(QKV_BIAS, when="add_qkv_bias"), PROJ),
    verified="logits",
    note="remote code on the hub: judged through transformers' llama, which computes the same",
    sources=("InternLM3 modeling_internlm3.py on the hub", "Megatron-LM 0.16.1, 0.19.2"),
)
_INTERNLM2 = "model.layers.{l}."
INTERNLM2 = Family(
    name="internlm2",
    model_types=("internlm2",),
    architectures=("InternLM2ForCausalLM",),
    spelling="v4",
    rules=extend(
        BASE_RULES,
        *length(32768),
        Refuse(("bias",), (False, None), "Megatron-Core has biases on q, k and v alone, or on every linear layer"),
    ),
    tensors=(
        Vocab(("model.tok_embeddings.weight",), "embedding.word_embeddings.weight"),
        *linear(_INTERNLM2 + "attention.wqkv", "self_attention.linear_qkv", ("A*d+2*G*d", "H"), biased=False),  # per group, as Megatron's
        *linear(_INTERNLM2 + "attention.wo", "self_attention.linear_proj", ("H", "A*d"), biased=False),
        gate_up((_INTERNLM2 + "feed_forward.w1.weight", _INTERNLM2 + "feed_forward.w3.weight"), LAYER + "mlp.linear_fc1.weight"),
        *linear(_INTERNLM2 + "feed_forward.w2", "mlp.linear_fc2", ("H", "F"), biased=False),
        *norms(_INTERNLM2 + "attention_norm", _INTERNLM2 + "ffn_norm", "model.norm", biased=False),
        Vocab(("output.weight",), "output_layer.weight", when="untied"),
    ),
    verified="logits",
    note="remote code on the hub: judged through transformers' llama, which computes the same",
    sources=("InternLM2 modeling_internlm2.py on the hub", "Megatron-LM 0.16.1, 0.19.2"),
)
BAICHUAN = Family(
    name="baichuan",
    model_types=("baichuan",),
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    spelling="v4",
    rules=extend(
        BASE_RULES,
        *length(4096),
        Computed("baichuan", ("max_position_embeddings", "vocab_size"), ()),
    ),
    tensors=(
        EMBEDDING,
        joined_qkv(HF_LAYER + "self_attn.W_pack.weight", LAYER + "self_attention.linear_qkv.weight"),
        PROJ,
        FC1,
        FC2,
        *norms(HF_LAYER + "input_layernorm", HF_LAYER + "post_attention_layernorm", "model.norm", biased=False),
        HEAD,
    ),
    verified="logits",
    note="remote code on the hub: judged through transformers' llama. The 13B models' ALiBi and Baichuan 2's normalised head are refused",
    sources=("Baichuan modeling_baichuan.py on the hub", "Megatron-LM 0.16.1, 0.19.2"),
)
