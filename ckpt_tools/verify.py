"""Read back what was written and compare it, element for element, with the source under the source's own naming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from .blocks import make_tasks
from .dtypes import dtype
from .engine import Worker
from .errors import CkptError
from .execution import run_tasks
from .planning import Encoding, Move, encoding_of, move_of
from .source_files import allow, open_source
from .tensors import Shape, TensorMetadata, contiguous_strides, unfolded_alike


class CompareWorker(Worker):
    """A worker whose targets are files to be read and compared instead of written. CkptError E411 at the first difference."""

    def __init__(
        self, buffer: int, sources: Sequence[int], targets: Sequence[int], source_names: Sequence[str], target_names: Sequence[str]
    ) -> None:
        super().__init__(buffer, sources, targets, source_names)
        self._other = Worker(buffer, targets, (), target_names)
        self._target_names = target_names

    def write(self, target: int, offset: int, view: memoryview) -> None:
        """Compare `view` with what the target file holds there."""
        import numpy as np

        expected = np.frombuffer(view, np.uint8)
        for start in range(0, len(view), len(self._other._buffer)):
            part = expected[start : start + len(self._other._buffer)]
            block = self._other._buffer[: len(part)]
            self._other.read(target, offset + start, block)
            found = np.frombuffer(block, np.uint8)
            if not np.array_equal(part, found):
                first = int(np.argmax(part != found))
                raise CkptError(
                    "E411",
                    "what was written is not what was read",
                    where=self._target_names[target],
                    expected=f"byte {part[first]:#04x} at {offset + start + first}",
                    found=f"{found[first]:#04x}",
                    hint="this is a fault of the disk or a bug in ckpt; the result was not put in place",
                )


def compare(
    expected: Mapping[str, TensorMetadata],
    found: Mapping[str, TensorMetadata],
    *,
    buffer: int,
    threads: int,
    on_progress: Callable[[int], None] | None = None,
    quantised: Mapping[str, str] | None = None,
    block: Shape = (),
) -> int:
    """Compare every tensor of `expected` with the tensor of the same name in `found` (rows beyond the expected shape are not looked
    at). When the dtypes differ, `expected` is cast the way the conversion casts; what is named in `quantised` (name -> name of its scales)
    is quantised again in blocks of this size, and elements and scales are compared. Returns the bytes compared.

    Errors: E412 a tensor is missing or has another shape, E411 a byte differs.
    """
    sources: dict[str, int] = {}
    targets: dict[str, int] = {}
    moves: list[Move] = []
    encodings: list[Encoding] = []
    for name, tensor in expected.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            raise CkptError(
                "E412",
                f"the result does not hold {name} as it should",
                where=name,
                expected=f"{list(tensor.shape)}",
                found="nothing" if other is None else f"{list(other.shape)}",
            )
        if quantised and name in quantised:
            wanted = TensorMetadata(quantised[name], "float32", tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True)), ())
            places = _place(other, tensor.shape, targets), _place(found.get(wanted.fqn, wanted), wanted.shape, targets)
            encodings.append(encoding_of(tensor, other.dtype, block, *places, lambda path: sources.setdefault(path, len(sources))))
            continue
        moves.extend(_pairs(*unfolded_alike(tensor, other), sources, targets))
    allow(len(sources) + len(targets))
    source_fds, target_fds = [open_source(p) for p in sources], [open_source(p) for p in targets]
    try:
        tasks = make_tasks(moves, buffer, encodings)
        run_tasks(
            tasks,
            lambda: CompareWorker(buffer, source_fds, target_fds, list(sources), list(targets)),
            threads,
            on_progress or (lambda _: None),
        )
    finally:
        for fd in (*source_fds, *target_fds):
            os.close(fd)
    return sum(m.nbytes for m in moves) + sum(e.nbytes for e in encodings)


def _place(tensor: TensorMetadata, shape: Shape, targets: dict[str, int]) -> tuple[int, int]:
    """(file number, byte) of a stored matrix that lies row after row. CkptError E412 when it does not."""
    strides = contiguous_strides(shape, dtype(tensor.dtype).itemsize)
    chunk = tensor.chunks[0] if len(tensor.chunks) == 1 else None
    if chunk is None or chunk.extent is None or chunk.local_shape != shape or chunk.extent.strides != strides:
        raise CkptError("E412", f"the result does not hold {tensor.fqn} as it should", where=tensor.fqn, expected=f"{list(shape)}")
    return targets.setdefault(chunk.extent.path, len(targets)), chunk.extent.offset


def _pairs(expected: TensorMetadata, found: TensorMetadata, sources: dict[str, int], targets: dict[str, int]) -> Iterator[Move]:
    for chunk in expected.chunks:
        if chunk.extent is None or chunk.extent.strides is None:
            continue
        covered = 0
        for part in found.region(chunk.global_offset, chunk.local_shape):
            if part.extent is None or part.extent.strides is None:
                continue
            mine = chunk.cut(part.global_offset, part.local_shape)
            if mine.extent is None or mine.extent.strides is None:
                continue
            covered += 1
            move = move_of(mine, expected.dtype, part.extent.strides, found.dtype, lambda path: sources.setdefault(path, len(sources)))
            yield replace(move, target=targets.setdefault(part.extent.path, len(targets)), target_offset=part.extent.offset)
        if not covered and all(chunk.local_shape):
            raise CkptError("E412", f"the result does not hold all of {expected.fqn}", where=expected.fqn)
