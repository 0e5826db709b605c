"""What all tests share: where the material lies, and the program in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The project's folder must not be on the import path: it holds `kernels`, the name of a real package that transformers looks for.
sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]


@dataclass(frozen=True)
class Finished:
    """How the program ended: exit status, what it wrote to stdout and to stderr."""

    rc: int
    out: str
    err: str


RunCkpt = Callable[..., Finished]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference checkpoints beside the project; the test is skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "real").is_dir():
        pytest.skip(f"no reference checkpoints: {folder} does not exist")
    return folder


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The tiny checkpoints that are part of the project."""
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def run_ckpt() -> RunCkpt:
    """run_ckpt("inspect", path, env={...}, cwd=...): the program in its own process, stdout and stderr being pipes."""

    def run(*arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 300) -> Finished:
        command = [sys.executable, "-m", "ckpt_tools", *(os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments)]
        base = {k: v for k, v in os.environ.items() if k not in ("CKPT_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS")}
        path = os.pathsep.join(p for p in (base.get("PYTHONPATH"), str(ROOT)) if p)
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env={**base, "PYTHONPATH": path, **(env or {})}, check=False
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run
