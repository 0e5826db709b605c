"""Qwen2 and Qwen2.5: biases on q, k and v (never mentioned in config.json), none on the output projection."""

from __future__ import annotations

from .config_rules import QWEN2_RULES
from .dense import PROJ, QKV, QKV_BIAS, dense
from .family import Family

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    rules=QWEN2_RULES,
    tensors=dense(QKV, QKV_BIAS, PROJ),
    verified="logits",
    sources=("transformers 5.24: models/qwen2", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)
