"""Laying out Megatron's legacy `torch` format: one model_optim_rng.pt per rank, as Megatron itself would have written it.

Sources: Megatron-LM checkpointing.py (get_checkpoint_name, save_checkpoint), gpt_layer_specs.py (names of the local and TE specs).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ..dtypes import dtype
from ..errors import CkptError
from ..layout import ParallelLayout, cut_of, expert_of, is_expert, layer_of, rank_boxes
from ..planning import Copied, Placement, TargetFile
from ..tensors import Shape, TensorMetadata
from . import torch_zip_writer
from .hf_writer import TargetLayout
from .pickles import TensorSpec
from .torch_legacy import FILE_NAME, folder_name

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def layout_legacy(
    tensors: Mapping[str, TensorMetadata],
    dtypes: Mapping[str, str],
    *,
    common: Mapping[str, Any],
    iteration: int | None,
    layers: int,
    layout: ParallelLayout,
    gated: bool,
    tied: bool,
    spec: str,
    copies: tuple[Copied, ...] = (),
) -> TargetLayout:
    """Lay out canonical Megatron tensors as the rank files of one iteration.

    common     what every rank file holds besides the model (args, checkpoint_version, iteration, ...).
    iteration  number of the iteration, None = `release`.       layout  the ranks, one file each.
    gated      linear_fc1 is [gate; up].        tied  the last stage keeps a copy of the embedding as output_layer.weight.
    spec       "te" or "local": how norms and experts are called.
    Errors: E402/E403 sizes that cannot be cut.
    """
    folder = "release" if iteration is None else f"iter_{iteration:07d}"
    stages = layout.stages(layers)
    experts = 1 + max((e for e in map(expert_of, tensors) if e is not None), default=-1)
    if experts and experts % layout.ep:
        raise CkptError("E403", f"{experts} experts cannot be spread over ep {layout.ep}")
    files: list[TargetFile] = []
    placements: list[Placement] = []
    for pp in range(layout.pp):
        for rank, (tp, ep, etp) in _stage_ranks(layout).items():
            del rank
            chunks = {
                v: _local(tensors, layout, (tp, pp, ep, etp), v, stages, experts, gated, tied, spec) for v in range(_virtual(stages, pp))
            }
            keys = ["model"] if len(chunks) == 1 else [f"model{v}" for v in chunks]
            state: dict[str, Any] = dict(common)
            for key, chunk in zip(keys, chunks.values(), strict=True):
                state[key] = OrderedDict(
                    (name, TensorSpec(dtypes[source], _shape(boxes), None, (source, boxes))) for name, (source, boxes) in chunk.items()
                )
            laid = torch_zip_writer.layout(state, "model_optim_rng")
            path = f"{folder}/{folder_name(tp, pp, ep, layout.pp > 1, layout.ep > 1)}/{FILE_NAME}"
            for start, _, hole in laid.holes:
                if not isinstance(hole, TensorSpec) or not isinstance(hole.tag, tuple):
                    raise CkptError("E490", "a rank file has a tensor that nobody fills", where=path)
                source, boxes = hole.tag
                position = start
                for offset, shape in boxes:
                    placements.append(Placement(source, offset, shape, len(files), position, dtypes[source]))
                    size = dtype(dtypes[source]).itemsize
                    for n in shape:
                        size *= n
                    position += size
            files.append(TargetFile(path, laid.size, laid.literals))
    tracker = b"release" if iteration is None else str(iteration).encode()
    files.append(TargetFile("latest_checkpointed_iteration.txt", len(tracker), ((0, tracker),)))
    return TargetLayout(tuple(files), tuple(placements), copies)


def _stage_ranks(layout: ParallelLayout) -> dict[int, tuple[int, int, int]]:
    """Rank within a stage -> (tp, ep, etp) of every rank that writes a file of its own."""
    seen: dict[tuple[int, int], int] = {}
    result = {}
    for rank in range(layout.stage_ranks):
        tp, ep, etp = rank % layout.tp, rank // layout.expert_tp % layout.ep, rank % layout.expert_tp
        if seen.setdefault((tp, ep), rank) == rank:
            result[rank] = (tp, ep, etp)
    return result


def _virtual(stages: Mapping[tuple[int, int], list[int]], pp: int) -> int:
    return 1 + max(v for p, v in stages if p == pp)


Boxes = tuple[tuple[Shape, Shape], ...]


def _local(
    tensors: Mapping[str, TensorMetadata],
    layout: ParallelLayout,
    rank: tuple[int, int, int, int],
    virtual: int,
    stages: Mapping[tuple[int, int], list[int]],
    experts: int,
    gated: bool,
    tied: bool,
    spec: str,
) -> dict[str, tuple[str, Boxes]]:
    """Local name -> (canonical tensor, its boxes) of one model chunk of one rank."""
    tp, pp, ep, etp = rank
    held = {layer: local for local, layer in enumerate(stages[pp, virtual])}
    first = (pp, virtual) == (0, 0)
    last = pp == layout.pp - 1 and virtual == max(v for p, v in stages if p == pp)
    per_rank = experts // layout.ep if experts else 0
    result: dict[str, tuple[str, Boxes]] = {}
    for name, tensor in tensors.items():
        layer = layer_of(name) if name.startswith("decoder.layers.") else None
        if layer is not None:
            if layer not in held:
                continue
        elif not (first if name.startswith("embedding.") else last):
            continue
        expert = expert_of(name)
        if expert is not None and expert // per_rank != ep:
            continue
        size, position = (layout.expert_tp, etp) if is_expert(name) else (layout.tp, tp)
        whole = cut_of(name, gated) is None
        boxes = tuple((o, s) for r, o, s in rank_boxes(name, tensor.global_shape, size, gated) if whole or r == position)
        local = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{held[layer]}.", 1)
        if expert is not None:
            local = _expert_name(local, expert - ep * per_rank, spec)
        result[_norm_name(local, name, tensors, spec)] = (name, boxes)
    if tied and last and not first and EMBEDDING in tensors:
        boxes = tuple((o, s) for r, o, s in rank_boxes(EMBEDDING, tensors[EMBEDDING].global_shape, layout.tp, gated) if r == tp)
        result[HEAD] = (EMBEDDING, boxes)
    return result


def _expert_name(local: str, number: int, spec: str) -> str:
    head, tail = local.split("mlp.experts.", 1)
    tail = re.sub(r"\d+$", "", tail)
    return f"{head}mlp.experts.{tail}{number}" if spec == "te" else f"{head}mlp.experts.local_experts.{number}.{tail}"


def _norm_name(local: str, name: str, tensors: Mapping[str, TensorMetadata], spec: str) -> str:
    if spec == "te":
        return local
    local = local.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    if ".mlp.linear_fc1.layer_norm_" in local:
        local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return local


def _shape(boxes: Boxes) -> Shape:
    """Shape of a rank's tensor: gate and up stand one after the other."""
    shape = boxes[0][1]
    return (sum(b[1][0] for b in boxes), *shape[1:]) if len(boxes) > 1 else shape
