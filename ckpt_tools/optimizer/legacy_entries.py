"""What a writer of the legacy `torch` format puts into each rank's files for the optimizer: Megatron's own structures, tensors as holes.

Sources: Megatron-LM optimizer/optimizer.py, optimizer/distrib_optimizer.py get_parameter_state_dp_zero (0.13 to 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..dtypes import dtype
from ..formats.pickles import DTypeRef, TensorSpec
from ..layout import ParallelLayout
from ..tensors import Shape, contiguous_strides
from .buckets import Item, end_divisor, recompute
from .cut import buffers_of
from .entries import OptimizerEntries
from .groups import Group, group_number
from .order import Parameter

DISTRIBUTED = "distrib_optim"  # flat buffers in distrib_optim.pt
INDEXED = "indexed"  # state by integer index (Float16OptimizerWithFloat16Params, FP32Optimizer)


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor that goes into a hole: full name (`optimizer.state.exp_avg.<canonical name>`), offset and shape of the box in that
    tensor, first byte in the hole, bytes from one element to the next per axis there."""

    name: str
    offset: Shape
    shape: Shape
    start: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class RankOptimizer:
    """`optimizer`: the value for model_optim_rng.pt; `distrib`: the content of distrib_optim.pt, or None when there is no such file.
    Tensors are TensorSpecs without data whose tag is a tuple of Fills; bytes that no Fill covers stay zero."""

    optimizer: Any
    distrib: Any


def rank_optimizer(
    entries: OptimizerEntries,
    chunks: Sequence[Sequence[Parameter]],
    layout: ParallelLayout,
    form: str,
    *,
    args: Mapping[str, Any],
    bucket_size: int | None = None,
    first_stage: bool = True,
    dense: bool = True,
    experts: bool = True,
) -> RankOptimizer:
    """One rank's optimizer files.

    entries      as optimizer_entries gives them: FULLY_RESHARDABLE for form DISTRIBUTED, NON_DISTRIBUTED for INDEXED.
    chunks       the rank's parameters per model chunk, in registration order (optimizer.order.rank_parameters).
    bucket_size  elements per bucket of the target run, None = one bucket; only the first chunk of the first stage is divided.
    dense        whether this rank is the first of its data-parallel group, which writes the flat buffers of the dense parameters;
    experts      of its expert data-parallel group likewise. Matters where experts are optimized apart.
    Errors: E227 when a parameter's group cannot be told.
    """
    chained = list(entries.common.values()) if entries.common and all(type(k) is int for k in entries.common) else [entries.common]
    apart = len(chained) > 1
    common: list[Any] = []
    distrib: list[Any] = []
    for number, entry in enumerate(chained):
        for_experts = apart and number == 1
        own = [[p for p in chunk if p.expert == for_experts] for chunk in chunks] if apart else [list(chunk) for chunk in chunks]
        if form == DISTRIBUTED:
            dp = max(1, layout.tp * layout.cp * layout.dp // (layout.expert_tp * layout.ep)) if for_experts else layout.dp * layout.cp
            common.append({k: v for k, v in entry.items() if k != "param_state_sharding_type"})
            held = (experts if for_experts else dense) or not apart
            distrib.append(_world(entries, own, dp, bucket_size if first_stage else None) if held else None)
        else:
            common.append(_indexed(entries, entry, [p for chunk in own for p in chunk], args))
    return RankOptimizer(common if apart else common[0], None if form != DISTRIBUTED else distrib if apart else distrib[0])


def _states(entries: OptimizerEntries) -> list[str]:
    return list(dict.fromkeys(n.split(".", 3)[2] for n in entries.tensors))


def _world(entries: OptimizerEntries, chunks: Sequence[Sequence[Parameter]], dp: int, bucket_size: int | None) -> dict[Any, Any]:
    result: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (kind, chunk, parameters) in enumerate(buffers_of(chunks, False)):
        layout = recompute([Item(p.numel, p.shared) for p in parameters], bucket_size if chunk == 0 else None, end_divisor(dp))
        tensors: dict[str, Any] = {}
        for state in sorted(_states(entries), key=lambda s: s != "param"):
            fills: list[Fill] = []
            for index, parameter in enumerate(parameters):
                fills.extend(fills_of(parameter, f"optimizer.state.{state}.", layout.compact(index), 4))
            tensors[state] = TensorSpec("float32", (layout.numel,), None, tuple(fills))
        result[number] = {(DTypeRef(kind), DTypeRef("float32")): {**tensors, "numel_unpadded": layout.numel}}
    return result


def _indexed(
    entries: OptimizerEntries, entry: Mapping[str, Any], parameters: Sequence[Parameter], args: Mapping[str, Any]
) -> dict[str, Any]:
    inner = entry.get("optimizer", entry)
    groups: list[Group] = [dict(g) for g in inner["param_groups"]]
    members: list[list[Parameter]] = [[] for _ in groups]
    for parameter in parameters:
        apart = parameter.expert and any(g.get("is_expert_parallel") for g in groups)
        members[group_number(parameter.name, len(parameter.pieces[0].stored), apart, groups, args)].append(parameter)
    state: dict[int, dict[str, Any]] = {}
    step = inner["state"].get("common_step")
    states = [s for s in _states(entries) if s != "fp32_param"]
    masters: list[list[Any]] = []
    for group, found in zip(groups, members, strict=True):
        group["params"] = list(range(len(state), len(state) + len(found)))
        masters.append([])
        for parameter in found:
            shape = _shape(parameter)
            one: dict[str, Any] = {} if step is None else {"step": TensorSpec(step.dtype, step.shape, step.data)}
            one |= {s: _tensor(entries, parameter, f"optimizer.state.{s}.", shape) for s in states}
            state[len(state)] = one
            if parameter.dtype != "float32":
                masters[-1].append(_tensor(entries, parameter, "optimizer.state.fp32_param.", shape))
    result = {"state": state, "param_groups": groups}
    if "optimizer" not in entry:
        return result
    return {**{k: v for k, v in entry.items() if k != "optimizer"}, "optimizer": result, "fp32_from_fp16_params": masters}


def _shape(parameter: Parameter) -> Shape:
    if len(parameter.pieces) == 1:
        return parameter.pieces[0].stored
    stored = parameter.pieces[0].stored  # GroupedMLP: weight1 is (hidden, experts x columns), weight2 (experts x rows, hidden)
    count = len(parameter.pieces)
    return (stored[0], stored[1] * count) if parameter.name.endswith("1") else (stored[0] * count, stored[1])


def _tensor(entries: OptimizerEntries, parameter: Parameter, prefix: str, shape: Shape) -> TensorSpec:
    kind = entries.dtypes[prefix + parameter.pieces[0].name]
    return TensorSpec(kind, shape, None, tuple(fills_of(parameter, prefix, 0, dtype(kind).itemsize)))


def fills_of(parameter: Parameter, prefix: str, first: int, item: int) -> list[Fill]:
    """The boxes that make up a parameter whose first element is element number `first` of a hole with `item` bytes each."""
    result = []
    for piece in parameter.pieces:
        strides = contiguous_strides(piece.stored, item)
        if piece.turned:
            strides = strides[::-1]
        for inner, outer, shape in piece.boxes:
            at = (first + piece.start) * item + sum(i * s for i, s in zip(inner, strides, strict=True))
            if prod(shape):
                result.append(Fill(prefix + piece.name, outer, shape, at, strides))
    return result
