"""The legacy format, judged by torch.load, by the judges' own mapping, by real Megatron-LM checkpoints and by numpy."""

from __future__ import annotations

import argparse
import shutil
from collections import OrderedDict

import numpy as np
import pytest
from builders import CONFIG, ckpt, megatron_args, megatron_tensors, read_hf, read_torch_dist, same, write_hf, write_legacy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


def rank_file(run, name):
    """What torch.load, with weights only, finds in a rank file."""
    folder = next(p for p in run.iterdir() if p.is_dir())
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(folder / name / "model_optim_rng.pt", weights_only=True)


def arrays(model):
    return {n: t.numpy() for n, t in model.items()}


def convert(*args):
    done = ckpt("convert", *args)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.case("E1")
@pytest.mark.case("F1")
@pytest.mark.case("D2")
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("spec", ["te", "local"])
def test_every_rank_holds_its_own_rows_under_stage_local_numbers(tmp_path, tp, pp, spec):
    hf = write_hf(tmp_path / "hf")
    convert(
        tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", tp, "--pp", pp, "--spec", spec, "--make-vocab-size-divisible-by", "8"
    )
    full = megatron_tensors(hf, CONFIG, -(-100 // (8 * tp)) * 8 * tp)
    per_stage = 4 // pp
    for stage in range(pp):
        for rank in range(tp):
            state = rank_file(tmp_path / "run", f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            assert state["checkpoint_version"] == 3.0 and state["args"].tensor_model_parallel_size == tp
            model = arrays(state["model"])
            assert ("embedding.word_embeddings.weight" in model) == (stage == 0) and ("output_layer.weight" in model) == (stage == pp - 1)
            for local in range(per_stage):
                layer = stage * per_stage + local
                p, q = f"decoder.layers.{layer}.", f"decoder.layers.{local}."
                gate, up = np.split(full[p + "mlp.linear_fc1.weight"], 2)
                assert np.array_equal(
                    model[q + "mlp.linear_fc1.weight"], np.concatenate([np.split(gate, tp)[rank], np.split(up, tp)[rank]])
                )
                assert np.array_equal(
                    model[q + "self_attention.linear_qkv.weight"], np.split(full[p + "self_attention.linear_qkv.weight"], tp)[rank]
                )
                assert np.array_equal(model[q + "mlp.linear_fc2.weight"], np.split(full[p + "mlp.linear_fc2.weight"], tp, 1)[rank])
                norm = "input_layernorm.weight" if spec == "local" else "self_attention.linear_qkv.layer_norm_weight"
                assert np.array_equal(model[q + norm], full[p + "self_attention.linear_qkv.layer_norm_weight"])
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--verify")
    assert same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("C4")
@pytest.mark.case("C7")
def test_a_tied_model_keeps_a_copy_on_the_last_stage_only_and_it_must_be_equal(tmp_path):
    hf = write_hf(tmp_path / "hf", tie_word_embeddings=True)
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--pp", "4", "--make-vocab-size-divisible-by", "8")
    stages = [rank_file(tmp_path / "run", f"mp_rank_00_{s:03d}")["model"] for s in range(4)]
    assert ["output_layer.weight" in s for s in stages] == [False, False, False, True]
    assert ["embedding.word_embeddings.weight" in s for s in stages] == [True, False, False, False]
    assert torch.equal(stages[3]["output_layer.weight"], stages[0]["embedding.word_embeddings.weight"])
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)
    path = tmp_path / "run" / "release" / "mp_rank_00_003" / "model_optim_rng.pt"
    state = rank_file(tmp_path / "run", "mp_rank_00_003")
    state["model"]["output_layer.weight"][7, 3] += 0.5
    torch.save(state, path)
    done = ckpt("convert", tmp_path / "run", tmp_path / "no", "--to", "hf")
    assert done.returncode == 2 and "E225" in done.stderr and "1 of 832 elements differ" in done.stderr and "0.5" in done.stderr
    convert(tmp_path / "run", tmp_path / "yes", "--to", "hf", "--replicas", "first")
    assert same(read_hf(tmp_path / "yes"), hf)


@pytest.mark.case("N1")
def test_a_norm_that_drifted_between_ranks_is_refused_not_averaged(tmp_path):
    write_hf(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2")
    state = rank_file(tmp_path / "run", "mp_rank_01")
    state["model"]["decoder.final_layernorm.weight"][2] += 0.5
    torch.save(state, tmp_path / "run" / "release" / "mp_rank_01" / "model_optim_rng.pt")
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "torch_dist")
    assert done.returncode == 2 and "decoder.final_layernorm.weight" in done.stderr and "mp_rank_01" in done.stderr


@pytest.mark.case("F5")
def test_virtual_stages_interleave_the_layers(tmp_path):
    hf = write_hf(tmp_path / "hf", num_hidden_layers=8)
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--pp", "2", "--vpp", "2")
    norm = "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"
    held = {}
    for stage in range(2):
        state = rank_file(tmp_path / "run", f"mp_rank_00_{stage:03d}")
        for chunk in ("model0", "model1"):
            values = [state[chunk][norm.format(i)].numpy() for i in range(2)]
            held[stage, chunk] = [
                next(n for n in range(8) if np.array_equal(v, hf[f"model.layers.{n}.input_layernorm.weight"])) for v in values
            ]
    assert held == {(0, "model0"): [0, 1], (0, "model1"): [4, 5], (1, "model0"): [2, 3], (1, "model1"): [6, 7]}
    convert(tmp_path / "run", tmp_path / "plain", "--to", "torch")
    convert(tmp_path / "plain", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("F3")
def test_uneven_stages_hold_all_layers_or_are_refused(tmp_path):
    hf = write_hf(tmp_path / "hf", num_hidden_layers=8)
    uneven = ("--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "3")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--pp", "3", *uneven)
    counts = [
        len({n.split(".")[2] for n in rank_file(tmp_path / "run", f"mp_rank_00_{s:03d}")["model"] if n.startswith("decoder.layers.")})
        for s in range(3)
    ]
    assert counts == [1, 4, 3]
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "no", "--to", "torch", "--pp", "2", *(o if o != "1" else "3" for o in uneven))
    assert done.returncode == 2 and "E402" in done.stderr
    done = ckpt("convert", tmp_path / "hf", tmp_path / "no", "--to", "torch", "--pp", "3")
    assert done.returncode == 2 and "8 layers" in done.stderr


def test_a_pipeline_layout_string_is_followed(tmp_path):
    hf = write_hf(tmp_path / "hf", num_hidden_layers=6)
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--pp", "2", "--pipeline-layout", "Et|t*2|tt|tL")
    state = rank_file(tmp_path / "run", "mp_rank_00_001")
    assert sum("linear_fc2" in n for n in state["model0"]) == 2 and sum("linear_fc2" in n for n in state["model1"]) == 1
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("A9")
def test_the_second_number_of_a_folder_is_what_the_args_say(tmp_path):
    hf = write_hf(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2", "--pp", "2")
    done = ckpt("inspect", tmp_path / "run")
    assert done.returncode == 0 and "pipeline_model_parallel_size\t2" in done.stdout.replace("layout.pp", "pipeline_model_parallel_size")
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("E5")
def test_missing_rank_folders_are_listed_before_anything_is_read(tmp_path):
    hf = write_hf(tmp_path / "hf")
    args = megatron_args(
        CONFIG, tensor_model_parallel_size=4, expert_model_parallel_size=2, expert_tensor_parallel_size=1, num_experts=4, world_size=4
    )
    for name in ("mp_rank_00_000", "mp_rank_01_001"):
        write_legacy(tmp_path / "run" / "iter_0000005" / name, {"decoder.final_layernorm.weight": hf["model.norm.weight"]}, args)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "torch_dist")
    assert done.returncode == 2 and "mp_rank_02_000" in done.stderr and "mp_rank_03_001" in done.stderr


@pytest.mark.case("N2")
@pytest.mark.parametrize("extra", [None, "tensor"])
def test_extra_state_entries_are_no_weights(tmp_path, extra):
    hf = write_hf(tmp_path / "hf")
    model = OrderedDict((n, torch.from_numpy(t.copy())) for n, t in megatron_tensors(hf, CONFIG, 104).items())
    for layer in range(4):
        model[f"decoder.layers.{layer}.mlp.linear_fc1._extra_state"] = None if extra is None else torch.zeros(5, dtype=torch.uint8)
    folder = tmp_path / "run" / "iter_0000005" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"args": megatron_args(CONFIG), "checkpoint_version": 3.0, "iteration": 5, "model": model}, folder / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    convert(tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert same(read_hf(tmp_path / "out"), hf)


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_old_row_orders_of_qkv_are_put_right(tmp_path, version):
    """Version 0 keeps a rank's rows as [3, heads, d], 1.0 as [heads, d, 3]; since 2.0 they are [heads, 3, d] (fix_query_key_value_ordering)."""
    config = {**CONFIG, "num_key_value_heads": 4}
    hf = write_hf(tmp_path / "hf", num_key_value_heads=4)
    full = megatron_tensors(hf, config, 104)
    folder = tmp_path / "run" / "iter_0000005"
    for rank in range(2):
        model = {}
        for name, tensor in full.items():
            if "linear_qkv.weight" in name:
                part = np.split(tensor, 2)[rank].reshape(2, 3, 4, 8)
                part = part.transpose(1, 0, 2, 3) if version == 0 else part.transpose(0, 2, 1, 3) if version == 1.0 else part
                model[name] = part.reshape(24, 8)
            elif "linear_fc1.weight" in name:
                model[name] = np.concatenate([np.split(half, 2)[rank] for half in np.split(tensor, 2)])
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                model[name] = np.split(tensor, 2, 1)[rank]
            elif "norm" in name:
                model[name] = tensor
            else:
                model[name] = np.split(tensor, 2)[rank]
        write_legacy(folder / f"mp_rank_{rank:02d}", model, megatron_args(config, tensor_model_parallel_size=2))
        path = folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
        state["checkpoint_version"] = version
        if not version:
            del state["checkpoint_version"]
        torch.save(state, path)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    convert(tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert same(read_hf(tmp_path / "out"), hf)


REAL = ["legacy_llama_dp2_distopt_bf16", "legacy_llama_tp2pp2_bf16", "legacy_llama_vpp2_bf16"]


@pytest.mark.oracle
@pytest.mark.parametrize("name", REAL)
def test_what_megatron_lm_wrote_comes_out_exactly(shared, tmp_path, name):
    folder = shared / "real" / name
    convert(folder / "mcore", tmp_path / "out", "--to", "hf", "--hf-config", folder, "--verify")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "expected.safetensors").read_bytes()
    convert(folder / "mcore", tmp_path / "td", "--to", "torch_dist", "--optimizer", "none", "--tp", "2")
    convert(tmp_path / "td", tmp_path / "again", "--to", "hf", "--hf-config", folder)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "expected.safetensors").read_bytes()


def test_optimizer_state_is_never_left_behind_without_a_word(shared, tmp_path):
    run = shared / "real" / "legacy_llama_tp2pp2_bf16" / "mcore"
    done = ckpt("convert", run, tmp_path / "out", "--to", "torch", "--tp", "1", "--pp", "1")
    assert (done.returncode == 2 and "optimizer" in done.stderr) or "optimizer" in rank_file(tmp_path / "out", "mp_rank_00")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["torch", "torch_dist"]))
def test_any_layout_and_back_is_the_identity(tmp_path_factory, tp, pp, vpp, to):
    base = tmp_path_factory.mktemp("layouts")
    write_hf(base / "hf", num_hidden_layers=8)
    common = ("--make-vocab-size-divisible-by", "32")
    convert(base / "hf", base / "one", "--to", "torch", *common)
    options = ["--tp", tp, "--pp", pp, *(["--vpp", vpp] if to == "torch" and pp > 1 else [])]
    convert(base / "one", base / "two", "--to", to, *options, *common)
    convert(base / "two", base / "three", "--to", "torch", "--tp", "1", "--pp", "1", *common)
    one, three = rank_file(base / "one", "mp_rank_00"), rank_file(base / "three", "mp_rank_00")
    vocab = {n: t[:100] if "embedding" in n or "output_layer" in n else t for n, t in one["model"].items()}
    again = {n: t[:100] if "embedding" in n or "output_layer" in n else t for n, t in three["model"].items()}
    assert vocab.keys() == again.keys() and all(torch.equal(vocab[n], again[n]) for n in vocab)
    if to == "torch_dist":
        assert read_torch_dist(next(p for p in (base / "two").iterdir() if p.is_dir()))
    shutil.rmtree(base)
