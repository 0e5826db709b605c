"""--quantize fp8-block: linear layers as float8 with one scale per block of 128 x 128. Judges: torch's float8 by DeepSeek's formula, and
transformers, which says what is a linear layer, reads the files and dequantises them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import ckpt
from families import tiny

from ckpt_tools import open_checkpoint, plan
from ckpt_tools.conversion import verify_conversion
from ckpt_tools.errors import CkptError
from ckpt_tools.families import FAMILIES
from ckpt_tools.options import ConvertOptions
from ckpt_tools.planning import from_json, to_json

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle
ROOT = Path(__file__).parents[2]
FP8 = ("--quantize", "fp8-block")
# one variant of each family that says float8; sizes that leave partial blocks at every edge
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 200, "intermediate_size": 300, "head_dim": 24},
    "qwen3_moe": {"hidden_size": 200, "moe_intermediate_size": 150, "head_dim": 24},
    "deepseek_v3": {"hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 150},
    "glm4_moe": {"hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 150},
    "glm4_moe_lite": {"hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 150},
    "minimax_m2": {"hidden_size": 200, "intermediate_size": 150},
}
# the same with whole blocks, or one block, along each axis: transformers 5.24 reads no other
WHOLE: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 32},
    "deepseek_v3": {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128},
    "glm4_moe": {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128},
}


def convert(*arguments: Any) -> Any:
    done = ckpt("convert", *arguments)
    assert done.returncode == 0, done.stderr
    return done


def write(variant: str, folder: Path, **changes: Any) -> Any:
    """A model of a variant in bfloat16, saved by transformers."""
    model = tiny.build(variant, "bfloat16", **changes)
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def spread(scales: Any, shape: Any) -> Any:
    """Each scale over the elements of its block."""
    return scales.repeat_interleave(128, -2)[: shape[0]].repeat_interleave(128, -1)[:, : shape[1]]


def quantised(weight: Any) -> tuple[Any, Any]:
    """DeepSeek's formula: a scale is the largest magnitude of its block / 448, an element float8(value / scale)."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    largest = padded.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / 448, 1.0)
    return (weight.float() / spread(scales, weight.shape)).to(torch.float8_e4m3fn), scales


def check(found: dict[str, Any], source: dict[str, Any]) -> list[str]:
    """Every tensor is the source's, or its float8 and scales by the formula; the names of those."""
    done = [n for n in source if n + "_scale_inv" in found]
    assert found.keys() == source.keys() | {n + "_scale_inv" for n in done}
    for name, tensor in source.items():
        if name not in done:
            assert torch.equal(found[name], tensor), name
            continue
        elements, scales = quantised(tensor)
        assert torch.equal(found[name].view(torch.uint8), elements.view(torch.uint8)), name
        assert found[name + "_scale_inv"].dtype == torch.float32 and torch.equal(found[name + "_scale_inv"], scales), name
    return done


@pytest.mark.parametrize("variant", SIZES)
def test_every_linear_layer_follows_the_formula_whatever_the_source(variant, tmp_path):
    """From HF, and from ranks whose cuts go through blocks."""
    write(variant, tmp_path / "hf", **SIZES[variant])
    allow = ("--allow-unrepresentable",) if variant == "minimax_m2" else ()
    split = ("--tp", "2", "--ep", "2", "--etp", "1") if "num_experts_per_tok" in tiny.config_of(variant) else ("--tp", "2")
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch", *split, *allow)
    done = {}
    for source in ("hf", "run"):
        told = convert(tmp_path / source, tmp_path / f"{source}-out", "--to", "hf", *FP8, "--verify")
        done[source] = check(load(tmp_path / f"{source}-out"), load(tmp_path / "hf"))
        assert f"cast: {len(done[source])} tensors bfloat16 -> float8_e4m3fn, each element divided by the float32 scale" in told.stderr
        config = json.loads((tmp_path / f"{source}-out" / "config.json").read_text())
        said = config.pop("quantization_config")
        assert config == json.loads((tmp_path / "hf" / "config.json").read_text())
        assert (said["quant_method"], said["fmt"], said["weight_block_size"], said["activation_scheme"]) == ("fp8", "e4m3", [128, 128], "dynamic")
        assert "lm_head" in said["modules_to_not_convert"]
    assert done["hf"] and sorted(done["hf"]) == sorted(done["run"])


@pytest.mark.parametrize("variant", SIZES)
def test_what_is_quantised_is_what_transformers_takes_for_linear_layers(variant, tmp_path):
    """With our modules_to_not_convert, replace_with_fp8_linear replaces exactly the modules whose weights became float8."""
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations import finegrained_fp8

    write(variant, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", "--to", "hf", *FP8)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    said = FineGrainedFP8Config(**config.quantization_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = finegrained_fp8.replace_with_fp8_linear(model, said.modules_to_not_convert, said)
    replaced = {n for n, m in model.named_modules() if isinstance(m, finegrained_fp8.FP8Linear | finegrained_fp8.FP8Experts)}
    held = [n.removesuffix(".weight_scale_inv") for n in load(tmp_path / "out") if n.endswith("_scale_inv")]
    held = {n.replace("block_sparse_moe", "mlp").partition(".experts.")[0] + ".experts" if ".experts." in n else n for n in held}
    assert held == replaced


@pytest.mark.parametrize("variant", WHOLE)
def test_transformers_loads_it_and_computes_with_the_dequantised_weights(variant, tmp_path):
    """On a CPU from_pretrained dequantises; ours, in bfloat16, must be the same model."""
    from transformers import AutoModelForCausalLM

    write(variant, tmp_path / "hf", **WHOLE[variant])
    convert(tmp_path / "hf", tmp_path / "fp8", "--to", "hf", *FP8, "--verify")
    convert(tmp_path / "fp8", tmp_path / "plain", "--to", "hf", "--dtype", "bfloat16", "--verify")
    states, ids, logits = [], torch.tensor([[3, 17, 101, 250, 508, 1]]), []
    for folder in ("fp8", "plain"):
        model, told = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, attn_implementation="eager", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
        states.append(model.state_dict())
        with torch.no_grad():
            logits.append(model.eval()(ids).logits)
    assert states[0].keys() == states[1].keys()
    assert [n for n, t in states[0].items() if t.dtype != states[1][n].dtype or not torch.equal(t, states[1][n])] == []
    assert torch.equal(*logits)


def test_the_reader_gives_back_float8_times_scale(tmp_path):
    write("qwen3_moe", tmp_path / "hf", **SIZES["qwen3_moe"])
    convert(tmp_path / "hf", tmp_path / "fp8", "--to", "hf", *FP8)
    convert(tmp_path / "fp8", tmp_path / "run", "--to", "torch_dist", "--tp", "2", "--ep", "2", "--etp", "1", "--verify")
    convert(tmp_path / "run", tmp_path / "back", "--to", "hf", "--verify")
    stored, source, found = load(tmp_path / "fp8"), load(tmp_path / "hf"), load(tmp_path / "back")
    assert found.keys() == source.keys()
    for name, tensor in found.items():
        if name + "_scale_inv" not in stored:
            assert torch.equal(tensor, source[name])
            continue
        meant = stored[name].float() * spread(stored[name + "_scale_inv"], tensor.shape)
        assert torch.equal(tensor, meant.bfloat16())
        # an element is off by half a step of float8 (3 bits of mantissa), and once more by half a step of bfloat16
        step = source[name].float().abs() * 2**-4 + spread(stored[name + "_scale_inv"], tensor.shape) * 2**-10
        assert ((tensor.float() - source[name].float()).abs() <= step * 1.07).all()


def test_quantised_again_it_is_the_same(tmp_path):
    """Its own dequantised values have the same largest magnitudes, up to the rounding of amax / 448 * 448."""
    write("qwen3", tmp_path / "hf", **SIZES["qwen3"])
    convert(tmp_path / "hf", tmp_path / "one", "--to", "hf", *FP8)
    done = convert(tmp_path / "one", tmp_path / "two", "--to", "hf", *FP8, "--verify")
    assert "float8_e4m3fn -> bfloat16, each element times the scale" in done.stderr
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.endswith("_scale_inv"):
            assert torch.allclose(tensor, two[name], rtol=2**-22, atol=0)
        else:
            assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), name
    said = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in ("one", "two")]
    assert said[0] == said[1]


def test_prediction_layers_are_quantised_but_for_what_deepseek_leaves_out(tmp_path):
    """The hub's layer 61: attention and experts are float8; eh_proj, the copies of embedding and head, norms are not."""
    from safetensors.torch import save_file

    write("deepseek_v3", tmp_path / "hf", num_nextn_predict_layers=1)
    tensors, last = load(tmp_path / "hf"), tiny.config_of("deepseek_v3")["num_hidden_layers"]
    prefix = f"model.layers.{last}."
    more = {n.replace(f"model.layers.{last - 1}.", prefix): t.clone() for n, t in tensors.items() if n.startswith(f"model.layers.{last - 1}.")}
    width = tensors["model.norm.weight"].shape[0]
    more[prefix + "eh_proj.weight"] = torch.randn(width, 2 * width).bfloat16()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{prefix}{name}.weight"] = torch.ones(width).bfloat16()
    more[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | more, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    convert(tmp_path / "run", tmp_path / "out", "--to", "hf", *FP8, "--verify")
    done = {n.removeprefix(prefix) for n in check(load(tmp_path / "out"), load(tmp_path / "hf")) if n.startswith(prefix)}
    assert "mlp.experts.3.up_proj.weight" in done and "self_attn.kv_b_proj.weight" in done and "mlp.shared_experts.down_proj.weight" in done
    assert not [n for n in done if n.startswith(("eh_proj", "embed_tokens", "shared_head", "mlp.gate."))]
    left = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {prefix + n for n in ("eh_proj", "shared_head.head", "mlp.gate")} <= set(left)


def test_a_dtype_is_that_of_what_is_not_quantised_and_values_are_rounded_once(tmp_path):
    tiny.build("qwen3", "float32", **SIZES["qwen3"]).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", "--to", "hf", *FP8, "--dtype", "bfloat16", "--verify")
    source, found = load(tmp_path / "hf"), load(tmp_path / "out")
    done = check(found | {n: source[n] for n in source if n + "_scale_inv" not in found}, source)
    assert all(torch.equal(found[n], source[n].bfloat16()) for n in source if n not in done)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("which", ["weight", "weight_scale_inv"])
def test_verify_finds_one_wrong_byte_in_elements_and_in_scales(tmp_path, which):
    from safetensors import safe_open
    from safetensors.torch import save_file

    write("qwen3", tmp_path / "hf", **SIZES["qwen3"])
    convert(tmp_path / "hf", tmp_path / "out", "--to", "hf", *FP8)
    options = ConvertOptions(to="hf", quantize="fp8-block")
    source = open_checkpoint(tmp_path / "hf")
    assert verify_conversion(source, str(tmp_path / "out"), options, buffer=65536, threads=2) > 0
    path = tmp_path / "out" / "model.safetensors"
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load(tmp_path / "out")
    tensors[f"model.layers.1.mlp.down_proj.{which}"].view(torch.uint8)[-1, -1] ^= 1
    save_file(tensors, path, metadata)
    with pytest.raises(CkptError, match="E411"):
        verify_conversion(source, str(tmp_path / "out"), options, buffer=65536, threads=2)


def test_the_plan_comes_back_from_json_and_lists_every_weight(tmp_path):
    write("qwen3_moe", tmp_path / "hf")
    made = plan(tmp_path / "hf", "hf", quantize="fp8-block")
    assert from_json(to_json(made)) == made
    assert len(made.encodings) == 3 * (4 + 4 * 3)
    assert sum(n.subject.count("proj.weight") for n in made.notes if n.kind == "cast") == len(made.encodings)
    shown = convert(tmp_path / "hf", tmp_path / "out", "--to", "hf", *FP8, "--dry-run", "--json")
    assert json.loads(shown.stdout)["target"]["quantised"] == "fp8-block" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variant", "options", "said"),
    [
        ("llama", ("--to", "hf", *FP8), "family llama"),
        ("gpt_oss", ("--to", "hf", *FP8), "family gpt_oss"),
        ("qwen3", ("--to", "torch_dist", *FP8), "only an HF folder"),
        ("qwen3", ("--to", "hf", "--quantize", "int4"), "fp8-block"),
        ("qwen3", ("--to", "hf", *FP8, "--dtype", "float8_e4m3fn"), "--dtype"),
        ("qwen3_moe", ("--to", "hf", *FP8, "--moe-layout", "fused"), "one tensor per expert"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, variant, options, said):
    write(variant, tmp_path / "hf")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", *options)
    assert done.returncode == 2 and "E410" in done.stderr and said in done.stderr and not (tmp_path / "out").exists()


def test_each_family_that_says_float8_is_judged_here():
    assert {tiny.config_of(v)["model_type"] for v in SIZES} == {m for f in FAMILIES.values() if f.float8 for m in f.model_types[:1]}


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    """Matrices of 256 MB of bfloat16 in a process of its own: 512 MB as float32."""
    write("qwen3", tmp_path / "hf", hidden_size=200, intermediate_size=640_000, num_hidden_layers=1, layer_types=None, head_dim=24)
    code = (
        "import sys\nfrom ckpt_tools.commands.main import main\n"
        f"code = main(['convert', {str(tmp_path / 'hf')!r}, {str(tmp_path / 'out')!r}, '--to', 'hf', '--quantize', 'fp8-block', '--no-fsync'])\n"
        "print('peak', next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split("peak ")[1]) < 300 * 1024
