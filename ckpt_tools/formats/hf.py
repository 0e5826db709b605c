"""The `hf` format: a folder of safetensors with config.json (or one .safetensors file), read without trusting its index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CkptError, nearest
from ..source_files import opened
from ..tensors import TensorMetadata
from .safetensors import read_header, refuse_placeholder

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
JSON_LIMIT = 512 * 2**20  # bytes; a real index of 100,000 tensors has about 10 MB
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp", ".npz")
OTHER_FOLDERS = ("iter_", "checkpoint-", "global_step", "release", "non_persistent")  # of other checkpoints, told by how they begin
SKIPPED_FOLDERS = {".git", ".cache", "__pycache__", ".huggingface"}


@dataclass(frozen=True, slots=True)
class HfFolder:
    """What an HF folder holds: tensors by name, config (None when there is none), the index's weight map (None without an index),
    `__metadata__` of the first file, files in order, and things worth telling."""

    tensors: dict[str, TensorMetadata]
    config: dict[str, Any] | None
    weight_map: dict[str, str] | None
    metadata: dict[str, str] | None
    files: tuple[str, ...]
    warnings: tuple[str, ...]


def open_hf(path: str, *, tolerant: bool = False) -> HfFolder:
    """Headers, index and config of an HF folder or of one .safetensors file.

    tolerant: bytes after the last tensor of a file are a warning instead of an error.

    Errors: E205 placeholder files, E210/E211 broken files, E213 index and files disagree, E214 unsafe path in the index, E215 no weights.
    """
    if os.path.isfile(path):
        header = read_header(path, tolerant=tolerant)
        folder_config = os.path.join(os.path.dirname(path), "config.json")
        config = read_json(folder_config) if os.path.exists(folder_config) else None
        return HfFolder(header.tensors, config, None, header.metadata, (path,), header.warnings)
    config_path = os.path.join(path, "config.json")
    config = read_json(config_path) if os.path.exists(config_path) else None
    names = sorted(os.listdir(path))
    indexes = [n for n in names if n.endswith(".safetensors.index.json")]
    if INDEX_NAME in indexes:
        indexes = [INDEX_NAME]
    if len(indexes) > 1:
        raise CkptError(
            "E213", "several safetensors indexes and none is the usual one", where=path, found=", ".join(indexes), expected=INDEX_NAME
        )
    if indexes:
        return _open_indexed(path, indexes[0], names, config, tolerant)
    files = [n for n in names if n.endswith(".safetensors") and not n.startswith(("adapter_model", "optimizer"))]
    if not files:
        others = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
        raise CkptError(
            "E215",
            "no safetensors weights in this folder",
            where=path,
            found=", ".join(others) or "no weight files",
            hint="pytorch_model.bin is a pickle that ckpt does not read; save it as safetensors with transformers first"
            if others
            else None,
        )
    return _open_unindexed(path, files, config, tolerant)


def _open_unindexed(path: str, files: Sequence[str], config: dict[str, Any] | None, tolerant: bool) -> HfFolder:
    tensors: dict[str, TensorMetadata] = {}
    metadata: dict[str, str] | None = None
    warnings: list[str] = []
    for position, name in enumerate(files):
        header = read_header(os.path.join(path, name), tolerant=tolerant)
        warnings.extend(header.warnings)
        metadata = header.metadata if position == 0 else metadata
        for fqn, tensor in header.tensors.items():
            if fqn in tensors:
                raise CkptError(
                    "E213",
                    f"tensor {fqn!r} is in two files and no index says which one counts",
                    where=path,
                    found=f"{os.path.basename(tensors[fqn].chunks[0].extent.path)} and {name}",  # type: ignore[union-attr]
                    hint="remove the stale file or write an index",
                )
            tensors[fqn] = tensor
    if len(files) > 1:
        warnings.append(f"{len(files)} safetensors files and no index: all of them were read")
    return HfFolder(tensors, config, None, metadata, tuple(os.path.join(path, n) for n in files), tuple(warnings))


def _open_indexed(path: str, index_name: str, names: Sequence[str], config: dict[str, Any] | None, tolerant: bool) -> HfFolder:
    index_path = os.path.join(path, index_name)
    index = read_json(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CkptError("E213", "the index has no weight_map of names to files", where=index_path)
    for name in set(weight_map.values()):
        if not is_safe_name(name):
            fqn = next(n for n, file in weight_map.items() if file == name)
            raise CkptError("E214", "the index sends a tensor to a path outside the folder", where=f"{index_path}: {fqn}", found=repr(name))
    present = set(names)
    headers = {}
    for name in sorted(set(weight_map.values())):
        if name not in present and not os.path.isfile(os.path.join(path, name)):
            lost = [fqn for fqn, n in weight_map.items() if n == name]
            near = [n for n in names if n.lower() == name.lower()] or nearest(name, present, 1)
            raise CkptError(
                "E213",
                f"the index names {name}, which is not in the folder",
                where=index_path,
                found=f"{len(lost)} tensors would be missing, the first is {lost[0]}",
                hint=f"download it again{f'; there is a {near[0]}, which is not the same name' if near else ''}",
            )
        headers[name] = read_header(os.path.join(path, name), tolerant=tolerant)
    tensors, warnings = {}, [w for h in headers.values() for w in h.warnings]
    for fqn, name in weight_map.items():
        found = headers[name].tensors.get(fqn)
        if found is None:
            holders = [n for n, h in headers.items() if fqn in h.tensors]
            raise CkptError(
                "E213",
                f"the index says {fqn} is in {name}, and it is not",
                where=f"{index_path}: {fqn}",
                found=f"it is in {', '.join(holders)}" if holders else "it is in no file",
                hint="`ckpt validate --fix` rebuilds an index from the files",
            )
        tensors[fqn] = found
    for name, header in headers.items():
        for fqn in header.tensors:
            if fqn not in weight_map:
                raise CkptError(
                    "E213",
                    f"{name} holds {fqn}, which the index does not list",
                    where=f"{index_path}: {fqn}",
                    hint="`ckpt validate --fix` rebuilds an index from the files",
                )
            if weight_map[fqn] != name:
                warnings.append(f"{fqn} is also in {name}; the index says {weight_map[fqn]}, which was used")
    total = sum(t.nbytes for t in tensors.values())
    table = index.get("metadata")
    stored = table.get("total_size") if isinstance(table, dict) else None
    if stored != total:
        warnings.append(f"{index_name} says total_size {stored}, the tensors have {total} bytes")
    first = headers[min(headers)] if headers else None
    return HfFolder(
        tensors,
        config,
        dict(weight_map),
        first.metadata if first else None,
        tuple(os.path.join(path, n) for n in sorted(headers)),
        tuple(warnings),
    )


def is_safe_name(name: str) -> bool:
    """True when a path taken from a file stays inside its folder: relative, no `..`, no backslash, no NUL, not empty."""
    if not name or "\0" in name or "\\" in name or os.path.isabs(name):
        return False
    return ".." not in name.split("/") and not any(ord(c) < 32 for c in name)


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file of bounded size. CkptError E205/E216."""
    with opened(path) as file:
        raw = file.read(JSON_LIMIT + 1)
    refuse_placeholder(path, raw[:72])
    if len(raw) > JSON_LIMIT:
        raise CkptError("E216", "JSON file is larger than anything a checkpoint needs", where=path, expected=f"at most {JSON_LIMIT} bytes")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CkptError("E216", "not valid JSON", where=path, found=str(error)[:200]) from None
    if not isinstance(value, dict):
        raise CkptError("E216", "not a JSON object", where=path, found=type(value).__name__)
    return value


def side_files(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(relative names of the files that make an HF folder usable besides its weights and config.json, warnings).

    Tokenizer, generation config, remote code, chat template, licences and anything else small; never weights, their indexes, hidden
    caches or git. git-lfs pointers are left out with a warning. Links are followed (the HF cache is made of links).
    """
    found, warnings = [], []
    if os.path.isfile(path):
        return (), ()
    for folder, folders, names in os.walk(path, followlinks=False):
        folders[:] = sorted(d for d in folders if d not in SKIPPED_FOLDERS and not d.startswith(OTHER_FOLDERS))
        for name in sorted(names):
            full = os.path.join(folder, name)
            relative = os.path.relpath(full, path)
            if name.endswith(WEIGHT_SUFFIXES) or name.endswith((".safetensors.index.json", ".bin.index.json")):
                continue
            if relative in ("config.json", "adapter_config.json") or name == "latest_checkpointed_iteration.txt":
                continue
            if not os.path.isfile(full):  # a pipe, a device, a link to nowhere
                warnings.append(f"{relative}: not a regular file; not copied")
                continue
            with opened(full) as file:
                try:
                    refuse_placeholder(full, file.read(72) if not name.endswith((".html", ".htm")) else b"")
                except CkptError as error:
                    warnings.append(f"{relative}: {error.what}; not copied")
                    continue
            found.append(relative)
    return tuple(found), tuple(warnings)


def split_shards(tensors: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names (with their bytes, in order) cut into shards as huggingface_hub does: a shard is closed when the next tensor would exceed
    `limit` bytes; a larger tensor gets a shard of its own."""
    shards: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, nbytes in tensors:
        if nbytes > limit:
            shards.append([name])
            continue
        if current and size + nbytes > limit:
            shards.append(current)
            current, size = [], 0
        current.append(name)
        size += nbytes
    if current:
        shards.append(current)
    return shards


def shard_names(count: int) -> list[str]:
    """model.safetensors, or model-00001-of-0000N.safetensors when there are several."""
    if count <= 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_bytes(tensors: Mapping[str, TensorMetadata], weight_map: Mapping[str, str]) -> bytes:
    """model.safetensors.index.json as transformers 5 writes it."""
    metadata = {"total_parameters": sum(t.numel for t in tensors.values()), "total_size": sum(t.nbytes for t in tensors.values())}
    return (json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}, indent=2, sort_keys=True) + "\n").encode()
