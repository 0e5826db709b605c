"""gpt-oss: attention with sinks, biases on every linear layer, experts whose gate and up rows alternate and are clamped."""

from __future__ import annotations

from . import rope
from .config_kinds import Choice, Computed, Constant, Refuse, Rule, extend
from .config_rules import BASE_RULES
from .deepseek import length
from .dense import EMBEDDING, FINAL_NORM, HEAD, HF_LAYER, INPUT_NORM, LAYER, PROJ, QKV, QKV_BIAS
from .family import Family, Fused
from .mappings import Copy, Mapping, gate_up
from .moe import MOE_NORM, expert_rules

# What GptOssConfig takes for a model that says nothing of its rope
ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
GEGLU = (("swiglu", False), ("squared_relu", False), ("quick_geglu", True), ("openai_gelu", False))
SINKS = Copy((HF_LAYER + "self_attn.sinks",), LAYER + "self_attention.core_attention.softmax_offset", ("A",))
PROJ_BIAS = Copy((HF_LAYER + "self_attn.o_proj.bias",), LAYER + "self_attention.linear_proj.bias", ("H",))
ROUTER: tuple[Mapping, ...] = (
    Copy((HF_LAYER + "mlp.router.weight",), LAYER + "mlp.router.weight", ("E", "H")),
    Copy((HF_LAYER + "mlp.router.bias",), LAYER + "mlp.router.bias", ("E",)),
)
# The files hold the experts of a layer in one tensor: the names of their parts are ckpt's own
GATE, UP, DOWN = (f"mlp.experts.{{e}}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
EXPERTS: tuple[Mapping, ...] = (
    gate_up((f"{HF_LAYER}{GATE}.weight", f"{HF_LAYER}{UP}.weight"), LAYER + "mlp.experts.linear_fc1.weight{e}", "M"),
    gate_up((f"{HF_LAYER}{GATE}.bias", f"{HF_LAYER}{UP}.bias"), LAYER + "mlp.experts.linear_fc1.bias{e}", "M", bias=True),
    Copy((f"{HF_LAYER}{DOWN}.weight",), LAYER + "mlp.experts.linear_fc2.weight{e}", ("H", "M")),
    Copy((f"{HF_LAYER}{DOWN}.bias",), LAYER + "mlp.experts.linear_fc2.bias{e}", ("H",)),
)
FUSED = (
    Fused(HF_LAYER + "mlp.experts.gate_up_proj", (f"{GATE}.weight", f"{UP}.weight"), transposed=True, alternating=True, only=True),
    Fused(HF_LAYER + "mlp.experts.gate_up_proj_bias", (f"{GATE}.bias", f"{UP}.bias"), alternating=True, only=True),
    Fused(HF_LAYER + "mlp.experts.down_proj", (f"{DOWN}.weight",), transposed=True, only=True),
    Fused(HF_LAYER + "mlp.experts.down_proj_bias", (f"{DOWN}.bias",), only=True),
)

GPT_OSS = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    rules=extend(
        BASE_RULES,
        *length(131072),
        Rule(("head_dim",), "kv_channels", default=64, shape=True),
        Rule(("rms_norm_eps",), "layernorm_epsilon", type="float", default=1e-5, older=("norm_epsilon",)),
        Computed("rope", rope.FIELDS, rope.ARGS, (150000.0, 1.0, ROPE)),
        Computed("layer_windows", ("sliding_window", "layer_types"), ("window_size", "window_attn_skip_freq"), (128, 2)),
        Constant("softmax_type", "learnable"),
        Constant("add_bias_linear", True),
        Constant("add_qkv_bias", True, binding=False),  # add_bias_linear puts them there too
        Refuse(("attention_bias",), (True, None), "Megatron-Core has biases on every linear layer or on none"),
        Choice(("hidden_act",), (("silu", GEGLU),), "this family's experts are gated by x * sigmoid(1.702 x)", default="silu", shape=True),
        Constant("glu_linear_offset", 1.0),
        Rule(("swiglu_limit",), "activation_func_clamp_value", type="float", default=7.0, quiet=True),
        Refuse(("swiglu_alpha",), (1.702, None), "the factor in Megatron-Core's quick_gelu is 1.702"),
        *expert_rules(
            ("num_local_experts", "num_experts"), 128, 4, "intermediate_size", per_token=("num_experts_per_tok", "experts_per_token")
        ),
        Constant("moe_router_pre_softmax", False),
    ),
    tensors=(EMBEDDING, SINKS, QKV, QKV_BIAS, PROJ, PROJ_BIAS, *ROUTER, *EXPERTS, INPUT_NORM, MOE_NORM, FINAL_NORM, HEAD),
    fused=FUSED,
    verified="logits",
    sources=(
        "transformers 5.24: models/gpt_oss",
        "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer/dot_product_attention.py, transformer/moe",
        "Megatron-Bridge: models/gpt_oss",
    ),
)
