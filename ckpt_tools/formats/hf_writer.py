"""Laying out an HF folder: shards, headers, index, config and side files, byte for byte as transformers would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import dtype
from ..planning import Copied, Placement, TargetFile
from ..tensors import TensorMetadata
from .hf import INDEX_NAME, index_bytes, shard_names, split_shards
from .safetensors import layout_file

DEFAULT_SHARD = 5 * 10**9  # bytes, as huggingface_hub


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Files to make, where each box of each tensor goes, files copied whole."""

    files: tuple[TargetFile, ...]
    placements: tuple[Placement, ...]
    copies: tuple[Copied, ...]


def layout_hf(
    tensors: Mapping[str, TensorMetadata],
    dtypes: Mapping[str, str],
    *,
    config: bytes | None,
    shard_size: int | None,
    weight_map: Mapping[str, str] | None,
    metadata: Mapping[str, str] | None,
    copies: tuple[Copied, ...] = (),
) -> TargetLayout:
    """Lay out tensors (in transformers' order) as an HF folder.

    dtypes      dtype to store each tensor in.      config  bytes of config.json, or None for none.
    shard_size  bytes per shard; None = follow weight_map when it names exactly these tensors, else 5 GB.
    weight_map  shard layout of the folder the model came from.     metadata  `__metadata__` of each file.
    """
    sizes = {name: t.numel * dtype(dtypes[name]).bits // 8 for name, t in tensors.items()}
    if shard_size is None and weight_map is not None and weight_map.keys() == tensors.keys():
        file_of = dict(weight_map)
    else:
        shards = split_shards(sizes.items(), shard_size or DEFAULT_SHARD) or [[]]
        file_of = {name: file for file, names in zip(shard_names(len(shards)), shards, strict=True) for name in names}
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(file_of[name], []).append(name)
    if not groups:
        groups[shard_names(1)[0]] = []
    files, placements = [], []
    for number, file in enumerate(sorted(groups)):
        laid = layout_file([(n, dtypes[n], tensors[n].shape) for n in groups[file]], metadata)
        files.append(TargetFile(file, laid.size, ((0, laid.header),)))
        for name in groups[file]:
            shape = tensors[name].global_shape
            placements.append(Placement(name, (0,) * len(shape), shape, number, laid.places[name][0], dtypes[name]))
    if len(groups) > 1 or (weight_map is not None and shard_size is None and weight_map.keys() == tensors.keys()):
        stored = {n: TensorMetadata(n, dtypes[n], t.shape, ()) for n, t in tensors.items()}
        index = index_bytes(stored, file_of)
        files.append(TargetFile(INDEX_NAME, len(index), ((0, index),)))
    if config is not None:
        files.append(TargetFile("config.json", len(config), ((0, config),)))
    return TargetLayout(tuple(files), tuple(placements), copies)


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """config.json as transformers writes it: two spaces, sorted keys, final newline."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
