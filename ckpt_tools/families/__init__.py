"""The families ckpt knows: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CkptError, nearest
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .glm_moe import GLM4_MOE, GLM4_MOE_LITE
from .gpt import GPT2, GPT_NEOX, NEMOTRON, STARCODER2
from .gpt_oss import GPT_OSS
from .joined import GLM, GLM4, PHI3
from .llama import LLAMA
from .llama_like import BAICHUAN, ERNIE4_5, GRANITE, HUNYUAN_V1_DENSE, INTERNLM2, INTERNLM3, SEED_OSS, SMOLLM3
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .more_moe import DOTS1, HUNYUAN_V1_MOE, MINIMAX_M2, OLMOE
from .post_norm import EXAONE4, OLMO2
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .vision import QWEN2_5_VL, QWEN3_VL

_ALL = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    NEMOTRON,
    STARCODER2,
    PHI3,
    GLM,
    GLM4,
    SEED_OSS,
    ERNIE4_5,
    GRANITE,
    SMOLLM3,
    HUNYUAN_V1_DENSE,
    INTERNLM2,
    INTERNLM3,
    BAICHUAN,
    OLMO2,
    EXAONE4,
    OLMOE,
    DOTS1,
    HUNYUAN_V1_MOE,
    MINIMAX_M2,
    GPT_OSS,
    QWEN2_5_VL,
    QWEN3_VL,
)
FAMILIES: dict[str, Family] = {f.name: f for f in _ALL}


def family_named(name: str) -> Family:
    """The family called `name`. CkptError E310."""
    try:
        return FAMILIES[name]
    except KeyError:
        near = nearest(name, FAMILIES)
        raise CkptError(
            "E310", f"there is no family {name!r}", expected=", ".join(FAMILIES), hint=f"did you mean {near[0]}?" if near else None
        ) from None


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """The family that config.json names by model_type, else by architectures. CkptError E310 naming the nearest ones."""
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    for family in FAMILIES.values():
        if not model_type and any(a in family.architectures for a in architectures):
            return family
    near = nearest(str(model_type), [t for f in FAMILIES.values() for t in f.model_types])
    raise CkptError(
        "E310",
        f"model type {model_type!r} is not supported",
        where=where,
        expected=", ".join(FAMILIES),
        hint=f"nearest: {', '.join(near)}; if the tensors are the same, name one with --family"
        if near
        else "name a family of the same tensors with --family",
    )
