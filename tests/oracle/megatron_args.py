"""The `args` Megatron-LM would have for a Hugging Face config of a dense model: the judges' own, hand-written translation.

`from_hf` gives what the model is made of plus the kinds of values that only Megatron's own files hold (an enum of megatron-core, a
torch dtype, a signal), so that a reader of these checkpoints meets them. Field names and values as in Megatron-LM core_v0.16.1.
"""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any


def from_hf(folder: Path, tp: int = 1, pp: int = 1, vpp: int | None = None, **more: Any) -> Namespace:
    """args for the model in `folder` (config.json of transformers 5) as a run at tp x pp x vpp would have saved them."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    config = json.loads((folder / "config.json").read_text())
    dtype = getattr(torch, config["dtype"])
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"]
    divisible = 128
    step = divisible * tp
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "encoder_num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"] == "qwen2",
        "qk_layernorm": config["model_type"] == "qwen3",
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": divisible,
        "padded_vocab_size": -(-config["vocab_size"] // step) * step,
        "max_position_embeddings": config["max_position_embeddings"],
        "seq_length": 128,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "rotary_base": int(rope["rope_theta"]),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rotary_position_embeddings": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": rope["rope_type"] == "llama3",
        "rope_scaling_factor": rope.get("factor", 8.0),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": None,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tp,
        "data_parallel_size": 1,
        "world_size": tp * pp,
        "transformer_impl": "local",
        "tokenizer_type": "NullTokenizer",
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": False,
        "model_type": ModelType.encoder_or_decoder,
        "attention_backend": AttnBackend.unfused,
        "exit_signal": signal.SIGTERM,
    }
    return Namespace(**{**fields, **more})
