"""Parameter groups are matched by what they mean, keep every key, and the step count is one and the same everywhere (cases L3, L4, L5)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.checkpoint import open_checkpoint
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.pickles import TensorSpec
from ckpt_tools.layout import ParallelLayout
from ckpt_tools.optimizer.entries import FULLY_RESHARDABLE, NON_DISTRIBUTED, optimizer_entries
from ckpt_tools.optimizer.groups import completed, expert_split, group_number, identity
from ckpt_tools.optimizer.reading import read_optimizer
from ckpt_tools.optimizer.state import OptimizerState
from ckpt_tools.tensors import Chunk, TensorMetadata
from ckpt_tools.views import as_mcore

HIDDEN, LAYERS, VOCABULARY, FFN = 8, 2, 128, 16
GROUPS = ({"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 0.1},
          {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 0.1})  # fmt: skip


def save_legacy(run: Path, *, order: tuple[tuple[int, int], ...] = ((0, 1), (0, 1)), steps: tuple[Any, Any] = (None, 7.0), extra: dict[str, Any] | None = None,
                without: str | None = None, masters_off_by: float = 0.0) -> None:  # fmt: skip
    """A PP2 run of the `torch` format, one layer a stage, as Megatron's Float16 optimizer writes it.

    order  per stage, which of GROUPS comes first and second.     steps  (in the groups, per parameter).
    """
    import argparse

    args = argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=2, num_query_groups=2, group_query_attention=True, kv_channels=4,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=2, padded_vocab_size=VOCABULARY, vocab_size=VOCABULARY, swiglu=True,
        untie_embeddings_and_output_weights=True, add_bias_linear=False, normalization="RMSNorm", position_embedding_type="rope", rotary_base=10000,
        norm_epsilon=1e-5, max_position_embeddings=64, world_size=2, data_parallel_size=1, num_experts=None, transformer_impl="local",
    )  # fmt: skip
    for stage in range(2):
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)} if stage == 0 else {}
        layer = "decoder.layers.0."
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,), f"{layer}self_attention.linear_proj.weight": (HIDDEN, 8),
            f"{layer}self_attention.linear_qkv.weight": (24, HIDDEN), f"{layer}pre_mlp_layernorm.weight": (HIDDEN,),
            f"{layer}mlp.linear_fc1.weight": (2 * FFN, HIDDEN), f"{layer}mlp.linear_fc2.weight": (HIDDEN, FFN),
        }  # fmt: skip
        if stage == 1:
            shapes |= {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (VOCABULARY, HIDDEN)}
        generator = torch.Generator().manual_seed(stage)
        masters = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        state: dict[int, Any] = {}
        groups, kept = [], []
        for which in order[stage]:
            group = {k: v for k, v in GROUPS[which].items() if k != without} | (extra or {})
            if steps[0] is not None:
                group["step"] = steps[0]
            members = [n for n, s in shapes.items() if (len(s) == 1) == (which == 1)]
            group["params"] = list(range(len(state), len(state) + len(members)))
            for name in members:
                state[len(state)] = {"exp_avg": masters[name] * 2, "exp_avg_sq": masters[name] ** 2}
                if steps[1] is not None:
                    state[len(state) - 1]["step"] = torch.tensor(steps[1])
            groups.append(group)
            kept.append([masters[n] + masters_off_by for n in members])
        folder = run / "iter_0000007" / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        torch.save(
            {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": {n: m.bfloat16() for n, m in masters.items()},
             "optimizer": {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": kept}},
            folder / "model_optim_rng.pt",
        )  # fmt: skip
    (run / "latest_checkpointed_iteration.txt").write_text("7")


def read(run: Path) -> tuple[OptimizerState, dict[str, TensorMetadata]]:
    checkpoint = open_checkpoint(str(run))
    view = as_mcore(checkpoint)
    return read_optimizer(checkpoint, view), view.tensors


@pytest.mark.case("L4")
@pytest.mark.parametrize("second", [(0, 1), (1, 0)])
def test_groups_of_stages_in_another_order_are_matched_by_their_keys(tmp_path: Path, second: tuple[int, int]):
    save_legacy(tmp_path / "run", order=((0, 1), second))
    state, weights = read(tmp_path / "run")
    assert not state.problems  # each float32 weight rounds to its own parameter, so none was taken for another
    assert [g["wd_mult"] for g in state.groups] == [1.0, 0.0]
    for form in (FULLY_RESHARDABLE, NON_DISTRIBUTED):
        common = optimizer_entries(state, form, weights=weights, layout=ParallelLayout()).common
        assert [g["wd_mult"] for g in common["optimizer"]["param_groups"]] == [1.0, 0.0]
    for name, tensor in weights.items():
        group = state.groups[group_number(name, len(tensor.global_shape), False, state.groups)]
        assert group["wd_mult"] == (0.0 if "norm" in name else 1.0)


@pytest.mark.case("L3")
@pytest.mark.parametrize(("steps", "told"), [((7, 1.0), True), ((None, 7.0), False), ((7, 7.0), False)])
def test_the_step_is_one_and_is_written_in_every_place(tmp_path: Path, steps: tuple[Any, Any], told: bool):
    save_legacy(tmp_path / "run", steps=steps)
    state, weights = read(tmp_path / "run")
    assert state.step == 7
    assert any("7 was taken" in note.text for note in state.notes) == told
    distributed = optimizer_entries(state, FULLY_RESHARDABLE, weights=weights, layout=ParallelLayout()).common
    assert [g["step"] for g in distributed["optimizer"]["param_groups"]] == [7, 7]
    plain = optimizer_entries(state, NON_DISTRIBUTED, weights=weights, layout=ParallelLayout()).common["optimizer"]
    assert plain["state"]["common_step"] == TensorSpec("float32", (), struct.pack("<f", 7.0))
    assert [g.get("step") for g in plain["param_groups"]] == ([7, 7] if steps[0] else [None, None])


@pytest.mark.case("L5")
def test_unknown_keys_stay_and_missing_identity_keys_are_added_and_said(tmp_path: Path):
    save_legacy(tmp_path / "run", extra={"foo": 3}, without="lr_mult")
    state, weights = read(tmp_path / "run")
    entries = optimizer_entries(state, FULLY_RESHARDABLE, weights=weights, layout=ParallelLayout())
    for group in entries.common["optimizer"]["param_groups"]:
        assert group["foo"] == 3
        assert group["lr_mult"] == 1.0
    assert any("lr_mult=1.0" in note.subject for note in entries.notes)


@pytest.mark.case("L5")
def test_the_names_of_nemo_count_as_the_keys():
    groups, notes = completed(
        [{"pre_wd_mult": 0.0, "pre_lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}], None
    )
    assert "wd_mult" not in groups[0]
    assert notes == []
    assert identity(groups[0])[0] == 0.0


@pytest.mark.case("L5")
def test_learning_rates_that_0_19_looks_groups_up_by_come_from_the_scheduler():
    groups, notes = completed([dict(GROUPS[0])], {"max_lr": 0.3, "min_lr": 0.1})
    assert (groups[0]["max_lr"], groups[0]["min_lr"]) == (0.3, 0.1)
    assert notes


@pytest.mark.case("L9")
@pytest.mark.parametrize(("off_by", "wrong"), [(0.0, False), (1e-9, False), (8.0, True)])
def test_float32_weights_that_are_not_the_models_are_a_problem(tmp_path: Path, off_by: float, wrong: bool):
    save_legacy(tmp_path / "run", masters_off_by=off_by)
    state, _ = read(tmp_path / "run")
    assert bool(state.problems) == wrong
    if wrong:
        assert "decoder.layers" in state.problems[0].text or "embedding" in state.problems[0].text


def test_experts_get_groups_of_their_own_when_they_are_spread_and_lose_them_when_they_are_not():
    apart, notes = expert_split([dict(g) for g in GROUPS], True)
    assert [g["is_expert_parallel"] for g in apart] == [False, False, True]
    assert apart[2]["wd_mult"] == 1.0
    assert notes
    together, notes = expert_split(apart, False)
    assert together == [dict(g) for g in GROUPS]
    assert notes


def test_a_parameter_that_fits_two_groups_is_an_error():
    groups = [dict(GROUPS[0]), dict(GROUPS[0], lr_mult=0.1)]
    with pytest.raises(CkptError) as caught:
        group_number("decoder.layers.0.mlp.linear_fc1.weight", 2, False, groups)
    assert caught.value.code == "E227"


def test_float32_weights_stored_as_remainders_are_refused():
    tensor = TensorMetadata("w", "int16", (2, 2), (Chunk((0, 0), (2, 2), None),))
    weights = {"w": TensorMetadata("w", "bfloat16", (2, 2), ())}
    state = OptimizerState("dp_reshardable", {"param": {"w": tensor}, "exp_avg": {"w": tensor}}, tuple(GROUPS))
    with pytest.raises(CkptError, match="remainders"):
        optimizer_entries(state, FULLY_RESHARDABLE, weights=weights, layout=ParallelLayout())
