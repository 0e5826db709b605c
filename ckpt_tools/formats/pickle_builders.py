"""The plain value that each harmless function or class in a pickle stands for.

Sources: torch 2.13 torch/_utils.py and torch/_tensor.py (rebuild functions); numpy 1.26 and 2.4 (_reconstruct, scalar, _frombuffer).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..dtypes import DTYPES
from ..errors import CkptError
from .pickle_state import Damaged, key_nodes
from .pickle_values import DefaultDict, DTypeRef, Global, Namespace, NumpyArray, NumpyScalar, Record, Size, StorageRef, TensorRef


def call(function: Global, args: tuple[Any, ...]) -> object:
    """The value of function(*args): plain data for the functions known here, otherwise a Record."""
    builder = _BUILDERS.get((function.module, function.name))
    value = builder(args) if builder is not None else None
    return Record(function.module, function.name, args) if value is None else value


def new_object(cls: Global, args: tuple[Any, ...], keywords: dict[str, Any] | None) -> object:
    """The value of cls.__new__(cls, *args, **keywords): plain data for the classes known here, otherwise a Record."""
    if keywords is not None:
        return Record(cls.module, cls.name, (args, keywords), created="newobj_ex")
    builder = _NEW.get((cls.module, cls.name))
    if builder is not None and not args:
        return builder(args)
    return Record(cls.module, cls.name, args, created="newobj")


def build(value: object, state: Any) -> None:
    """Gives a Record its state, a Namespace its entries, an OrderedDict its attributes, an array its content."""
    if type(value) is Record:
        value.state = state
    elif type(value) is Namespace:
        value.update(_string_keys(state))
    elif type(value) is OrderedDict:
        attributes = _string_keys(state)
        if any(hasattr(OrderedDict, name) for name in attributes):
            raise Damaged("an attribute hides a method of OrderedDict")
        vars(value).update(attributes)
    elif type(value) is NumpyArray:
        _fill_array(value, state)
    else:
        raise Damaged(f"state for a {type(value).__name__}")


def _string_keys(state: Any) -> dict[str, Any]:
    if type(state) is tuple and len(state) == 2:  # (__dict__, slots)
        state = {**_string_keys(state[0] or {}), **_string_keys(state[1] or {})}
    if not isinstance(state, dict) or not all(type(k) is str for k in state):
        raise Damaged("attributes without names")
    return state


def _check_elements(values: Any) -> Any:
    if type(values) not in (list, tuple, set, frozenset):
        raise Damaged("a set of something else than a list")
    budget = 1_000_000
    for value in values:
        if type(value) is not str:
            budget -= key_nodes(value, budget)
    return values


def _ordered(args: tuple[Any, ...]) -> object:
    if not args:
        return OrderedDict()
    pairs = args[0] if len(args) == 1 else None
    if type(pairs) is not list or not all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
        return None
    _check_elements([k for k, _ in pairs])
    return OrderedDict(pairs)


def _simple_namespace(args: tuple[Any, ...]) -> object:
    return Namespace(_string_keys(args[0]) if args else None, "types", "SimpleNamespace")


def _encode(args: tuple[Any, ...]) -> object:
    if not args or type(args[0]) is not str or (len(args) > 1 and args[1] not in ("latin1", "latin-1", "ascii", "utf-8", "utf8")):
        raise Damaged("bytes in an unknown encoding")
    return args[0].encode(args[1] if len(args) > 1 else "utf-8")


def _byte_array(args: tuple[Any, ...]) -> object:
    if not args or type(args[0]) is bytes:
        return bytearray(*args[:1])
    value = _encode(args)
    return bytearray(value) if isinstance(value, bytes) else None


def _complex(args: tuple[Any, ...]) -> object:
    return complex(*args) if all(type(a) in (int, float) for a in args) and len(args) < 3 else None


def _size(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or type(args[0]) not in (tuple, list, Size) or not all(type(n) is int for n in args[0]):
        raise Damaged("torch.Size of something else than integers")
    return Size(args[0])


def _strided(storage: object, dtype: str | None, offset: Any, shape: object, strides: object, requires_grad: object) -> TensorRef:
    if type(storage) is not StorageRef or dtype is None:
        raise Damaged("a tensor without a storage")
    if dtype not in DTYPES or DTYPES[dtype].bits % 8:
        raise CkptError("E206", f"tensors of dtype {dtype} are not supported")
    numel = storage.numel if storage.dtype is not None else storage.numel // DTYPES[dtype].itemsize
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
        raise Damaged("a tensor whose shape and strides do not fit together")
    if not all(type(n) is int and 0 <= n < 2**62 for n in (offset, *shape, *strides)):
        raise Damaged("a tensor with an impossible shape or strides")
    if all(shape) and offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= numel:
        raise Damaged("a tensor that reaches beyond its storage")
    return TensorRef(dtype, tuple(shape), tuple(strides), offset, storage.key, numel, storage.location, requires_grad is True)


def _tensor(args: tuple[Any, ...]) -> object:
    """torch._utils._rebuild_tensor(_v2)(storage, offset, size, stride[, requires_grad, hooks[, metadata]])."""
    if len(args) == 7 and args[6]:
        return None  # lazily conjugated or negated: the bytes are not the values
    if not 4 <= len(args) <= 7 or type(args[0]) is not StorageRef:
        raise Damaged("a tensor with unknown arguments")
    return _strided(args[0], args[0].dtype, args[1], args[2], args[3], args[4] if len(args) > 4 else False)


def _tensor_v3(args: tuple[Any, ...]) -> object:
    """torch._utils._rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])."""
    if len(args) == 8 and args[7]:
        return None
    if not 7 <= len(args) <= 8 or type(args[6]) is not DTypeRef:
        raise Damaged("a tensor with unknown arguments")
    return _strided(args[0], args[6].name, args[1], args[2], args[3], args[4])


def _parameter(args: tuple[Any, ...]) -> object:
    """torch._utils._rebuild_parameter(data, requires_grad, hooks[, state]): attributes set on a parameter are dropped."""
    if len(args) < 2 or type(args[0]) is not TensorRef:
        return None
    t = args[0]
    return TensorRef(t.dtype, t.shape, t.strides, t.storage_offset, t.key, t.storage_numel, t.location, args[1] is True, parameter=True)


def _typed(args: tuple[Any, ...]) -> object:
    """torch._tensor._rebuild_from_type_v2(function, type, args, state): attributes set on a tensor are dropped."""
    if len(args) != 4 or type(args[0]) is not Global or type(args[2]) is not tuple or args[0].module != "torch._utils":
        return None
    builder = _BUILDERS.get((args[0].module, args[0].name))
    value = builder(args[2]) if builder is not None else None
    return value if type(value) is TensorRef else None


def _reconstructor(args: tuple[Any, ...]) -> object:
    """copyreg._reconstructor(cls, object, None), how protocols 0 and 1 create objects."""
    if len(args) == 3 and type(args[0]) is Global and args[1] == Global("builtins", "object") and args[2] is None:
        return new_object(args[0], (), None)
    return None


def _new_object(args: tuple[Any, ...]) -> object:
    if not args or type(args[0]) is not Global:
        return None
    return new_object(args[0], args[1:], None)


def _new_object_ex(args: tuple[Any, ...]) -> object:
    if len(args) != 3 or type(args[0]) is not Global or type(args[1]) is not tuple or type(args[2]) is not dict:
        return None
    return new_object(args[0], args[1], args[2])


def _array(args: tuple[Any, ...]) -> object:
    return NumpyArray() if args and args[0] == Global("numpy", "ndarray") else None


_NUMBER = re.compile(r"[biufc][0-9]{1,2}")


def dtype_text(value: object) -> str | None:
    """numpy's string ("<u4") for a pickled dtype of plain numbers, None for any other."""
    if type(value) is not Record or (value.module, value.name) != ("numpy", "dtype") or not value.args or type(value.args[0]) is not str:
        return None
    state = value.state
    if type(state) is not tuple or len(state) != 8 or state[1] not in ("<", ">", "|", "=") or any(s is not None for s in state[2:5]):
        return None
    return f"{state[1]}{value.args[0]}" if _NUMBER.fullmatch(value.args[0]) else None


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)


def _fill_array(array: NumpyArray, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5 or not _is_shape(state[1]):
        raise Damaged("the state of a numpy array is not one")
    _, shape, dtype, fortran, data = state
    if type(dtype) is not Record or type(data) not in (bytes, list, bytearray):
        raise Damaged("the state of a numpy array is not one")
    array.dtype = dtype_text(dtype) or dtype
    array.shape, array.fortran, array.data = shape, bool(fortran), bytes(data) if type(data) is bytearray else data


def _from_buffer(args: tuple[Any, ...]) -> object:
    """numpy(._core).numeric._frombuffer(buffer, dtype, shape, order), protocol 5."""
    text = dtype_text(args[1]) if len(args) == 4 else None
    if text is None or type(args[0]) not in (bytes, bytearray) or not _is_shape(args[2]):
        return None
    return NumpyArray(text, args[2], bytes(args[0]), args[3] == "F")


def _scalar(args: tuple[Any, ...]) -> object:
    text = dtype_text(args[0]) if len(args) == 2 and type(args[1]) is bytes else None
    return None if text is None else NumpyScalar(text, args[1])


_Builder = Callable[[tuple[Any, ...]], object]


def _numpy_1(builder: _Builder) -> _Builder:
    def build(args: tuple[Any, ...]) -> object:
        value = builder(args)
        if type(value) is NumpyArray:
            value.core = "numpy.core"
        return NumpyScalar(value.dtype, value.data, "numpy.core") if type(value) is NumpyScalar else value

    return build


# What each known function returns; a builder that returns None leaves a Record.
_BUILDERS: dict[tuple[str, str], _Builder] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): lambda args: DefaultDict(*args) if len(args) < 2 else None,
    ("argparse", "Namespace"): lambda args: None if args else Namespace(),
    ("types", "SimpleNamespace"): _simple_namespace,
    ("_codecs", "encode"): _encode,
    ("builtins", "set"): lambda args: set(_check_elements(args[0]) if args else ()),
    ("builtins", "frozenset"): lambda args: frozenset(_check_elements(args[0]) if args else ()),
    ("builtins", "bytearray"): _byte_array,
    ("builtins", "bytes"): lambda args: None if args else b"",
    ("builtins", "complex"): _complex,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copyreg", "__newobj__"): _new_object,
    ("copyreg", "__newobj_ex__"): _new_object_ex,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy.core.multiarray", "_reconstruct"): _numpy_1(_array),
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.multiarray", "scalar"): _numpy_1(_scalar),
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy.core.numeric", "_frombuffer"): _numpy_1(_from_buffer),
}
_NEW: dict[tuple[str, str], _Builder] = {
    key: _BUILDERS[key] for key in (("collections", "OrderedDict"), ("argparse", "Namespace"), ("types", "SimpleNamespace"))
}
