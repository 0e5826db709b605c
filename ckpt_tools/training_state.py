"""The state of a run besides weights and optimizer: kept where the new layout can use it, named when it is dropped."""

from __future__ import annotations

import os
import re
from math import prod
from typing import Any

from .checkpoint import Checkpoint
from .dtypes import dtype
from .families.megatron_args import plain
from .formats.pickles import TensorRef, TensorSpec
from .formats.torch_legacy import Legacy
from .formats.torch_zip import TorchFile, open_torch_file
from .formats.torch_zip_writer import dump_file
from .layout import ParallelLayout
from .layout_args import source_layout
from .notes import Note
from .source_files import opened

OBJECT_LIMIT = 64 * 2**20  # bytes; a rank's random state has about 20 kB
# what the writers make anew, and what other modules look after
_OWN = re.compile(r"args|checkpoint_version|iteration|content_metadata|optimizer|model\d*|rng_state")
_LOST = "random states belong to the ranks of the old layout; Megatron seeds new ones"
_OTHER_FORM = "torch has random states per expert rank, torch_dist per data-parallel rank, which are more; Megatron seeds new ones"
_TRANSLATED = "random states of all ranks, value for value, in the form of the other format: tp and pp stay"


def common_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[Note]]:
    """The entries of the common state that any layout can use (schedule, counters, whatever is plain), and what is lost.

    The state of Megatron's rerun machine belongs to ranks; what is no plain value may refer to files of the source.
    """
    common = checkpoint.common or {}
    kept = {k: v for k, v in common.items() if not _OWN.fullmatch(str(k)) and not _of_ranks(k) and plain(v)}
    names = {o.key for o in checkpoint.objects.values()} | set(common)
    lost = [Note("dropped", n, "belongs to the ranks of the old layout") for n in sorted(names) if _of_ranks(n)]
    others = sorted(str(k) for k in common if k not in kept and not _OWN.fullmatch(str(k)) and not _of_ranks(k))
    return kept, lost + [Note("dropped", n, "is no plain value, so it cannot be carried over") for n in others]


def _of_ranks(name: Any) -> bool:
    return str(name).startswith("rerun_state_machine")


def random_states(checkpoint: Checkpoint, layout: ParallelLayout, *, keep: bool = True) -> tuple[list[tuple[str, bytes]], list[Note]]:
    """(full name, stored record) of the random states that torch_dist can keep, and what is lost.

    They belong to ranks: they are kept when tensor and pipeline sizes stay, byte for byte, and dropped otherwise. The legacy format keeps
    the list that a rank's record holds in the rank's file. With experts on several ranks torch_dist has a state per data-parallel rank and
    the legacy format one per expert rank: these are the same ranks where there are as many of both.
    """
    found = [o for o in checkpoint.objects.values() if o.key == "rng_state"]
    if not found and "rng_state" not in (checkpoint.common or {}):
        return [], []
    if not keep:
        return [], [Note("dropped", "rng_state", "random states were left out, as asked")]
    if isinstance(checkpoint.details, Legacy):
        return _from_ranks(checkpoint.details, layout)
    if not found or any(o.grid != _grid(checkpoint, layout, o.grid) or o.extent.length > OBJECT_LIMIT for o in found):
        return [], [Note("dropped", "rng_state", _LOST)]
    kept = []
    for stored in found:
        with opened(stored.extent.path) as file:
            record = os.pread(file.fileno(), stored.extent.length, stored.extent.offset)
        kept.append((stored.fqn, record))
    return kept, [Note("kept", "rng_state", "random states of all ranks, byte for byte: tp and pp stay")]


def _grid(checkpoint: Checkpoint, layout: ParallelLayout, stored: tuple[int, ...]) -> tuple[int, ...]:
    """The grid of random states that a run at `layout` asks for: (pp, tp), and from 0.16 on (pp, tp, dp) where experts are on several ranks
    (get_rng_state in megatron/training/checkpointing.py); () when the experts were spread otherwise."""
    source = source_layout(checkpoint.args or {})
    if source.ep != layout.ep:
        return ()
    grid: tuple[int, ...] = (layout.pp, layout.tp)
    return (*grid, source.dp) if layout.ep > 1 and len(stored) == 3 else grid


def _from_ranks(legacy: Legacy, layout: ParallelLayout) -> tuple[list[tuple[str, bytes]], list[Note]]:
    if (legacy.tp, legacy.pp) != (layout.tp, layout.pp):
        return [], [Note("dropped", "rng_state", _LOST)]
    replicas = layout.arguments()["data_parallel_size"]
    if legacy.ep != layout.ep or (layout.ep > 1 and (replicas != layout.ep or layout.expert_tp != layout.tp)):
        return [], [Note("dropped", "rng_state", _OTHER_FORM)]
    states = {(r.pp, r.tp, r.ep): _with_bytes(r.file.value.get("rng_state"), r.file) for r in legacy.ranks}
    if any(type(state) is not list or not state for state in states.values()):
        return [], [Note("dropped", "rng_state", "some ranks have no random states")]
    axes = 3 if layout.ep > 1 else 2
    size = ".".join(map(str, (layout.pp, layout.tp, replicas)[:axes]))
    records = []
    for place, state in sorted(states.items()):
        records.append((f"rng_state/shard_{'.'.join(map(str, place[:axes]))}_{size}", dump_file([state], "archive")))
    return records, [Note("kept", "rng_state", _TRANSLATED)]


def _from_records(checkpoint: Checkpoint, layout: ParallelLayout) -> dict[tuple[int, int, int], Any]:
    """(tp, pp, ep) -> the list that the rank's record holds; nothing when the layout is another or a record is no such list."""
    found = [o for o in checkpoint.objects.values() if o.key == "rng_state"]
    wanted = {_grid(checkpoint, layout, o.grid) for o in found}
    if wanted != {o.grid for o in found} or len(wanted) != 1 or any(o.extent.length > OBJECT_LIMIT for o in found):
        return {}
    if layout.ep > 1 and (layout.expert_tp != layout.tp or len(next(iter(wanted))) != 3):
        return {}
    states = {}
    for stored in found:
        replica = stored.index[2] if len(stored.index) == 3 else 0
        if replica >= layout.ep:  # of another data-parallel rank, for which the legacy format has no file
            continue
        file = open_torch_file(stored.extent.path, stored.extent.offset, stored.extent.length)
        held = file.value
        value = _with_bytes(held[0] if type(held) is list and len(held) == 1 else None, file)
        if type(value) is not list or not value:
            return {}
        states[stored.index[1], stored.index[0], replica] = value
    return states


def rank_random_states(
    checkpoint: Checkpoint, layout: ParallelLayout, *, keep: bool = True
) -> tuple[dict[tuple[int, int, int], Any], list[Note]]:
    """(tp, pp, ep) -> random state of a rank's file of the legacy format, and what is lost: all of them unless the sizes stay."""
    legacy = checkpoint.details
    if not any(o.key == "rng_state" for o in checkpoint.objects.values()) and "rng_state" not in (checkpoint.common or {}):
        return {}, []
    if not keep:
        return {}, [Note("dropped", "rng_state", "random states were left out, as asked")]
    if isinstance(legacy, Legacy) and (legacy.tp, legacy.pp, legacy.ep) == (layout.tp, layout.pp, layout.ep):
        states = {(r.tp, r.pp, r.ep): _with_bytes(r.file.value.get("rng_state"), r.file) for r in legacy.ranks}
        if all(s is not None for s in states.values()):
            return states, [Note("kept", "rng_state", "random states of all ranks: tp, pp and ep stay")]
    translated = _from_records(checkpoint, layout)
    if len(translated) == layout.tp * layout.pp * layout.ep:
        return translated, [Note("kept", "rng_state", _TRANSLATED)]
    grids = {o.grid[:2] for o in checkpoint.objects.values() if o.key == "rng_state"}
    told = _OTHER_FORM if grids == {(layout.pp, layout.tp)} else _LOST
    return {}, [Note("dropped", "rng_state", f"{told} when it is started with --no-load-rng")]


def _with_bytes(value: Any, file: TorchFile) -> Any:
    """The value with its tensors' bytes in it; None when they are too large for a random state."""
    if isinstance(value, TensorRef):
        size = prod(value.shape) * dtype(value.dtype).itemsize
        return TensorSpec(value.dtype, value.shape, file.read(value)) if size <= OBJECT_LIMIT else None
    if type(value) is dict:
        return {k: _with_bytes(v, file) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_bytes(v, file) for v in value)
    return value
