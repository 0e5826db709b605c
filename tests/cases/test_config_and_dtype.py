"""Public bug reports about configs, dtypes and side files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, fill, megatron_args, megatron_tensors, read_hf, same, stack, write_hf, write_torch_dist

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def stored_args(run):
    import torch

    return torch.load(next(run.glob("*/common.pt")), weights_only=False)["args"]


@pytest.mark.case("K1")
@pytest.mark.parametrize("form", ["old", "v5"])
def test_rope_theta_is_found_in_both_spellings(tmp_path, form):
    if form == "old":
        write_hf(tmp_path / "hf", rope_scaling=LLAMA3)
    else:
        write_hf(tmp_path / "hf", rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist").returncode == 0
    args = stored_args(tmp_path / "run")
    assert args.rotary_base == 500000 and args.use_rope_scaling and args.rope_scaling_factor == 8.0
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").returncode == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


@pytest.mark.case("K1")
def test_no_rope_base_at_all_is_said(tmp_path):
    write_hf(tmp_path / "hf", rope_theta=None)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert done.returncode == 2 or "rope_theta" in done.stderr


@pytest.mark.case("K3")
@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "bfloat16"},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"torch_dtype": "float32", "dtype": "bfloat16"},
        {"torch_dtype": None},
    ],
)
def test_the_tensors_decide_the_dtype_and_the_config_is_only_checked(tmp_path, changes):
    import ml_dtypes

    tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in fill(dense_shapes(CONFIG)).items()}
    write_hf(tmp_path / "hf", tensors=tensors, **changes)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert done.returncode == 0 and stored_args(tmp_path / "run").bf16
    done = ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert done.returncode == 0 and all(t.dtype == np.uint16 for t in read_hf(tmp_path / "back").values())
    assert ("warning" in done.stderr and "float32" in done.stderr) == (changes.get("torch_dtype") == "float32")


@pytest.mark.case("J4")
def test_all_bfloat16_patterns_survive_float32_and_back(tmp_path):
    import ml_dtypes

    tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in fill(dense_shapes({**CONFIG, "vocab_size": 8192})).items()}
    tensors["model.embed_tokens.weight"] = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(8192, 8)
    write_hf(tmp_path / "hf", tensors=tensors, vocab_size=8192, torch_dtype="bfloat16")
    steps = [("plain", None), ("wide", "float32"), ("back", "bfloat16")]
    source = tmp_path / "hf"
    for name, dtype in steps:
        options = ["--dtype", dtype] if dtype else []
        done = ckpt("convert", source, tmp_path / name, "--to", "hf", *options)
        assert done.returncode == 0 and (dtype is None or f"-> {dtype}" in done.stderr), done.stderr
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == (dtype or "bfloat16")
        source = tmp_path / name
    plain, back = (read_hf(tmp_path / n)["model.embed_tokens.weight"].view(np.uint16).ravel() for n in ("plain", "back"))
    assert np.array_equal(plain, np.arange(65536, dtype=np.uint16))
    nan = ((plain & 0x7F80) == 0x7F80) & ((plain & 0x7F) != 0)
    assert np.array_equal(back[~nan], plain[~nan]) and np.array_equal(back[nan], plain[nan] | 0x40)
    assert read_hf(tmp_path / "wide")["model.embed_tokens.weight"].dtype == np.float32


@pytest.mark.case("J4")
def test_overflow_of_a_cast_is_counted_and_ties_go_to_even(tmp_path):
    tensors = fill(dense_shapes(CONFIG))
    tensors = {n: np.zeros_like(t) for n, t in tensors.items()}
    tensors["model.norm.weight"] = np.float32([70000, 1e-40, 1.00390625, np.nan, 1, 2, 3, 4])
    write_hf(tmp_path / "hf", tensors=tensors)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "half", "--to", "hf", "--dtype", "fp16", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["overflow"] == 1 and "became infinite" in done.stderr
    assert ckpt("convert", tmp_path / "hf", tmp_path / "bf16", "--to", "hf", "--dtype", "bf16").returncode == 0
    norm = read_hf(tmp_path / "bf16")["model.norm.weight"]
    assert norm[2] == 0x3F80 and (norm[3] & 0x7FC0) == 0x7FC0


def with_side_files(folder):
    files = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "x",
        "generation_config.json": "{}",
        "vocab.txt": "a",
        "README.md": "# x",
        "preprocessor_config.json": "{}",
        "sub/extra.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return files


@pytest.mark.case("K4")
def test_an_export_can_be_used_on_its_own(tmp_path):
    hf = write_hf(tmp_path / "template")
    files = with_side_files(tmp_path / "template")
    write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    assert ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--hf-config", tmp_path / "template").returncode == 0
    found = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert found == sorted([*files, "config.json", "model.safetensors"]) and same(read_hf(tmp_path / "out"), hf)
    assert all((tmp_path / "out" / n).read_text() == text for n, text in files.items())
    done = ckpt("convert", tmp_path / "run", tmp_path / "bare", "--to", "hf")
    assert done.returncode == 0 and "tokenizer" in done.stderr and "generation_config.json" in done.stderr


@pytest.mark.case("K5")
def test_remote_code_is_carried_never_run_and_can_be_stripped(tmp_path):
    hf = write_hf(tmp_path / "template", auto_map={"AutoModelForCausalLM": "modeling_x.MyModel", "AutoConfig": "configuration_x.MyConfig"})
    (tmp_path / "template" / "modeling_x.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\nfrom .util_x import y\n")
    (tmp_path / "template" / "util_x.py").write_text("y = 1\n")
    (tmp_path / "template" / ".cache").mkdir()
    write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--hf-config", tmp_path / "template")
    assert done.returncode == 0 and "configuration_x.py" in done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors", "modeling_x.py", "util_x.py"]
    assert (
        ckpt(
            "convert", tmp_path / "run", tmp_path / "bare", "--to", "hf", "--hf-config", tmp_path / "template", "--strip-remote-code"
        ).returncode
        == 0
    )
    assert sorted(p.name for p in (tmp_path / "bare").iterdir()) == ["config.json", "model.safetensors"]
    assert "auto_map" not in json.loads((tmp_path / "bare" / "config.json").read_text()) and not (tmp_path / "PWNED").exists()


@pytest.mark.case("D3")
def test_a_template_of_another_size_is_refused_with_both_numbers(tmp_path):
    hf = write_hf(tmp_path / "hf")
    write_hf(tmp_path / "other", tensors=fill(dense_shapes({**CONFIG, "intermediate_size": 24})), intermediate_size=24)
    write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--hf-config", tmp_path / "other")
    assert (
        done.returncode == 2
        and "[48, 8]" in done.stderr
        and "[32, 8]" in done.stderr
        and "ffn 24" in done.stderr
        and not (tmp_path / "out").exists()
    )
