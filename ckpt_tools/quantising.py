"""Writing float8 with one scale per block, as DeepSeek's files have it: which weights, and what config.json says of the rest.

Quantised are the linear layers of the decoder and of its prediction layers, attention, MLP and experts; embeddings, head, norms, routers
and the gates of shared experts stay. Sources: transformers 5.24 integrations/finegrained_fp8.py (every nn.Linear but the head);
DeepSeek-V3's own files, whose eh_proj is not quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import CkptError
from .families import FAMILIES
from .families.family import expand
from .kernels.shapes import scale_shape
from .model_names import HEAD
from .notes import Note
from .options import ConvertOptions
from .quantised import SUFFIX
from .tensors import TensorMetadata
from .views import View

FORMS = ("fp8-block",)
BLOCK = (128, 128)
FLOAT8 = "float8_e4m3fn"
_LINEAR = re.compile(r".*\.linear_(qkv|proj|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj|fc1|fc2)\.weight\d*")


@dataclass(frozen=True, slots=True)
class Float8:
    """The weights that become float8, each with the name of its scales, and the modules whose matrices do not."""

    weights: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def makes(self, name: str) -> bool:
        """Whether it is a weight that becomes float8, or the scales of one."""
        return name in self.weights or name.removesuffix(SUFFIX) in self.weights

    def config(self) -> dict[str, Any]:
        """quantization_config of config.json."""
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": list(self.left_out),
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
        }

    def laid_out(self, tensors: Mapping[str, TensorMetadata]) -> dict[str, TensorMetadata]:
        """The tensors with that of the scales after each weight; no bytes are known of these."""
        result: dict[str, TensorMetadata] = {}
        for name, tensor in tensors.items():
            result[name] = tensor
            if name in self.weights:
                scales = self.weights[name]
                result[scales] = TensorMetadata(scales, "float32", scale_shape(tensor.global_shape, BLOCK), ())
        return result

    def dtypes(self, others: Mapping[str, str]) -> dict[str, str]:
        """What each tensor is stored as; others: what it would be unquantised."""
        return {n: FLOAT8 if n in self.weights else d for n, d in others.items()} | dict.fromkeys(self.weights.values(), "float32")

    def notes(self, tensors: Mapping[str, TensorMetadata]) -> list[Note]:
        """Every weight that is quantised, by the dtype it is quantised from."""
        groups: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            if name in self.weights:
                groups.setdefault(tensor.dtype, []).append(name)
        how = f"each element divided by the float32 scale of its block of {BLOCK[0]} x {BLOCK[1]} (the largest magnitude / 448)"
        return [Note("cast", ", ".join(names), f"{len(names)} tensors {kind} -> {FLOAT8}, {how}") for kind, names in groups.items()]


NOTHING = Float8()


def float8_of(view: View, options: ConvertOptions) -> Float8:
    """What --quantize makes of an HF view. CkptError E410 for a family of which ckpt makes no such files."""
    if options.quantize is None:
        return NOTHING
    family = view.family
    if family is None or not family.float8:
        raise CkptError(
            "E410",
            f"ckpt does not write block-quantised float8 of the family {family.name if family else 'of this model'}",
            expected=", ".join(f.name for f in FAMILIES.values() if f.float8),
            hint="leave out --quantize",
        )
    linear = [n for b in expand(family, view.dims) if _LINEAR.fullmatch(b.mcore) for n in b.hf]
    weights = {n: n + SUFFIX for n in linear if n in view.tensors}
    heads = [m.hf[0] for m in family.tensors if m.mcore == HEAD]  # listed in a tied model too: its module is there
    matrices = [n for n, t in view.tensors.items() if len(t.global_shape) == 2 and n not in weights]
    return Float8(weights, tuple(dict.fromkeys(n.removesuffix(".weight") for n in [*matrices, *heads])))


def check_quantize(options: ConvertOptions) -> None:
    """CkptError E410 for what --quantize does not go with."""
    if options.quantize is None:
        return
    if options.quantize not in FORMS:
        raise CkptError("E410", f"there is no quantisation {options.quantize!r}", expected=", ".join(FORMS))
    if options.to != "hf":
        raise CkptError("E410", "only an HF folder is written quantised", expected="--to hf", found=f"--to {options.to}")
    if options.moe_layout == "fused":
        raise CkptError("E410", "quantised experts are written one tensor per expert", hint="leave out --moe-layout fused")
    if options.dtype and options.dtype.removeprefix("torch.").startswith("float8"):
        raise CkptError("E410", "--dtype is what is not quantised becomes", expected="bfloat16, float16 or float32", found=options.dtype)

