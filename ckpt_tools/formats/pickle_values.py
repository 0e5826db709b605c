"""The inert values that stand for what a checkpoint's pickles contain: nothing here is ever imported from, or called by, a file.

Plain data (dict, list, tuple, str, int, ...) stays itself; everything else becomes one of these classes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle refers to by name, found as a value."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class DTypeRef:
    """A torch.dtype found as a value; `name` without the `torch.` prefix."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Size(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


class Record:
    """An object of a class that is not rebuilt: what its pickle said, nothing more.

    created  "reduce" (called with args), "newobj" (class.__new__ with args), "newobj_ex" (args is the pair args, kwargs).
    args     the arguments.   state  what BUILD passed, or None.   items  appended values.   pairs  values set by key.
    """

    __slots__ = ("args", "created", "items", "module", "name", "pairs", "state")

    def __init__(self, module: str, name: str, args: tuple[Any, ...] = (), state: Any = None, created: str = "reduce") -> None:
        self.module = module
        self.name = name
        self.args = args
        self.state = state
        self.created = created
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}

    def _content(self) -> tuple[Any, ...]:
        return self.module, self.name, self.created, self.args, self.state, self.items, self.pairs

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Record) and self._content() == other._content())

    def __hash__(self) -> int:
        # State may be set after the object became a key, so only what never changes counts.
        first = self.args[0] if self.args else None
        return hash((self.module, self.name, len(self.args), first if type(first) in (int, str, float, bool) else None))

    @recursive_repr()
    def __repr__(self) -> str:
        inside = [repr(a) for a in self.args]
        if isinstance(self.state, dict):
            inside += [f"{k}={v!r}" for k, v in self.state.items()]
        elif self.state is not None:
            inside.append(f"state={self.state!r}")
        inside += [repr(v) for v in self.items] + [f"{k!r}: {v!r}" for k, v in self.pairs.items()]
        return f"{self.module}.{self.name}({', '.join(inside)})"


class Namespace(dict[str, Any]):
    """An argparse.Namespace or types.SimpleNamespace as a dict that remembers which of the two it was."""

    __slots__ = ("module", "name")

    def __init__(self, values: dict[str, Any] | None = None, module: str = "argparse", name: str = "Namespace") -> None:
        super().__init__(values or {})
        self.module = module
        self.name = name

    @recursive_repr()
    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.items())})"


class DefaultDict(dict[Any, Any]):
    """A collections.defaultdict whose factory is only remembered."""

    __slots__ = ("factory",)

    def __init__(self, factory: Any = None) -> None:
        super().__init__()
        self.factory = factory


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A torch storage by name: `dtype` None when untyped (then `numel` counts bytes), `key` = its record below data/."""

    dtype: str | None
    key: str
    location: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a torch.save file: where it lies in the storage record `data/<key>`.

    shape, strides, storage_offset and storage_numel count elements of `dtype` (name as in ckpt_tools.dtypes).
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    key: str
    storage_numel: int
    location: str = "cpu"
    requires_grad: bool = False
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write, contiguous: `data` holds its bytes, or None for a hole that someone else fills; `tag` is theirs."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    tag: object = field(default=None, compare=False)
    requires_grad: bool = False
    parameter: bool = False


_ITEM = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f2": "e", "f4": "f", "f8": "d"}


class NumpyArray:
    """A numpy.ndarray: `dtype` = numpy's string ("<u4"; the pickled Record unless it is of plain numbers), bytes in `fortran` or C order.

    core  "numpy.core" (numpy 1) or "numpy._core" (numpy 2), as spelled in the file.
    data  bytes, or a list of values when dtype is object.
    """

    __slots__ = ("core", "data", "dtype", "fortran", "shape")

    def __init__(
        self,
        dtype: str | Record = "<f8",
        shape: tuple[int, ...] = (0,),
        data: bytes | list[Any] = b"",
        fortran: bool = False,
        core: str = "numpy._core",
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data
        self.fortran = fortran
        self.core = core

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumpyArray):
            return NotImplemented
        return (self.dtype, self.shape, self.fortran, self.data) == (other.dtype, other.shape, other.fortran, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"numpy.ndarray({self.dtype}, {list(self.shape)})"

    def to_numpy(self) -> np.ndarray:
        """A read-only numpy array over the bytes; ValueError when dtype, shape and bytes do not fit together."""
        import numpy

        if not isinstance(self.dtype, str) or not isinstance(self.data, bytes):
            raise ValueError("arrays of anything but plain numbers stay opaque")
        return numpy.frombuffer(self.data, dtype=self.dtype).reshape(self.shape, order="F" if self.fortran else "C")


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A numpy scalar: dtype string ("<f8") and its bytes; `core` as in NumpyArray."""

    dtype: str
    data: bytes
    core: str = field(default="numpy._core", compare=False)

    def item(self) -> bool | int | float | bytes:
        """The Python number, or the bytes themselves when the dtype is no plain number."""
        code = _ITEM.get(self.dtype.lstrip("<>|="))
        if code is None or struct.calcsize("<" + code) != len(self.data):
            return self.data
        value: bool | int | float = struct.unpack((">" if self.dtype[0] == ">" else "<") + code, self.data)[0]
        return value

    def __repr__(self) -> str:
        return f"numpy.{self.dtype}({self.item()!r})"
