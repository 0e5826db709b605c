"""The same model in every format and layout that real Megatron-Core wrote is found equal, and another one is not."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from ckpt_tools.diff.compare import DiffOptions, diff

pytestmark = pytest.mark.oracle

LLAMA = (  # all hold the weights of one source, in twelve layouts, three versions and three formats
    "legacy_llama_dp2_distopt_bf16",
    "legacy_llama_tp2pp2_bf16",
    "legacy_llama_vpp2_bf16",
    "llama_dp2_distopt_dpreshard_bf16",
    "llama_dp2_distopt_fullyreshard_bf16",
    "llama_pp2_bf16",
    "llama_te_tp2_bf16",
    "llama_tp2_bf16",
    "llama_tp2pp2_bf16",
    "llama_two_iterations_bf16",
    "llama_vpp2_bf16",
    "mc013_llama_tp2dp2_distopt_modelspace_bf16",
    "mc019_llama_dp2_distopt_dpreshard_bf16",
    "mc019_llama_tp1_bf16",
    "release_llama_tp1_bf16",
    "weightsonly_llama_tp2_bf16",
)
MIXTRAL = ("legacy_mixtral_ep2_seq_bf16", "mixtral_ep2_seq_bf16", "mixtral_ep2_tegrouped_bf16")


def hf_side(shared: Path, name: str, folder: Path) -> Path:
    """What transformers held when the checkpoint was made, as an HF folder."""
    folder.mkdir()
    shutil.copy(shared / "real" / name / "expected.safetensors", folder / "model.safetensors")
    shutil.copy(shared / "real" / name / "config.json", folder)
    return folder


def mcore(shared: Path, name: str) -> Path:
    return shared / "real" / name / "mcore"


def test_every_checkpoint_equals_the_hf_weights_it_was_made_of(shared, tmp_path):
    for name in sorted(p.name for p in (shared / "real").iterdir() if not p.name.startswith("optimonly")):
        hf = hf_side(shared, name, tmp_path / name)
        for a, b in ((hf, mcore(shared, name)), (mcore(shared, name), hf)):
            found = diff(a, b)
            assert found.equal and found.tensors >= 39 and found.naming == "hf" and not found.values, (name, found)


@pytest.mark.parametrize("group", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_every_pair_of_layouts_of_one_model_is_equal(shared, group):
    for one, other in itertools.combinations(group, 2):
        found = diff(mcore(shared, one), mcore(shared, other))
        assert found.equal and found.naming == "mcore" and found.tensors >= 27, (one, other, found)


def test_a_trained_model_differs_from_its_start_in_every_tensor(shared, tmp_path):
    start = hf_side(shared, "llama_tp2_bf16", tmp_path / "start")
    found = diff(start, mcore(shared, "llama_tp2_trained_bf16"))
    assert not found.equal and len(found.values) == found.tensors == 39
    assert {c.kind for c in found.causes} <= {"drifted", "rounding"} and not any(c.exact for c in found.causes)


def test_optimizer_state_is_compared_whatever_form_it_is_stored_in(shared):
    flat, named = "llama_dp2_distopt_dpreshard_bf16", "llama_dp2_distopt_fullyreshard_bf16"
    found = diff(mcore(shared, flat), mcore(shared, named), DiffOptions(optimizer=True))
    assert found.equal and found.tensors == 4 * 27
    assert any("dp_reshardable in A and as fully_reshardable in B" in n.text for n in found.notes)
    found = diff(mcore(shared, named), mcore(shared, "llama_tp2_bf16"), DiffOptions(optimizer=True, pattern="param/*"))
    assert found.equal and found.tensors == 27  # master weights are those of the source in both runs


def test_two_iterations_of_one_run_are_told_apart_by_their_step(shared):
    run = mcore(shared, "llama_two_iterations_bf16")
    found = diff(run, run, DiffOptions(optimizer=True, iteration_a=5, iteration_b=10))
    assert not found.equal
    assert ("optimizer step", "5", "10") in {(u.name, u.a, u.b) for u in found.config}
    assert all(v.name.startswith("exp_avg") for v in found.values)  # lr was 0: moments moved, weights did not
