"""What ckpt writes loads in real GPTModels of megatron-core 0.16.1 and 0.19.2, at TP1, TP2 and PP2: every weight exactly, logits within 1e-4.

1e-4 in float32: the two libraries add in different orders; measured differences are below 1e-5 on logits of size 5.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judges.shared_cases import IDS, Case, converted, iteration_folder
from oracle import hf_weights, launch

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
MODELS = ("llama", "llama_tied_scaled_rope", "mistral", "qwen2", "qwen2_5", "qwen3")
ONE_RANK = [Case(m) for m in MODELS] + [Case(m, ("--layer-keys", "per-layer")) for m in ("llama", "qwen3")]
ONE_RANK += [Case(m, ("--tp", "4", "--pp", "2", "--as-iteration", "7")) for m in ("llama", "qwen2_5")]
TP2 = [Case(m, tp=2) for m in ("llama", "qwen2", "qwen3")]
PP2 = [Case(m, pp=2) for m in ("llama", "qwen2")] + [Case("llama", ("--layer-keys", "per-layer"), pp=2)]
RUNS = [("0.16.1", 1, ONE_RANK), ("0.16.1", 2, TP2), ("0.16.1", 2, PP2), ("0.19.2", 1, ONE_RANK), ("0.19.2", 2, TP2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(("version", "ranks", "cases"), RUNS, ids=[f"{v}-{c[0].tp}x{c[0].pp}" for v, _, c in RUNS])
def test_megatron_core_loads_every_weight_and_gives_the_same_logits(models, runs, tmp_path, version, ranks, cases):
    import torch
    from safetensors import safe_open

    if not launch.available(version):
        pytest.skip(f"megatron-core {version} is not installed here")
    jobs = []
    for number, case in enumerate(cases):
        folder = iteration_folder(converted(models, case, runs))
        jobs.append({"checkpoint": str(folder), "output": str(tmp_path / str(number)), "ids": IDS, "tp": case.tp, "pp": case.pp})
    outcomes = launch.run("load_in_mcore", jobs, tmp_path, version, ranks)
    assert outcomes == [None] * len(cases)
    for number, case in enumerate(cases):
        output = tmp_path / str(number)
        folder, expected = models[case.model]
        hf = hf_weights.read(folder)
        report = json.loads((output / "report.json").read_text())
        assert report["megatron_core"].startswith(version) and report["checkpoint_version"] == 3.0
        assert all("_extra_state" in name for name in report["unexpected"]), report["unexpected"]
        logits = None
        for file in sorted(output.glob("rank*.safetensors")):
            with safe_open(file, "pt") as held:
                tp_rank = int(held.metadata()["tp_rank"])
                for name in held.keys():  # noqa: SIM118
                    found = held.get_tensor(name)
                    if name == "logits":
                        logits = found
                        continue
                    value = hf_weights.parameter(name, hf, tp_rank, case.tp, report["padded_vocab_size"])
                    assert torch.equal(found[: len(value)], value), (case, name)
                    assert not found[len(value) :].any(), (case, name)
        assert logits is not None
        difference = (logits[..., : expected.shape[-1]] - expected).abs().max().item()
        assert difference < 1e-4, (case, difference)


def test_plain_dcp_reads_every_tensor_without_megatron(models, runs, tmp_path):
    cases = [Case("llama"), Case("qwen3", ("--layer-keys", "per-layer"))]
    jobs = [
        {"checkpoint": str(iteration_folder(converted(models, c, runs))), "output": str(tmp_path / str(i))} for i, c in enumerate(cases)
    ]
    assert launch.run("load_in_dcp", jobs, tmp_path) == [None, None]
    import torch
    from safetensors.torch import load_file

    hf = hf_weights.read(models["llama"][0])
    stored = load_file(tmp_path / "0" / "tensors.safetensors")
    for layer in range(hf.layers):
        for rest in (
            "self_attention.linear_qkv.weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
            "self_attention.linear_proj.weight",
        ):
            assert torch.equal(stored[f"decoder.layers.{rest}"][layer], hf_weights.parameter(f"decoder.layers.{layer}.{rest}", hf))


def test_use_checkpoint_args_of_megatron_lm_builds_and_loads_the_model(models, runs, tmp_path):
    if not launch.available("0.19.2"):
        pytest.skip("megatron-core 0.19.2, which ships megatron.training, is not installed here")
    cases = {"llama": ["--norm-epsilon", "1e-5"], "qwen3": ["--norm-epsilon", "1e-6", "--qk-layernorm"]}
    jobs = []
    for name, arguments in cases.items():
        run = converted(models, Case(name), runs)
        jobs.append({"run": str(run), "output": str(tmp_path / name), "arguments": arguments})
    assert launch.run("load_in_megatron_training", jobs, tmp_path, "0.19.2") == [None] * len(jobs)
    import torch
    from safetensors.torch import load_file

    for name in cases:
        hf = hf_weights.read(models[name][0])
        held = load_file(tmp_path / name / "rank0.safetensors")
        assert len(held) > 20
        for key, found in held.items():
            value = hf_weights.parameter(key, hf)
            assert torch.equal(found[: len(value)], value), key
