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
)
