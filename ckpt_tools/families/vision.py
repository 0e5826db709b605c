"""Qwen's models that see: the language part is converted, the vision tower is carried along under its own names.

On disk Qwen2.5-VL has model.* and visual.*, Qwen3-VL model.language_model.* and model.visual.*; the language part's settings stand in
text_config, or at the top in older files of Qwen2.5-VL.
"""

from __future__ import annotations

from dataclasses import replace

from . import rope
from .config_kinds import Computed, Lacks, Section, extend
from .config_rules import QWEN2_RULES, QWEN3_RULES
from .dense import K_NORM, OPTIONAL_PROJ_BIAS, OPTIONAL_QKV_BIAS, PROJ, Q_NORM, QKV, QKV_BIAS, dense
from .family import Family
from .mappings import Mapping

TEXT = Section("text_config", outer=("tie_word_embeddings", "dtype", "torch_dtype"))
ROPE_ARGS = (*rope.ARGS, "mrope_section")
SOURCES = ("transformers 5.24: models/qwen2_5_vl, qwen3_vl", "Megatron-LM 0.16.1, 0.19.2: models/gpt, rotary_pos_embedding")
TEXT_ALONE = (
    "megatron-core's GPT model holds and computes the language part; the vision tower lies beside it under its own names, for a model"
    " builder that has one"
)


def _under(prefix: str, mappings: tuple[Mapping, ...]) -> tuple[Mapping, ...]:
    """The same mappings with `model.` called otherwise in HF's names."""
    return tuple(replace(m, hf=tuple(n.replace("model.", prefix, 1) if n.startswith("model.") else n for n in m.hf)) for m in mappings)  # type: ignore[type-var]


QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    rules=(TEXT, *extend(QWEN2_RULES, Computed("multimodal_rope", rope.FIELDS, ROPE_ARGS, (1000000.0, 16, 24, 24)))),
    tensors=dense(QKV, QKV_BIAS, PROJ),
    carried=(r"visual\..+",),
    verified="logits",
    note=TEXT_ALONE,
    sources=SOURCES,
)
QWEN3_VL = Family(
    name="qwen3_vl",
    model_types=("qwen3_vl",),
    architectures=("Qwen3VLForConditionalGeneration",),
    rules=(
        TEXT,
        *extend(QWEN3_RULES, Computed("multimodal_rope", rope.FIELDS, ROPE_ARGS, (500000.0, 24, 20, 20))),
        Lacks("Megatron-Core shares out rope's channels in blocks, this family interleaves them: the same for text, another for images"),
    ),
    tensors=_under("model.language_model.", dense(QKV, OPTIONAL_QKV_BIAS, PROJ, OPTIONAL_PROJ_BIAS, Q_NORM, K_NORM)),
    carried=(r"model\.visual\..+",),
    verified="logits",
    note=TEXT_ALONE,
    sources=SOURCES,
)
