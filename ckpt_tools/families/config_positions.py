"""Relations about positions that some families have for themselves: learned tables, two ropes, windows by kind of layer, GPT-2's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CkptError
from . import rope
from .config_kinds import MISSING, Fields, brief, checked
from .config_scalars import KINDS

Updates = tuple[dict[str, Any], list[str]]
LEARNED = {**rope.PLAIN, "position_embedding_type": "learned_absolute", "rotary_base": 10000, "rotary_percent": 1.0}


def gpt2_sizes(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """n_inner null means four times the width; a head has its share of the width."""
    _, width = fields.first(("n_embd", "hidden_size"), "int")
    _, heads = fields.first(("n_head", "num_attention_heads"), "int")
    width, heads = 768 if width is MISSING else width, 12 if heads is MISSING else heads
    return {"ffn_hidden_size": fields.number("n_inner", None) or 4 * width, "kv_channels": width // max(heads, 1)}


def stored_gpt2_sizes(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """The two sizes that n_inner decides."""
    return {name: args[name] for name in ("ffn_hidden_size", "kv_channels") if args.get(name) is not None}


def config_gpt2_sizes(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    """n_inner as a number."""
    return {"n_inner": args.get("ffn_hidden_size")}, []


def learned(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """A table of positions instead of a rotation."""
    return dict(LEARNED)


def stored_learned(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """What the arguments say about positions. E305 when they rotate."""
    kind = args.get("position_embedding_type")
    if kind not in (None, "learned_absolute"):
        raise CkptError(
            "E305",
            "an HF config of this family cannot say the checkpoint's position embedding",
            expected="learned_absolute",
            found=brief(kind),
        )
    return dict(LEARNED)


def config_learned(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    """The table needs no field."""
    return {}, []


# Gemma 3 rotates with one base in layers that see everything and with another in those with a window. Megatron-Bridge's provider calls them
# rotary_base (a pair); here they are two arguments.


def two_ropes(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """options = (default base of full attention, default base of windows)."""
    new = fields.get("rope_parameters")
    if isinstance(new, Mapping) and isinstance(new.get("full_attention"), Mapping):
        full, window = new["full_attention"], new.get("sliding_attention") or {}
        base, local = full.get("rope_theta", options[0]), window.get("rope_theta", options[1])
        scaling = full
    else:
        base, local = fields.number("rope_theta", options[0], "float"), fields.number("rope_local_base_freq", options[1], "float")
        scaling = fields.get("rope_scaling")
        scaling = scaling if isinstance(scaling, Mapping) else {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear"):
        fields.refuse(f"Megatron-Core has no rope of type {brief(kind)} for one kind of layer", expected="default or linear")
    factor = float(scaling["factor"]) if kind == "linear" else None
    return {**rope.PLAIN, "rotary_base": base, "rotary_base_local": local, "rotary_percent": 1.0, "rope_scaling_factor": factor}


def stored_two_ropes(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """The same keys from a checkpoint's arguments."""
    usual = {"rotary_base": options[0], "rotary_base_local": options[1]}
    kept = {name: args[name] if args.get(name) is not None else value for name, value in usual.items()}
    return {**rope.PLAIN, **kept, "rotary_percent": 1.0, "rope_scaling_factor": args.get("rope_scaling_factor")}


def config_two_ropes(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    """Both spellings: rope_parameters by kind of layer, or rope_theta and rope_local_base_freq."""
    factor = args["rope_scaling_factor"]
    scaling = {"rope_type": "linear", "factor": factor} if factor else {"rope_type": "default"}
    old = spelling == "v4" if template is None else "rope_parameters" not in template
    if old:
        return {
            "rope_theta": float(args["rotary_base"]),
            "rope_local_base_freq": float(args["rotary_base_local"]),
            "rope_scaling": scaling if factor else None,
        }, []
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": float(args["rotary_base"]), **scaling},
            "sliding_attention": {"rope_theta": float(args["rotary_base_local"]), "rope_type": "default"},
        }
    }, []


# A window in all layers but each n-th: options = (default window, n, whether the window may be absent).


def layer_windows(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """window_size and the list of layers that have it."""
    layers, window = fields.number("num_hidden_layers"), fields.get("sliding_window")
    window = options[0] if window is MISSING else window
    every = fields.number("sliding_window_pattern", options[1]) or options[1]
    kinds = fields.number("layer_types", None, "list") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    if len(kinds) != layers:
        raise CkptError("E311", "config.json: layer_types does not describe the layers", expected=f"{layers}", found=f"{len(kinds)}")
    pattern = [int(k == "sliding_attention") for k in kinds]
    if window is None or not any(pattern):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": KINDS["window"].forward(window, None), "window_attn_skip_freq": None if all(pattern) else pattern}


def config_layer_windows(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    """sliding_window and layer_types."""
    window, pattern = KINDS["window"].backward(args.get("window_size"), None), args.get("window_attn_skip_freq")
    layers = args.get("num_layers") or len(pattern or ())
    if window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}, []
    return {"sliding_window": window, "layer_types": ["sliding_attention" if p else "full_attention" for p in pattern or [1] * layers]}, []


# ---- rope whose channels are shared out among time, height and width (Qwen-VL); of text alone all three positions are the same


def multimodal_rope(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """options: the default base and mrope_section. Rope's arguments, position_embedding_type mrope, mrope_section."""
    config = dict(fields.config)
    section: Any = None
    for name in ("rope_scaling", "rope_parameters"):
        held = config.get(name)
        if isinstance(held, Mapping):
            section = held.get("mrope_section", section)
            plain = {k: v for k, v in held.items() if not k.startswith("mrope_")}
            config[name] = {k: "default" if k in ("type", "rope_type") and v == "mrope" else v for k, v in plain.items()}
    inner = Fields(config, fields.allow, fields.notes)
    section = checked(section, "list", "mrope_section")
    if section is None:
        section = list(options[1:])
        fields.notes.append(f"config.json has no mrope_section: {section} taken")
    return {**rope.forward(inner, options[:1]), "position_embedding_type": "mrope", "mrope_section": list(section)}


def stored_multimodal_rope(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """As multimodal_rope gives them. A run that trained the text alone says rope, which is the same for text."""
    kind = args.get("position_embedding_type")
    found = rope.canonical({**args, "position_embedding_type": "rope" if kind in ("mrope", None) else kind})
    section = args.get("mrope_section")
    return {**found, "position_embedding_type": "mrope", **({"mrope_section": list(section)} if section else {})}


def config_multimodal_rope(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    """Rope's fields with mrope_section in them."""
    made, told = rope.backward({**args, "position_embedding_type": "rope"}, spelling, template)
    name = next((n for n in ("rope_parameters", "rope_scaling") if n in made), "rope_parameters")
    held = next((v for n in ("rope_scaling", "rope_parameters") if isinstance(v := (template or {}).get(n), Mapping)), {})
    own = {k: v for k, v in held.items() if k.startswith("mrope_")}
    section = args.get("mrope_section") or own.get("mrope_section") or list(options[1:])
    made[name] = {**(made.get(name) or {"rope_type": "default"}), **own, "mrope_section": list(section)}
    return made, told


def baichuan(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """Nothing but refusals: the 13B models have no max_position_embeddings, the second generation a vocabulary of 125696."""
    if fields.get("max_position_embeddings") is MISSING:
        fields.refuse("the 13B models have ALiBi instead of rope, and Megatron-Core has none", found="no max_position_embeddings")
    if fields.get("vocab_size") == 125696:
        fields.refuse("Baichuan 2 normalises the rows of its head at run time, which Megatron-Core does not", found="vocab_size 125696")
    return {}


# Layers without rotation (SmolLM3). transformers lists 1 for a layer that rotates, Megatron 1 for one that does not. options = (interval of
# the default,); without it the family's class knows no such layers.


def no_rope(fields: Fields, options: tuple[Any, ...]) -> dict[str, Any]:
    """no_rope_freq as a list, None when every layer rotates. E305 for a family whose class would ignore the field."""
    listed = fields.number("no_rope_layers", None, "list")
    if listed is None and not options:
        return {"no_rope_freq": None}
    layers = fields.number("num_hidden_layers")
    if listed is None:
        every = fields.number("no_rope_layer_interval", options[0])
        listed = [int((i + 1) % every != 0) for i in range(layers)]
    pattern = [int(not rotates) for rotates in listed or ()]
    if not any(pattern):
        return {"no_rope_freq": None}
    if len(pattern) != layers:
        raise CkptError("E311", "config.json: no_rope_layers does not describe the layers", expected=f"{layers}", found=f"{len(pattern)}")
    if not options:
        fields.refuse("layers without rotation are family smollm3", found=f"no_rope_layers {brief(listed)}", hint="--family smollm3")
        return {"no_rope_freq": None}
    return {"no_rope_freq": pattern}


def stored_no_rope(args: Mapping[str, Any], options: tuple[Any, ...]) -> dict[str, Any]:
    """The list that the arguments mean; Megatron takes n for every n-th layer."""
    value, layers = args.get("no_rope_freq"), args.get("num_layers") or 0
    if isinstance(value, int) and value > 0:
        value = [int((i + 1) % value == 0) for i in range(layers)]
    return {"no_rope_freq": value if value and any(value) else None, "num_layers": layers}


def config_no_rope(args: Mapping[str, Any], options: tuple[Any, ...], spelling: str, template: Mapping[str, Any] | None) -> Updates:
    """no_rope_layers. E305 for a family whose class would ignore it."""
    pattern = args.get("no_rope_freq")
    if not options:
        if pattern:
            raise CkptError(
                "E305", "a config of this family cannot say which layers have no rotation", found=brief(pattern), hint="--family smollm3"
            )
        return {}, []
    return {"no_rope_layers": [1 - p for p in pattern] if pattern else [1] * args["num_layers"]}, []
