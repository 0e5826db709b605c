"""Turns inert values into the opcodes of a protocol 2 pickle.

Source: the objects' own reduce functions in torch 2.13, numpy 1.26 and 2.4, CPython 3.11 (Lib/pickle.py protocol 2).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..dtypes import dtype as dtype_named
from ..errors import CkptError
from ..tensors import contiguous_strides
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


class Emitter:
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


def _constant(code: bytes) -> Callable[[Emitter, Any, int], None]:
    def write(w: Emitter, value: Any, depth: int) -> None:
        w.out += code

    return write


def _bool(w: Emitter, value: bool, depth: int) -> None:
    w.out += b"\x88" if value else b"\x89"


def _int(w: Emitter, value: int, depth: int) -> None:
    w.out += integer(value)


def _float(w: Emitter, value: float, depth: int) -> None:
    w.out += struct.pack(">Bd", 0x47, value)


def _bytes(w: Emitter, value: bytes, depth: int) -> None:
    if not value:
        w.call("builtins", "bytes", (), depth)
    else:
        w.call("_codecs", "encode", (value.decode("latin-1"), "latin1"), depth)


def _bytearray(w: Emitter, value: bytearray, depth: int) -> None:
    w.call("builtins", "bytearray", (value.decode("latin-1"), "latin-1") if value else (), depth)
    w.keep(value)


def _complex(w: Emitter, value: complex, depth: int) -> None:
    w.call("builtins", "complex", (value.real, value.imag), depth)


def _list(w: Emitter, value: list[Any], depth: int) -> None:
    w.out += b"]"
    w.keep(value)
    w.items(value, depth)


def _tuple(w: Emitter, value: tuple[Any, ...], depth: int) -> None:
    w.tuple(value, depth)
    if value:
        # A tuple that contains itself through one of its items was remembered meanwhile; the copy is equal, and harmless.
        w.keep(value)


def _set(w: Emitter, value: set[Any] | frozenset[Any], depth: int) -> None:
    w.call("builtins", type(value).__name__, ([*value],), depth)
    w.keep(value)


def _dict(w: Emitter, value: dict[Any, Any], depth: int) -> None:
    w.out += b"}"
    w.keep(value)
    w.pairs(value, depth)


def _ordered(w: Emitter, value: OrderedDict[Any, Any], depth: int) -> None:
    w.call("collections", "OrderedDict", (), depth)
    w.keep(value)
    w.pairs(value, depth)
    if vars(value):
        w.value(dict(vars(value)), depth)
        w.out += b"b"


def _default_dict(w: Emitter, value: DefaultDict, depth: int) -> None:
    w.call("collections", "defaultdict", () if value.factory is None else (value.factory,), depth)
    w.keep(value)
    w.pairs(value, depth)


def _namespace(w: Emitter, value: Namespace, depth: int) -> None:
    w.named(value.module, value.name)
    w.out += b")R" if value.module == "types" else b")\x81"
    w.keep(value)
    w.out += b"}"
    w.pairs(value, depth)
    w.out += b"b"


def _record(w: Emitter, value: Record, depth: int) -> None:
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


def _global(w: Emitter, value: Global, depth: int) -> None:
    w.named(value.module, value.name)


def _dtype_ref(w: Emitter, value: DTypeRef, depth: int) -> None:
    w.named("torch", value.name)


def _size(w: Emitter, value: Size, depth: int) -> None:
    w.call("torch", "Size", (tuple(value),), depth)


def _numpy_dtype(w: Emitter, value: str, depth: int) -> None:
    order, code = (value[0], value[1:]) if value[0] in "<>|=" else ("<", value)
    w.call("numpy", "dtype", (code, False, True), depth)
    w.value((3, order, None, None, None, -1, -1, 0), depth)
    w.out += b"b"


def _array(w: Emitter, value: NumpyArray, depth: int) -> None:
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


def _scalar(w: Emitter, value: NumpyScalar, depth: int) -> None:
    w.named(f"{value.core}.multiarray", "scalar")
    _numpy_dtype(w, value.dtype, depth)
    w.value(value.data, depth)
    w.out += b"\x86R"


def _tensor(w: Emitter, value: TensorSpec | TensorRef, depth: int) -> None:
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


def _storage(w: Emitter, value: StorageRef, depth: int) -> None:
    raise CkptError("E490", "a torch storage without its tensor cannot be written")


_WRITERS: dict[type, Callable[[Emitter, Any, int], None]] = {
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
