"""Block operations behind convert and reshard, three times under the same names: numpy (the reference), torch (anywhere), Triton (CUDA).

A backend is a module with the functions of `Backend`. Importing this package imports none of them:

    >>> import numpy as np
    >>> from ckpt_tools.kernels import backend
    >>> from ckpt_tools.kernels.tables import interleaved_rows
    >>> gate, up, merged = np.zeros((2, 3), "u2"), np.ones((2, 3), "u2"), np.empty((4, 3), "u2")
    >>> backend("numpy").move(interleaved_rows((1, 1), groups=2, row=3 * 2, item=2), [gate, up], [merged])
    >>> merged[:, 0].tolist()
    [0, 1, 0, 1]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CkptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..planning import Move

_MODULES = {"numpy": "numpy_backend", "torch": "torch_backend", "triton": "triton_backend"}
_NEEDS = {"torch": "pip install 'ckpt-tools[train]'", "triton": "pip install 'ckpt-tools[gpu]'"}


class Backend(Protocol):
    """The block operations. Arrays are numpy arrays or torch tensors; results are contiguous and new."""

    def move(self, moves: Iterable[Move], sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy the boxes of a table (see `tables`) from contiguous sources into contiguous targets."""

    def cast(self, values: Any, dtype: str, add: float = 0.0) -> tuple[Any, int]:
        """Round to nearest even; and how many finite values became infinite or NaN."""

    def dequantise_blocks(self, values: Any, scales: Any, block: tuple[int, int] = (128, 128), dtype: str = "bfloat16") -> Any:
        """float8 [..., R, C] times one scale per block."""

    def quantise_blocks(self, values: Any, block: tuple[int, int] = (128, 128), dtype: str = "float8_e4m3fn") -> tuple[Any, Any]:
        """Floats [..., R, C] -> float8 and float32 scales."""

    def dequantise_mxfp4(self, blocks: Any, scales: Any, dtype: str = "bfloat16") -> Any:
        """MXFP4 blocks [..., B, 16] and scales [..., B] -> [..., 32 * B]."""


def backend(name: str) -> Backend:
    """The backend called "numpy", "torch" or "triton". CkptError E901 when its library is not installed."""
    from importlib import import_module

    if name not in _MODULES:
        raise CkptError("E901", f"there is no backend {name!r}", expected=", ".join(_MODULES))
    try:
        module: Backend = import_module(f".{_MODULES[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise CkptError("E901", f"{error.name} is not installed", hint=_NEEDS[error.name]) from None
    return module


def backend_for(array: Any) -> Backend:
    """The backend for an array: numpy for numpy arrays, Triton for CUDA tensors (torch without Triton), torch for other tensors."""
    if not hasattr(array, "is_cuda"):
        return backend("numpy")
    if array.is_cuda:
        try:
            return backend("triton")
        except CkptError:
            pass
    return backend("torch")
