"""Reading the legacy `torch` format: one model_optim_rng.pt per tensor-, pipeline- and expert-parallel rank, opened as one checkpoint.

Opening reads the pickles and zip directories only. Sources: Megatron-LM checkpointing.py, transformer_block.py, experts.py (0.5 to 0.19).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CkptError
from ..model_names import GROUPED, SEQUENTIAL, TE_GROUPED
from ..naming import norm_name, unify_norms
from ..tensors import TensorMetadata
from .torch_legacy_parts import Part, Replica, assemble, layer_offsets, rank_parts
from .torch_legacy_ranks import FILE_NAME, Rank, folder_name, model_chunks, rank_folders, ranks_of, sizes_of
from .torch_zip import open_torch_file

__all__ = ["FILE_NAME", "Legacy", "Rank", "Replica", "folder_name", "open_legacy"]


@dataclass(frozen=True, slots=True)
class Legacy:
    """An opened legacy iteration: canonical tensors, common state (of the first rank), ranks, sizes, copies to compare.

    spec     "te" or "local": how norms are called.   experts  "te_grouped", "sequential" or "grouped": how experts are stored.
    """

    directory: str
    tensors: dict[str, TensorMetadata]
    common: dict[str, Any]
    ranks: tuple[Rank, ...]
    tp: int
    pp: int
    vpp: int
    ep: int
    replicas: tuple[Replica, ...]
    spec: str
    experts: str

    @property
    def files(self) -> tuple[str, ...]:
        """All rank files."""
        return tuple(r.file.path for r in self.ranks)


def open_legacy(directory: str) -> Legacy:
    """All ranks of a legacy iteration as one checkpoint under canonical names (global layers and experts, whole tensors).

    Errors: E203/E204/E501 unreadable files, E223 rank files missing, E224 ranks that do not fit together.
    """
    folders = rank_folders(directory)
    if not folders:
        raise CkptError("E223", f"no mp_rank_XX/{FILE_NAME} in this folder", where=directory)
    files = {n: open_torch_file(os.path.join(directory, n, FILE_NAME)) for n in folders}
    sizes = sizes_of(files, directory)
    ranks = ranks_of(files, sizes, directory)
    state = ranks[0].file.value
    common = {k: v for k, v in state.items() if k != "optimizer" and not re.fullmatch(r"model\d*", str(k))}
    if not any(any(True for _ in model_chunks(rank.file)) for rank in ranks):  # ms-swift keeps the weights as safetensors beside it
        return Legacy(directory, {}, common, ranks, sizes.tp, sizes.pp, 1, sizes.ep, (), "te", TE_GROUPED)
    offsets = layer_offsets(ranks, sizes, directory)
    parts: dict[str, list[Part]] = {}
    forms = set()
    for rank in ranks:
        for number, chunk in model_chunks(rank.file):
            for part, form in rank_parts(rank, chunk, offsets[rank.pp, number], sizes):
                parts.setdefault(part.name, []).append(part)
                forms.add(form)
    tensors, replicas = assemble(parts, sizes, directory)
    twice = _norms_stored_twice(tensors)
    replicas += twice
    spec = "local" if any(n.endswith((".input_layernorm.weight", ".pre_mlp_layernorm.weight")) for n in _layers(tensors)) else "te"
    vpp = 1 + max(number for _, number in offsets)
    experts = next((f for f in (GROUPED, SEQUENTIAL) if f in forms), TE_GROUPED if TE_GROUPED in forms or spec == "te" else SEQUENTIAL)
    return Legacy(
        directory, unify_norms(tensors, directory), common, ranks, sizes.tp, sizes.pp, vpp, sizes.ep, tuple(replicas), spec, experts
    )


def _layers(tensors: Mapping[str, TensorMetadata]) -> list[str]:
    """Names that tell the spec: MLA layers have a norm of their own under both, and so has what stands before experts."""
    latent = {n.split(".self_attention.")[0] for n in tensors if ".self_attention.linear_kv_down_proj." in n}
    mixtures = {n.split(".mlp.")[0] for n in tensors if n.endswith(".mlp.router.weight")}
    return [
        n
        for n in tensors
        if not (n.endswith(".input_layernorm.weight") and n.rpartition(".input_layernorm")[0] in latent)
        and not (n.endswith(".pre_mlp_layernorm.weight") and n.rpartition(".pre_mlp_layernorm")[0] in mixtures)
    ]


def _norms_stored_twice(tensors: dict[str, TensorMetadata]) -> list[Replica]:
    """Takes norms that a file holds under both names out of `tensors`; the two must be equal."""
    found = []
    for name in list(tensors):
        other = norm_name(name, tensors)
        if other != name and other in tensors:
            found.append(Replica(other, tensors[other], tensors.pop(name), (other, name)))
    return found
