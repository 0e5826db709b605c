"""Small checkpoints made with the official libraries (safetensors, torch), never with ckpt itself: the inputs of the case tests."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def fill(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, np.ndarray]:
    """Every element unique: element j of tensor number t is t*4096+j."""
    return {
        n: (np.arange(int(np.prod(s)), dtype=np.float64) + t * 4096).astype(dtype).reshape(s) for t, (n, s) in enumerate(shapes.items())
    }


def dense_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of fixture D (hidden 8, 4 heads, 2 kv heads, head_dim 4, ffn 16, vocab 100, 4 layers)."""
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = config.get("head_dim") or h // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "self_attn.q_proj.weight": (q, h),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.v_proj.weight": (kv, h),
            p + "self_attn.o_proj.weight": (h, q),
        }
        if config["model_type"] == "qwen2":
            shapes |= {p + "self_attn.q_proj.bias": (q,), p + "self_attn.k_proj.bias": (kv,), p + "self_attn.v_proj.bias": (kv,)}
        if config["model_type"] == "qwen3":
            shapes |= {p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,)}
        shapes |= {p + "mlp.gate_proj.weight": (f, h), p + "mlp.up_proj.weight": (f, h), p + "mlp.down_proj.weight": (h, f)}
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
    shapes["model.norm.weight"] = (h,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    return shapes


def write_hf(folder: Path, *, shards: int = 1, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> dict[str, np.ndarray]:
    """Fixture D as an HF folder; `changes` to the config (None removes a key). Returns the tensors."""
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    tensors = fill(dense_shapes(config)) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    write_index(folder, weight_map, total)
    return tensors


def write_index(folder: Path, weight_map: dict[str, str], total: Any) -> None:
    """model.safetensors.index.json as given."""
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )


def read_hf(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of an HF folder, by the safetensors library (bfloat16 as raw uint16)."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return found


def megatron_tensors(hf: dict[str, np.ndarray], config: dict[str, Any], rows: int | None = None, pad: float = 0.0) -> dict[str, np.ndarray]:
    """HF tensors as per-layer Megatron tensors (TE names), by plain numpy: the rules of Megatron written once more, independently."""
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]

    def vocab(table: np.ndarray) -> np.ndarray:
        extra = (rows or len(table)) - len(table)
        return np.concatenate([table, np.full((extra, table.shape[1]), pad, table.dtype)])

    out = {
        "embedding.word_embeddings.weight": vocab(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        out["output_layer.weight"] = vocab(hf["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        p, m = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for suffix in ("weight", "bias"):
            if p + f"self_attn.q_proj.{suffix}" in hf:
                q, k, v = (np.split(hf[p + f"self_attn.{x}_proj.{suffix}"], groups) for x in "qkv")
                out[m + f"self_attention.linear_qkv.{suffix}"] = np.concatenate(
                    [part for g in range(groups) for part in (q[g], k[g], v[g])]
                )
        out[m + "self_attention.linear_proj.weight"] = hf[p + "self_attn.o_proj.weight"]
        out[m + "mlp.linear_fc1.weight"] = np.concatenate([hf[p + "mlp.gate_proj.weight"], hf[p + "mlp.up_proj.weight"]])
        out[m + "mlp.linear_fc2.weight"] = hf[p + "mlp.down_proj.weight"]
        out[m + "self_attention.linear_qkv.layer_norm_weight"] = hf[p + "input_layernorm.weight"]
        out[m + "mlp.linear_fc1.layer_norm_weight"] = hf[p + "post_attention_layernorm.weight"]
        for x in "qk":
            if p + f"self_attn.{x}_norm.weight" in hf:
                out[m + f"self_attention.{x}_layernorm.weight"] = hf[p + f"self_attn.{x}_norm.weight"]
    assert heads % groups == 0
    return out


def stack(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """Per-layer tensors as Megatron's stacked ones."""
    out: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            out[f"decoder.layers.{rest}"] = np.stack([tensors[f"decoder.layers.{i}.{rest}"] for i in range(layers)])
        elif not name.startswith("decoder.layers."):
            out[name] = tensor
    return out


def megatron_args(config: dict[str, Any], **changes: Any) -> argparse.Namespace:
    """The arguments Megatron-LM would store for fixture D."""
    values = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "max_position_embeddings": 64,
        "seq_length": 64,
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 8,
        "rotary_base": 500000,
        "norm_epsilon": 1e-5,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"] == "qwen2",
        "qk_layernorm": config["model_type"] == "qwen3",
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "rotary_interleaved": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_experts": None,
    }
    return argparse.Namespace(**{**values, **changes})


def write_torch_dist(
    run: Path,
    tensors: dict[str, np.ndarray],
    args: Any,
    *,
    iteration: int = 5,
    objects: dict[str, Any] | None = None,
    common: dict[str, Any] | None = None,
) -> Path:
    """A Megatron run folder whose iteration is written by torch's own DCP. Returns the iteration folder."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = run / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    state: dict[str, Any] = {n: torch.from_numpy(np.ascontiguousarray(t)) for n, t in tensors.items()}
    state |= {k: [v] for k, v in (objects or {}).items()}
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": iteration, **(common or {})}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1})
    )
    (run / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def write_legacy(folder: Path, model: dict[str, np.ndarray], args: Any, *, iteration: int = 5, **state: Any) -> None:
    """One rank's model_optim_rng.pt, by torch.save."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "model": OrderedDict((n, torch.from_numpy(np.ascontiguousarray(t))) for n, t in model.items()),
            **state,
        },
        folder / "model_optim_rng.pt",
    )


def read_torch_dist(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of a torch_dist folder, by torch's own DCP reader."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in index.items() if isinstance(m, TensorStorageMetadata)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {n: t.view(torch.int16).numpy().view(np.uint16) if t.dtype == torch.bfloat16 else t.numpy() for n, t in state.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Same names, shapes and bytes."""
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes() for n in a)


def ckpt(*args: Any, env: dict[str, str] | None = None) -> Any:
    """Run the command line in a process of its own: CompletedProcess with text. A traceback on stderr fails the test at once."""
    import os
    import subprocess
    import sys

    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, **(env or {})},
    )
    assert "Traceback" not in done.stderr and done.returncode != 101, done.stderr
    return done
