"""Legacy checkpoints of any layout, cut with numpy and written by torch.save: Megatron's rules written once more, independently of ckpt."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from builders import CONFIG, fill, megatron_tensors

MOE = {
    **{k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def moe_hf() -> dict[str, np.ndarray]:
    """Fixture M (hidden 8, 3 layers, 4 experts of width 6) under HF names, every element unlike the others."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 8)}
    for layer in range(3):
        p = f"model.layers.{layer}."
        shapes |= {p + f"self_attn.{n}_proj.weight": s for n, s in (("q", (16, 8)), ("k", (8, 8)), ("v", (8, 8)), ("o", (8, 16)))}
        shapes |= {p + f"self_attn.{n}_norm.weight": (4,) for n in "qk"}
        shapes[p + "mlp.gate.weight"] = (4, 8)
        for e in range(4):
            shapes |= {p + f"mlp.experts.{e}.{n}_proj.weight": s for n, s in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6)))}
        shapes |= {p + "input_layernorm.weight": (8,), p + "post_attention_layernorm.weight": (8,)}
    return fill({**shapes, "model.norm.weight": (8,), "lm_head.weight": (100, 8)})


def moe_megatron(hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fixture M as canonical Megatron tensors."""
    dense = dict(hf)
    for layer in range(3):
        for n in ("gate", "up", "down"):
            dense[f"model.layers.{layer}.mlp.{n}_proj.weight"] = hf[f"model.layers.{layer}.mlp.experts.0.{n}_proj.weight"]
    full = megatron_tensors(dense, MOE, 104)
    for layer in range(3):
        p, m = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}."
        for name in ("linear_fc1.weight", "linear_fc2.weight"):
            del full[f"{m}mlp.{name}"]
        full[m + "pre_mlp_layernorm.weight"] = full.pop(m + "mlp.linear_fc1.layer_norm_weight")
        full[m + "mlp.router.weight"] = hf[p + "gate.weight"]
        for e in range(4):
            full[f"{m}mlp.experts.linear_fc1.weight{e}"] = np.concatenate([hf[f"{p}experts.{e}.{n}_proj.weight"] for n in ("gate", "up")])
            full[f"{m}mlp.experts.linear_fc2.weight{e}"] = hf[f"{p}experts.{e}.down_proj.weight"]
    return full


def part(name: str, tensor: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """A tensor-parallel rank's part of a canonical tensor."""
    if re.search(r"linear_fc1\.weight\d*$", name):
        return np.concatenate([np.split(half, tp)[rank] for half in np.split(tensor, 2)])
    if re.search(r"linear_proj\.weight$|linear_fc2\.weight\d*$", name):
        return np.split(tensor, tp, 1)[rank]
    if re.search(r"linear_qkv\.(weight|bias)$|word_embeddings|output_layer", name):
        return np.split(tensor, tp)[rank]
    return tensor


def rank_model(
    full: dict[str, np.ndarray],
    layers: list[int],
    *,
    first: bool = True,
    last: bool = True,
    tp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
    etp: int | None = None,
    spec: str = "te",
    experts: str = "te_grouped",
) -> dict[str, np.ndarray]:
    """What one rank's model chunk holds: tp = (size, rank), ep = (size, rank), layers = global numbers of its layers."""
    total = 1 + max((int(m[1]) for n in full if (m := re.search(r"experts\.linear_fc1\.weight(\d+)$", n))), default=-1)
    local_experts = total // ep[0]
    expert_tp = etp or tp[0]
    model: dict[str, np.ndarray] = {}
    grouped: dict[str, list[np.ndarray]] = {}
    for name, tensor in full.items():
        match = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match:
            if int(match[1]) not in layers:
                continue
            prefix, rest = f"decoder.layers.{layers.index(int(match[1]))}.", match[2]
        else:
            if not (first if name.startswith("embedding.") else last):
                continue
            prefix, rest = "", name
        expert = re.fullmatch(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", rest)
        if expert is None:
            if spec == "local":
                rest = rest.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
                rest = rest.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
            model[prefix + rest] = part(name, tensor, *tp)
            continue
        number = int(expert[2]) - ep[1] * local_experts
        if not 0 <= number < local_experts:
            continue
        own = part(name, tensor, expert_tp, tp[1] % expert_tp)
        if experts == "te_grouped":
            model[f"{prefix}mlp.experts.{expert[1]}.weight{number}"] = own
        elif experts == "sequential":
            model[f"{prefix}mlp.experts.local_experts.{number}.{expert[1]}.weight"] = own
        else:
            grouped.setdefault(f"{prefix}mlp.experts.weight{expert[1][-1]}", []).append(own.T)
    for name, turned in grouped.items():
        memory = np.stack(turned)  # (experts, in, out), which is how GroupedMLP uses its memory
        model[name] = memory.reshape(memory.shape[1], -1) if name.endswith("1") else memory.reshape(-1, memory.shape[2])
    return model


def save(run: Path, folder: str, models: dict[str, dict[str, np.ndarray]], args: Any, **state: Any) -> None:
    """One rank's file of iteration 5, by torch.save; models: "model" or "model0", ... -> tensors. args None: no args in the file."""
    import torch

    path = run / "iter_0000005" / folder
    path.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 5, **({} if args is None else {"args": args}), **state}
    for key, model in models.items():
        content[key] = OrderedDict((n, torch.from_numpy(np.ascontiguousarray(t))) for n, t in model.items())
    torch.save(content, path / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5")


def load(run: Path, folder: str) -> dict[str, Any]:
    """A rank's file as torch.load reads it with weights only; models as numpy arrays."""
    import torch

    iteration = next(p for p in run.iterdir() if p.is_dir())
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(iteration / folder / "model_optim_rng.pt", weights_only=True)
    return {k: {n: t.numpy() for n, t in v.items()} if re.fullmatch(r"model\d*", k) else v for k, v in state.items()}


def moe_args(**changes: Any) -> argparse.Namespace:
    """The arguments Megatron-LM would store for fixture M."""
    from builders import megatron_args

    sizes = {"num_experts": 4, "moe_ffn_hidden_size": 6, "moe_router_topk": 2, "qk_layernorm": True, "moe_router_pre_softmax": False}
    return megatron_args(MOE, **{**sizes, "padded_vocab_size": 104, **changes})
