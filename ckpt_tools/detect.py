"""What a folder holds, told from file names and a few bounded metadata files: its format, what an interrupted save lacks, who wrote it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from .errors import CkptError
from .formats.safetensors import refuse_placeholder
from .tracker import ITERATION_FOLDER, VERL_FOLDER, list_folder, read_head

METADATA_JSON_LIMIT = 2**20  # bytes; a real one has about 120
SEARCH_LIMIT = 64 * 2**20  # bytes of .metadata looked through for one key name
RANK_FOLDER = re.compile(r"mp_rank_[0-9]{2,}(_[0-9]{3,}){0,3}\Z")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt", "optim.pt")  # the last two: Megatron-LM 2022-03 to 2023-05, distributed optimizer
UNFINISHED = re.compile(r"-of-\?+\.safetensors\Z")  # mcore-bridge renames its shards at the very end
NOT_WEIGHTS = ("adapter_model", "optimizer")


@dataclass(frozen=True, slots=True)
class FolderState:
    """One iteration folder: format (None when nothing was recognised), what is missing (empty = complete), remarks for people."""

    format: str | None
    missing: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def folder_state(path: str, *, weights_beside: bool = False) -> FolderState:
    """Format and completeness of one iteration folder, in Megatron-LM's order (training/checkpointing.py _get_checkpoint_format):
    metadata.json, then mp_rank_*, then .metadata. Reads no tensor file and unpickles nothing.

    weights_beside: True when safetensors weights lie at the root, which makes a folder with common.pt alone legal (ms-swift).
    """
    if not os.path.isdir(path):
        return FolderState(None, ("the folder itself (a link that leads nowhere)",))
    names = list_folder(path)
    present = set(names)
    backend, trouble = _sharded_backend(path) if "metadata.json" in present else (None, None)
    if backend == "zarr" or (backend is None and _has_zarr(path, names)):
        return FolderState("zarr", _zarr_missing(path, names, backend, trouble))
    if backend not in (None, "torch_dist"):
        return FolderState(None, (), (f"metadata.json names the sharded_backend {backend!r}, which ckpt does not know",))
    if backend is None and any(RANK_FOLDER.match(n) for n in names):
        return FolderState("torch", _legacy_missing(path, names))
    blobs = [n for n in names if n.endswith(".distcp")]
    if backend is None and trouble is None and ".metadata" in present and not _is_torch_dist_without_json(path, present):
        lost = (_trouble(path, ".metadata", present), None if blobs else "*.distcp", *_leftover(present))
        return FolderState("torch_dcp", tuple(name for name in lost if name))
    if backend or trouble or blobs or {".metadata", ".metadata.tmp"} & present:
        return FolderState("torch_dist", _torch_dist_missing(path, present, backend, trouble))
    if "common.pt" in present:
        broken = _trouble(path, "common.pt", present)
        if broken or not weights_beside:
            return FolderState("state", (broken,) if broken else (".metadata", "metadata.json", "*.distcp"))
        return FolderState("state", ())
    if safetensors_files(names):
        return FolderState("hf", tuple(n for n in names if UNFINISHED.search(n)))
    return FolderState(
        None, ("every file that ckpt knows (metadata.json, .metadata, mp_rank_*)" if names else "everything (the folder is empty)",)
    )


def refuse_placeholders(path: str, names: Collection[str] = ("metadata.json", ".metadata", "common.pt")) -> None:
    """CkptError E205 when one of the small files of an iteration folder is a git-lfs pointer or an HTML page."""
    for name in names:
        full = os.path.join(path, name)
        if os.path.isfile(full):
            refuse_placeholder(full, read_head(full, 128))


def safetensors_files(names: Collection[str]) -> list[str]:
    """Those of `names` that are safetensors weights of a model, adapters left out."""
    return [n for n in names if n.endswith(".safetensors") and not n.startswith(NOT_WEIGHTS)]


def is_hf(names: Collection[str]) -> bool:
    """True when the names in a folder are those of an HF model folder (weights, their index, or at least config.json)."""
    return bool(safetensors_files(names)) or any(
        n == "config.json" or n.endswith(".safetensors.index.json") or n.startswith("pytorch_model") for n in names
    )


def is_peft(names: Collection[str]) -> bool:
    """True when a folder holds a PEFT adapter and no model weights of its own."""
    adapter = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"} & set(names)
    return bool(adapter) and not safetensors_files(names)


def unfinished_weights(names: Collection[str]) -> tuple[str, ...]:
    """Shards still called model-00001-of-?????.safetensors: an export by mcore-bridge that did not end."""
    return tuple(n for n in names if UNFINISHED.search(n))


def weights_folder(*folders: str | None) -> str | None:
    """The first of `folders` that holds safetensors weights of a model; None when none does."""
    for folder in folders:
        if folder is not None and os.path.isdir(folder):
            names = list_folder(folder)
            if safetensors_files(names) or any(n.endswith(".safetensors.index.json") for n in names):
                return folder
    return None


def producer(root: str | None, directory: str) -> str | None:
    """Which software made the layout, as far as file names tell; None when they tell nothing."""
    beside = set(list_folder(root)) if root and os.path.isdir(root) else set()
    inside = set(list_folder(directory)) if os.path.isdir(directory) else set()
    parts = os.path.abspath(directory).split(os.sep)
    if any(VERL_FOLDER.match(part) for part in parts[-3:]):
        return "verl"
    if "latest_train_state.pt" in beside or {"run_config.yaml", "train_state.pt"} & inside:
        return "megatron-bridge"
    rollout = os.path.join(root, "rollout") if root else ""
    if "rollout" in beside and os.path.isdir(rollout) and any(n.startswith("global_dataset_state_dict_") for n in list_folder(rollout)):
        return "slime"
    if "args.json" in beside:
        return "ms-swift"
    if beside and any(ITERATION_FOLDER.match(n) or n == "release" for n in beside):
        return "megatron-lm"
    return None


def _sharded_backend(path: str) -> tuple[str | None, str | None]:
    """(sharded_backend of metadata.json or None, what is wrong with the file or None). A JSON about something else is neither."""
    value = _metadata_json(path)
    if isinstance(value, str):
        return None, value
    backend = value.get("sharded_backend")
    return (backend, None) if isinstance(backend, str) else (None, None)


def _metadata_json(path: str) -> dict[str, object] | str:
    raw = read_head(os.path.join(path, "metadata.json"), METADATA_JSON_LIMIT + 1)
    if not raw.strip():
        return "metadata.json (empty)"
    if _is_placeholder(raw):
        return "metadata.json (a placeholder, not the file)"
    try:
        value = json.loads(raw.decode("utf-8-sig")) if len(raw) <= METADATA_JSON_LIMIT else None
    except (ValueError, RecursionError):
        return "metadata.json (not valid JSON)"
    return value if isinstance(value, dict) else "metadata.json (not a JSON object)"


def _names_common_backend(path: str) -> bool:
    # megatron-core up to 0.18 names it and writes common.pt; 0.19 keeps the same dict as an object inside the .distcp files.
    value = _metadata_json(path)
    return isinstance(value, dict) and value.get("common_backend") is not None


def _is_torch_dist_without_json(path: str, present: set[str]) -> bool:
    # torch_dcp and a torch_dist save cut off just before metadata.json look alike, but only the latter has common.pt or a common_state key.
    return "common.pt" in present or _mentions_common_state(path, present)


def _mentions_common_state(path: str, present: set[str]) -> bool:
    if ".metadata" not in present or not os.path.isfile(os.path.join(path, ".metadata")):
        return False
    return b"common_state/shard_" in read_head(os.path.join(path, ".metadata"), SEARCH_LIMIT)


def _trouble(path: str, name: str, present: set[str]) -> str | None:
    """None when the file is there and has bytes of its own; else its name, with the reason when it is not plain absence."""
    full = os.path.join(path, name)
    if name not in present:
        return name
    if not os.path.isfile(full):
        return f"{name} (a link that leads nowhere)" if os.path.islink(full) else f"{name} (not a file)"
    head = read_head(full, 128)
    if not head:
        return f"{name} (empty)"
    return f"{name} (a placeholder, not the file)" if _is_placeholder(head) else None


def _is_placeholder(head: bytes) -> bool:
    try:
        refuse_placeholder("", head)
    except CkptError:
        return True
    return False


def _torch_dist_missing(path: str, present: set[str], backend: str | None, trouble: str | None) -> tuple[str, ...]:
    missing: list[str | None] = [_trouble(path, ".metadata", present), trouble or (None if backend else "metadata.json")]
    # Without metadata.json nothing says whether a common.pt belongs here, unless .metadata has the common_state that took its place.
    if _names_common_backend(path) if backend else not _mentions_common_state(path, present):
        missing.append(_trouble(path, "common.pt", present))
    missing.append(None if any(n.endswith(".distcp") for n in present) else "*.distcp")
    return tuple(name for name in (*missing, *_leftover(present)) if name)


def _leftover(present: set[str]) -> tuple[str, ...]:
    # torch writes .metadata.tmp and renames it: with both there, a second save into the folder was cut off and the blobs may be its own.
    return (".metadata of the last save (only .metadata.tmp is there)",) if {".metadata.tmp", ".metadata"} <= present else ()


def _legacy_missing(path: str, names: list[str]) -> tuple[str, ...]:
    missing, models = [], 0
    for name in names:
        if RANK_FOLDER.match(name):
            files = [f for f in RANK_FILES if os.path.isfile(os.path.join(path, name, f)) and os.path.getsize(os.path.join(path, name, f))]
            models += any(f != "optim.pt" for f in files)
            if not files:
                missing.append(f"{name}/{RANK_FILES[0]}")
    if not models and not missing:
        missing.append(f"mp_rank_*/{RANK_FILES[0]}")
    return tuple(missing)


def _has_zarr(path: str, names: list[str]) -> bool:
    return any(os.path.isfile(os.path.join(path, n, ".zarray")) for n in names[:64] if not n.startswith("mp_rank_"))


def _zarr_missing(path: str, names: list[str], backend: str | None, trouble: str | None) -> tuple[str, ...]:
    missing = [trouble or (None if backend else "metadata.json"), _trouble(path, "common.pt", set(names))]
    if not any(os.path.isfile(os.path.join(path, n, ".zarray")) for n in names):
        missing.append("*/.zarray")
    return tuple(m for m in missing if m)
