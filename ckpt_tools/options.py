"""What a person can ask of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the target should be like. None means: as the source, or the format's default.

    to "hf" | "torch_dist" | "torch" | "split" | "peft" (of an adapter); family overrides detection; hf_config folder or file with the
    config to follow; dtype of floating tensors; quantize None | "fp8-block" the linear
    layers of an HF target; layer_keys "auto" | "stacked" | "per-layer"; layout ranks to cut for; iteration number to
    write (None = that of a Megatron source, else `release`); max_shard_size bytes; divisible_by, padded_vocab, vocab sizes of the
    vocabulary; weights_from "auto" | "safetensors" | "megatron" when both are there; spec "te" | "local" names of the legacy format;
    experts "te_grouped" | "sequential" | "grouped" how it stores experts; replicas "refuse" | "first" when copies on ranks differ; rng
    keep random states; optimizer "keep" | "none" | a form; repair optimizer state that was saved shifted; check_crc check the source's
    checksums; adapter take a PEFT adapter beside the weights along; lora_alpha of a Megatron adapter; max_layers leave later decoder layers
    out; buffer bytes per thread.
    """

    to: str
    family: str | None = None
    hf_config: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    layer_keys: str = "auto"
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    iteration: int | None = None
    max_shard_size: int | None = None
    divisible_by: int | None = None
    padded_vocab: int | None = None
    vocab: int | None = None
    weights_from: str = "auto"
    spec: str | None = None
    experts: str | None = None
    moe_layout: str | None = None
    replicas: str = "refuse"
    optimizer: str = "keep"
    rng: bool = True
    repair: bool = False
    check_crc: bool = False
    strip_remote_code: bool = False
    allow_unrepresentable: bool = False
    adapter: bool = False
    lora_alpha: float | None = None
    max_layers: int | None = None
    buffer: int = 256 * 1024
