"""Public bug reports about indexes that lie and files that are not what they seem. Each ends in a refusal that names file and tensor."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from builders import CONFIG, ckpt, read_hf, same, write_hf, write_index
from safetensors.numpy import save_file


def refused(source, target, *words):
    done = ckpt("convert", source, target, "--to", "torch_dist")
    assert done.returncode == 2, done.stdout
    for word in words:
        assert str(word) in done.stderr, done.stderr
    assert not target.exists() and not [p for p in target.parent.iterdir() if "ckpt-" in p.name]
    return done.stderr


def weight_map(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.case("G1")
@pytest.mark.parametrize("variant", ["wrong shard", "no shard"])
def test_a_ghost_in_the_index(tmp_path, variant):
    tensors = write_hf(tmp_path / "hf", shards=2)
    table = weight_map(tmp_path / "hf")
    if variant == "wrong shard":
        table["lm_head.weight"] = "model-00001-of-00002.safetensors"
        words = ("lm_head.weight", "model-00001-of-00002", "model-00002-of-00002")
    else:
        table["lm_head.ghost"] = "model-00001-of-00002.safetensors"
        words = ("lm_head.ghost", "in no file")
    write_index(tmp_path / "hf", table, sum(t.nbytes for t in tensors.values()))
    refused(tmp_path / "hf", tmp_path / "out", *words)


@pytest.mark.case("G3")
@pytest.mark.parametrize("total", [1, None, "gone"])
def test_total_size_is_advice_to_readers_and_right_when_written(tmp_path, total):
    tensors = write_hf(tmp_path / "hf", shards=2)
    write_index(tmp_path / "hf", weight_map(tmp_path / "hf"), total)
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert done.returncode == 0 and "total_size" in done.stderr
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--max-shard-size", "4KB").returncode == 0
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert sorted(index["weight_map"]) == sorted(tensors) and same(read_hf(tmp_path / "back"), tensors)


@pytest.mark.case("G4")
def test_of_a_stale_twin_the_indexed_one_counts_and_the_other_is_reported(tmp_path):
    tensors = write_hf(tmp_path / "hf", shards=2)
    table = weight_map(tmp_path / "hf")
    first = {n: tensors[n] for n in table if table[n].startswith("model-00001")}
    save_file(
        {**first, "model.norm.weight": np.full(8, 9, np.float32)}, tmp_path / "hf" / "model-00001-of-00002.safetensors", {"format": "pt"}
    )
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert done.returncode == 0 and "model.norm.weight is also in model-00001" in done.stderr
    assert ckpt("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").returncode == 0 and same(read_hf(tmp_path / "back"), tensors)
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    refused(tmp_path / "hf", tmp_path / "out", "model.norm.weight", "two files")


@pytest.mark.case("G6")
@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/tmp/secret.safetensors", "sub/../../secret.safetensors", "a\\..\\b", "", "model.safetensors\0x"]
)
def test_a_path_in_the_index_never_leaves_the_folder(tmp_path, name):
    tensors = write_hf(tmp_path / "hf", shards=2)
    save_file({"secret": np.zeros(1, np.float32)}, tmp_path / "secret.safetensors")
    write_index(tmp_path / "hf", {**weight_map(tmp_path / "hf"), "secret": name}, sum(t.nbytes for t in tensors.values()))
    assert "secret" in refused(tmp_path / "hf", tmp_path / "out", "outside the folder")


@pytest.mark.case("G7")
def test_one_file_without_an_index_stays_one_file(tmp_path):
    tensors = write_hf(tmp_path / "hf")
    assert ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist").returncode == 0
    assert ckpt("convert", tmp_path / "run", tmp_path / "one", "--to", "hf").returncode == 0
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    assert ckpt("convert", tmp_path / "run", tmp_path / "many", "--to", "hf", "--max-shard-size", "3KB").returncode == 0
    names = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert (
        names[0] == f"model-00001-of-{len(names):05d}.safetensors"
        and len(names) > 2
        and (tmp_path / "many" / "model.safetensors.index.json").exists()
    )
    assert same(read_hf(tmp_path / "many"), tensors) and same(read_hf(tmp_path / "one"), tensors)


@pytest.mark.case("G8")
def test_a_shard_that_is_not_there_is_named_with_its_tensors(tmp_path):
    write_hf(tmp_path / "hf", shards=3)
    lost = tmp_path / "hf" / "model-00003-of-00003.safetensors"
    lost.rename(tmp_path / "hf" / "Model-00003-of-00003.safetensors")
    assert "Model-00003" in refused(tmp_path / "hf", tmp_path / "out", "model-00003-of-00003.safetensors", "tensors would be missing")
    (tmp_path / "hf" / "Model-00003-of-00003.safetensors").unlink()
    refused(tmp_path / "hf", tmp_path / "out", "model-00003-of-00003.safetensors")


@pytest.mark.case("H1")
@pytest.mark.parametrize("keep", [-1, 0.5, 8, 0])
def test_a_truncated_shard_is_refused_before_reading(tmp_path, keep):
    write_hf(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    refused(tmp_path / "hf", tmp_path / "out", "model.safetensors")


@pytest.mark.case("H2")
@pytest.mark.parametrize(
    ("text", "word"),
    [(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n", "git-lfs pointer"), (b"<html>not found</html>", "HTML")],
)
def test_placeholders_are_called_what_they_are(tmp_path, text, word):
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(text)
    refused(tmp_path / "hf", tmp_path / "out", word, "model.safetensors")


@pytest.mark.case("H2")
def test_a_pointer_in_place_of_a_tokenizer_is_reported_and_not_copied(tmp_path):
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist")
    assert done.returncode == 0 and "tokenizer.json: this is a git-lfs pointer" in done.stderr
    assert not list((tmp_path / "run").rglob("tokenizer.json"))


@pytest.mark.case("H3")
def test_trailing_bytes_are_counted_and_refused(tmp_path):
    write_hf(tmp_path / "hf")
    with open(tmp_path / "hf" / "model.safetensors", "ab") as file:
        file.write(bytes(16))
    refused(tmp_path / "hf", tmp_path / "out", "16 bytes are not covered")


@pytest.mark.case("H4")
@pytest.mark.parametrize("offsets", [((0, 8), (4, 12)), ((0, 8), (0, 8)), ((0, 8), (12, 20)), ((8, 0), (0, 8))])
def test_ranges_that_share_or_skip_bytes_are_refused_by_name(tmp_path, offsets):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    header = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": o} for n, o in zip("kv", offsets)}).encode()
    (tmp_path / "hf" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(max(map(max, offsets))))
    refused(tmp_path / "hf", tmp_path / "out", "model.safetensors")


@pytest.mark.case("H6")
@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 10**9, 0, 1])
def test_an_absurd_header_length_costs_no_memory(tmp_path, length):
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist", env={"PYTHONMALLOC": "malloc"})
    assert done.returncode == 2 and "model.safetensors" in done.stderr


@pytest.mark.case("H7")
def test_files_without_tensors_open(tmp_path):
    from ckpt_tools import open_checkpoint

    for i, table in enumerate(({}, {"__metadata__": {"format": "pt"}})):
        header = json.dumps(table).encode()
        (tmp_path / f"{i}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert len(open_checkpoint(tmp_path / f"{i}.safetensors")) == 0
    (tmp_path / "broken.safetensors").write_bytes((23).to_bytes(8, "little") + b'{},"__metadata__":{}   ')
    assert ckpt("inspect", tmp_path / "broken.safetensors").returncode == 2


@pytest.mark.case("A8")
def test_an_hf_cache_snapshot_of_links_converts_like_a_plain_copy(tmp_path):
    tensors = write_hf(tmp_path / "plain", shards=2)
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123 abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.copy(file, blobs / f"hash{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
    for name, source in (("a", snapshot), ("b", tmp_path / "plain")):
        assert ckpt("convert", source, tmp_path / name, "--to", "torch_dist").returncode == 0
        assert ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf").returncode == 0
    files = sorted((tmp_path / "a-hf").rglob("*"))
    assert not any(p.is_symlink() for p in [*files, *(tmp_path / "a").rglob("*")])
    assert [p.name for p in files] == [p.name for p in sorted((tmp_path / "b-hf").rglob("*"))] and "tokenizer.json" in [
        p.name for p in files
    ]
    assert all(p.read_bytes() == (tmp_path / "b-hf" / p.name).read_bytes() for p in files) and same(read_hf(tmp_path / "a-hf"), tensors)
