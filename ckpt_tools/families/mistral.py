"""Mistral: Llama's tensors with a window of attention that Megatron may or may not be asked to use."""

from __future__ import annotations

from .config_rules import MISTRAL_RULES
from .dense import PROJ, QKV, dense
from .family import Family

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    rules=MISTRAL_RULES,
    tensors=dense(QKV, PROJ),
    verified="logits",
    sources=("transformers 5.24: models/mistral", "Megatron-LM 0.16.1, 0.19.2: models/gpt, transformer"),
)
