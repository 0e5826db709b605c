"""The first layers of a model alone: a smaller model with the same widths, to try things on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .errors import CkptError
from .families.dimensions import dimensions
from .megatron_target import Prepared
from .notes import Note
from .tensors import TensorMetadata

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
PER_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq")


def first_layers(ready: Prepared, count: int) -> tuple[Prepared, list[Note]]:
    """The model of the first `count` decoder layers, with embedding, final norm, head and the optimizer state of what is left.

    Errors: E410 when the model has no more layers than that, or none is asked for.
    """
    view = ready.view
    layers = view.dims.layers
    if not 0 < count <= layers:
        raise CkptError("E410", f"the model cannot be cut to {count} layers", expected=f"1 to {layers}")
    if count == layers:
        return ready, []
    args = cut_arguments(view.args, count)
    tensors = within(view.tensors, count)
    told = f"{len(view.tensors) - len(tensors)} tensors of {layers - count} of {layers} layers were left out, as asked"
    cut = replace(view, tensors=tensors, args=args, dims=dimensions(args), keep_dtype=view.keep_dtype & tensors.keys())
    optimizer = ready.optimizer
    if optimizer is not None:
        kept = {n: t for n, t in optimizer.tensors.items() if n in tensors}
        optimizer = replace(optimizer, tensors=kept, dtypes={n: d for n, d in optimizer.dtypes.items() if n in kept})
    return replace(ready, view=cut, optimizer=optimizer), [Note("dropped", "layers", told)]


def cut_arguments(args: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Megatron's arguments for the first `count` layers: lists with one entry per layer are cut too."""
    layers = args["num_layers"]
    cut = {n: args[n][:count] for n in PER_LAYER if isinstance(args.get(n), list | tuple) and len(args[n]) == layers}
    return {**args, **cut, "num_layers": count, "encoder_num_layers": count}


def within(tensors: Mapping[str, TensorMetadata], count: int) -> dict[str, TensorMetadata]:
    """The tensors that belong to the first `count` decoder layers, or to none."""
    return {n: t for n, t in tensors.items() if _keeps(n, count)}


def _keeps(name: str, count: int) -> bool:
    match = _LAYER.search(name)
    return match is None or int(match[1]) < count
