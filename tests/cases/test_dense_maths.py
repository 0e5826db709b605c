"""Public bug reports about vocabulary, attention and MLP layout: the right rows in the right places. Judge: numpy and torch's DCP."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import (
    CONFIG,
    ckpt,
    dense_shapes,
    fill,
    megatron_args,
    megatron_tensors,
    read_hf,
    read_torch_dist,
    same,
    stack,
    write_hf,
    write_torch_dist,
)

TORCH_DIST = ("--to", "torch_dist", "--make-vocab-size-divisible-by", "8")


def convert_to_mcore(source, target, *options):
    done = ckpt("convert", source, target, *TORCH_DIST, *options)
    assert done.returncode == 0, done.stderr
    return read_torch_dist(next(p for p in target.iterdir() if p.is_dir()))


@pytest.mark.case("C1")
@pytest.mark.parametrize(("tp", "rows"), [(1, 104), (2, 112), (4, 128)])
def test_padding_rows_stay_out_of_the_export(tmp_path, tp, rows):
    hf = write_hf(tmp_path / "hf")
    padded = stack(megatron_tensors(hf, CONFIG, rows, pad=1e9), 4)
    write_torch_dist(tmp_path / "run", padded, megatron_args(CONFIG, padded_vocab_size=rows, tensor_model_parallel_size=tp))
    assert ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf").returncode == 0
    assert same(read_hf(tmp_path / "out"), hf)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 100


@pytest.mark.case("C1")
@pytest.mark.parametrize(("tp", "rows"), [(1, 104), (2, 112), (4, 128)])
def test_padding_rows_are_zeros_and_cut_evenly(tmp_path, tp, rows):
    hf = write_hf(tmp_path / "hf")
    found = convert_to_mcore(tmp_path / "hf", tmp_path / "run", "--tp", tp)
    assert same(found, stack(megatron_tensors(hf, CONFIG, rows, pad=0.0), 4))


@pytest.mark.case("C3")
def test_a_padded_size_below_the_vocabulary_is_refused(tmp_path):
    write_hf(tmp_path / "hf")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist", "--padded-vocab-size", "96")
    assert done.returncode == 2 and "96" in done.stderr and "100" in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.case("C3")
def test_padding_follows_the_new_tp_and_is_never_multiplied_again(tmp_path):
    hf = write_hf(tmp_path / "hf")
    source = stack(megatron_tensors(hf, CONFIG, 112, pad=7.0), 4)
    write_torch_dist(tmp_path / "run", source, megatron_args(CONFIG, padded_vocab_size=112))
    for tp, rows in ((4, 128), (1, 104)):
        found = convert_to_mcore(tmp_path / "run", tmp_path / f"tp{tp}", "--tp", tp)
        assert found["embedding.word_embeddings.weight"].shape == (rows, 8)
        assert np.array_equal(found["embedding.word_embeddings.weight"][:100], hf["model.embed_tokens.weight"])
        assert not found["embedding.word_embeddings.weight"][100:].any()


@pytest.mark.case("C4")
def test_a_tied_model_has_no_head_on_either_side(tmp_path):
    hf = write_hf(tmp_path / "hf", tie_word_embeddings=True)
    found = convert_to_mcore(tmp_path / "hf", tmp_path / "run", "--pp", "2", "--tp", "2")
    assert "output_layer.weight" not in found
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").returncode == 0
    assert same(read_hf(tmp_path / "back"), hf)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.case("D1")
def test_grouped_query_rows_are_interleaved_by_group(tmp_path):
    hf = write_hf(tmp_path / "hf")
    qkv = convert_to_mcore(tmp_path / "hf", tmp_path / "run")["decoder.layers.self_attention.linear_qkv.weight"]
    q, k, v = (hf[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    assert np.array_equal(qkv[0], np.concatenate([q[0:8], k[0:4], v[0:4], q[8:16], k[4:8], v[4:8]]))


@pytest.mark.case("D3")
def test_head_dim_is_the_declared_one(tmp_path):
    write_hf(tmp_path / "hf")
    convert_to_mcore(tmp_path / "hf", tmp_path / "run")
    import torch

    common = torch.load(tmp_path / "run" / "release" / "common.pt", weights_only=False)
    assert common["args"].kv_channels == 4
    config = {**CONFIG, "head_dim": None}
    write_hf(tmp_path / "plain", tensors=fill(dense_shapes(config)), head_dim=None)
    convert_to_mcore(tmp_path / "plain", tmp_path / "run2")
    assert torch.load(tmp_path / "run2" / "release" / "common.pt", weights_only=False)["args"].kv_channels == 2


@pytest.mark.case("D3")
def test_a_head_dim_that_does_not_fit_the_rows_is_refused_with_both_numbers(tmp_path):
    write_hf(tmp_path / "hf", tensors=fill(dense_shapes(CONFIG)), head_dim=3)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", *TORCH_DIST)
    assert done.returncode == 2 and "q_proj" in done.stderr and "[12, 8]" in done.stderr and "[16, 8]" in done.stderr


@pytest.mark.case("D4")
def test_biases_that_the_config_never_mentions_are_converted(tmp_path):
    hf = write_hf(tmp_path / "hf", model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=None, mlp_bias=None)
    found = convert_to_mcore(tmp_path / "hf", tmp_path / "run", "--tp", "2")
    q, k, v = (hf[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv")
    assert np.array_equal(
        found["decoder.layers.self_attention.linear_qkv.bias"][1], np.concatenate([q[0:8], k[0:4], v[0:4], q[8:16], k[4:8], v[4:8]])
    )
    assert not any("linear_proj.bias" in n for n in found)
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").returncode == 0 and same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("D4")
def test_a_llama_source_gets_no_bias(tmp_path):
    write_hf(tmp_path / "hf")
    assert not any(n.endswith(".bias") for n in convert_to_mcore(tmp_path / "hf", tmp_path / "run"))


@pytest.mark.case("D6")
def test_a_torch_dist_with_local_spec_norm_names_gives_the_same_export(tmp_path):
    hf = write_hf(tmp_path / "hf")
    fused = megatron_tensors(hf, CONFIG, 104)
    local = {
        n.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight").replace(
            "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
        ): t
        for n, t in fused.items()
    }
    for name, tensors in (("fused", stack(fused, 4)), ("local", stack(local, 4)), ("indexed", local)):
        write_torch_dist(tmp_path / name, tensors, megatron_args(CONFIG, padded_vocab_size=104))
        assert ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf").returncode == 0
        assert same(read_hf(tmp_path / f"{name}-hf"), hf)


@pytest.mark.case("D6")
def test_a_norm_under_both_names_is_refused(tmp_path):
    hf = write_hf(tmp_path / "hf")
    tensors = megatron_tensors(hf, CONFIG, 104)
    tensors["decoder.layers.2.input_layernorm.weight"] = tensors["decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"] + 1
    write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG, padded_vocab_size=104))
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 2 and "input_layernorm" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.case("D8")
def test_head_norms_of_qwen3_are_kept_whole_under_tp(tmp_path):
    hf = write_hf(tmp_path / "hf", model_type="qwen3", architectures=["Qwen3ForCausalLM"], attention_bias=False, mlp_bias=None)
    found = convert_to_mcore(tmp_path / "hf", tmp_path / "run", "--tp", "4")
    for x in "qk":
        assert np.array_equal(
            found[f"decoder.layers.self_attention.{x}_layernorm.weight"][2], hf[f"model.layers.2.self_attn.{x}_norm.weight"]
        )
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").returncode == 0 and same(read_hf(tmp_path / "back"), hf)


@pytest.mark.case("D8")
def test_a_llama_with_head_norms_is_refused_not_stripped(tmp_path):
    shapes = dense_shapes({**CONFIG, "model_type": "qwen3"})
    write_hf(tmp_path / "hf", tensors=fill(shapes))
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", *TORCH_DIST)
    assert done.returncode == 2 and "q_norm" in done.stderr


@pytest.mark.case("O1")
def test_stacked_and_indexed_layers_give_the_same_export(tmp_path):
    hf = write_hf(tmp_path / "hf")
    tensors = megatron_tensors(hf, CONFIG, 104)
    write_torch_dist(tmp_path / "stacked", stack(tensors, 4), megatron_args(CONFIG))
    write_torch_dist(tmp_path / "indexed", tensors, megatron_args(CONFIG))
    for name in ("stacked", "indexed"):
        assert ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf").returncode == 0
    assert same(read_hf(tmp_path / "stacked-hf"), hf) and same(read_hf(tmp_path / "indexed-hf"), hf)


@pytest.mark.case("O1")
def test_layers_of_the_stack_must_be_those_of_the_arguments(tmp_path):
    hf = write_hf(tmp_path / "hf")
    write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG, num_layers=3))
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 2 and "decoder.layers.3" in done.stderr


@pytest.mark.case("K6")
def test_a_missing_layer_tensor_is_refused_and_named(tmp_path):
    hf = write_hf(tmp_path / "hf")
    tensors = megatron_tensors(hf, CONFIG, 104)
    del tensors["decoder.layers.2.mlp.linear_fc2.weight"]
    write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG))
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--hf-config", tmp_path / "hf")
    assert done.returncode == 2 and "decoder.layers.2.mlp.linear_fc2.weight" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.case("N2")
def test_extra_state_is_neither_a_weight_nor_missing(tmp_path):
    import torch

    hf = write_hf(tmp_path / "hf")
    tensors = stack(megatron_tensors(hf, CONFIG, 104), 4)
    objects = {
        f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_4": torch.zeros(5, dtype=torch.uint8) if i % 2 else None for i in range(4)
    }
    write_torch_dist(tmp_path / "with", tensors, megatron_args(CONFIG), objects=objects)
    write_torch_dist(tmp_path / "without", tensors, megatron_args(CONFIG))
    counts = []
    for name in ("with", "without"):
        assert ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf").returncode == 0
        assert same(read_hf(tmp_path / f"{name}-hf"), hf)
        counts.append(json.loads(ckpt("inspect", tmp_path / name, "--json").stdout)["parameters"])
    assert counts[0] == counts[1]


@pytest.mark.case("O3")
def test_a_piece_missing_from_the_index_is_named_with_its_rows(tmp_path):
    import pickle

    hf = write_hf(tmp_path / "hf")
    folder = write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = "decoder.layers.self_attention.linear_qkv.weight"
    chunk = metadata.state_dict_metadata[key].chunks[0]
    chunk.sizes = torch_size((4, 16, 8))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 2 and key in done.stderr and "16:32" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.case("O3")
def test_a_missing_data_file_is_named(tmp_path):
    hf = write_hf(tmp_path / "hf")
    folder = write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    (folder / "__0_0.distcp").rename(folder / "__9_9.distcp")
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 2 and "__0_0.distcp" in done.stderr


def torch_size(values):
    import torch

    return torch.Size(values)


@pytest.mark.case("D10")
def test_an_interleaved_rotary_embedding_is_refused_and_never_ignored(tmp_path):
    """Megatron rotates neighbouring channels where args say so, transformers' llama the two halves: the rows would mean something else."""
    hf = fill(dense_shapes(CONFIG))
    tensors = megatron_tensors(hf, CONFIG)
    write_torch_dist(tmp_path / "halves", tensors, megatron_args(CONFIG))
    write_torch_dist(tmp_path / "neighbours", tensors, megatron_args(CONFIG, rotary_interleaved=True))
    assert ckpt("convert", tmp_path / "halves", tmp_path / "out", "--to", "hf").returncode == 0
    assert same(read_hf(tmp_path / "out"), hf)
    done = ckpt("convert", tmp_path / "neighbours", tmp_path / "out2", "--to", "hf")
    assert done.returncode == 2 and "rotary_interleaved" in done.stderr and not (tmp_path / "out2").exists()
