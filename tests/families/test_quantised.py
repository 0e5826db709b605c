"""Float8 sources with block scales are converted as what they stand for (cases J1, J3). Judges: torch's float8, transformers' own reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, read_hf, same
from families import tiny

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle
ROOT = Path(__file__).parents[2]
SMALL = {"hidden_size": 200, "head_dim": 50, "intermediate_size": 300, "vocab_size": 96, "num_hidden_layers": 2}
QUANTISED = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def meant(weight, scales, block=128):
    """float8 times scales, by torch, in float32."""
    rows, columns = weight.shape[-2:]
    wide = scales.float().repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)[..., :columns]
    return weight.float() * wide


def write(folder, **changes):
    """A llama whose linear layers are float8 with scales, as the hub's models are; returns what its tensors stand for, in bfloat16."""
    from safetensors.torch import save_file

    config = {**CONFIG, **SMALL, "torch_dtype": "bfloat16", "quantization_config": QUANTISED, **changes}
    generator = torch.Generator().manual_seed(3)
    tensors, values = {}, {}
    for name, shape in dense_shapes(config).items():
        value = torch.randn(shape, generator=generator)
        if "_proj." in name:
            scales = torch.rand([-(-n // 128) for n in shape], generator=generator) + 0.01
            tensors[name], tensors[name + "_scale_inv"] = (value * 40).to(torch.float8_e4m3fn), scales
            values[name] = meant(tensors[name], scales).bfloat16()
        else:
            tensors[name] = values[name] = value.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {name: value.view(torch.int16).numpy().view(np.uint16) for name, value in values.items()}


def convert(*arguments):
    done = ckpt("convert", *arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.case("J1")
@pytest.mark.parametrize(
    "options", [("--to", "torch_dist"), ("--to", "torch_dist", "--tp", "2"), ("--to", "torch", "--tp", "2", "--pp", "2")]
)
def test_every_element_is_its_float8_times_the_scale_of_its_block(tmp_path, options):
    """200 x 200, 300 x 200 and 100 x 200: blocks at the edges are partial, and ranks and query groups cut through blocks."""
    values = write(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "run", "--verify", *options)
    assert "14 tensors float8_e4m3fn -> bfloat16, each element times the scale of its block of 128 x 128" in done.stderr
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--verify")
    assert same(read_hf(tmp_path / "back"), values)


def test_the_numbers_of_the_public_report(tmp_path):
    """Ones of 200 x 130 with scales 1, 2, 3, 4: each quarter has its own value."""
    from safetensors.torch import load_file, save_file

    write(tmp_path / "hf", hidden_size=130, head_dim=50, num_attention_heads=4)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert tensors[name].shape == (200, 130)
    tensors[name] = torch.ones(200, 130).to(torch.float8_e4m3fn)
    tensors[name + "_scale_inv"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "out", "--to", "hf", "--dtype", "float32")
    found = read_hf(tmp_path / "out")[name]
    assert (
        (found[:128, :128] == 1).all()
        and (found[:128, 128:] == 2).all()
        and (found[128:, :128] == 3).all()
        and (found[128:, 128:] == 4).all()
    )


@pytest.mark.case("J3")
def test_the_config_says_what_the_result_is(tmp_path):
    values = write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain", "--to", "hf", "--dtype", "bfloat16", "--verify")
    assert same(read_hf(tmp_path / "plain"), values)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    convert(tmp_path / "hf", tmp_path / "kept", "--to", "hf")  # nothing asked for: float8 and scales stay as they are
    assert (tmp_path / "kept" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"] == QUANTISED


def test_float32_is_not_rounded_on_the_way(tmp_path):
    from safetensors.torch import load_file

    write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", "--to", "hf", "--dtype", "float32", "--verify")
    source, found = load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in (n for n in source if n + "_scale_inv" in source):
        assert torch.equal(found[name], meant(source[name], source[name + "_scale_inv"]))


def test_a_deepseek_of_float8_experts_comes_out_as_transformers_reads_it(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny.write("deepseek_v3", tmp_path / "plain", "bfloat16")
    tensors, values = load_file(tmp_path / "plain" / "model.safetensors"), {}
    (tmp_path / "hf").mkdir()
    made = {}
    for name, tensor in tensors.items():
        if "_proj" in name and tensor.ndim == 2:
            scales = torch.rand([-(-n // 16) for n in tensor.shape]) + 0.1
            made[name], made[name + "_scale_inv"] = (tensor.float() * 50).to(torch.float8_e4m3fn), scales
            values[name] = meant(made[name], scales, 16).bfloat16()
        else:
            made[name] = values[name] = tensor
    save_file(made, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**QUANTISED, "weight_block_size": [16, 16]}})
    )
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--tp", "2", "--ep", "2", "--etp", "1", "--verify")
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == values.keys() and all(torch.equal(found[n], values[n]) for n in values)


def test_fused_experts_of_float8_have_each_their_own_scales(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny.write("qwen3_moe", tmp_path / "plain", "bfloat16", save_original_format=False)
    made, values = {}, {}
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        made[name] = values[name] = tensor
        if tensor.ndim == 3:
            scales = torch.rand([tensor.shape[0], *(-(-n // 16) for n in tensor.shape[1:])]) + 0.1
            made[name], made[name + "_scale_inv"] = (tensor.float() * 50).to(torch.float8_e4m3fn), scales
            values[name] = meant(made[name], scales, 16).bfloat16()
    (tmp_path / "hf").mkdir()
    save_file(made, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**QUANTISED, "weight_block_size": [16, 16]}})
    )
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--tp", "2", "--ep", "2", "--etp", "1", "--verify")
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--moe-layout", "fused")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == values.keys() and all(torch.equal(found[n], values[n]) for n in values)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "mxfp8"},
        {"quant_method": "fp8"},
    ],
    ids=lambda m: m["quant_method"],
)
@pytest.mark.parametrize("options", [("--to", "torch_dist"), ("--to", "hf", "--dtype", "bfloat16")], ids=["megatron", "hf"])
def test_other_methods_are_named_and_refused(tmp_path, method, options):
    write(tmp_path / "hf", quantization_config=method)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", *options)
    assert done.returncode == 2 and "E312" in done.stderr and method["quant_method"] in done.stderr and not (tmp_path / "out").exists()


def test_scales_that_do_not_fit_are_refused_with_both_shapes(tmp_path):
    from safetensors.torch import load_file, save_file

    write(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist")
    assert done.returncode == 2 and "E307" in done.stderr and "[3, 2]" in done.stderr and "[2, 2]" in done.stderr


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    """Matrices of 128 MB of float8 in a process of its own: buffers and one tile per thread, no whole tensor in float32 (512 MB)."""
    write(tmp_path / "hf", intermediate_size=640_000, num_hidden_layers=1)
    code = (
        "import sys\nfrom ckpt_tools.commands.main import main\n"
        f"code = main(['convert', {str(tmp_path / 'hf')!r}, {str(tmp_path / 'out')!r}, '--to', 'hf', '--dtype', 'bfloat16'])\n"
        "print('peak', next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split("peak ")[1]) < 300 * 1024
