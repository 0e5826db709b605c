"""Writes pickles (protocol 2) that Python, torch and megatron-core load to the objects ckpt's inert values stand for.

`dump` writes any value that `pickles.load` returns, a `.metadata` (dcp_metadata.Metadata) among them.
Source: the objects' own reduce functions in torch 2.13, numpy 1.26 and 2.4, CPython 3.11 (Lib/pickle.py protocol 2).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from ..dtypes import dtype as dtype_named
from ..errors import CkptError
from ..tensors import contiguous_strides
from .dcp_metadata import DCP, FILESYSTEM, Metadata, StorageMeta, TensorStorageMetadata
from .pickle_values import (
    DefaultDict,
    DTypeRef,
    Global,
    Namespace,
    NumpyArray,
    NumpyScalar,
    Record,
    Size,
    StorageRef,
    TensorRef,
    TensorSpec,
)

MAX_NESTING = 150
# Protocol 2 spells these as Python 2 did; every unpickler maps them back.
_OLD_NAMES = {"builtins": "__builtin__", "copyreg": "copy_reg", "io": "_io"}


def dump(value: object, tensors: list[TensorSpec | TensorRef] | None = None) -> bytes:
    """The pickle of a value.

    Tensors are written as torch storages "0", "1", ... and appended to `tensors` in that order; without a list they are an error.
    E490 for values of unknown classes and for nesting deeper than 150.
    """
    if type(value) is Metadata:
        return _dump_metadata(value)
    writer = _Writer(tensors)
    writer.value(value, 0)
    return b"\x80\x02" + bytes(writer.out) + b"."


def integer(n: int) -> bytes:
    """The opcode that pushes an integer."""
    if 0 <= n < 256:
        return bytes((0x4B, n))
    if 0 <= n < 65536:
        return struct.pack("<BH", 0x4D, n)
    if -(2**31) <= n < 2**31:
        return struct.pack("<Bi", 0x4A, n)
    raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return bytes((0x8A, len(raw))) + raw if len(raw) < 256 else struct.pack("<BI", 0x8B, len(raw)) + raw


def text(value: str) -> bytes:
    """The opcode that pushes a string."""
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<BI", 0x58, len(raw)) + raw


def integers(values: Iterable[int]) -> bytes:
    """The opcodes that push a tuple of integers."""
    codes = [integer(n) for n in values]
    if not codes:
        return b")"
    body = b"".join(codes)
    return body + (b"\x85", b"\x86", b"\x87")[len(codes) - 1] if len(codes) < 4 else b"(" + body + b"t"


class _Writer:
    """Opcodes written so far, and what the unpickler will remember: objects by identity, strings and globals by value."""

    def __init__(self, tensors: list[TensorSpec | TensorRef] | None) -> None:
        self.out = bytearray()
        self.tensors = tensors
        self.remembered = 0
        self.objects: dict[int, int] = {}
        self.alive: list[object] = []
        self.names: dict[str | Global, int] = {}

    def put(self) -> int:
        """Remembers the top of the unpickler's stack; returns the number to get it by."""
        index = self.remembered
        self.remembered += 1
        self.out += bytes((0x71, index)) if index < 256 else struct.pack("<BI", 0x72, index)
        return index

    def get(self, index: int) -> None:
        """Pushes a remembered value."""
        self.out += bytes((0x68, index)) if index < 256 else struct.pack("<BI", 0x6A, index)

    def keep(self, value: object) -> None:
        """Remembers the object on top of the stack, so that sharing and cycles survive."""
        self.objects[id(value)] = self.put()
        self.alive.append(value)

    def value(self, value: object, depth: int) -> None:
        """Writes one value."""
        if depth > MAX_NESTING:
            raise CkptError("E490", f"a value is nested more than {MAX_NESTING} levels deep and cannot be written")
        index = self.objects.get(id(value))
        if index is not None:
            self.get(index)
            return
        kind = type(value)
        writer = _WRITERS.get(kind)
        if writer is None:
            writer = next((w for k, w in _WRITERS.items() if isinstance(value, k)), None)
            if writer is None:
                raise CkptError("E490", f"a {kind.__module__}.{kind.__qualname__} cannot be written into a pickle")
        writer(self, value, depth + 1)

    def string(self, value: str) -> None:
        """Writes a string, or refers to an equal one."""
        index = self.names.get(value)
        if index is not None:
            self.get(index)
            return
        self.out += text(value)
        self.names[value] = self.put()

    def named(self, module: str, name: str) -> None:
        """Writes a reference to a class or function."""
        key = Global(module, name)
        index = self.names.get(key)
        if index is not None:
            self.get(index)
            return
        if "\n" in module or "\n" in name:
            raise CkptError("E490", f"{module}.{name} is no name")
        self.out += f"c{_OLD_NAMES.get(module, module)}\n{name}\n".encode()
        self.names[key] = self.put()

    def tuple(self, values: Iterable[object], depth: int) -> None:
        """Writes a tuple."""
        items = list(values)
        if not items:
            self.out += b")"
            return
        if len(items) > 3:
            self.out += b"("
        for item in items:
            self.value(item, depth)
        self.out += b"t" if len(items) > 3 else (b"\x85", b"\x86", b"\x87")[len(items) - 1]

    def pairs(self, value: Mapping[Any, Any], depth: int) -> None:
        """Sets the items of the mapping on the object on top of the stack."""
        if value:
            self.out += b"("
            for key, item in value.items():
                self.value(key, depth)
                self.value(item, depth)
            self.out += b"u"

    def items(self, values: Iterable[object], depth: int) -> None:
        """Appends values to the object on top of the stack."""
        items = list(values)
        if items:
            self.out += b"("
            for item in items:
                self.value(item, depth)
            self.out += b"e"

    def call(self, module: str, name: str, args: Iterable[object], depth: int) -> None:
        """Writes function(*args)."""
        self.named(module, name)
        self.tuple(args, depth)
        self.out += b"R"

    def storage(self, value: StorageRef) -> None:
        """Writes the persistent id of a storage."""
        self.out += b"("
        self.string("storage")
        typed = dtype_named(value.dtype).storage if value.dtype is not None else None
        self.named(*(("torch", typed) if typed is not None else ("torch.storage", "UntypedStorage")))
        self.string(value.key)
        self.string(value.location)
        self.out += integer(value.numel) + b"tQ"


def _constant(code: bytes) -> Callable[[_Writer, Any, int], None]:
    def write(w: _Writer, value: Any, depth: int) -> None:
        w.out += code

    return write


def _bool(w: _Writer, value: bool, depth: int) -> None:
    w.out += b"\x88" if value else b"\x89"


def _int(w: _Writer, value: int, depth: int) -> None:
    w.out += integer(value)


def _float(w: _Writer, value: float, depth: int) -> None:
    w.out += struct.pack(">Bd", 0x47, value)


def _bytes(w: _Writer, value: bytes, depth: int) -> None:
    if not value:
        w.call("builtins", "bytes", (), depth)
    else:
        w.call("_codecs", "encode", (value.decode("latin-1"), "latin1"), depth)


def _bytearray(w: _Writer, value: bytearray, depth: int) -> None:
    w.call("builtins", "bytearray", (value.decode("latin-1"), "latin-1") if value else (), depth)
    w.keep(value)


def _complex(w: _Writer, value: complex, depth: int) -> None:
    w.call("builtins", "complex", (value.real, value.imag), depth)


def _list(w: _Writer, value: list[Any], depth: int) -> None:
    w.out += b"]"
    w.keep(value)
    w.items(value, depth)


def _tuple(w: _Writer, value: tuple[Any, ...], depth: int) -> None:
    w.tuple(value, depth)
    if value:
        # A tuple that contains itself through one of its items was remembered meanwhile; the copy is equal, and harmless.
        w.keep(value)


def _set(w: _Writer, value: set[Any] | frozenset[Any], depth: int) -> None:
    w.call("builtins", type(value).__name__, ([*value],), depth)
    w.keep(value)


def _dict(w: _Writer, value: dict[Any, Any], depth: int) -> None:
    w.out += b"}"
    w.keep(value)
    w.pairs(value, depth)


def _ordered(w: _Writer, value: OrderedDict[Any, Any], depth: int) -> None:
    w.call("collections", "OrderedDict", (), depth)
    w.keep(value)
    w.pairs(value, depth)
    if vars(value):
        w.value(dict(vars(value)), depth)
        w.out += b"b"


def _default_dict(w: _Writer, value: DefaultDict, depth: int) -> None:
    w.call("collections", "defaultdict", () if value.factory is None else (value.factory,), depth)
    w.keep(value)
    w.pairs(value, depth)


def _namespace(w: _Writer, value: Namespace, depth: int) -> None:
    w.named(value.module, value.name)
    w.out += b")R" if value.module == "types" else b")\x81"
    w.keep(value)
    w.out += b"}"
    w.pairs(value, depth)
    w.out += b"b"


def _record(w: _Writer, value: Record, depth: int) -> None:
    if value.created == "newobj_ex":
        args, keywords = value.args
        w.call("copyreg", "__newobj_ex__", (Global(value.module, value.name), args, keywords), depth)
    else:
        w.named(value.module, value.name)
        w.tuple(value.args, depth)
        w.out += b"\x81" if value.created == "newobj" else b"R"
    w.keep(value)
    w.items(value.items, depth)
    w.pairs(value.pairs, depth)
    if value.state is not None:
        w.value(value.state, depth)
        w.out += b"b"


def _global(w: _Writer, value: Global, depth: int) -> None:
    w.named(value.module, value.name)


def _dtype_ref(w: _Writer, value: DTypeRef, depth: int) -> None:
    w.named("torch", value.name)


def _size(w: _Writer, value: Size, depth: int) -> None:
    w.call("torch", "Size", (tuple(value),), depth)


def _numpy_dtype(w: _Writer, value: str, depth: int) -> None:
    order, code = (value[0], value[1:]) if value[0] in "<>|=" else ("<", value)
    w.call("numpy", "dtype", (code, False, True), depth)
    w.value((3, order, None, None, None, -1, -1, 0), depth)
    w.out += b"b"


def _array(w: _Writer, value: NumpyArray, depth: int) -> None:
    w.call(f"{value.core}.multiarray", "_reconstruct", (Global("numpy", "ndarray"), (0,), b"b"), depth)
    w.keep(value)
    w.out += b"(" + integer(1)
    w.value(tuple(value.shape), depth)
    if isinstance(value.dtype, str):
        _numpy_dtype(w, value.dtype, depth)
    else:
        w.value(value.dtype, depth)
    w.value(value.fortran, depth)
    w.value(value.data, depth)
    w.out += b"tb"


def _scalar(w: _Writer, value: NumpyScalar, depth: int) -> None:
    w.named(f"{value.core}.multiarray", "scalar")
    _numpy_dtype(w, value.dtype, depth)
    w.value(value.data, depth)
    w.out += b"\x86R"


def _tensor(w: _Writer, value: TensorSpec | TensorRef, depth: int) -> None:
    if w.tensors is None:
        raise CkptError("E490", "a tensor cannot be written into a bare pickle")
    known = dtype_named(value.dtype)
    numel = 1
    for n in value.shape:
        numel *= n
    key = str(len(w.tensors))
    w.tensors.append(value)
    untyped = known.storage is None
    if value.parameter:
        w.named("torch._utils", "_rebuild_parameter")
    w.named("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2")
    w.out += b"("
    w.storage(StorageRef(None if untyped else value.dtype, key, "cpu", numel * known.itemsize if untyped else numel))
    w.out += integer(0) + integers(value.shape) + integers(contiguous_strides([max(n, 1) for n in value.shape], 1))
    w.value(value.requires_grad and not value.parameter, depth)
    w.call("collections", "OrderedDict", (), depth)
    if untyped:
        w.named("torch", value.dtype)
    w.out += b"tR"
    if value.parameter:
        w.value(value.requires_grad, depth)
        w.call("collections", "OrderedDict", (), depth)
        w.out += b"\x87R"
    w.keep(value)


def _storage(w: _Writer, value: StorageRef, depth: int) -> None:
    raise CkptError("E490", "a torch storage without its tensor cannot be written")


_WRITERS: dict[type, Callable[[_Writer, Any, int], None]] = {
    type(None): _constant(b"N"),
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: lambda w, value, depth: w.string(value),
    bytes: _bytes,
    bytearray: _bytearray,
    list: _list,
    Size: _size,
    tuple: _tuple,
    set: _set,
    frozenset: _set,
    OrderedDict: _ordered,
    DefaultDict: _default_dict,
    Namespace: _namespace,
    dict: _dict,
    Record: _record,
    Global: _global,
    DTypeRef: _dtype_ref,
    NumpyArray: _array,
    NumpyScalar: _scalar,
    TensorRef: _tensor,
    TensorSpec: _tensor,
    StorageRef: _storage,
}


def _dump_metadata(metadata: Metadata) -> bytes:
    index = _Index()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            index.tensor(fqn, entry.properties.dtype, entry.size, ((c.offsets, c.sizes) for c in entry.chunks))
        else:
            index.object(fqn)
    stored = bytearray()
    for key, info in metadata.storage_data.items():
        stored += index.place(key.fqn, key.offset, info.relative_path, info.offset, info.length, key.index)
    return index.finish(stored, metadata.planner_data, metadata.version, metadata.storage_meta)


class _Index:
    """A `.metadata` being written. Classes, field names and file names are remembered by number (fewer than 256); each Size is written
    out, because that is shorter than remembering it."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        # Everything used below is remembered first: pushed, put, popped.
        self.known: dict[object, bytes] = {}
        kinds = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex".split()
        for module, name in [*((DCP, kind) for kind in kinds), (FILESYSTEM, "_StorageInfo"), ("torch", "Size")]:
            self.remember(name, f"c{module}\n{name}\n".encode())
        for word in ("properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length"):
            self.remember(word, text(word))
        get = self.known
        layout = b"ctorch.serialization\n_get_layout\n" + text("torch.strided") + b"\x85R"
        self.remember(":layout", layout)
        self.remember(":format", f"c{DCP}\n_MEM_FORMAT_ENCODING\n".encode() + integer(0) + b"\x85R")
        self.tensor_head = get["TensorStorageMetadata"] + b")\x81}(" + get["properties"]
        self.chunk_head = get["ChunkStorageMetadata"] + b")\x81}(" + get["offsets"]
        self.index_head = get["MetadataIndex"] + b")\x81}(" + get["fqn"]
        self.info_head = get["_StorageInfo"] + b")\x81}(" + get["relative_path"]
        self.named = bytearray()
        self.sizes = lru_cache(maxsize=65536)(self._size)
        self.properties: dict[str, bytes] = {}
        self.paths: dict[str, bytes] = {}

    def remember(self, key: object, code: bytes) -> bytes:
        """Writes a value into the memo; returns the code that gets it."""
        number = len(self.known)
        self.out += code + (bytes((0x71, number)) if number < 256 else struct.pack("<BI", 0x72, number)) + b"0"
        self.known[key] = bytes((0x68, number)) if number < 256 else struct.pack("<BI", 0x6A, number)
        return self.known[key]

    def _size(self, shape: tuple[int, ...]) -> bytes:
        return self.known["Size"] + integers(shape) + b"\x85R"

    def object(self, fqn: str) -> None:
        """Adds an object entry."""
        self.named += text(fqn) + self.known["BytesStorageMetadata"] + b")\x81}b"

    def tensor(self, fqn: str, dtype: str, shape: tuple[int, ...], chunks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        """Adds a tensor entry."""
        properties = self.properties.get(dtype)
        if properties is None:
            get = self.known
            state = b"(" + f"ctorch\n{dtype_named(dtype).name}\n".encode() + get[":layout"] + b"\x89" + get[":format"] + b"\x89t"
            properties = self.properties[dtype] = self.remember((":properties", dtype), get["TensorProperties"] + b")\x81" + state + b"b")
        get, sizes = self.known, self.sizes
        between, end = get["sizes"], b"ub"
        head = self.chunk_head
        self.named += text(fqn) + self.tensor_head + properties + get["size"] + sizes(tuple(shape)) + get["chunks"] + b"]("
        self.named += b"".join([head + sizes(tuple(o)) + between + sizes(tuple(s)) + end for o, s in chunks])
        self.named += b"eub"

    def place(self, fqn: str, offsets: tuple[int, ...] | None, path: str, offset: int, length: int, hint: int | None = None) -> bytes:
        """An item of storage_data."""
        get = self.known
        where = self.paths.get(path)
        if where is None:
            where = self.paths[path] = self.remember((":path", path), text(path))
        index = b"N" if hint is None else integer(hint)
        box = b"" if offsets is None else get["offset"] + self.sizes(tuple(offsets))
        return (
            self.index_head + text(fqn) + get["index"] + index + box + b"ub"
            + self.info_head + where + get["offset"] + integer(offset) + get["length"] + integer(length) + b"ub"
        )  # fmt: skip

    def finish(self, stored: bytearray, planner_data: Any, version: str | None, meta: StorageMeta | None = None) -> bytes:
        """The whole pickle."""
        writer = _Writer(None)
        writer.remembered = len(self.known)
        out = writer.out
        out += self.known["Metadata"] + b")\x81}("
        out += text("state_dict_metadata") + b"}(" + self.named + b"u"
        writer.string("planner_data")
        writer.value(None if planner_data is None else dict(planner_data), 0)
        out += text("storage_data") + b"}(" + stored + b"u"
        writer.string("storage_meta")
        writer.value(None if meta is None else Record(DCP, "StorageMeta", (), dict(vars(meta)), "newobj"), 0)
        if version is not None:
            writer.string("version")
            writer.string(version)
        return bytes(self.out) + bytes(out) + b"ub."
