"""Models that see: the language part is converted, the vision tower comes along byte for byte under its own names.

Judges: transformers makes the models and says which names, bytes and logits are right; megatron-core's GPT model finds every tensor of the
language part and computes the logits of text, with the vision tensors lying beside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ckpt, read_torch_dist
from conftest import ROOT
from oracle import launch

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("vision")]
CONFIGS = {path.stem: path for path in sorted((ROOT / "fixtures" / "vision").glob("*.json"))}
IDS = [[3, 17, 101, 250, 499, 1, 42, 77, 300, 12], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
TOWER = {"qwen2_5_vl": "visual.", "qwen3_vl": "model.visual."}


def done(*arguments: Any) -> Any:
    finished = ckpt(*arguments)
    assert finished.returncode == 0, finished.stderr
    return finished


def model_of(name: str, dtype: str = "float32") -> Any:
    import torch
    import transformers

    torch.manual_seed(len(name))
    config = transformers.AutoConfig.for_model(**json.loads(CONFIGS[name].read_text()))
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif key.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.to(getattr(torch, dtype)).eval()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """made(name) -> (HF folder, run folder, logits of text)."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    kept: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in kept:
            base = tmp_path_factory.mktemp("vision") / name
            model = model_of(name)
            model.save_pretrained(base / "hf")
            with torch.no_grad():
                logits = model(torch.tensor(IDS)).logits
            done("convert", base / "hf", base / "run", "--to", "torch_dist", "--tp", "2", "--spec", "local", "--verify")
            kept[name] = (base / "hf", base / "run", logits)
        return kept[name]

    return get


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_byte_comes_back_and_the_tower_is_listed(name, made, tmp_path):
    hf, run, _ = made(name)
    told = done("convert", hf, tmp_path / "again", "--to", "torch_dist", "--dry-run", "--json")
    notes = [n for n in json.loads(told.stdout)["notes"] if n["kind"] == "carried" and "does not have" in n["text"]]
    seen = {n: t for n, t in tensors(hf).items() if n.startswith(TOWER[name])}
    assert len(notes) == 1 and notes[0]["text"].startswith(f"{len(seen)} tensors ({sum(t.nbytes for t in seen.values())} bytes)") and len(seen) > 20
    done("convert", run, tmp_path / "back", "--to", "hf", "--verify")
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()} == {p.name: p.read_bytes() for p in hf.iterdir()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tower_keeps_names_and_bytes_when_it_is_resharded_and_cast(name, made, tmp_path):
    hf, run, _ = made(name)
    done("reshard", run, tmp_path / "other", "--tp", "4", "--pp", "3", "--verify")
    done("convert", hf, tmp_path / "cast", "--to", "torch_dist", "--dtype", "bfloat16", "--verify")
    expected = {n: t.numpy() for n, t in tensors(hf).items() if n.startswith(TOWER[name])}
    for folder in (run, tmp_path / "other", tmp_path / "cast"):
        stored = read_torch_dist(folder / "release")
        assert all(np.array_equal(stored[n], t) and stored[n].dtype == t.dtype for n, t in expected.items()), folder
    assert {n for n in stored if not n.startswith(("decoder.", "embedding.", "output_layer."))} == expected.keys()
    done("convert", tmp_path / "other", tmp_path / "back", "--to", "hf")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_core_computes_the_logits_of_text_with_the_tower_beside(name, version, made, tmp_path):
    import torch
    from safetensors.torch import load_file

    if not launch.available(version):
        pytest.skip(f"no megatron-core {version} here")
    _, run, logits = made(name)
    job = {"checkpoint": str(run / "release"), "output": str(tmp_path / "out"), "ids": IDS}
    assert launch.run("family_model", [job], tmp_path, version) == [None]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["error"] is None and report["missing"] == []
    assert report["unexpected"] and all(n.startswith(TOWER[name]) for n in report["unexpected"])  # Megatron leaves them alone
    found = load_file(tmp_path / "out" / "logits.safetensors")["logits"][..., : logits.shape[-1]]
    assert torch.allclose(found, logits, atol=1e-4, rtol=0), (found - logits).abs().max()  # as in test_contract.py


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sizes_of_the_shared_rope_are_stored_and_told(name, made):
    hf, run, _ = made(name)
    told = done("convert", hf, run.parent / "never", "--to", "torch_dist", "--dry-run", "--json").stdout
    flags = next(n for n in json.loads(told)["notes"] if n["kind"] == "flags")
    assert "--mrope-section 2 3 3" in flags["subject"]
    import torch

    args = torch.load(run / "release" / "common.pt", weights_only=False)["args"]
    assert (args.position_embedding_type, args.mrope_section) == ("mrope", [2, 3, 3])


@pytest.mark.parametrize("name", CONFIGS)
def test_validate_and_diff_know_the_tower(name, made, tmp_path):
    hf, run, _ = made(name)
    for folder in (hf, run):
        found = json.loads(done("validate", folder, "--deep", "--json").stdout)
        assert found["valid"] and not {"V302", "V304"} & {f["code"] for f in found["findings"]}
    assert json.loads(done("diff", hf, run, "--json").stdout)["equal"]
    from safetensors.torch import save_file

    changed = tensors(hf)
    victim = next(n for n in changed if n.startswith(TOWER[name]))
    changed[victim] = changed[victim] + 1
    (tmp_path / "changed").mkdir()
    save_file(changed, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    (tmp_path / "changed" / "config.json").write_text((hf / "config.json").read_text())
    finished = ckpt("diff", tmp_path / "changed", run, "--json")
    assert finished.returncode == 1 and [v["name"] for v in json.loads(finished.stdout)["values"]] == [victim]


def test_what_is_neither_language_nor_tower_is_refused_as_ever(made, tmp_path):
    from safetensors.torch import save_file

    hf, _, _ = made("qwen2_5_vl")
    (tmp_path / "odd").mkdir()
    held = tensors(hf)
    save_file({**held, "audio.proj.weight": held["lm_head.weight"].clone()}, tmp_path / "odd" / "model.safetensors", {"format": "pt"})
    (tmp_path / "odd" / "config.json").write_text((hf / "config.json").read_text())
    finished = ckpt("convert", tmp_path / "odd", tmp_path / "out", "--to", "torch_dist")
    assert finished.returncode == 2 and "E304" in finished.stderr and "audio.proj.weight" in finished.stderr


def test_the_legacy_format_has_no_place_for_a_tower(made, tmp_path):
    finished = ckpt("convert", made("qwen3_vl")[0], tmp_path / "out", "--to", "torch")
    assert finished.returncode == 2 and "E410" in finished.stderr and "torch_dist" in finished.stderr and not (tmp_path / "out").exists()


def test_old_files_with_the_language_settings_at_the_top_mean_the_same(made, tmp_path):
    import shutil

    hf, run, _ = made("qwen2_5_vl")
    config = json.loads((hf / "config.json").read_text())
    text = config.pop("text_config")
    old = {**text, **config, "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    del old["rope_parameters"]
    shutil.copytree(hf, tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text(json.dumps(old, indent=2))
    done("convert", tmp_path / "old", tmp_path / "run", "--to", "torch_dist", "--tp", "2", "--verify")
    import torch

    new, before = (torch.load(r / "release" / "common.pt", weights_only=False)["args"] for r in (run, tmp_path / "run"))
    names = ("num_layers", "hidden_size", "rotary_base", "mrope_section", "position_embedding_type", "untie_embeddings_and_output_weights")
    assert [getattr(new, n) for n in names] == [getattr(before, n) for n in names]
    done("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--verify")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == old


def test_ranks_share_out_the_language_part_alone_and_that_is_said(made):
    shown = done("inspect", made("qwen2_5_vl")[1], "--by", "rank", "--tp", "2", "--pp", "3", "--json")
    assert "belong to no rank" in shown.stdout + shown.stderr
    finished = ckpt("convert", made("qwen2_5_vl")[0], "never", "--to", "torch_dist", "--family", "qwen2")
    assert finished.returncode == 2 and "text_config" in finished.stderr
