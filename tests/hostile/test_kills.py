"""SIGKILL at random points of a conversion and of a reshard: never a DST that opens and is wrong, never a harmed source; --resume ends it.

`make soak` kills many more times than a normal test run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, write_hf

ROOT = Path(__file__).parents[2]
KILLS = 200 if os.environ.get("CKPT_SOAK") else 12
SIZES = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 16384}


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """An HF folder of about 130 MB, the legacy run it makes at TP2, and what both runs give when nobody kills them."""
    base = tmp_path_factory.mktemp("kills")
    rng = np.random.default_rng(0)
    write_hf(
        base / "hf",
        shards=3,
        tensors={n: rng.standard_normal(s, dtype=np.float32) for n, s in dense_shapes({**CONFIG, **SIZES}).items()},
        **SIZES,
    )
    assert ckpt("convert", base / "hf", base / "run", "--to", "torch", "--tp", "2").returncode == 0
    made = {}
    for name, arguments in JOBS.items():
        assert ckpt(*arguments(base, base / f"whole-{name}")).returncode == 0
        made[name] = files(base / f"whole-{name}")
    yield base, made
    shutil.rmtree(base)


JOBS = {
    "convert": lambda base, out: ("convert", base / "hf", out, "--to", "torch_dist", "--tp", "2", "--no-progress"),
    "reshard": lambda base, out: ("reshard", base / "run", out, "--tp", "1", "--pp", "2", "--no-progress"),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_run_killed_anywhere_leaves_no_target_and_is_taken_up(places, tmp_path, job):
    base, whole = places
    random, killed, resumed = Random(job), 0, 0
    source = files(base / ("hf" if job == "convert" else "run"))
    started = time.monotonic()
    assert ckpt(*JOBS[job](base, tmp_path / "timed")).returncode == 0
    usual = time.monotonic() - started
    shutil.rmtree(tmp_path / "timed")
    out = tmp_path / "out"
    for _ in range(KILLS):
        arguments = [str(a) for a in (*JOBS[job](base, out), "--resume")]
        run = subprocess.Popen(
            [sys.executable, "-m", "ckpt_tools", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            text, said = run.communicate(timeout=random.uniform(0.3, 1.1) * usual)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.communicate()
            killed += 1
            if not out.exists():
                continue
        else:
            assert run.returncode == 0, said
            resumed += "already written" in text
        assert files(out) == whole[job]
        shutil.rmtree(out)
    done = ckpt(*JOBS[job](base, out), "--resume")
    assert done.returncode == 0 and files(out) == whole[job]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert files(base / ("hf" if job == "convert" else "run")) == source
    assert killed >= KILLS // 4
    print(f"{job}: killed {killed} of {KILLS} times, taken up {resumed} times")
