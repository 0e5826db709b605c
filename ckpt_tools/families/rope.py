"""Rotary position embedding: config.json's two spellings of it, and the Megatron arguments that hold it.

transformers 4 and hub files say rope_theta and rope_scaling; transformers 5 puts both into rope_parameters, with rope_type "default" when
nothing is scaled. Megatron-Core (0.16.1, 0.19.2: rotary_pos_embedding.py, yarn_rotary_pos_embedding.py) holds four of the rope types:
"default"; "llama3" with every number but the factor fixed; "linear" as an interpolation of positions; "yarn".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import CkptError
from .config_kinds import MISSING, Fields, brief, checked

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"yarn_beta_fast": ("beta_fast", 32.0), "yarn_beta_slow": ("beta_slow", 1.0)}
ARGS = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "mscale",
    "mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
PLAIN: dict[str, Any] = {
    "position_embedding_type": "rope",
    "use_rope_scaling": False,
    "rope_scaling_factor": None,
    "rotary_seq_len_interpolation_factor": None,
}
FACTOR_NOTE = (
    "Megatron-LM's own model builder ignores rope_scaling_factor and scales by 8 (0.16.1, 0.19.2); this model needs {factor}: "
    "pass it to GPTModel yourself"
)


def forward(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """Megatron arguments from config.json. options = (default rope_theta, default partial_rotary_factor, default rope_parameters).

    E305 naming the values that Megatron cannot hold.
    """
    parameters, where = _parameters(fields)
    if not parameters and len(options) > 2:
        parameters = options[2]
        fields.notes.append(f"config.json has no {where}: {brief(parameters)} taken")
    theta = _number(parameters, "rope_theta", where) or _first(fields, "rope_theta", "rotary_emb_base")
    if theta is None:
        theta = options[0]
        fields.notes.append(f"config.json has no rope_theta: {theta} taken")
    usual = options[1] if len(options) > 1 else 1.0
    percent = _number(parameters, "partial_rotary_factor", where) or _first(fields, "partial_rotary_factor", "rotary_pct") or usual
    args = {**PLAIN, "rotary_base": int(theta) if float(theta).is_integer() else theta, "rotary_percent": float(percent)}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("default", "linear", "llama3", "yarn"):
        if kind != "default":
            args.update(_scaled(kind, parameters, where, fields))
    else:
        fields.refuse(
            f"Megatron-Core has no rope of type {brief(kind)}",
            expected="default, linear, llama3 or yarn",
            found=f"{where} {brief(parameters)}",
        )
    return args


def _first(fields: Fields, *names: str) -> Any:
    _, value = fields.first(names, "float")
    return None if value is MISSING else value


def _parameters(fields: Fields) -> tuple[dict[str, Any], str]:
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is MISSING or value is None:
            continue
        if not isinstance(value, Mapping):
            raise CkptError("E311", f"config.json: {name} is not an object", found=brief(value))
        found[name] = dict(value)
    if not found:
        return {}, "rope_parameters"
    if any(isinstance(v, Mapping) for v in found.get("rope_parameters", {}).values()):
        raise CkptError(
            "E305", "this family has one rope for all layers, config.json one per kind of layer", found=brief(found["rope_parameters"])
        )
    old, new = found.get("rope_scaling"), found.get("rope_parameters")
    if old and new and any(k in new and new[k] != v for k, v in old.items() if k not in ("type", "rope_type")):
        fields.notes.append("config.json's rope_scaling and rope_parameters disagree: rope_scaling was taken, as transformers 5 does")
    # transformers 5 reads rope_scaling, when it says anything, instead of rope_parameters; the base then may still stand in the other
    merged = {**(new or {}), **old} if old else (new or {})
    return merged, "rope_scaling" if old else "rope_parameters"


def _number(parameters: Mapping[str, Any], key: str, where: str, default: float | None = None) -> Any:
    value = checked(parameters.get(key), "float", f"{where}.{key}")
    return default if value is None else value


def _scaled(kind: str, parameters: Mapping[str, Any], where: str, fields: Fields) -> dict[str, Any]:
    factor = _number(parameters, "factor", where)
    original = _number(parameters, "original_max_position_embeddings", where) or fields.number("original_max_position_embeddings", None)
    if factor is None and kind == "yarn" and original:
        factor = fields.number("max_position_embeddings") / original
    if factor is None or factor <= 0:
        raise CkptError("E311", f"config.json: {where} of type {kind} needs a positive factor", found=brief(dict(parameters)))
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": int(factor) if float(factor).is_integer() else factor}
    if kind == "llama3":
        return _llama3(parameters, where, factor, original, fields)
    return _yarn(parameters, where, factor, original, fields)


def _llama3(parameters: Mapping[str, Any], where: str, factor: float, original: Any, fields: Fields) -> dict[str, Any]:
    values = {k: _number(parameters, k, where) for k in LLAMA3} | {
        "original_max_position_embeddings": original or fields.number("max_position_embeddings")
    }
    wrong = {k: v for k, v in values.items() if v != LLAMA3[k]}
    if wrong:
        fields.refuse(
            "Megatron-Core scales llama3 rope with fixed numbers, of which this model has others",
            expected=", ".join(f"{k} {LLAMA3[k]:g}" for k in wrong),
            found=", ".join(f"{k} {brief(v)}" for k, v in wrong.items()),
        )
        return {}
    if factor != 8:
        fields.notes.append(FACTOR_NOTE.format(factor=f"{factor:g}"))
    return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}


def _yarn(parameters: Mapping[str, Any], where: str, factor: float, original: Any, fields: Fields) -> dict[str, Any]:
    mscale, all_dim = _number(parameters, "mscale", where), _number(parameters, "mscale_all_dim", where)
    if not (mscale and all_dim):  # transformers then uses the factor alone, which is Megatron's mscale 1 and mscale_all_dim 0
        mscale, all_dim = 1.0, 0.0
    wanted, held = _number(parameters, "attention_factor", where), _concentration(factor, mscale) / _concentration(factor, all_dim)
    if wanted is not None and not math.isclose(wanted, held, rel_tol=1e-6):
        fields.refuse(
            "Megatron-Core computes yarn's attention_factor, of which this model declares another",
            expected=f"{held:.6g}",
            found=f"{wanted:g}",
        )
        return {}
    fields.notes.append(
        "yarn rope needs Megatron-LM 0.19 or newer, or yarn_* attributes set on the TransformerConfig by your own model builder"
    )
    args = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(factor),
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dim),
        "yarn_original_max_position_embeddings": int(original or fields.number("max_position_embeddings")),
    }
    args |= {arg: float(_number(parameters, key, where) or default) for arg, (key, default) in YARN.items()}
    args["yarn_correction_range_round_to_int"] = parameters.get("truncate", True) is not False
    return args


def _concentration(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def canonical(args: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys as `forward` gives, from arguments of a checkpoint; what the arguments do not say is left out."""
    kind = args.get("position_embedding_type")
    if kind not in (None, "rope", "yarn"):
        raise CkptError(
            "E305", "an HF config of this family cannot say the checkpoint's position embedding", expected="rope or yarn", found=brief(kind)
        )
    out: dict[str, Any] = {**PLAIN, "position_embedding_type": kind or "rope"}
    for name in ("rotary_base", "rotary_percent"):
        value = checked(args.get(name), "float", name)
        if value is not None:
            out[name] = value
    if args.get("use_rope_scaling"):
        out["use_rope_scaling"] = True
        out["rope_scaling_factor"] = float(args.get("rope_scaling_factor") or 8.0)
    out["rotary_seq_len_interpolation_factor"] = args.get("rotary_seq_len_interpolation_factor")
    if kind == "yarn":
        defaults = {
            "rotary_scaling_factor": 1.0,
            "yarn_original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": True,
            **{arg: default for arg, (_, default) in YARN.items()},
        }
        out |= {name: default if args.get(name) is None else args[name] for name, default in defaults.items()}
    return out


def backward(args: Mapping[str, Any], spelling: str, template: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """config.json fields (dotted paths) for canonical `args`, and notes. With a template: in its own spelling."""
    notes: list[str] = []
    theta, parameters = float(args.get("rotary_base", 10000)), _back_scaling(args, notes)
    percent = args.get("rotary_percent", 1.0)
    if template is not None:
        return _into_template(template, theta, percent, parameters), notes
    partial = {} if percent == 1.0 else {"partial_rotary_factor": percent}
    if spelling == "v5":
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **partial, **parameters}}, notes
    return {"rope_theta": theta, "rope_scaling": parameters or None, **partial}, notes


def _back_scaling(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    interpolation, scaled = args.get("rotary_seq_len_interpolation_factor"), args.get("use_rope_scaling")
    if interpolation and (scaled or args["position_embedding_type"] == "yarn"):
        raise CkptError(
            "E305",
            "an HF config cannot say two scalings of rope at once",
            found=f"rotary_seq_len_interpolation_factor {brief(interpolation)} and another",
        )
    if args["position_embedding_type"] == "yarn":
        out = {
            "rope_type": "yarn",
            "factor": args["rotary_scaling_factor"],
            "original_max_position_embeddings": args["yarn_original_max_position_embeddings"],
        }
        out |= {key: args[arg] for arg, (key, _) in YARN.items()}
        if args["mscale"] and args["mscale_all_dim"]:
            out |= {"mscale": args["mscale"], "mscale_all_dim": args["mscale_all_dim"]}
        else:
            held = _concentration(out["factor"], args["mscale"]) / _concentration(out["factor"], args["mscale_all_dim"])
            if not math.isclose(held, _concentration(out["factor"], 1.0)):  # then transformers would not infer it from the factor
                out["attention_factor"] = held
        return out if args["yarn_correction_range_round_to_int"] else {**out, "truncate": False}
    if scaled:
        if args["rope_scaling_factor"] != 8:
            notes.append(
                FACTOR_NOTE.format(factor=f"{args['rope_scaling_factor']:g}") + " (a model trained by Megatron-LM itself was scaled by 8)"
            )
        return {"rope_type": "llama3", "factor": args["rope_scaling_factor"], **LLAMA3}
    return {"rope_type": "linear", "factor": float(interpolation)} if interpolation else {}


def _into_template(template: Mapping[str, Any], theta: float, percent: float, parameters: dict[str, Any]) -> dict[str, Any]:
    nested = next((n for n in ("rope_scaling", "rope_parameters") if isinstance(template.get(n), Mapping) and template[n]), None)
    inner = dict(template[nested]) if nested else {}
    new = nested == "rope_parameters" or (nested is None and "rope_theta" not in template)
    out: dict[str, Any] = {}
    values = {"rope_theta": theta} | (
        {"partial_rotary_factor": percent} if percent != 1.0 or "partial_rotary_factor" in {*template, *inner} else {}
    )
    kept = {k: v for k, v in inner.items() if k in ("rope_theta", "partial_rotary_factor")}
    for key, value in values.items():
        stands = [v[key] for v in (inner, template) if key in v]
        if stands and stands[0] == value:
            continue
        if key in inner or (key not in template and new):
            kept[key] = value
        if key in template:
            out[key] = value
        if key not in inner and key not in template and not new:
            out[key] = value
    if new:
        out["rope_parameters"] = {"rope_type": "default", **kept, **parameters}
    elif parameters or nested:
        out["rope_scaling"] = {**kept, **parameters} or None
    return out
