"""The classes inside torch.distributed.checkpoint's `.metadata`, as plain stand-ins with checked fields.

Source: torch 2.13 torch/distributed/checkpoint/{metadata,filesystem}.py; megatron-core 0.13-0.19 strategies/torch.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import CkptError
from .pickle_values import DTypeRef

Shape = tuple[int, ...]


class MetadataIndex:
    """Name of a stored piece: `fqn`, `offset` of a chunk (None for an object), `index` hint. Compared by identity: it is a dict key
    before its fields are set."""

    fqn: str
    offset: Shape | None = None
    index: int | None = None

    def __init__(self, fqn: str, offset: Shape | None = None, index: int | None = None) -> None:
        self.fqn = fqn
        self.index = index
        if offset is not None:
            self.offset = offset

    def __repr__(self) -> str:
        return f"MetadataIndex({self.fqn!r}, {self.offset}, {self.index})"


class StorageInfo:
    """Where a stored piece lies: file `relative_path`, byte `offset` and `length` of its entry."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path = relative_path
        self.offset = offset
        self.length = length

    def __repr__(self) -> str:
        return f"StorageInfo({self.relative_path!r}, {self.offset}, {self.length})"


class ChunkStorageMetadata:
    """A stored box of a tensor: `offsets` and `sizes`, one integer per axis."""

    offsets: Shape
    sizes: Shape

    def __init__(self, offsets: Shape, sizes: Shape) -> None:
        self.offsets = offsets
        self.sizes = sizes

    def __repr__(self) -> str:
        return f"ChunkStorageMetadata({self.offsets}, {self.sizes})"


class TensorProperties(NamedTuple):
    """dtype is a name as in ckpt_tools.dtypes; memory_format the value of _MEM_FORMAT_ENCODING (0 = contiguous)."""

    dtype: str
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: int = 0
    pin_memory: bool = False


class RawProperties:
    """TensorProperties while it is being unpickled: `state` is the 5-tuple."""

    state: Any = None


class TensorStorageMetadata:
    """A stored tensor: `properties`, global `size`, list of `chunks`."""

    properties: TensorProperties
    size: Shape
    chunks: list[ChunkStorageMetadata]

    def __init__(self, properties: TensorProperties, size: Shape, chunks: list[ChunkStorageMetadata]) -> None:
        self.properties = properties
        self.size = size
        self.chunks = chunks


class BytesStorageMetadata:
    """A stored object; it has no fields."""


class StorageMeta:
    """Who saved: `checkpoint_id`, `save_id`, `load_id`, `modules`; nothing depends on it."""

    checkpoint_id: Any = None
    save_id: Any = None
    load_id: Any = None
    modules: Any = ()


class Metadata:
    """The whole `.metadata`; all_local_plans is skipped while reading."""

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: Any = None
    storage_data: dict[MetadataIndex, StorageInfo]
    storage_meta: StorageMeta | None = None
    version: str | None = None


DCP = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
LAYOUTS = frozenset(("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn", "unknown"))
CLASSES: dict[tuple[str, str], type] = {
    (DCP, "Metadata"): Metadata,
    (DCP, "TensorStorageMetadata"): TensorStorageMetadata,
    (DCP, "BytesStorageMetadata"): BytesStorageMetadata,
    (DCP, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (DCP, "TensorProperties"): RawProperties,
    # torch 2.0-2.2 kept it there
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): RawProperties,
    (DCP, "MetadataIndex"): MetadataIndex,
    (DCP, "StorageMeta"): StorageMeta,
    (FILESYSTEM, "_StorageInfo"): StorageInfo,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
}


def metadata_object(
    tensors: Iterable[tuple[str, str, Shape, Iterable[tuple[Shape, Shape]]]],
    objects: Iterable[str],
    storage: Iterable[tuple[str, Shape | None, str, int, int]],
    planner_data: Mapping[str, Any] | None = None,
    version: str | None = "1.0.0",
) -> Metadata:
    """The Metadata to dump as `.metadata`.

    tensors  (fqn, dtype, global shape, [(offsets, sizes), ...]);   objects  fqns of object entries;
    storage  (fqn, chunk offsets or None for an object, file, byte offset, length), one per entry of a .distcp.
    """
    metadata = Metadata()
    named: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: BytesStorageMetadata() for key in objects}
    properties: dict[str, TensorProperties] = {}
    for fqn, dtype, shape, chunks in tensors:
        shared = properties.setdefault(dtype, TensorProperties(dtype))
        named[fqn] = TensorStorageMetadata(shared, shape, [ChunkStorageMetadata(o, s) for o, s in chunks])
    metadata.state_dict_metadata = named
    metadata.planner_data = planner_data
    metadata.storage_data = {MetadataIndex(fqn, offset): StorageInfo(path, start, length) for fqn, offset, path, start, length in storage}
    metadata.version = version
    return metadata


def check_metadata(value: object, where: str) -> Metadata:
    """The Metadata, with every field the library uses known to have its type; CkptError E203 naming the first that has not."""
    if type(value) is not Metadata:
        raise CkptError("E203", ".metadata does not hold a Metadata object", where=where, found=type(value).__name__)
    fields = value.__dict__
    named, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if type(named) is not dict or type(stored) is not dict:
        raise CkptError("E203", ".metadata has no state_dict_metadata or storage_data", where=where, found=", ".join(map(str, fields)))
    seen: dict[int, tuple[object, TensorProperties]] = {}
    for fqn, entry in named.items():
        if type(fqn) is not str:
            raise CkptError("E203", "a tensor name in .metadata is not a string", where=where, found=type(fqn).__name__)
        if type(entry) is TensorStorageMetadata:
            _check_tensor(fqn, entry, where, seen)
        elif type(entry) is not BytesStorageMetadata:
            raise CkptError("E203", "an entry of .metadata is neither a tensor nor an object", where=f"{where}: {fqn}")
    for index, info in stored.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise CkptError("E203", "storage_data of .metadata holds something else than _StorageInfo", where=where)
        a, b = index.__dict__, info.__dict__
        fqn = a.get("fqn")
        if (
            type(fqn) is not str
            or not (index.offset is None or _is_shape(index.offset))
            or type(b.get("relative_path")) is not str
            or type(b.get("offset")) is not int
            or type(b.get("length")) is not int
            or b["offset"] < 0
            or b["length"] < 0
        ):
            raise CkptError("E203", "an entry of storage_data in .metadata is damaged", where=f"{where}: {fqn!s:.200}")
    return value


def _is_shape(value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    for n in value:
        if type(n) is not int or n < 0:
            return False
    return True


def _check_tensor(fqn: str, entry: TensorStorageMetadata, where: str, seen: dict[int, tuple[object, TensorProperties]]) -> None:
    fields = entry.__dict__
    chunks = fields.get("chunks")
    raw = fields.get("properties")
    if not _is_shape(fields.get("size")) or type(chunks) is not list:
        raise CkptError("E203", "size or chunks of a tensor in .metadata are damaged", where=f"{where}: {fqn}")
    rank = len(fields["size"])
    for chunk in chunks:
        box = chunk.__dict__ if type(chunk) is ChunkStorageMetadata else {}
        offsets, sizes = box.get("offsets"), box.get("sizes")
        if not (_is_shape(offsets) and _is_shape(sizes) and len(box["offsets"]) == rank == len(box["sizes"])):
            raise CkptError("E203", "a chunk of a tensor in .metadata is damaged", where=f"{where}: {fqn}")
    if type(raw) is TensorProperties:
        return
    known = seen.get(id(raw), (None, None))[1]
    if known is None:
        state = raw.state if type(raw) is RawProperties else None
        if type(state) is not tuple or len(state) != 5 or type(state[0]) is not DTypeRef:
            raise CkptError("E203", "the properties of a tensor in .metadata are damaged", where=f"{where}: {fqn}")
        layout, encoding = state[1], state[3]
        layout, encoding = layout if type(layout) is str else "unknown", encoding if type(encoding) is int else -1
        if layout not in LAYOUTS or encoding not in range(4):
            what = "the layout or memory format of a tensor in .metadata is none that torch has"
            raise CkptError("E203", what, where=f"{where}: {fqn}", found=f"{layout!s:.40}, {encoding}")
        known = TensorProperties(state[0].name, layout, state[2] is True, encoding, state[4] is True)
        seen[id(raw)] = raw, known
    entry.properties = known
