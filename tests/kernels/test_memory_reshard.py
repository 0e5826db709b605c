"""Tensors in memory change their layout: Megatron-Core's own files judge both ends, properties judge the rest."""

from __future__ import annotations

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import CONFIG, dense_shapes, fill, megatron_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import bits, to_numpy

from ckpt_tools.errors import CkptError
from ckpt_tools.layout import ParallelLayout
from ckpt_tools.memory.reshard import Options, Rank, apply_plan, described, plan_reshard, ranks, reshard_state_dict

Shards = dict[Rank, dict[str, Any]]
ONE = ParallelLayout()


def equal(ours: Shards, theirs: Shards) -> bool:
    """The same ranks, names, shapes and bytes; _extra_state is not compared."""
    if ours.keys() != theirs.keys():
        return False
    for rank in ours:
        wanted = {n: v for n, v in theirs[rank].items() if not n.endswith("_extra_state")}
        if ours[rank].keys() != wanted.keys():
            return False
        for name, value in ours[rank].items():
            a, b = (v if isinstance(v, np.ndarray) else to_numpy(v) for v in (value, wanted[name]))
            if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(bits(a), bits(b)):
                return False
    return True


def legacy(folder: Path, layout: ParallelLayout) -> Shards:
    """What Megatron-Core wrote: mp_rank_* folders in rank order, `model` or `model0`, `model1` ... with that prefix."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    files = sorted(folder.glob("mcore/iter_0000005/mp_rank_*/model_optim_rng.pt"))
    states = [torch.load(f, map_location="cpu", weights_only=False) for f in files]
    models = [{f"{k}.{n}" if k != "model" else n: v for k in s if k.startswith("model") for n, v in s[k].items()} for s in states]
    by_place = {(r.tp, r.pp, r.ep): r for r in ranks(layout)}
    places = [tuple(map(int, f.parent.name.split("_")[2:])) for f in files]
    keys = [by_place[(p[0], p[1], 0) if layout.pp > 1 else (p[0], 0, p[1])] for p in places]
    return dict(zip(keys, models, strict=True))


TP2PP2, VPP2, EP2 = ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2, vpp=2), ParallelLayout(ep=2)


@pytest.mark.oracle
def test_megatrons_vpp_shards_become_megatrons_tp_pp_shards_and_back(shared: Path) -> None:
    by_tp, by_vpp = (legacy(shared / "real" / n, v) for n, v in (("legacy_llama_tp2pp2_bf16", TP2PP2), ("legacy_llama_vpp2_bf16", VPP2)))
    assert equal(reshard_state_dict(by_vpp, VPP2, TP2PP2, local_names=True), by_tp)
    assert equal(reshard_state_dict(by_tp, TP2PP2, VPP2, local_names=True), by_vpp)


@pytest.mark.oracle
def test_megatrons_shards_make_the_weights_they_were_loaded_from(shared: Path) -> None:
    from safetensors.torch import load_file

    folder = shared / "real" / "legacy_llama_tp2pp2_bf16"
    whole = reshard_state_dict(legacy(folder, TP2PP2), TP2PP2, ONE, local_names=True)[Rank()]
    hf = {n: to_numpy(v).view(np.uint16) for n, v in load_file(folder / "expected.safetensors").items()}
    expected = megatron_tensors(hf, json.loads((folder / "config.json").read_text()))
    local = {
        ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
        ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
    }
    for te, spec in local.items():
        expected = {n.replace(te, spec): v for n, v in expected.items()}
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(to_numpy(whole[name]).view(np.uint16)[: len(value)], value), (
            name
        )  # the rows that pad the vocabulary are no weights


@pytest.mark.oracle
@pytest.mark.parametrize("target", [ONE, ParallelLayout(ep=4), ParallelLayout(tp=2, ep=2), ParallelLayout(tp=4, etp=2, ep=2, pp=2)])
def test_experts_of_megatron_keep_their_identity_in_every_form_and_layout(shared: Path, target: ParallelLayout) -> None:
    from safetensors.torch import load_file

    folder = shared / "real" / "legacy_mixtral_ep2_seq_bf16"
    source = legacy(folder, EP2)
    whole = reshard_state_dict(source, EP2, ONE, local_names=True)[Rank()]
    hf = load_file(folder / "expected.safetensors")
    experts = {n for n in whole if ".local_experts." in n}
    assert len(experts) == 4 * 4 * 2
    for layer in range(4):
        for e in range(4):
            names = [f"model.layers.{layer}.block_sparse_moe.experts.{e}.{w}.weight" for w in ("w1", "w3", "w2")]
            if names[0] not in hf:
                names = [f"model.layers.{layer}.mlp.experts.{e}.{w}_proj.weight" for w in ("gate", "up", "down")]
            gate, up, down = (to_numpy(hf[n]) for n in names)
            ours = [to_numpy(whole[f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.linear_fc{i}.weight"]) for i in (1, 2)]
            assert np.array_equal(bits(ours[0]), bits(np.concatenate([gate, up]))) and np.array_equal(bits(ours[1]), bits(down))
    for form in ("grouped", "numbered", "sequential"):
        there = reshard_state_dict(source, EP2, target, local_names=True, expert_form=form)
        assert set(there) == set(ranks(target))
        assert equal(reshard_state_dict(there, target, EP2, local_names=True, expert_form="sequential"), source)


def test_grouped_weights_are_memory_views_of_the_experts() -> None:
    random = np.random.default_rng(3)
    fc1, fc2 = ([random.standard_normal(s).astype("f4") for _ in range(4)] for s in ((12, 8), (8, 6)))
    head = "decoder.layers.0.mlp."
    source = {Rank(): {head + "router.weight": np.zeros((4, 8), "f4")}}
    for e in range(4):
        source[Rank()] |= {f"{head}experts.linear_fc1.weight{e}": fc1[e], f"{head}experts.linear_fc2.weight{e}": fc2[e]}
    grouped = reshard_state_dict(source, ONE, ONE, expert_form="grouped")[Rank()]
    weight1, weight2 = grouped[head + "experts.weight1"], grouped[head + "experts.weight2"]
    assert weight1.shape == (8, 48) and weight2.shape == (24, 8)
    assert all(
        np.array_equal(weight1.reshape(4, 8, 12)[e].T, fc1[e]) and np.array_equal(weight2.reshape(4, 6, 8)[e].T, fc2[e]) for e in range(4)
    )
    halves = reshard_state_dict({Rank(): grouped}, ONE, ParallelLayout(tp=2), expert_form="numbered")
    right = halves[Rank(tp=1, etp=1)][head + "experts.linear_fc1.weight2"]
    assert np.array_equal(right, np.concatenate([fc1[2][3:6], fc1[2][9:12]]))  # its part of gate, then its part of up


def model(layers: int = 4, experts: int = 0, tied: bool = False) -> dict[str, np.ndarray]:
    """A whole model in Megatron's names: hidden 8, 4 heads of 4, 2 groups, ffn 16, every element unique."""
    config = {**CONFIG, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    tensors = megatron_tensors(fill(dense_shapes(config)), config)
    if tied:
        tensors.pop("output_layer.weight", None)
    for layer in range(1, layers if experts else 0):
        mixture = f"decoder.layers.{layer}.mlp."
        tensors = {n: v for n, v in tensors.items() if not n.startswith(mixture)}
        tensors[mixture + "router.weight"] = np.random.default_rng(layer).standard_normal((experts, 8)).astype("f4")
        for e in range(experts):
            fill_ = np.random.default_rng((layer, e))
            tensors[f"{mixture}experts.linear_fc1.weight{e}"] = fill_.standard_normal((16, 8)).astype("f4")
            tensors[f"{mixture}experts.linear_fc2.weight{e}"] = fill_.standard_normal((8, 8)).astype("f4")
    return tensors


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    stages = [
        {"pp": 1},
        {"pp": 2},
        {"pp": 4},
        {"pp": 2, "vpp": 2},
        {"pp": 2, "first_layers": 1},
        {"pp": 2, "pipeline": "Et|tt|tL|"},
        {"pp": 3, "pipeline": "E|t*4|L"},
    ]
    sizes = {"tp": draw(st.sampled_from([1, 2, 4])), "ep": draw(st.sampled_from([1, 2, 4])), "etp": draw(st.sampled_from([None, 1, 2]))}
    return ParallelLayout(**sizes, **draw(st.sampled_from(stages)))


@settings(max_examples=40, deadline=None)
@given(
    first=layouts(),
    second=layouts(),
    experts=st.sampled_from([0, 4]),
    local=st.booleans(),
    tied=st.booleans(),
    form=st.sampled_from(["numbered", "sequential", "grouped"]),
)
def test_there_and_back_again_is_the_identity(
    first: ParallelLayout, second: ParallelLayout, experts: int, local: bool, tied: bool, form: str
) -> None:
    whole = {Rank(): model(experts=experts, tied=tied)}
    options = {"local_names": local, "tied": tied}
    there = reshard_state_dict(whole, ONE, first, expert_form=form, **options)
    assert set(there) == set(ranks(first))
    further = reshard_state_dict(there, first, second, **options)
    assert equal(reshard_state_dict(further, second, ONE, expert_form="numbered", **options), whole)
    if tied and second.pp > 1:
        last = further[Rank(0, second.pp - 1, 0, 0)]
        virtual = max(v for _, v in second.stages(4))
        prefix = f"model{virtual}." if local and virtual else ""
        assert np.array_equal(
            last[prefix + "output_layer.weight"], further[Rank()]["model0." * bool(prefix) + "embedding.word_embeddings.weight"]
        )


def test_every_backend_gives_the_same_and_torch_tensors_stay_torch() -> None:
    torch = pytest.importorskip("torch")
    whole = {Rank(): model(experts=4)}
    target = ParallelLayout(tp=2, ep=2, pp=2)
    arrays = reshard_state_dict(whole, ONE, target, expert_form="grouped")
    tensors = {Rank(): {n: torch.from_numpy(v) for n, v in whole[Rank()].items()}}
    resharded = reshard_state_dict(tensors, ONE, target, expert_form="grouped", device="cpu")
    assert all(isinstance(v, torch.Tensor) for shard in resharded.values() for v in shard.values())
    assert equal(resharded, arrays)


def test_the_triton_backend_moves_what_was_planned(interpreter: Any) -> None:
    whole, target = {Rank(): model(experts=4)}, ParallelLayout(tp=2, ep=2, pp=2)
    plan = plan_reshard(described(whole), ONE, target, Options(expert_form="grouped"))
    sources = [whole[a.rank][a.name] for a in plan.sources]
    targets = interpreter.call("move", (plan.moves, sources, [np.empty(t.shape, t.dtype) for t in plan.targets]))
    ours: Shards = {rank: {} for rank in ranks(target)}
    for description, array in zip(plan.targets, targets, strict=True):
        ours[description.rank][description.name] = array
    assert equal(ours, apply_plan(plan, whole))


def test_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU: the Triton kernels were interpreted and compiled, not run")
    whole, target = model(experts=4), ParallelLayout(tp=2, ep=2, pp=2)
    arrays = reshard_state_dict({Rank(): whole}, ONE, target, expert_form="grouped")
    tensors = {Rank(): {n: torch.from_numpy(v) for n, v in whole.items()}}
    on_gpu = reshard_state_dict(tensors, ONE, target, expert_form="grouped", device="cuda")
    assert all(v.is_cuda for shard in on_gpu.values() for v in shard.values())
    assert equal(on_gpu, arrays)


def test_only_the_wanted_ranks_are_made_and_nothing_is_shared_with_the_source() -> None:
    whole = {Rank(): model()}
    mine = Rank(tp=1, etp=1)
    result = reshard_state_dict(whole, ONE, ParallelLayout(tp=2), wanted=[mine])
    assert list(result) == [mine]
    name = "decoder.final_layernorm.weight"
    result[mine][name][:] = -1
    assert (whole[Rank()][name] != -1).all()


def test_ranks_are_numbered_as_megatron_numbers_them() -> None:
    torch = pytest.importorskip("torch")
    state = pytest.importorskip("megatron.core.parallel_state")
    del torch
    layout = ParallelLayout(tp=2, pp=2, ep=2, etp=1)
    dense = state.RankGenerator(tp=2, ep=1, dp=1, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    expert = state.RankGenerator(tp=1, ep=2, dp=1, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    found = [[0, 0, 0, 0] for _ in range(4)]
    for column, (generator, axis) in enumerate(((dense, "tp"), (dense, "pp"), (expert, "ep"), (expert, "tp"))):
        for group in generator.get_ranks(axis):
            for position, rank in enumerate(group):
                found[rank][column] = position
    assert list(ranks(layout)) == [Rank(*f) for f in found]


def broken(change: str) -> tuple[Shards, dict[str, Any], ParallelLayout]:
    two = ParallelLayout(tp=2)
    shards = reshard_state_dict({Rank(): model()}, ONE, two)
    first, second = ranks(two)
    target = ONE
    if change == "rank":
        del shards[second]
    elif change == "tensor":
        del shards[second]["decoder.layers.2.mlp.linear_fc2.weight"]
    elif change == "copy":
        shards[second]["decoder.final_layernorm.weight"] = shards[second]["decoder.final_layernorm.weight"] + 1
    elif change == "unknown tensor that is cut":
        shards[first]["decoder.layers.0.mixer.in_proj.weight"], shards[second]["decoder.layers.0.mixer.in_proj.weight"] = (
            np.zeros(4),
            np.ones(4),
        )
    elif change == "dtype":
        shards[second]["output_layer.weight"] = shards[second]["output_layer.weight"].astype("f8")
    elif change == "shape":
        shards[second]["output_layer.weight"] = shards[second]["output_layer.weight"][:3]
    elif change == "stray rank":
        shards[Rank(5)] = dict(shards[first])
    elif change == "no tensor":
        shards[first]["iteration"] = 5
    elif change == "tp 3":
        target = ParallelLayout(tp=3)
    elif change == "pp 3":
        target = ParallelLayout(pp=3)
    return shards, {}, target


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ("rank", "E404", "lacks shards"),
        ("tensor", "E404", "is not covered"),
        ("stray rank", "E404", "which the source layout does not have"),
        ("copy", "E307", "copies of decoder.final_layernorm.weight"),
        ("unknown tensor that is cut", "E307", "copies of decoder.layers.0.mixer.in_proj.weight"),
        ("dtype", "E307", "do not fit together"),
        ("shape", "E307", "do not fit together"),
        ("no tensor", "E305", "no tensor"),
        ("tp 3", "E403", "cannot be cut"),
        ("pp 3", "E402", "cannot be split"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: str, code: str, says: str) -> None:
    shards, options, target = broken(change)
    with pytest.raises(CkptError, match=says) as caught:
        reshard_state_dict(shards, ParallelLayout(tp=2), target, **options)
    assert caught.value.code == code


def test_what_the_target_cannot_hold_is_refused() -> None:
    shards = {Rank(): model(experts=4)}
    with pytest.raises(CkptError, match="cannot be spread evenly over ep 3"):
        reshard_state_dict(shards, ONE, ParallelLayout(ep=3))
    with pytest.raises(CkptError, match="no form of experts"):
        reshard_state_dict(shards, ONE, ONE, expert_form="stacked")
    with pytest.raises(CkptError, match="has no Rank"):
        reshard_state_dict(shards, ONE, ONE, wanted=[Rank(tp=7)])
    shards[Rank()]["decoder.layers.1.mlp.experts.linear_fc1.bias0"] = np.zeros(16, "f4")
    with pytest.raises(CkptError, match="no biases"):
        reshard_state_dict(shards, ONE, ONE, expert_form="grouped")


def test_ffn_that_tensor_parallelism_cannot_halve_is_refused_although_both_halves_together_could() -> None:
    fc1 = {Rank(): {"decoder.layers.0.mlp.linear_fc1.weight": np.zeros((12, 8), "f4")}}
    with pytest.raises(CkptError, match="cannot be cut for tp 4"):
        reshard_state_dict(fc1, ONE, ParallelLayout(tp=4))


@pytest.mark.parametrize("name", ["memory.reshard", "memory.names", "kernels", "kernels.tables"])
def test_examples_in_the_documentation_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"ckpt_tools.{name}"))
    assert result.attempted and not result.failed


def test_arrays_are_resharded_without_importing_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from ckpt_tools.layout import ParallelLayout\n"
        "from ckpt_tools.memory.reshard import Rank, reshard_state_dict\n"
        "reshard_state_dict({Rank(): {'output_layer.weight': np.zeros((4, 2))}}, ParallelLayout(), ParallelLayout(tp=2))\n"
        "print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(root)}, cwd=root / "tests", check=True
    )
    assert done.stdout.strip() == "[]"
