"""Reshard to any layout and back is the identity on bytes, weights and optimizer; the files are read by torch.load."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import CONFIG, megatron_args, read_torch_dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.conversion import run_conversion
from ckpt_tools.errors import CkptError
from ckpt_tools.layout import ParallelLayout
from ckpt_tools.options import ConvertOptions
from ckpt_tools.reshard import LayoutChanges, changed_layout, layout_of, plan_reshard

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
quiet = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def reshard(source: Path, target: Path, layout: ParallelLayout, **options: Any) -> Path:
    checkpoint = open_checkpoint(source)
    chosen = ConvertOptions(to=checkpoint.format, layout=layout, **options)
    run_conversion(plan_reshard(checkpoint, chosen), checkpoint, str(target), chosen, fsync=False)
    return target


def load(path: Path) -> Any:
    """As Megatron-LM: weights only, with what it calls safe besides."""
    import numpy

    safe = [argparse.Namespace, numpy._core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, numpy.dtypes.UInt32DType]
    with torch.serialization.safe_globals(safe):
        return torch.load(path, weights_only=True)


def contents(run: Path) -> dict[str, Any]:
    """Relative path and keys -> bytes of every tensor, and every plain value, of all files of a run."""
    found: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}/{key}", inner)
        elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | dict | list | tuple) for v in value):
            for number, inner in enumerate(value):
                walk(f"{name}/{number}", inner)
        elif isinstance(value, argparse.Namespace):
            walk(name, vars(value))
        else:
            found[name] = repr(value)

    for path in sorted(run.rglob("*.pt")):
        walk(str(path.relative_to(run)), load(path))
    # random states stay behind when the layout changes
    return {k: v for k, v in found.items() if "rng_state" not in k}


sizes = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))


def made(tp: int, pp: int, vpp: int, **more: Any) -> ParallelLayout:
    assume(pp > 1 or vpp == 1)
    assume(4 % (pp * vpp) == 0)
    return ParallelLayout(tp=tp, pp=pp, vpp=vpp, **more)


@pytest.mark.parametrize("name", ["legacy_llama_tp2pp2_bf16", "legacy_llama_dp2_distopt_bf16"])
@quiet
@given(first=sizes, second=sizes)
def test_a_dense_run_comes_back_with_its_optimizer(shared: Path, tmp_path_factory: pytest.TempPathFactory, name: str, first, second):
    base = tmp_path_factory.mktemp("dense")
    one, two = made(*first, dp=2), made(*second, dp=2)
    start = reshard(shared / "real" / name / "mcore", base / "a", one, padded_vocab=512)
    there = reshard(start, base / "b", two, padded_vocab=512)
    back = reshard(there, base / "c", one, padded_vocab=512)
    before, after = contents(start), contents(back)
    assert before.keys() == after.keys()
    assert [k for k in before if before[k] != after[k]] == []
    assert any("/optimizer/" in k and isinstance(v, tuple) for k, v in before.items()) or any("distrib_optim.pt" in k for k in before)
    shutil.rmtree(base)


expert_sizes = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
forms = st.sampled_from(["sequential", "te_grouped", "grouped"])


@quiet
@given(first=expert_sizes, second=expert_sizes, form=forms, other=forms)
def test_a_run_with_experts_comes_back_with_its_optimizer(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, first, second, form, other
):
    base = tmp_path_factory.mktemp("experts")
    one, two = (ParallelLayout(tp=tp, pp=pp, ep=ep, etp=min(etp, tp)) for tp, pp, ep, etp in (first, second))
    # where experts have no groups of parameters of their own (no ep), there is nothing that could bring them back
    assume((one.ep > 1 and two.ep > 1) or one.ep == 1)
    run = shared / "real" / "legacy_mixtral_ep2_seq_bf16" / "mcore"
    start = reshard(run, base / "a", one, padded_vocab=512, experts=form, spec="local")
    there = reshard(start, base / "b", two, padded_vocab=512, experts=other, spec="te")
    back = reshard(there, base / "c", one, padded_vocab=512, experts=form, spec="local")
    before, after = contents(start), contents(back)
    assert before.keys() == after.keys()
    assert [k for k in before if before[k] != after[k]] == []
    shutil.rmtree(base)


def written(folder: Path, layers: int, heads: int, groups: int, d: int, ffn: int, vocab: int) -> dict[str, np.ndarray]:
    """A model of these sizes on one rank, every element unlike the others, by torch.save."""
    from builders import write_legacy

    hidden = 8
    shapes = {"embedding.word_embeddings.weight": (vocab, hidden)}
    for layer in range(layers):
        p = f"decoder.layers.{layer}."
        shapes |= {
            p + "self_attention.linear_proj.weight": (hidden, heads * d),
            p + "self_attention.linear_qkv.layer_norm_weight": (hidden,),
            p + "self_attention.linear_qkv.weight": ((heads + 2 * groups) * d, hidden),
            p + "mlp.linear_fc1.layer_norm_weight": (hidden,),
            p + "mlp.linear_fc1.weight": (2 * ffn, hidden),
            p + "mlp.linear_fc2.weight": (hidden, ffn),
        }
    shapes |= {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": (vocab, hidden)}
    tensors, start = {}, 0
    for name, shape in shapes.items():
        tensors[name] = np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)
        start += tensors[name].size
    config = {**CONFIG, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": d}
    config |= {"intermediate_size": ffn, "vocab_size": vocab}
    write_legacy(folder / "iter_0000005" / "mp_rank_00", tensors, megatron_args(config))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return tensors


@settings(quiet, max_examples=60)
@given(
    extra=st.sampled_from([0, 0, 0, 0, 1]),
    groups=st.sampled_from([1, 2, 4]),
    repeat=st.sampled_from([1, 2, 4]),
    d=st.sampled_from([2, 4, 6]),
    ffn=st.sampled_from([8, 12, 20]),
    tp=st.sampled_from([1, 2, 2, 3, 4]),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
)
def test_any_sizes_and_any_string_of_stages(tmp_path_factory: pytest.TempPathFactory, extra, groups, repeat, d, ffn, tp, counts):
    """Either every rank holds exactly its rows of each of its layers, or the sizes are refused before anything is written."""
    base = tmp_path_factory.mktemp("sizes")
    layers = sum(counts) + extra
    tensors = written(base / "one", layers, groups * repeat, groups, d, ffn, 24)
    text = "E" + "|".join("t" * n for n in counts) + "L"
    layout = ParallelLayout(tp=tp, pp=len(counts), pipeline=text)
    heights = {(groups * repeat + 2 * groups) * d, ffn, 24, groups * repeat * d}
    possible = sum(counts) == layers and all(n % tp == 0 for n in heights)
    try:
        reshard(base / "one", base / "two", layout, padded_vocab=24)
    except CkptError as error:
        assert not possible and error.code in ("E402", "E403", "E301") and not (base / "two").exists()
        return
    assert possible
    held: dict[str, dict[int, np.ndarray]] = {}
    first = [sum(counts[:stage]) for stage in range(len(counts))]
    for path in (base / "two").rglob("model_optim_rng.pt"):
        numbers = [int(n) for n in path.parent.name.removeprefix("mp_rank_").split("_")]
        stage = numbers[1] if len(numbers) > 1 else 0
        for name, tensor in load(path)["model"].items():
            start, _, rest = name.partition("decoder.layers.")
            if rest:
                local, _, rest = rest.partition(".")
                name = f"{start}decoder.layers.{int(local) + first[stage]}.{rest}"
            held.setdefault(name, {})[numbers[0]] = tensor.numpy()
    assert held.keys() == tensors.keys()
    for name, expected in tensors.items():
        for rank, found in held[name].items():
            if "norm" in name:
                part = expected
            elif name.endswith("linear_fc1.weight"):
                part = np.concatenate([np.split(half, tp)[rank] for half in np.split(expected, 2)])
            else:
                part = np.split(expected, tp, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)[rank]
            assert np.array_equal(found, part), (name, rank)
        assert len(held[name]) == tp
    back = reshard(base / "two", base / "back", ParallelLayout(), padded_vocab=24)
    one = load(back / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")["model"]
    assert one.keys() == tensors.keys() and all(np.array_equal(one[n].numpy(), t) for n, t in tensors.items())
    shutil.rmtree(base)


@quiet
@given(first=sizes, second=sizes)
def test_torch_dist_gets_pieces_for_each_reader_and_keeps_every_bit(shared: Path, tmp_path_factory: pytest.TempPathFactory, first, second):
    base = tmp_path_factory.mktemp("pieces")
    one, two = made(first[0], first[1], 1), made(second[0], second[1], 1)
    start = reshard(shared / "real" / "llama_tp2pp2_bf16" / "mcore", base / "a", one, padded_vocab=512)
    there = reshard(start, base / "b", two, padded_vocab=512)
    before, after = (read_torch_dist(r / "iter_0000005") for r in (start, there))
    assert before.keys() == after.keys() and [k for k in before if before[k].tobytes() != after[k].tobytes()] == []
    tensor = open_checkpoint(there).tensors["decoder.layers.mlp.linear_fc2.weight"]
    assert {c.local_shape[-1] for c in tensor.chunks} == {tensor.global_shape[-1] // two.tp}
    assert len({c.extent.path for c in tensor.chunks if c.extent}) >= two.pp
    shutil.rmtree(base)


def test_sizes_that_are_not_named_stay(shared: Path):
    source = layout_of(open_checkpoint(shared / "real" / "legacy_llama_vpp2_bf16" / "mcore"))
    assert (source.tp, source.pp, source.vpp) == (1, 2, 2)
    assert changed_layout(source, LayoutChanges(tp=2)) == ParallelLayout(tp=2, pp=2, vpp=2, dp=source.dp)
    # another number of stages forgets how the old ones were divided
    assert changed_layout(source, LayoutChanges(pp=4)) == ParallelLayout(pp=4, dp=source.dp)
    assert changed_layout(source, LayoutChanges(pp=2, first_layers=1)) == ParallelLayout(pp=2, first_layers=1, dp=source.dp)
    uneven = ParallelLayout(tp=2, pp=4, ep=2, etp=1, first_layers=1)
    assert changed_layout(uneven, LayoutChanges(tp=4)) == ParallelLayout(tp=4, pp=4, ep=2, etp=1, first_layers=1)
    assert changed_layout(uneven, LayoutChanges(pipeline="Et|tL", pp=2)) == ParallelLayout(tp=2, pp=2, ep=2, etp=1, pipeline="Et|tL")
