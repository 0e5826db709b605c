"""Megatron's stored keys <-> canonical tensor names, one layer and one expert at a time.

torch_dist stores all layers of a homogeneous model in one tensor (`decoder.layers.mlp.linear_fc2.weight`, axis 0 = layer) and all
experts in another axis (`mlp.experts.experts.linear_fc1.weight`); others index the layer in the key. Canonical names carry the global
layer and expert number and Transformer Engine's spelling. Sources: Megatron-LM transformer_block.py, experts.py, mlp.py (0.8 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .errors import CkptError
from .model_names import EXPERT, FACTOR
from .tensors import Chunk, Shape, TensorMetadata

_OPTIMIZER = re.compile(r"(?P<prefix>(?:chained_\d+\.)?optimizer\.state\.[a-z0-9_]+\.)(?P<key>.+)")
_WRAPPER = re.compile(r"^(?:module\.)+")
_LAYER = re.compile(r"^(?P<stack>(?:decoder|mtp|encoder)\.layers\.)(?:(?P<layer>\d+)\.)?(?P<rest>.+)$")
_EXPERT = re.compile(
    rf"^(?P<head>(?:.*\.)?mlp\.experts\.)experts\.(?:(?P<expert>\d+)\.)?(?P<tail>linear_fc[12]\.(?:{FACTOR}\.)?(?:weight|bias))(?P<half>_[wv])?$"
)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A stored key taken apart: optimizer `prefix` ("" for weights), canonical name with `{l}` / `{e}` where axes of the stored tensor
    stand for layers and experts; `axes` = how many leading axes that are; half = "_w"/"_v" of a gated fc1 stored as two keys."""

    prefix: str
    template: str
    layers: bool
    experts: bool
    half: str


def parse_key(fqn: str) -> StoredKey:
    """Take a torch_dist tensor key apart."""
    match = _OPTIMIZER.match(fqn)
    prefix, key = (match["prefix"], match["key"]) if match else ("", fqn)
    key = _WRAPPER.sub("", key)
    half = ""
    layer = _LAYER.match(key)
    if layer is None:
        return StoredKey(prefix, key, False, False, half)
    rest, stacked = layer["rest"], layer["layer"] is None
    expert = _EXPERT.match(rest)
    experts = False
    if expert:
        experts = expert["expert"] is None
        half = expert["half"] or ""
        rest = f"{expert['head']}{expert['tail']}{'{e}' if experts else expert['expert']}"
    elif rest.endswith(("linear_fc1.weight_w", "linear_fc1.weight_v", "linear_fc1.bias_w", "linear_fc1.bias_v")):
        rest, half = rest[:-2], rest[-2:]
    rest = rest.replace("mtp_model_layer.", "transformer_layer.") if layer["stack"] == "mtp.layers." else rest
    return StoredKey(prefix, f"{layer['stack']}{'{l}' if stacked else layer['layer']}.{rest}", stacked, experts, half)


def canonical_tensors(tensors: Mapping[str, TensorMetadata], where: str) -> dict[str, TensorMetadata]:
    """Stored tensors (already located) as canonical per-layer, per-expert tensors; bytes are not touched.

    CkptError E305 when a chunk has fewer axes than its key promises or two keys make the same tensor.
    """
    chunks: dict[str, list[Chunk]] = {}
    info: dict[str, tuple[str, Shape]] = {}
    for fqn, tensor in tensors.items():
        key = parse_key(fqn)
        lead = key.layers + key.experts
        if len(tensor.global_shape) < lead:
            raise CkptError(
                "E305",
                f"{fqn} should have an axis for layers or experts",
                where=f"{where}: {fqn}",
                found=f"shape {list(tensor.global_shape)}",
            )
        shape = tensor.global_shape[lead:]
        if key.half:
            shape = (shape[0] * 2, *shape[1:])
        for name, chunk in _split(key, lead, tensor):
            if name not in info:
                info[name] = (tensor.dtype, shape)
                chunks[name] = []
            elif info[name] != (tensor.dtype, shape):
                raise CkptError(
                    "E305",
                    f"two stored keys both make {name} and differ",
                    where=f"{where}: {fqn}",
                    expected=f"{info[name]}",
                    found=f"{(tensor.dtype, shape)}",
                )
            chunks[name].append(chunk)
    result = {name: TensorMetadata(name, info[name][0], info[name][1], tuple(parts)) for name, parts in chunks.items()}
    return unify_norms(result, where)


def _split(key: StoredKey, lead: int, tensor: TensorMetadata) -> Iterator[tuple[str, Chunk]]:
    for chunk in tensor.chunks:
        if key.half == "_v":
            rows = tensor.global_shape[lead]
            offset = chunk.global_offset
            chunk = replace(chunk, global_offset=(*offset[:lead], offset[lead] + rows, *offset[lead + 1 :]))
        rest = tuple(range(lead, len(tensor.global_shape)))
        for layer in range(chunk.global_offset[0], chunk.global_offset[0] + chunk.local_shape[0]) if key.layers else (None,):
            axis = 1 if key.layers else 0
            span = range(chunk.global_offset[axis], chunk.global_offset[axis] + chunk.local_shape[axis]) if key.experts else (None,)
            for expert in span:
                name = key.prefix + key.template.replace("{l}", str(layer)).replace("{e}", str(expert))
                index = tuple(i for i in (layer, expert) if i is not None)
                part = chunk
                if lead:
                    part = chunk.cut((*index, *chunk.global_offset[lead:]), ((1,) * lead) + chunk.local_shape[lead:]).moved(
                        chunk.global_offset[lead:], rest
                    )
                yield name, part


def unify_norms(tensors: dict[str, TensorMetadata], where: str) -> dict[str, TensorMetadata]:
    """Give the norms of each layer their canonical (Transformer Engine) names.

    Local specs say input_layernorm / pre_mlp_layernorm; TE fuses the norm into linear_qkv (not for MLA) and, in dense layers, into
    linear_fc1. torch_dist written from a local spec says linear_fc1.layer_norm_weight even before experts. CkptError E305 when both
    names are there.
    """
    renamed: dict[str, TensorMetadata] = {}
    for name, tensor in tensors.items():
        new = norm_name(name, tensors)
        if new in renamed or (new != name and new in tensors):
            raise CkptError("E305", "a norm is stored under two names", where=f"{where}: {name}", found=f"{name} and {new}")
        renamed[new] = replace(tensor, fqn=new) if new != name else tensor
    return renamed


_NORM = re.compile(
    r"^(?P<layer>.*layers\.\d+\.(?:transformer_layer\.)?)(?P<norm>input_layernorm|pre_mlp_layernorm|mlp\.linear_fc1)\.(?P<kind>layer_norm_)?(?P<what>weight|bias)$"
)


# Latent attention: Transformer Engine fuses the norm of a latent into the projection that follows it (not with GQA's q_layernorm).
_LATENT_NORM = re.compile(r"^(?P<attention>.*self_attention\.)(?P<what>q|kv)_layernorm\.weight$")


def norm_name(name: str, tensors: Mapping[str, TensorMetadata]) -> str:
    latent = _LATENT_NORM.match(name)
    if latent and f"{latent['attention']}linear_{latent['what']}_up_proj.weight" in tensors:
        return f"{latent['attention']}linear_{latent['what']}_up_proj.layer_norm_weight"
    match = _NORM.match(name)
    if match is None:
        return name
    layer, norm, what = match["layer"], match["norm"], match["what"]
    if norm == "input_layernorm" and f"{layer}self_attention.linear_qkv.weight" in tensors:
        return f"{layer}self_attention.linear_qkv.layer_norm_{what}"
    dense = f"{layer}mlp.linear_fc1.weight" in tensors
    if norm == "pre_mlp_layernorm" and dense:
        return f"{layer}mlp.linear_fc1.layer_norm_{what}"
    if norm == "mlp.linear_fc1" and match["kind"] and not dense and f"{layer}mlp.router.weight" in tensors:
        return f"{layer}pre_mlp_layernorm.{what}"
    return name


_CANONICAL_LAYER = re.compile(r"^(?P<stack>decoder\.layers\.)(?P<layer>\d+)\.(?P<rest>.+)$")


def stored_key(name: str, stacked: bool) -> tuple[str, tuple[int, ...]]:
    """Canonical name -> (torch_dist key, index along its leading axes), for stacked or per-layer keys."""
    match = _OPTIMIZER.match(name)
    prefix, key = (match["prefix"], match["key"]) if match else ("", name)
    index: tuple[int, ...] = ()
    layer = _CANONICAL_LAYER.match(key)
    if layer and stacked:
        key, index = layer["stack"] + layer["rest"], (int(layer["layer"]),)
    expert = EXPERT.match(key)
    if expert:
        key, index = f"{expert['head']}experts.{expert['tail']}", (*index, int(expert["expert"]))
    return prefix + key, index


def local_spec_key(key: str, *, latent: bool) -> str:
    """A torch_dist key as models of the local spec say it. Norms before the MLP are called linear_fc1.layer_norm even before experts;
    with latent attention they keep their own names, and so do the norms of the latents.

    Source: gpt_layer_specs.py of megatron-core 0.16.1 and 0.19.2 (sharded_state_dict_keys_map, get_gpt_layer_local_spec).
    """
    if not latent:
        return key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    for what in ("q", "kv"):
        key = key.replace(f".linear_{what}_up_proj.layer_norm_weight", f".{what}_layernorm.weight")
    return key.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")


def of_local_spec(names: Iterable[str]) -> bool:
    """Whether torch_dist keys are those of a model of the local layer spec, as far as keys tell: dense models are spelled alike in both."""
    listed = list(names)
    if any(".kv_layernorm." in n for n in listed):
        return True
    return any(n.endswith("mlp.router.weight") for n in listed) and not any("pre_mlp_layernorm." in n for n in listed)


def homogeneous(names: Iterable[str]) -> bool:
    """True when every decoder layer has the same tensors, so that Megatron stores them stacked by default."""
    layers: dict[str, set[str]] = {}
    for name in names:
        match = _CANONICAL_LAYER.match(name)
        if match:
            layers.setdefault(match["layer"], set()).add(match["rest"])
    return len({frozenset(rest) for rest in layers.values()}) <= 1
