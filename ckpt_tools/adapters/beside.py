"""A PEFT adapter that lies beside a model's weights: carried along when asked for, named when not."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..checkpoint import Checkpoint
from ..notes import Note
from ..planning import Copied
from .peft import CONFIG, WEIGHTS, open_adapter


def adapter_beside(checkpoint: Checkpoint) -> str | None:
    """The folder with an adapter that belongs to a checkpoint: its own, or the root of its run (ms-swift's checkpoint-N)."""
    places = (checkpoint.folder, checkpoint.location.weights, checkpoint.location.root)
    return next((p for p in places if p and all(os.path.isfile(os.path.join(p, n)) for n in (CONFIG, WEIGHTS))), None)


def carried_adapter(checkpoint: Checkpoint, *, wanted: bool) -> tuple[tuple[Copied, ...], list[Note]]:
    """The adapter's two files, copied to the root of the target: its modules have HF names, whatever form the weights get.

    Errors: those of open_adapter, when it is wanted.
    """
    folder = adapter_beside(checkpoint)
    if folder is None:
        return (), [Note("warning", "adapter", "there is no adapter beside this checkpoint")] if wanted else []
    if not wanted:
        return (), [Note("dropped", f"{CONFIG}, {WEIGHTS}", "an adapter lies beside the weights; --adapter takes it along")]
    adapter = open_adapter(folder)
    paths: Mapping[str, str] = {n: os.path.join(folder, n) for n in (CONFIG, WEIGHTS)}
    copies = tuple(Copied(path, name, os.path.getsize(path)) for name, path in paths.items())
    return copies, [Note("carried", ", ".join(paths), f"an adapter of {len(adapter.pairs)} modules, which is not part of the weights")]
