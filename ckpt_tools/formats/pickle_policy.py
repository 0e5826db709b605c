"""Which names in a pickle are harmless, which are refused, and what plain value each harmless one becomes.

Two policies: `Inert` for torch.save files (unknown classes become Records), `IndexOnly` for `.metadata` (a short allow-list).
Sources: torch 2.13 torch/_utils.py, torch/_tensor.py (rebuild functions); numpy 1.26 and 2.4 (_reconstruct, scalar, _frombuffer).
"""

from __future__ import annotations

import sys
from typing import Any

from ..dtypes import BY_STORAGE, DTYPES
from ..errors import CkptError
from . import dcp_metadata
from .pickle_builders import build, call, new_object
from .pickle_state import Damaged
from .pickle_values import DTypeRef, Global, Record, Size, StorageRef

# Other spellings of the names in _HARMLESS.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "_io": "io", "pathlib._local": "pathlib", "exceptions": "builtins"}
_RENAMED_NAMES = {("__builtin__", old): new for old, new in (("xrange", "range"), ("long", "int"), ("unicode", "str"))}
# Python 2 modules, which unpicklers translate, and those that later Pythons dropped: a file may be read by any Python.
_STANDARD = frozenset(sys.stdlib_module_names) | frozenset(
    "__builtin__ builtins exceptions copy_reg cPickle cStringIO StringIO commands popen2 os2 ce riscos urllib2 urlparse "
    "robotparser httplib cookielib Cookie BaseHTTPServer SimpleHTTPServer CGIHTTPServer SocketServer xmlrpclib DocXMLRPCServer "
    "SimpleXMLRPCServer Queue repr ConfigParser Tkinter tkFileDialog tkSimpleDialog Dialog dbhash dumbdbm anydbm gdbm whichdb "
    "dummy_thread thread _winreg UserDict UserList UserString _abcoll imp distutils asyncore asynchat smtpd pipes nntplib "
    "telnetlib cgi crypt lib2to3 msilib spwd xdrlib nis ossaudiodev audioop sndhdr test".split()
)
_GETATTR = Global("builtins", "getattr")
# Harmless classes of the standard library: data, or objects that only hold data.
_HARMLESS: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        "set frozenset bytearray bytes complex slice range int float bool str list dict tuple object type NoneType Ellipsis NotImplemented "
        "getattr Exception ValueError TypeError RuntimeError KeyError OSError".split()
    ),
    "collections": frozenset({"OrderedDict", "defaultdict", "deque", "Counter"}),
    "argparse": frozenset({"Namespace"}),
    "types": frozenset({"SimpleNamespace"}),
    "copyreg": frozenset({"_reconstructor", "__newobj__", "__newobj_ex__"}),
    "_codecs": frozenset({"encode"}),
    "pathlib": frozenset({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}),
    "datetime": frozenset({"datetime", "date", "time", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "uuid": frozenset({"UUID", "SafeUUID"}),
    "signal": frozenset({"Signals", "Handlers"}),
    "io": frozenset({"BytesIO", "StringIO"}),
    "functools": frozenset({"partial"}),
    "random": frozenset({"Random"}),
    "array": frozenset({"array", "_array_reconstructor"}),
    "enum": frozenset({"Enum", "IntEnum"}),
}
# Names outside the standard library that run code, read files or unpickle when called; one ending in "." or "_" stands for all that begin
# so. Records are never called, but a copy of the file must not carry these on either.
_DANGEROUS = frozenset(
    """
    torch.load torch.save torch.compile torch.from_file torch.hub. torch.jit. torch.package. torch.export. torch.ops. torch._ops.
    torch.classes. torch._C._jit_ torch._C._import_ torch._C.import_ torch._C._from_file torch._inductor. torch._dynamo.
    torch.fx.graph_module. torch.fx._ torch.serialization.load torch.serialization._load torch.serialization._legacy_load
    torch.storage._load_from_bytes torch.testing. torch.utils.cpp_extension. torch.utils.collect_env. torch.utils.model_zoo.
    torch.utils.benchmark. torch.distributed.rpc. torch.multiprocessing. torch.distributed.elastic. torch.distributed.run.
    torch.distributed.launch.
    numpy.load numpy.save numpy.savez numpy.savez_compressed numpy.savetxt numpy.loadtxt numpy.genfromtxt numpy.fromfile
    numpy.memmap numpy.lib. numpy.f2py. numpy.distutils. numpy.testing. numpy.ctypeslib. numpy.core.memmap. numpy._core.memmap.
    numpy.core.records.fromfile numpy._core.records.fromfile numpy.core.multiarray.fromfile numpy._core.multiarray.fromfile
    pandas.read_ pandas.eval pandas.io. pandas.core.computation. joblib. dill. cloudpickle. ray.cloudpickle. jsonpickle. yaml.
    sympy.sympify sympy.parsing. numba. fsspec. requests. pip. setuptools. pkg_resources. IPython.
    """.split()
)
_DANGEROUS_PREFIXES = tuple(name for name in _DANGEROUS if name[-1] in "._")
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "short": "int16", "int": "int32", "long": "int64", "chalf": "complex32",  # noqa: E501
            "cfloat": "complex64", "cdouble": "complex128"}  # fmt: skip
# dtypes of torch that ckpt has no bytes for, but that may be named as values
_OTHER_DTYPES = frozenset("complex32 qint8 quint8 qint32 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16".split()) | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)
}


def refuse(name: str, where: str, why: str) -> CkptError:
    """The error for a name that must not be in a checkpoint."""
    return CkptError(
        "E501",
        f"the pickle refers to {name}, {why}",
        where=where,
        expected="data and tensors only",
        found=name,
        hint="nothing was run; do not load this file with torch.load or Megatron unless you trust whoever made it",
    )


def _is_member(args: tuple[Any, ...]) -> bool:
    """Whether getattr(*args) is a member of a class from outside the standard library: how enums were pickled by some Pythons."""
    if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
        return False
    return args[0].module.partition(".")[0] not in _STANDARD and args[1].isidentifier() and not args[1].startswith("_")


def _valid(module: str, name: str) -> bool:
    return all(part.isidentifier() or part in ("<locals>", "<lambda>") for part in f"{module}.{name}".split("."))


def torch_dtype(module: str, name: str) -> DTypeRef | None:
    """The DTypeRef of the global, None when it is no dtype."""
    name = _ALIASES.get(name, name)
    if module == "torch" and (name in DTYPES or name in _OTHER_DTYPES):
        return DTypeRef(name)
    return None


class Inert:
    """Known harmless names become plain data, other names outside the standard library Records; the rest is refused (E501)."""

    def __init__(self, where: str) -> None:
        self.where = where

    def resolve(self, module: str, name: str) -> object:
        """A Global or DTypeRef; E501 for names that could do harm."""
        shown = f"{module}.{name}"[:300]
        if not _valid(module, name):
            raise Damaged(f"{shown!r} is no name")
        name = _RENAMED_NAMES.get((module, name), name)
        module = _RENAMED.get(module, module)
        top = module.partition(".")[0]
        if top in _STANDARD:
            if name not in _HARMLESS.get(module, ()):
                raise refuse(shown, self.where, "which is part of Python itself and not data")
            return Global(module, name)
        parts = name.split(".")
        if any(part.startswith("__") and part.endswith("__") for part in parts) or not _STANDARD.isdisjoint(parts[:-1]):
            raise refuse(shown, self.where, "which reaches through one module into another")
        full = f"{module}.{name}"
        if full in _DANGEROUS or full.startswith(_DANGEROUS_PREFIXES):
            raise refuse(shown, self.where, "which can run code or open files")
        return torch_dtype(module, name) or Global(module, name)

    def call(self, function: object, args: tuple[Any, ...]) -> object:
        """Plain data for the functions known here, otherwise a Record."""
        if type(function) is not Global:
            raise Damaged("something that is no class or function is called")
        if function == _GETATTR and not _is_member(args):
            raise refuse("builtins.getattr", self.where, "which is part of Python itself and not data")
        return call(function, args)

    def new(self, cls: object, args: tuple[Any, ...], keywords: dict[str, Any] | None) -> object:
        """Plain data for the classes known here, otherwise a Record."""
        if type(cls) is not Global:
            raise Damaged("an object of something that is no class")
        return new_object(cls, args, keywords)

    def build(self, value: object, state: Any) -> None:
        """The state of a Record, the entries of a Namespace, the attributes of an OrderedDict, the content of an array."""
        build(value, state)

    def persistent(self, identifier: object) -> object:
        """A StorageRef for torch's ("storage", class, key, location, elements)."""
        if type(identifier) is not tuple or len(identifier) != 5 or identifier[0] != "storage":
            raise Damaged("a persistent id that is no torch storage")
        _, cls, key, location, numel = identifier
        if type(key) is not str or type(location) is not str or type(numel) is not int or numel < 0 or type(cls) is not Global:
            raise Damaged("a persistent id that is no torch storage")
        if cls.module not in ("torch", "torch.cuda", "torch.storage") or not (cls.name in BY_STORAGE or cls.name == "UntypedStorage"):
            raise CkptError("E206", f"storages of class {cls!r} are not supported", where=self.where)
        return StorageRef(BY_STORAGE[cls.name].name if cls.name in BY_STORAGE else None, key, location, numel)


class IndexOnly:
    """The names that torch and megatron-core write into `.metadata`; anything else is refused (E501)."""

    fast = frozenset(dcp_metadata.CLASSES.values())

    def __init__(self, where: str) -> None:
        self.where = where

    def resolve(self, module: str, name: str) -> object:
        """A stand-in class, Size, a DTypeRef or a Global; E501 for every other name."""
        key = (module, name)
        cls = dcp_metadata.CLASSES.get(key)
        if cls is not None:
            return cls
        if key == ("torch", "Size"):
            return Size
        known = torch_dtype(module, name)
        if known is None and key not in _INDEX_NAMES:
            raise refuse(f"{module}.{name}"[:300], self.where, "which has no place in .metadata")
        return known or Global(_RENAMED.get(module, module), name)

    def call(self, function: object, args: tuple[Any, ...]) -> object:
        """Plain data for layouts, memory formats and dicts, otherwise a Record."""
        if type(function) is not Global:
            raise Damaged("something that is no class or function is called")
        if function.name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING") and len(args) == 1 and type(args[0]) is int:
            return args[0]
        if function.name == "_get_layout" and len(args) == 1 and type(args[0]) is str:
            return args[0].removeprefix("torch.")
        if function.name in ("OrderedDict", "defaultdict") and len(args) < 2:
            return {}
        if function.name in ("encode", "set"):
            return call(function, args)
        return Record(function.module, function.name, args)

    def new(self, cls: object, args: tuple[Any, ...], keywords: dict[str, Any] | None) -> object:
        """A Record, for the classes of save plans."""
        if type(cls) is not Global or keywords is not None:
            raise Damaged("an object of something that is no class")
        return Record(cls.module, cls.name, args, created="newobj")

    def build(self, value: object, state: Any) -> None:
        """The state of TensorProperties or a Record."""
        if type(value) is dcp_metadata.RawProperties or type(value) is Record:
            value.state = state
        else:
            raise Damaged(f"state for a {type(value).__name__}")

    def persistent(self, identifier: object) -> object:
        """Always Damaged: `.metadata` holds no tensors."""
        raise Damaged("a persistent id in .metadata")


_PLANNER, _FILESYSTEM = "torch.distributed.checkpoint.planner", "torch.distributed.checkpoint.filesystem"
_INDEX_NAMES = frozenset(
    {
        (dcp_metadata.DCP, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        (_FILESYSTEM, "_StoragePrefix"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("builtins", "dict"),
        ("builtins", "list"),
        ("builtins", "set"),
        ("__builtin__", "set"),
        ("_codecs", "encode"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
        *((_PLANNER, n) for n in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    }
)
