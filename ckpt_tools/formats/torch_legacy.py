"""Reading the legacy `torch` format: one model_optim_rng.pt per tensor-, pipeline- and expert-parallel rank, opened as one checkpoint.

Opening reads the pickles and zip directories only. Sources: Megatron-LM checkpointing.py get_checkpoint_name, transformer_block.py,
experts.py (0.5 to 0.19).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import dtype
from ..errors import CkptError
from ..layout import cut_of, is_expert
from ..naming import unify_norms
from ..tensors import Chunk, Extent, Shape, TensorMetadata
from .pickles import TensorRef
from .torch_zip import TorchFile, open_torch_file

FILE_NAME = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"^(?P<head>.*mlp\.experts\.)(?:local_experts\.(?P<seq>\d+)\.(?P<tail>linear_fc[12]\.(?:weight|bias))|(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<number>\d+))$")  # fmt: skip  # noqa: E501


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's file: its place in the layout (etp = rank among those that share its experts) and its content."""

    tp: int
    pp: int
    ep: int
    etp: int
    file: TorchFile

    @property
    def name(self) -> str:
        """The rank's folder, as people see it."""
        return os.path.basename(os.path.dirname(self.file.path))


@dataclass(frozen=True, slots=True)
class Replica:
    """Two stored copies that must be equal: the tensor as used and as stored by another rank."""

    name: str
    used: TensorMetadata
    copy: TensorMetadata
    ranks: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Legacy:
    """An opened legacy iteration: canonical tensors, common state (of the first rank), ranks, sizes, copies to compare."""

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

    @property
    def files(self) -> tuple[str, ...]:
        """All rank files."""
        return tuple(r.file.path for r in self.ranks)


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    dtype: str
    shape: Shape
    extent: Extent
    rank: Rank


def open_legacy(directory: str) -> Legacy:
    """All ranks of a legacy iteration as one checkpoint under canonical names (global layers and experts, whole tensors).

    Errors: E203/E204/E501 unreadable files, E223 rank files missing, E224 ranks that do not fit together.
    """
    folders = {
        n: m for n in sorted(os.listdir(directory)) if (m := _FOLDER.match(n)) and os.path.exists(os.path.join(directory, n, FILE_NAME))
    }
    if not folders:
        raise CkptError("E223", f"no mp_rank_XX/{FILE_NAME} in this folder", where=directory)
    files = {n: open_torch_file(os.path.join(directory, n, FILE_NAME)) for n in folders}
    first = next(iter(files.values()))
    state = first.value
    if not isinstance(state, dict):
        raise CkptError("E224", "a rank file does not hold a table", where=first.path, found=type(state).__name__)
    sizes = _sizes(state.get("args"), folders, files, directory)
    ranks = tuple(_ranks(directory, sizes, files))
    common = {k: v for k, v in state.items() if k != "optimizer" and not re.fullmatch(r"model\d*", k)}
    parts: dict[str, list[_Part]] = {}
    layers = _layer_offsets(ranks, sizes, directory)
    for rank in ranks:
        for key, chunk in _model_chunks(rank):
            for part in _parts(rank, key, chunk, layers, sizes):
                parts.setdefault(part.name, []).append(part)
    tensors, replicas = _assemble(parts, sizes, directory)
    spec = "local" if any(n.endswith((".input_layernorm.weight", ".pre_mlp_layernorm.weight")) for n in parts) else "te"
    return Legacy(directory, unify_norms(tensors, directory), common, ranks, sizes.tp, sizes.pp, sizes.vpp, sizes.ep, tuple(replicas), spec)


@dataclass(frozen=True, slots=True)
class _Sizes:
    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    world: int
    layers: int | None
    experts: int | None
    gated: bool
    tied: bool
    heads: int | None
    version: float

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        smallest = math.lcm(self.tp, self.etp * self.ep)
        full = self.world // self.pp if self.world and self.world % self.pp == 0 else 0
        return full if full and full % smallest == 0 else smallest


def _sizes(args: Any, folders: Mapping[str, re.Match[str]], files: Mapping[str, TorchFile], directory: str) -> _Sizes:
    known: Mapping[str, Any] = args if isinstance(args, dict) else {}
    state = next(iter(files.values())).value

    def number(name: str, default: int) -> int:
        value = known.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    tp = number("tensor_model_parallel_size", number("model_parallel_size", 1 + max(int(m[1]) for m in folders.values())))
    numbered = any(m[2] for m in folders.values())
    if not known and numbered:
        raise CkptError(
            "E224",
            "the second number of these folders is a pipeline or an expert rank, and the files hold no args to tell",
            where=directory,
            found=", ".join(list(folders)[:4]),
            hint="a checkpoint without args cannot be read yet; save it with its args",
        )
    ep = number("expert_model_parallel_size", 1)
    return _Sizes(
        tp,
        number("pipeline_model_parallel_size", 1),
        max(1, sum(1 for k in state if re.fullmatch(r"model\d+", k))),
        ep,
        number("expert_tensor_parallel_size", tp),
        number("world_size", 0),
        known.get("num_layers"),
        known.get("num_experts") or known.get("num_moe_experts"),
        bool(known.get("swiglu", known.get("gated_linear_unit", True))),
        not known.get("untie_embeddings_and_output_weights", False),
        known.get("num_attention_heads"),
        float(state.get("checkpoint_version", 0) or 0),
    )


def folder_name(tp: int, pp: int, ep: int, pipeline: bool, experts: bool) -> str:
    """mp_rank_TT[_PPP][_EEE], the numbers present only when the size is above 1 (source: get_checkpoint_name)."""
    return f"mp_rank_{tp:02d}{f'_{pp:03d}' if pipeline else ''}{f'_{ep:03d}' if experts else ''}"


def _ranks(directory: str, sizes: _Sizes, files: Mapping[str, TorchFile]) -> Iterator[Rank]:
    missing = []
    seen = set()
    for pp in range(sizes.pp):
        for rank in range(sizes.stage):
            tp, ep, etp = rank % sizes.tp, rank // sizes.etp % sizes.ep, rank % sizes.etp
            name = folder_name(tp, pp, ep, sizes.pp > 1, sizes.ep > 1)
            if name in seen:
                continue
            seen.add(name)
            if name not in files:
                missing.append(name)
                continue
            yield Rank(tp, pp, ep, etp, files[name])
    if missing:
        raise CkptError(
            "E223",
            f"{len(missing)} rank folders are missing",
            where=directory,
            expected=f"tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}, etp {sizes.etp} as the stored args say",
            found=f"no {', '.join(missing[:8])}",
            hint="the save did not end, or only part of it was copied",
        )


def _model_chunks(rank: Rank) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number of the virtual stage, names to values) of a rank file."""
    state = rank.file.value
    keys = sorted((k for k in state if re.fullmatch(r"model\d*", k)), key=lambda k: int(k[5:] or 0))
    for number, key in enumerate(keys):
        chunk = state[key]
        if not isinstance(chunk, dict):
            raise CkptError("E224", f"{key} is not a table of tensors", where=rank.file.path)
        if "language_model" in chunk:
            raise CkptError(
                "E224", "this checkpoint is from before Megatron-Core (language_model.*), which ckpt does not read", where=rank.file.path
            )
        yield number, chunk


def _clean(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _layer_offsets(ranks: tuple[Rank, ...], sizes: _Sizes, directory: str) -> dict[tuple[int, int], int]:
    """First global layer of each (pipeline stage, virtual stage): chunks are counted in the order in which activations pass them."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for chunk, tensors in _model_chunks(rank):
            local = {int(m[1]) for n in tensors if (m := _LAYER.match(_clean(n)))}
            count = len(local)
            if local != set(range(count)) or counts.setdefault((rank.pp, chunk), count) != count:
                raise CkptError(
                    "E224", "the ranks of one pipeline stage hold different layers", where=rank.file.path, found=f"{sorted(local)}"
                )
    offsets, total = {}, 0
    for chunk in range(sizes.vpp):
        for stage in range(sizes.pp):
            offsets[stage, chunk] = total
            total += counts.get((stage, chunk), 0)
    if sizes.layers is not None and total != sizes.layers:
        raise CkptError(
            "E224", "the stages do not hold as many layers as the args say", where=directory, expected=f"{sizes.layers}", found=f"{total}"
        )
    return offsets


def _parts(rank: Rank, chunk: int, tensors: Mapping[str, Any], offsets: Mapping[tuple[int, int], int], sizes: _Sizes) -> Iterator[_Part]:
    for stored, ref in tensors.items():
        name = _clean(stored)
        if not isinstance(ref, TensorRef) or name.endswith("_extra_state"):
            continue
        layer = _LAYER.match(name)
        if layer:
            name = f"decoder.layers.{int(layer[1]) + offsets[rank.pp, chunk]}.{name[layer.end() :]}"
        if name.startswith("mtp."):
            name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        start, strides = rank.file.extent(ref)
        item = dtype(ref.dtype).itemsize
        length = sum((n - 1) * s for n, s in zip(ref.shape, strides, strict=True)) + item
        whole = _Part(name, ref.dtype, ref.shape, Extent(rank.file.path, start, length, strides), rank)
        if ".mlp.experts." in name:
            yield from _experts(whole, sizes)
        else:
            yield whole


def _experts(part: _Part, sizes: _Sizes) -> Iterator[_Part]:
    """Experts under their global numbers; GroupedMLP's weight1 / weight2 are views (experts, in, out), so each is read transposed."""
    if not sizes.experts or sizes.experts % sizes.ep:
        raise CkptError(
            "E224",
            "the args do not say how many experts there are",
            where=part.rank.file.path,
            found=f"num_experts {sizes.experts}, ep {sizes.ep}",
        )
    local = sizes.experts // sizes.ep
    base = part.rank.ep * local
    match = _LOCAL_EXPERT.match(part.name)
    if match:
        number = base + int(match["seq"] or match["number"])
        yield _Part(f"{match['head']}{match['tail'] or match['grouped']}{number}", part.dtype, part.shape, part.extent, part.rank)
        return
    head, _, last = part.name.rpartition(".")
    if last not in ("weight1", "weight2") or len(part.shape) != 2:
        raise CkptError("E224", f"{part.name} is no expert weight that ckpt knows", where=part.rank.file.path)
    item = dtype(part.dtype).itemsize
    if last == "weight1":
        rows, columns, tail = part.shape[0], part.shape[1] // local, "linear_fc1.weight"
    else:
        rows, columns, tail = part.shape[0] // local, part.shape[1], "linear_fc2.weight"
    for expert in range(local):
        extent = Extent(
            part.extent.path, part.extent.offset + expert * rows * columns * item, rows * columns * item, (item, columns * item)
        )
        yield _Part(f"{head}.{tail}{base + expert}", part.dtype, (columns, rows), extent, part.rank)


def _assemble(parts: Mapping[str, list[_Part]], sizes: _Sizes, directory: str) -> tuple[dict[str, TensorMetadata], list[Replica]]:
    tensors: dict[str, TensorMetadata] = {}
    replicas: list[Replica] = []
    for name, found in parts.items():
        if name == "output_layer.weight" and sizes.tied:
            continue  # compared with the embedding below
        tensors[name], copies = _tensor(name, found, sizes, directory)
        replicas.extend(copies)
    if sizes.tied and "output_layer.weight" in parts and "embedding.word_embeddings.weight" in tensors:
        copy, more = _tensor("output_layer.weight", parts["output_layer.weight"], sizes, directory)
        used = tensors["embedding.word_embeddings.weight"]
        replicas.extend(more)
        replicas.append(Replica("embedding.word_embeddings.weight", used, copy, ("the first stage", "output_layer of the last stage")))
    return tensors, replicas


def _tensor(name: str, found: list[_Part], sizes: _Sizes, directory: str) -> tuple[TensorMetadata, list[Replica]]:
    expert = is_expert(name)
    count = sizes.etp if expert else sizes.tp
    cut = cut_of(name, sizes.gated)
    by_rank: dict[int, _Part] = {}
    replicas = []
    for part in found:
        if (part.dtype, part.shape) != (found[0].dtype, found[0].shape):
            raise CkptError(
                "E224",
                f"{name} has another shape or dtype on some ranks",
                where=part.rank.file.path,
                expected=f"{found[0].dtype} {list(found[0].shape)} as in {found[0].rank.name}",
                found=f"{part.dtype} {list(part.shape)}",
            )
        position = 0 if cut is None else part.rank.etp if expert else part.rank.tp
        other = by_rank.setdefault(position, part)
        if other is not part:
            replicas.append(Replica(name, _whole(other), _whole(part), (other.rank.name, part.rank.name)))
    if cut is not None and len(by_rank) != count:
        raise CkptError(
            "E224", f"{name} is not on every tensor-parallel rank", where=directory, expected=f"{count} ranks", found=f"{sorted(by_rank)}"
        )
    chunks: list[Chunk] = []
    shape = found[0].shape
    for position, part in sorted(by_rank.items()):
        if cut is None:
            chunks.append(Chunk((0,) * len(shape), shape, part.extent))
        elif cut == "glu":
            chunks.extend(_halves(part, position, count))
        else:
            axis = int(cut)
            offset = tuple(position * n if i == axis else 0 for i, n in enumerate(shape))
            chunks.append(Chunk(offset, shape, part.extent))
    if cut is not None:
        axis = 0 if cut == "glu" else int(cut)
        shape = tuple(n * count if i == axis else n for i, n in enumerate(shape))
    tensor = TensorMetadata(name, found[0].dtype, shape, tuple(chunks))
    if ".linear_qkv." in name and sizes.version < 2 and not name.endswith(("layer_norm_weight", "layer_norm_bias")):
        tensor = _old_row_order(tensor, sizes, directory)
    return tensor, replicas


def _whole(part: _Part) -> TensorMetadata:
    return TensorMetadata(part.name, part.dtype, part.shape, (Chunk((0,) * len(part.shape), part.shape, part.extent),))


def _halves(part: _Part, rank: int, count: int) -> Iterator[Chunk]:
    rows, rest = part.shape[0] // 2, part.shape[1:]
    local = Chunk((0,) * len(part.shape), part.shape, part.extent)
    for half in (0, 1):
        piece = local.cut((half * rows, *(0,) * len(rest)), (rows, *rest))
        yield piece.moved(((half * count + rank) * rows, *(0,) * len(rest)))


def _old_row_order(tensor: TensorMetadata, sizes: _Sizes, directory: str) -> TensorMetadata:
    """checkpoint_version 0 stores a rank's rows as (3, heads, d), version 1 as (heads, d, 3); both become (heads, 3, d)."""
    if not sizes.heads or tensor.global_shape[0] % (3 * sizes.heads):
        raise CkptError(
            "E224", "checkpoint_version below 2 with grouped queries is not known", where=directory, found=f"version {sizes.version}"
        )
    d = tensor.global_shape[0] // (3 * sizes.heads)
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        if chunk.extent is None or chunk.extent.strides is None:
            continue
        heads = chunk.local_shape[0] // (3 * d)
        row, rest = chunk.extent.strides[0], chunk.extent.strides[1:]
        for head in range(heads):
            for which in range(3):
                first = (which * heads + head) * d if sizes.version < 1 else head * d * 3 + which
                step = row if sizes.version < 1 else 3 * row
                extent = Extent(chunk.extent.path, chunk.extent.offset + first * row, chunk.extent.length - first * row, (step, *rest))
                offset = (chunk.global_offset[0] + (head * 3 + which) * d, *chunk.global_offset[1:])
                chunks.append(Chunk(offset, (d, *chunk.local_shape[1:]), extent))
    return TensorMetadata(tensor.fqn, tensor.dtype, tensor.global_shape, tuple(chunks))


def check_replicas(legacy: Legacy) -> int:
    """Compare every copy with the one that is used, block by block; returns the bytes compared.

    CkptError E225 naming the tensor, the two ranks, how many elements differ and by how much.
    """
    compared = 0
    for replica in legacy.replicas:
        compared += replica.used.nbytes
        _compare(replica, legacy.directory)
    return compared


def _compare(replica: Replica, directory: str) -> None:
    import numpy as np

    from ..lazy import read_box

    shape = replica.used.global_shape
    row = max(1, replica.used.nbytes // max(1, shape[0] if shape else 1))
    step = max(1, (4 << 20) // row)
    count, largest = 0, 0.0
    for start in range(0, shape[0] if shape else 1, step):
        offset = (start, *(0,) * (len(shape) - 1)) if shape else ()
        size = (min(step, shape[0] - start), *shape[1:]) if shape else ()
        a, b = read_box(replica.used, offset, size), read_box(replica.copy, offset, size)
        if a.tobytes() == b.tobytes():
            continue
        wide = np.abs(a.astype(np.float64) - b.astype(np.float64))
        count += int(np.count_nonzero(wide))
        largest = max(largest, float(np.nanmax(wide)))
    if count:
        raise CkptError(
            "E225",
            f"the copies of {replica.name} on different ranks are not equal",
            where=f"{directory}: {replica.name}",
            expected=f"{replica.ranks[0]} and {replica.ranks[1]} hold the same bytes",
            found=f"{count} elements differ, by at most {largest:g}",
            hint="the ranks drifted apart in training; --replicas first takes the first rank's copy",
        )
