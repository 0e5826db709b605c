"""Copies of a tensor must be equal, those that ranks of a legacy checkpoint hold and those that an HF file repeats under another name:
compared byte for byte, never averaged or chosen."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from .errors import CkptError
from .families.family import copies
from .verify import compare

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .formats.torch_legacy import Legacy, Replica
    from .views import View

BLOCK = 4 << 20  # bytes that are looked at together when differences are counted


def check_replicas(legacy: Legacy, *, buffer: int = 256 * 1024, threads: int = 2) -> int:
    """Compare every copy with the one that is used; returns the bytes compared.

    CkptError E225 naming the tensor, the two holders, how many elements differ and by how much, and what else differs.
    """
    used = {f"{i} {r.name}": r.used for i, r in enumerate(legacy.replicas)}
    copies = {f"{i} {r.name}": r.copy for i, r in enumerate(legacy.replicas)}
    try:
        return compare(used, copies, buffer=buffer, threads=threads)
    except CkptError as error:
        if error.code not in ("E411", "E412"):
            raise
    told = [(replica, *difference(replica)) for replica in legacy.replicas]
    wrong = [(replica, count, largest) for replica, count, largest in told if count]
    if not wrong:
        raise CkptError("E406", "the files changed while their copies were compared", where=legacy.directory)
    first, count, largest = wrong[0]
    others = sorted({r.name for r, _, _ in wrong} - {first.name})
    more = f"; copies of {len(others)} other tensors differ: {', '.join(others[:4])}" if others else ""
    raise CkptError(
        "E225",
        f"the copies of {first.name} on different ranks are not equal",
        where=f"{legacy.directory}: {first.name}",
        expected=f"{first.holders[0]} and {first.holders[1]} hold the same bytes",
        found=f"{count} of {first.used.numel} elements differ, by at most {largest:g}{more}",
        hint="the ranks drifted apart in training; --replicas first takes the first rank's copy",
    )


def check_copies(checkpoint: Checkpoint, view: View, *, buffer: int = 256 * 1024, threads: int = 2) -> int:
    """Compare every tensor that an HF checkpoint repeats under another name (embedding and head of prediction layers) with its original;
    returns the bytes compared. CkptError E225 naming both."""
    if view.family is None:
        return 0
    pairs = [(c, o) for c, o in copies(view.family, view.dims) if c in checkpoint.tensors and o in checkpoint.tensors]
    compared = 0
    for copy, original in pairs:
        expected, found = checkpoint.tensors[original], checkpoint.tensors[copy]
        try:
            if found.dtype != expected.dtype:
                raise CkptError("E412", "", expected=expected.dtype, found=found.dtype)
            compared += compare({original: expected}, {original: replace(found, fqn=original)}, buffer=buffer, threads=threads)
        except CkptError as error:
            if error.code not in ("E411", "E412"):
                raise
            raise CkptError(
                "E225",
                f"{copy} should be a copy of {original}, and is not",
                where=f"{checkpoint.location.directory}: {copy}",
                expected=error.expected,
                found=error.found,
                hint="Megatron-Core has one tensor for both: the model cannot be held as it is",
            ) from None
    return compared


def difference(replica: Replica) -> tuple[int, float]:
    """(elements whose bytes differ, largest difference of their values; inf for a shape that differs)."""
    import numpy as np

    from .lazy import read_box

    shape = replica.used.global_shape
    if shape != replica.copy.global_shape:
        return replica.used.numel, float("inf")
    rows = shape[0] if shape else 1
    step = max(1, BLOCK * rows // max(1, replica.used.nbytes))
    count, largest = 0, 0.0
    for start in range(0, rows, step):
        offset = (start, *(0,) * (len(shape) - 1)) if shape else ()
        size = (min(step, rows - start), *shape[1:]) if shape else ()
        a, b = read_box(replica.used, offset, size), read_box(replica.copy, offset, size)
        bits = prod(size)
        differ = (a.reshape(bits, 1).view(np.uint8) != b.reshape(bits, 1).view(np.uint8)).any(axis=1)
        if not differ.any():
            continue
        count += int(np.count_nonzero(differ))
        wide = np.abs(a.reshape(-1)[differ].astype(np.float64) - b.reshape(-1)[differ].astype(np.float64))
        largest = max(largest, float(np.max(wide, initial=0.0, where=~np.isnan(wide))))
    return count, largest
