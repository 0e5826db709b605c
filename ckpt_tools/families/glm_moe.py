"""GLM-4.5 (grouped queries) and GLM-4.7-Flash (latent attention): DeepSeek's experts in a GLM."""

from __future__ import annotations

from dataclasses import replace

from . import rope
from .config_kinds import Computed, Rule, extend
from .config_rules import BASE_RULES
from .deepseek import MTP_NOTE, NORMS, SHARED, SIGMOID, SOURCES, length, routed
from .dense import INPUT_NORM, K_NORM, PROJ, Q_NORM, QKV, QKV_BIAS
from .family import PER_EXPERT, Family
from .mla import LATENT_ATTENTION, NO_PLAIN_QUERY, latent_rules
from .moe import DENSE_FC1, DENSE_FC2, DENSE_NORM, MOE_NORM, moe
from .mtp import MTP_COPIES, MTP_RULE, prediction_layers

GROUPS = Computed("expert_groups", ("n_group", "topk_group"), ("moe_router_num_groups", "moe_router_group_topk"), (1, 1, 2))
ATTENTION = (
    QKV,
    replace(QKV_BIAS, when="add_qkv_bias"),
    PROJ,
    replace(Q_NORM, when="qk_layernorm"),
    replace(K_NORM, when="qk_layernorm"),
)
GLM_NORMS = (INPUT_NORM, DENSE_NORM, MOE_NORM)

GLM4_MOE = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(131072),
        Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",)),
        Rule(("attention_bias",), "add_qkv_bias", type="bool", default=False, shape=True),
        Rule(("use_qk_norm",), "qk_layernorm", type="bool", default=False, shape=True),
        Computed("rope", rope.FIELDS, rope.ARGS, (10000.0, 0.5)),
        *routed(128, 8, 1408, 1, 1, 1.0),
        *SIGMOID,
        GROUPS,
        MTP_RULE,
    ),
    tensors=moe(*ATTENTION, mlp=SHARED, norms=GLM_NORMS, after=prediction_layers(*ATTENTION, DENSE_FC1, DENSE_FC2, *SHARED, *GLM_NORMS)),
    fused=PER_EXPERT,
    copies=MTP_COPIES,
    float8=True,
    verified="logits",
    note=MTP_NOTE,
    sources=tuple(s.format("glm4_moe") for s in SOURCES),
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    architectures=("Glm4MoeLiteForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(202752),
        Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",)),
        *latent_rules(768, 512, 192, 64, 256),
        *routed(64, 4, 1536, 1, None, 1.8),
        *SIGMOID,
        GROUPS,
        MTP_RULE,
    ),
    tensors=moe(
        *LATENT_ATTENTION, mlp=SHARED, norms=NORMS, after=prediction_layers(*LATENT_ATTENTION, DENSE_FC1, DENSE_FC2, *SHARED, *NORMS)
    ),
    fused=PER_EXPERT,
    copies=MTP_COPIES,
    float8=True,
    verified="logits",
    note=MTP_NOTE,
    sources=tuple(s.format("glm4_moe_lite") for s in SOURCES),
    unbuildable=NO_PLAIN_QUERY,
)
