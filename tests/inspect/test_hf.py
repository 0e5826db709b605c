"""Inspecting Hugging Face folders: what is said of models that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from builders import ckpt, write_hf
from safetensors.numpy import save_file

from ckpt_tools.inspection.fingerprint import fingerprint
from ckpt_tools.inspection.overview import inspect, open_for_inspection


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama", "llama_tied_scaled_rope", "mistral", "qwen2", "qwen3"])
def test_a_folder_that_transformers_wrote(tmp_path: Path, name: str) -> None:
    import transformers
    from oracle import tiny_models

    model = tiny_models.write(name, tmp_path / "hf", "bfloat16", max_shard_size="100KB")
    found = inspect(open_for_inspection(tmp_path / "hf"))
    assert found.weights.parameters == model.num_parameters() and found.weights.nbytes == 2 * model.num_parameters()
    assert found.weights.tensors == len(dict(model.named_parameters())), "a tied head is stored once"
    assert [d.dtype for d in found.weights.dtypes] == ["bfloat16"]
    config, described = model.config, found.model
    assert described is not None and described.family == config.model_type
    sizes = described.sizes
    assert (sizes["layers"], sizes["hidden"], sizes["heads"], sizes["kv_groups"]) == (
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
    )  # fmt: skip
    assert sizes["head_dim"] == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert sizes["rope_base"] == config.rope_parameters["rope_theta"]
    assert sizes.get("rope_type") == ("llama3" if name == "llama_tied_scaled_rope" else None)
    assert sizes["tied"] == config.tie_word_embeddings
    assert found.writer.software == f"transformers {transformers.__version__}"
    assert found.optimizer.kind == "none" and found.warnings == ()


@pytest.mark.oracle
def test_converting_keeps_the_fingerprint_and_changing_one_number_does_not(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", shards=2)
    assert ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--tp", "2").returncode == 0
    before, after = (fingerprint(open_for_inspection(tmp_path / n)) for n in ("hf", "run"))
    assert before.sha256 == after.sha256 and before.naming == after.naming == "hf" and sorted(before.tensors) == sorted(hf)
    hf["model.norm.weight"][3] += 1
    write_hf(tmp_path / "other", tensors=hf)
    other = fingerprint(open_for_inspection(tmp_path / "other"))
    assert other.sha256 != before.sha256
    assert [n for n in hf if other.tensors[n] != before.tensors[n]] == ["model.norm.weight"]


@pytest.mark.oracle
def test_ckpt_is_recognised_as_the_writer_of_what_it_wrote(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    assert ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist").returncode == 0
    found = inspect(open_for_inspection(tmp_path / "run"))
    assert found.writer.software is not None and "megatron-core" not in found.writer.software
    assert found.model is not None and found.model.family == "llama" and found.warnings == ()


def test_a_tied_head_that_is_stored_again_changes_no_fingerprint(tmp_path: Path) -> None:
    tensors = write_hf(tmp_path / "once", tie_word_embeddings=True)
    write_hf(tmp_path / "twice", tie_word_embeddings=True, tensors={**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    once, twice = (fingerprint(open_for_inspection(tmp_path / n)) for n in ("once", "twice"))
    assert once.sha256 == twice.sha256
    assert any("lm_head.weight" in w for w in inspect(open_for_inspection(tmp_path / "twice")).warnings)


def test_a_model_type_that_ckpt_does_not_know_is_still_described(tmp_path: Path) -> None:
    write_hf(tmp_path, model_type="brand_new", architectures=["BrandNewForCausalLM"])
    found = inspect(open_for_inspection(tmp_path))
    assert found.model is not None and found.model.family is None and "brand_new" in found.model.why
    assert found.model.sizes["layers"] == 4 and found.model.sizes["rope_base"] == 500000.0
    assert fingerprint(open_for_inspection(tmp_path)).naming == "stored"


def test_config_and_tensors_that_disagree_are_told(tmp_path: Path) -> None:
    tensors = write_hf(tmp_path, vocab_size=100)
    write_hf(tmp_path, tensors=tensors, vocab_size=120, torch_dtype="bfloat16")
    warnings = inspect(open_for_inspection(tmp_path)).warnings
    assert any("vocab 120" in w and "[100, 8]" in w for w in warnings) and any("bfloat16" in w and "float32" in w for w in warnings)


def test_a_single_file_and_a_folder_without_config(tmp_path: Path) -> None:
    save_file(
        {"a.0.w": np.zeros((2, 3), np.float32), "a.1.w": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int8)}, tmp_path / "x.safetensors"
    )
    for path in (tmp_path / "x.safetensors", tmp_path):
        found = inspect(open_for_inspection(path))
        assert (found.weights.parameters, found.weights.nbytes, found.model) == (16, 52, None)
        assert [(k.name, k.count, k.numbers) for k in found.kinds] == [("a.*.w", 2, (0, 1)), ("b", 1, ())]


def test_layers_of_two_kinds_are_folded_apart_and_numbered(tmp_path: Path) -> None:
    dense = {f"model.layers.{i}.mlp.up_proj.weight": np.zeros((4, 2), np.float32) for i in range(3)}
    wide = {f"model.layers.{i}.mlp.up_proj.weight": np.zeros((8, 2), np.float32) for i in range(3, 12)}
    save_file({**dense, **wide, "model.norm.weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    shown = ckpt("inspect", tmp_path, "--format", "table").stdout
    assert "model.layers.*  x12" in shown and "x3 (0-2)" in shown and "x9 (3-11)" in shown
    listed = json.loads(ckpt("inspect", tmp_path, "--tensors", "--json").stdout)["tensors"]
    assert [t["name"].split(".")[2] for t in listed[:12]] == [str(i) for i in range(12)], "2 before 10"
