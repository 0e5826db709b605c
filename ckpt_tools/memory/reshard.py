"""Reshard tensors that are in memory: the shards of one parallel layout in, those of another out, without files.

    >>> import numpy as np
    >>> from ckpt_tools.layout import ParallelLayout
    >>> fc2 = np.arange(8, dtype="f4").reshape(2, 4)                    # row parallel: cut along axis 1
    >>> one = {Rank(): {"decoder.layers.0.mlp.linear_fc2.weight": fc2}}
    >>> two = reshard_state_dict(one, ParallelLayout(), ParallelLayout(tp=2))
    >>> two[Rank(tp=1, etp=1)]["decoder.layers.0.mlp.linear_fc2.weight"].tolist()
    [[2.0, 3.0], [6.0, 7.0]]

Which rank holds what is decided by `layout`, nowhere else; planning is pure (`memory.plan.plan_reshard`), moving is done by `kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import CkptError
from ..kernels import Backend, backend, backend_for
from ..layout import ParallelLayout
from .names import Rank, ranks
from .plan import Array, MemoryPlan, Options, plan_reshard

__all__ = ["Options", "Rank", "apply_plan", "described", "plan_reshard", "ranks", "reshard_state_dict"]


def reshard_state_dict(
    shards: Mapping[Rank, Mapping[str, Any]],
    source_layout: ParallelLayout,
    target_layout: ParallelLayout,
    *,
    device: str | None = None,
    gated: bool = True,
    tied: bool = False,
    local_names: bool = False,
    expert_form: str | None = None,
    wanted: Iterable[Rank] | None = None,
    check_copies: bool = True,
    kernels: Backend | None = None,
) -> dict[Rank, dict[str, Any]]:
    """New shards in `target_layout` with the bytes of `shards`, which hold the weights of a dense or MoE model in `source_layout`.

    shards        Rank -> {Megatron name: tensor}, for every rank of `ranks(source_layout)`; numpy arrays or torch tensors, not mixed,
                  any dtype. Names ending in _extra_state are left out. The result never shares memory with the shards.
    device        where the result lies and the work is done: None = where the tensors are, "cpu", "cuda", "cuda:1"; numpy stays numpy.
    gated         linear_fc1 is [gate; up] (SwiGLU), whose halves are cut separately.
    tied          output_layer.weight is a copy of the embedding: kept at the end of the pipeline, where that is not also its start.
    local_names   names as each rank's module has them: layers count from 0 in every stage, experts from 0 in every rank, prefix "model0."
                  and so on with virtual stages. Otherwise layers and experts are numbered globally.
    expert_form   experts of the result: "numbered" (linear_fc1.weight0), "sequential" (local_experts.0.linear_fc1.weight), "grouped"
                  (weight1, weight2 of GroupedMLP); None = as the source has them.
    wanted        make only these ranks of the target (a trainer that needs its own shard); None = all.
    check_copies  compare tensors that several ranks hold; an unknown tensor that is really cut shows up here instead of being lost.
    kernels       the backend; None = numpy for arrays, torch for CPU tensors, Triton for CUDA tensors.
    Errors: E307 shards of one tensor disagree in shape, dtype or (copies) in bytes; E404 a rank or piece is missing; E401-E403 the target
    layout cannot cut this model; E305 names the target form cannot have; E901 torch, Triton or the device is missing.
    The padded vocabulary stays as it is, also where Megatron would pad for the new tp otherwise.
    Memory: source and target together, and on another device than the source a copy of the source there.
    """
    options = Options(gated, tied, local_names, expert_form, None if wanted is None else frozenset(wanted))
    plan = plan_reshard(described(shards), source_layout, target_layout, options)
    return apply_plan(plan, shards, device=device, check_copies=check_copies, kernels=kernels)


def apply_plan(
    plan: MemoryPlan,
    shards: Mapping[Rank, Mapping[str, Any]],
    *,
    device: str | None = None,
    check_copies: bool = True,
    kernels: Backend | None = None,
) -> dict[Rank, dict[str, Any]]:
    """What `reshard_state_dict` does after planning; a plan serves any tensors of the same names, shapes and dtypes. E404, E307 else."""
    found = {(a.rank, a.name): a for a in described(shards)}
    for expected in plan.sources:
        if found.get((expected.rank, expected.name)) != expected:
            raise CkptError(
                "E404", "the shards are not those that were planned", where=f"{expected.rank}: {expected.name}", expected=repr(expected)
            )
    sources = _contiguous([shards[a.rank][a.name] for a in plan.sources], device)
    if check_copies:
        _check_copies(plan, sources)
    targets = _allocate(plan, sources)
    (kernels or (backend_for(sources[0]) if sources else backend("numpy"))).move(plan.moves, sources, targets)
    result: dict[Rank, dict[str, Any]] = {}
    for description, array in zip(plan.targets, targets, strict=True):
        result.setdefault(description.rank, {})[description.name] = array
    return dict(sorted(result.items(), key=lambda item: (item[0].pp, item[0].ep, item[0].tp)))


def described(shards: Mapping[Rank, Mapping[str, Any]]) -> Iterator[Array]:
    """What planning needs to know of the shards. E305 for a value that is no tensor."""
    for key, tensors in shards.items():
        rank = Rank(*key)
        for name, value in tensors.items():
            if name.endswith("_extra_state"):
                continue
            if not hasattr(value, "shape") or not hasattr(value, "dtype"):
                raise CkptError("E305", "a shard holds something that is no tensor", where=f"{rank}: {name}", found=type(value).__name__)
            yield Array(rank, name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _contiguous(arrays: list[Any], device: str | None) -> list[Any]:
    """All arrays contiguous and, for tensors, on the device. E901 when arrays and tensors are mixed or arrays are sent to a GPU."""
    tensors = [hasattr(a, "is_cuda") for a in arrays]
    if all(tensors) and arrays:
        import torch

        place = torch.device(device) if device else arrays[0].device
        if place.type == "cuda" and not torch.cuda.is_available():
            raise CkptError("E901", "there is no GPU that torch can use", found=f"device {device}")
        return [a.detach().to(place).contiguous() for a in arrays]
    if any(tensors) or device not in (None, "cpu"):
        raise CkptError(
            "E901",
            "numpy arrays are resharded on the CPU, and not together with torch tensors",
            found=f"device {device}",
            hint="pass torch tensors everywhere",
        )
    import numpy as np

    return [np.ascontiguousarray(a) for a in arrays]


def _allocate(plan: MemoryPlan, sources: list[Any]) -> list[Any]:
    if sources and hasattr(sources[0], "is_cuda"):
        import torch

        return [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device=sources[0].device) for t in plan.targets]
    import numpy as np

    from ..dtypes import dtype

    return [np.empty(t.shape, dtype(t.dtype).to_numpy()) for t in plan.targets]


def _check_copies(plan: MemoryPlan, sources: list[Any]) -> None:
    for first, copy in plan.copies:
        if not _same_bytes(sources[first], sources[copy]):
            a, b = plan.sources[first], plan.sources[copy]
            raise CkptError(
                "E307",
                f"the copies of {a.name} that several ranks hold differ",
                where=f"{b.rank}: {b.name}",
                expected=f"the bytes of {a.rank}",
                hint="if it is cut between them, ckpt does not know this tensor; check_copies=False takes the first copy",
            )


def _same_bytes(first: Any, second: Any) -> bool:
    if hasattr(first, "is_cuda"):
        import torch

        return bool(torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8)))
    return bool((first.reshape(-1).view("u1") == second.reshape(-1).view("u1")).all())
