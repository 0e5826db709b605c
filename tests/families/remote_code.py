"""Families whose classes lie in their hub repositories: they compute what transformers' llama computes, under other names and joined tensors.

Names as in modeling_internlm2.py, modeling_internlm3.py and modeling_baichuan.py of the hub. Here a llama is renamed into them and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tensors = dict[str, Any]
Config = dict[str, Any]


def _same(tensors: Tensors, config: Config) -> Tensors:
    return tensors


_INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attention_norm",
}  # fmt: skip


def _internlm2(tensors: Tensors, config: Config) -> Tensors:
    """wqkv: for each key head its query heads, itself, its value head."""
    import torch

    groups = config["num_key_value_heads"]
    made = {}
    for name, tensor in tensors.items():
        head, _, last = name.partition(".self_attn.q_proj.")
        if last:
            q, k, v = (tensors[f"{head}.self_attn.{x}_proj.{last}"].chunk(groups) for x in "qkv")
            made[f"{head}.attention.wqkv.{last}"] = torch.cat([part for g in range(groups) for part in (q[g], k[g], v[g])])
        elif ".k_proj." not in name and ".v_proj." not in name:
            for old, new in _INTERNLM2.items():
                name = name.replace(old, new)
            made[name] = tensor
    return made


def _from_internlm2(tensors: Tensors, config: Config) -> Tensors:
    import torch

    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    width = config["hidden_size"] // heads
    made = {}
    for name, tensor in tensors.items():
        if ".attention.wqkv." in name:
            parts = [block.split([heads // groups * width, width, width]) for block in tensor.chunk(groups)]
            for number, x in enumerate("qkv"):
                made[name.replace("attention.wqkv", f"self_attn.{x}_proj")] = torch.cat([p[number] for p in parts])
            continue
        for new, old in _INTERNLM2.items():
            name = name.replace(old, new)
        made[name] = tensor
    return made


def _baichuan(tensors: Tensors, config: Config) -> Tensors:
    """W_pack: all of q, then k, then v."""
    import torch

    made = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            made[name.replace("q_proj", "W_pack")] = torch.cat([tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
        elif ".k_proj." not in name and ".v_proj." not in name:
            made[name] = tensor
    return made


def _from_baichuan(tensors: Tensors, config: Config) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        if ".W_pack." in name:
            made |= {name.replace("W_pack", f"{x}_proj"): part for x, part in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            made[name] = tensor
    return made


# model type -> (llama's tensors renamed, and back)
REMOTE: dict[str, tuple[Callable[[Tensors, Config], Tensors], Callable[[Tensors, Config], Tensors]]] = {
    "internlm2": (_internlm2, _from_internlm2),
    "internlm3": (_same, _same),
    "baichuan": (_baichuan, _from_baichuan),
}


def as_llama(config: Config) -> Config:
    """The config of the llama that computes the same."""
    kept = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    same = {name: config[name] for name in kept if name in config}
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": float(config.get("rope_theta", 10000.0))}
    return {**same, "num_key_value_heads": heads, "rope_parameters": rope, "attention_bias": False, "tie_word_embeddings": False,
            "initializer_range": 0.15}  # fmt: skip
