"""State that Megatron-Core 0.10.0 saved in the forms that newer releases can no longer write (nor, since 0.16, read).

saved_by_0.10.0.tar.xz holds a one-layer model (hidden 16, ffn 20, 90 tokens) trained two steps at DP 2 in buckets of 1500 elements by
megatron-core 0.10.0 (wheel from PyPI, torch 2.13) with tests/oracle/optimizer_runs.py, adapted to that release: saved as
fully_sharded_bucket_space and fully_sharded_model_space, and the ranks' memory as truth_2_0.safetensors.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from optimizer.conftest import differing, truth

from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.layout import ParallelLayout
from ckpt_tools.optimizer.entries import FULLY_RESHARDABLE, optimizer_entries
from ckpt_tools.optimizer.reading import read_optimizer
from ckpt_tools.views import as_mcore


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved_by_0.10.0")
    with tarfile.open(Path(__file__).with_name("saved_by_0.10.0.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.case("L11")
@pytest.mark.parametrize("form", ["fully_sharded_bucket_space", "fully_sharded_model_space"])
def test_it_is_what_the_ranks_had_in_memory(saved: Path, form: str):
    checkpoint = open_checkpoint(str(saved / form))
    view = as_mcore(checkpoint)
    state = read_optimizer(checkpoint, view)
    assert state.kind == form
    assert differing(state.tensors, truth(saved, 2)) == {}
    assert all(set(named) == set(view.tensors) for named in state.tensors.values())
    assert (state.step, state.problems) == (2, ())


@pytest.mark.case("L11")
def test_it_is_written_in_the_form_that_newer_releases_read(saved: Path):
    """fp32_param becomes param, flattened tensors get the model's shapes."""
    checkpoint = open_checkpoint(str(saved / "fully_sharded_model_space"))
    view = as_mcore(checkpoint)
    entries = optimizer_entries(read_optimizer(checkpoint, view), FULLY_RESHARDABLE, weights=view.tensors, layout=ParallelLayout())
    for name, weight in view.tensors.items():
        for state in ("param", "exp_avg", "exp_avg_sq"):
            assert entries.tensors[f"optimizer.state.{state}.{name}"].global_shape == weight.global_shape
    assert len(entries.tensors) == 3 * len(view.tensors)
    assert entries.common["param_state_sharding_type"] == "fully_reshardable"
    assert entries.content["distrib_optim_sharding_type"] == "fully_reshardable"
