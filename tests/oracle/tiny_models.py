"""Tiny random Hugging Face models of every dense family, written to disk by transformers itself.

Sizes are chosen so that mistakes show: vocabulary 509 is not a multiple of anything, the feed-forward width is not a power of two,
grouped queries, norm weights away from 1, biases away from 0, a rotary base and an epsilon per model, head_dim unlike hidden / heads
for qwen3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 509
NAMES = ("llama", "llama_tied_scaled_rope", "mistral", "qwen2", "qwen2_5", "qwen3")

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def build(name: str, dtype: str = "float32", **changes: Any) -> Any:
    """The model `name` of NAMES with random weights, in eval mode; `changes` overrides fields of its config. Deterministic."""
    import torch
    import transformers

    untied, tied = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {**untied, "rms_norm_eps": 1e-5, "rope_parameters": _plain_rope(10000.0)},
        ),
        "llama_tied_scaled_rope": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {**tied, "rms_norm_eps": 2e-4, "rope_parameters": _LLAMA3_ROPE, "max_position_embeddings": 65536},
        ),
        "mistral": (
            transformers.MistralConfig,
            transformers.MistralForCausalLM,
            {**untied, "rms_norm_eps": 3e-5, "rope_parameters": _plain_rope(1000000.0), "sliding_window": None},
        ),
        "qwen2": (
            transformers.Qwen2Config,
            transformers.Qwen2ForCausalLM,
            {**tied, "rms_norm_eps": 1e-6, "rope_parameters": _plain_rope(20000.0)},
        ),
        "qwen2_5": (
            transformers.Qwen2Config,
            transformers.Qwen2ForCausalLM,
            {**untied, "rms_norm_eps": 1e-4, "rope_parameters": _plain_rope(1000000.0), "num_key_value_heads": 4},
        ),
        "qwen3": (
            transformers.Qwen3Config,
            transformers.Qwen3ForCausalLM,
            {**untied, "rms_norm_eps": 1e-6, "rope_parameters": _plain_rope(1000000.0), "head_dim": 16},
        ),
    }
    config_class, model_class, fields = kinds[name]
    torch.manual_seed(NAMES.index(name) + 7)
    model = model_class(config_class(**{**_SIZES, **fields, **changes}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.to(getattr(torch, dtype)).eval()


def write(name: str, folder: Path, dtype: str = "float32", *, max_shard_size: str = "5GB", **changes: Any) -> Any:
    """Save `build(name, dtype)` into `folder` with save_pretrained, sharded where larger than `max_shard_size`; returns the model."""
    model = build(name, dtype, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
