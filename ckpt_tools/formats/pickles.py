"""Reads pickles as inert data: nothing is imported, nothing is called, and a hostile file costs bounded time and memory.

    value = load(data, where="common.pt", policy="inert")
    metadata = load(data, where=".metadata", policy="metadata", max_bytes=4 * 2**30)
"""

from __future__ import annotations

import gc
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal

from ..errors import CkptError
from . import dcp_metadata
from .dcp_metadata import check_metadata
from .pickle_machine import run
from .pickle_policy import IndexOnly, Inert
from .pickle_state import Damaged, Excessive, State
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

__all__ = [
    "DTypeRef",
    "DefaultDict",
    "Global",
    "Namespace",
    "NumpyArray",
    "NumpyScalar",
    "Record",
    "Size",
    "StorageRef",
    "TensorRef",
    "TensorSpec",
    "load",
]

MAX_BYTES = 256 * 2**20
MAX_NESTING = 100
_FREE_NODES = 1_000_000  # a structure may always be walked to this many values, however often it shares its parts
# Bytes of memory that one opcode byte makes the interpreter allocate.
_COSTS = {b"}": 64, b"]": 56, b"\x8f": 216, b"\x81": 250, b"R": 250, b"(": 8, b"\x85": 48, b"2": 8}


def load(data: bytes, *, where: str, policy: Literal["inert", "metadata"] = "inert", max_bytes: int = MAX_BYTES) -> Any:
    """The content of a pickle (protocols 0 to 5) as inert data.

    policy "inert": containers, numbers and strings as they are; known harmless objects as the classes exported here; objects of unknown
    classes as Records; E501 naming the global when it is a function of Python itself, or known to run code or open files.
    policy "metadata": a dcp_metadata.Metadata with checked fields; E501 for every name that torch and megatron-core do not write there.
    Errors: E203 damaged or truncated, E502 too large, nested or shared too much, E206 unsupported dtype. `where` is the file named in them.
    """
    if len(data) > max_bytes:
        limit, size = f"at most {max_bytes} bytes", f"{len(data)} bytes"
        raise CkptError("E502", "the pickle is larger than ckpt accepts", where=where, expected=limit, found=size)
    needed = sum(cost * data.count(code) for code, cost in _COSTS.items())
    if needed > max(2 * 2**30, 24 * len(data)):
        raise CkptError("E502", "the pickle would need far more memory than its size", where=where, found=f"{needed} bytes for {len(data)}")
    if policy == "metadata":
        state = State(data, IndexOnly(where), IndexOnly.fast, skip="all_local_plans")
    else:
        state = State(data, Inert(where))
    collecting = gc.isenabled()
    gc.disable()  # a million new objects and no garbage: collections would only cost time
    try:
        value = run(state)
        if policy == "metadata":
            metadata = check_metadata(value, where)
            check_nesting([metadata.planner_data, getattr(metadata, "mcore_data", None)])
            return metadata
        check_nesting(value)
        return value
    except Excessive as error:
        raise CkptError("E502", f"the pickle is built to exhaust the reader: {error}", where=where) from None
    except CkptError as error:
        if error.where is None:
            error.where = where
        raise
    except (Damaged, IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        reason = str(error) if isinstance(error, Damaged) else "it ends too early or is garbled"
        raise CkptError("E203", f"the pickle is damaged: {reason}", where=where, hint="copy the file again; it may be truncated") from None
    except (MemoryError, RecursionError):
        raise CkptError("E502", "the pickle is built to exhaust the reader", where=where) from None
    finally:
        if collecting:
            gc.enable()


def children(value: object) -> Iterator[object]:
    """The values directly inside a container or Record; nothing for everything else."""
    kind = type(value)
    if isinstance(value, dict):
        yield from value
        yield from value.values()
        if kind is OrderedDict:
            yield from vars(value).values()
        elif kind is DefaultDict:
            yield value.factory  # type: ignore[attr-defined]
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif kind is Record:
        yield from value.args  # type: ignore[attr-defined]
        yield value.state  # type: ignore[attr-defined]
        yield from value.items  # type: ignore[attr-defined]
        yield from value.pairs  # type: ignore[attr-defined]
        yield from value.pairs.values()  # type: ignore[attr-defined]
    elif kind is NumpyArray:
        yield value.dtype  # type: ignore[attr-defined]
        if type(value.data) is list:  # type: ignore[attr-defined]
            yield from value.data  # type: ignore[attr-defined]


_CONTAINERS = (dict, list, tuple, set, frozenset, Record, NumpyArray)


def check_nesting(root: object) -> None:
    """Excessive when walking `root` would go deeper than 100 levels, never end, or visit shared parts unreasonably often.

    Cycles are let through only when they pass a Record, which nobody walks into.
    """
    sizes: dict[int, int] = {}
    heights: dict[int, int] = {}
    edges = 0
    open_nodes: dict[int, int] = {}
    path: list[tuple[object, Iterator[object]]] = []
    totals: list[int] = []
    below: list[int] = []

    def enter(node: object) -> None:
        open_nodes[id(node)] = len(path)
        path.append((node, children(node)))
        totals.append(1)
        below.append(0)

    if not isinstance(root, _CONTAINERS):
        return
    enter(root)
    while path:
        node, remaining = path[-1]
        for child in remaining:
            edges += 1
            if not isinstance(child, _CONTAINERS):
                totals[-1] += 1
            elif id(child) in sizes:
                totals[-1] += sizes[id(child)]
                below[-1] = max(below[-1], heights[id(child)])
            elif id(child) in open_nodes:
                if not any(type(n) is Record for n, _ in path[open_nodes[id(child)] :]):
                    raise Excessive("it contains itself")
            else:
                enter(child)
                break
            if len(path) + below[-1] > MAX_NESTING:
                raise Excessive(f"it is nested more than {MAX_NESTING} levels deep")
        else:
            path.pop()
            del open_nodes[id(node)]
            sizes[id(node)] = total = totals.pop()
            heights[id(node)] = height = below.pop() + 1
            if total > _FREE_NODES + 16 * edges:
                raise Excessive("it repeats its parts too often")
            if path:
                totals[-1] += total
                below[-1] = max(below[-1], height)
        if len(path) > MAX_NESTING:
            raise Excessive(f"it is nested more than {MAX_NESTING} levels deep")


Metadata = dcp_metadata.Metadata
