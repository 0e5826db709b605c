"""Multi-latent attention: the tensors and rules of DeepSeek's attention, with and without low-rank queries."""

from __future__ import annotations

from collections.abc import Mapping as Arguments
from typing import Any

from ..errors import CkptError
from . import rope
from .config_kinds import AnyRule, Computed, Constant, Derived, Fields, Refuse, Rule
from .dense import HF_LAYER, LAYER
from .mappings import Copy, Mapping

_HF, _MCORE = HF_LAYER + "self_attn.", LAYER + "self_attention."
_QUERY = "A*qk_head_dim+A*qk_pos_emb_head_dim"

# Linear layers cut a head apart in the same order on both sides: the part without rotation first. Norms of the latents are fused into
# the projection that follows them, as Transformer Engine's spec does.
LATENT_ATTENTION: tuple[Mapping, ...] = (
    Copy((_HF + "q_proj.weight",), _MCORE + "linear_q_proj.weight", (_QUERY, "H"), when="no q_lora_rank"),
    Copy((_HF + "q_a_proj.weight",), _MCORE + "linear_q_down_proj.weight", ("q_lora_rank", "H"), when="q_lora_rank"),
    Copy((_HF + "q_a_layernorm.weight",), _MCORE + "linear_q_up_proj.layer_norm_weight", ("q_lora_rank",), when="q_lora_rank"),
    Copy((_HF + "q_b_proj.weight",), _MCORE + "linear_q_up_proj.weight", (_QUERY, "q_lora_rank"), when="q_lora_rank"),
    Copy((_HF + "kv_a_proj_with_mqa.weight",), _MCORE + "linear_kv_down_proj.weight", ("kv_lora_rank+qk_pos_emb_head_dim", "H")),
    Copy((_HF + "kv_a_layernorm.weight",), _MCORE + "linear_kv_up_proj.layer_norm_weight", ("kv_lora_rank",)),
    Copy((_HF + "kv_b_proj.weight",), _MCORE + "linear_kv_up_proj.weight", ("A*qk_head_dim+A*v_head_dim", "kv_lora_rank")),
    Copy((_HF + "o_proj.weight",), _MCORE + "linear_proj.weight", ("H", "A*v_head_dim")),
)
LATENT_INPUT_NORM = Copy((HF_LAYER + "input_layernorm.weight",), LAYER + "input_layernorm.weight", ("H",))

NO_PLAIN_QUERY = tuple(
    (f"0.19.2 {spec}", "no q_lora_rank", "megatron-core 0.19 puts a norm before linear_q_proj, which no such model has")
    for spec in ("te", "local")
)
ARGS = (
    "position_embedding_type", "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor",
)  # fmt: skip
_YARN = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_PLAIN: dict[str, Any] = {**rope.PLAIN, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
YARN_NOTE = (
    "Megatron-LM has no flags for original_max_position_embeddings, beta_fast and beta_slow of latent attention: its "
    "MLATransformerConfig needs {values}"
)


def latent_rules(q_lora: int | None, kv_lora: int, nope: int, rotary: int, value: int) -> tuple[AnyRule, ...]:
    """Sizes of latent attention under both names; the numbers are the family's defaults in transformers."""
    return (
        Constant("multi_latent_attention", True),
        Constant("qk_layernorm", True),
        Constant("group_query_attention", False, binding=False),
        Rule(("q_lora_rank",), "q_lora_rank", default=q_lora, nullable=True, shape=True),
        Rule(("kv_lora_rank",), "kv_lora_rank", default=kv_lora, shape=True),
        Rule(("qk_nope_head_dim",), "qk_head_dim", default=nope, shape=True),
        Rule(("qk_rope_head_dim",), "qk_pos_emb_head_dim", default=rotary, shape=True),
        Rule(("v_head_dim",), "v_head_dim", default=value, shape=True),
        Rule(("num_key_value_heads",), "num_query_groups", default=Derived("num_attention_heads"), quiet=True),
        Rule(("qk_rope_head_dim",), "kv_channels", default=rotary, quiet=True, forward=True),
        Refuse(("attention_bias",), (False, None), "Megatron-Core's latent attention has no biases"),
        Refuse(("rope_interleave",), (True, None), "Megatron-Core rotates neighbouring channels in latent attention"),
        Computed("latent_rope", rope.FIELDS, ARGS, (10000.0,)),
    )


def forward(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """Megatron arguments of the rope of latent attention. E305 for a type that Megatron has not."""
    args = rope.forward(fields, options)
    out = {"rotary_base": args["rotary_base"], "rotary_percent": args["rotary_percent"], **_PLAIN}
    if args["position_embedding_type"] == "yarn":
        out |= {"rope_type": "yarn"} | {name: args[_GENERAL.get(name, name)] for name in _YARN}
        out["original_max_position_embeddings"] = args["yarn_original_max_position_embeddings"]
        unusual = {
            k: out[k]
            for k, usual in (("original_max_position_embeddings", 4096), ("beta_fast", 32.0), ("beta_slow", 1.0))
            if out[k] != usual
        }
        fields.notes[:] = [n for n in fields.notes if not n.startswith("yarn rope needs")]
        if unusual:
            fields.notes.append(YARN_NOTE.format(values=", ".join(f"{k} {v:g}" for k, v in unusual.items())))
    elif args["use_rope_scaling"] or args["rotary_seq_len_interpolation_factor"]:
        fields.refuse("Megatron-Core's latent attention scales rope by yarn alone", expected="default or yarn", found="another rope type")
    return out


_GENERAL = {name: f"yarn_{name}" for name in ("original_max_position_embeddings", "beta_fast", "beta_slow")}


def canonical(args: Arguments[str, Any]) -> dict[str, Any]:
    """The same keys as `forward` gives, from arguments of a checkpoint."""
    out: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rope_type": args.get("rope_type") or "yarn",
    }  # MLATransformerConfig's default
    out |= {name: args[name] for name in ("rotary_base", "rotary_percent") if args.get(name) is not None}
    if out["rope_type"] == "rope":
        return out | {k: v for k, v in _PLAIN.items() if k != "rope_type"}
    usual: dict[str, Any] = {
        "rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }  # fmt: skip
    out |= {name: usual[name] if args.get(name) is None else args[name] for name in usual}
    return out


def backward(args: Arguments[str, Any], spelling: str, template: Arguments[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """config.json fields for canonical `args`."""
    general: dict[str, Any] = {**rope.PLAIN, **{k: args[k] for k in ("rotary_base", "rotary_percent") if k in args}}
    if args["rope_type"] == "yarn":
        if args["rotary_scaling_factor"] is None:
            raise CkptError("E301", "the checkpoint's arguments lack rotary_scaling_factor", hint="give the HF config with --hf-config DIR")
        general |= {"position_embedding_type": "yarn", "yarn_correction_range_round_to_int": True}
        general |= {_GENERAL.get(name, name): args[name] for name in _YARN}
    return rope.backward(general, spelling, template)
