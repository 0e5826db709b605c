"""The kernel backends behind one face for tests, numpy arrays in and out; Triton under its interpreter in a process of its own.

Triton decides when it is first imported whether its programs are interpreted, so that is not left to the order in which tests run.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array as unsigned integers of its item size."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def to_torch(array: np.ndarray, device: str = "cpu") -> Any:
    """A tensor with the same bytes (and memory, on the CPU) as the array."""
    import torch

    signed = {"u": "i", "V": "i", "f": "i"}
    size = array.dtype.itemsize
    raw = torch.from_numpy(array.view("u1" if size == 1 else f"{signed.get(array.dtype.kind, 'i')}{size}").reshape(array.shape))
    return raw.view(getattr(torch, array.dtype.name)).to(device)


def to_numpy(tensor: Any) -> np.ndarray:
    """An array with the same bytes as the tensor."""
    import torch

    from ckpt_tools.dtypes import dtype

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array = tensor.detach().cpu().contiguous().view(words[tensor.element_size()]).numpy()
    return array.view(dtype(str(tensor.dtype)).to_numpy()).reshape(tuple(tensor.shape))


def on_tensors(name: str, function: str, arguments: tuple[Any, ...], device: str = "cpu") -> Any:
    """Call `function` of a torch-based backend with arrays made tensors. "move" returns its targets."""
    from ckpt_tools.kernels import backend

    def there(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return to_torch(value.copy(), device)
        return [there(v) for v in value] if isinstance(value, list) else value

    def back(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(back(v) for v in value)
        return to_numpy(value) if hasattr(value, "is_cuda") else value

    given = [there(a) for a in arguments]
    result = getattr(backend(name), function)(*given)
    return back(given[-1] if function == "move" else result)


class InterpretedTriton:
    """The Triton backend on the CPU, in a process started with TRITON_INTERPRET=1."""

    def __init__(self) -> None:
        path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT / "tests" / "kernels",
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        )

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """What `on_tensors("triton", ...)` returns there; what it raises is raised here."""
        assert self.process.stdin and self.process.stdout
        pickle.dump((function, arguments), self.process.stdin)
        self.process.stdin.flush()
        good, value = pickle.load(self.process.stdout)
        if not good:
            raise AssertionError(value)
        return value

    def close(self) -> None:
        """End the process."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


class Face:
    """`Face("torch").cast(...)`: the operations of one backend on numpy arrays."""

    def __init__(self, name: str, interpreter: InterpretedTriton | None = None, device: str = "cpu") -> None:
        self.name, self.interpreter, self.device = name, interpreter, device

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.name == "numpy":
                from ckpt_tools.kernels import backend

                result = getattr(backend("numpy"), function)(*arguments)
                return arguments[-1] if function == "move" else result
            if self.interpreter is not None:
                return self.interpreter.call(function, arguments)
            return on_tensors(self.name, function, arguments, self.device)

        return call


def serve() -> None:
    """Answer calls from standard input until it ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    while True:
        try:
            function, arguments = pickle.load(source)
        except EOFError:
            return
        try:
            answer = (True, on_tensors("triton", function, arguments))
        except Exception:
            import traceback

            answer = (False, traceback.format_exc())
        pickle.dump(answer, sink)
        sink.flush()


if __name__ == "__main__":
    serve()
