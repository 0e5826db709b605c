"""Starts the programs of this folder in processes of their own, against a chosen megatron-core, and survives jobs that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# where each megatron-core lies; None: the one installed in this environment
MEGATRON: dict[str, Path | None] = {
    "0.16.1": None,
    "0.19.2": Path(os.environ.get("CKPT_TEST_MCORE019", HERE.parents[1] / ".venv" / "mcore019")),
}
SECONDS = 300


def available(version: str) -> bool:
    """Whether the megatron-core `version` can be started here."""
    folder = MEGATRON[version]
    return folder is None or (folder / "megatron" / "core").is_dir()


def run(program: str, jobs: Sequence[dict[str, Any]], scratch: Path, version: str = "0.16.1", ranks: int = 1) -> list[str | None]:
    """Run `program`.py of this folder on `jobs`, all in one process per rank; for each job None, or the end of what it said on failing.

    A failing job ends the program, which is then started again for the jobs after it. `scratch` is an existing folder for the job lists.
    """
    outcomes: list[str | None] = []
    while len(outcomes) < len(jobs):
        path = scratch / f"{program}_{version}_{ranks}_{len(outcomes)}.json"
        path.write_text(json.dumps(jobs[len(outcomes) :]))
        done = path.with_suffix(".done")
        done.unlink(missing_ok=True)
        said = _start(program, path, version, ranks)
        finished = int(done.read_text()) if done.exists() else 0
        outcomes += [None] * finished
        if len(outcomes) < len(jobs):
            outcomes.append(said or f"{program} ended without finishing its jobs and without a word")
    return outcomes


def _start(program: str, jobs: Path, version: str, ranks: int) -> str:
    """Start the program once; the tail of its output when it failed, else ''."""
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / f"{program}.py"), str(jobs)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(MEGATRON[version] or ""),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "PYTHONWARNINGS": "ignore",
    }
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{program}: no end after {SECONDS} s"
    if process.returncode == 0:
        return ""
    return _first_failure(process.stdout + process.stderr)


def _first_failure(output: str) -> str:
    """The last traceback of one rank, without torchrun's own report."""
    before, marker, _ = output.partition("ChildFailedError")
    lines = [line for line in (before if marker else output).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("[rank0]:")]
    return "\n".join((own or lines)[-25:])
