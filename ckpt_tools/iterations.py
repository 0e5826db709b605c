"""The iterations that a folder holds, each with what was seen in it: Megatron's own layout, non_persistent, verl's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .detect import FolderState, folder_state, unfinished_weights, weights_folder
from .tracker import NON_PERSISTENT, RELEASE, VERL_FOLDER, IterationFolder, iteration_folders, list_folder


@dataclass(frozen=True, slots=True)
class Found:
    """An iteration folder together with what was seen in it; path is the folder to open, which verl keeps two levels deeper."""

    folder: IterationFolder
    path: str
    state: FolderState
    weights: str | None

    @property
    def label(self) -> str:
        return self.folder.label

    @property
    def complete(self) -> bool:
        return self.state.format is not None and not self.state.missing


def find_all(root: str, *, keep_release: bool) -> list[Found]:
    """Every iteration in `root` and in its non_persistent root, by number; for one number the persistent one comes first."""
    weights = weights_folder(root)
    found = [look(folder, weights) for folder in iteration_folders(root)]
    second = os.path.join(root, NON_PERSISTENT)
    if os.path.isdir(second):
        found += [look(folder, None) for folder in iteration_folders(second)]
    kept = [f for f in found if f.label != RELEASE or keep_release or f.state.format not in (None, "hf")]
    return sorted(kept, key=lambda f: (f.folder.number is None, f.folder.number or 0))  # stable: order within one number stays


def look(folder: IterationFolder, root_weights: str | None) -> Found:
    if VERL_FOLDER.match(os.path.basename(folder.path)):
        return look_verl(folder, folder.path)
    weights = root_weights or weights_folder(folder.path, os.path.join(folder.path, "hf"))
    state = folder_state(folder.path, weights_beside=weights is not None)
    unfinished = unfinished_weights(list_folder(weights)) if weights else ()
    if unfinished and state.format == "state":
        state = replace(state, missing=(*state.missing, *unfinished))
    return Found(folder, folder.path, state, None if state.format == "hf" else weights)


def look_verl(folder: IterationFolder, start: str) -> Found:
    """verl keeps global_step_N/{actor,critic}/{dist_ckpt,huggingface}; `start` is the step, the role or the dist_ckpt folder itself."""
    holders = [start, os.path.join(start, "actor"), os.path.join(start, "critic")]
    if os.path.basename(os.path.abspath(start)) == "dist_ckpt":
        holders = [os.path.dirname(os.path.abspath(start))]
    for holder in holders:
        inner = os.path.join(holder, "dist_ckpt")
        if os.path.isdir(inner):
            weights = weights_folder(os.path.join(holder, "huggingface"))
            state = folder_state(inner, weights_beside=weights is not None)
            critic = os.path.join(folder.path, "critic")
            if os.path.basename(holder) == "actor" and start == folder.path and os.path.isdir(critic):
                state = replace(state, remarks=(*state.remarks, f"the actor is read; point at {critic} for the critic"))
            return Found(folder, inner, state, weights)
    for holder in holders:
        weights = weights_folder(os.path.join(holder, "huggingface"))
        if weights:
            return Found(folder, weights, folder_state(weights), None)
    sharded = [h for h in holders if os.path.isdir(h) and any(n.startswith("model_world_size_") for n in list_folder(h))]
    reason = " (verl saved with FSDP: its model_world_size_* files are pickles that ckpt does not read)" if sharded else ""
    return Found(folder, start, FolderState(None, (f"actor/dist_ckpt{reason}",)), None)


def verl_step(given: str) -> tuple[IterationFolder, str] | None:
    """(the global_step_N folder, where to start looking) for global_step_N, global_step_N/ROLE and their dist_ckpt; else None."""
    path = os.path.abspath(given)
    start = path
    if os.path.basename(path) == "dist_ckpt":
        path = os.path.dirname(path)
    for step in (path, os.path.dirname(path)):
        match = VERL_FOLDER.match(os.path.basename(step))
        if match:
            if step != start and path == start and not os.path.isdir(os.path.join(path, "dist_ckpt")):
                return None
            return IterationFolder(str(int(match[1])), int(match[1]), step), start
    return None


def newest_complete(found: Sequence[Found]) -> Found | None:
    whole = [f for f in found if f.complete]
    numbered = [f for f in whole if f.folder.number is not None]
    return (numbered or whole)[-1] if whole else None


def number_of(label: str) -> int | None:
    return None if label == RELEASE else int(label)


def shorten(items: Sequence[str], limit: int = 12) -> str:
    if len(items) <= limit:
        return ", ".join(items)
    return f"{', '.join(items[: limit // 2])}, ... {len(items) - limit} more ..., {', '.join(items[-limit // 2 :])}"


def listing(found: Sequence[Found]) -> str:
    return shorten([f.label if f.complete else f"{f.label} (incomplete)" for f in found])
