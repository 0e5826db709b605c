"""Finds the flat buffers of a distributed optimizer in a torch_dist checkpoint, and which rank and which parameters each belongs to.

Sources: Megatron-LM optimizer/distrib_optimizer.py (dp_reshardable, fully_sharded_bucket_space, dp_zero_gather_scatter; 0.7 to 0.19),
optimizer/optimizer.py ChainedOptimizer, parallel_state.py (numbers of model-parallel groups).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..formats.pickles import DTypeRef, TensorRef
from ..formats.torch_dist import Locator, StoredObject, read_object
from ..formats.torch_zip import TorchFile, open_torch_file
from ..layout import expert_count
from ..memory.names import Rank
from ..tensors import Extent, TensorMetadata
from .cut import Buffer, RankBuffers
from .flat import flat_of, make_flat
from .order import Model, rank_parameters

_GROUP = r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
_BUCKET = re.compile(
    _GROUP + r"gbuf_idx_(?P<buffer>\d+)\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$"
)
_OBJECT = re.compile(_GROUP + r"(?P<what>\w+)$")
_SKIPPED = ("step", "padding")
Owner = tuple[int, int]  # (number of the optimizer in the chain, number of the model-parallel group)


def owned_objects(checkpoint: Checkpoint, what: str) -> dict[Owner, StoredObject]:
    """The objects `...dp_group_idx_G.<what>` by owner."""
    found = {}
    for stored in checkpoint.objects.values():
        match = _OBJECT.match(stored.key)
        if match and match["what"] == what:
            found[int(match["optimizer"] or 0), int(match["group"])] = stored
    return found


def bucket_buffers(checkpoint: Checkpoint) -> dict[Owner, list[Buffer]]:
    """The buffers stored bucket by bucket. E226 when numbers of buffers or buckets are missing."""
    where = checkpoint.location.directory
    found: dict[Owner, dict[int, tuple[str, dict[str, dict[int, TensorMetadata]]]]] = {}
    with Locator(checkpoint.tensors) as locator:
        for name, tensor in checkpoint.tensors.items():
            match = _BUCKET.match(name)
            if match is None or match["state"] in _SKIPPED:
                continue
            owner = (int(match["optimizer"] or 0), int(match["group"]))
            _, states = found.setdefault(owner, {}).setdefault(int(match["buffer"]), (match["dtype"], {}))
            states.setdefault(match["state"], {})[int(match["bucket"])] = locator.tensor(tensor)
    unpadded, padded = (_recorded(checkpoint, what) for what in ("per_bucket_numel_unpadded", "per_bucket_numel"))
    result: dict[Owner, list[Buffer]] = {}
    for owner, buffers in sorted(found.items()):
        _check_numbers(buffers, f"{where}: buffers of model-parallel group {owner[1]}")
        result[owner] = []
        for number, (kind, states) in sorted(buffers.items()):
            flats = {}
            for state, buckets in states.items():
                _check_numbers(buckets, f"{where}: buckets of buffer {number} of group {owner[1]}")
                flats[state] = tuple(flat_of(buckets[k]) for k in sorted(buckets))
            sizes = tuple(f.numel for f in next(iter(flats.values())))
            true, full = unpadded.get(owner, {}).get(number), padded.get(owner, {}).get(number)
            if true is None:  # before the sizes were stored: the tensors are as long as the padded or the unpadded buckets
                true = sizes
            elif sizes not in (true, full):
                raise CkptError(
                    "E226",
                    "the sizes of the optimizer's buckets are recorded otherwise than they are stored",
                    where=f"{where}: group {owner[1]}, buffer {number}",
                    expected=f"{list(true)[:8]}",
                    found=f"{list(sizes)[:8]}",
                )
            result[owner].append(Buffer(kind, flats, False, true, full or true))
    return result


def _check_numbers(found: Mapping[int, Any], where: str) -> None:
    if set(found) != set(range(len(found))):
        raise CkptError("E226", "parts of the optimizer's flat buffers are missing", where=where, found=f"numbers {sorted(found)[:16]}")


def _recorded(checkpoint: Checkpoint, what: str) -> dict[Owner, dict[int, tuple[int, ...]]]:
    """Recorded bucket sizes: owner -> buffer -> elements per bucket."""
    result: dict[Owner, dict[int, tuple[int, ...]]] = {}
    for owner, stored in owned_objects(checkpoint, what).items():
        value = read_object(stored)
        for number, table in enumerate(_buffers_listed(value)):
            sizes = list(table.values()) if isinstance(table, dict) else []
            if len(sizes) != 1 or not isinstance(sizes[0], list) or not all(type(n) is int and n > 0 for n in sizes[0]):
                raise CkptError(
                    "E226", f"{what} does not list sizes of buckets", where=f"{stored.extent.path}: {stored.fqn}", found=repr(value)[:200]
                )
            result.setdefault(owner, {})[number] = tuple(sizes[0])
    return result


def _buffers_listed(value: Any) -> list[Any]:
    # one table per buffer; read_object has taken the list of a single one for its own wrapping
    return value if isinstance(value, list) else [value]


def world_buffers(value: Any, file: TorchFile) -> list[Buffer]:
    """The buffers of one optimizer in a gathered ("world") state: a dp_zero_gather_scatter object or one of a distrib_optim.pt.

    {"buckets_coalesced": True, buffer: {(param dtype, grad dtype): {"param": f32[N], ..., "numel_unpadded": N}}}; before February 2024
    {buffer: {torch.float32: {"param": [f32 per bucket], ...}}}. CkptError E226 for anything else.
    """
    if not isinstance(value, dict):
        raise CkptError("E226", "the gathered optimizer state is not a table", where=file.where, found=type(value).__name__)
    numbered = {k: v for k, v in value.items() if type(k) is int}
    _check_numbers(numbered, f"{file.where}: buffers")
    return [_world_buffer(numbered[k], file) for k in sorted(numbered)]


def _world_buffer(table: Any, file: TorchFile) -> Buffer:
    if not isinstance(table, dict) or len(table) != 1:
        raise CkptError("E226", "a gathered buffer should hold parameters of one dtype", where=file.where, found=repr(table)[:200])
    ((key, states),) = table.items()
    kind = key[0] if isinstance(key, tuple) and key else key
    if not isinstance(kind, DTypeRef) or not isinstance(states, dict):
        raise CkptError("E226", "a gathered buffer is not a table by dtype", where=file.where, found=repr(key)[:100])
    if not isinstance(key, tuple):
        raise CkptError(
            "E226",
            "this optimizer state is from before February 2024, when buckets were laid out in another way",
            where=file.where,
            hint="load it with Megatron's --ckpt-convert-update-legacy-dist-opt-format and save it again",
        )
    flats = {}
    for state, ref in states.items():
        if not isinstance(ref, TensorRef):
            continue
        start, strides = file.extent(ref)
        if len(ref.shape) != 1 or (ref.shape[0] > 1 and ref.strides != (1,)):
            raise CkptError(
                "E226", f"{state} of a gathered buffer is not a flat tensor", where=file.where, found=f"shape {list(ref.shape)}"
            )
        item = strides[0] if ref.shape[0] > 1 else 4
        extent = Extent(file.path, start, ref.shape[0] * item, strides)
        flats[str(state)] = (make_flat(f"{file.where}: {state}", ref.dtype, ref.shape[0], [(0, ref.shape[0], extent)]),)
    if len({f[0].numel for f in flats.values()}) != 1:
        raise CkptError(
            "E226", "the states of a gathered buffer differ in length", where=file.where, found=f"{[f[0].numel for f in flats.values()]}"
        )
    return Buffer(kind.name, flats, True)


def gathered_buffers(checkpoint: Checkpoint) -> dict[Owner, list[Buffer]]:
    """The buffers of a dp_zero_gather_scatter checkpoint."""
    result = {}
    for owner, stored in owned_objects(checkpoint, "param_state").items():
        extent = stored.extent
        file = open_torch_file(extent.path, extent.offset, extent.length, where=f"{extent.path}: {stored.fqn}")
        value = file.value[0] if isinstance(file.value, list) and len(file.value) == 1 else file.value
        if value is not None:
            result[owner] = world_buffers(value, file)
    return result


def optimizers(owners: Sequence[Owner]) -> int:
    """Number of optimizers in the chain."""
    return 1 + max((o for o, _ in owners), default=0)


def assigned(found: Mapping[Owner, Sequence[Buffer]], model: Model, spec: str, experts: str, where: str, chain: int) -> list[RankBuffers]:
    """Each owner's buffers with the place of its rank and the parameters its optimizer has there. E226 when the numbers cannot be right.

    Of several optimizers the last is that of the experts; two before it share the model chunks (the first chunk apart).
    """
    layout = model.layout
    apart = chain > 1
    if apart and not expert_count(model.tensors):
        raise CkptError(
            "E226", f"{chain} chained optimizers for a model without experts: ckpt does not know which parameters each has", where=where
        )
    dense = chain - apart
    ranks: list[RankBuffers] = []
    for optimizer in range(chain):
        for_experts = apart and optimizer == chain - 1
        stage = layout.expert_tp * layout.ep if for_experts else layout.tp
        sharing = max(1, layout.tp * layout.dp * layout.cp // (layout.expert_tp * layout.ep)) if for_experts else layout.dp * layout.cp
        extra = [g for o, g in found if o == optimizer and g >= stage * layout.pp]
        if extra:
            raise CkptError(
                "E226",
                "there are optimizer buffers of more model-parallel ranks than the checkpoint's arguments say",
                where=where,
                expected=f"{stage} x pp {layout.pp}",
                found=f"group {max(extra)}",
            )
        for group in range(stage * layout.pp):
            place = _place(group, for_experts, layout.tp, layout.expert_tp, layout.ep)
            chunks = rank_parameters(model, place, spec, experts)
            if apart:
                chunks = [[p for p in chunk if p.expert == for_experts] for chunk in chunks]
            if dense > 1 and not for_experts:
                chunks = chunks[:1] if optimizer == 0 else chunks[1:]
            buffers = found.get((optimizer, group), ())
            name = f"{where}: optimizer {optimizer}, tp {place.tp} pp {place.pp} ep {place.ep} etp {place.etp}"
            ranks.append(RankBuffers(name, place, chunks, buffers, sharing))
    return ranks


def _place(group: int, for_experts: bool, tp: int, etp: int, ep: int) -> Rank:
    if for_experts:
        return Rank(group % etp, group // (etp * ep), group // etp % ep, group % etp)
    return Rank(group % tp, group // tp, 0, 0)
