"""DeepSeek-V2, V3 and their likes (Kimi K2, Moonlight): latent attention, dense layers first, shared experts, prediction layers."""

from __future__ import annotations

from .config_kinds import AnyRule, Computed, Constant, Refuse, Rule, extend
from .config_rules import BASE_RULES, LENGTH
from .family import PER_EXPERT, Family
from .mla import LATENT_ATTENTION, LATENT_INPUT_NORM, NO_PLAIN_QUERY, latent_rules
from .moe import DENSE_FC1, DENSE_FC2, DENSE_NORM, MOE_NORM, expert_rules, experts, moe, router, shared_experts
from .mtp import MTP_COPIES, MTP_RULE, prediction_layers

SOURCES = (
    "transformers 5.24: models/{0}",
    "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer/multi_latent_attention.py, transformer/moe",
)
MTP_NOTE = "prediction layers: names and shapes; transformers does not compute them here"


def length(default: int) -> tuple[AnyRule, ...]:
    """Positions of the model."""
    return (
        Rule((LENGTH,), "max_position_embeddings", default=default),
        Rule((LENGTH,), "seq_length", default=default, quiet=True, forward=True),
    )


def routed(
    count: int, topk: int, width: int, shared: int, dense: int | None, scaling: float, *, score: str = "sigmoid"
) -> tuple[AnyRule, ...]:
    """Experts as DeepSeek counts them; the numbers are the family's defaults, dense None for a family that lists its layers."""
    of_expert = "moe_intermediate_size"
    return (
        *expert_rules(("n_routed_experts", "num_local_experts"), count, topk, of_expert, width, score=score, loss="aux_loss_alpha"),
        Rule(
            ("n_shared_experts",),
            "moe_shared_expert_intermediate_size",
            kind="times",
            operand=(of_expert, "moe_ffn_hidden_size"),
            default=shared,
            shape=True,
        ),
        Computed("first_dense", ("first_k_dense_replace",), ("moe_layer_freq",), (dense,), shape=True),
        Rule(("routed_scaling_factor",), "moe_router_topk_scaling_factor", type="float", default=scaling),
    )


SIGMOID: tuple[AnyRule, ...] = (
    Constant("moe_router_enable_expert_bias", True),
    Constant("moe_router_pre_softmax", False, binding=False),
    Refuse(("norm_topk_prob",), (True, None), "Megatron-Core renormalises the sigmoid scores of the chosen experts"),
)
SHARED = (*router(bias=True), *experts(), *shared_experts("shared_experts"))
NORMS = (LATENT_INPUT_NORM, DENSE_NORM, MOE_NORM)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    rules=extend(
        BASE_RULES,
        *length(4096),
        *latent_rules(1536, 512, 128, 64, 128),
        *routed(256, 8, 2048, 1, 3, 2.5),
        *SIGMOID,
        Computed("expert_groups", ("n_group", "topk_group"), ("moe_router_num_groups", "moe_router_group_topk"), (8, 4, 2)),
        MTP_RULE,
    ),
    tensors=moe(
        *LATENT_ATTENTION,
        mlp=SHARED,
        norms=NORMS,
        after=prediction_layers(*LATENT_ATTENTION, DENSE_FC1, DENSE_FC2, *SHARED, *NORMS),
    ),
    fused=PER_EXPERT,
    copies=MTP_COPIES,
    float8=True,
    verified="logits",
    note=MTP_NOTE,
    sources=tuple(s.format("deepseek_v3") for s in SOURCES),
    unbuildable=NO_PLAIN_QUERY,
)

SOFTMAX_SHARED = (*router(), *experts(), *shared_experts("shared_experts"))

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(2048),
        *latent_rules(1536, 512, 128, 64, 128),
        *routed(64, 6, 1407, 2, 0, 1.0, score="softmax"),
        Constant("moe_router_enable_expert_bias", False),
        Constant("moe_router_pre_softmax", True),
        Refuse(("norm_topk_prob",), (False, None), "Megatron-Core does not renormalise the probabilities of a softmax over all experts"),
        Computed(
            "expert_groups", ("n_group", "topk_group", "topk_method"), ("moe_router_num_groups", "moe_router_group_topk"), (None, None, 1)
        ),
    ),
    tensors=moe(*LATENT_ATTENTION, mlp=SOFTMAX_SHARED, norms=NORMS),
    fused=PER_EXPERT,
    verified="logits",
    sources=tuple(s.format("deepseek_v2") for s in SOURCES),
    unbuildable=NO_PLAIN_QUERY,
)
