"""Latent attention in the legacy format: names and shapes judged by the modules that megatron-core builds from the stored args."""

from __future__ import annotations

import json

from builders import ckpt
from families import tiny
from oracle import launch

from ckpt_tools.checkpoint import open_checkpoint

VARIANTS = ("deepseek_v2", "deepseek_v3_yarn_no_q_lora")


def test_megatron_core_knows_every_name_and_the_model_comes_back(tmp_path, monkeypatch):
    jobs = []
    for variant in VARIANTS:
        tiny.write(variant, tmp_path / variant)
        run = tmp_path / f"{variant}-run"
        done = ckpt("convert", tmp_path / variant, run, "--to", "torch")
        assert done.returncode == 0, done.stderr
        assert open_checkpoint(run).details.spec == "te"
        back = ckpt("convert", run, tmp_path / f"{variant}-back", "--to", "hf")
        assert back.returncode == 0, back.stderr
        assert ckpt("diff", tmp_path / variant, tmp_path / f"{variant}-back").returncode == 0
        jobs.append({"checkpoint": str(run / "release"), "output": str(tmp_path / f"{variant}-out"), "ids": None})
    monkeypatch.setenv("CKPT_TEST_SPEC", "te")
    assert launch.run("family_model", jobs, tmp_path) == [None, None]
    for variant in VARIANTS:
        report = json.loads((tmp_path / f"{variant}-out" / "report.json").read_text())
        assert report == {"missing": [], "unexpected": [], "error": None}, report["error"] or report
