"""Reading the `torch_dist` format: Megatron-Core's distributed checkpoint, an index (`.metadata`) over torch.save records in .distcp files.

Opening reads `.metadata` only. Sources: Megatron-LM dist_checkpointing 0.8 to 0.19, torch 2.13 distributed/checkpoint.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import DTYPES
from ..errors import CkptError
from ..source_files import open_source, opened
from ..tensors import Chunk, Extent, Shape, TensorMetadata
from . import pickles, torch_zip
from .hf import is_safe_name, read_json

METADATA_LIMIT = 4 * 2**30  # bytes of .metadata; about 900 per stored piece
_OBJECT = re.compile(r"^(?P<key>.+)/shard_(?P<offset>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)$")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A pickled object inside a .distcp file: key without the shard suffix, its place in the grid of shards, where its record lies."""

    fqn: str
    key: str
    index: Shape
    grid: Shape
    extent: Extent


@dataclass(frozen=True, slots=True)
class TorchDist:
    """An opened torch_dist folder: tensors (extents not located yet), objects by full name, common state (None when there is none and
    none is needed), where that came from ("common.pt" / "common_state"), metadata.json, mcore_data of flattened tensors, warnings."""

    directory: str
    tensors: dict[str, TensorMetadata]
    objects: dict[str, StoredObject]
    common: dict[str, Any] | None
    common_source: str | None
    backend: dict[str, Any]
    original_shapes: dict[str, Shape]
    has_plans: bool
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    common_file: torch_zip.TorchFile | None = None


def open_torch_dist(directory: str) -> TorchDist:
    """Index and common state of a torch_dist folder (or of a plain DCP folder, which has no metadata.json).

    Errors: E203 broken pickle or record, E501 foreign code in a pickle, E214 unsafe path, E217 files missing or too short,
    E218 broken index.
    """
    collecting = gc.isenabled()
    gc.disable()  # a million new objects and no garbage: collections would take most of the time
    try:
        return _open(directory)
    finally:
        if collecting:
            gc.enable()


def _open(directory: str) -> TorchDist:
    path = os.path.join(directory, ".metadata")
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > METADATA_LIMIT:
            raise CkptError(
                "E218",
                ".metadata is larger than ckpt will load",
                where=path,
                expected=f"at most {METADATA_LIMIT} bytes",
                found=f"{size} bytes",
            )
        root = pickles.load(file.read(size), where=path, policy="metadata")
    try:
        table, storage = root.state_dict_metadata, root.storage_data
    except AttributeError:
        raise CkptError("E218", ".metadata does not hold a checkpoint index", where=path, found=type(root).__name__) from None
    if not isinstance(table, dict) or not isinstance(storage, dict):
        raise CkptError("E218", ".metadata does not hold a checkpoint index", where=path)
    extents = _extents(storage, directory, path)
    tensors: dict[str, TensorMetadata] = {}
    objects: dict[str, StoredObject] = {}
    for fqn, entry in table.items():
        if not isinstance(fqn, str):
            raise CkptError("E218", "a key of .metadata is not text", where=path, found=repr(fqn)[:100])
        if hasattr(entry, "chunks"):
            tensors[fqn] = _tensor(fqn, entry, extents, path)
        else:
            objects[fqn] = _object(fqn, extents, path)
    backend_path = os.path.join(directory, "metadata.json")
    backend = read_json(backend_path) if os.path.exists(backend_path) else {}
    common_file, source = open_common(directory, objects)
    common = None if common_file is None else common_value(common_file)
    files = sorted({e.path for e in extents.values()})
    shapes = {
        k: tuple(v["nd_reformulated_orig_global_shape"])
        for k, v in getattr(root, "mcore_data", {}).items()
        if isinstance(v, dict) and "nd_reformulated_orig_global_shape" in v
    }
    return TorchDist(
        directory,
        tensors,
        objects,
        common,
        source,
        backend,
        shapes,
        hasattr(root, "all_local_plans"),
        tuple(files),
        tuple(_check_sizes(extents)),
        common_file,
    )


def _extents(storage: Mapping[Any, Any], directory: str, path: str) -> dict[tuple[str, Shape | None], Extent]:
    extents: dict[tuple[str, Shape | None], Extent] = {}
    paths: dict[str, str] = {}
    for index, info in storage.items():
        try:
            name, offset, length = info.relative_path, info.offset, info.length
            key = (index.fqn, None if (at := getattr(index, "offset", None)) is None else tuple(at))
        except (AttributeError, TypeError):
            raise CkptError("E218", "an entry of .metadata does not say where its bytes lie", where=path) from None
        full = paths.get(name)
        if full is None:
            if not isinstance(name, str) or not is_safe_name(name):
                raise CkptError(
                    "E214", ".metadata sends an entry to a path outside the folder", where=f"{path}: {index.fqn}", found=repr(name)[:200]
                )
            full = paths[name] = os.path.join(directory, name)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise CkptError(
                "E218",
                "an entry of .metadata has an impossible place",
                where=f"{path}: {index.fqn}",
                found=f"offset {offset!r}, length {length!r}",
            )
        if getattr(info, "transform_descriptors", None):
            raise CkptError(
                "E219",
                "the checkpoint's files are compressed by a stream extension, which ckpt cannot read",
                where=f"{path}: {index.fqn}",
                found=repr(info.transform_descriptors)[:100],
            )
        extents[key] = Extent(full, offset, length, None)
    return extents


def _tensor(fqn: str, entry: Any, extents: Mapping[tuple[str, Shape | None], Extent], path: str) -> TensorMetadata:
    try:
        shape = tuple(entry.size)
        dtype = str(entry.properties.dtype)
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    except (AttributeError, TypeError):
        raise CkptError("E218", f"the index entry of {fqn} is not complete", where=f"{path}: {fqn}") from None
    if dtype not in DTYPES:
        raise CkptError("E206", f"unknown dtype {dtype!r}", where=f"{path}: {fqn}")
    chunks = []
    for offset, size in boxes:
        extent = extents.get((fqn, offset))
        if extent is None:
            raise CkptError(
                "E218",
                f"the index lists a piece of {fqn} but not where it lies",
                where=f"{path}: {fqn}",
                found=f"piece at {list(offset)} of {list(size)}",
                hint="a rank's part of the save is missing; take another iteration",
            )
        if len(offset) != len(shape) or len(size) != len(shape) or not all(type(n) is int and n >= 0 for n in (*offset, *size)):
            raise CkptError(
                "E218",
                f"a piece of {fqn} does not fit its shape",
                where=f"{path}: {fqn}",
                found=f"piece at {list(offset)} of {list(size)} in {list(shape)}",
            )
        chunks.append(Chunk(offset, size, extent))
    return TensorMetadata(fqn, dtype, shape, tuple(chunks))


def _object(fqn: str, extents: Mapping[tuple[str, Shape | None], Extent], path: str) -> StoredObject:
    extent = extents.get((fqn, None))
    if extent is None:
        raise CkptError("E218", f"the index lists the object {fqn} but not where it lies", where=f"{path}: {fqn}")
    match = _OBJECT.match(fqn)
    if match is None:
        return StoredObject(fqn, fqn, (), (), extent)
    return StoredObject(fqn, match["key"], _numbers(match["offset"]), _numbers(match["shape"]), extent)


def _numbers(text: str) -> Shape:
    return tuple(int(n) for n in text.split("."))


def open_common(directory: str, objects: Mapping[str, StoredObject]) -> tuple[torch_zip.TorchFile | None, str | None]:
    """The file or record that holds the common state, and which of the two it is; (None, None) when there is none."""
    path = os.path.join(directory, "common.pt")
    if os.path.exists(path):
        return torch_zip.open_torch_file(path), "common.pt"
    stored = next((o for o in objects.values() if o.key == "common_state"), None)
    if stored is None:
        return None, None
    return torch_zip.open_torch_file(stored.extent.path, stored.extent.offset, stored.extent.length), "common_state"


def common_value(file: torch_zip.TorchFile) -> dict[str, Any]:
    """The common state as a table (a record holds it in a list of one). E218 when it is none."""
    value = file.value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise CkptError("E218", "the common state is not a table", where=file.where, found=type(value).__name__)
    return value


def read_object(stored: StoredObject) -> Any:
    """The object (inert data) of one record; Megatron wraps it in a list of one, which is taken off."""
    extent = stored.extent
    value = torch_zip.open_torch_file(extent.path, extent.offset, extent.length).value
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _check_sizes(extents: Mapping[tuple[str, Shape | None], Extent]) -> list[str]:
    ends: dict[str, tuple[int, str]] = {}
    for (fqn, _), extent in extents.items():
        end = extent.offset + extent.length
        if end > ends.get(extent.path, (-1, ""))[0]:
            ends[extent.path] = (end, fqn)
    missing = sorted(os.path.basename(p) for p in ends if not os.path.isfile(p))
    if missing:
        raise CkptError(
            "E217",
            f"{len(missing)} files that .metadata names are not there",
            where=os.path.dirname(next(iter(ends))),
            found=", ".join(missing[:8]),
            hint="a rank did not finish its save, or the copy of this checkpoint is incomplete",
        )
    for path, (end, fqn) in ends.items():
        size = os.stat(path).st_size
        if size < end:
            raise CkptError(
                "E217",
                "a data file is shorter than .metadata says",
                where=f"{path}: {fqn}",
                expected=f"at least {end} bytes",
                found=f"{size} bytes",
            )
    return []


class Locator:
    """Looks up where in its record a stored piece lies; keeps the files it has opened. Use as a context manager."""

    def __init__(self, tensors: Mapping[str, TensorMetadata]) -> None:
        self._tensors = tensors
        self._files: dict[str, int] = {}

    def __enter__(self) -> Locator:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def tensor(self, tensor: TensorMetadata) -> TensorMetadata:
        """The tensor with every chunk's bytes located. E220 when a record disagrees with the index about dtype or shape."""
        chunks = tuple(self._chunk(tensor, c) for c in tensor.chunks)
        return TensorMetadata(tensor.fqn, tensor.dtype, tensor.global_shape, chunks)

    def _chunk(self, tensor: TensorMetadata, chunk: Chunk) -> Chunk:
        extent = chunk.extent
        if extent is None or extent.strides is not None:
            return chunk
        fd = self._files.get(extent.path)
        if fd is None:
            fd = self._files[extent.path] = open_source(extent.path)
        entry = torch_zip.read_tensor_entry(fd, extent.offset, extent.length, f"{extent.path}: {tensor.fqn}")
        if entry.dtype != tensor.dtype or entry.shape != chunk.local_shape:
            raise CkptError(
                "E220",
                f"a stored piece of {tensor.fqn} is not what the index says",
                where=f"{extent.path}: {tensor.fqn}",
                expected=f"{tensor.dtype} {list(chunk.local_shape)}",
                found=f"{entry.dtype} {list(entry.shape)}",
            )
        length = extent.offset + extent.length - entry.data_offset
        return Chunk(chunk.global_offset, chunk.local_shape, Extent(extent.path, entry.data_offset, length, entry.strides))
