"""Save, take along a path, load, continue: equal to a run that never stopped. Judge: megatron-core trains, saves and loads on both sides."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT

from ckpt_tools.layout import ParallelLayout
from ckpt_tools.resume.launch import check_installed  # noqa: F401 - imports no torch
from ckpt_tools.resume.result import EQUAL, NOISE, SKIPPED

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
FAMILIES = ROOT / "fixtures" / "families"
ALWAYS = {"weights", "exp_avg", "exp_avg_sq", "optimizer step", "scheduler", "consumed samples", "iteration"}


def check_exact(found):
    assert found.exact and found.same, (found.reasons, [r for r in found.rows if r.verdict != EQUAL])
    assert {row.verdict for row in found.rows} == {EQUAL}
    assert {row.component for row in found.rows if row.when == "loaded"} >= ALWAYS | {"random states"}
    assert {row.component for row in found.rows if row.when == "trained"} >= {"loss", "gradient norm", "learning rate", "samples", "weights"}
    assert all(row.total > 1 for row in found.rows if row.component in ("weights", "exp_avg", "exp_avg_sq"))
    assert [p.iteration for p in found.straight] == list(range(1, found.end + 1))
    assert [p.loss for p in found.resumed] == [p.loss for p in found.straight][found.saved :]
    assert len({p.loss for p in found.straight}) == found.end and all(p.loss and p.grad_norm for p in found.straight)


@pytest.mark.case("L3", "L1", "L6")
@pytest.mark.parametrize("stages", [(), ("hf",), ("split",), ("torch",), ("torch", "torch_dist", "hf")], ids=lambda s: "+".join(s) or "straight")
def test_with_one_layout_every_bit_is_the_same_along_every_path(experiment, stages):
    found = experiment(*stages)
    check_exact(found)
    assert found.path == stages and not found.missing


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "plain"},
        {"optimizer": "plain", "dtype": "float32"},
        {"form": "torch"},
        {"form": "torch", "optimizer": "plain"},
        {"layout": ParallelLayout(tp=2, dp=2)},
        {"layout": ParallelLayout(pp=2, vpp=2), "form": "torch"},
    ],
    ids=["plain", "float32", "legacy", "legacy plain", "tp2 dp2", "vpp legacy"],
)
def test_every_optimizer_form_and_layout_continues_exactly(experiment, settings):
    check_exact(experiment(**settings))


@pytest.mark.case("L1")
@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (("reshard:tp=2",), {}),
        (("torch", "reshard:tp=1,pp=2"), {"layout": ParallelLayout(tp=2)}),
        (("hf", "reshard:dp=2"), {"optimizer": "plain"}),
    ],
    ids=["tp1 to tp2", "legacy tp2 to pp2", "dp1 to dp2"],
)
def test_another_layout_loads_every_bit_and_then_stays_within_the_noise_of_two_straight_runs(experiment, told, stages, settings):
    found = experiment(*stages, **settings)
    assert not found.exact and found.same, (found.reasons, found.rows)
    verdicts = told(found)
    assert {verdicts[name, "loaded"] for name in ALWAYS} == {EQUAL}
    if found.layout.split(",")[0] != found.resumed_layout.split(",")[0]:
        assert verdicts["random states", "loaded"] == SKIPPED  # never claimed
    noisy = [row for row in found.rows if row.verdict == NOISE]
    assert all(row.floor is not None and row.largest is not None and row.largest <= row.floor for row in noisy)
    assert len(found.other) == found.end and found.other != found.straight  # the floor was measured


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt2"])
def test_families_from_their_config_go_through_hugging_face_and_back(experiment, name):
    config = json.loads((FAMILIES / f"{name}.json").read_text())
    check_exact(experiment("hf", config=config))


@pytest.mark.case("M1")
def test_an_adapter_goes_on_after_a_detour_through_peft(experiment):
    found = experiment("lora")
    check_exact(found)
    moments = next(row for row in found.rows if row.component == "exp_avg")
    assert moments.total == 4 * 4 * 2  # two factors of four modules in four layers, and nothing of the base


@pytest.mark.case("M1")
def test_an_adapter_of_experts_goes_on_after_a_detour_through_peft(experiment):
    found = experiment("lora", config=json.loads((FAMILIES / "mixtral.json").read_text()))
    check_exact(found)
    moments = next(row for row in found.rows if row.component == "exp_avg")
    assert moments.total == 3 * 2 * (2 + 4 * 2)  # in each layer two factors of attention's two modules and of two of each expert


def test_experts_on_two_ranks(experiment):
    config = json.loads((FAMILIES / "mixtral.json").read_text())
    check_exact(experiment("torch", config=config, layout=ParallelLayout(ep=2)))


def test_the_newer_megatron_continues_too(experiment, monkeypatch):
    newer = ROOT / ".venv" / "mcore019"
    if not (newer / "megatron" / "core").is_dir():
        pytest.skip("no megatron-core 0.19 here")
    monkeypatch.setenv("PYTHONPATH", str(newer))
    check_exact(experiment("hf", "torch"))
