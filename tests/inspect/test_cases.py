"""Public bug reports that `ckpt inspect` must not repeat: iterations, split checkpoints, foreign objects, stacked layers."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import CONFIG, ckpt, dense_shapes, fill, megatron_args, megatron_tensors, stack, write_hf, write_torch_dist


def answer(*arguments: object) -> dict:
    done = ckpt("inspect", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def optimizer_of(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"optimizer.state.{s}.{n}": t.astype(np.float32) for s in ("exp_avg", "exp_avg_sq", "fp32_param") for n, t in tensors.items()}


@pytest.mark.case("A1")
def test_the_tracker_decides_and_the_folder_read_is_said(tmp_path: Path) -> None:
    for iteration in (20, 5):  # written in this order: the newest file is not the answer either
        write_torch_dist(tmp_path, {"w": np.full(2, float(iteration), np.float32)}, argparse.Namespace(), iteration=iteration)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    for flags, iteration in (((), 20), (("--iteration", "latest"), 20), (("--iteration", "5"), 5), (("--iteration", "20"), 20)):
        found = answer(tmp_path, "--stats", *flags)
        assert found["iteration"] == iteration and found["source"]["directory"].endswith(f"iter_{iteration:07d}")
        assert found["stats"][0]["minimum"] == found["stats"][0]["maximum"] == iteration, "the bytes read are those of that iteration"
        assert str(iteration) in found["source"]["chosen"]
        assert f"iter_{iteration:07d}" in ckpt("inspect", tmp_path, *flags).stdout
    refused = ckpt("inspect", tmp_path, "--iteration", "7")
    assert refused.returncode == 2 and "5" in refused.stderr and "20" in refused.stderr


@pytest.mark.case("A1")
def test_a_state_that_counts_from_another_iteration_is_warned_about(tmp_path: Path) -> None:
    write_torch_dist(tmp_path, {"w": np.zeros(2, np.float32)}, argparse.Namespace(), iteration=20, common={"iteration": 3})
    found = ckpt("inspect", tmp_path)
    assert found.returncode == 0 and "iteration 20" in found.stderr and "says 3" in found.stderr


@pytest.mark.case("A3")
def test_an_unfinished_latest_is_refused_and_the_newest_complete_one_named(tmp_path: Path) -> None:
    write_torch_dist(tmp_path, {"w": np.zeros(64, np.float32)}, argparse.Namespace(), iteration=10)
    broken = tmp_path / "iter_0000020"
    broken.mkdir()
    data = next((tmp_path / "iter_0000010").glob("*.distcp")).read_bytes()
    (broken / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    for word in ("iter_0000020", "incomplete", ".metadata", "metadata.json", "10"):
        assert word in done.stderr, done.stderr
    shown = answer(tmp_path, "--iteration", "10")
    assert [(c["label"], c["complete"]) for c in shown["iterations"]] == [("10", True), ("20", False)]


@pytest.mark.case("A4")
@pytest.mark.parametrize(("raw", "label"), [(b"release", "release"), (b"20\r\n", 20), (b"\xef\xbb\xbf20", 20)])
def test_odd_trackers_that_mean_something(tmp_path: Path, raw: bytes, label: object) -> None:
    written = write_torch_dist(tmp_path, {"w": np.zeros(2, np.float32)}, argparse.Namespace(), iteration=20)
    if label == "release":
        written.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(raw)
    found = answer(tmp_path)
    assert found["iteration"] == label
    assert f"iteration      {label}" in ckpt("inspect", tmp_path, "--format", "table").stdout


@pytest.mark.case("A4")
@pytest.mark.parametrize("raw", [b"", b"abc"])
def test_odd_trackers_that_mean_nothing(tmp_path: Path, raw: bytes) -> None:
    write_torch_dist(tmp_path, {"w": np.zeros(2, np.float32)}, argparse.Namespace(), iteration=20)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(raw)
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 2 and ("abc" in done.stderr or "empty" in done.stderr)


@pytest.mark.case("A4")
def test_without_a_tracker_looking_is_allowed_and_said(tmp_path: Path) -> None:
    write_torch_dist(tmp_path, {"w": np.zeros(2, np.float32)}, argparse.Namespace(), iteration=3)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    found = answer(tmp_path)
    assert found["iteration"] == 3 and "there is no latest_checkpointed_iteration.txt" in found["source"]["chosen"]
    assert "random weights" in ckpt("inspect", tmp_path).stderr


@pytest.mark.case("B1")
@pytest.mark.parametrize("state", ["common.pt alone", "with optimizer"])
def test_weights_as_safetensors_and_state_of_megatron_are_one_checkpoint(tmp_path: Path, state: str) -> None:
    hf = write_hf(tmp_path)
    kept = optimizer_of(stack(megatron_tensors(hf, CONFIG), 4)) if state == "with optimizer" else {"x": np.zeros(1, np.float32)}
    folder = write_torch_dist(
        tmp_path, kept, megatron_args(CONFIG, consumed_train_samples=640), iteration=20, objects={"rng_state/shard_0.0_1.1": [{"a": 1}]}
    )
    if state == "common.pt alone":
        for path in folder.iterdir():
            if path.name != "common.pt":
                path.unlink()
    found = answer(tmp_path)
    assert found["iteration"] == 20 and found["parameters"] == sum(t.size for t in hf.values())
    assert found["weights"]["format"] == "hf" and found["weights"]["directory"] == str(tmp_path)
    assert found["copies"] == [] and found["wasted_bytes"] == 0
    assert found["optimizer"]["kind"] == ("float16" if state == "with optimizer" else "none")
    assert found["rng"]["objects"] == (1 if state == "with optimizer" else 0)
    assert found["progress"]["consumed_train_samples"] == 640
    assert found["model"]["sizes"]["layers"] == 4 and found["writer"]["layout"]["tp"] == 1
    listed = [t["name"] for t in answer(tmp_path, "--tensors")["tensors"]]
    assert set(hf) <= set(listed) and len(listed) == len(hf) + (len(kept) if state == "with optimizer" else 0)


@pytest.mark.case("B1")
def test_state_without_weights_anywhere_is_an_error_or_a_warning_that_lists_what_is_there(tmp_path: Path) -> None:
    tensors = optimizer_of(stack(megatron_tensors(fill(dense_shapes(CONFIG)), CONFIG), 4))
    folder = write_torch_dist(tmp_path, tensors, megatron_args(CONFIG), iteration=20)
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 0 and "no model weights anywhere" in done.stderr and "args" in done.stderr and "optimizer" in done.stderr
    for path in folder.iterdir():
        if path.name != "common.pt":
            path.unlink()
    assert ckpt("inspect", tmp_path).returncode == 2


@pytest.mark.case("B2")
def test_weights_stored_twice_are_shown_with_the_bytes_wasted(tmp_path: Path) -> None:
    hf = write_hf(tmp_path)
    write_torch_dist(tmp_path, stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG, padded_vocab_size=104), iteration=20)
    found = answer(tmp_path)
    nbytes, padding = sum(t.nbytes for t in hf.values()), 2 * 4 * 8 * 4
    assert [(c["format"], c["bytes"]) for c in found["copies"]] == [("torch_dist", nbytes + padding), ("hf", nbytes)]
    assert found["wasted_bytes"] == nbytes and found["parameters"] == (nbytes + padding) // 4, "counted once"
    shown = ckpt("inspect", tmp_path, "--format", "table").stdout
    assert "stored twice" in shown and "wasted" in shown


@pytest.mark.case("B2")
def test_a_broken_second_copy_does_not_hide_the_first(tmp_path: Path) -> None:
    hf = write_hf(tmp_path)
    write_torch_dist(tmp_path, stack(megatron_tensors(hf, CONFIG), 4), megatron_args(CONFIG), iteration=20)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 0 and "model.safetensors" in done.stderr and f"parameters\t{sum(t.size for t in hf.values())}" in done.stdout


@pytest.mark.case("H3")
def test_trailing_bytes_are_a_warning_to_inspect_and_an_error_to_convert(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf")
    with (tmp_path / "hf" / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 16)
    done = ckpt("inspect", tmp_path / "hf")
    assert done.returncode == 0 and "16 bytes are not covered" in done.stderr
    assert f"parameters\t{sum(t.size for t in hf.values())}" in done.stdout
    assert ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist").returncode == 2


@pytest.mark.case("I3")
def test_objects_of_foreign_classes_are_shown_and_never_imported(tmp_path: Path) -> None:
    import torch

    write_torch_dist(tmp_path, {"w": np.zeros(2, np.float32)}, argparse.Namespace(), iteration=7)
    module = tmp_path / "hidden" / "foreign_package.py"
    module.parent.mkdir()
    module.write_text("from enum import Enum\nclass AttnBackend(Enum):\n    auto = 5\n")
    target = str(tmp_path / "iter_0000007" / "common.pt")
    script = (
        "import argparse, signal, torch, foreign_package\n"
        "args = argparse.Namespace(tensor_model_parallel_size=2, attention_backend=foreign_package.AttnBackend(5), fn=torch.optim.AdamW)\n"
        "args.exit_signal, args.params_dtype = signal.SIGTERM, torch.bfloat16\n"
        f"torch.save({{'args': args, 'iteration': 7}}, {target!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": str(module.parent), "PATH": "/usr/bin"})
    shutil.rmtree(module.parent)  # from here on the class exists nowhere
    found = answer(tmp_path, "--args")
    assert found["writer"]["layout"]["tp"] == 2 and found["progress"]["iteration"] == 7
    values = found["args"]["values"]
    assert values["attention_backend"] == "foreign_package.AttnBackend(5)"
    assert values["fn"] == f"{torch.optim.AdamW.__module__}.AdamW"
    assert values["exit_signal"] == f"signal.Signals({int(signal.SIGTERM)})" and values["params_dtype"] == "torch.bfloat16"
    assert "foreign_package.AttnBackend(5)" in ckpt("inspect", tmp_path, "--args").stdout


@pytest.mark.case("N2")
def test_extra_state_changes_no_count(tmp_path: Path) -> None:
    import torch

    tensors = stack(megatron_tensors(fill(dense_shapes(CONFIG)), CONFIG, 104), 4)
    values = (None, torch.zeros(5, dtype=torch.uint8), None, torch.zeros(0, dtype=torch.uint8))
    objects = {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_4": v for i, v in enumerate(values)}
    write_torch_dist(tmp_path / "with", tensors, megatron_args(CONFIG), objects=objects)
    write_torch_dist(tmp_path / "without", tensors, megatron_args(CONFIG))
    # A DTensor-style writer stores helper entries as tensors.
    as_tensor = {**tensors, "decoder.layers.mlp.linear_fc2._extra_state": np.zeros(7, np.uint8)}
    write_torch_dist(tmp_path / "tensor", as_tensor, megatron_args(CONFIG))
    counts = [answer(tmp_path / n) for n in ("with", "without", "tensor")]
    assert counts[0]["parameters"] == counts[1]["parameters"] == counts[2]["parameters"] == sum(t.size for t in tensors.values())
    assert [c["extra_state"] for c in counts] == [4, 0, 1]


@pytest.mark.case("O1")
def test_stacked_and_per_layer_keys_look_the_same_layer_by_layer(tmp_path: Path) -> None:
    single = megatron_tensors(fill(dense_shapes(CONFIG)), CONFIG, 104)
    write_torch_dist(tmp_path / "stacked", stack(single, 4), megatron_args(CONFIG, padded_vocab_size=104))
    write_torch_dist(tmp_path / "indexed", single, megatron_args(CONFIG, padded_vocab_size=104))
    stacked, indexed = (answer(tmp_path / n, "--layers", "--stats", "--fingerprint") for n in ("stacked", "indexed"))
    assert stacked["weights"]["tensors"] < indexed["weights"]["tensors"] == len(single)
    assert stacked["stats"] == indexed["stats"], "names, shapes and values of every layer"
    assert [s["name"] for s in stacked["stats"]] and set(single) == {s["name"] for s in stacked["stats"]}
    assert stacked["fingerprint"]["sha256"] == indexed["fingerprint"]["sha256"] and stacked["fingerprint"]["naming"] == "hf"
    for s in stacked["stats"]:
        assert (s["shape"], s["minimum"], s["maximum"]) == (list(single[s["name"]].shape), single[s["name"]].min(), single[s["name"]].max())
    views = [answer(tmp_path / n, "--layers")["tensors"] for n in ("stacked", "indexed")]
    assert [(t["name"], t["dtype"], t["shape"], t["bytes"]) for t in views[0]] == [
        (t["name"], t["dtype"], t["shape"], t["bytes"]) for t in views[1]
    ]
    assert stacked["model"]["sizes"]["layers"] == 4 and stacked["warnings"] == indexed["warnings"] == []


@pytest.mark.case("O1")
@pytest.mark.parametrize("form", ["stacked", "indexed"])
def test_experts_are_taken_apart_too(tmp_path: Path, form: str) -> None:
    layers, experts, ffn, hidden = 3, 4, 6, 8
    whole = np.arange(layers * experts * 2 * ffn * hidden, dtype=np.float32).reshape(layers, experts, 2 * ffn, hidden)
    key = "mlp.experts.experts.linear_fc1.weight"
    tensors = {f"decoder.layers.{key}": whole} if form == "stacked" else {f"decoder.layers.{i}.{key}": whole[i] for i in range(layers)}
    write_torch_dist(tmp_path, tensors, megatron_args(CONFIG, num_layers=layers, num_experts=experts))
    found = answer(tmp_path, "--layers", "--stats")
    assert len(found["stats"]) == layers * experts and found["tree"][0]["count"] == layers * experts
    for s in found["stats"]:
        layer, expert = int(s["name"].split(".")[2]), int(s["name"].rpartition("weight")[2])
        assert (s["minimum"], s["maximum"]) == (whole[layer, expert].min(), whole[layer, expert].max())


@pytest.mark.case("O1")
def test_a_layer_count_that_contradicts_the_arguments_is_said(tmp_path: Path) -> None:
    single = megatron_tensors(fill(dense_shapes(CONFIG)), CONFIG)
    write_torch_dist(tmp_path, stack(single, 4), megatron_args(CONFIG, num_layers=6))
    assert "the arguments say layers 6, the tensors have 4" in ckpt("inspect", tmp_path).stderr
