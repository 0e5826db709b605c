"""HF -> torch_dist -> HF gives the files back byte for byte when transformers wrote them, one file or many, any dtype."""

from __future__ import annotations

import json

import pytest
from builders import ckpt

pytestmark = pytest.mark.oracle
NAMES = ("tiny-llama", "tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen2_5", "tiny-qwen3")


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [(), ("--layer-keys", "per-layer"), ("--tp", "2", "--pp", "all"), ("--max-shard-size", "50KB")], ids=" ".join
)
def test_every_byte_of_the_committed_models_comes_back(fixtures, tmp_path, name, options):
    if "--pp" in options:
        options = ("--tp", "2", "--pp", str(json.loads((fixtures / name / "config.json").read_text())["num_hidden_layers"]))
    assert ckpt("convert", fixtures / name, tmp_path / "run", "--to", "torch_dist", *options).returncode == 0
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").returncode == 0
    assert files(tmp_path / "back") == files(fixtures / name)


@pytest.mark.parametrize("size", ["5GB", "60KB", "150KB"])
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
def test_shards_are_cut_where_transformers_cuts_them(tmp_path, model, size):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from oracle import tiny_models

    tiny_models.write(model, tmp_path / "hf", "bfloat16", max_shard_size=size)
    assert ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist").returncode == 0
    for extra in ("hf/.ckpt-weight-map.json",):  # without the memory of the source's shards
        (tmp_path / "run" / "release" / extra).unlink(missing_ok=True)
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--max-shard-size", size).returncode == 0
    assert files(tmp_path / "back") == files(tmp_path / "hf")
