"""More that megatron-core can write: data parallel with the distributed optimizer, four ranks, per-layer keys on uneven stages, bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import ckpt, read_hf, same
from judges.shared_cases import IDS
from oracle import launch, tiny_models

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.xdist_group("other_writers")]
# label -> (model, how many processes, job of save_in_mcore)
JOBS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fp32 optimizer": ("qwen2_5", 1, {"optimizer": "plain"}),
    "bf16 optimizer": ("llama_bf16", 1, {"optimizer": "plain"}),
    "release, per layer": ("qwen3", 1, {"iteration": "release", "per_layer": True}),
    "bf16, distributed optimizer over two": ("llama_bf16", 2, {"optimizer": "distributed"}),
    "uneven stages, per layer": ("qwen2_5", 2, {"pp": 2, "first_stage_layers": 1, "per_layer": True}),
    "virtual stages": ("mistral", 2, {"pp": 2, "vpp": 2}),
    "virtual stages, tied": ("qwen2", 2, {"pp": 2, "vpp": 2, "optimizer": "distributed"}),
    "stages, scaled rope": ("llama_tied_scaled_rope", 2, {"pp": 2, "optimizer": "plain"}),
    "norms of queries and keys": ("qwen3", 2, {"tp": 2}),
    "tensor and pipeline": ("qwen2", 4, {"tp": 2, "pp": 2}),
    "tensor and data, distributed optimizer": ("llama_bf16", 4, {"tp": 2, "optimizer": "distributed", "iteration": 120}),
}
CASES = [(version, label) for version in launch.MEGATRON for label, (_, ranks, _) in JOBS.items() if version == "0.16.1" or ranks < 4]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one job: what went wrong, or the run folder."""

    error: str | None
    run: Path


@pytest.fixture(scope="session")
def sources(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The HF folder of every model, a bfloat16 one among them."""
    folder = tmp_path_factory.mktemp("bf16") / "llama"
    tiny_models.write("llama", folder, "bfloat16")
    return {**{name: place for name, (place, _) in models.items()}, "llama_bf16": folder}


@pytest.fixture(scope="session")
def written(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Written]]:
    """All jobs of that many processes, saved by that megatron-core in one program, started on first use."""

    @functools.cache
    def save(version: str, ranks: int) -> dict[str, Written]:
        if not launch.available(version):
            pytest.skip(f"megatron-core {version} is not at {launch.MEGATRON[version]}")
        root = tmp_path_factory.mktemp(f"saved_{version}_{ranks}")
        labels = [label for label, (_, wanted, _) in JOBS.items() if wanted == ranks]
        jobs = [{"hf": str(sources[JOBS[label][0]]), "output": str(root / label.replace(" ", "_")), **JOBS[label][2]} for label in labels]
        errors = launch.run("save_in_mcore", jobs, root, version, ranks)
        return {label: Written(error, Path(job["output"])) for label, job, error in zip(labels, jobs, errors, strict=True)}

    return save


@pytest.mark.parametrize(("version", "label"), CASES)
def test_what_megatron_saved_comes_back_as_the_model_it_came_from(
    written: Callable[[str, int], dict[str, Written]], sources: dict[str, Path], tmp_path: Path, version: str, label: str
) -> None:
    import torch
    import transformers

    model, ranks, _ = JOBS[label]
    result, source = written(version, ranks)[label], sources[model]
    assert result.error is None, result.error
    done = ckpt("convert", result.run, tmp_path / "hf", "--to", "hf", "--verify")
    assert done.returncode == 0, done.stderr
    assert same(read_hf(tmp_path / "hf"), read_hf(source))

    kind = transformers.AutoModelForCausalLM
    ours, loading = kind.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype=torch.float32)
    assert not any(loading[complaint] for complaint in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = kind.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        difference = (ours.eval()(torch.tensor(IDS)).logits - theirs.eval()(torch.tensor(IDS)).logits).abs().max()
    # the same program on the same bits: anything but rounding means that args lost the rotary base, its scaling or the epsilon
    assert difference < 1e-5


@pytest.mark.parametrize("label", [label for label, (_, ranks, _) in JOBS.items() if ranks < 4])
def test_with_the_original_config_every_file_comes_back(
    written: Callable[[str, int], dict[str, Written]], sources: dict[str, Path], tmp_path: Path, label: str
) -> None:
    model, ranks, _ = JOBS[label]
    result, source = written("0.16.1", ranks)[label], sources[model]
    assert result.error is None, result.error
    done = ckpt("convert", result.run, tmp_path / "hf", "--to", "hf", "--hf-config", source)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes(), name
