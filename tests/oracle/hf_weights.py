"""Which slice of which Hugging Face tensor each Megatron parameter of a dense model must hold: the judges' own, hand-written mapping.

It shares nothing with ckpt: the two can only agree by both being right. `parameter` covers llama, mistral, qwen2 and qwen3, the
names of the local layer spec and of the Transformer Engine spec (which torch_dist files use for both), one tensor-parallel rank
at a time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True, slots=True)
class HfWeights:
    """All tensors of a Hugging Face folder, and the three numbers of config.json that the mapping needs."""

    tensors: dict[str, Any]
    layers: int
    groups: int  # key-value heads
    tied: bool


def read(folder: Path) -> HfWeights:
    """Every safetensors file of `folder`, read by the safetensors package, with its config.json."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return HfWeights(tensors, config["num_hidden_layers"], config["num_key_value_heads"], config["tie_word_embeddings"])


def parameter(name: str, hf: HfWeights, tp_rank: int = 0, tp_size: int = 1, padded_vocabulary: int = 0) -> Any:
    """The tensor that rank `tp_rank` of `tp_size` must hold under Megatron's `name` (layer number: global).

    Word embeddings and output layer: only the rows of real tokens, so fewer rows than Megatron's parameter where the rank holds
    padding. A last pipeline stage keeps its copy of tied embeddings as `output_layer.weight`, which is answered with the embeddings.
    KeyError: no such name.
    """
    import torch

    def part(tensor: Any, axis: int) -> Any:
        return tensor.chunk(tp_size, axis)[tp_rank]

    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        embeddings = hf.tied or name.startswith("embedding")
        tensor = hf.tensors["model.embed_tokens.weight" if embeddings else "lm_head.weight"]
        rows = (padded_vocabulary or tensor.shape[0]) // tp_size
        return tensor[rows * tp_rank : rows * (tp_rank + 1)]
    if name == "decoder.final_layernorm.weight":
        return hf.tensors["model.norm.weight"]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(name)
    layer, rest = f"model.layers.{match[1]}.", match[2]
    if rest in _NORMS:
        return hf.tensors[layer + _NORMS[rest]]
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        # a query group is [its query heads, its key head, its value head]; ranks own whole groups
        kind = rest.rpartition(".")[2]
        query, key, value = (hf.tensors[f"{layer}self_attn.{letter}_proj.{kind}"].chunk(hf.groups) for letter in "qkv")
        rows = [torch.cat(group) for group in zip(query, key, value, strict=True)]
        return torch.cat(rows[len(rows) // tp_size * tp_rank : len(rows) // tp_size * (tp_rank + 1)])
    if rest == "self_attention.linear_proj.weight":
        return part(hf.tensors[layer + "self_attn.o_proj.weight"], 1)
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([part(hf.tensors[f"{layer}mlp.{half}_proj.weight"], 0) for half in ("gate", "up")])
    if rest == "mlp.linear_fc2.weight":
        return part(hf.tensors[layer + "mlp.down_proj.weight"], 1)
    raise KeyError(name)


def difference(name: str, actual: Any, hf: HfWeights, tp_rank: int = 0, tp_size: int = 1, padded_vocabulary: int = 0) -> str | None:
    """None when `actual` is bit-equal to what `name` must hold (padding rows of the vocabulary aside), else a sentence saying how not."""
    import torch

    expected = parameter(name, hf, tp_rank, tp_size, padded_vocabulary)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight") and padded_vocabulary:
        if actual.shape[0] != padded_vocabulary // tp_size:
            return f"{name}: {actual.shape[0]} rows on rank {tp_rank} of {tp_size}, padded vocabulary {padded_vocabulary}"
        if not torch.isfinite(actual).all():
            return f"{name}: padding rows are not finite"
        actual = actual[: expected.shape[0]]
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{name}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if not torch.equal(actual, expected):
        return f"{name}: {int((actual != expected).sum())} of {expected.numel()} elements differ"
    return None


def cast(hf: HfWeights, dtype: Any) -> HfWeights:
    """The same weights with every tensor in `dtype`."""
    return replace(hf, tensors={name: tensor.to(dtype) for name, tensor in hf.tensors.items()})


def absent(hf: HfWeights, names: set[str]) -> list[str]:
    """Megatron parameters that `hf` has and `names` (in either spelling of the norms) lacks, sorted."""
    wanted = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} | (set() if hf.tied else {"output_layer.weight"})
    for layer in range(hf.layers):
        start, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for rest in (
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        ):
            wanted.add(start + rest)
        if theirs + "self_attn.q_proj.bias" in hf.tensors:
            wanted.add(start + "self_attention.linear_qkv.bias")
        for norm in set(_NORMS.values()):
            spellings = {start + rest for rest, name in _NORMS.items() if name == norm}
            if theirs + norm in hf.tensors and not spellings & names:
                wanted |= spellings
    return sorted(wanted - names)
