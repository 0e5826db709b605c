"""Optimizer state as named tensors of the model, whatever way Megatron stored it: views into the files, and what goes with them.

state = read_optimizer(checkpoint, as_mcore(checkpoint))
state.tensors["exp_avg"]["decoder.layers.0.mlp.linear_fc2.weight"]      # TensorMetadata; its chunks point into the files
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, is_optimizer
from ..errors import CkptError
from ..families.megatron_args import is_gated
from ..formats.torch_dist import Locator, TorchDist
from ..formats.torch_zip import TorchFile, open_torch_file
from ..layout import ParallelLayout, expert_count
from ..layout_args import source_layout
from ..model_names import GROUPED, SEQUENTIAL, TE_GROUPED
from ..naming import canonical_tensors
from ..notes import Note
from ..tensors import TensorMetadata, check_tiling
from ..views import View
from .cut import BucketOptions, cut_buffers
from .flat import unflatten
from .groups import Steps, merge_groups
from .kinds import optimizer_state as described
from .order import Model
from .sources import Owner, assigned, bucket_buffers, gathered_buffers, optimizers, owned_objects
from .state import OptimizerState, canonical_state, collect, entries, masters_note, missing_notes, with_bytes

if TYPE_CHECKING:
    from .repair import Repair

__all__ = ["OptimizerState", "read_optimizer", "repair_optimizer"]

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[a-z0-9_]+)\.(?P<name>.+)")
BY_NAME = ("fully_reshardable", "fully_sharded_model_space", "float16", "float32")
BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space", "bucket_space")


def read_optimizer(
    checkpoint: Checkpoint, view: View, *, bucket_size: int | None = None, dp: int | None = None, check_values: bool = True
) -> OptimizerState:
    """The optimizer state of a torch_dist or legacy checkpoint; reads headers and, with `check_values`, 256 elements per parameter.

    view             the same checkpoint under canonical names, its vocabulary padded as stored (as_mcore(checkpoint)).
    bucket_size, dp  how the run divided its buffers, where the files do not say (dp_zero_gather_scatter, distrib_optim.pt).
    Errors: CkptError E226 when the state does not fit the model, E207 when pieces are missing or doubled, E227 for groups.
    """
    details, where, args = checkpoint.details, checkpoint.location.directory, checkpoint.args or {}
    options = bucket_options(args, sum(t.numel for t in view.tensors.values()), bucket_size, dp)
    if checkpoint.format == "torch":
        from .legacy import legacy_ranks, read_legacy

        scheduler = (checkpoint.common or {}).get("opt_param_scheduler", (checkpoint.common or {}).get("lr_scheduler"))
        ranks = legacy_ranks(checkpoint)
        model = model_of(view, source_layout(args))
        return read_legacy(ranks, model, args, options, scheduler=scheduler, check_values=check_values, where=where)
    if not isinstance(details, TorchDist):
        raise CkptError("E410", f"the optimizer state of the format {checkpoint.format!r} is not read here", where=where)
    kind = described(checkpoint).kind
    if kind == "none":
        return OptimizerState("none", {})
    rest = _rest(checkpoint)
    problems: list[Note] = []
    if kind in BY_NAME:
        tensors = _by_name(checkpoint, details, view)
        problems += masters_note(tensors, view.tensors) if check_values else []
    elif kind in BUCKETS or kind == "dp_zero_gather_scatter":
        tensors, problems = _from_buffers(checkpoint, view, kind, options, check_values)
    else:
        raise CkptError("E226", f"ckpt does not know how to read this optimizer state ({kind})", where=where)
    return replace(rest, kind=kind, tensors=tensors, notes=(*rest.notes, *missing_notes(tensors, view.tensors)), problems=tuple(problems))


def _by_name(checkpoint: Checkpoint, details: TorchDist, view: View) -> dict[str, dict[str, TensorMetadata]]:
    where = checkpoint.location.directory
    stored: dict[str, TensorMetadata] = {}
    with Locator(checkpoint.tensors) as locator:
        for name, tensor in checkpoint.tensors.items():
            if _STATE.match(name) is None:
                continue
            check_tiling(tensor, where)
            located = locator.tensor(tensor)
            stored[name] = unflatten(located, details.original_shapes[name]) if name in details.original_shapes else located
    result: dict[str, dict[str, TensorMetadata]] = {}
    for full, tensor in canonical_tensors(stored, where).items():
        match = _STATE.match(full)
        if match is None:
            continue
        state, name = canonical_state(match["state"]), match["name"]
        _check_known(name, tensor, view, where)
        if result.setdefault(state, {}).setdefault(name, replace(tensor, fqn=name)).chunks != tensor.chunks:
            raise CkptError("E226", f"the {state} of {name} is stored under two keys", where=f"{where}: {full}")
    return {state: {n: named[n] for n in view.tensors if n in named} for state, named in result.items()}


def _check_known(name: str, tensor: TensorMetadata, view: View, where: str) -> None:
    weight = view.tensors.get(name)
    if weight is None:
        raise CkptError("E226", f"there is optimizer state of {name}, which the model does not have", where=f"{where}: {tensor.fqn}")
    if weight.global_shape != tensor.global_shape:
        raise CkptError(
            "E226",
            f"the optimizer state of {name} has another shape than the parameter",
            where=f"{where}: {tensor.fqn}",
            expected=f"{list(weight.global_shape)}",
            found=f"{list(tensor.global_shape)}",
        )


def model_of(view: View, layout: ParallelLayout) -> Model:
    """The model of a view, without its optimizer state, on a layout."""
    weights = {n: t for n, t in view.tensors.items() if not is_optimizer(n)}
    return Model(weights, layout, is_gated(view.args), view.dims.tied, view.dims.layers)


def bucket_options(args: Mapping[str, Any], numel: int, bucket_size: int | None, dp: int | None) -> BucketOptions:
    """How the run divided its buffers: as asked, else as its arguments say. numel: elements of the model."""
    tried: tuple[int | None, ...] = ()
    if args.get("overlap_grad_reduce"):
        count, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
        if isinstance(count, int) and count > 0:
            tried = (numel // count,)
        elif isinstance(size, int) and size > 0:
            tried = (size,)
    return BucketOptions(bucket_size, dp, tried, bool(args.get("ddp_pad_buckets_for_high_nccl_busbw")))


def orders(args: Mapping[str, Any], experts: bool) -> Iterator[tuple[str, str]]:
    """(spec, form of the experts) in which the run may have built its model, the likeliest first."""
    specs = ("local", "te") if args.get("transformer_impl") == "local" else ("te", "local")
    if not experts:
        forms: tuple[str, ...] = (SEQUENTIAL,)
    elif not args.get("moe_grouped_gemm"):
        forms = (SEQUENTIAL, TE_GROUPED, GROUPED)
    elif args.get("moe_use_legacy_grouped_gemm") or specs[0] == "local":
        forms = (GROUPED, TE_GROUPED, SEQUENTIAL)
    else:
        forms = (TE_GROUPED, GROUPED, SEQUENTIAL)
    for form in forms:
        for spec in specs:
            yield spec, form


def _from_buffers(
    checkpoint: Checkpoint, view: View, kind: str, options: BucketOptions, check_values: bool
) -> tuple[dict[str, dict[str, TensorMetadata]], list[Note]]:
    where, args = checkpoint.location.directory, checkpoint.args or {}
    found = bucket_buffers(checkpoint) if kind in BUCKETS else gathered_buffers(checkpoint)
    model = model_of(view, source_layout(args))
    chain = optimizers(list(found))
    first: CkptError | None = None
    best: tuple[dict[str, dict[str, TensorMetadata]], list[Note]] | None = None
    for spec, experts in orders(args, bool(expert_count(model.tensors))):
        try:
            cut = cut_buffers(assigned(found, model, spec, experts, where, chain), options, view.tensors, where)
        except CkptError as error:
            first = first or error
            continue
        tensors = {canonical_state(s): named for s, named in cut.items()}
        problems = masters_note(tensors, view.tensors) if check_values else []
        if not problems:
            return tensors, []
        best = best or (tensors, problems)  # of orders that fit and none of which gives the weights, the likeliest
    if best is None:
        raise first or CkptError("E226", "there are no flat buffers in this checkpoint", where=where)
    return best


def _rest(checkpoint: Checkpoint) -> OptimizerState:
    common, where = checkpoint.common or {}, checkpoint.location.directory
    file = _common_file(checkpoint)
    lists: list[tuple[str, list[Any]]] = []
    steps = Steps()
    scalers: list[Any] = []
    for number, entry in entries(common.get("optimizer")):
        collect(f"optimizer {number} of the common state", entry, file, lists, steps, scalers)
    for what in ("optimizer", "grad_scaler"):
        for owner, stored in sorted(owned_objects(checkpoint, what).items()):
            extent = stored.extent
            own = open_torch_file(extent.path, extent.offset, extent.length, where=f"{extent.path}: {stored.fqn}")
            value = own.value[0] if isinstance(own.value, list) and len(own.value) == 1 else own.value
            collect(_rank_name(owner), {what: value}, own, lists, steps, scalers)
    groups, notes = merge_groups(lists)
    step, told = steps.decide()
    scheduler = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    if not groups:
        notes.append(Note("warning", where, "the optimizer state has no parameter groups"))
    return OptimizerState(
        "none",
        {},
        tuple(groups),
        step,
        with_bytes(scheduler, file) if isinstance(scheduler, dict) else None,
        scalers[0] if scalers else None,
        (*notes, *told),
    )


def _rank_name(owner: Owner) -> str:
    return f"optimizer {owner[0]} of model-parallel rank {owner[1]}"


def _common_file(checkpoint: Checkpoint) -> TorchFile | None:
    if isinstance(checkpoint.details, TorchDist) and checkpoint.details.common_source == "common.pt":
        return open_torch_file(os.path.join(checkpoint.details.directory, "common.pt"))
    stored = next((o for o in checkpoint.objects.values() if o.key == "common_state"), None)
    return open_torch_file(stored.extent.path, stored.extent.offset, stored.extent.length) if stored else None


def repair_optimizer(
    state: OptimizerState, checkpoint: Checkpoint, view: View, *, bucket_size: int | None = None, dp: int | None = None
) -> tuple[OptimizerState, Repair]:
    """A `fully_reshardable` state that was saved shifted (its `problems` say so), put right. Errors: E226 when it cannot be.

    view, bucket_size, dp  as for read_optimizer.
    """
    from .repair import repair_shifted

    args, where = checkpoint.args or {}, checkpoint.location.directory
    if state.kind != "fully_reshardable":
        raise CkptError("E410", "only state of the form fully_reshardable was ever saved shifted", where=where, found=state.kind)
    model = model_of(view, source_layout(args))
    chain = max(1, sum(1 for _ in entries((checkpoint.common or {}).get("optimizer"))))
    options = bucket_options(args, sum(t.numel for t in view.tensors.values()), bucket_size, dp)
    # GroupedMLP's buffers hold experts transposed: single elements would have to be moved, too many to plan
    found = [order for order in orders(args, bool(expert_count(model.tensors))) if order[1] != GROUPED]
    return repair_shifted(state, view.tensors, model, found, options, chain, where)
