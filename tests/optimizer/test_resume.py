"""megatron-core loads what is written through the entries, and its next training step is that of the run that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optimizer.conftest import JOBS, Runs, truth
from oracle import launch

from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.execution import execute
from ckpt_tools.formats.torch_dist_writer import layout_torch_dist
from ckpt_tools.layout import ParallelLayout
from ckpt_tools.layout_args import source_layout
from ckpt_tools.optimizer.entries import FULLY_RESHARDABLE, NON_DISTRIBUTED, optimizer_entries
from ckpt_tools.optimizer.reading import read_optimizer
from ckpt_tools.planning import Plan, build_moves
from ckpt_tools.views import as_mcore

pytestmark = pytest.mark.oracle
SAME: dict[str, Any] = {}
# (run, form it was saved in, form to write, sizes of the target; SAME: those of the run)
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "buckets to names": ("pp2dp2_tied", "dp_reshardable", FULLY_RESHARDABLE, SAME),
    "gathered to names": ("pp2vpp2dp2", "dp_zero_gather_scatter", FULLY_RESHARDABLE, SAME),
    "legacy to names": ("tp2dp2", "legacy", FULLY_RESHARDABLE, SAME),
    "experts": ("ep2dp4", "dp_reshardable", FULLY_RESHARDABLE, SAME),
    "plain to plain": ("tp2pp2_plain", "legacy", NON_DISTRIBUTED, SAME),
    "buckets at another layout": ("pp2dp2_tied", "dp_reshardable", FULLY_RESHARDABLE, {"tp": 2, "pp": 1}),
    "float32 optimizer to the distributed one": ("tp2pp2_plain_float32", "plain", FULLY_RESHARDABLE, {"tp": 1, "pp": 2, "optimizer": "distributed"}),
    "the distributed optimizer to the float32 one": ("pp2dp2_tied", "dp_reshardable", NON_DISTRIBUTED, {"tp": 2, "pp": 2, "optimizer": "plain"}),
}  # fmt: skip


def rewrite(source: Path, target: Path, form: str, layout: ParallelLayout) -> None:
    """Write weights and optimizer state of `source` as torch_dist, through the entries."""
    checkpoint = open_checkpoint(str(source))
    view = as_mcore(checkpoint)
    state = read_optimizer(checkpoint, view)
    entries = optimizer_entries(state, form, weights=view.tensors, layout=layout)
    assert checkpoint.common is not None
    common = {k: v for k, v in checkpoint.common.items() if k != "optimizer"}
    common |= {"optimizer": entries.common, "content_metadata": {"singleton_local_shards": False, **entries.content}}
    tensors = {**{_stored(n): t for n, t in view.tensors.items()}, **{_stored(n): t for n, t in entries.tensors.items()}}
    dtypes = {**{_stored(n): t.dtype for n, t in view.tensors.items()}, **{_stored(n): d for n, d in entries.dtypes.items()}}
    choices: dict[str, Any] = {"stacked": True, "layers": view.dims.layers, "layout": layout, "gated": True}
    laid = layout_torch_dist(tensors, dtypes, common=common, iteration=2, **choices)
    moves = build_moves(tensors, laid.placements)
    execute(Plan({}, {}, moves.sources(), laid.files, laid.copies, tuple(moves.moves)), str(target))


def _stored(name: str) -> str:
    """The local spec's name of the norm before experts, which these models have."""
    return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")


@pytest.fixture(scope="module")
def resumed(runs: Runs) -> dict[str, Path]:
    """Case -> folder of the resumed run."""
    jobs, folders = [], {}
    for number, (case, (name, saved, form, sizes)) in enumerate(CASES.items()):
        job = {**runs.job(name), **sizes}
        layout = ParallelLayout(tp=job.get("tp", 1), pp=job.get("pp", 1), vpp=job.get("vpp") or 1, ep=job.get("ep", 1))
        if job.get("experts"):
            layout = ParallelLayout(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=1)
        run, output = runs.folder / f"rewritten_{number}", runs.folder / f"resumed_{number}"
        rewrite(runs.run(name, saved), run, form, layout)
        folders[case] = output
        jobs.append({**job, "checkpoint": str(run / "iter_0000002"), "output": str(output)})
    outcomes = launch.run("optimizer_runs", jobs, runs.folder, ranks=4)
    assert outcomes == [None] * len(jobs), next(o for o in outcomes if o)
    return folders


@pytest.mark.parametrize("case", CASES)
def test_what_was_loaded_is_what_was_saved(runs: Runs, resumed: dict[str, Path], case: str):
    before, after = truth(runs.folder / CASES[case][0], 2), truth(resumed[case], 2)
    assert {k: np.array_equal(after[k], before[k]) for k in before} == dict.fromkeys(before, True)


@pytest.mark.parametrize("case", CASES)
def test_the_next_step_is_the_one_the_saved_run_took(runs: Runs, resumed: dict[str, Path], case: str):
    name, _, _, sizes = CASES[case]
    before, after = truth(runs.folder / name, 3), truth(resumed[case], 3)
    for key, value in before.items():
        if not sizes:
            assert np.array_equal(after[key], value), key
        else:
            # another layout adds up gradients in another order: float32 rounding, which Adam's 1/sqrt(v) can blow up for gradients near 0,
            # but never beyond a fraction of a step of size 1e-3
            assert np.allclose(after[key], value, rtol=1e-4, atol=2e-5), (key, np.abs(after[key] - value).max())


def test_the_layouts_of_the_runs_are_read_from_their_arguments(runs: Runs):
    for name, job in JOBS.items():
        form = job["forms"][0]
        layout = source_layout(open_checkpoint(str(runs.run(name, form))).args or {})
        assert (layout.tp, layout.pp, layout.vpp, layout.ep) == tuple(job.get(k, 1) for k in ("tp", "pp", "vpp", "ep"))
        assert layout.tp * layout.pp * layout.dp == 4
