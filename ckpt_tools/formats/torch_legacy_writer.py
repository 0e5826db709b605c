"""Laying out Megatron's legacy `torch` format: one model_optim_rng.pt per rank, as Megatron itself would have written it.

Sources: Megatron-LM checkpointing.py (get_checkpoint_name, save_checkpoint), gpt_layer_specs.py (names of the local and TE specs),
moe/experts.py (0.8 to 0.19).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import dtype
from ..errors import CkptError
from ..holdings import Held, Structure, holdings
from ..layout import ParallelLayout, expert_count, expert_of
from ..memory.names import Rank
from ..model_names import EXPERT, GROUPED, HEAD, SEQUENTIAL, TE_GROUPED
from ..optimizer.order import registration_key
from ..planning import Copied, Placement, TargetFile
from ..tensors import Shape, TensorMetadata
from . import torch_zip_writer
from .hf_writer import TargetLayout
from .pickles import TensorSpec
from .torch_legacy_ranks import FILE_NAME, folder_name

# (tp, pp, ep, etp) -> the `optimizer` value of that rank's file, and the content of its distrib_optim.pt or None
RankState = Callable[[int, int, int, int], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor that goes into a hole of a rank file: its offset and shape, first byte in the hole, byte strides there."""

    name: str
    offset: Shape
    shape: Shape
    start: int
    strides: Shape | None


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
    experts: str | None = None,
    copies: tuple[Copied, ...] = (),
    optimizer: RankState | None = None,
    states: Mapping[tuple[int, int, int], Mapping[str, Any]] | None = None,
) -> TargetLayout:
    """Lay out canonical Megatron tensors as the rank files of one iteration.

    tensors    weights; optimizer state is `optimizer`'s business.
    common     what every rank file holds besides the model (args, checkpoint_version, iteration, ...).
    iteration  number of the iteration, None = `release`.       layout  the ranks, one file each.
    gated      linear_fc1 is [gate; up].        tied  the last stage keeps a copy of the embedding as output_layer.weight.
    spec       "te" or "local": how norms are called.   experts  how experts are stored: "te_grouped", "sequential" or "grouped"; None: as
               the spec has it, te_grouped or sequential.
    optimizer  what each rank's file holds of the optimizer; its holes are tagged with tuples of Fills (or what has their fields).
    states     (tp, pp, ep) -> what else that rank's file holds.
    Errors: E402/E403 sizes that cannot be spread or cut.
    """
    form = experts or (TE_GROUPED if spec == "te" else SEQUENTIAL)
    _check(tensors, layout, form)
    folder = "release" if iteration is None else f"iter_{iteration:07d}"
    files: list[TargetFile] = []
    placements: list[Placement] = []
    for rank, held in _with_files(holdings(layout, tensors, Structure(layers, gated, tied))):
        state = {**common, **_models(held, dtypes, layout, spec, form), **(states or {}).get(rank[:3], {})}
        distributed = None
        if optimizer is not None:
            state["optimizer"], distributed = optimizer(rank.tp, rank.pp, rank.ep, rank.etp)
        base = f"{folder}/{folder_name(rank.tp, rank.pp, rank.ep, layout.pp > 1, layout.ep > 1)}"
        for path, value in ((FILE_NAME, state), ("distrib_optim.pt", distributed)):
            if value is None:
                continue
            laid = torch_zip_writer.layout(value, path.removesuffix(".pt"))
            for start, _, hole in laid.holes:
                placements.extend(_placements(hole, start, len(files), f"{base}/{path}"))
            files.append(TargetFile(f"{base}/{path}", laid.size, laid.literals))
    tracker = b"release" if iteration is None else str(iteration).encode()
    files.append(TargetFile("latest_checkpointed_iteration.txt", len(tracker), ((0, tracker),)))
    return TargetLayout(tuple(files), tuple(placements), copies)


def _check(tensors: Mapping[str, TensorMetadata], layout: ParallelLayout, form: str) -> None:
    if form not in (TE_GROUPED, SEQUENTIAL, GROUPED):
        raise CkptError("E410", f"there is no way {form!r} to store experts", expected=", ".join((TE_GROUPED, SEQUENTIAL, GROUPED)))
    if not expert_count(tensors):
        return
    if layout.tp % layout.expert_tp:
        raise CkptError(
            "E403",
            "the legacy format names files by tensor-parallel rank and cannot tell more expert-tensor-parallel ranks apart",
            expected="etp that divides tp",
            found=f"tp {layout.tp}, etp {layout.expert_tp}",
            hint="torch_dist can hold any layout",
        )
    biased = next((n for n in tensors if ".mlp.experts." in n and ".bias" in n), None)
    if form == GROUPED and biased:
        raise CkptError("E410", "GroupedMLP has no biases", where=biased, hint="--experts te_grouped or sequential")


def _with_files(held: Mapping[Rank, Sequence[Held]]) -> Iterator[tuple[Rank, Sequence[Held]]]:
    """The ranks that have a file of their own: the first of those whose tensor, pipeline and expert rank are the same."""
    seen = set()
    for rank, found in held.items():
        if rank[:3] not in seen:
            seen.add(rank[:3])
            yield rank, found


def _models(held: Sequence[Held], dtypes: Mapping[str, str], layout: ParallelLayout, spec: str, form: str) -> dict[str, Any]:
    """`model`, or `model0`, `model1`, ... of one rank: local name -> hole."""
    keys = ["model"] if layout.virtual == 1 else [f"model{v}" for v in range(layout.virtual)]
    models: dict[str, OrderedDict[str, TensorSpec]] = {key: OrderedDict() for key in keys}
    mixtures: dict[tuple[str, str], list[Held]] = {}
    for one in _registered(held, spec, form):
        model = models[keys[one.chunk]]
        if form == GROUPED and expert_of(one.name) is not None:
            head, _, rest = one.local.partition(".mlp.experts.linear_fc")
            name = f"{head}.mlp.experts.weight{rest[0]}"
            mixtures.setdefault((keys[one.chunk], name), []).append(one)
            model.setdefault(name, TensorSpec(dtypes[one.name], (), None))  # keeps the place; filled below
        else:
            model[_spelled(one.local, spec, form)] = _one_after_the_other(one, dtypes[one.name])
    for (key, name), found in mixtures.items():
        models[key][name] = _grouped(found, dtypes[found[0].name])
    return dict(models)


def _registered(held: Sequence[Held], spec: str, form: str) -> list[Held]:
    """In the order in which Megatron registers them, by which its optimizers number them; buffers stay behind their neighbours."""
    keys: list[tuple[tuple[int, ...], int]] = []
    last: tuple[int, ...] = ()
    for position, one in enumerate(held):
        try:
            last = registration_key(HEAD if one.local == HEAD else one.name, spec, form)
        except CkptError:
            pass
        keys.append((last, position))
    return [held[position] for _, position in sorted(keys)]


def _one_after_the_other(held: Held, kind: str) -> TensorSpec:
    """A hole that the boxes of a tensor fill, one after the other."""
    fills, position = [], 0
    for offset, shape in held.boxes:
        fills.append(Fill(held.name, offset, shape, position, None))
        position += math.prod(shape) * dtype(kind).itemsize
    return TensorSpec(kind, held.shape, None, tuple(fills))


def _grouped(experts: Sequence[Held], kind: str) -> TensorSpec:
    """GroupedMLP's tensor of one matrix of all local experts, in memory (experts, in, out): each expert is the transpose of its own.

    weight1 has shape (hidden, experts x 2 ffn), weight2 (experts x ffn, hidden).
    """
    item = dtype(kind).itemsize
    out, size_in = experts[0].shape
    fills = []
    for number, held in enumerate(experts):
        row = number * out * size_in
        for offset, shape in held.boxes:
            fills.append(Fill(held.name, offset, shape, row * item, (item, out * item)))
            row += shape[0]
    first = ".linear_fc1." in experts[0].name
    shape = (size_in, len(experts) * out) if first else (len(experts) * size_in, out)
    return TensorSpec(kind, shape, None, tuple(fills))


def _placements(hole: Any, start: int, file: int, path: str) -> Iterator[Placement]:
    if not isinstance(hole, TensorSpec) or not isinstance(hole.tag, tuple):
        raise CkptError("E490", "a rank file has a tensor that nobody fills", where=path)
    for fill in hole.tag:
        yield Placement(fill.name, fill.offset, fill.shape, file, start + fill.start, hole.dtype, fill.strides)


def _spelled(local: str, spec: str, form: str) -> str:
    """The local name as the spec spells norms and the form experts."""
    expert = EXPERT.match(local)
    if expert:
        return f"{expert['head']}local_experts.{expert['expert']}.{expert['tail']}" if form == SEQUENTIAL else local
    if spec == "te":
        return local
    local = local.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return local.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
