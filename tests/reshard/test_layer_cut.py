"""The first layers of a model alone: a whole smaller model, optimizer state included. Judges: the safetensors library, torch's DCP reader."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import ckpt, read_torch_dist
from conftest import ROOT
from safetensors import safe_open

pytestmark = pytest.mark.oracle


def test_an_hf_model_keeps_the_bytes_of_its_first_layers(tmp_path):
    source = ROOT / "fixtures" / "tiny-qwen3"
    done = ckpt("convert", source, tmp_path / "run", "--to", "torch_dist", "--max-layers", "2", "--verify")
    assert done.returncode == 0 and "of 1 of 3 layers were left out, as asked" in done.stderr, done.stderr
    done = ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == 2

    def raw(folder):
        found = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        return found

    whole, cut = raw(source), raw(tmp_path / "back")
    assert cut.keys() == {n for n in whole if "layers.2." not in n}
    assert all((whole[n] == cut[n]).all() and whole[n].dtype == cut[n].dtype for n in cut)


def test_a_run_keeps_the_optimizer_state_of_its_first_layers(shared, tmp_path):
    run = shared / "real" / "llama_tp2_trained_bf16" / "mcore"
    done = ckpt("convert", run, tmp_path / "cut", "--to", "torch_dist", "--max-layers", "1", "--verify")
    assert done.returncode == 0, done.stderr
    whole, cut = (read_torch_dist(next(p for p in folder.iterdir() if p.is_dir())) for folder in (run, tmp_path / "cut"))
    assert whole.keys() == cut.keys() and any(n.startswith("optimizer.state.exp_avg.") for n in cut)
    for name, tensor in cut.items():
        expected = whole[name][:1] if ".layers." in name else whole[name][:509]
        assert np.array_equal(tensor[: len(expected)].view(np.uint8), expected.view(np.uint8)), name


@pytest.mark.parametrize("arguments", [("--to", "torch_dist", "--max-layers", "9"), ("--to", "hf", "--max-layers", "2")])
def test_what_cannot_be_cut_is_refused(tmp_path, arguments):
    done = ckpt("convert", ROOT / "fixtures" / "tiny-llama", tmp_path / "out", *arguments)
    assert done.returncode == 2 and "E410" in done.stderr and not (tmp_path / "out").exists()
