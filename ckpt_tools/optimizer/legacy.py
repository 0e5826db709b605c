"""Optimizer state of the legacy `torch` format: tensors by integer index, or flat buffers in distrib_optim.pt, one of each per rank.

Sources: Megatron-LM training/checkpointing.py, optimizer/optimizer.py, optimizer/distrib_optimizer.py (0.5 to 0.19).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..checkpoint import Checkpoint
from ..dtypes import dtype
from ..errors import CkptError
from ..formats.pickles import TensorRef
from ..formats.torch_legacy import Legacy
from ..formats.torch_zip import TorchFile, open_torch_file
from ..layout import expert_count, first_layers
from ..memory.names import Rank
from ..model_names import EMBEDDING, HEAD, LAYER, RANK_EXPERT, SEQUENTIAL, bare_name
from ..notes import Note
from ..tensors import Extent, Shape, TensorMetadata
from .cut import BucketOptions, Cut, RankBuffers, add_matched, match
from .flat import make_flat
from .groups import Steps, group_number, merge_groups
from .order import (
    Model,
    Parameter,
    grouped_parameters,
    is_parameter,
    local_parameter,
    registration_key,
)
from .sources import world_buffers
from .state import MASTER, OptimizerState, canonical_state, collect, entries, masters_note, missing_notes, with_bytes

DISTRIB_NAME = "distrib_optim.pt"
Names = Sequence[tuple[str, Shape]]


@dataclass(frozen=True, slots=True)
class LegacyRank:
    """One rank's optimizer: its place; per model chunk the (local name, local shape) of the model's entries in registration order;
    the `optimizer` value of its file, that file, and the opened distrib_optim.pt beside it (None: not the distributed optimizer)."""

    place: Rank
    chunks: Sequence[Names]
    optimizer: Any
    file: TorchFile
    distrib: TorchFile | None = None


def legacy_ranks(checkpoint: Checkpoint) -> list[LegacyRank]:
    """The ranks of an opened legacy checkpoint; reads the directories of distrib_optim.pt files."""
    legacy = checkpoint.details
    if not isinstance(legacy, Legacy):
        raise CkptError("E410", "not a checkpoint in the legacy torch format", where=checkpoint.location.directory)
    result = []
    for rank in legacy.ranks:
        state = rank.file.value
        path = os.path.join(os.path.dirname(rank.file.path), DISTRIB_NAME)
        keys = sorted((k for k in state if re.fullmatch(r"model\d*", k)), key=lambda k: int(k[5:] or 0))
        chunks = [[(n, v.shape) for n, v in state[k].items() if isinstance(v, TensorRef)] for k in keys]
        distrib = open_torch_file(path) if os.path.exists(path) else None
        result.append(LegacyRank(Rank(rank.tp, rank.pp, rank.ep, rank.etp), chunks, state.get("optimizer"), rank.file, distrib))
    return result


def read_legacy(
    ranks: Sequence[LegacyRank],
    model: Model,
    args: Mapping[str, Any],
    options: BucketOptions,
    *,
    scheduler: Any,
    check_values: bool,
    where: str,
) -> OptimizerState:
    """The optimizer state of all ranks under canonical names.

    Errors: E226 when state and model do not fit, E207 when pieces are missing or doubled, E227 when groups cannot be told apart.
    """
    if all(rank.optimizer is None for rank in ranks):
        return OptimizerState("none", {})
    lists: list[tuple[str, list[Any]]] = []
    steps, scalers = Steps(), list[Any]()
    for rank in ranks:
        for number, entry in entries(rank.optimizer):
            collect(f"{rank.file.path}: optimizer {number}", entry, rank.file, lists, steps, scalers)
    groups, notes = merge_groups(lists)
    step, told = steps.decide()
    distributed = any(rank.distrib is not None for rank in ranks)
    tensors, problems = _cut(ranks, model, args, options, check_values, where)
    kind = "distrib_optim" if distributed else "float16" if MASTER in tensors else "float32"
    return OptimizerState(
        kind,
        tensors,
        tuple(groups),
        step,
        with_bytes(scheduler, ranks[0].file) if isinstance(scheduler, dict) else None,
        scalers[0] if scalers else None,
        (*notes, *told, *missing_notes(tensors, model.tensors)),
        tuple(problems),
    )


def _cut(
    ranks: Sequence[LegacyRank], model: Model, args: Mapping[str, Any], options: BucketOptions, check_values: bool, where: str
) -> tuple[dict[str, dict[str, TensorMetadata]], list[Note]]:
    """Cut all ranks' state. Parameters are taken in the order of the model's own entries, which is how Megatron registered and saved them;
    only when that does not give the weights, in the order that a spec prescribes."""
    best: tuple[dict[str, dict[str, TensorMetadata]], list[Note]] | None = None
    first: CkptError | None = None
    for spec in (None, "local", "te"):
        try:
            cut = Cut()
            _add_ranks(cut, ranks, model, args, options, spec)
            tensors = {canonical_state(s): named for s, named in cut.tensors(model.tensors, where).items()}
        except CkptError as error:
            first = first or error
            continue
        problems = masters_note(tensors, model.tensors) if check_values else []
        if not problems:
            return tensors, []
        best = best or (tensors, problems)
    if best is None:
        raise first or CkptError("E226", "there is no optimizer state", where=where)
    return best


def _add_ranks(
    cut: Cut, ranks: Sequence[LegacyRank], model: Model, args: Mapping[str, Any], options: BucketOptions, spec: str | None
) -> None:
    distributed = any(rank.distrib is not None for rank in ranks)
    counts = {
        (rank.place.pp, number): len({m[1] for name, _ in names if (m := LAYER.match(bare_name(name)))})
        for rank in ranks
        for number, names in enumerate(rank.chunks)
    }
    starts = first_layers(counts, model.layout.pp)
    seen: set[tuple[int, Rank]] = set()
    for rank in ranks:
        chunks = []
        for number, names in enumerate(rank.chunks):
            chunk = list(named_parameters(model, rank.place, names, starts[rank.place.pp, number], rank.file.path))
            if spec is not None:
                chunk.sort(key=lambda p: registration_key(p.name, spec, SEQUENTIAL))
            chunks.append(chunk)
        _add_rank(cut, rank, chunks, model, args, options, distributed, seen)


def _add_rank(
    cut: Cut,
    rank: LegacyRank,
    chunks: list[list[Parameter]],
    model: Model,
    args: Mapping[str, Any],
    options: BucketOptions,
    distributed: bool,
    seen: set[tuple[int, Rank]],
) -> None:
    chain = list(entries(rank.distrib.value if distributed and rank.distrib else rank.optimizer))
    for number, entry in chain:
        for_experts = len(chain) > 1 and number == len(chain) - 1
        place = Rank(0, rank.place.pp, rank.place.ep, rank.place.etp) if for_experts else Rank(rank.place.tp, rank.place.pp, 0, 0)
        if entry is None or (number, place) in seen:
            continue
        seen.add((number, place))
        own = [[p for p in chunk if p.expert == for_experts] for chunk in chunks] if len(chain) > 1 else chunks
        name = f"{rank.file.path}: optimizer {number}"
        if not distributed or rank.distrib is None:
            _add_indexed(cut, entry, [p for chunk in own for p in chunk], args, for_experts, rank.file, name)
            continue
        layout = model.layout
        sharing = layout.dp * layout.cp
        if for_experts:
            sharing = max(1, layout.tp * sharing // (layout.expert_tp * layout.ep))
        buffers = world_buffers(entry, rank.distrib)
        for matched in match(RankBuffers(name, rank.place, own, buffers, sharing), options):
            add_matched(cut, matched)


# ---- names


def named_parameters(model: Model, place: Rank, names: Names, first_layer: int, where: str) -> Iterator[Parameter]:
    """The parameters of one model chunk, in the order of `names` (local names with local layer and expert numbers, local shapes).

    CkptError E226 for a name or a local shape that does not belong to the model.
    """
    local = expert_count(model.tensors) // model.layout.ep
    base = place.ep * local
    doubled = model.layout.pp > 1 and (model.tied or any(n.startswith("mtp.") for n in model.tensors))
    for stored, shape in names:
        name = bare_name(stored)
        if not is_parameter(name):
            continue
        layer = LAYER.match(name)
        if layer:
            name = f"decoder.layers.{int(layer[1]) + first_layer}.{name[layer.end() :]}"
        if name.endswith((".mlp.experts.weight1", ".mlp.experts.weight2")):
            head = name.rpartition(".")[0]
            parts = [
                local_parameter(
                    _known(model, f"{head}.linear_fc{name[-1]}.weight{base + e}", stored, where), model.layout, model.gated, place
                )
                for e in range(local)
            ]
            found = grouped_parameters(parts)[0]
        else:
            expert = RANK_EXPERT.match(name)
            if expert:
                name = f"{expert['head']}{expert['tail'] or expert['grouped']}{base + int(expert['seq'] or expert['number'])}"
            tensor = _known(model, name, stored, where)
            copy = tensor.fqn == EMBEDDING and place.pp > 0
            shared = doubled and tensor.fqn == EMBEDDING
            found = local_parameter(tensor, model.layout, model.gated, place, shared=shared, copy=copy)
            found = replace(found, name=_kept_name(name, tensor))
        if found.numel != prod(shape):
            raise CkptError(
                "E226",
                f"{stored} has not the size that this rank's part of {found.name} has",
                where=where,
                expected=f"{found.numel} elements",
                found=f"{list(shape)}",
            )
        yield found


def _kept_name(name: str, tensor: TensorMetadata) -> str:
    """Name to sort a parameter by: that of its tensor, except for the copy of the embedding that stands at the end of the last stage."""
    return name if name == HEAD else tensor.fqn


def _known(model: Model, name: str, stored: str, where: str) -> TensorMetadata:
    layer, _, rest = name.rpartition(".input_layernorm.")
    tries = [name]
    if layer:
        tries.append(f"{layer}.self_attention.linear_qkv.layer_norm_{rest}")
    layer, _, rest = name.rpartition(".pre_mlp_layernorm.")
    if layer:
        tries.append(f"{layer}.mlp.linear_fc1.layer_norm_{rest}")
    if name == HEAD:
        tries.append(EMBEDDING)
    found = next((model.tensors[n] for n in tries if n in model.tensors), None)
    if found is None:
        raise CkptError("E226", f"the optimizer has a parameter {stored} that the model does not have", where=where, found=name)
    return found


# ---- state by integer index


def _add_indexed(
    cut: Cut, entry: Any, parameters: Sequence[Parameter], args: Mapping[str, Any], for_experts: bool, file: TorchFile, where: str
) -> None:
    """Float16OptimizerWithFloat16Params ({optimizer: {state, param_groups}, fp32_from_fp16_params}) or FP32Optimizer ({state, ...})."""
    if not isinstance(entry, dict):
        raise CkptError("E226", "the optimizer's state is not a table", where=where, found=type(entry).__name__)
    inner = entry.get("optimizer", entry.get("optimizer_state_dict", entry))
    state, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, dict) else (None, None)
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise CkptError("E226", "the optimizer's state has no state and param_groups", where=where)
    masters = entry.get("fp32_from_fp16_params", entry.get("fp32_from_fp16"))
    for number, members in enumerate(_members(parameters, groups, state, args, for_experts, where)):
        halves = 0  # float32 parameters have no float32 copy
        for parameter, index in zip(members, groups[number]["params"], strict=True):
            values = dict(state.get(index) or {})
            if masters is not None and parameter.dtype != "float32":
                values[MASTER] = _listed(masters, number, halves, where)
                halves += 1
            for name, ref in values.items():
                if isinstance(ref, TensorRef) and ref.shape:
                    _add_tensor(cut, str(name), parameter, ref, file, where)


def _listed(masters: Any, group: int, position: int, where: str) -> Any:
    try:
        return masters[group][position]
    except (IndexError, KeyError, TypeError):
        raise CkptError("E226", "the optimizer has fewer float32 weights than parameters", where=where) from None


def _members(
    parameters: Sequence[Parameter], groups: Sequence[Any], state: Mapping[Any, Any], args: Mapping[str, Any], for_experts: bool, where: str
) -> list[list[Parameter]]:
    """The parameters of each group, in order. Tried with and without weight decay on q and k norms; checked against shapes."""
    said = bool(args.get("apply_wd_to_qk_layernorm"))
    problem = ""
    for decay_norms in (said, not said):
        members: list[list[Parameter]] = [[] for _ in groups]
        for parameter in parameters:
            rule = {"apply_wd_to_qk_layernorm": decay_norms}
            apart = for_experts or (parameter.expert and any(g.get("is_expert_parallel") and g.get("params") for g in groups))
            members[group_number(parameter.name, _axes(parameter), apart, groups, rule)].append(parameter)
        found = _misfit(members, groups, state)
        if not found:
            return members
        problem = problem or found
    raise CkptError("E226", "the optimizer's parameters are not those of the model on this rank", where=where, found=problem)


def _axes(parameter: Parameter) -> int:
    return len(parameter.pieces[0].stored)


def _misfit(members: Sequence[Sequence[Parameter]], groups: Sequence[Any], state: Mapping[Any, Any]) -> str:
    for number, (found, group) in enumerate(zip(members, groups, strict=True)):
        indexes = group.get("params")
        if not isinstance(indexes, list) or len(indexes) != len(found):
            return f"group {number} has {len(indexes) if isinstance(indexes, list) else 'no'} parameters, the model has {len(found)} for it"
        for parameter, index in zip(found, indexes, strict=True):
            held = state.get(index)
            sizes = {prod(r.shape) for r in held.values() if isinstance(r, TensorRef) and r.shape} if isinstance(held, dict) else set()
            if sizes - {parameter.numel}:
                return f"state {index} of group {number} has {sorted(sizes)} elements, {parameter.name} has {parameter.numel}"
    return ""


def _add_tensor(cut: Cut, name: str, parameter: Parameter, ref: TensorRef, file: TorchFile, where: str) -> None:
    if prod(ref.shape) != parameter.numel:
        raise CkptError(
            "E226", f"the {name} of {parameter.name} has another size than the parameter", where=where, found=f"{list(ref.shape)}"
        )
    start, strides = file.extent(ref)
    item, expected = dtype(ref.dtype).itemsize, dtype(ref.dtype).itemsize
    for size, stride in zip(reversed(ref.shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            raise CkptError(
                "E226", f"the {name} of {parameter.name} is not stored row by row", where=where, found=f"strides {list(strides)}"
            )
        expected *= size
    extent = Extent(file.path, start, parameter.numel * item, (item,))
    flat = make_flat(f"{where}: {name} of {parameter.name}", ref.dtype, parameter.numel, [(0, parameter.numel, extent)])
    if not parameter.copy:
        for piece in parameter.pieces:
            cut.add(name, piece, flat, 0)
