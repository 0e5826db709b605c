"""Public bug reports about code hidden in pickles and about the wrong iteration."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import sys
import types

import numpy as np
import pytest
from builders import CONFIG, ckpt, megatron_args, megatron_tensors, read_hf, same, stack, write_hf, write_torch_dist


class Payload:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch {self.flag}",)


@pytest.mark.case("I1")
@pytest.mark.parametrize("command", [("inspect",), ("convert", "--to", "hf")])
def test_a_payload_in_common_pt_never_runs(tmp_path, command):
    hf = write_hf(tmp_path / "hf")
    write_torch_dist(
        tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG), common={"x": Payload(tmp_path / "PWNED")}
    )
    target = [tmp_path / "out"] if command[0] == "convert" else []
    done = ckpt(command[0], tmp_path / "run", *target, *command[1:])
    assert done.returncode == 2 and "posix.system" in done.stderr and "common.pt" in done.stderr
    assert not (tmp_path / "PWNED").exists() and not (tmp_path / "out").exists()


@pytest.mark.case("I2")
@pytest.mark.parametrize("command", [("inspect",), ("convert", "--to", "hf")])
def test_a_payload_in_the_index_never_runs(tmp_path, command):
    hf = write_hf(tmp_path / "hf")
    folder = write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Payload(tmp_path / "PWNED")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    target = [tmp_path / "out"] if command[0] == "convert" else []
    done = ckpt(command[0], tmp_path / "run", *target, *command[1:])
    assert done.returncode == 2 and "posix.system" in done.stderr and ".metadata" in done.stderr and not (tmp_path / "PWNED").exists()


@pytest.mark.case("I3")
def test_arguments_of_modules_we_do_not_have_are_shown_and_not_imported(tmp_path, monkeypatch):
    import torch

    module = types.ModuleType("megatron.core.transformer.enums")

    class AttnBackend(enum.Enum):
        auto = 5

    AttnBackend.__module__, AttnBackend.__qualname__ = module.__name__, "AttnBackend"
    module.AttnBackend = AttnBackend
    hf = write_hf(tmp_path / "hf")
    with monkeypatch.context() as patch:
        for name in ("megatron", "megatron.core", "megatron.core.transformer"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        args = megatron_args(CONFIG, attention_backend=AttnBackend.auto, fn=torch.optim.AdamW, tensor_model_parallel_size=2)
        write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), args, iteration=7)
    done = ckpt("inspect", tmp_path / "run", "--json")
    assert done.returncode == 0 and '"iteration": 7' in done.stdout
    assert ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf").returncode == 0 and same(read_hf(tmp_path / "out"), hf)


@pytest.mark.case("I4")
def test_generator_states_of_both_numpy_spellings_read_alike(tmp_path):
    import torch

    from ckpt_tools.formats.torch_zip import open_torch_file

    rng = np.random.RandomState(3)
    state = rng.get_state()
    expected = rng.randint(0, 2**31, 5)
    torch.save({"np_rng_state": state}, tmp_path / "new.pt")
    raw = (tmp_path / "new.pt").read_bytes()
    spelled = b"numpy._core.multiarray" in raw
    values = [open_torch_file(str(tmp_path / "new.pt")).value["np_rng_state"]]
    other = pickle.dumps(state, 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray") if spelled else pickle.dumps(state, 2)
    from ckpt_tools.formats.pickles import load

    values.append(load(other, where="old"))
    for value in values:
        again = np.random.RandomState()
        again.set_state((value[0], value[1].to_numpy(), *value[2:]))
        assert np.array_equal(again.randint(0, 2**31, 5), expected)


@pytest.mark.case("I7")
def test_an_index_of_an_older_torch_is_read_or_named(tmp_path):
    hf = write_hf(tmp_path / "hf")
    folder = write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {n: ("model", n) for n in metadata.state_dict_metadata}
    del metadata.version
    metadata.storage_meta = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf").returncode == 0 and same(read_hf(tmp_path / "out"), hf)


def two_iterations(tmp_path):
    run = {}
    for iteration, value in ((20, 20.0), (5, 5.0)):
        hf = write_hf(tmp_path / f"hf{iteration}")
        hf["model.norm.weight"][:] = value
        write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG), iteration=iteration)
        run[iteration] = hf
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20\n")
    return run


@pytest.mark.case("A1")
def test_the_iteration_read_is_the_one_named(tmp_path):
    run = two_iterations(tmp_path)
    for name, options, expected in (("a", (), 20), ("b", ("--iteration", "latest"), 20), ("c", ("--iteration", "5"), 5)):
        done = ckpt("convert", tmp_path / "run", tmp_path / name, "--to", "hf", *options)
        assert done.returncode == 0 and f"iter_{expected:07d}" in done.stdout and same(read_hf(tmp_path / name), run[expected])
    done = ckpt("convert", tmp_path / "run", tmp_path / "d", "--to", "hf", "--iteration", "7")
    assert done.returncode == 2 and "5" in done.stderr and "20" in done.stderr


@pytest.mark.case("A3")
def test_a_tracker_ahead_of_its_data_is_refused(tmp_path):
    two_iterations(tmp_path)
    for name in (".metadata", "metadata.json", "common.pt"):
        (tmp_path / "run" / "iter_0000020" / name).unlink()
    for command in (("convert", tmp_path / "run", tmp_path / "out", "--to", "hf"), ("inspect", tmp_path / "run")):
        done = ckpt(*command)
        assert done.returncode == 2 and all(w in done.stderr for w in (".metadata", "metadata.json", "common.pt", "5")), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.case("A4")
@pytest.mark.parametrize(
    ("text", "good"), [(b"20\r\n", True), (b"\xef\xbb\xbf20", True), (b" 20 ", True), (b"", False), (b"abc", False), (b"20.5", False)]
)
def test_odd_tracker_texts(tmp_path, text, good):
    two_iterations(tmp_path)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_bytes(text)
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert (done.returncode == 0) == good and (good or "latest_checkpointed_iteration.txt" in done.stderr)


@pytest.mark.case("A4")
def test_release_is_read_and_called_release(tmp_path):
    hf = write_hf(tmp_path / "hf")
    assert ckpt("convert", tmp_path / "hf", tmp_path / "run", "--to", "torch_dist").returncode == 0
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 0 and "release" in done.stdout and same(read_hf(tmp_path / "out"), hf)


@pytest.mark.case("A4")
def test_without_a_tracker_nothing_is_guessed_when_converting(tmp_path):
    hf = write_hf(tmp_path / "hf")
    write_torch_dist(tmp_path / "run", stack(megatron_tensors(hf, CONFIG, 104), 4), megatron_args(CONFIG), iteration=3)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 2 and "--iteration 3" in done.stderr
    assert ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--iteration", "3").returncode == 0


@pytest.mark.case("B1")
def test_weights_beside_the_state_are_used_and_their_absence_is_explained(tmp_path):
    import torch

    hf = write_hf(tmp_path / "ckpt")
    folder = tmp_path / "ckpt" / "iter_0000020"
    folder.mkdir()
    torch.save({"args": argparse.Namespace(num_layers=4), "iteration": 20}, folder / "common.pt")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("20")
    done = ckpt("inspect", tmp_path / "ckpt")
    assert done.returncode == 0 and "weights" in done.stdout
    assert ckpt("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "torch_dist").returncode == 0
    assert ckpt("convert", tmp_path / "out", tmp_path / "back", "--to", "hf").returncode == 0 and same(read_hf(tmp_path / "back"), hf)
    (tmp_path / "ckpt" / "model.safetensors").unlink()
    done = ckpt("convert", tmp_path / "ckpt", tmp_path / "out2", "--to", "hf")
    assert done.returncode == 2 and "weights" in done.stderr


@pytest.mark.case("B2")
def test_weights_stored_twice_are_compared_before_one_is_chosen(tmp_path):
    hf = write_hf(tmp_path / "ckpt")
    for name, change in (("equal", 0.0), ("other", 1.0)):
        write_hf(tmp_path / name)
        tensors = megatron_tensors(hf, CONFIG, 104)
        tensors["decoder.layers.1.mlp.linear_fc2.weight"] = tensors["decoder.layers.1.mlp.linear_fc2.weight"] + change
        write_torch_dist(tmp_path / name, stack(tensors, 4), megatron_args(CONFIG), iteration=20)
    done = ckpt("convert", tmp_path / "equal", tmp_path / "out", "--to", "hf")
    assert done.returncode == 0 and "stored twice" in done.stderr and same(read_hf(tmp_path / "out"), hf)
    done = ckpt("convert", tmp_path / "other", tmp_path / "out2", "--to", "hf")
    assert done.returncode == 2 and "E413" in done.stderr and "--weights-from" in done.stderr and not (tmp_path / "out2").exists()
    for choice, bias in (("safetensors", 0.0), ("megatron", 1.0)):
        assert ckpt("convert", tmp_path / "other", tmp_path / choice, "--to", "hf", "--weights-from", choice).returncode == 0
        assert np.array_equal(
            read_hf(tmp_path / choice)["model.layers.1.mlp.down_proj.weight"], hf["model.layers.1.mlp.down_proj.weight"] + np.float32(bias)
        )


@pytest.mark.case("H9")
@pytest.mark.parametrize("where", ["data", "common.pt", "rank file"])
def test_one_flipped_bit_is_found_by_the_checksum_stored_beside_it(tmp_path, where):
    from builders import write_legacy

    hf = write_hf(tmp_path / "hf")
    tensors = megatron_tensors(hf, CONFIG, 104)
    if where == "rank file":
        write_legacy(tmp_path / "run" / "iter_0000005" / "mp_rank_00", tensors, megatron_args(CONFIG))
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
        path, needle = tmp_path / "run" / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt", hf["model.norm.weight"].tobytes()
    else:
        rng = np.arange(600, dtype=np.uint8)
        import torch

        folder = write_torch_dist(tmp_path / "run", stack(tensors, 4), megatron_args(CONFIG), common={"rng": torch.from_numpy(rng)})
        path, needle = (
            (folder / "common.pt", rng.tobytes()) if where == "common.pt" else (folder / "__0_0.distcp", hf["model.norm.weight"].tobytes())
        )
    assert ckpt("convert", tmp_path / "run", tmp_path / "good", "--to", "hf", "--check-crc").returncode == 0
    raw = bytearray(path.read_bytes())
    assert raw.count(needle) == 1
    raw[raw.index(needle) + 5] ^= 0x40
    path.write_bytes(raw)
    done = ckpt("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--check-crc")
    assert (
        done.returncode == 2
        and "E415" in done.stderr
        and "CRC-32" in done.stderr
        and path.name in done.stderr
        and not (tmp_path / "out").exists()
    )


@pytest.mark.case("H9")
def test_safetensors_are_said_to_hold_no_checksums(tmp_path):
    write_hf(tmp_path / "hf")
    done = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "torch_dist", "--check-crc")
    assert done.returncode == 0 and "no checksums" in done.stderr
