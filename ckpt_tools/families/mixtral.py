"""Mixtral: Mistral's attention, experts in every layer under block_sparse_moe."""

from __future__ import annotations

from .config_kinds import Constant, Rule, extend
from .config_rules import BASE_RULES, LENGTH
from .dense import INPUT_NORM, PROJ, QKV
from .family import Family, Fused
from .moe import MOE_NORM, expert_rules, experts, moe, router

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    rules=extend(
        BASE_RULES,
        Rule((LENGTH,), "max_position_embeddings", default=131072),
        Rule((LENGTH,), "seq_length", default=131072, quiet=True, forward=True),
        Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",)),
        Rule(("sliding_window",), "window_size", kind="window", default=None, nullable=True, quiet=True),
        *expert_rules(("num_local_experts",), 8, 2, "intermediate_size"),
        Constant("moe_router_pre_softmax", False),
    ),
    tensors=moe(QKV, PROJ, mlp=(*router("block_sparse_moe"), *experts("block_sparse_moe", "w1", "w3", "w2")), norms=(INPUT_NORM, MOE_NORM)),
    fused=(
        Fused(
            "model.layers.{l}.mlp.experts.gate_up_proj",
            ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        ),
        Fused("model.layers.{l}.mlp.experts.down_proj", ("block_sparse_moe.experts.{e}.w2.weight",)),
    ),
    renamed=((r"(model\.layers\.\d+\.)mlp\.gate\.weight", r"\1block_sparse_moe.gate.weight"),),
    verified="logits",
    sources=("transformers 5.24: models/mixtral", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)
