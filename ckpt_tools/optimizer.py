"""Optimizer state as named tensors of the model, whatever way Megatron stored it: views into the files, and what goes with them.

state = read_optimizer(checkpoint, as_mcore(checkpoint))
state.tensors["exp_avg"]["decoder.layers.0.mlp.linear_fc2.weight"]      # TensorMetadata; its chunks point into the files
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .checkpoint import Checkpoint
from .errors import CkptError
from .formats.pickles import NumpyScalar, TensorRef
from .formats.torch_dist import Locator, TorchDist
from .formats.torch_zip import TorchFile, open_torch_file
from .inspection_optimizer import optimizer_state as described
from .naming import canonical_tensors
from .notes import Note
from .optimizer_cut import BucketOptions, cut_buffers
from .optimizer_flat import unflatten
from .optimizer_groups import Group, Steps, merge_groups
from .optimizer_order import GROUPED, SEQUENTIAL, TE_GROUPED, Model, is_parameter, source_layout
from .optimizer_sources import Owner, assigned, bucket_buffers, gathered_buffers, optimizers, owned_objects
from .optimizer_values import compare_masters
from .tensors import Chunk, TensorMetadata, check_tiling
from .views import View

MASTER = "param"  # the float32 weights; Megatron also says fp32_param, master_param
_MASTERS = ("fp32_param", "master_param")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[a-z0-9_]+)\.(?P<name>.+)")
BY_NAME = ("fully_reshardable", "fully_sharded_model_space", "float16", "float32")
BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space", "bucket_space")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Optimizer state under canonical names.

    kind       how it was stored: "fully_reshardable", "fully_sharded_model_space", "float16" / "float32" (not distributed),
               "dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter", "distrib_optim" (legacy), or "none".
    tensors    state ("exp_avg", "exp_avg_sq", "param" = float32 weights) -> canonical name of the parameter -> its tensor.
    groups     parameter groups with all their values but `params`; each identity once.
    step       optimizer steps taken, or None when nothing says it.
    scheduler, grad_scaler   as stored, small tensors as TensorSpec with their bytes; None when absent.
    notes      what a person must know;   problems  what makes the state doubtful.
    """

    kind: str
    tensors: dict[str, dict[str, TensorMetadata]]
    groups: tuple[Group, ...] = ()
    step: int | None = None
    scheduler: dict[str, Any] | None = None
    grad_scaler: Any = None
    notes: tuple[Note, ...] = ()
    problems: tuple[Note, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for named in self.tensors.values() for t in named.values())


def read_optimizer(
    checkpoint: Checkpoint, view: View, *, bucket_size: int | None = None, dp: int | None = None, check_values: bool = True
) -> OptimizerState:
    """The optimizer state of a torch_dist checkpoint; reads headers and, with `check_values`, 256 elements per parameter.

    view             the same checkpoint under canonical names, its vocabulary padded as stored (as_mcore(checkpoint)).
    bucket_size, dp  how the run divided its buffers, where the files do not say (dp_zero_gather_scatter).
    Errors: CkptError E226 when the state does not fit the model, E207 when pieces are missing or doubled, E227 for groups.
    """
    if not isinstance(checkpoint.details, TorchDist):
        raise CkptError(
            "E410", f"the optimizer state of the format {checkpoint.format!r} is not read here", where=checkpoint.location.directory
        )
    kind = described(checkpoint).kind
    if kind == "none":
        return OptimizerState("none", {})
    rest = _rest(checkpoint)
    problems: list[Note] = []
    if kind in BY_NAME:
        tensors = _by_name(checkpoint, checkpoint.details, view)
        problems += masters_note(tensors, view.tensors) if check_values else []
    elif kind in BUCKETS or kind == "dp_zero_gather_scatter":
        tensors, problems = _from_buffers(checkpoint, view, kind, bucket_size, dp, check_values)
    else:
        raise CkptError("E226", f"ckpt does not know how to read this optimizer state ({kind})", where=checkpoint.location.directory)
    return replace(rest, kind=kind, tensors=tensors, notes=(*rest.notes, *missing_notes(tensors, view.tensors)), problems=tuple(problems))


def canonical_state(state: str) -> str:
    """The name ckpt gives a state: the float32 weights are `param` however they are called."""
    return MASTER if state in _MASTERS else state


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


def model_of(view: View, layout_args: Mapping[str, Any]) -> Model:
    """The model as the order of parameters needs it."""
    return Model(view.tensors, source_layout(layout_args), bool(view.args.get("swiglu", True)), view.dims.tied, view.dims.layers)


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
    checkpoint: Checkpoint, view: View, kind: str, bucket_size: int | None, dp: int | None, check_values: bool
) -> tuple[dict[str, dict[str, TensorMetadata]], list[Note]]:
    where, args = checkpoint.location.directory, checkpoint.args or {}
    found = bucket_buffers(checkpoint) if kind in BUCKETS else gathered_buffers(checkpoint)
    model = model_of(view, args)
    options = bucket_options(args, sum(t.numel for t in view.tensors.values()), bucket_size, dp)
    chain = optimizers(list(found))
    first: CkptError | None = None
    best: tuple[dict[str, dict[str, TensorMetadata]], list[Note]] | None = None
    for spec, experts in orders(args, bool(model.expert_count)):
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


def masters_note(tensors: Mapping[str, Mapping[str, TensorMetadata]], weights: Mapping[str, TensorMetadata]) -> list[Note]:
    """A problem when float32 weights do not round to the model's weights (256 elements of each are compared)."""
    masters = tensors.get(MASTER)
    if not masters:
        return []
    wrong = compare_masters(masters, weights)
    if not wrong:
        return []
    worst = max(wrong, key=lambda m: m.largest)
    names = ", ".join(m.name for m in wrong[:8]) + (", ..." if len(wrong) > 8 else "")
    text = (
        f"the optimizer's float32 weights of {len(wrong)} of {len(masters)} parameters do not round to the model's weights "
        f"(by up to {worst.largest:g} in {worst.name}): the first training step would go on from other weights"
    )
    return [Note("warning", names, text)]


def missing_notes(tensors: Mapping[str, Mapping[str, TensorMetadata]], weights: Mapping[str, TensorMetadata]) -> list[Note]:
    """Parameters of the model without optimizer state (frozen in training)."""
    notes = []
    for state, named in tensors.items():
        lacking = [n for n in weights if n not in named and is_parameter(n)]
        if lacking:
            text = f"{len(lacking)} parameters have no {state}: they were not trained"
            notes.append(Note("warning", ", ".join(lacking[:8]), text))
    return notes


def repad_state(state: OptimizerState, vocab: int, rows: int) -> OptimizerState:
    """The state with vocabulary tables of `rows` rows, the first `vocab` kept and zeros after them, as vocabulary.repad does."""
    tensors = {s: dict(named) for s, named in state.tensors.items()}
    for named in tensors.values():
        for name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
            tensor = named.get(name)
            if tensor is None or tensor.global_shape[0] == rows:
                continue
            rest = tensor.global_shape[1:]
            kept = min(vocab, tensor.global_shape[0])
            chunks = list(tensor.region((0,) * (1 + len(rest)), (kept, *rest)))
            if rows > kept:
                chunks.append(Chunk((kept, *(0,) * len(rest)), (rows - kept, *rest), None))
            named[name] = TensorMetadata(name, tensor.dtype, (rows, *rest), tuple(chunks))
    return replace(state, tensors=tensors)


# ---- what is not tensors: groups, step, scheduler, grad scaler


def _rest(checkpoint: Checkpoint) -> OptimizerState:
    common, where = checkpoint.common or {}, checkpoint.location.directory
    file = _common_file(checkpoint)
    lists: list[tuple[str, list[Any]]] = []
    steps = Steps()
    scalers: list[Any] = []
    for number, entry in _entries(common.get("optimizer")):
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


def _entries(value: Any) -> Iterator[tuple[int, Any]]:
    """(number, state dict) of each optimizer: one, or a table or list of several."""
    if isinstance(value, dict) and value and all(type(k) is int for k in value):
        yield from sorted(value.items())
    elif isinstance(value, list):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield 0, value


def collect(place: str, entry: Any, file: TorchFile | None, lists: list[tuple[str, list[Any]]], steps: Steps, scalers: list[Any]) -> None:
    """Add one optimizer's groups, step counts and grad scaler; `entry` as Megatron's optimizers return it from state_dict()."""
    if not isinstance(entry, dict):
        return
    inner = entry.get("optimizer", entry.get("optimizer_state_dict", entry))
    if isinstance(inner, dict):
        groups = inner.get("param_groups")
        if isinstance(groups, list):
            listed = [with_bytes(g, file) for g in groups if isinstance(g, dict)]
            lists.append((place, listed))
            for group in listed:
                steps.add("in param_groups", number_of(group.get("step"), file))
        state = inner.get("state")
        if isinstance(state, dict):
            steps.add("in common_step", number_of(state.get("common_step"), file))
            for one in state.values():
                if isinstance(one, dict):
                    steps.add("per parameter", number_of(one.get("step"), file))
    held = entry.get("param_state")
    if isinstance(held, dict):
        for one in held.values():
            if isinstance(one, dict):
                steps.add("per parameter", number_of(one.get("step"), file))
    if entry.get("grad_scaler") is not None:
        scalers.append(with_bytes(entry["grad_scaler"], file))


def number_of(value: Any, file: TorchFile | None) -> Any:
    """A number from a Python number, a numpy scalar or a tensor of one element; anything else gives None."""
    if isinstance(value, NumpyScalar):
        return value.item()
    if isinstance(value, TensorRef) and file is not None:
        value = with_bytes(value, file)
    return scalar(value)


def scalar(value: Any) -> Any:
    """A number from a Python number or a TensorSpec of one element."""
    from .formats.pickles import TensorSpec

    if isinstance(value, TensorSpec) and value.data:
        import numpy as np

        from .dtypes import dtype

        kind = dtype(value.dtype)
        if len(value.data) != kind.itemsize:
            return None
        found = np.frombuffer(value.data, kind.to_numpy())[0].item()
        return found if isinstance(found, int | float) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def with_bytes(value: Any, file: TorchFile | None) -> Any:
    """A plain value with its small tensors (references into `file`) replaced by tensors that carry their bytes."""
    from .formats.pickles import TensorSpec

    if isinstance(value, TensorRef):
        if file is None or prod(value.shape) > 4096:
            return None
        return TensorSpec(value.dtype, value.shape, file.read(value))
    if type(value) is dict:
        return {k: with_bytes(v, file) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_bytes(v, file) for v in value)
    return value
