"""Multi-token-prediction layers, in and out: transformers drops them, so the files are made as the hub has them (cases F7, F8)."""

from __future__ import annotations

import json
import os

import pytest
from builders import ckpt, read_hf, same, write_index
from families import tiny
from oracle import launch
from safetensors.torch import load_file, save_file

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle
LAYERS = 3
NAMES = ["deepseek_v3", "deepseek_v3_yarn_no_q_lora", "glm4_moe", "glm4_moe_lite"]


def write(variant, folder, count=1, copies=True):
    """A model with `count` prediction layers as the hub stores it: each with the last layer's tensors and its own four."""
    tiny.write(variant, folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = tensors["model.norm.weight"].numel()
    torch.manual_seed(5)
    for m in range(count):
        new = f"model.layers.{LAYERS + m}."
        for name in [n for n in tensors if n.startswith(f"model.layers.{LAYERS - 1}.")]:
            tensors[new + name.split(".", 3)[3]] = torch.randn_like(tensors[name])
        for name, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("eh_proj", (hidden, 2 * hidden)), ("shared_head.norm", (hidden,))):
            tensors[f"{new}{name}.weight"] = torch.randn(shape)
        if copies:
            tensors[new + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[new + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if not copies:  # then the index must say so: without one, ckpt writes them, as the hub has them
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        write_index(folder, dict.fromkeys(sorted(tensors), "model-00001-of-00001.safetensors"), total)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return tensors


def convert(*arguments):
    done = ckpt("convert", *arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.case("F7")
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("variant", NAMES)
def test_they_come_back_whole_from_every_format_and_layout(tmp_path, variant, copies):
    write(variant, tmp_path / "hf", count=2, copies=copies)
    source = read_hf(tmp_path / "hf")
    for number, options in enumerate(
        (("--to", "torch_dist"), ("--to", "torch", "--tp", "2", "--ep", "2", "--etp", "1"), ("--to", "torch", "--pp", "3"))
    ):
        run, back = tmp_path / f"run{number}", tmp_path / f"back{number}"
        convert(tmp_path / "hf", run, "--verify", *options)
        convert(run, back, "--to", "hf", "--verify")
        assert same(read_hf(back), source)
        assert json.loads((back / "config.json").read_text()) == json.loads((tmp_path / "hf" / "config.json").read_text())


@pytest.mark.case("F7")
def test_they_are_on_the_last_stage_and_named_as_megatron_names_them(tmp_path):
    source = write("deepseek_v3", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", "--pp", "3")
    held = [torch.load(tmp_path / f"run/release/mp_rank_00_{s:03d}/model_optim_rng.pt", weights_only=False)["model"] for s in range(3)]
    assert not any(name.startswith("mtp.") for model in held[:2] for name in held[0])
    assert torch.equal(held[2]["mtp.layers.0.eh_proj.weight"], source["model.layers.3.eh_proj.weight"])
    key = "mtp.layers.0.transformer_layer.self_attention.linear_q_up_proj.layer_norm_weight"
    assert torch.equal(held[2][key], source["model.layers.3.self_attn.q_a_layernorm.weight"])
    assert torch.equal(held[2]["embedding.word_embeddings.weight"][:509], source["model.embed_tokens.weight"])  # Megatron needs it there


@pytest.mark.case("F8")
@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_is_none_is_refused_with_both_names(tmp_path, name):
    tensors = write("deepseek_v3", tmp_path / "hf")
    tensors[f"model.layers.3.{name}.weight"][7, 3] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert done.returncode == 2 and "E225" in done.stderr and not (tmp_path / "run").exists()
    assert (
        f"model.layers.3.{name}.weight" in done.stderr
        and ("lm_head.weight" if "head" in name else "model.embed_tokens.weight") in done.stderr
    )


def test_a_config_that_counts_layers_that_no_file_holds_is_told(tmp_path):
    """As transformers 5 saves such a model: the count stays in config.json, the layers are dropped."""
    tiny.write("deepseek_v3_yarn_no_q_lora", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    done = convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert "no prediction layer is stored" in done.stderr
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(("version", "spec"), [("0.16.1", "te"), ("0.19.2", "te"), ("0.16.1", "local"), ("0.19.2", "local")])
def test_megatron_core_finds_them_all(tmp_path, version, spec):
    if not launch.available(version):
        pytest.skip(f"megatron-core {version} is not installed here")
    jobs = []
    for variant in ("deepseek_v3", "glm4_moe"):
        write(variant, tmp_path / variant)
        convert(tmp_path / variant, tmp_path / f"{variant}-run", "--to", "torch_dist", "--spec", spec)
        jobs.append({"checkpoint": str(tmp_path / f"{variant}-run" / "release"), "output": str(tmp_path / f"{variant}-out"), "ids": None})
    os.environ["CKPT_TEST_SPEC"] = spec
    try:
        assert launch.run("family_model", jobs, tmp_path, version) == [None, None]
    finally:
        del os.environ["CKPT_TEST_SPEC"]
    for variant in ("deepseek_v3", "glm4_moe"):
        report = json.loads((tmp_path / f"{variant}-out" / "report.json").read_text())
        assert report == {"missing": [], "unexpected": [], "error": None}, report["error"] or report


@pytest.mark.case("F8")
def test_validation_and_comparison_know_them_and_their_copies(tmp_path):
    from ckpt_tools.diff.compare import diff
    from ckpt_tools.validation.run import Options, validate

    tensors = write("deepseek_v3", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    for folder in (tmp_path / "hf", tmp_path / "run"):
        assert validate(folder, Options(deep=True, strict=True)).valid
    assert diff(tmp_path / "hf", tmp_path / "run").equal
    tensors["model.layers.3.shared_head.head.weight"][7, 3] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (finding,) = [f for f in validate(tmp_path / "hf", Options(deep=True)).findings if f.severity != "info"]
    assert (finding.code, finding.tensor) == ("V607", "model.layers.3.shared_head.head.weight")
    assert [m.name for m in diff(tmp_path / "hf", tmp_path / "run").only_a] == ["model.layers.3.shared_head.head.weight"]


def test_legacy_ranks_of_latent_attention_in_the_local_spec_are_refused(tmp_path):
    write("deepseek_v3", tmp_path / "hf")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch", "--spec", "local")
    assert done.returncode == 2 and "E410" in done.stderr and not (tmp_path / "run").exists()
