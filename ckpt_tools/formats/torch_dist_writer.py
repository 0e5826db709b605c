"""Laying out a torch_dist folder that megatron-core 0.8 to 0.19 and plain torch DCP load: records, index, common state, tracker.

Sources: megatron-core 0.16.1 and 0.19.2 dist_checkpointing (serialization.py, strategies/torch.py), torch 2.13 DCP filesystem.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..dtypes import dtype
from ..errors import CkptError
from ..layout import ParallelLayout, expert_count, expert_of, is_expert, layer_of, rank_boxes
from ..naming import local_spec_key, stored_key
from ..planning import Copied, Placement, TargetFile
from ..tensors import Shape, TensorMetadata
from . import dcp_metadata, pickle_writer, torch_zip_writer
from .hf_writer import TargetLayout

ALIGN = 64
FILE_BYTES = 5 * 10**9  # a new .distcp file is begun beyond this size
SPREAD_BYTES = 256 * 10**6  # two files per rank beyond this size, as megatron-core 0.16 writes
METADATA_JSON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


@dataclass(slots=True)
class _File:
    path: str
    position: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)

    def put(self, data: bytes) -> int:
        """Add literal bytes at the next aligned position; returns where."""
        at = -(-self.position // ALIGN) * ALIGN
        self.literals.append((at, data))
        self.position = at + len(data)
        return at


def layout_torch_dist(
    tensors: Mapping[str, TensorMetadata],
    dtypes: Mapping[str, str],
    *,
    common: Mapping[str, Any],
    iteration: int | None,
    stacked: bool,
    layers: int,
    layout: ParallelLayout,
    gated: bool,
    records: Iterable[tuple[str, bytes]] = (),
    file_bytes: int = FILE_BYTES,
    copies: tuple[Copied, ...] = (),
    extra_state: bool = True,
    local_norms: bool = False,
) -> TargetLayout:
    """Lay out canonical Megatron tensors as a run folder with one iteration.

    dtypes     dtype to store each tensor in.        common   the common state (args, checkpoint_version, iteration, ...).
    iteration  number of the iteration, None = `release`.       stacked  one tensor for all layers, or one per layer.
    layout     ranks the pieces are cut for (any layout can load them).      gated  linear_fc1 is [gate; up].
    records    further objects as stored records (full key with /shard_..., bytes).
    extra_state  add the `_extra_state` entries TE models insist on.
    local_norms  call norms as the local spec does.
    """
    folder = "release" if iteration is None else f"iter_{iteration:07d}"
    total = sum(t.numel * dtype(dtypes[n]).itemsize for n, t in tensors.items())
    writers = _Writers(folder, file_bytes, 2 if total > SPREAD_BYTES else 1)
    pieces: dict[str, list[tuple[Shape, Shape, str, int, int]]] = {}
    shapes: dict[str, tuple[str, Shape]] = {}
    placements: list[Placement] = []
    experts = expert_count(tensors)
    latent = any("self_attention.linear_kv_down_proj." in name for name in tensors)
    stage_of = {layer: stage for (stage, _), held in layout.stages(layers).items() for layer in held}
    for name, tensor in tensors.items():
        key, index = stored_key(name, stacked)
        if local_norms:
            key = local_spec_key(key, latent=latent)
        lead = _lead(key, index, layers, experts)
        shapes.setdefault(key, (dtypes[name], (*lead, *tensor.global_shape)))
        if shapes[key] != (dtypes[name], (*lead, *tensor.global_shape)):
            raise CkptError(
                "E307",
                f"layers of {key} differ in dtype or shape and cannot be stored as one tensor",
                where=name,
                expected=f"{shapes[key]}",
                found=f"{(dtypes[name], (*lead, *tensor.global_shape))}",
                hint="store them apart with --layer-keys per-layer",
            )
        for rank, offset, shape in rank_boxes(name, tensor.global_shape, layout.expert_tp if is_expert(name) else layout.tp, gated):
            full_offset, full_shape = (*index, *offset), (*(1 for _ in index), *shape)
            blob = torch_zip_writer.tensor_blob(dtypes[name], full_shape)
            file = writers.of(_rank(name, rank, stage_of, experts, layout), blob.size)
            at = file.put(blob.head)
            file.literals.append((at + blob.data_offset + blob.nbytes, blob.tail))
            file.position = at + blob.size
            pieces.setdefault(key, []).append((full_offset, full_shape, file.path.rpartition("/")[2], at, blob.size))
            placements.append(Placement(name, offset, shape, writers.number(file), at + blob.data_offset, dtypes[name]))
    entries: list[tuple[str, bytes]] = list(records)
    if extra_state:
        nothing = torch_zip_writer.dump_file([None], "archive")
        entries += [(fqn, nothing) for fqn in _extra_states(tensors, stacked, layers, experts)]
    entries.append(("common_state/shard_0_1", torch_zip_writer.dump_file([dict(common)], "archive")))
    stored = []
    for fqn, data in entries:
        file = writers.of(0, len(data))
        stored.append((fqn, file.path, file.put(data), len(data)))
    metadata = dcp_metadata.metadata_object(
        ((k, d, s, [(o, n) for o, n, *_ in pieces[k]]) for k, (d, s) in shapes.items()),
        [fqn for fqn, *_ in stored],
        [
            *((fqn, None, path.rpartition("/")[2], at, size) for fqn, path, at, size in stored),
            *((k, o, file, at, size) for k, found in pieces.items() for o, _, file, at, size in found),
        ],
    )
    index_file = pickle_writer.dump(metadata)
    files = writers.files()
    common_file = torch_zip_writer.dump_file(dict(common), "common")
    tracker = "release" if iteration is None else str(iteration)
    for path, data in (
        (f"{folder}/common.pt", common_file),
        (f"{folder}/.metadata", index_file),
        (f"{folder}/metadata.json", json.dumps(METADATA_JSON).encode()),
        ("latest_checkpointed_iteration.txt", tracker.encode()),
    ):
        files.append(TargetFile(path, len(data), ((0, data),)))
    return TargetLayout(tuple(files), tuple(placements), copies)


class _Writers:
    """The .distcp files being laid out: `spread` per rank side by side (threads writing one file wait for each other), further ones
    when they grow beyond the limit."""

    def __init__(self, folder: str, limit: int, spread: int) -> None:
        self._folder, self._limit, self._spread = folder, limit, spread
        self._files: list[_File] = []
        self._numbers: dict[str, int] = {}
        self._open: dict[int, list[_File]] = {}
        self._count: dict[int, int] = {}

    def of(self, rank: int, size: int) -> _File:
        """The file that takes the next `size` bytes of a rank."""
        current = self._open.setdefault(rank, [])
        if len(current) < self._spread:
            current.append(self._new(rank))
        file = min(current, key=lambda f: f.position)
        if file.position and file.position + size > self._limit:
            current.remove(file)
            file = self._new(rank)
            current.append(file)
        return file

    def _new(self, rank: int) -> _File:
        part = self._count.get(rank, 0)
        self._count[rank] = part + 1
        file = _File(f"{self._folder}/__{rank}_{part}.distcp")
        self._numbers[file.path] = len(self._files)
        self._files.append(file)
        return file

    def number(self, file: _File) -> int:
        """Position of a file in the list of target files."""
        return self._numbers[file.path]

    def files(self) -> list[TargetFile]:
        """All files with their literal bytes in order, neighbours joined."""
        return [TargetFile(f.path, f.position, tuple(_join(sorted(f.literals)))) for f in self._files]


def _join(literals: list[tuple[int, bytes]]) -> Iterable[tuple[int, bytes]]:
    start, end = 0, 0
    parts: list[bytes] = []
    for offset, data in literals:
        if parts and offset - end < ALIGN:
            parts.append(b"\0" * (offset - end) + data)
        else:
            if parts:
                yield start, b"".join(parts)
            start, parts = offset, [data]
        end = offset + len(data)
    if parts:
        yield start, b"".join(parts)


def _lead(key: str, index: Shape, layers: int, experts: int) -> Shape:
    if not index:
        return ()
    if len(index) == 2:
        return layers, experts
    return (experts,) if ".mlp.experts.experts." in key else (layers,)


def _rank(name: str, tp_rank: int, stage_of: Mapping[int, int], experts: int, layout: ParallelLayout) -> int:
    layer = layer_of(name)
    if layer is None:
        stage = layout.pp - 1 if name.startswith(("output_layer", "decoder.final_layernorm", "mtp.")) else 0
    else:
        stage = stage_of[layer]
    if is_expert(name):
        owner = (expert_of(name) or 0) * layout.ep // max(experts, 1)
        return stage * layout.tp * layout.dp + owner * layout.expert_tp + tp_rank
    return stage * layout.tp * layout.dp + tp_rank


def _extra_states(names: Iterable[str], stacked: bool, layers: int, experts: int) -> list[str]:
    """Full names of the `_extra_state` entries for the modules that have them in Transformer Engine models; experts have one each."""
    modules: dict[str, None] = {"decoder.final_layernorm": None}
    for name in names:
        key, _ = stored_key(name, False)
        layer = key.startswith(("decoder.layers.", "mtp.layers."))
        if layer and not key.endswith(("mlp.router.weight", "mlp.router.bias", "mlp.router.expert_bias", "shared_experts.gate_weight")):
            modules[key.rpartition(".")[0]] = None
            if ".self_attention." in key:
                modules[key.partition(".self_attention.")[0] + ".self_attention.core_attention"] = None
    result = []
    for module in modules:
        of_expert = ".mlp.experts.experts." in module
        index = [(str(e), str(experts)) for e in range(experts)] if of_expert else [("0", "1")]
        layer_number = layer_of(module + ".")
        if stacked and layer_number is not None:
            module = module.replace(f"decoder.layers.{layer_number}.", "decoder.layers.", 1)
            index = [(f"{layer_number}.{e}", f"{layers}.{n}") if of_expert else (str(layer_number), str(layers)) for e, n in index]
        result += [f"{module}._extra_state/shard_{i}_{n}" for i, n in index]
    return result
