"""A PEFT adapter folder: which modules it changes, by which factors and with which scale.

Names and scales as in PEFT 0.21: tuners/lora/layer.py, utils/other.py (get_pattern_key), utils/save_and_load.py.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ..errors import CkptError
from ..formats.hf import read_json
from ..formats.safetensors import read_header
from ..source_files import opened
from ..tensors import TensorMetadata

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(?:\.default)?(?:\.(?P<what>weight|bias))?")
_SAVED = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.default)?|\.base_layer|\.original_module)?\.(?P<what>weight|bias)")
# Fields of adapter_config.json that change what the factors mean; what they are called by people.
_UNSUPPORTED = {
    "use_dora": "DoRA (weights are rescaled column by column)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "aLoRA (active after certain tokens only, so it cannot be part of the weights)",
    "layer_replication": "layers that are used several times",
    "trainable_token_indices": "single trained tokens",
    "target_parameters": "adapters of bare parameters (fused experts)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# These start by taking the adapter out of the base weights, so the base that belongs to the factors is not the one on disk.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of one module: weight + scale * B A.

    a  [rank, in];  b  [out, rank];  bias [out] is added to the module's bias, or None;  embedding  the product is transposed.
    """

    a: TensorMetadata
    b: TensorMetadata
    rank: int
    scale: float
    embedding: bool = False
    bias: TensorMetadata | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter: config, stored tensors, factors by module, tensors that replace those of the base by the base's name."""

    directory: str
    config: dict[str, Any]
    tensors: dict[str, TensorMetadata]
    pairs: dict[str, Pair]
    saved: dict[str, TensorMetadata]

    @property
    def transposed(self) -> bool:
        """Whether the modules store their weights as [in, out] (fan_in_fan_out)."""
        return bool(self.config.get("fan_in_fan_out"))

    def digest(self) -> str:
        """sha256 over names and bytes of the adapter's tensors, whatever file they lie in."""
        total = hashlib.sha256()
        for name in sorted(self.tensors):
            extent = self.tensors[name].chunks[0].extent
            total.update(name.encode() + b"\0")
            if extent is None:
                continue
            with opened(extent.path) as file:
                file.seek(extent.offset)
                left = self.tensors[name].nbytes
                while left and (part := file.read(min(left, 2**20))):
                    total.update(part)
                    left -= len(part)
        return total.hexdigest()


def read_adapter(directory: str) -> tuple[dict[str, Any], dict[str, TensorMetadata]]:
    """(adapter_config.json, stored tensors) of a PEFT folder. E215 when the weights are a pickle or not there, E306 without a config."""
    config_path, path = os.path.join(directory, CONFIG), os.path.join(directory, WEIGHTS)
    if not os.path.exists(path):
        other = os.path.exists(os.path.join(directory, "adapter_model.bin"))
        raise CkptError(
            "E215",
            f"there is no {WEIGHTS} in this adapter folder",
            where=directory,
            found="adapter_model.bin" if other else "no weights",
            hint="adapter_model.bin is a pickle that ckpt does not read; save the adapter as safetensors with PEFT" if other else None,
        )
    if not os.path.exists(config_path):
        raise CkptError("E306", f"there is no {CONFIG} beside the adapter", where=directory, hint="it holds r and alpha: copy it there")
    return read_json(config_path), read_header(path).tensors


def open_adapter(directory: str) -> Adapter:
    """A LoRA adapter, every tensor of it understood. E543 for another kind of adapter, E544 when factors and config contradict."""
    config, tensors = read_adapter(directory)
    refuse_other_kinds(config, tensors, directory)
    factors: dict[str, dict[str, TensorMetadata]] = {}
    saved: dict[str, TensorMetadata] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(_PREFIX)
        factor, whole = _FACTOR.fullmatch(bare), _SAVED.fullmatch(bare)
        if factor:
            kind = ("embedding_" if factor["embedding"] else "") + factor["which"] + ("_bias" if factor["what"] == "bias" else "")
            factors.setdefault(factor["module"], {})[kind] = tensor
        elif whole:
            saved[f"{whole['module']}.{whole['what']}"] = tensor
        else:
            raise CkptError("E543", f"ckpt does not know what {name} is", where=f"{directory}: {name}")
    pairs = {module: _pair(module, found, config, directory) for module, found in factors.items()}
    return Adapter(directory, config, tensors, pairs, saved)


def module_of(name: str) -> str | None:
    """The module whose factor a stored tensor is; None when it is no factor."""
    factor = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
    return factor["module"] if factor else None


def refuse_other_kinds(config: Mapping[str, Any], names: Iterable[str], directory: str) -> None:
    """CkptError E543 unless the adapter is LoRA whose product is simply added to the weights."""
    kind = config.get("peft_type")
    found = None if kind == "LORA" else f"peft_type {kind}"
    found = found or next((f"{field}: {text}" for field, text in _UNSUPPORTED.items() if config.get(field)), None)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        found = found or f"init_lora_weights {start}: the base it belongs to is not the published one"
    found = found or next((f"{n}: DoRA" for n in names if "lora_magnitude_vector" in n), None)
    if found:
        raise CkptError(
            "E543",
            "this adapter is not plain LoRA",
            where=os.path.join(directory, CONFIG),
            expected="LoRA: weight + alpha / r * B A",
            found=found,
            hint="merge it with PEFT, which builds the model for that",
        )


def _pair(module: str, found: Mapping[str, TensorMetadata], config: Mapping[str, Any], directory: str) -> Pair:
    embedding = any(kind.startswith("embedding_") for kind in found)
    first = "embedding_" if embedding else ""
    a, b = found.get(f"{first}A"), found.get(f"{first}B")
    where = f"{directory}: {module}"
    if a is None or b is None:
        raise CkptError("E544", "one of the two factors is missing", where=where, found=", ".join(t.fqn for t in found.values()))
    if len(a.global_shape) != 2 or len(b.global_shape) != 2:
        raise CkptError("E543", "an adapter of a convolution", where=where, found=f"{list(a.global_shape)} and {list(b.global_shape)}")
    rank, scale = rank_and_scale(module, config, directory)
    if (a.global_shape[0], b.global_shape[1]) != (rank, rank):
        raise CkptError(
            "E544",
            "the config gives another rank than the factors have",
            where=where,
            expected=f"r {rank}",
            found=f"A {list(a.global_shape)}, B {list(b.global_shape)}",
            hint="r, or rank_pattern, in adapter_config.json is not what the adapter was trained with: the scale would be wrong too",
        )
    return Pair(a, b, rank, scale, embedding, found.get("B_bias"))


def rank_and_scale(module: str, config: Mapping[str, Any], directory: str) -> tuple[int, float]:
    """r and alpha / r (rslora: alpha / sqrt(r)) of one module, patterns honoured. E544 when the config has no usable numbers."""
    rank = _by_pattern(module, config.get("rank_pattern"), config.get("r"), directory)
    alpha = _by_pattern(module, config.get("alpha_pattern"), config.get("lora_alpha"), directory)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise CkptError(
            "E544", "r and lora_alpha are not usable", where=os.path.join(directory, CONFIG), found=f"r {rank!r}, lora_alpha {alpha!r}"
        )
    return rank, alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(module: str, patterns: object, default: object, directory: str) -> Any:
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            where = os.path.join(directory, CONFIG)
            raise CkptError("E544", "a pattern of the config is not usable", where=where, found=f"{pattern!r}: {error}") from None
    return default
