"""Public bug reports about the legacy format, each with its input cut by numpy and written by torch.save, and the right outcome."""

from __future__ import annotations

import io
import json
from collections import OrderedDict

import numpy as np
import pytest
from builders import CONFIG, ckpt, fill, megatron_args, megatron_tensors, read_hf, read_torch_dist, same, write_hf
from legacy.trees import MOE, load, moe_args, moe_hf, moe_megatron, part, rank_model, save
from safetensors.numpy import save_file

torch = pytest.importorskip("torch")


def run(*args):
    done = ckpt(*args)
    assert done.returncode == 0, done.stderr
    return done


def refused(*args):
    done = ckpt(*args)
    assert done.returncode == 2
    return done.stderr


def dense(tmp_path, **changes):
    """HF tensors of fixture D and its canonical Megatron tensors."""
    hf = write_hf(tmp_path / "hf", **changes)
    config = {**CONFIG, **changes}
    return hf, megatron_tensors(hf, config, 104), config


def write_moe_hf(folder):
    hf = moe_hf()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MOE))
    save_file(hf, folder / "model.safetensors", {"format": "pt"})
    return hf


# ---- which rank a folder belongs to


@pytest.mark.case("A9")
@pytest.mark.parametrize("told", [True, False], ids=["args", "no args"])
def test_the_second_number_is_a_pipeline_rank_or_an_expert_rank(tmp_path, told):
    hf, full, config = dense(tmp_path)
    args = megatron_args(config, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, padded_vocab_size=104) if told else None
    for tp in range(2):
        for pp in range(2):
            layers = [2 * pp, 2 * pp + 1]
            model = rank_model(full, layers, first=pp == 0, last=pp == 1, tp=(2, tp))
            save(tmp_path / "x", f"mp_rank_{tp:02d}_{pp:03d}", {"model": model}, args)
    experts = write_moe_hf(tmp_path / "moe")
    args = moe_args(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=2) if told else None
    for tp in range(2):
        for ep in range(2):
            model = rank_model(moe_megatron(experts), [0, 1, 2], tp=(2, tp), ep=(2, ep))
            save(tmp_path / "y", f"mp_rank_{tp:02d}_{ep:03d}", {"model": model}, args)
    for name, folder, expected in (("x", "hf", hf), ("y", "moe", experts)):
        run("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf", "--hf-config", tmp_path / folder)
        assert same(read_hf(tmp_path / f"{name}-hf"), expected)


def test_folders_that_no_content_can_tell_apart_are_refused_without_args(tmp_path):
    for second in range(2):
        save(
            tmp_path / "run",
            f"mp_rank_00_{second:03d}",
            {"model": {"decoder.layers.0.mlp.linear_proj.weight": np.ones((4, 4), "f4")}},
            None,
        )
    assert "pipeline or an expert rank" in refused("inspect", tmp_path / "run")


def test_folders_beyond_the_layout_are_refused_not_ignored(tmp_path):
    _, full, config = dense(tmp_path)
    for rank in range(3):
        model = rank_model(full, [0, 1, 2, 3], tp=(2, rank % 2))
        save(tmp_path / "run", f"mp_rank_{rank:02d}", {"model": model}, megatron_args(config, tensor_model_parallel_size=2))
    message = refused("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert "E224" in message and "mp_rank_02" in message


def test_experts_cut_for_more_ranks_than_the_format_can_name_are_refused(tmp_path):
    write_moe_hf(tmp_path / "hf")
    message = refused("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "1", "--etp", "2")
    assert "cannot tell more expert-tensor-parallel ranks apart" in message
    run("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--tp", "1", "--etp", "2")


def test_checkpoints_from_before_megatron_core_are_refused_with_the_way_out(tmp_path):
    folder = tmp_path / "run" / "iter_0000005" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(
        {"args": megatron_args(CONFIG), "model": {"language_model": {"embedding": {}}}, "iteration": 5}, folder / "model_optim_rng.pt"
    )
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    message = refused("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert "before Megatron-Core" in message and "tools/checkpoint/convert.py" in message


# ---- vocabulary


@pytest.mark.case("C1")
@pytest.mark.case("C3")
def test_padding_belongs_to_the_layout_not_to_the_model(tmp_path):
    hf, _, config = dense(tmp_path)
    outputs = []
    for tp, rows in ((1, 104), (2, 112), (4, 128)):
        full = megatron_tensors(hf, config, rows, pad=1e9)
        args = megatron_args(config, tensor_model_parallel_size=tp, padded_vocab_size=rows)
        for rank in range(tp):
            model = rank_model(full, [0, 1, 2, 3], tp=(tp, rank))
            save(tmp_path / f"tp{tp}", f"mp_rank_{rank:02d}", {"model": model}, args)
        run("convert", tmp_path / f"tp{tp}", tmp_path / f"hf{tp}", "--to", "hf", "--hf-config", tmp_path / "hf")
        outputs.append({p.name: p.read_bytes() for p in (tmp_path / f"hf{tp}").iterdir()})
        assert same(read_hf(tmp_path / f"hf{tp}"), hf)
    assert outputs[0] == outputs[1] == outputs[2] and json.loads(outputs[0]["config.json"])["vocab_size"] == 100
    source = tmp_path / "tp2"
    for tp, rows in ((4, 128), (1, 104)):
        run("reshard", source, tmp_path / f"to{tp}", "--tp", tp, "--verify")
        source = tmp_path / f"to{tp}"
        tables = [load(source, f"mp_rank_{r:02d}")["model"]["embedding.word_embeddings.weight"] for r in range(tp)]
        assert [len(t) for t in tables] == [rows // tp] * tp
        whole = np.concatenate(tables)
        assert np.array_equal(whole[:100], hf["model.embed_tokens.weight"]) and not whole[100:].any()
        assert load(source, "mp_rank_00")["args"].padded_vocab_size == rows
    assert "at least 100 rows" in refused("reshard", source, tmp_path / "no", "--tp", "1", "--padded-vocab-size", "96")
    assert not (tmp_path / "no").exists()


# ---- attention


@pytest.mark.case("D2")
def test_fewer_query_groups_than_ranks_are_cut_inside_a_group(tmp_path):
    hf, full, _ = dense(tmp_path)
    run("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "4", "--make-vocab-size-divisible-by", "8")
    q, k, v = (hf[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    expected = [q[:8], np.concatenate([k[:4], v[:4]]), q[8:], np.concatenate([k[4:], v[4:]])]
    for rank in range(4):
        found = load(tmp_path / "run", f"mp_rank_{rank:02d}")["model"]["decoder.layers.1.self_attention.linear_qkv.weight"]
        assert np.array_equal(found, expected[rank])
    run("reshard", tmp_path / "run", tmp_path / "one", "--tp", "1")
    run("reshard", tmp_path / "one", tmp_path / "again", "--tp", "4")
    for rank in range(4):
        assert same(load(tmp_path / "again", f"mp_rank_{rank:02d}")["model"], load(tmp_path / "run", f"mp_rank_{rank:02d}")["model"])
    assert "tp 3" in refused("convert", tmp_path / "hf", tmp_path / "no", "--to", "torch", "--tp", "3", "--padded-vocab-size", "102")
    # a fork that gives each rank a whole key and value head: 12 rows where megatron-core has 8
    for rank in range(4):
        model = rank_model(full, [0, 1, 2, 3], tp=(4, rank))
        group = rank // 2
        for layer in range(4):
            q, k, v = (hf[f"model.layers.{layer}.self_attn.{n}_proj.weight"] for n in "qkv")
            rows = np.concatenate([q[4 * rank : 4 * rank + 4], k[4 * group : 4 * group + 4], v[4 * group : 4 * group + 4]])
            model[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = rows
        save(
            tmp_path / "fork",
            f"mp_rank_{rank:02d}",
            {"model": model},
            megatron_args(CONFIG, tensor_model_parallel_size=4, padded_vocab_size=104),
        )
    for command in (
        ("convert", tmp_path / "fork", tmp_path / "no", "--to", "hf"),
        ("reshard", tmp_path / "fork", tmp_path / "no", "--tp", "1"),
    ):
        message = refused(*command)
        assert "linear_qkv.weight" in message and "48" in message and "32" in message


@pytest.mark.case("D2")
def test_one_query_group_for_all_heads(tmp_path):
    hf = write_hf(tmp_path / "hf", num_key_value_heads=1)
    run("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2")
    q, k, v = (hf[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv")
    whole = np.concatenate([q, k, v])
    for rank in range(2):
        found = load(tmp_path / "run", f"mp_rank_{rank:02d}")["model"]["decoder.layers.0.self_attention.linear_qkv.weight"]
        assert np.array_equal(found, whole[12 * rank : 12 * rank + 12])
    run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("D6")
def test_norms_have_two_names_and_one_value(tmp_path):
    hf, full, config = dense(tmp_path)
    args = megatron_args(config, padded_vocab_size=104)
    models = {spec: rank_model(full, [0, 1, 2, 3], spec=spec) for spec in ("te", "local")}
    both = {**models["te"], **models["local"]}
    differing = {n: t + (n == "decoder.layers.2.input_layernorm.weight") for n, t in both.items()}
    for name, model in {**models, "both": both, "differing": differing}.items():
        save(tmp_path / name, "mp_rank_00", {"model": model}, args)
    for name in ("te", "local", "both"):
        run("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
        assert same(read_hf(tmp_path / f"{name}-hf"), hf)
        # written as the source unless asked otherwise
        run("reshard", tmp_path / name, tmp_path / f"{name}-again", "--tp", "2")
        again = load(tmp_path / f"{name}-again", "mp_rank_01")["model"]
        assert ("decoder.layers.0.input_layernorm.weight" in again) == (name == "local")
    message = refused("convert", tmp_path / "differing", tmp_path / "no", "--to", "hf")
    assert "decoder.layers.2" in message and "8 of 8 elements differ, by at most 1" in message


# ---- feed-forward and experts


@pytest.mark.case("E1")
def test_gate_and_up_are_cut_each_on_its_own(tmp_path):
    hf, full, config = dense(tmp_path)
    for rank in range(2):
        model = rank_model(full, [0, 1, 2, 3], tp=(2, rank))
        save(
            tmp_path / "two",
            f"mp_rank_{rank:02d}",
            {"model": model},
            megatron_args(config, tensor_model_parallel_size=2, padded_vocab_size=104),
        )
    gate, up = (hf[f"model.layers.3.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert np.array_equal(
        load(tmp_path / "two", "mp_rank_01")["model"]["decoder.layers.3.mlp.linear_fc1.weight"], np.concatenate([gate[8:], up[8:]])
    )
    run("reshard", tmp_path / "two", tmp_path / "four", "--tp", "4")
    for rank in range(4):
        found = load(tmp_path / "four", f"mp_rank_{rank:02d}")["model"]["decoder.layers.3.mlp.linear_fc1.weight"]
        assert np.array_equal(found, np.concatenate([gate[4 * rank : 4 * rank + 4], up[4 * rank : 4 * rank + 4]]))
    run("reshard", tmp_path / "four", tmp_path / "one", "--tp", "1")
    assert same(load(tmp_path / "one", "mp_rank_00")["model"], full)
    write_hf(tmp_path / "six", intermediate_size=6)
    assert "6 divisible by 4" in refused("convert", tmp_path / "six", tmp_path / "no", "--to", "torch", "--tp", "4")


FORMS = [("sequential", "local"), ("te_grouped", "te"), ("grouped", "local"), ("sequential", "te")]


@pytest.mark.case("E12")
@pytest.mark.case("E3")
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 1, 2), (2, 4, 1)])
@pytest.mark.parametrize(("form", "spec"), FORMS)
def test_three_ways_to_store_experts_are_one_model(tmp_path, form, spec, tp, ep, etp):
    hf = write_moe_hf(tmp_path / "hf")
    full = moe_megatron(hf)
    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    args = moe_args(**sizes)
    expected = {}
    for rank in range(max(tp, ep * etp)):
        t, e = rank % tp, rank // etp % ep
        folder = f"mp_rank_{t:02d}" + (f"_{e:03d}" if ep > 1 else "")
        expected[folder] = rank_model(full, [0, 1, 2], tp=(tp, t), ep=(ep, e), etp=etp, spec=spec, experts=form)
        save(tmp_path / "run", folder, {"model": expected[folder]}, args)
    run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--hf-config", tmp_path / "hf", "--verify")
    assert same(read_hf(tmp_path / "back"), hf)
    # and written again: as the source had it, bit for bit
    options = ("--tp", tp, "--ep", ep, "--etp", etp, "--padded-vocab-size", "104")
    run("convert", tmp_path / "hf", tmp_path / "made", "--to", "torch", "--spec", spec, "--experts", form, *options)
    run("reshard", tmp_path / "run", tmp_path / "again", "--padded-vocab-size", "104")
    for folder, model in expected.items():
        assert same(load(tmp_path / "made", folder)["model"], model)
        assert same(load(tmp_path / "again", folder)["model"], model)


def test_the_memory_of_grouped_experts_is_a_view_not_columns(tmp_path):
    hf = write_moe_hf(tmp_path / "hf")
    run("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch", "--spec", "local", "--experts", "grouped")
    model = load(tmp_path / "run", "mp_rank_00")["model"]
    w1, w2 = (model[f"decoder.layers.1.mlp.experts.weight{n}"] for n in (1, 2))
    assert w1.shape == (8, 48) and w2.shape == (24, 8)
    for e in range(4):
        gate, up, down = (hf[f"model.layers.1.mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        assert np.array_equal(w1.reshape(4, 8, 12)[e].T, np.concatenate([gate, up]))
        assert np.array_equal(w2.reshape(4, 6, 8)[e].T, down)
    args = load(tmp_path / "run", "mp_rank_00")["args"]
    assert (args.moe_grouped_gemm, args.moe_use_legacy_grouped_gemm, args.transformer_impl) == (True, True, "local")
    run("convert", tmp_path / "run", tmp_path / "td", "--to", "torch_dist")
    stacked = read_torch_dist(tmp_path / "td" / "release")["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert stacked.shape == (3, 4, 12, 8) and np.array_equal(stacked[1, 2], w1.reshape(4, 8, 12)[2].T)


@pytest.mark.case("E3")
def test_every_expert_keeps_its_own_number(tmp_path):
    hf = write_moe_hf(tmp_path / "hf")
    full = {n: t if ".experts." not in n else np.full_like(t, int(n.rpartition("weight")[2])) for n, t in moe_megatron(hf).items()}
    for ep in range(2):
        model = rank_model(full, [0, 1, 2], ep=(2, ep), spec="local", experts="sequential")
        save(tmp_path / "two", f"mp_rank_00_{ep:03d}", {"model": model}, moe_args(expert_model_parallel_size=2))
    run("reshard", tmp_path / "two", tmp_path / "four", "--ep", "4")
    for ep in range(4):
        model = load(tmp_path / "four", f"mp_rank_00_{ep:03d}")["model"]
        assert (model["decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight"] == ep).all()
        assert not any("local_experts.1." in n for n in model)
    run("reshard", tmp_path / "four", tmp_path / "one", "--ep", "1")
    run("convert", tmp_path / "one", tmp_path / "back", "--to", "hf")
    back = read_hf(tmp_path / "back")
    assert all((back[f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight"] == e).all() for layer in range(3) for e in range(4))


@pytest.mark.case("E7")
def test_experts_are_written_once_not_once_per_tensor_parallel_rank(tmp_path):
    hf = write_moe_hf(tmp_path / "hf")
    source = sum(t.nbytes for n, t in hf.items() if ".experts." in n)
    run("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch", "--tp", "2", "--ep", "2", "--etp", "1")
    folders = [p.name for p in (tmp_path / "run" / "release").glob("mp_rank_*")]
    assert sorted(folders) == ["mp_rank_00_000", "mp_rank_01_001"]
    assert sum(t.nbytes for f in folders for n, t in load(tmp_path / "run", f)["model"].items() if ".experts." in n) == source


# ---- pipeline


@pytest.mark.case("F1")
def test_layer_numbers_restart_on_each_stage(tmp_path):
    _, full, config = dense(tmp_path)
    full = {n: np.full_like(t, int(n.split(".")[2])) if n.startswith("decoder.layers.") else t for n, t in full.items()}
    for pp in range(2):
        model = rank_model(full, [2 * pp, 2 * pp + 1], first=pp == 0, last=pp == 1)
        save(
            tmp_path / "two",
            f"mp_rank_00_{pp:03d}",
            {"model": model},
            megatron_args(config, pipeline_model_parallel_size=2, padded_vocab_size=104),
        )
    run("reshard", tmp_path / "two", tmp_path / "four", "--pp", "4")
    for pp in range(4):
        model = load(tmp_path / "four", f"mp_rank_00_{pp:03d}")["model"]
        layers = {n: t for n, t in model.items() if n.startswith("decoder.layers.")}
        assert {n.split(".")[2] for n in layers} == {"0"} and all((t == pp).all() for t in layers.values())
    run("reshard", tmp_path / "four", tmp_path / "one", "--pp", "1")
    assert same(load(tmp_path / "one", "mp_rank_00")["model"], full)
    run("convert", tmp_path / "two", tmp_path / "back", "--to", "hf")
    back = read_hf(tmp_path / "back")
    assert all((back[f"model.layers.{n}.mlp.down_proj.weight"] == n).all() for n in range(4))


@pytest.mark.case("F5")
def test_virtual_stages_take_turns(tmp_path):
    hf, full, config = dense(tmp_path, num_hidden_layers=8)
    held = {0: [[0, 1], [4, 5]], 1: [[2, 3], [6, 7]]}
    args = megatron_args(config, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, padded_vocab_size=104)
    for pp in range(2):
        models = {f"model{v}": rank_model(full, held[pp][v], first=(pp, v) == (0, 0), last=(pp, v) == (1, 1)) for v in range(2)}
        save(tmp_path / "two", f"mp_rank_00_{pp:03d}", models, args)
    run("convert", tmp_path / "two", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)
    run("reshard", tmp_path / "two", tmp_path / "plain", "--vpp", "1")
    assert (
        "model" in load(tmp_path / "plain", "mp_rank_00_000")
        and load(tmp_path / "plain", "mp_rank_00_001")["args"].virtual_pipeline_model_parallel_size is None
    )
    run("reshard", tmp_path / "plain", tmp_path / "four", "--vpp", "4")
    for pp in range(2):
        state = load(tmp_path / "four", f"mp_rank_00_{pp:03d}")
        assert [k for k in state if k.startswith("model")] == ["model0", "model1", "model2", "model3"]
        assert all(np.array_equal(state[f"model{v}"]["decoder.layers.0.mlp.linear_fc2.weight"], full[f"decoder.layers.{2 * v + pp}.mlp.linear_fc2.weight"]) for v in range(4))  # fmt: skip
        assert ["embedding.word_embeddings.weight" in state[f"model{v}"] for v in range(4)] == [pp == 0, False, False, False]
        assert ["output_layer.weight" in state[f"model{v}"] for v in range(4)] == [False, False, False, pp == 1]
    run("reshard", tmp_path / "four", tmp_path / "again", "--vpp", "2", "--padded-vocab-size", "104")
    for pp in range(2):
        old, new = load(tmp_path / "two", f"mp_rank_00_{pp:03d}"), load(tmp_path / "again", f"mp_rank_00_{pp:03d}")
        assert all(same(old[key], new[key]) for key in ("model0", "model1"))


def test_stages_that_hold_fewer_layers_than_the_args_say_are_refused(tmp_path):
    _, full, config = dense(tmp_path)
    args = megatron_args(config, pipeline_model_parallel_size=2, padded_vocab_size=104)
    save(tmp_path / "run", "mp_rank_00_000", {"model": rank_model(full, [0, 1], last=False)}, args)
    save(tmp_path / "run", "mp_rank_00_001", {"model": rank_model(full, [2], first=False)}, args)
    message = refused("reshard", tmp_path / "run", tmp_path / "out", "--pp", "1")
    assert "expected: 4" in message and "found: 3" in message


# ---- copies


@pytest.mark.case("N1")
@pytest.mark.parametrize(
    "name", ["decoder.final_layernorm.weight", "decoder.layers.1.mlp.router.weight", "decoder.layers.2.self_attention.k_layernorm.weight"]
)
def test_copies_that_drifted_apart_are_told_with_ranks_count_and_size(tmp_path, name):
    full = moe_megatron(write_moe_hf(tmp_path / "hf"))
    args = moe_args(tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    for rank in range(2):
        model = {n: t.copy() for n, t in rank_model(full, [0, 1, 2], tp=(2, rank)).items()}
        model[name].reshape(-1)[3] += 0.5 * rank
        save(tmp_path / "run", f"mp_rank_{rank:02d}", {"model": model}, args)
    for command in (
        ("reshard", tmp_path / "run", tmp_path / "no", "--tp", "1"),
        ("convert", tmp_path / "run", tmp_path / "no", "--to", "hf"),
    ):
        message = refused(*command)
        assert name in message and "mp_rank_00 and mp_rank_01" in message
        assert f"1 of {full[name].size} elements differ, by at most 0.5" in message
    done = run("reshard", tmp_path / "run", tmp_path / "out", "--tp", "1", "--replicas", "first")
    assert "the first rank's was used, as asked" in done.stderr
    assert np.array_equal(load(tmp_path / "out", "mp_rank_00")["model"][name], full[name])


@pytest.mark.case("N1")
def test_copies_on_expert_parallel_ranks_count_too_and_a_sign_of_zero_is_a_difference(tmp_path):
    full = moe_megatron(write_moe_hf(tmp_path / "hf"))
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    full[name] = full[name] * 0
    for ep in range(2):
        model = {n: t.copy() for n, t in rank_model(full, [0, 1, 2], ep=(2, ep)).items()}
        if ep:
            model[name][0, :3] = -0.0
        save(tmp_path / "run", f"mp_rank_00_{ep:03d}", {"model": model}, moe_args(expert_model_parallel_size=2))
    message = refused("reshard", tmp_path / "run", tmp_path / "no", "--ep", "1")
    assert name in message and "3 of 128 elements differ, by at most 0" in message


@pytest.mark.case("N2")
@pytest.mark.parametrize("extra", [None, torch.zeros(5, dtype=torch.uint8), io.BytesIO(b"state")], ids=["None", "tensor", "BytesIO"])
def test_helper_entries_are_no_weights(tmp_path, extra):
    hf, full, config = dense(tmp_path)
    folder = tmp_path / "run" / "iter_0000005" / "mp_rank_00"
    folder.mkdir(parents=True)
    model = OrderedDict((n, torch.from_numpy(t.copy())) for n, t in full.items())
    for layer in range(4):
        model[f"decoder.layers.{layer}.self_attention.core_attention._extra_state"] = extra
    torch.save({"args": megatron_args(config, padded_vocab_size=104), "checkpoint_version": 3.0, "iteration": 5, "model": model}, folder / "model_optim_rng.pt")  # fmt: skip
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    told = json.loads(ckpt("inspect", tmp_path / "run", "--json").stdout)
    assert str(sum(t.size for t in full.values())) in json.dumps(told) or str(sum(t.size for t in hf.values())) in json.dumps(told)
    run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert same(read_hf(tmp_path / "back"), hf)
    run("reshard", tmp_path / "run", tmp_path / "out", "--tp", "2", "--verify")
    assert not any("_extra_state" in n for n in load(tmp_path / "out", "mp_rank_00")["model"])


# ---- other state


def random_state(seed):
    generator = np.random.RandomState(seed)
    return [
        {
            "random_rng_state": (3, tuple(range(625)), None),
            "np_rng_state": generator.get_state(),
            "torch_rng_state": torch.arange(5056, dtype=torch.uint8) + seed,
            "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
            "rng_tracker_states": {"model-parallel-rng": torch.full((16,), seed, dtype=torch.uint8)},
        }
    ]


@pytest.mark.case("L1")
def test_random_states_stay_with_their_ranks_or_are_dropped_with_a_word(tmp_path):
    _, full, config = dense(tmp_path)
    for rank in range(2):
        model = rank_model(full, [0, 1, 2, 3], tp=(2, rank))
        args = megatron_args(config, tensor_model_parallel_size=2, padded_vocab_size=104)
        save(
            tmp_path / "run",
            f"mp_rank_{rank:02d}",
            {"model": model},
            args,
            rng_state=random_state(rank),
            opt_param_scheduler={"num_steps": 7},
        )
    done = run("reshard", tmp_path / "run", tmp_path / "same", "--spec", "local")
    assert "random states of all ranks" in done.stderr
    for rank in range(2):
        path = tmp_path / "same" / "iter_0000005" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        kept, source = torch.load(path, weights_only=False)["rng_state"][0], random_state(rank)[0]
        assert kept["random_rng_state"] == source["random_rng_state"]
        assert kept["np_rng_state"][0] == "MT19937" and np.array_equal(kept["np_rng_state"][1], source["np_rng_state"][1])
        assert torch.equal(kept["torch_rng_state"], source["torch_rng_state"])
        assert torch.equal(kept["rng_tracker_states"]["model-parallel-rng"], source["rng_tracker_states"]["model-parallel-rng"])
    done = run("reshard", tmp_path / "run", tmp_path / "other", "--tp", "4")
    assert "random states belong to the ranks of the old layout" in done.stderr and "--no-load-rng" in done.stderr
    state = load(tmp_path / "other", "mp_rank_03")
    assert "rng_state" not in state and state["opt_param_scheduler"] == {"num_steps": 7}


def test_state_that_no_layout_minds_is_kept_and_the_rest_is_named(tmp_path):
    _, full, config = dense(tmp_path)
    more = {"tokens_seen": 12345, "rerun_state_machine": {"mode": 1}, "hook": np.float64(3.5), "num_floating_point_operations_so_far": 1e18}
    save(tmp_path / "run", "mp_rank_00", {"model": full}, megatron_args(config, padded_vocab_size=104), **more)
    done = run("reshard", tmp_path / "run", tmp_path / "out", "--tp", "2")
    state = load(tmp_path / "out", "mp_rank_01")
    assert state["tokens_seen"] == 12345 and state["num_floating_point_operations_so_far"] == 1e18 and state["iteration"] == 5
    assert "rerun_state_machine" not in state and "hook" not in state
    assert "rerun_state_machine" in done.stderr and "hook" in done.stderr


def test_a_dry_run_says_all_and_writes_nothing(tmp_path):
    _, full, config = dense(tmp_path)
    save(tmp_path / "run", "mp_rank_00", {"model": full}, megatron_args(config, padded_vocab_size=104))
    done = run("reshard", tmp_path / "run", tmp_path / "out", "--tp", "2", "--pp", "2", "--dry-run", "--json")
    told = json.loads(done.stdout)
    assert told["schema"] == "ckpt.reshard/1" and not (tmp_path / "out").exists()
    assert "reshard" in ckpt("reshard", "--help").stdout
    message = refused("reshard", tmp_path / "hf", tmp_path / "out", "--tp", "2")
    assert "knows no parallel layout" in message and "ckpt convert" in message


def test_parts_are_those_of_the_judges_own_rules():
    """The helper that cuts the inputs of these tests is itself right about the plainest tensor."""
    tensor = fill({"w": (8, 4)})["w"]
    assert np.array_equal(part("x.linear_fc1.weight", tensor, 2, 1), tensor[[2, 3, 6, 7]])
