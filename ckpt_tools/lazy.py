"""A tensor that is read when asked for, and only the part asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .dtypes import dtype
from .errors import CkptError
from .source_files import open_source
from .strided import load_block
from .tensors import Chunk, Shape, TensorMetadata, whole

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a checkpoint or view; nothing is read until it is indexed.

    w = checkpoint["lm_head.weight"]
    w.shape, w.dtype, w.nbytes        # from the header
    w[:10]                            # reads ten rows: numpy array (ml_dtypes for bfloat16 and float8)
    w.numpy(), w.torch()              # all of it
    """

    metadata: TensorMetadata

    @property
    def shape(self) -> Shape:
        """Global shape."""
        return self.metadata.shape

    @property
    def dtype(self) -> str:
        """Name of the dtype, as torch spells it without the prefix."""
        return self.metadata.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.metadata.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, key: Any) -> np.ndarray:
        """numpy-style basic indexing (integers, slices, `...`); only the bytes of the enclosing box are read."""
        import numpy as np

        keys = key if isinstance(key, tuple) else (key,)
        if any(not (k is Ellipsis or isinstance(k, (slice, int, np.integer))) for k in keys) or keys.count(Ellipsis) > 1:
            raise TypeError("a lazy tensor takes integers, slices and one ellipsis")
        at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
        fill = (slice(None),) * (len(self.shape) - len([k for k in keys if k is not Ellipsis]))
        keys = keys[:at] + fill + keys[at + 1 :]
        if len(keys) != len(self.shape):
            raise IndexError(f"{len(keys)} indexes for {len(self.shape)} axes")
        offset: list[int] = []
        shape: list[int] = []
        rest: list[slice | int] = []
        for axis, (k, size) in enumerate(zip(keys, self.shape, strict=True)):
            if isinstance(k, slice):
                wanted = range(*k.indices(size))
                low = min(wanted[0], wanted[-1]) if len(wanted) else 0
                count = (max(wanted[0], wanted[-1]) - low + 1) if len(wanted) else 0
                offset.append(low)
                shape.append(count)
                last = wanted[-1] - low + (1 if wanted.step > 0 else -1) if len(wanted) else 0
                rest.append(
                    slice(None)
                    if wanted.step == 1
                    else slice(wanted[0] - low if len(wanted) else 0, None if last < 0 else last, wanted.step)
                )
            else:
                index = int(k) + (size if k < 0 else 0)
                if not 0 <= index < size:
                    raise IndexError(f"index {k} is out of bounds for axis {axis} of size {size}")
                offset.append(index)
                shape.append(1)
                rest.append(0)
        return _read_shown(self.metadata, tuple(offset), tuple(shape))[tuple(rest)]

    def numpy(self) -> np.ndarray:
        """The whole tensor as a numpy array."""
        return read_box(self.metadata, *whole(self.metadata.global_shape)).reshape(self.shape)

    def torch(self) -> Any:
        """The whole tensor as a torch tensor. CkptError E901 when torch is not installed."""
        try:
            import torch
        except ImportError:
            raise CkptError("E901", "torch is not installed", hint="pip install 'ckpt-tools[train]'") from None
        import numpy as np

        array = self.numpy()
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        kind = getattr(torch, self.dtype)
        return flat.view(kind).reshape(self.shape) if array.size else torch.empty(self.shape, dtype=kind)


def _read_shown(tensor: TensorMetadata, offset: Shape, shape: Shape) -> np.ndarray:
    """The box (offset, shape), given in the axes of tensor.shape; of a folded axis whole groups are read and cut."""
    if not tensor.folded:
        return read_box(tensor, offset, shape)
    axis = next(i for i, (a, b) in enumerate(zip(tensor.shape, tensor.global_shape, strict=False)) if a != b)
    inner = tensor.global_shape[axis + 1]
    first, last = offset[axis] // inner, -(-(offset[axis] + shape[axis]) // inner)
    before, after = slice(None, axis), slice(axis + 1, None)
    box = read_box(tensor, (*offset[before], first, 0, *offset[after]), (*shape[before], last - first, inner, *shape[after]))
    start = offset[axis] - first * inner
    joined = box.reshape(*shape[before], (last - first) * inner, *shape[after])
    return joined[(slice(None),) * axis + (slice(start, start + shape[axis]),)]


def read_box(tensor: TensorMetadata, offset: Shape, shape: Shape) -> np.ndarray:
    """The box (offset, shape) of a tensor as a new contiguous array; boxes stored nowhere are zeros."""
    import numpy as np

    kind = dtype(tensor.dtype).to_numpy()
    result: np.ndarray | None = None
    files: dict[str, int] = {}
    try:
        for part in tensor.region(offset, shape):
            if part.extent is None:
                continue
            fd = files.get(part.extent.path)
            if fd is None:
                fd = files[part.extent.path] = open_source(part.extent.path)
            stored = tensor.dtype if part.decode is None else part.decode.stored
            place = (part.extent.offset, part.local_shape, part.extent.strides or (), stored)
            if part.decode is not None and part.decode.scales:
                block = _load_scaled(_reader(fd, part.extent.path), place, part)
            else:
                block = load_block(_reader(fd, part.extent.path), *place)
            if part.decode is not None:
                from .kernels.casts import cast

                block = cast(block, kind, part.decode.value)[0]
            if part.local_shape == shape:  # the box is one stored piece: nothing to put together
                return block if block.flags.c_contiguous else block.copy()
            if result is None:
                result = np.zeros(shape, kind)
            at = tuple(slice(a - b, a - b + n) for a, b, n in zip(part.global_offset, offset, part.local_shape, strict=True))
            result[at] = block
    finally:
        for fd in files.values():
            os.close(fd)
    return np.zeros(shape, kind) if result is None else result


def _load_scaled(read: Callable[[int, memoryview], None], place: tuple[int, Shape, Shape, str], part: Chunk) -> np.ndarray:
    from .planning import move_of
    from .quantised import load_scaled

    paths: dict[str, int] = {}
    scale = move_of(part, "", (), "", lambda path: paths.setdefault(path, len(paths))).scale
    if scale is None:
        raise CkptError("E490", "a quantised tensor has no scales")
    path = list(paths)[scale.source]
    fd = open_source(path)
    try:
        return load_scaled(read, *place, scale, _reader(fd, path))
    finally:
        os.close(fd)


def _reader(fd: int, path: str) -> Callable[[int, memoryview], None]:
    def read(offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise CkptError("E406", "the file is shorter than its index says", where=path)
            done += count

    return read
