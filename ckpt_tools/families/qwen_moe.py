"""Qwen2-MoE and Qwen3-MoE: routed experts, the older one with a gated shared expert."""

from __future__ import annotations

from .config_kinds import Computed, Constant, Rule, extend
from .config_rules import BASE_RULES, QWEN_LENGTH, QWEN_WINDOWS, SPARSE_HEAD_DIM
from .dense import K_NORM, OPTIONAL_PROJ_BIAS, OPTIONAL_QKV_BIAS, PROJ, Q_NORM, QKV
from .family import PER_EXPERT, Family
from .moe import expert_rules, experts, moe, router, shared_experts

SPARSE_STEP = Computed("sparse_step", ("decoder_sparse_step", "mlp_only_layers"), ("moe_layer_freq",), shape=True)
# norm_topk_prob false: the scores are a softmax over all experts, taken before the choice
TOPK = Rule(("norm_topk_prob",), "moe_router_pre_softmax", kind="not", type="bool", default=False)

QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    rules=extend(
        BASE_RULES,
        *QWEN_LENGTH,
        SPARSE_HEAD_DIM,
        Rule(("qkv_bias",), "add_qkv_bias", type="bool", default=True, quiet=True, shape=True),
        *expert_rules(("num_experts",), 60, 4, width_default=1408),
        Rule(("shared_expert_intermediate_size",), "moe_shared_expert_intermediate_size", default=5632, shape=True),
        Constant("moe_shared_expert_gate", True),
        TOPK,
        SPARSE_STEP,
        QWEN_WINDOWS,
    ),
    tensors=moe(QKV, OPTIONAL_QKV_BIAS, PROJ, mlp=(*router(), *experts(), *shared_experts("shared_expert", gate="shared_expert_gate"))),
    fused=PER_EXPERT,
    verified="logits",
    sources=("transformers 5.24: models/qwen2_moe", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    rules=extend(
        BASE_RULES,
        *QWEN_LENGTH,
        SPARSE_HEAD_DIM,
        Constant("qk_layernorm", True),
        Computed("biases", ("attention_bias",), ("add_bias_linear", "add_qkv_bias"), ("attention_bias",), shape=True),
        *expert_rules(("num_experts", "num_local_experts"), 128, 8, width_default=768),
        TOPK,
        SPARSE_STEP,
        QWEN_WINDOWS,
    ),
    tensors=moe(QKV, OPTIONAL_QKV_BIAS, PROJ, OPTIONAL_PROJ_BIAS, Q_NORM, K_NORM, mlp=(*router(), *experts())),
    fused=PER_EXPERT,
    float8=True,
    verified="logits",
    sources=("transformers 5.24: models/qwen3_moe", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)
