"""Split checkpoints: weights once as safetensors, the rest of the training state beside them. Judges: megatron-core, torch DCP, transformers."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from builders import (
    CONFIG,
    ckpt,
    dense_shapes,
    fill,
    megatron_args,
    megatron_tensors,
    read_hf,
    read_torch_dist,
    same,
    stack,
    write_hf,
    write_torch_dist,
)

from ckpt_tools import CkptError, open_checkpoint
from ckpt_tools.conversion import plan_conversion
from ckpt_tools.options import ConvertOptions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
TRAINED = ["llama_tp2_trained_bf16", "llama_dp2_distopt_fullyreshard_bf16", "qwen2_tied_tp2_bf16", "mixtral_ep2_seq_bf16"]
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def iteration(run):
    return next(p for p in run.iterdir() if p.is_dir() and p.name.startswith(("iter_", "release")))


def done(*args):
    finished = ckpt(*args)
    assert finished.returncode == 0, finished.stderr
    return finished


def true_rows(tensors, rows=509):
    """Tensors without padding rows, which are not part of the model."""
    return {n: t[:rows] if n.endswith(VOCABULARY) else t for n, t in tensors.items()}


def optimizer_of(tensors):
    return {n: t for n, t in tensors.items() if n.startswith(("optimizer.", "chained_"))}


@pytest.fixture(scope="module")
def split_runs(shared, tmp_path_factory):
    """name -> (the run that megatron-core saved, the same as a split checkpoint)."""
    root = tmp_path_factory.mktemp("split")
    made = {}
    for name in [*TRAINED, "weightsonly_llama_tp2_bf16", "release_llama_tp1_bf16", "llama_two_iterations_bf16"]:
        run = shared / "real" / name / "mcore"
        done("convert", run, root / name, "--to", "split", "--verify")
        made[name] = (run, root / name)
    return made


@pytest.mark.case("B1")
@pytest.mark.parametrize("name", TRAINED)
def test_a_split_checkpoint_holds_the_weights_once_and_comes_back_whole(split_runs, tmp_path, name):
    run, split = split_runs[name]
    inside = read_torch_dist(iteration(split))
    assert inside and optimizer_of(inside) == inside, "model weights are left in the iteration folder"
    said = done("convert", split, tmp_path / "back", "--to", "torch_dist", "--verify")
    assert "holds no weights; those beside it are converted" in said.stderr
    source = read_torch_dist(iteration(run))
    assert same(true_rows(source), true_rows(read_torch_dist(iteration(tmp_path / "back"))))


@pytest.mark.case("A4")
@pytest.mark.parametrize("name", ["weightsonly_llama_tp2_bf16", "release_llama_tp1_bf16"])
def test_runs_without_optimizer_split_and_come_back(split_runs, tmp_path, name):
    run, split = split_runs[name]
    assert iteration(split).name == iteration(run).name and read_torch_dist(iteration(split)) == {}
    done("convert", split, tmp_path / "back", "--to", "torch_dist")
    assert same(true_rows(read_torch_dist(iteration(run))), true_rows(read_torch_dist(iteration(tmp_path / "back"))))


@pytest.mark.case("A1")
def test_the_iteration_of_the_tracker_is_split_not_a_constant(split_runs):
    run, split = split_runs["llama_two_iterations_bf16"]
    tracked = (run / "latest_checkpointed_iteration.txt").read_text().strip()
    assert [p.name for p in split.iterdir() if p.is_dir()] == [f"iter_{int(tracked):07d}"]
    assert (split / "latest_checkpointed_iteration.txt").read_text() == tracked


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_megatron_loads_the_state_of_a_split_checkpoint_without_asking_for_weights(split_runs, tmp_path, version):
    pytest.importorskip("megatron.core")
    from oracle import launch

    if not launch.available(version):
        pytest.skip(f"no megatron-core {version}")
    names = ["llama_tp2_trained_bf16", "qwen2_tied_tp2_bf16", "weightsonly_llama_tp2_bf16"]
    jobs = [{"checkpoint": str(iteration(split_runs[n][1])), "output": str(tmp_path / n)} for n in names]
    assert launch.run("load_state_in_mcore", jobs, tmp_path, version) == [None] * len(jobs)
    for name in names:
        got = torch.load(tmp_path / name / "state.pt", weights_only=False)
        expected = optimizer_of(read_torch_dist(iteration(split_runs[name][0])))
        assert same(true_rows({n: t.numpy() for n, t in got["tensors"].items()}), true_rows(expected))
        old = torch.load(iteration(split_runs[name][0]) / "common.pt", weights_only=False)
        assert got["common"]["iteration"] == old["iteration"] and "model" not in got["common"]
        assert got["common"].get("opt_param_scheduler") == old.get("opt_param_scheduler")
        assert (not expected) or any("rng_state" in n for n in got["objects"])


def test_transformers_loads_the_root_of_a_split_checkpoint(split_runs, tmp_path):
    transformers = pytest.importorskip("transformers")
    run, split = split_runs["llama_tp2_trained_bf16"]
    model = transformers.AutoModelForCausalLM.from_pretrained(split)
    done("convert", run, tmp_path / "hf", "--to", "hf")
    loaded = {n: t.view(torch.int16).numpy().view(np.uint16) for n, t in model.state_dict().items()}
    assert same(loaded, read_hf(tmp_path / "hf"))


def test_the_optimizer_and_the_random_states_stay_behind_when_asked(split_runs, tmp_path):
    run, _ = split_runs["llama_tp2_trained_bf16"]
    said = done("convert", run, tmp_path / "out", "--to", "split", "--no-optim", "--no-rng")
    assert "optimizer state was left out, as asked" in said.stderr and "random states were left out, as asked" in said.stderr
    assert read_torch_dist(iteration(tmp_path / "out")) == {}
    said = done("reshard", run, tmp_path / "resharded", "--tp", "2", "--no-rng")
    assert "random states were left out" in said.stderr


@pytest.mark.case("L6")
def test_the_schedule_comes_along_through_a_split_checkpoint(split_runs, tmp_path):
    pytest.importorskip("megatron.core")
    run, split = split_runs["llama_tp2_trained_bf16"]
    done("convert", split, tmp_path / "back", "--to", "torch_dist")
    old, new = (torch.load(iteration(f) / "common.pt", weights_only=False) for f in (run, tmp_path / "back"))
    assert old["opt_param_scheduler"] and new["opt_param_scheduler"] == old["opt_param_scheduler"]
    assert new["args"].consumed_train_samples == old["args"].consumed_train_samples
    assert new["optimizer"]["optimizer"]["param_groups"] == old["optimizer"]["optimizer"]["param_groups"]


@pytest.mark.case("B1")
def test_ms_swift_state_in_common_pt_alone_is_legal_beside_weights_and_an_error_without(tmp_path):
    hf = write_hf(tmp_path / "run")
    folder = tmp_path / "run" / "iter_0000007"
    folder.mkdir()
    torch.save({"args": megatron_args(CONFIG), "iteration": 7, "opt_param_scheduler": {"num_steps": 7}}, folder / "common.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "run" / "args.json").write_text("{}")
    assert "ms-swift" in done("inspect", tmp_path / "run").stdout
    done("convert", tmp_path / "run", tmp_path / "out", "--to", "torch_dist", "--verify")
    made = read_torch_dist(tmp_path / "out" / "iter_0000007")
    assert same(made, {**stack(megatron_tensors(hf, CONFIG, 104), 4)}) and "model" not in made
    assert torch.load(tmp_path / "out" / "iter_0000007" / "common.pt", weights_only=False)["opt_param_scheduler"] == {"num_steps": 7}
    (tmp_path / "run" / "model.safetensors").unlink()
    assert ckpt("convert", tmp_path / "run", tmp_path / "other", "--to", "torch_dist").returncode == 2


@pytest.mark.case("B1")
def test_state_without_weights_anywhere_names_the_places_looked_at(shared):
    run = shared / "real" / "optimonly_llama_tp2_bf16" / "mcore"
    with pytest.raises(CkptError) as caught:
        plan_conversion(open_checkpoint(run), ConvertOptions(to="torch_dist"))
    assert caught.value.code == "E222" and str(run) in caught.value.found and str(iteration(run)) in caught.value.found


def test_the_state_of_a_run_takes_weights_that_are_put_beside_it(shared, tmp_path):
    """optimonly_*: Megatron saved the optimizer only; the HF weights of the same training are put at the root."""
    shutil.copytree(shared / "real" / "optimonly_llama_tp2_bf16" / "mcore", tmp_path / "run", copy_function=shutil.copyfile)
    done("convert", shared / "real" / "llama_tp2_bf16" / "mcore", tmp_path / "hf", "--to", "hf")
    for file in (tmp_path / "hf").iterdir():
        shutil.copy(file, tmp_path / "run")
    said = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "torch_dist")
    if said.returncode:  # weights of another training: the masters tell
        assert "E416" in said.stderr
        return
    made, state = (read_torch_dist(iteration(f)) for f in (tmp_path / "out", tmp_path / "run"))
    assert same(true_rows(optimizer_of(made)), true_rows(optimizer_of(state))) and len(made) > len(state)


@pytest.mark.parametrize("layout", ["bridge", "slime", "verl"])
def test_layouts_of_other_producers_are_recognised_and_joined(shared, tmp_path, layout):
    hf = write_hf(tmp_path / "hf")
    moments = {f"optimizer.state.{s}.{n}": t + 1 for s in ("exp_avg", "exp_avg_sq") for n, t in _weights(hf).items()}
    groups = {"optimizer": {"optimizer": {"state": {"common_step": 5}, "param_groups": [{"lr": 1.0, "step": 5}]}}}
    run = tmp_path / "run"
    args = megatron_args(CONFIG)
    made = write_torch_dist(run, moments, args, common=groups)
    source = run
    if layout == "bridge":
        (made / "run_config.yaml").write_text("model: {}\n")
        shutil.copytree(tmp_path / "hf", made / "hf")
    elif layout == "slime":
        (run / "rollout").mkdir()
        (run / "rollout" / "global_dataset_state_dict_5.pt").write_bytes(b"")
        for file in (tmp_path / "hf").iterdir():
            shutil.copy(file, run)
    else:
        source = tmp_path / "global_step_5"
        (source / "actor").mkdir(parents=True)
        shutil.move(made, source / "actor" / "dist_ckpt")
        shutil.copytree(tmp_path / "hf", source / "actor" / "huggingface")
    told = done("inspect", source, "--json").stdout
    assert {"bridge": "megatron-bridge", "slime": "slime", "verl": "verl"}[layout] in told
    done("convert", source, tmp_path / "out", "--to", "torch_dist", "--make-vocab-size-divisible-by", "4", "--verify")
    result = read_torch_dist(iteration(tmp_path / "out"))
    assert same(result, {**_weights(hf), **moments})


def _weights(hf):
    return stack(megatron_tensors(hf, CONFIG), CONFIG["num_hidden_layers"])


# ---- weights stored twice ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def doubled(shared, tmp_path):
    """A run of megatron-core whose weights lie at its root as safetensors too."""

    def make(name):
        run = tmp_path / "run"
        shutil.copytree(shared / "real" / name / "mcore", run, copy_function=shutil.copyfile)
        done("convert", run, tmp_path / "hf", "--to", "hf")
        for file in (tmp_path / "hf").iterdir():
            shutil.copy(file, run)
        return run

    return make


@pytest.mark.case("B2")
@pytest.mark.parametrize("name", ["llama_dp2_distopt_dpreshard_bf16", "mc019_llama_tp1_bf16", "llama_te_tp2_bf16"])
def test_slim_takes_out_the_weights_and_leaves_every_other_record(doubled, tmp_path, name):
    run = doubled(name)
    before = read_torch_dist(iteration(run))
    size = sum(f.stat().st_size for f in iteration(run).iterdir())
    shown = done("slim", run)
    assert "--apply takes Megatron's out" in shown.stderr and same(read_torch_dist(iteration(run)), before)
    done("slim", run, "--apply")
    after = read_torch_dist(iteration(run))
    assert same(after, optimizer_of(before)) and after
    assert size - sum(f.stat().st_size for f in iteration(run).iterdir()) > sum(t.nbytes for t in before.values()) - sum(
        t.nbytes for t in after.values()
    )
    assert sorted(p.name for p in run.iterdir() if p.name.startswith(".")) == []
    again = ckpt("slim", run)
    assert again.returncode == 2 and "E540" in again.stderr
    done("convert", run, tmp_path / "back", "--to", "torch_dist")
    wanted = {n: t for n, t in true_rows(before).items() if n not in optimizer_of(before)}
    assert same({n: true_rows(read_torch_dist(iteration(tmp_path / "back")))[n] for n in wanted}, wanted)


def test_megatron_loads_what_slim_left(doubled, tmp_path):
    pytest.importorskip("megatron.core")
    from oracle import launch

    run = doubled("llama_tp2_trained_bf16")
    before = read_torch_dist(iteration(run))
    done("slim", run, "--apply")
    job = {"checkpoint": str(iteration(run)), "output": str(tmp_path / "got")}
    assert launch.run("load_state_in_mcore", [job], tmp_path) == [None]
    got = torch.load(tmp_path / "got" / "state.pt", weights_only=False)
    assert same({n: t.numpy() for n, t in got["tensors"].items()}, optimizer_of(before))


@pytest.mark.case("B2")
def test_slim_refuses_copies_that_differ_in_one_value_or_in_dtype(tmp_path):
    tensors = fill(dense_shapes(CONFIG))
    write_torch_dist(tmp_path / "run", stack(megatron_tensors(tensors, CONFIG), 4), megatron_args(CONFIG))
    folder = iteration(tmp_path / "run")
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    tensors["model.norm.weight"][3] += 1
    write_hf(tmp_path / "run", tensors=tensors)
    said = ckpt("slim", tmp_path / "run", "--apply")
    assert said.returncode == 2 and "E413" in said.stderr and "model.norm.weight" in said.stderr
    tensors["model.norm.weight"][3] -= 1
    write_hf(tmp_path / "run", tensors={n: t.astype(np.float16) if "norm" in n else t for n, t in tensors.items()})
    said = ckpt("slim", tmp_path / "run", "--apply")
    assert said.returncode == 2 and "E541" in said.stderr
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_slim_replaces_the_folder_in_one_step_and_leaves_it_alone_when_it_fails(doubled, monkeypatch):
    from ckpt_tools import slim
    from ckpt_tools.staging import Staging

    run = doubled("llama_tp2_trained_bf16")
    folder = iteration(run)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    checkpoint = open_checkpoint(run)
    plan = slim.plan_slim(checkpoint, buffer=1 << 16, threads=1)

    def fails(self, *, sync=True):
        assert {f.name: f.read_bytes() for f in folder.iterdir()} == before, "the old folder was touched before the new one was complete"
        raise OSError(5, "the power failed")

    monkeypatch.setattr(Staging, "commit", fails)
    with pytest.raises(CkptError, match="power"):
        slim.slim(checkpoint, plan)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
