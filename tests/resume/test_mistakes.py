"""Ten mistakes that loaders have made: each is seen, and named. A comparison that misses one would prove nothing."""

from __future__ import annotations

import pytest

from ckpt_tools.resume.result import DIFFERS, EQUAL
from ckpt_tools.resume.settings import INJECTIONS

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
# mistake -> (code, component that is named, part of the text, components that must still be equal as loaded)
EXPECTED = {
    "drop-optimizer": ("R104", "exp_avg", "not restored", ("weights", "scheduler", "consumed samples", "random states")),
    "drop-step": ("R106", "optimizer step", "bias correction", ("weights", "master weights", "exp_avg", "exp_avg_sq", "scheduler")),
    "drop-scheduler": ("R107", "scheduler", "num_steps", ("weights", "master weights", "exp_avg", "optimizer step", "consumed samples")),
    "drop-rng": ("R108", "random states", "dropout", ("weights", "master weights", "exp_avg", "scheduler", "optimizer step")),
    "stale-master": ("R103", "master weights", "do not even round", ("weights", "exp_avg", "exp_avg_sq", "optimizer step")),
    "shift-moments": ("R105", "exp_avg", "layer l", ("weights", "master weights", "optimizer step", "scheduler")),
    "wrong-iteration": ("R101", "iteration", "another iteration", ()),
    "swap-gate-up": ("R102", "weights", "gate and up exchanged", ("exp_avg", "optimizer step", "scheduler", "random states")),
    "skip-sample": ("R109", "consumed samples", "1 samples are skipped", ("weights", "exp_avg", "optimizer step", "random states")),
    "dup-weights": ("R112", "checkpoint", "stored twice", ("weights", "exp_avg", "optimizer step", "random states")),
}


def test_every_mistake_that_can_be_made_is_expected_here():
    assert EXPECTED.keys() == INJECTIONS.keys()


@pytest.mark.case("B2", "L3", "L6", "L9", "A1")
@pytest.mark.parametrize("name", EXPECTED)
def test_the_mistake_is_caught_and_named(experiment, told, name):
    code, component, text, equal = EXPECTED[name]
    found = experiment(inject=name)
    assert not found.same
    first = found.reasons[0]
    assert (first.code, first.component) == (code, component) and text in first.text
    verdicts = told(found)
    assert {verdicts[part, "loaded"] for part in equal} <= {EQUAL}
    if name != "dup-weights":  # this one is only about what lies on disk: Megatron loads its own copy
        assert verdicts[component, "loaded"] == DIFFERS
    if name not in ("dup-weights", "wrong-iteration"):  # that one takes a step again, and takes it alike
        assert any(row.when == "trained" and row.verdict == DIFFERS for row in found.rows)
    assert "on purpose" in found.notes[0]


def test_moments_of_an_optimizer_without_masters_are_caught_too(experiment):
    found = experiment(inject="shift-moments", optimizer="plain", dtype="float32")
    assert not found.same and found.reasons[0].code == "R105"


def test_a_mistake_is_seen_through_the_noise_of_another_layout(experiment):
    found = experiment("reshard:tp=2", inject="stale-master")
    assert not found.exact and not found.same and found.reasons[0].code == "R103"
