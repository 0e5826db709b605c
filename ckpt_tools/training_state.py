"""The random states of a run: kept with their layout, dropped with a word otherwise."""

from __future__ import annotations

import os

from .checkpoint import Checkpoint
from .layout import ParallelLayout
from .notes import Note

OBJECT_LIMIT = 64 * 2**20  # bytes; a rank's random state has about 20 kB


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
