"""Further families with experts: OLMoE, dots.llm1, ERNIE 4.5 MoE, Hunyuan MoE, MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace

from .config_kinds import Computed, Constant, Refuse, Rule, Written, extend
from .config_rules import BASE_RULES
from .deepseek import SHARED, SIGMOID, length, routed
from .dense import HF_LAYER, INPUT_NORM, K_NORM, LAYER, PROJ, Q_NORM, QKV
from .family import PER_EXPERT, Family, Fused
from .glm_moe import GROUPS
from .llama_like import EPSILON, HEADS, LATE_NORMS, NORM_AFTER_ROPE
from .mappings import Copy
from .moe import MOE_NORM, expert_rules, experts, moe, router, shared_experts
from .post_norm import NO_BIAS, WIDE, WIDE_K, WIDE_Q

MEGATRON = "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer/moe"

OLMOE = Family(
    name="olmoe",
    model_types=("olmoe",),
    architectures=("OlmoeForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(4096),
        EPSILON,
        *expert_rules(("num_experts", "num_local_experts"), 64, 8, "intermediate_size"),
        Rule(("norm_topk_prob",), "moe_router_pre_softmax", kind="not", type="bool", default=False),
        Constant("qk_layernorm", True),
        Refuse(("clip_qkv",), (None,), "Megatron-Core does not clip queries, keys and values"),
        NO_BIAS,
        WIDE,
    ),
    tensors=moe(QKV, PROJ, WIDE_Q, WIDE_K, mlp=(*router(), *experts()), norms=(INPUT_NORM, MOE_NORM)),
    fused=PER_EXPERT,
    verified="round trip",
    note="Megatron-Core has no norm over the queries of all heads; needs --allow-unrepresentable",
    sources=("transformers 5.24: models/olmoe",),
)

DOTS1 = Family(
    name="dots1",
    model_types=("dots1",),
    architectures=("Dots1ForCausalLM",),
    rules=extend(
        BASE_RULES,
        *routed(128, 6, 1408, 2, 0, 1.0),
        *SIGMOID,
        Written("norm_topk_prob", True),
        GROUPS,
        Constant("qk_layernorm", True),
        Computed("layer_windows", ("sliding_window", "layer_types"), ("window_size", "window_attn_skip_freq"), (4096, 1)),
        NO_BIAS,
    ),
    tensors=moe(QKV, PROJ, Q_NORM, K_NORM, mlp=SHARED),
    fused=PER_EXPERT,
    verified="logits",
    sources=("transformers 5.24: models/dots1", MEGATRON),
)

HUNYUAN_V1_MOE = Family(
    name="hunyuan_v1_moe",
    model_types=("hunyuan_v1_moe",),
    architectures=("HunYuanMoEV1ForCausalLM",),
    rules=extend(
        BASE_RULES,
        EPSILON,
        *expert_rules(("num_experts", "num_local_experts"), 1, 1, "intermediate_size", per_token=("moe_topk", "num_experts_per_tok")),
        Rule(("intermediate_size",), "moe_shared_expert_intermediate_size", quiet=True, forward=True),
        Constant("moe_router_pre_softmax", False),
        Constant("qk_layernorm", True),
        NO_BIAS,
        NORM_AFTER_ROPE,
    ),
    tensors=moe(
        QKV,
        PROJ,
        *LATE_NORMS,
        mlp=(
            replace(router()[0], hf=(HF_LAYER + "mlp.gate.wg.weight",)),  # type: ignore[type-var]
            *experts(),
            *shared_experts("shared_mlp"),
        ),
        norms=(INPUT_NORM, MOE_NORM),
    ),
    fused=PER_EXPERT,
    verified="names",
    note="Megatron-Core normalises queries and keys before the rotation: needs --allow-unrepresentable, and computes something else",
    sources=("transformers 5.24: models/hunyuan_v1_moe", MEGATRON),
)

_BLOCK = HF_LAYER + "block_sparse_moe."
MINIMAX_M2 = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(196608),
        HEADS,
        *expert_rules(("num_local_experts", "num_experts"), 256, 8, "intermediate_size", score="sigmoid"),
        *SIGMOID,
        Constant("qk_layernorm", True),
        WIDE,
    ),
    tensors=moe(
        QKV,
        PROJ,
        WIDE_Q,
        WIDE_K,
        mlp=(
            *router("block_sparse_moe"),
            Copy((_BLOCK + "e_score_correction_bias",), LAYER + "mlp.router.expert_bias", ("E",), when="moe", keep_dtype=True),
            *experts("block_sparse_moe", "w1", "w3", "w2"),
        ),
        norms=(INPUT_NORM, MOE_NORM),
    ),
    fused=(
        Fused(
            "model.layers.{l}.mlp.experts.gate_up_proj",
            ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        ),
        Fused("model.layers.{l}.mlp.experts.down_proj", ("block_sparse_moe.experts.{e}.w2.weight",)),
    ),
    renamed=(
        (r"(model\.layers\.\d+\.)mlp\.gate\.weight", r"\1block_sparse_moe.gate.weight"),
        (r"(model\.layers\.\d+\.)mlp\.e_score_correction_bias", r"\1block_sparse_moe.e_score_correction_bias"),
    ),
    float8=True,
    verified="round trip",
    note="Megatron-Core has no norm over the queries of all heads; needs --allow-unrepresentable",
    sources=("transformers 5.24: models/minimax_m2", "Megatron-Bridge: models/minimax_m2"),
)
