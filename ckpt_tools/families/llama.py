"""Llama 1, 2, 3, 3.1, 3.2 and models of the same shape."""

from __future__ import annotations

from .config_rules import LLAMA_RULES
from .dense import FC1, FC2, OPTIONAL_FC1_BIAS, OPTIONAL_FC2_BIAS, OPTIONAL_PROJ_BIAS, OPTIONAL_QKV_BIAS, PROJ, QKV, dense
from .family import Family

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    rules=LLAMA_RULES,
    tensors=dense(QKV, OPTIONAL_QKV_BIAS, PROJ, OPTIONAL_PROJ_BIAS, mlp=(FC1, OPTIONAL_FC1_BIAS, FC2, OPTIONAL_FC2_BIAS)),
    verified="logits",
    sources=("transformers 5.24: models/llama", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)
