"""From checkpoints that Megatron-LM wrote: what a resume needs is there or named as missing; what is there continues."""

from __future__ import annotations

import json
import shutil

import pytest

from ckpt_tools.layout import ParallelLayout
from ckpt_tools.resume.result import EQUAL

pytestmark = pytest.mark.oracle
TRAINED = "llama_tp2_trained_bf16"
slow = pytest.mark.slow


def real(shared, name):
    return str(shared / "real" / name / "mcore")


@slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        (TRAINED, {"max_layers": 2}),
        (TRAINED, {"layout": ParallelLayout(tp=2)}),
        ("legacy_llama_tp2pp2_bf16", {"max_layers": 1}),
        ("llama_dp2_distopt_dpreshard_bf16", {}),
        ("mc013_llama_tp2dp2_distopt_modelspace_bf16", {"max_layers": 2}),
        ("mc019_llama_tp1_bf16", {}),
        ("mixtral_ep2_seq_bf16", {"max_layers": 2}),
    ],
)
def test_a_real_run_continues_through_hugging_face(experiment, shared, name, more):
    found = experiment("hf", run=real(shared, name), **more)
    assert found.same and {row.verdict for row in found.rows} == {EQUAL}, (found.reasons, found.rows)
    assert (found.start, found.saved, found.end) == (5, 7, 9)
    if "max_layers" in more:
        assert f"{more['max_layers']} layers" in found.model and any("left out" in note for note in found.notes)


@slow
def test_the_iteration_is_the_one_asked_for_and_else_the_trackers(experiment, shared, tmp_path):
    run = real(shared, "llama_two_iterations_bf16")
    assert experiment(run=run, max_layers=1, steps=2).start == 10
    shutil.rmtree(tmp_path / "made")
    assert experiment(run=run, max_layers=1, steps=2, iteration="5").start == 5


@pytest.mark.case("B3")
@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("weightsonly_llama_tp2_bf16", ("optimizer", "opt_param_scheduler", "rng_state")),
        ("release_llama_tp1_bf16", ("optimizer", "opt_param_scheduler", "rng_state")),
        ("optimonly_llama_tp2_bf16", ("model weights",)),
    ],
)
def test_what_lacks_training_state_is_not_resumable_and_nothing_is_trained(run_ckpt, shared, tmp_path, name, missing):
    done = run_ckpt("verify-resume", real(shared, name), "--json", "--keep", tmp_path / "kept")
    answer = json.loads(done.out)
    assert done.rc == 1 and not answer["resumable"] and not answer["same"]
    assert set(missing) <= set(answer["missing"]) and answer["components"] == []
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.case("B3")
def test_safetensors_with_a_tracker_and_no_state_name_everything_that_is_missing(run_ckpt, shared, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    done = run_ckpt("convert", real(shared, TRAINED), tmp_path / "hf", "--to", "hf")
    assert done.rc == 0, done.err
    for path in (tmp_path / "hf").iterdir():
        shutil.copy(path, run)
    for given in (tmp_path / "hf", run):
        done = run_ckpt("verify-resume", given)
        assert done.rc == 1 and "NOT RESUMABLE: optimizer, opt_param_scheduler, rng_state missing" in done.out
    (run / "iter_0000020").mkdir()  # as a save leaves it that was stopped before it wrote anything
    done = run_ckpt("verify-resume", run, "--json")
    assert done.rc == 1 and json.loads(done.out)["missing"] == ["optimizer", "opt_param_scheduler", "rng_state"]


@pytest.mark.case("B3")
def test_only_the_random_states_are_named_when_only_they_are_missing(run_ckpt, shared, tmp_path):
    done = run_ckpt("convert", real(shared, TRAINED), tmp_path / "run", "--to", "torch_dist", "--tp", "2", "--no-rng")
    assert done.rc == 0, done.err
    done = run_ckpt("verify-resume", tmp_path / "run", "--json")
    assert done.rc == 1 and json.loads(done.out)["missing"] == ["rng_state"]


def test_weights_stored_twice_are_reported(run_ckpt, shared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(real(shared, TRAINED), run)
    done = run_ckpt("convert", run, tmp_path / "hf", "--to", "hf")
    assert done.rc == 0, done.err
    for path in (tmp_path / "hf").iterdir():
        shutil.copy(path, run)
    done = run_ckpt("validate", run, "--resume", "--json")
    assert "V801" in {f["code"] for f in json.loads(done.out)["findings"]}
