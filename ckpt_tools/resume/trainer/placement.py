"""Where a piece of a parameter lies in the whole model: the global tensor, the offset and the data, as sharded_state_dict says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories


@dataclass(frozen=True, slots=True)
class Piece:
    """Part `data` (axes as the whole tensor) of the tensor `key` of `shape`, at `offset`; counts: not another rank's copy."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Any
    counts: bool


class Placement:
    """The pieces of every tensor of one model chunk."""

    def __init__(self, model: Any) -> None:
        state, _ = extract_sharded_tensors_and_factories(model.sharded_state_dict(metadata={"singleton_local_shards": False}))
        self.entries = list(nested_values(state))
        self._of = {id(entry.data): entry for entry in self.entries}

    def pieces(self, parameter: Any, data: Any) -> Iterator[Piece]:
        """`data`, which has as many elements as `parameter`, cut as the parameter is cut; nothing is copied."""
        yield from _pieces(self._of[id(parameter)], data.view(parameter.shape))

    def all(self) -> Iterator[Piece]:
        """The weights themselves, buffers that are saved included."""
        for entry in self.entries:
            yield from _pieces(entry, entry.data.detach())


def _pieces(entry: Any, data: Any) -> Iterator[Piece]:
    if isinstance(entry, ShardedTensorFactory):
        parts = list(nested_values({"_": replace(entry, data=data).build()}))
    else:
        parts = [replace(entry, data=data, dtype=data.dtype)]
    for part in parts:
        local = part.data[(None,) * part.prepend_axis_num] if part.prepend_axis_num else part.data
        replica = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id,)
        yield Piece(part.key, tuple(part.global_shape), tuple(part.global_offset), local, not any(replica))


def initialise(placement: Placement) -> None:
    """Weights that depend on their place in the whole model only, so that every layout starts from the same model."""
    with torch.no_grad():
        for piece in placement.all():
            generator = torch.Generator().manual_seed(sum(number * ord(letter) for number, letter in enumerate(piece.key, 1)))
            whole = torch.randn(piece.shape, generator=generator, dtype=torch.float32) * 0.05
            if piece.key.endswith("expert_bias"):
                whole.zero_()
            elif "norm" in piece.key:
                whole = 1.0 + whole if piece.key.endswith("weight") else whole
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True))
            piece.data.copy_(whole[box])
