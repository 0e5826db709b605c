"""What inspect says of checkpoints that Megatron-Core wrote, judged by keys.txt (every key, unpickled by torch) and how.json (the run)."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from math import prod
from pathlib import Path

import pytest
from builders import ckpt

from ckpt_tools.errors import CkptError
from ckpt_tools.inspection.fingerprint import fingerprint
from ckpt_tools.inspection.overview import Inspection, inspect, open_for_inspection

DENSE = (
    "llama_tp2_bf16",
    "llama_pp2_bf16",
    "llama_tp2pp2_bf16",
    "llama_vpp2_bf16",
    "llama_te_tp2_bf16",
    "mc019_llama_tp1_bf16",
    "release_llama_tp1_bf16",
)
TENSOR = re.compile(r"^T (?P<name>.+?)  \((?P<shape>[\d, ]*)\) torch\.(?P<dtype>\w+)  chunks=(?P<chunks>\d+)")


def variants(shared: Path) -> list[Path]:
    found = sorted(p for p in (shared / "real").iterdir() if list(p.glob("mcore/*/.metadata")))
    assert len(found) > 10
    return found


def looked_at(folder: Path) -> Inspection:
    return inspect(open_for_inspection(folder / "mcore"))


def keys(folder: Path) -> str:
    """keys.txt of the latest iteration."""
    return (folder / "keys.txt").read_text().rpartition("## files under")[2]


def stored(folder: Path) -> list[tuple[str, tuple[int, ...], str, int]]:
    """(name, shape, dtype, chunks) of every tensor, from keys.txt."""
    lines = (TENSOR.match(line) for line in keys(folder).splitlines())
    return [(m["name"], tuple(int(n) for n in re.findall(r"\d+", m["shape"])), m["dtype"], int(m["chunks"])) for m in lines if m]


def test_parameters_bytes_and_dtypes_are_those_of_the_stored_weights(shared: Path) -> None:
    for folder in variants(shared):
        weights = [(shape, dtype) for name, shape, dtype, _ in stored(folder) if not name.startswith("optimizer.")]
        found = looked_at(folder).weights
        assert (found.tensors, found.parameters) == (len(weights), sum(prod(s) for s, _ in weights)), folder.name
        assert {d.dtype for d in found.dtypes} == {d for _, d in weights}
        assert found.nbytes == 2 * found.parameters, "every variant stores bfloat16 weights"


def test_every_extra_state_entry_is_counted_and_none_is_a_weight(shared: Path) -> None:
    for folder in variants(shared):
        entries = re.findall(r"^B \S+_extra_state/", keys(folder), re.MULTILINE)
        found = looked_at(folder)
        assert found.extra_state == len(entries), folder.name
        assert not [k.name for k in found.kinds if "_extra_state" in k.name]


def test_the_writer_is_told_from_the_files(shared: Path) -> None:
    for folder in variants(shared):
        version = json.loads((folder / "how.json").read_text())["megatron_core"]
        writer = looked_at(folder).writer
        assert writer.software == "megatron-core " + ".".join(version.split(".")[:2]), (folder.name, writer.clues)


def test_layout_is_that_of_the_command_line(shared: Path) -> None:
    flags = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "ep": "expert-model-parallel-size"}
    for folder in variants(shared):
        how = json.loads((folder / "how.json").read_text())
        if "--num-layers" not in how["args"]:
            continue
        layout = looked_at(folder).writer.layout
        for name, flag in flags.items():
            given = re.search(rf"--{flag} (\d+)", how["args"])
            assert layout[name] == int(given[1] if given else 1), (folder.name, name)
        assert layout["world_size"] == how["world_size"]
    assert looked_at(shared / "real" / "llama_vpp2_bf16").writer.layout["vpp"] == 2


@pytest.mark.parametrize(
    ("name", "kind", "reshardable"),
    [
        ("llama_tp2_bf16", "float16", True),
        ("mixtral_ep2_seq_bf16", "float16", True),
        ("llama_dp2_distopt_fullyreshard_bf16", "fully_reshardable", True),
        ("llama_dp2_distopt_dpreshard_bf16", "dp_reshardable", False),
        ("mc019_llama_dp2_distopt_dpreshard_bf16", "dp_reshardable", False),
        ("mc013_llama_tp2dp2_distopt_modelspace_bf16", "fully_sharded_model_space", True),
        ("weightsonly_llama_tp2_bf16", "none", None),
        ("release_llama_tp1_bf16", "none", None),
    ],
)
def test_optimizer_state_and_whether_it_can_be_resharded(shared: Path, name: str, kind: str, reshardable: bool | None) -> None:
    folder = shared / "real" / name
    state = looked_at(folder).optimizer
    assert (state.kind, state.reshardable) == (kind, reshardable)
    kept = [(shape, dtype) for key, shape, dtype, _ in stored(folder) if key.startswith("optimizer.")]
    assert state.tensors == len(kept) and state.nbytes == 4 * sum(prod(s) for s, _ in kept)
    if kind != "none":
        assert {"exp_avg", "exp_avg_sq"} < set(state.states)


def test_the_model_is_described_as_its_hf_config_describes_it(shared: Path) -> None:
    for folder in variants(shared):
        config = json.loads((folder / "config.json").read_text())
        model = looked_at(folder).model
        assert model is not None
        expected = {
            "layers": config["num_hidden_layers"],
            "hidden": config["hidden_size"],
            "heads": config["num_attention_heads"],
            "kv_groups": config["num_key_value_heads"],
            "ffn": config["intermediate_size"],
            "vocab": config["vocab_size"],
            "tied": config["tie_word_embeddings"],
        }
        assert {k: model.sizes[k] for k in expected} == expected, folder.name
        assert model.family == config["model_type"]


def test_padding_of_the_vocabulary_is_told_apart(shared: Path) -> None:
    # 509 words in 512 rows of 64, twice; once when the head is tied to the embedding.
    untied, tied = (looked_at(shared / "real" / n).model for n in ("llama_tp2_bf16", "qwen2_tied_tp2_bf16"))
    assert untied is not None and untied.padding == 2 * 3 * 64
    assert tied is not None and tied.padding == 3 * 64


def test_random_states_scheduler_and_progress(shared: Path) -> None:
    found = looked_at(shared / "real" / "llama_tp2pp2_bf16")
    assert (found.rest.rng_objects, found.rest.rng_grid) == (4, (2, 2))
    assert found.rest.progress["consumed_train_samples"] == 20 and found.rest.progress["iteration"] == 5
    assert found.rest.scheduler["lr_decay_style"] == "constant"


def test_the_summary_reads_no_tensor_file(shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(shared / "real" / "llama_tp2_bf16" / "mcore", folder)
    before = ckpt("inspect", folder, "--json").stdout
    for blob in folder.glob("iter_*/*.distcp"):
        size = blob.stat().st_size
        blob.write_bytes(b"")
        with blob.open("r+b") as file:
            file.truncate(size)  # all zeros: any read of a record header would fail
    assert ckpt("inspect", folder, "--json").stdout == before
    assert ckpt("inspect", folder, "--stats").returncode == 2


def judged_fingerprint(path: Path) -> str:
    """The documented hash, computed with the safetensors library and hashlib alone."""
    from safetensors import safe_open

    lines = []
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            data = tensor.contiguous().flatten().view(__import__("torch").uint8).numpy().tobytes()
            shape = "x".join(str(n) for n in tensor.shape)
            lines.append(f"{name} {str(tensor.dtype).removeprefix('torch.')} {shape} {hashlib.sha256(data).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.oracle
def test_a_model_has_one_fingerprint_in_every_layout_and_as_hf(shared: Path) -> None:
    expected = judged_fingerprint(shared / "real" / DENSE[0] / "expected.safetensors")
    for name in DENSE:
        found = fingerprint(open_for_inspection(shared / "real" / name / "mcore"))
        assert (found.sha256, found.naming) == (expected, "hf"), name
    as_hf = fingerprint(open_for_inspection(shared / "real" / DENSE[0] / "expected.safetensors"))
    assert as_hf.sha256 == expected
    trained = shared / "real" / "llama_tp2_trained_bf16"
    assert fingerprint(open_for_inspection(trained / "mcore")).sha256 == judged_fingerprint(trained / "expected.safetensors") != expected


@pytest.mark.oracle
def test_the_fingerprint_of_a_model_with_experts_does_not_depend_on_how_it_is_stored(shared: Path) -> None:
    folder = shared / "real"
    found = [
        fingerprint(open_for_inspection(folder / n / "mcore"))
        for n in ("mixtral_ep2_seq_bf16", "mixtral_ep2_tegrouped_bf16", "legacy_mixtral_ep2_seq_bf16")
    ]
    assert len({f.sha256 for f in found}) == 1 and found[0].naming == "hf"


def test_without_weights_there_is_no_fingerprint(shared: Path) -> None:
    with pytest.raises(CkptError, match="no model weights") as caught:
        fingerprint(open_for_inspection(shared / "real" / "optimonly_llama_tp2_bf16" / "mcore"))
    assert caught.value.code == "E222"


def test_optimizer_only_says_that_there_are_no_weights_and_what_there_is(shared: Path) -> None:
    found = looked_at(shared / "real" / "optimonly_llama_tp2_bf16")
    assert found.weights.tensors == 0 and found.optimizer.kind == "float16"
    assert any("no model weights" in w and "rng_state" in w and "optimizer" in w for w in found.warnings)


def test_two_iterations_both_shown(shared: Path) -> None:
    root = shared / "real" / "llama_two_iterations_bf16" / "mcore"
    answer = json.loads(ckpt("inspect", root, "--json").stdout)
    assert answer["iteration"] == 10 and [c["label"] for c in answer["iterations"]] == ["5", "10"]
    assert json.loads(ckpt("inspect", root, "--iteration", "5", "--json").stdout)["source"]["directory"].endswith("iter_0000005")
    assert "also there     5" in ckpt("inspect", root, "--format", "table").stdout
