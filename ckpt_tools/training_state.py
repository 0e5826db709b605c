"""What a training run needs besides weights, as far as it can move to another layout: optimizer state per parameter, random states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint, is_optimizer
from .errors import CkptError
from .formats.pickles import TensorRef, TensorSpec
from .formats.torch_zip import TorchFile
from .layout import ParallelLayout
from .naming import canonical_tensors
from .notes import Note
from .tensors import TensorMetadata

OBJECT_LIMIT = 64 * 2**20  # bytes; a rank's random state has about 20 kB


def optimizer_per_parameter(checkpoint: Checkpoint, weights: Mapping[str, TensorMetadata]) -> dict[str, TensorMetadata]:
    """The optimizer tensors of a torch_dist checkpoint under `optimizer.state.<state>.<canonical model name>`, shaped like the model's.

    weights  canonical weights, as stored. E414 when the optimizer is stored in a form tied to the layout it was saved with.
    """
    stored = [n for n in checkpoint.tensors if is_optimizer(n)]
    other = [n for n in stored if not n.startswith("optimizer.state.")]
    where = checkpoint.location.directory
    if other:
        raise CkptError(
            "E414",
            "the optimizer state is stored in a form that belongs to the old layout",
            where=f"{where}: {other[0]}",
            expected="one tensor per parameter and state (fully_reshardable, or not distributed)",
            hint="--optimizer none leaves it behind; save with --dist-ckpt-optim-fully-reshardable to keep it",
        )
    tensors = canonical_tensors(checkpoint.locate_all(stored), where)
    for name, tensor in tensors.items():
        model = name.split(".", 3)[3]
        like = weights.get(model)
        if like is None or like.global_shape != tensor.global_shape:
            raise CkptError(
                "E414",
                "the optimizer state does not have the shape of the model",
                where=f"{where}: {name}",
                expected="no such parameter" if like is None else f"{list(like.global_shape)} as {model}",
                found=f"{list(tensor.global_shape)}",
                hint="flattened state of megatron-core 0.8 to 0.15 is not moved yet; --optimizer none leaves it behind",
            )
    return tensors


def with_bytes(value: Any, file: TorchFile) -> Any:
    """A part of the common state with its small tensors (step counts) taken along, ready to be written elsewhere."""
    if isinstance(value, TensorRef):
        return TensorSpec(value.dtype, value.shape, file.read(value))
    if type(value) is dict:
        return {k: with_bytes(v, file) for k, v in value.items()}
    if type(value) is list:
        return [with_bytes(v, file) for v in value]
    if type(value) is tuple:
        return tuple(with_bytes(v, file) for v in value)
    return value


def random_states(checkpoint: Checkpoint, layout: ParallelLayout) -> tuple[list[tuple[str, bytes]], list[Note]]:
    """(full name, stored record) of the random states that the new layout can use, and what is lost.

    They belong to ranks: they are kept when tensor and pipeline sizes stay, byte for byte, and dropped otherwise.
    """
    found = [o for o in checkpoint.objects.values() if o.key == "rng_state"]
    if not found and "rng_state" not in (checkpoint.common or {}):
        return [], []
    lost = [Note("dropped", "rng_state", "random states belong to the ranks of the old layout; Megatron seeds new ones")]
    if not found or any(o.grid[:2] != (layout.pp, layout.tp) or o.extent.length > OBJECT_LIMIT for o in found):
        return [], lost
    kept = []
    for stored in found:
        with open(stored.extent.path, "rb") as file:
            record = os.pread(file.fileno(), stored.extent.length, stored.extent.offset)
        kept.append((stored.fqn, record))
    return kept, [Note("kept", "rng_state", "random states of all ranks, byte for byte: tp and pp stay")]
