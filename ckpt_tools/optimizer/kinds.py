"""What a training run can go on from: optimizer state and whether another layout can load it, random states, scheduler, progress.

Sources: Megatron-LM core_v0.8.0 to core_v0.19.0 optimizer/distrib_optimizer.py, optimizer/optimizer.py, training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint, byte_count, is_optimizer
from ..tensors import Shape, TensorMetadata

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<state>[a-z0-9_]+)\.(?P<key>.+)$")
_BUCKET = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\..*bucket_idx_\d+\.(?P<state>\w+)$")
_GATHERED = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state$")
_ANY = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_NAMES = {
    "fully_reshardable": "distributed optimizer, fully_reshardable",
    "fully_sharded_model_space": "distributed optimizer, fully_sharded_model_space",
    "dp_reshardable": "distributed optimizer, dp_reshardable",
    "fully_sharded_bucket_space": "distributed optimizer, fully_sharded_bucket_space",
    "bucket_space": "distributed optimizer, flat buffers (dp_reshardable or fully_sharded_bucket_space)",
    "dp_zero_gather_scatter": "distributed optimizer, dp_zero_gather_scatter",
    "float16": "optimizer with float32 copies of the weights, not distributed",
    "float32": "float32 optimizer, not distributed",
    "fsdp_dtensor": "Megatron-FSDP, sharded by DTensor",
    "by_name": "optimizer state by parameter name",
    "unknown": "optimizer state of an unknown kind",
    "none": "none",
}
_DP_ONLY = "in the order of the writer's buckets: only the data-parallel size can change"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Optimizer state in the checkpoint.

    kind         "fully_reshardable", "dp_reshardable", "fully_sharded_model_space", "fully_sharded_bucket_space", "bucket_space" (one of
                 the two, the files do not say which), "dp_zero_gather_scatter", "float16" / "float32" (not distributed), "fsdp_dtensor",
                 "by_name" (other plain DCP), "unknown", "none";   name  the same for people.
    states       names of the states of a parameter ("exp_avg", ...), `param` or `fp32_param` being the float32 weights.
    reshardable  whether another TP, PP or EP can be given to it; None when there is no state;   why  the reason, or what else to know.
    step         optimizer steps, when the common state says so;   groups  parameter groups.
    """

    kind: str
    name: str
    states: tuple[str, ...]
    tensors: int
    nbytes: int
    reshardable: bool | None
    why: str
    step: int | None
    groups: int


@dataclass(frozen=True, slots=True)
class Rest:
    """Random states: how many objects, their grid (axes pp, tp and, with experts, dp); scheduler: its plain values; progress: counters."""

    rng_objects: int
    rng_grid: Shape
    scheduler: dict[str, Any]
    progress: dict[str, Any]


def optimizer_state(checkpoint: Checkpoint) -> OptimizerState:
    """Kind and size of the optimizer state; nothing but the index and the common state is looked at."""
    tensors = {n: t for n, t in checkpoint.tensors.items() if is_optimizer(n)}
    objects = [o for o in checkpoint.objects.values() if _ANY.match(o.key)]
    common = (checkpoint.common or {}).get("optimizer")
    groups = list(param_groups(common))
    kind, states = _kind(checkpoint, tensors, [o.key for o in objects])
    reshardable, why = _reshardable(kind, checkpoint)
    nbytes = byte_count(tensors) + sum(o.extent.length for o in objects if _GATHERED.match(o.key))
    return OptimizerState(kind, _NAMES[kind], states, len(tensors), nbytes, reshardable, why, _step(groups), len(groups))


def _kind(checkpoint: Checkpoint, tensors: Mapping[str, TensorMetadata], objects: list[str]) -> tuple[str, tuple[str, ...]]:
    if checkpoint.format == "torch_dcp":
        return _kind_of_dcp(checkpoint, tensors)
    states: dict[str, None] = {}
    flat = named = False
    for name in tensors:
        match = _STATE.match(name)
        if match:
            named = True
        else:
            match = _BUCKET.match(name)
            flat = flat or match is not None
        if match:
            states.setdefault(match["state"])
    found = tuple(sorted(states))
    stated = sharding_type(checkpoint)
    if flat:
        return (stated if stated in ("dp_reshardable", "fully_sharded_bucket_space") else "bucket_space"), found
    if any(_GATHERED.match(key) for key in objects):
        return "dp_zero_gather_scatter", found
    if not tensors and not any(key.endswith(".optimizer") for key in objects):
        return "none", ()
    if not named:
        return "unknown", found
    if stated in ("fully_reshardable", "fully_sharded_model_space"):
        return stated, found
    if _flattened(checkpoint, tensors):
        return "fully_sharded_model_space", found
    if "param" in states:
        return "fully_reshardable", found
    return ("float16" if "fp32_param" in states else "float32"), found


def _kind_of_dcp(checkpoint: Checkpoint, tensors: Mapping[str, TensorMetadata]) -> tuple[str, tuple[str, ...]]:
    states = sorted({n.rpartition(".")[2] for n in tensors} - {"step"})
    if not states:
        return "none", ()
    megatron = any(o.key.startswith("optimizer.param_to_group_meta.") for o in checkpoint.objects.values())
    return ("fsdp_dtensor" if megatron else "by_name"), tuple(states)


def _flattened(checkpoint: Checkpoint, tensors: Mapping[str, TensorMetadata]) -> bool:
    """Whether the state of a parameter has another shape than the parameter itself, as in model space (0.8 to 0.15)."""
    original = getattr(checkpoint.details, "original_shapes", {})
    if any(name in original for name in tensors):
        return True
    for name, tensor in tensors.items():
        match = _STATE.match(name)
        weight = checkpoint.tensors.get(match["key"]) if match else None
        if weight is not None and weight.global_shape != tensor.global_shape:
            return True
    return False


def sharding_type(checkpoint: Checkpoint) -> str | None:
    """What the common state itself says: content_metadata (0.13 and later), else param_state_sharding_type."""
    common = checkpoint.common or {}
    content = common.get("content_metadata")
    if isinstance(content, Mapping) and isinstance(content.get("distrib_optim_sharding_type"), str):
        return str(content["distrib_optim_sharding_type"])
    optimizer = common.get("optimizer")
    for place in (optimizer, *(optimizer.values() if isinstance(optimizer, Mapping) else ())):
        if isinstance(place, Mapping) and isinstance(place.get("param_state_sharding_type"), str):
            return str(place["param_state_sharding_type"])
    return None


def _reshardable(kind: str, checkpoint: Checkpoint) -> tuple[bool | None, str]:
    if kind == "none":
        return None, "no optimizer state is stored"
    if kind == "unknown":
        return None, "its keys are none that megatron-core writes"
    if kind in ("dp_reshardable", "fully_sharded_bucket_space", "bucket_space"):
        return False, f"flat buffers without parameter names, {_DP_ONLY}"
    if kind == "dp_zero_gather_scatter":
        return False, f"one pickled object per model-parallel rank, {_DP_ONLY}"
    if kind == "fully_sharded_model_space":
        return True, "by parameter, flattened; megatron-core 0.16 and later cannot load it"
    if kind == "fully_reshardable" and _may_be_shifted(checkpoint.args):
        return True, "by parameter; megatron-core 0.15 to 0.19 shift it when a gradient bucket is padded, and this run may have had several"
    return True, "by parameter"


def _may_be_shifted(args: Mapping[str, Any] | None) -> bool:
    # Parameters are cut with indices that count the padding of earlier buckets, which was not stored; one bucket has no earlier ones.
    # Megatron-LM distributed_data_parallel.py: several buckets need overlap_grad_reduce, or a tied embedding on another stage.
    if args is None:
        return True
    stages = args.get("pipeline_model_parallel_size")
    tied = args.get("untie_embeddings_and_output_weights") is False
    return args.get("overlap_grad_reduce") is not False or (tied and isinstance(stages, int) and stages > 1)


def _step(groups: list[Mapping[str, Any]]) -> int | None:
    found = [s for s in (g.get("step") for g in groups) if isinstance(s, int | float) and not isinstance(s, bool)]
    return max((int(s) for s in found if 0 <= s < 2**53), default=None)


def rest_of_state(checkpoint: Checkpoint) -> Rest:
    """Random states, scheduler and counters."""
    common = checkpoint.common or {}
    random = [o for o in checkpoint.objects.values() if o.key == "rng_state" or o.key.startswith("rng_state.")]
    stored = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    scheduler = {str(k): v for k, v in stored.items() if isinstance(v, bool | int | float | str)} if isinstance(stored, Mapping) else {}
    args = checkpoint.args or {}
    places = (
        ("iteration", common),
        ("consumed_train_samples", args),
        ("consumed_valid_samples", args),
        ("skipped_train_samples", args),
        ("global_batch_size", args),
        ("seq_length", args),
        ("num_floating_point_operations_so_far", common),
        ("checkpoint_version", common),
    )
    progress = {n: place[n] for n, place in places if isinstance(place.get(n), int | float) and not isinstance(place[n], bool)}
    return Rest(len(random), random[0].grid if random else (), scheduler, progress)


def param_groups(optimizer: Any) -> Iterable[Mapping[str, Any]]:
    """Parameter groups in an optimizer's common state: its own, those of the optimizer it wraps, or of each of several."""
    if not isinstance(optimizer, Mapping):
        return
    groups = optimizer.get("param_groups")
    if isinstance(groups, list):
        yield from (g for g in groups if isinstance(g, Mapping))
    for key, value in optimizer.items():
        if key == "optimizer" or (isinstance(key, int) and not isinstance(key, bool)):
            yield from param_groups(value)
