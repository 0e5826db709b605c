"""Qwen3: norms on the heads of q and k, head_dim declared on its own."""

from __future__ import annotations

from .config_rules import QWEN3_RULES
from .dense import K_NORM, OPTIONAL_PROJ_BIAS, OPTIONAL_QKV_BIAS, PROJ, Q_NORM, QKV, dense
from .family import Family

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    rules=QWEN3_RULES,
    tensors=dense(QKV, OPTIONAL_QKV_BIAS, PROJ, OPTIONAL_PROJ_BIAS, Q_NORM, K_NORM),
    float8=True,
    verified="logits",
    sources=("transformers 5.24: models/qwen3", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)
