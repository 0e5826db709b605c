"""The backends as fixtures: `reference` is numpy; `other` is torch, interpreted Triton and, on a machine with a GPU, both on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from kernel_backends import Face, InterpretedTriton

GPU = any(
    map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
)  # asked of the system: importing torch here would slow collection


@pytest.fixture(scope="session")
def reference() -> Face:
    return Face("numpy")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[InterpretedTriton]:
    pytest.importorskip("torch")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    process = InterpretedTriton()
    yield process
    process.close()


@pytest.fixture(scope="session", params=["torch", "triton interpreted", *(["triton cuda", "torch cuda"] if GPU else [])])
def other(request: pytest.FixtureRequest) -> Face:
    torch = pytest.importorskip("torch")
    name, _, where = request.param.partition(" ")
    if where == "interpreted":
        return Face(name, request.getfixturevalue("interpreter"))
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch cannot use this machine's GPU")
    return Face(name, device=where or "cpu")
