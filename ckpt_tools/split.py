"""Split checkpoints: weights once as safetensors at the root, the rest of the training state in the iteration folder beside them.

Sources: ms-swift save_safetensors, verl's `huggingface/` beside `dist_ckpt/` (no model key in the distributed part).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checkpoint import Checkpoint, is_optimizer
from .errors import CkptError
from .formats.pickles import Namespace
from .formats.torch_dist import Locator
from .model_names import EMBEDDING
from .naming import local_spec_key, of_local_spec
from .tensors import Chunk, Decode, TensorMetadata
from .views import as_mcore

_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def join(state: Checkpoint, weights: Checkpoint, *, family: str | None = None) -> Checkpoint:
    """One Megatron checkpoint made of the training state in an iteration folder and the HF weights that belong to it.

    The vocabulary gets the rows that the run had; those beyond the model's own are rounded from the optimizer's float32 weights, where
    it has them, and zero otherwise. The model's sizes are told by the HF config, everything else by the arguments of the run.
    Errors: CkptError as views.as_mcore; E410 when the state is in a format without names.
    """
    if state.format not in ("torch_dist", "state"):
        raise CkptError(
            "E410", f"weights cannot be joined to the training state of the format {state.format!r}", where=state.location.directory
        )
    rows = _padded_rows(state)
    view = as_mcore(weights, family=family, padded_vocab=rows, allow_unrepresentable=True)
    masters = _masters(state, view.tensors)
    tensors = {n: _filled(t, masters.get(n)) for n, t in view.tensors.items()}
    if of_local_spec(n for n in state.tensors if is_optimizer(n)):  # its state is spelled as its weights were
        latent = any("self_attention.linear_kv_down_proj." in n for n in tensors)
        tensors = {local_spec_key(n, latent=latent): t for n, t in tensors.items()}
    stored = dict(state.args or {})
    shape = {k: v for k, v in view.args.items() if k != "padded_vocab_size" or rows}
    args = Namespace({**stored, **shape, "vocab_size": stored.get("vocab_size") or view.args.get("vocab_size")})
    return replace(
        state,
        format="torch_dist",
        location=replace(state.location, format="torch_dist", weights=None),
        tensors={**tensors, **{n: t for n, t in state.tensors.items() if is_optimizer(n)}},
        common={**(state.common or {}), "args": args},
    )


def places_looked_at(checkpoint: Checkpoint) -> str:
    """Where weights were looked for and not found."""
    location = checkpoint.location
    places = [location.directory, os.path.join(location.directory, "hf"), location.root, os.path.dirname(location.directory)]
    return ", ".join(dict.fromkeys(p for p in places if p))


def _padded_rows(state: Checkpoint) -> int | None:
    for name, tensor in state.tensors.items():
        if is_optimizer(name) and name.endswith(EMBEDDING) and len(tensor.global_shape) == 2:
            return tensor.global_shape[0]
    rows = (state.args or {}).get("padded_vocab_size")
    return rows if isinstance(rows, int) and rows > 0 else None


def _masters(state: Checkpoint, wanted: Mapping[str, Any]) -> dict[str, TensorMetadata]:
    """The optimizer's float32 weights that are stored under a parameter's own name: those of the vocabulary always are."""
    found = {}
    with Locator(state.tensors) as locator:
        for name, tensor in state.tensors.items():
            for prefix in _MASTERS:
                if name.startswith(prefix) and (bare := name.removeprefix(prefix)) in wanted and tensor.dtype == "float32":
                    found[bare] = locator.tensor(tensor)
    return found


def _filled(tensor: TensorMetadata, master: TensorMetadata | None) -> TensorMetadata:
    if master is None or master.global_shape != tensor.global_shape or all(c.extent is not None for c in tensor.chunks):
        return tensor
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        if chunk.extent is not None:
            chunks.append(chunk)
            continue
        for part in master.region(chunk.global_offset, chunk.local_shape):
            chunks.append(replace(part, decode=None if tensor.dtype == "float32" else Decode("add", "float32")))
    return replace(tensor, chunks=tuple(chunks))
