"""Optimizer state, step counts and schedules move along with the weights; what cannot move is refused or named. Judge: torch's DCP reader."""

from __future__ import annotations

import json

import pytest
from builders import ckpt, read_torch_dist, same, stack

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
SOURCES = [
    "llama_tp2_trained_bf16",
    "llama_pp2_bf16",
    "llama_dp2_distopt_fullyreshard_bf16",
    "mc019_llama_tp1_bf16",
    "qwen2_tied_tp2_bf16",
    "mixtral_ep2_seq_bf16",
]


def iteration(run):
    return next(p for p in run.iterdir() if p.is_dir())


def convert(*args):
    done = ckpt("convert", *args)
    assert done.returncode == 0, done.stderr
    return done


def true_rows(tensors, rows=509):
    """Tensors without padding rows, which are not part of the model."""
    return {n: t[:rows] if n.endswith(("word_embeddings.weight", "output_layer.weight")) else t for n, t in tensors.items()}


@pytest.mark.case("L11")
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("options", [("--tp", "4"), ("--pp", "2"), ("--layer-keys", "per-layer", "--tp", "2")], ids=" ".join)
def test_every_moment_arrives_at_the_new_layout(shared, tmp_path, name, options):
    run = shared / "real" / name / "mcore"
    convert(run, tmp_path / "out", "--to", "torch_dist", "--verify", *options)
    source, made = read_torch_dist(iteration(run)), read_torch_dist(iteration(tmp_path / "out"))
    if "per-layer" in options:
        prefixes = {n.partition("decoder.layers.")[0] for n in made if "decoder.layers." in n}
        for prefix in prefixes:
            part = {n.removeprefix(prefix): t for n, t in made.items() if n.startswith(f"{prefix}decoder.layers.")}
            made = {n: t for n, t in made.items() if not n.startswith(f"{prefix}decoder.layers.")}
            made |= {prefix + n: t for n, t in stack(part, 4).items()}
    assert any(n.startswith("optimizer.state.exp_avg_sq.") for n in source)
    assert same(true_rows(source), true_rows(made))


def test_step_counts_groups_and_schedule_are_kept(shared, tmp_path):
    run = shared / "real" / "llama_tp2_trained_bf16" / "mcore"
    convert(run, tmp_path / "out", "--to", "torch_dist", "--tp", "1")
    pytest.importorskip("megatron.core")
    old = torch.load(iteration(run) / "common.pt", weights_only=False)
    new = torch.load(iteration(tmp_path / "out") / "common.pt", weights_only=False)
    assert new["optimizer"]["optimizer"]["param_groups"] == old["optimizer"]["optimizer"]["param_groups"]
    assert torch.equal(new["optimizer"]["optimizer"]["state"]["common_step"], old["optimizer"]["optimizer"]["state"]["common_step"])
    assert new["opt_param_scheduler"] == old["opt_param_scheduler"] and new["iteration"] == old["iteration"] == 5
    assert (new["args"].consumed_train_samples, new["args"].tensor_model_parallel_size) == (old["args"].consumed_train_samples, 1)


@pytest.mark.case("L1")
def test_random_states_stay_with_their_layout_or_are_dropped_with_a_word(shared, tmp_path):
    run = shared / "real" / "llama_tp2_bf16" / "mcore"
    done = convert(run, tmp_path / "same", "--to", "torch_dist", "--tp", "2")
    assert "random states of all ranks, byte for byte" in done.stderr
    done = convert(run, tmp_path / "other", "--to", "torch_dist", "--tp", "1")
    assert "dropped: random states" in done.stderr
    import torch.distributed.checkpoint as dcp

    def states(folder):
        index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        wanted = {n: None for n in index if n.startswith("rng_state")}
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return {n: v[0][0]["torch_rng_state"] for n, v in wanted.items()}

    old, new = states(iteration(run)), states(iteration(tmp_path / "same"))
    assert old.keys() == new.keys() and len(old) == 2 and all(torch.equal(old[n], new[n]) for n in old)
    assert states(iteration(tmp_path / "other")) == {}


@pytest.mark.case("L11")
def test_flat_buffers_of_the_distributed_optimizer_become_named_tensors_exactly(shared, tmp_path):
    """The same run saved as dp_reshardable and as fully_reshardable by Megatron itself: what ckpt makes of one must equal the other."""
    real = shared / "real"
    convert(real / "llama_dp2_distopt_dpreshard_bf16" / "mcore", tmp_path / "out", "--to", "torch_dist", "--tp", "4", "--verify")
    expected = read_torch_dist(iteration(real / "llama_dp2_distopt_fullyreshard_bf16" / "mcore"))
    assert same(true_rows(expected), true_rows(read_torch_dist(iteration(tmp_path / "out"))))


@pytest.mark.case("L11")
def test_flattened_state_of_older_releases_becomes_loadable_again(shared, tmp_path):
    run = shared / "real" / "mc013_llama_tp2dp2_distopt_modelspace_bf16" / "mcore"
    convert(run, tmp_path / "out", "--to", "torch_dist", "--tp", "1", "--verify")
    made = read_torch_dist(iteration(tmp_path / "out"))
    weights = {n: t for n, t in made.items() if not n.startswith("optimizer")}
    masters = {n.removeprefix("optimizer.state.param."): t for n, t in made.items() if n.startswith("optimizer.state.param.")}
    assert masters.keys() == weights.keys()
    for name, master in masters.items():  # rounded to nearest even, the float32 weights are the model's
        rounded = torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        assert (true_rows({name: rounded})[name] == true_rows({name: weights[name]})[name]).all(), name


def test_state_is_dropped_only_on_purpose(shared, tmp_path):
    run = shared / "real" / "llama_dp2_distopt_dpreshard_bf16" / "mcore"
    done = convert(run, tmp_path / "weights", "--to", "torch_dist", "--tp", "4", "--optimizer", "none")
    assert "optimizer state was left out" in done.stderr and not any(
        "optimizer" in n for n in read_torch_dist(iteration(tmp_path / "weights"))
    )


def stored_random_states(folder):
    """(pp, tp) -> the random states of a rank, in either format, as torch reads them."""
    found = {}
    for path in folder.glob("mp_rank_*/model_optim_rng.pt"):
        tp, pp = path.parent.name.removeprefix("mp_rank_").split("_")
        found[int(pp), int(tp)] = torch.load(path, weights_only=False)["rng_state"]
    if not found:
        import torch.distributed.checkpoint as dcp

        index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        wanted = {n: None for n in index if n.startswith("rng_state")}
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        for name, value in wanted.items():
            pp, tp = name.removeprefix("rng_state/shard_").split("_")[0].split(".")
            found[int(pp), int(tp)] = value[0]
    return found


def plainly(value):
    """Tensors and arrays as lists, so that == compares everything."""
    if isinstance(value, dict):
        return {k: plainly(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plainly(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.case("L1")
@pytest.mark.parametrize(("name", "to"), [("legacy_llama_tp2pp2_bf16", "torch_dist"), ("llama_tp2pp2_bf16", "torch")])
def test_random_states_are_translated_between_the_formats_of_the_same_layout(shared, tmp_path, name, to):
    run = shared / "real" / name / "mcore"
    done = convert(run, tmp_path / "out", "--to", to)
    assert "kept: random states of all ranks" in done.stderr
    old, new = stored_random_states(iteration(run)), stored_random_states(iteration(tmp_path / "out"))
    assert len(old) == 4 and plainly(old) == plainly(new)
    assert {"random_rng_state", "np_rng_state", "torch_rng_state", "rng_tracker_states"} <= new[1, 1][0].keys()


@pytest.mark.parametrize(("name", "to"), [("legacy_mixtral_ep2_seq_bf16", "torch_dist"), ("mixtral_ep2_seq_bf16", "torch")])
def test_random_states_of_experts_on_as_many_ranks_as_there_are_replicas_are_translated(shared, tmp_path, name, to):
    run = shared / "real" / name / "mcore"
    convert(run, tmp_path / "out", "--to", to)

    def states(folder):
        ranks = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
        if ranks:
            return [plainly(torch.load(path, weights_only=False)["rng_state"]) for path in ranks]
        import torch.distributed.checkpoint as dcp

        index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        wanted = {n: None for n in index if n.startswith("rng_state")}
        assert sorted(wanted) == ["rng_state/shard_0.0.0_1.1.2", "rng_state/shard_0.0.1_1.1.2"]  # as Megatron 0.16.1 asks for them
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return [plainly(wanted[n][0]) for n in sorted(wanted)]

    old, new = states(iteration(run)), states(iteration(tmp_path / "out"))
    assert old == new and len(old) == 2 and old[0] != old[1]


def test_random_states_of_more_replicas_than_expert_ranks_are_named_as_lost_between_the_formats(shared, tmp_path):
    run = shared / "real" / "legacy_mixtral_ep2_seq_bf16" / "mcore"
    done = ckpt("convert", run, tmp_path / "out", "--to", "torch_dist", "--dp", "4", "--dry-run", "--json")
    told = [n for n in json.loads(done.stdout)["notes"] if n["subject"] == "rng_state"]
    assert [n["kind"] for n in told] == ["dropped"] and "data-parallel rank" in told[0]["text"]
