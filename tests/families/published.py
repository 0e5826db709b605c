"""The published sizes of models, as sparse HF folders: real headers of the real shapes, no bytes behind them.

Numbers are those of the config.json files on the hub (facts, no text).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

ROPE = {"rope_type": "default"}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SIZES: dict[str, dict[str, Any]] = {
    "llama-3.1-405b": {
        "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "intermediate_size": 53248, "vocab_size": 128256, "rope_theta": 500000.0,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1000000.0,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "vocab_size": 129280,
        "num_nextn_predict_layers": 1, "rope_theta": 10000.0, **MLA,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "kimi-k2": {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "vocab_size": 163840,
        "num_nextn_predict_layers": 0, "rope_theta": 50000.0, **MLA,
        "rope_scaling": {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip


def config_of(size: str) -> dict[str, Any]:
    """config.json of a published model."""
    common = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return {**common, **SIZES[size]}


def model_of(size: str) -> tuple[Any, Any]:
    """Its family and dimensions."""
    from ckpt_tools.families import family_of_config
    from ckpt_tools.families.config import args_from_config
    from ckpt_tools.families.dimensions import dimensions

    family = family_of_config(config_of(size), size)
    return family, dimensions(args_from_config(config_of(size), family.rules)[0])


def prediction_bytes(size: str) -> int:
    """Bytes of the prediction layers in Megatron: bfloat16, the router's bias in float32."""
    from ckpt_tools.families.family import expand

    family, dims = model_of(size)
    total = 0
    for binding in expand(family, dims):
        if binding.mcore.startswith("mtp."):
            total += prod(binding.mapping.mcore_shape(dims)) * (4 if binding.mcore.endswith("expert_bias") else 2)
    return total


def write(size: str, folder: Path, shard_bytes: int = 5 * 10**9) -> int:
    """The model as a sharded HF folder of sparse files; returns its bytes. With a quantization_config its linear layers are float8 with scales."""
    from ckpt_tools.families.family import copies, expand

    config = config_of(size)
    family, dims = model_of(size)
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for binding in expand(family, dims):
        if binding.mapping.optional:
            continue
        shapes.update(zip(binding.hf, binding.mapping.hf_shapes(dims), strict=True))
    shapes |= {copy: shapes[original] for copy, original in copies(family, dims)}
    for name, shape in shapes.items():
        count = prod(shape)
        if "quantization_config" in config and "_proj." in name and len(shape) == 2:
            scales = tuple(-(-n // 128) for n in shape)
            entries += [(name, "F8_E4M3", shape, count), (name + "_scale_inv", "F32", scales, scales[0] * scales[1] * 4)]
        else:
            entries.append((name, "F32", shape, count * 4) if name.endswith("correction_bias") else (name, "BF16", shape, count * 2))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e[3] for e in shards[-1]) + entry[3] > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for name, kind, shape, nbytes in shard:
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            weight_map[name] = file
            at += nbytes
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(raw).to_bytes(8, "little") + raw)
            opened.truncate(8 + len(raw) + at)
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total
