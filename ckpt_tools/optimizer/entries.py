"""What a torch_dist writer must store so that Megatron-Core finds the optimizer state: tensors by name, common entry, content metadata.

Sources: Megatron-LM optimizer/distrib_optimizer.py and optimizer.py (0.15 to 0.19), training/checkpointing.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dtypes import dtype
from ..errors import CkptError
from ..formats.pickles import TensorSpec
from ..layout import ParallelLayout, is_expert
from ..notes import Note
from ..tensors import TensorMetadata
from .groups import Group, completed, expert_split
from .state import MASTER, OptimizerState

FULLY_RESHARDABLE = "fully_reshardable"  # what the distributed optimizer of 0.15 and later loads at any layout
NON_DISTRIBUTED = "non_distributed"  # Float16OptimizerWithFloat16Params, or FP32Optimizer where the weights are float32
FORMS = (FULLY_RESHARDABLE, NON_DISTRIBUTED)


@dataclass(frozen=True, slots=True)
class OptimizerEntries:
    """tensors: full name (`optimizer.state.<state>.<canonical name>`) -> tensor;   dtypes: what to store each as.
    common     value of `optimizer` in the common state.         content  entries for `content_metadata`.
    arguments  Megatron arguments that say which optimizer it is; to be merged into `args`.
    notes      what a person must know."""

    tensors: dict[str, TensorMetadata]
    dtypes: dict[str, str]
    common: dict[Any, Any]
    content: dict[str, Any]
    arguments: dict[str, Any]
    notes: tuple[Note, ...]


def optimizer_entries(
    state: OptimizerState, form: str, *, weights: Mapping[str, TensorMetadata], layout: ParallelLayout
) -> OptimizerEntries:
    """The entries of `state` in `form` (FULLY_RESHARDABLE or NON_DISTRIBUTED) for a run at `layout`.

    weights  canonical model tensors, as they will be stored (vocabulary padded alike).
    Errors: E410 for another form, E226 for float32 weights that are stored as remainders only.
    """
    if form not in FORMS:
        raise CkptError("E410", f"optimizer state cannot be written as {form!r}", expected=", ".join(FORMS))
    notes: list[Note] = []
    distributed = form == FULLY_RESHARDABLE
    named, told = with_masters(state, weights, distributed)
    notes += told
    tensors: dict[str, TensorMetadata] = {}
    dtypes: dict[str, str] = {}
    for key, found in named.items():
        for name, tensor in found.items():
            full = f"optimizer.state.{key}.{name}"
            tensors[full] = replace(tensor, fqn=full)
            dtypes[full] = "float32" if distributed and dtype(tensor.dtype).floating else tensor.dtype
    groups, told = grouped(state, weights, layout)
    notes += told
    chain = [_entry(state, part, distributed, _all_float32(weights)) for part in groups]
    common: dict[Any, Any] = chain[0] if len(chain) == 1 else dict(enumerate(chain))
    content: dict[str, Any] = {"chained_optim_avoid_prefix": True}
    if distributed:
        content |= {"distrib_optim_sharding_type": FULLY_RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False}
    arguments = {"use_distributed_optimizer": distributed, "dist_ckpt_optim_fully_reshardable": distributed}
    return OptimizerEntries(tensors, dtypes, common, content, arguments, tuple(notes))


def _all_float32(weights: Mapping[str, TensorMetadata]) -> bool:
    return all(t.dtype == "float32" for t in weights.values())


def with_masters(
    state: OptimizerState, weights: Mapping[str, TensorMetadata], distributed: bool
) -> tuple[dict[str, dict[str, TensorMetadata]], list[Note]]:
    """The tensors by the state's stored name, with the float32 weights that the target's optimizer wants and no others."""
    named = dict(state.tensors)
    masters = named.pop(MASTER, {})
    trained = next(iter(named.values()), masters)
    bad = next((n for n, t in masters.items() if not dtype(t.dtype).floating), None)
    if bad is not None:
        raise CkptError(
            "E226",
            "the float32 weights are stored as 16-bit remainders (--use-precision-aware-optimizer), which ckpt cannot put together yet",
            where=bad,
            found=masters[bad].dtype,
        )
    wanted = [n for n in trained if n in weights and (distributed or weights[n].dtype != "float32")]
    made = [n for n in wanted if n not in masters]
    notes = []
    if made:
        notes.append(
            Note("assumed", ", ".join(made[:8]), f"float32 weights of {len(made)} parameters were not stored: they are the model's weights")
        )
    left = [n for n in masters if n not in wanted]
    if left:
        notes.append(Note("dropped", ", ".join(left[:8]), f"float32 copies of {len(left)} float32 weights: the target keeps none"))
    if wanted:
        named[MASTER if distributed else "fp32_param"] = {n: masters[n] if n in masters else weights[n] for n in wanted}
    return named, notes


def grouped(state: OptimizerState, weights: Mapping[str, TensorMetadata], layout: ParallelLayout) -> tuple[list[list[Group]], list[Note]]:
    """The groups of each optimizer that a run at `layout` chains: one, or that of the dense parameters and that of the experts."""
    groups, notes = completed(state.groups, state.scheduler)
    apart = any(map(is_expert, weights)) and (layout.ep > 1 or layout.expert_tp != layout.tp)
    groups, told = expert_split(groups, apart)
    notes += told
    if not apart:
        return [groups], notes
    experts = [g for g in groups if g.get("is_expert_parallel")]
    return [[g for g in groups if not g.get("is_expert_parallel")], experts], notes


def _entry(state: OptimizerState, groups: Sequence[Group], distributed: bool, float32: bool) -> dict[str, Any]:
    stepped = [_with_step(g, state.step, distributed) for g in groups]
    scaler = {} if state.grad_scaler is None else {"grad_scaler": state.grad_scaler}
    if distributed:
        return {"optimizer": {"param_groups": stepped}, "param_state_sharding_type": FULLY_RESHARDABLE, **scaler}
    # torch's Adam wants a step per parameter; Megatron gives every one of them this
    steps = {} if state.step is None else {"common_step": TensorSpec("float32", (), struct.pack("<f", state.step))}
    inner = {"state": steps, "param_groups": stepped}
    return inner if float32 else {"optimizer": inner, **scaler}


def _with_step(group: Group, step: int | None, always: bool) -> Group:
    return {**group, "step": step} if step is not None and (always or "step" in group) else dict(group)
