"""What model a checkpoint holds, in people's words: from Megatron's arguments, from config.json, or from the shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..model_names import EMBEDDING, TABLES
from ..naming import parse_key
from ..tensors import TensorMetadata


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model.

    source   "args" (Megatron's arguments), "config.json", "shapes" (neither was there).
    family   family of ckpt, or None;   why  one clause saying how it was told, or why it could not be.
    sizes    facts by name in the order to show them: layers, hidden, heads, kv_groups, head_dim, ffn, vocab, padded_vocab, rope_base, ...
    padding  elements of the weights that only pad the vocabulary.
    """

    source: str
    family: str | None
    why: str
    sizes: dict[str, Any]
    padding: int
    warnings: tuple[str, ...]


# (name shown, Megatron's argument); first those that every model has.
_ARGS: tuple[tuple[str, str], ...] = (
    ("layers", "num_layers"),
    ("hidden", "hidden_size"),
    ("heads", "num_attention_heads"),
    ("kv_groups", "num_query_groups"),
    ("head_dim", "kv_channels"),
    ("ffn", "ffn_hidden_size"),
    ("vocab", "vocab_size"),
    ("padded_vocab", "padded_vocab_size"),
    ("max_positions", "max_position_embeddings"),
    ("rope_base", "rotary_base"),
    ("rope_percent", "rotary_percent"),
    ("rope_scaling_factor", "rope_scaling_factor"),
    ("sliding_window", "window_size"),
    ("normalization", "normalization"),
    ("norm_epsilon", "layernorm_epsilon"),
    ("experts", "num_experts"),
    ("experts_per_token", "moe_router_topk"),
    ("expert_ffn", "moe_ffn_hidden_size"),
    ("shared_expert_ffn", "moe_shared_expert_intermediate_size"),
    ("q_lora_rank", "q_lora_rank"),
    ("kv_lora_rank", "kv_lora_rank"),
    ("mtp_layers", "mtp_num_layers"),
)
_MOE = ("experts_per_token", "expert_ffn", "shared_expert_ffn")
# (name shown, spellings in config.json, preferred first)
_CONFIG: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("layers", ("num_hidden_layers", "n_layer", "num_layers")),
    ("hidden", ("hidden_size", "n_embd", "d_model")),
    ("heads", ("num_attention_heads", "n_head")),
    ("kv_groups", ("num_key_value_heads",)),
    ("head_dim", ("head_dim",)),
    ("ffn", ("intermediate_size", "n_inner", "ffn_dim")),
    ("vocab", ("vocab_size",)),
    ("max_positions", ("max_position_embeddings", "n_positions")),
    ("sliding_window", ("sliding_window",)),
    ("norm_epsilon", ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")),
    ("experts", ("num_experts", "num_local_experts", "n_routed_experts")),
    ("experts_per_token", ("num_experts_per_tok",)),
    ("expert_ffn", ("moe_intermediate_size",)),
    ("shared_experts", ("n_shared_experts",)),
    ("shared_expert_ffn", ("shared_expert_intermediate_size",)),
    ("q_lora_rank", ("q_lora_rank",)),
    ("kv_lora_rank", ("kv_lora_rank",)),
    ("mtp_layers", ("num_nextn_predict_layers",)),
)


def describe(checkpoint: Checkpoint) -> Model | None:
    """The model whose weights (or state) a checkpoint holds; None when nothing says anything about one."""
    if checkpoint.config is not None:
        return _from_config(checkpoint.config, checkpoint.weights, checkpoint.location.directory)
    if checkpoint.args is not None:
        return _from_args(checkpoint.args, checkpoint.weights)
    if checkpoint.weights and checkpoint.format != "hf":
        sizes = {k: v for k, v in _measured(checkpoint.weights).items() if v is not None}
        return Model("shapes", None, "no arguments are stored", sizes, 0, ()) if sizes else None
    return None


# ---- Megatron -----------------------------------------------------------------------------------------------------------------------


def _from_args(stored: Mapping[str, Any], weights: Mapping[str, TensorMetadata]) -> Model:
    from ..families.megatron_args import effective_args

    args = effective_args(stored)
    sizes: dict[str, Any] = {name: args[arg] for name, arg in _ARGS if _telling(args.get(arg))}
    if not sizes.get("experts"):
        for name in _MOE:
            sizes.pop(name, None)
    if not args.get("use_rope_scaling"):
        sizes.pop("rope_scaling_factor", None)
    if not args.get("multi_latent_attention"):
        sizes.pop("q_lora_rank", None)
        sizes.pop("kv_lora_rank", None)
    if args.get("position_embedding_type") not in (None, "rope", "yarn", "mrope"):
        sizes.pop("rope_base", None)
        sizes["positions"] = args["position_embedding_type"]
    if sizes.get("rope_percent") == 1.0:
        sizes.pop("rope_percent")
    if isinstance(args.get("swiglu"), bool):
        sizes["activation"] = "SwiGLU" if args["swiglu"] else "GELU" if not args.get("squared_relu") else "squared ReLU"
    if isinstance(args.get("untie_embeddings_and_output_weights"), bool):
        sizes["tied"] = not args["untie_embeddings_and_output_weights"]
    measured = _measured(weights)
    warnings = [
        f"the arguments say {name.replace('_', ' ')} {sizes[name]}, the tensors have {measured[name]}"
        for name in ("layers", "hidden", "experts", "padded_vocab")
        if measured.get(name) is not None and _telling(sizes.get(name)) and sizes[name] != measured[name]
    ]
    family, why = _family(args, weights)
    return Model("args", family, why, sizes, _padding(sizes.get("vocab"), weights), tuple(warnings))


def _family(args: Mapping[str, Any], weights: Mapping[str, TensorMetadata]) -> tuple[str | None, str]:
    from ..families.config import infer_family

    # One layer is enough to tell, and a model of many experts has too many names to spell them all.
    names = {parse_key(n).template.replace("{l}", "0").replace("{e}", "0") for n in weights}
    try:
        return infer_family(args, names)
    except CkptError as error:
        return None, error.what


def _measured(weights: Mapping[str, TensorMetadata]) -> dict[str, int | None]:
    """Sizes that the stored shapes show by themselves: layers, hidden, padded_vocab, experts (None when they do not)."""
    layers: set[int] = set()
    stacked: set[int] = set()
    experts: set[int] = set()
    numbered_experts = -1
    for name, tensor in weights.items():
        key = parse_key(name)
        if not key.template.startswith("decoder.layers."):
            continue
        number = key.template.removeprefix("decoder.layers.").partition(".")[0]
        if number.isdecimal() and len(number) < 10:
            layers.add(int(number))
        shape = tensor.global_shape
        if key.layers and shape:
            stacked.add(shape[0])
        if key.experts and len(shape) > key.layers:
            experts.add(shape[1 if key.layers else 0])
        elif ".mlp.experts.linear_fc" in key.template:
            tail = key.template.rpartition(".")[2].removeprefix("weight").removeprefix("bias")
            numbered_experts = max(numbered_experts, int(tail) if tail.isdecimal() and len(tail) < 10 else -1)
    embedding = weights.get(EMBEDDING)
    table = embedding.global_shape if embedding is not None and len(embedding.global_shape) == 2 else None
    count = max(stacked) if stacked else max(layers) + 1 if layers else None
    return {
        "layers": count,
        "hidden": table[1] if table else None,
        "padded_vocab": table[0] if table else None,
        "experts": max(experts) if experts else numbered_experts + 1 if numbered_experts >= 0 else None,
    }


def _padding(vocab: Any, weights: Mapping[str, TensorMetadata]) -> int:
    if not isinstance(vocab, int) or isinstance(vocab, bool) or vocab <= 0:
        return 0
    found = [t for n, t in weights.items() if n in TABLES and t.global_shape]
    return sum(t.numel // t.global_shape[0] * (t.global_shape[0] - vocab) for t in found if t.global_shape[0] > vocab)


# ---- Hugging Face -------------------------------------------------------------------------------------------------------------------


def _from_config(config: Mapping[str, Any], weights: Mapping[str, TensorMetadata], where: str) -> Model:
    inner = config.get("text_config")  # multimodal models describe the language model in an object of its own
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else config
    sizes: dict[str, Any] = {}
    for name, spellings in _CONFIG:
        value = next((text[s] for s in spellings if _telling(text.get(s))), None)
        if value is not None and value != 0:
            sizes[name] = value
    if text.get("use_sliding_window") is False:
        sizes.pop("sliding_window", None)
    heads, hidden = sizes.get("heads"), sizes.get("hidden")
    if "head_dim" not in sizes and isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden % heads == 0:
        sizes["head_dim"] = hidden // heads
    sizes.update(_rope(text))
    if isinstance(text.get("hidden_act"), str):
        sizes["activation"] = text["hidden_act"]
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if isinstance(tied, bool):
        sizes["tied"] = tied
    stated = config.get("dtype", config.get("torch_dtype"))
    if isinstance(stated, str):
        sizes["config_dtype"] = stated
    method = config["quantization_config"].get("quant_method") if isinstance(config.get("quantization_config"), Mapping) else None
    if isinstance(method, str):
        sizes["quantization"] = method
    family, why = _family_of_config(config, where)
    ordered = {name: sizes[name] for name in _ORDER if name in sizes} | sizes
    return Model("config.json", family, why, ordered, 0, tuple(_contradictions(sizes, weights)))


_ORDER = (*(name for name, _ in _ARGS[:9]), "rope_base", "rope_type", "rope_factor", "sliding_window", "norm_epsilon")


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary base and scaling, of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""
    parameters = text.get("rope_parameters")
    scaling = parameters if isinstance(parameters, Mapping) else text.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    base = scaling.get("rope_theta", text.get("rope_theta"))
    kind = scaling.get("rope_type", scaling.get("type"))
    found = {"rope_base": base, "rope_type": None if kind == "default" else kind, "rope_factor": scaling.get("factor")}
    return {name: value for name, value in found.items() if _telling(value)}


def _family_of_config(config: Mapping[str, Any], where: str) -> tuple[str | None, str]:
    from ..families import family_of_config

    try:
        family = family_of_config(config, where)
    except CkptError as error:
        return None, error.what
    kind = config.get("model_type")
    return family.name, f"model_type {kind}" if kind else f"architecture {family.architectures[0]}"


def _contradictions(sizes: Mapping[str, Any], weights: Mapping[str, TensorMetadata]) -> list[str]:
    found = []
    table = next((t for n, t in weights.items() if n.endswith(("embed_tokens.weight", "wte.weight")) and len(t.global_shape) == 2), None)
    if table is not None:
        for axis, name in enumerate(("vocab", "hidden")):
            if isinstance(sizes.get(name), int) and sizes[name] != table.global_shape[axis]:
                found.append(f"config.json says {name} {sizes[name]}, {table.fqn} is {list(table.global_shape)}")
    if sizes.get("tied") is True and "lm_head.weight" in weights:
        found.append("lm_head.weight is stored although config.json ties it to the embedding")
    stated = str(sizes.get("config_dtype", "")).removeprefix("torch.")
    floats = {t.dtype for t in weights.values() if t.dtype.startswith(("float", "bfloat"))}
    if stated and floats and stated not in floats and "quantization" not in sizes:
        found.append(f"config.json says dtype {stated}, the tensors are {', '.join(sorted(floats))}")
    return found


def _telling(value: Any) -> bool:
    """Whether a value is a plain one worth showing; objects of foreign classes are not."""
    if isinstance(value, list | tuple):
        return bool(value) and len(value) <= 8 and all(_telling(v) or v is None for v in value)
    return isinstance(value, bool | int | float | str)
