"""A legacy run that ckpt moved to another layout goes on in megatron-core: what it loads is what was saved, its next step the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ckpt
from optimizer.conftest import JOBS, Runs, truth
from oracle import launch

pytestmark = pytest.mark.oracle
# (run, sizes of the target on four ranks)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "distributed, tp to pp": ("tp2dp2", {"tp": 1, "pp": 2}),
    "distributed, pp to tp, tied": ("pp2dp2_tied", {"tp": 2, "pp": 1}),
    "distributed, virtual stages to more stages": ("pp2vpp2dp2", {"pp": 4, "vpp": None}),
    "distributed, stages to virtual stages": ("pp2dp2_tied", {"pp": 2, "vpp": 2}),
    "distributed, experts on more ranks": ("ep2dp4", {"ep": 4}),
    "bfloat16 by index": ("tp2pp2_plain", {"tp": 4, "pp": 1}),
    "float32 by index": ("tp2pp2_plain_float32", {"tp": 1, "pp": 4}),
}


@pytest.fixture(scope="module")
def resumed(runs: Runs) -> dict[str, Path]:
    """Case -> folder of the run that went on."""
    jobs, folders = [], {}
    for number, (case, (name, sizes)) in enumerate(CASES.items()):
        job = {**runs.job(name), **sizes, "bucket_size": None}
        made, folders[case] = runs.folder / f"legacy_{number}", runs.folder / f"legacy_resumed_{number}"
        tp, pp, vpp, ep = (job.get(n) or 1 for n in ("tp", "pp", "vpp", "ep"))
        options = ["--tp", tp, "--pp", pp, "--vpp", vpp, "--ep", ep, "--dp", 4 // (tp * pp), "--padded-vocab-size", 256]
        done = ckpt("reshard", runs.run(name, "legacy"), made, *map(str, options), "--verify")
        assert done.returncode == 0, done.stderr
        jobs.append({**job, "checkpoint": str(made / "iter_0000002"), "output": str(folders[case])})
    outcomes = launch.run("legacy_resume", jobs, runs.folder, ranks=4)
    assert outcomes == [None] * len(jobs), next(o for o in outcomes if o)
    return folders


@pytest.mark.parametrize("case", CASES)
def test_what_was_loaded_is_what_was_saved(runs: Runs, resumed: dict[str, Path], case: str):
    before, after = truth(runs.folder / CASES[case][0], 2), truth(resumed[case], 2)
    assert {k: np.array_equal(after[k], before[k]) for k in before} == dict.fromkeys(before, True)


@pytest.mark.parametrize("case", CASES)
def test_the_next_step_is_the_one_the_saved_run_took(runs: Runs, resumed: dict[str, Path], case: str):
    name = CASES[case][0]
    start, before, after = truth(runs.folder / name, 2), truth(runs.folder / name, 3), truth(resumed[case], 3)
    # another layout adds up gradients in another order: of what the step changes, 1.4 % was measured to differ where activations are
    # bfloat16, and 5e-7 where they are float32
    limit = 0.1 if JOBS[name]["dtype"] == "bfloat16" else 1e-5
    for key, value in before.items():
        assert np.abs(after[key] - value).mean() <= limit * np.abs(value - start[key]).mean(), key
