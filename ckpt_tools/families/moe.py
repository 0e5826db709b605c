"""The tensors and rules of mixture-of-experts layers on top of a Llama-shaped decoder."""

from __future__ import annotations

from .config_kinds import AnyRule, Constant, Rule
from .dense import EMBEDDING, FC1, FC2, FINAL_NORM, HEAD, HF_LAYER, INPUT_NORM, LAYER
from .mappings import Copy, Mapping, gate_up

DENSE_FC1 = gate_up(FC1.hf, FC1.mcore, when="dense")  # type: ignore[arg-type]
DENSE_FC2 = Copy(FC2.hf, FC2.mcore, FC2.shape, when="dense")
DENSE_NORM = Copy((HF_LAYER + "post_attention_layernorm.weight",), LAYER + "mlp.linear_fc1.layer_norm_weight", ("H",), when="dense")
MOE_NORM = Copy((HF_LAYER + "post_attention_layernorm.weight",), LAYER + "pre_mlp_layernorm.weight", ("H",), when="moe")


def router(block: str = "mlp", *, bias: bool = False) -> tuple[Mapping, ...]:
    """The router of an HF block; with `bias` also DeepSeek's correction of the scores, which stays in its own dtype."""
    weight = Copy((f"{HF_LAYER}{block}.gate.weight",), LAYER + "mlp.router.weight", ("E", "H"), when="moe")
    correction = Copy(
        (f"{HF_LAYER}{block}.gate.e_score_correction_bias",), LAYER + "mlp.router.expert_bias", ("E",), when="moe", keep_dtype=True
    )
    return (weight, correction) if bias else (weight,)


def experts(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Mapping, ...]:
    """The routed experts of an HF block, one HF tensor per expert and projection."""
    prefix = f"{HF_LAYER}{block}.experts.{{e}}."
    return (
        gate_up((f"{prefix}{gate}.weight", f"{prefix}{up}.weight"), LAYER + "mlp.experts.linear_fc1.weight{e}", "M", when="moe"),
        Copy((f"{prefix}{down}.weight",), LAYER + "mlp.experts.linear_fc2.weight{e}", ("H", "M"), when="moe"),
    )


def shared_experts(name: str, *, gate: str | None = None) -> tuple[Mapping, ...]:
    """The expert every token passes, called `name` in HF; `gate` names its scalar gate where it has one."""
    prefix = f"{HF_LAYER}mlp.{name}."
    made: tuple[Mapping, ...] = (
        gate_up((prefix + "gate_proj.weight", prefix + "up_proj.weight"), LAYER + "mlp.shared_experts.linear_fc1.weight", "S", when="moe"),
        Copy((prefix + "down_proj.weight",), LAYER + "mlp.shared_experts.linear_fc2.weight", ("H", "S"), when="moe"),
    )
    if gate:
        made += (Copy((f"{HF_LAYER}mlp.{gate}.weight",), LAYER + "mlp.shared_experts.gate_weight", ("1", "H"), when="moe"),)
    return made


def moe(
    *attention: Mapping,
    mlp: tuple[Mapping, ...],
    norms: tuple[Mapping, ...] = (INPUT_NORM, DENSE_NORM, MOE_NORM),
    after: tuple[Mapping, ...] = (),
) -> tuple[Mapping, ...]:
    """A whole decoder whose layers are dense or have experts, as moe_layer_freq says, and what comes `after` its layers."""
    return (EMBEDDING, *attention, DENSE_FC1, DENSE_FC2, *mlp, *norms, *after, FINAL_NORM, HEAD)


def expert_rules(
    count: tuple[str, ...],
    default: int,
    topk: int,
    width: str = "moe_intermediate_size",
    width_default: int | None = None,
    *,
    score: str = "softmax",
    loss: str = "router_aux_loss_coef",
    per_token: tuple[str, ...] = ("num_experts_per_tok",),
) -> tuple[AnyRule, ...]:
    """Number of experts, experts per token and width of an expert, under the names of the family; how the router scores them."""
    own_width = Rule((width,), "moe_ffn_hidden_size", default=width_default, shape=True, forward=width == "intermediate_size")
    return (
        Rule(count, "num_experts", default=default, shape=True),
        Rule(per_token, "moe_router_topk", default=topk),
        own_width,
        Rule((loss,), "moe_aux_loss_coeff", type="float", default=0.001, quiet=True),
        Constant("moe_router_score_function", score),
    )
