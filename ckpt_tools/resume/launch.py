"""Start the trainer's processes and hear how far they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import CkptError
from .job import Job, write_jobs

Heard = Callable[[str, int, int], None]  # (job, iteration, last iteration)
_NEEDED = ("torch", "megatron.core")
_NOISE = ("W1", "E1", "I1", "*****", "Setting OMP", "warnings.warn")


def check_installed() -> None:
    """CkptError E513 when the trainer's libraries are not there."""
    lacking = []
    for name in _NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            lacking.append(name)
    if lacking:
        raise CkptError(
            "E513",
            "training needs libraries that are not installed",
            found=f"no {', '.join(lacking)}",
            hint="pip install 'ckpt-tools[train]'",
        )


def train(jobs: Sequence[Job], ranks: int, folder: Path, on_step: Heard | None = None) -> None:
    """Run the jobs, one after the other, in `ranks` fresh processes. folder: an existing one for job lists and the processes' own words.

    Errors: E513 no torch or megatron-core, E514 a process failed: the last traceback is in `found`.
    """
    check_installed()
    name = jobs[0].name
    path, said = folder / f"{name}.jobs.json", folder / f"{name}.log"
    write_jobs(path, jobs)
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "ckpt_tools.resume.trainer", str(path)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_DISTRIBUTED_DEBUG": "OFF", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if ranks > 1:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with said.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            _listen(process, on_step)
        except BaseException:  # Ctrl-C: the processes are a group of their own and would train on
            _stop(process)
            raise
    if process.returncode:
        raise CkptError("E514", "training failed", where=", ".join(job.name for job in jobs), found=_last_words(said))


def _listen(process: subprocess.Popen[str], on_step: Heard | None) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"job"'):
            continue
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if on_step:
            on_step(told["job"], told["iteration"], told["until"])
    process.wait()


def _stop(process: subprocess.Popen[str]) -> None:
    import signal

    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(path: Path) -> str:
    """The last line that says what went wrong: of the first rank that failed, without torchrun's report about it."""
    before = []
    for line in path.read_text(errors="replace").splitlines():
        if "ChildFailedError" in line:
            break
        before.append(line)
    lines = [line.partition("]:")[2] if line.startswith("[rank") else line for line in before]
    lines = [line.strip() for line in lines if line.strip() and not line.startswith(_NOISE)]
    kept = deque((line for line in lines if ": " in line and not line.startswith(("File ", "~", "^"))), 3)
    wrong = [line for line in kept if line.split(":")[0].endswith(("Error", "Exception", "Interrupt"))]
    return (wrong or list(kept) or ["it said nothing"])[-1]
