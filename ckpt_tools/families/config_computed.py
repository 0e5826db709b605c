"""The relations that need several fields at once, by name: rope, biases, windows of attention, layers with experts, vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CkptError
from . import config_positions as positions
from . import mla, rope
from .config_kinds import MISSING, REQUIRED, Fields, brief, checked

Updates = tuple[dict[str, Any], list[str]]


@dataclass(frozen=True, slots=True)
class Transform:
    """forward   (fields, options) -> Megatron arguments; notes and refusals go through `fields`.
    canonical (args, options) -> the same keys as forward gives, as far as a checkpoint's arguments say them.
    backward  (canonical args, options, "v4"/"v5", template or None) -> (config fields by dotted path, notes).
    tolerates (a checkpoint's args, what the template gives) -> a note when their difference is none, else None.
    """

    forward: Callable[[Fields, tuple[Any, ...]], dict[str, Any]]
    canonical: Callable[[Mapping[str, Any], tuple[Any, ...]], dict[str, Any]]
    backward: Callable[[Mapping[str, Any], tuple[Any, ...], str, Mapping[str, Any] | None], Updates]
    tolerates: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] = lambda args, config: None


# Biases. Megatron: add_bias_linear puts one on every linear layer, add_qkv_bias on q, k, v alone (0.16.1 and 0.19.2, attention.py, mlp.py).
# transformers' attention_bias puts one on q, k, v and o, mlp_bias on the three of the MLP. options: the flags that the family's config has.


def _biases(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    attention, mlp = (bool(fields.number(name, False, "bool")) for name in ("attention_bias", "mlp_bias"))
    mlp = mlp and "mlp_bias" in options
    if attention != mlp:
        fields.refuse(
            "Megatron-Core has biases on q, k and v alone, or on every linear layer, and nothing between",
            expected="attention_bias and mlp_bias equal" if "mlp_bias" in options else "attention_bias false",
            found=f"attention_bias {attention}" + (f", mlp_bias {mlp}" if "mlp_bias" in options else " (on q, k, v and o_proj)"),
            hint="no Megatron-Core model has these tensors; convert with --allow-unrepresentable only to look at them",
        )
    return {"add_bias_linear": attention and mlp, "add_qkv_bias": attention}


def _stored_biases(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    every, qkv = args.get("add_bias_linear"), args.get("add_qkv_bias")
    return {} if every is None and qkv is None else {"add_bias_linear": bool(every), "add_qkv_bias": bool(every or qkv)}


def _config_biases(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    every, qkv = args.get("add_bias_linear", False), args.get("add_qkv_bias", False)
    if qkv != every or (every and "mlp_bias" not in options):
        raise CkptError(
            "E305",
            "a config of this family cannot say where the checkpoint has biases",
            expected="none" if "mlp_bias" not in options else "none, or on every linear layer",
            found="biases on every linear layer" if every else "biases on q, k and v alone",
            hint="biases on q, k and v alone are family qwen2",
        )
    return dict.fromkeys(options, every), []


# Activations other than SwiGLU. Megatron-LM has flags for a few of them; the others are TransformerConfig fields that whoever builds the
# model sets, stored under the field's own name. options: (HF field, default, whether the MLP is gated[, what "gelu" means here]).
_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
_ACTIVATION_ARGS = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu", "gated_linear_unit", "activation_func")


def _activation(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    field, default, gated = options[:3]
    name = fields.number(field, default, "str")
    function = _ACTIVATIONS.get(name)
    if function == "gelu" and len(options) > 3:  # a family whose configs say gelu and mean its approximation
        function = options[3]
    if function is None:
        fields.refuse(
            "ckpt knows no activation of Megatron-Core for this one", expected=", ".join(_ACTIVATIONS), found=f"{field} {brief(name)}"
        )
        function = "gelu"
    if gated or function not in ("squared_relu", "gelu"):
        wanted = f"activation_func {function}" + (" and gated_linear_unit" if gated else "")
        fields.notes.append(f"Megatron-LM has no flag for this MLP: give its TransformerConfig {wanted}")
    return {
        "swiglu": False, "squared_relu": function == "squared_relu", "quick_geglu": False, "openai_gelu": False, "gated_linear_unit": gated,
        "activation_func": function,
    }  # fmt: skip


def _stored_activation(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    out = {name: bool(args.get(name)) for name in _ACTIVATION_ARGS[:-1]}
    out["gated_linear_unit"] = bool(args.get("gated_linear_unit", options[2]))
    stored = args.get("activation_func")
    return {
        **out,
        "activation_func": stored if isinstance(stored, str) else "squared_relu" if out["squared_relu"] else _ACTIVATIONS[options[1]],
    }


def _config_activation(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    if args["swiglu"] or args["quick_geglu"] or args["gated_linear_unit"] != options[2]:
        raise CkptError("E305", "a config of this family cannot say the checkpoint's activation", found=brief(dict(args)))
    name = options[1] if _ACTIVATIONS[options[1]] == args["activation_func"] else None
    return {options[0]: name or next((n for n, f in _ACTIVATIONS.items() if f == args["activation_func"]), options[1])}, []


# Attention windows by layer (transformers 5.24 configuration_qwen2.py; megatron-core 0.16.1 transformer/utils.py).


def _windows(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    layers = fields.number("num_hidden_layers")
    used = fields.number("use_sliding_window", False, "bool")
    window = fields.number("sliding_window", None if fields.get("sliding_window") is None else options[0]) if used else None
    kinds = fields.number("layer_types", None, "list")
    if kinds is None:
        start = fields.number("max_window_layers", options[1])
        pattern = [int(window is not None and i >= start) for i in range(layers)]
    else:
        unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            raise CkptError(
                "E311",
                "config.json: layer_types does not describe the layers of this family",
                expected=f"{layers} of full_attention, sliding_attention",
                found=f"{len(kinds)}" + (f", among them {', '.join(unknown)}" if unknown else ""),
            )
        pattern = [int(k == "sliding_attention") for k in kinds]
    if not any(pattern):
        return {"window_size": None, "window_attn_skip_freq": None}
    if window is None:
        raise CkptError(
            "E311",
            "config.json has layers with a sliding window, but no window",
            expected="use_sliding_window true and a sliding_window",
            found=f"use_sliding_window {used}, sliding_window {brief(fields.config.get('sliding_window'))}",
        )
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}


def _stored_windows(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    size, pattern, layers = args.get("window_size"), args.get("window_attn_skip_freq"), args.get("num_layers") or 0
    if not size:
        return {"window_size": None, "window_attn_skip_freq": None}
    if isinstance(pattern, int):
        pattern = [int((i + 1) % pattern != 0) for i in range(layers)] if pattern > 0 else None
    elif pattern is not None:
        pattern = [int(bool(p)) for p in checked(pattern, "list", "window_attn_skip_freq")]
        if len(pattern) != layers:
            raise CkptError(
                "E301", "window_attn_skip_freq does not fit the number of layers", expected=f"{layers} entries", found=brief(pattern)
            )
    return {"window_size": tuple(size), "window_attn_skip_freq": None if pattern is None or all(pattern) else pattern}


def _stored_layer_windows(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    return {**_stored_windows(args, options), **({"num_layers": args["num_layers"]} if args.get("num_layers") else {})}


def _config_windows(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    from .config_scalars import KINDS

    window, pattern = KINDS["window"].backward(args.get("window_size"), None), args.get("window_attn_skip_freq")
    if window is None:
        off: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}
        if template is not None and "layer_types" in template:
            off["layer_types"] = ["full_attention"] * len(template["layer_types"])
        return off, []
    if pattern is None:
        return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}, []
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if p else "full_attention" for p in pattern],
    }, []


# Which layers have experts: Megatron's moe_layer_freq as a list of 0 and 1.


def _sparse_step(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    layers, step, dense = (
        fields.number("num_hidden_layers"),
        fields.number("decoder_sparse_step", 1),
        fields.number("mlp_only_layers", (), "list"),
    )
    return _freq([int(step > 0 and (i + 1) % step == 0 and i not in dense) for i in range(layers)])


def _config_sparse_step(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    freq = args.get("moe_layer_freq", 1)
    return {"decoder_sparse_step": 1, "mlp_only_layers": [] if freq == 1 else [i for i, moe in enumerate(freq) if not moe]}, []


def _first_dense(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    layers, kinds = fields.number("num_hidden_layers"), fields.number("mlp_layer_types", None, "list")
    if kinds is not None and fields.get("first_k_dense_replace") is MISSING:
        return _freq([int(k == "sparse") for k in kinds])
    usual = options[0] if options else REQUIRED
    dense = fields.number("first_k_dense_replace", 1 if usual is None else usual)
    return _freq([int(i >= dense) for i in range(layers)])


def _config_first_dense(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    freq = args.get("moe_layer_freq", 1)
    if options and options[0] is None:  # a family that lists its layers
        pattern = [1] * args["num_layers"] if freq == 1 else freq
        return {"mlp_layer_types": ["sparse" if moe else "dense" for moe in pattern]}, []
    dense = 0 if freq == 1 else next((i for i, moe in enumerate(freq) if moe), len(freq))
    if freq != 1 and not all(freq[dense:]):
        raise CkptError(
            "E305",
            "a config of this family cannot say which layers have experts",
            expected="dense layers first, then layers with experts",
            found=brief(freq),
        )
    return {"first_k_dense_replace": dense}, []


# Groups of experts of which a token may choose only some. Megatron scores a group by the sum of its best topk // group_topk experts (0.16.1
# moe_utils.py group_limited_topk), transformers by the best two (deepseek_v3) or the best one (deepseek_v2): options = (default number of
# groups, default number chosen, how many transformers adds up).


def _expert_groups(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    none = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    method = fields.number("topk_method", None, "str")
    groups, chosen = fields.number("n_group", options[0]), fields.number("topk_group", options[1])
    if method == "greedy" or not groups or groups == 1 or (method is None and options[0] is None):
        return none
    topk = fields.number("num_experts_per_tok")
    if not chosen or topk // chosen != options[2]:
        fields.refuse(
            "Megatron-Core scores a group of experts by the sum of its best num_experts_per_tok // topk_group",
            expected=f"num_experts_per_tok // topk_group = {options[2]}",
            found=f"{topk} // {chosen}",
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _stored_expert_groups(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    return {name: args.get(name) for name in ("moe_router_num_groups", "moe_router_group_topk")}


def _config_expert_groups(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    groups, chosen = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    if options[0] is None:  # deepseek_v2 names its method
        return (
            {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": chosen} if groups else {"topk_method": "greedy"}
        ), []
    return {"n_group": groups or 1, "topk_group": chosen or 1}, []


def _freq(pattern: list[int]) -> dict[str, Any]:
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _stored_freq(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    freq, layers = args.get("moe_layer_freq"), args.get("num_layers") or 0
    if freq is None:
        return {}
    if isinstance(freq, int) and freq > 0:  # Megatron: layer i (from 0) has experts when i % freq == 0
        return _freq([int(i % freq == 0) for i in range(layers)])
    pattern = [int(bool(f)) for f in checked(freq, "list", "moe_layer_freq")]
    if len(pattern) != layers:
        raise CkptError("E301", "moe_layer_freq does not fit the number of layers", expected=f"{layers} entries", found=brief(freq))
    return _freq(pattern)


# Multi-token prediction: a checkpoint whose config promises such layers need not hold them (transformers 5 drops them on saving).


def _prediction(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    _, count = fields.first(("num_nextn_predict_layers", "num_mtp_layers"), "int")
    return {"mtp_num_layers": None if count is MISSING else count or None}


def _config_prediction(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    return {"num_nextn_predict_layers": args.get("mtp_num_layers") or 0}, []


def _none_stored(args: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    count = config["mtp_num_layers"]
    if args.get("mtp_num_layers") or not count:
        return None
    return f"config.json keeps its num_nextn_predict_layers {count}, although the checkpoint has no such layers"


# Vocabulary: the true number of rows. A checkpoint's vocab_size may be the tokenizer's length, which HF's number may exceed.


def _vocab(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    return {"vocab_size": checked(fields.number("vocab_size"), "int", "vocab_size", positive=True)}


def _stored_vocab(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    vocab = checked(args.get("vocab_size"), "int", "vocab_size")
    return {"vocab_size": vocab} if vocab else {}


def _config_vocab(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    if "vocab_size" not in args:
        raise CkptError(
            "E301",
            "the checkpoint does not say how many rows of its vocabulary are real",
            hint="give the HF config with --hf-config DIR, or --vocab-size N",
        )
    return {"vocab_size": args["vocab_size"]}, []


def _same_table(args: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    rows, trained, wanted = args.get("padded_vocab_size"), args["vocab_size"], config["vocab_size"]
    if not isinstance(rows, int) or not trained <= wanted <= rows:
        return None
    return f"vocab_size {wanted} of the HF config kept, not {trained} of the checkpoint: a tokenizer may be shorter than its {rows} rows"


COMPUTED: dict[str, Transform] = {
    "rope": Transform(rope.forward, lambda a, o: rope.canonical(a), lambda a, o, s, t: rope.backward(a, s, t)),
    "latent_rope": Transform(mla.forward, lambda a, o: mla.canonical(a), lambda a, o, s, t: mla.backward(a, s, t)),
    "biases": Transform(_biases, _stored_biases, _config_biases),
    "gpt2_sizes": Transform(positions.gpt2_sizes, positions.stored_gpt2_sizes, positions.config_gpt2_sizes),
    "learned_positions": Transform(positions.learned, positions.stored_learned, positions.config_learned),
    "baichuan": Transform(positions.baichuan, lambda a, o: {}, lambda a, o, s, t: ({}, [])),
    "no_rope": Transform(positions.no_rope, positions.stored_no_rope, positions.config_no_rope),
    "multimodal_rope": Transform(positions.multimodal_rope, positions.stored_multimodal_rope, positions.config_multimodal_rope),
    "two_ropes": Transform(positions.two_ropes, positions.stored_two_ropes, positions.config_two_ropes),
    "layer_windows": Transform(positions.layer_windows, _stored_layer_windows, positions.config_layer_windows),
    "activation": Transform(_activation, _stored_activation, _config_activation),
    "windows": Transform(_windows, _stored_windows, _config_windows),
    "sparse_step": Transform(_sparse_step, _stored_freq, _config_sparse_step),
    "first_dense": Transform(_first_dense, _stored_freq, _config_first_dense),
    "expert_groups": Transform(_expert_groups, _stored_expert_groups, _config_expert_groups),
    "mtp": Transform(_prediction, lambda a, o: {"mtp_num_layers": a.get("mtp_num_layers") or None}, _config_prediction, _none_stored),
    "vocab": Transform(_vocab, _stored_vocab, _config_vocab, _same_table),
}
