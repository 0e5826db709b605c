"""Multi-token prediction: further layers after the last, each a projection, three norms and a decoder layer of the family's own kind.

On the hub they are model.layers.{number of layers + m}; Megatron keeps them in mtp.layers.{m}. Source: Megatron-LM
multi_token_prediction.py (0.13 to 0.19): a prediction layer has the specification of the last decoder layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config_kinds import Computed
from .dense import HF_LAYER, LAYER
from .mappings import Copy, Mapping

HF_MTP, MTP = "model.layers.{n}.", "mtp.layers.{m}."
MTP_RULE = Computed("mtp", ("num_nextn_predict_layers", "num_mtp_layers"), ("mtp_num_layers",))
# The hub repeats the embedding and the head in each prediction layer; Megatron shares the model's own.
MTP_COPIES = (
    (HF_MTP + "embed_tokens.weight", "model.embed_tokens.weight"),
    (HF_MTP + "shared_head.head.weight", "lm_head.weight"),
)


def prediction_layers(*layer: Mapping) -> tuple[Mapping, ...]:
    """The tensors of a prediction layer whose decoder layer consists of `layer`, mappings of the family's decoder."""
    own: tuple[Mapping, ...] = (
        Copy((HF_MTP + "enorm.weight",), MTP + "enorm.weight", ("H",), when="mtp"),
        Copy((HF_MTP + "hnorm.weight",), MTP + "hnorm.weight", ("H",), when="mtp"),
        Copy((HF_MTP + "eh_proj.weight",), MTP + "eh_proj.weight", ("H", "2*H"), when="mtp"),
        Copy((HF_MTP + "shared_head.norm.weight",), MTP + "final_layernorm.weight", ("H",), when="mtp"),
    )
    return own + tuple(_moved(mapping) for mapping in layer)


def _moved(mapping: Mapping) -> Mapping:
    changed: Any = mapping  # every mapping is a dataclass with these fields
    moved: Mapping = replace(
        changed,
        hf=tuple(name.replace(HF_LAYER, HF_MTP) for name in mapping.hf),
        mcore=mapping.mcore.replace(LAYER, MTP + "transformer_layer."),
    )
    return moved
