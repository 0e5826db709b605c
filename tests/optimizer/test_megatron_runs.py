"""Optimizer state that megatron-core saved, in every form and layout, is read as exactly what its ranks had in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from optimizer.conftest import JOBS, Runs, differing, truth

from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.errors import CkptError
from ckpt_tools.optimizer.reading import read_optimizer, repair_optimizer
from ckpt_tools.views import as_mcore

pytestmark = pytest.mark.oracle
# several buckets whose ends are padded: 0.15 to 0.19 save fully_reshardable state shifted
SHIFTED = {"tp2dp2", "ep2dp4", "tp2dp2_0.19.2", "ep2dp4_0.19.2"}
CASES = [(name, form) for name, job in JOBS.items() for form in (*job["forms"], *(["legacy"] if job.get("legacy") else []))]


def read(folder: Path, **options: int):
    checkpoint = open_checkpoint(str(folder))
    view = as_mcore(checkpoint)
    return checkpoint, view, read_optimizer(checkpoint, view, **options)


@pytest.mark.parametrize(("name", "form"), [c for c in CASES if not (c[0] in SHIFTED and c[1] == "fully_reshardable")])
def test_every_form_is_what_the_ranks_had_in_memory(runs: Runs, name: str, form: str):
    _, view, state = read(runs.run(name, form))
    whole = truth(runs.folder / name, 2)
    assert set(state.tensors) == ({"exp_avg", "exp_avg_sq"} if state.kind == "float32" else {"param", "exp_avg", "exp_avg_sq"})
    assert all(set(named) == set(view.tensors) for named in state.tensors.values())
    assert differing(state.tensors, whole) == {}
    assert state.problems == ()
    assert state.step == 2
    assert {g["wd_mult"] for g in state.groups} == {0.0, 1.0}
    assert sum(g["is_expert_parallel"] for g in state.groups) == (1 if "ep2" in name else 0)


@pytest.mark.parametrize("name", sorted(SHIFTED))
def test_state_saved_shifted_is_told_and_put_right(runs: Runs, name: str):
    """The error of 0.15 to 0.19: what is wrong is found without knowing the layout; every saved element comes back to its own parameter."""
    checkpoint, view, state = read(runs.run(name, "fully_reshardable"))
    whole = truth(runs.folder / name, 2)
    wrong = differing(state.tensors, whole)
    assert wrong
    told = {n for problem in state.problems for n in problem.subject.split(", ")}
    assert told & {n.split(" ", 1)[1] for n in wrong}
    right, repair = repair_optimizer(state, checkpoint, view)
    left = differing(right.tensors, whole)
    assert sum(left.values()) <= repair.lost < 0.01 * repair.elements
    assert right.problems == ()
    assert str(repair.lost) in right.notes[-1].text


def test_a_good_state_is_not_repaired(runs: Runs):
    checkpoint, view, state = read(runs.run("pp2vpp2dp2", "fully_reshardable"))
    with pytest.raises(CkptError, match="cannot be repaired"):
        repair_optimizer(state, checkpoint, view)
