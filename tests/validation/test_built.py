"""Findings that no change of a real file gives: fixtures made with torch and safetensors; and every code of the table has one."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import (
    CONFIG,
    dense_shapes,
    fill,
    megatron_args,
    megatron_tensors,
    stack,
    write_hf,
    write_legacy,
    write_torch_dist,
)

from ckpt_tools.validation.meanings import MEANINGS
from ckpt_tools.validation.run import Options, validate
from ckpt_tools.validation.table import CHECKS
from validation.test_real_mutations import MUTATIONS

TIED = "model.embed_tokens.weight"
KEY = "decoder.layers.mlp.linear_fc2.weight"


def codes(path, *, info=False, **options) -> set[str]:
    return {f.code for f in validate(path, Options(**options)).findings if info or f.severity != "info"}


def stacked(folder: Path, rows: int | None = None, **config) -> dict[str, np.ndarray]:
    return stack(megatron_tensors(write_hf(folder / "hf", **config), {**CONFIG, **config}, rows), 4)


def run_folder(tmp_path, tensors=None, args=None, **more) -> Path:
    write_torch_dist(tmp_path / "run", stacked(tmp_path) if tensors is None else tensors, args or megatron_args(CONFIG), **more)
    return tmp_path / "run"


def edited(run: Path, change) -> Path:
    """The run with its .metadata unpickled, changed and pickled again."""
    path = run / "iter_0000005" / ".metadata"
    value = pickle.loads(path.read_bytes())
    change(value)
    path.write_bytes(pickle.dumps(value))
    return run


def optimizer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """State as Float16OptimizerWithFloat16Params keeps it."""
    made = {}
    for name, tensor in tensors.items():
        for state, value in (("exp_avg", tensor * 0), ("exp_avg_sq", tensor * 0), ("fp32_param", tensor)):
            made[f"optimizer.state.{state}.{name}"] = value
    return made


GROUP = {"lr": 1e-3, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def trained(tmp_path, *, groups=None, step=None, lose=(), args=None):
    """A run with optimizer state."""
    tensors = stacked(tmp_path)
    state = {n: t for n, t in optimizer(tensors).items() if not n.endswith(tuple(lose) or ("\0",))}
    inner = {"param_groups": [{**GROUP, "step": 7}] if groups is None else groups}
    if step is not None:
        inner["state"] = {"common_step": torch.tensor(float(step))}
    return run_folder(
        tmp_path, {**tensors, **state}, args, common={"optimizer": {"optimizer": inner}, "opt_param_scheduler": {"num_steps": 7}}
    )


# ---- one fixture per code: each function makes a folder in which exactly that is found ------------------------------------------------


def piece_without_a_place(tmp_path):
    def change(value):
        del value.storage_data[next(k for k in value.storage_data if k.fqn == KEY)]

    return edited(run_folder(tmp_path), change)


def piece_uncovered(tmp_path):
    def change(value):
        value.state_dict_metadata[KEY].size = torch.Size([4, 8, 17])

    return edited(run_folder(tmp_path), change)


def dtype_in_the_index(tmp_path):
    def change(value):
        value.state_dict_metadata[KEY].properties.dtype = torch.float64

    return edited(run_folder(tmp_path), change)


def dtype_unknown(tmp_path):
    def change(value):
        value.state_dict_metadata[KEY].properties.dtype = torch.complex32

    return edited(run_folder(tmp_path), change)


def record_without_a_version(tmp_path):
    run = run_folder(tmp_path)
    path = run / "iter_0000005" / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b"/version", b"/versi0n"))
    return run


def entries_overlap(tmp_path):
    def change(value):
        one, other = (next(k for k in value.storage_data if k.fqn == n) for n in (KEY, "decoder.final_layernorm.weight"))
        value.storage_data[one] = dataclasses.replace(value.storage_data[other])

    return edited(run_folder(tmp_path), change)


def foreign_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    return edited(run_folder(tmp_path), lambda value: setattr(value, "planner_data", Payload()))


def bomb(tmp_path):
    deep: list = []
    for _ in range(300):
        deep = [deep]
    return run_folder(tmp_path, common={"deep": deep})


def ranks(tmp_path, count=2, **changes):
    """A legacy run at TP `count`; changes: rank -> function of (tensors, state) in place."""
    whole = megatron_tensors(write_hf(tmp_path / "hf"), CONFIG)
    for rank in range(count):
        own = {}
        for name, tensor in whole.items():
            if name.endswith("linear_fc1.weight"):
                tensor = np.concatenate([np.split(half, count)[rank] for half in np.split(tensor, 2)])
            elif name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
                tensor = np.split(tensor, count)[rank]
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                tensor = np.split(tensor, count, axis=1)[rank]
            own[name] = tensor
        state: dict = {"iteration": 5}
        changes.get(f"rank{rank}", lambda tensors, state: None)(own, state)
        folder = tmp_path / "run" / "iter_0000005" / f"mp_rank_{rank:02d}"
        write_legacy(folder, own, megatron_args(CONFIG, tensor_model_parallel_size=count, rank=rank), **state)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    return tmp_path / "run"


def ranks_do_not_fit(tmp_path):
    return ranks(
        tmp_path, rank1=lambda tensors, state: tensors.update({"decoder.layers.1.mlp.linear_fc2.weight": np.ones((9, 8), np.float32)})
    )


def ranks_of_two_iterations(tmp_path):
    return ranks(tmp_path, rank1=lambda tensors, state: state.update(iteration=4))


def two_keys_for_one_tensor(tmp_path):
    tensors = stacked(tmp_path)
    return run_folder(tmp_path, {**tensors, "module.decoder.final_layernorm.weight": np.ones(9, np.float32)})


def file_without_tensors(tmp_path):
    from safetensors.numpy import save_file

    folder = tmp_path / "hf"
    write_hf(folder, shards=2)
    save_file({}, folder / "model-empty.safetensors", {"format": "pt"})
    return folder


def without_prediction_layers(tmp_path):
    """As transformers 5 saves such a model."""
    from families import tiny

    tiny.write("deepseek_v3_yarn_no_q_lora", tmp_path / "hf")
    return tmp_path / "hf"


def half_an_adapter(tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "adapter").mkdir()
    save_file(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((4, 8))},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    return tmp_path / "adapter"


def vocabulary_cut(tmp_path):
    return run_folder(tmp_path, args=megatron_args(CONFIG, vocab_size=200))


def state_without_model(tmp_path):
    """CASES B1 (b): a rank file without model, and no safetensors beside it."""
    folder = tmp_path / "ckpt" / "iter_0000020" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(
        {"args": megatron_args(CONFIG), "iteration": 20, "optimizer": {}, "opt_param_scheduler": {}, "rng_state": []},
        folder / "model_optim_rng.pt",
    )
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("20")
    return tmp_path / "ckpt"


def config_of_another_model(tmp_path):
    run = run_folder(tmp_path)
    write_hf(run, rope_theta=1e4)
    return run


def router_bias(tmp_path):
    from ml_dtypes import bfloat16

    folder = tmp_path / "hf"
    write_hf(folder, tensors={"model.layers.0.mlp.gate.e_score_correction_bias": np.ones(8, bfloat16)}, model_type="unheard_of")
    return folder


def zarr(tmp_path):
    folder = tmp_path / "run" / "iter_0000005"
    (folder / "decoder.weight").mkdir(parents=True)
    (folder / "decoder.weight" / ".zarray").write_text("{}")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    torch.save({}, folder / "common.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    return tmp_path / "run"


def no_counters(tmp_path):
    return run_folder(tmp_path)


def state_of_another_model(tmp_path):
    state = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": np.ones(9, np.float32)}
    return run_folder(tmp_path, {**stacked(tmp_path), **state})


def copies_differ(tmp_path):
    run = run_folder(tmp_path)
    tensors = {n: t + (n == "model.norm.weight") for n, t in fill(dense_shapes(CONFIG)).items()}
    write_hf(run, tensors=tensors)
    return run


BUILT = {
    "V199": zarr,
    "V223": piece_without_a_place,
    "V224": piece_uncovered,
    "V225": dtype_in_the_index,
    "V226": entries_overlap,
    "V230": record_without_a_version,
    "V232": ranks_do_not_fit,
    "V234": ranks_of_two_iterations,
    "V251": foreign_code,
    "V252": bomb,
    "V253": dtype_unknown,
    "V303": state_without_model,
    "V306": two_keys_for_one_tensor,
    "V307": file_without_tensors,
    "V308": without_prediction_layers,
    "V309": half_an_adapter,
    "V404": vocabulary_cut,
    "V405": config_of_another_model,
    "V503": router_bias,
    "V704": no_counters,
    "V707": state_of_another_model,
    "V708": lambda tmp_path: trained(tmp_path, step=1),
    "V709": lambda tmp_path: trained(tmp_path, lose=("final_layernorm.weight",)),
    "V710": lambda tmp_path: trained(tmp_path, groups=[]),
    "V802": copies_differ,
}
ELSEWHERE = {"V706", "V801"}  # test_what_megatron_cannot_reshard_is_a_remark, test_split_checkpoints_are_told_by_what_lies_beside


@pytest.mark.parametrize("code", BUILT)
def test_a_built_fault_is_found_under_its_code(tmp_path, code):
    options = Options(resume=code == "V704", deep=code == "V230")
    report = validate(BUILT[code](tmp_path), options)
    found = {f.code for f in report.findings}
    assert code in found, report.findings


def test_every_check_has_a_text_and_a_fixture():
    known = {c.code for c in CHECKS}
    assert known == MEANINGS.keys() and len(known) == len(CHECKS)
    assert known == {m.code for m in MUTATIONS.values()} | BUILT.keys() | ELSEWHERE


# ---- cases of public reports --------------------------------------------------------------------------------------------------------


def test_optimizer_state_alone_is_legal_and_nothing_to_go_on_from(shared):
    """What is left of a run whose weights lay beside it as safetensors and were lost."""
    run = shared / "real" / "optimonly_llama_tp2_bf16" / "mcore"
    assert validate(run).valid
    report = validate(run, Options(resume=True))
    assert not report.valid and [f.code for f in report.findings if f.severity == "error"] == ["V303"]


@pytest.mark.case("B1")
def test_a_missing_model_key_is_judged_by_what_lies_beside_it(tmp_path):
    folder = state_without_model(tmp_path)
    (finding,) = [f for f in validate(folder).findings if f.severity == "error"]
    assert finding.code == "V303" and "opt_param_scheduler" in finding.found
    write_hf(folder)
    report = validate(folder)
    assert report.valid and report.holds.weights == "safetensors" and report.holds.optimizer != "none" and report.holds.random
    virtual = tmp_path / "vpp" / "iter_0000005" / "mp_rank_00"
    model = megatron_tensors(fill(dense_shapes(CONFIG)), CONFIG)
    virtual.mkdir(parents=True)
    halves: list[dict] = [{}, {}]
    for name, tensor in model.items():
        layer = int(name.split(".")[2]) if name.startswith("decoder.layers") else 0 if name.startswith("embedding") else 3
        local = name.replace(f"layers.{layer}.", f"layers.{layer % 2}.")
        halves[layer // 2][local] = torch.from_numpy(tensor.copy())
    args = megatron_args(CONFIG, virtual_pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    torch.save(
        {"args": args, "iteration": 5, "checkpoint_version": 3.0, "model0": halves[0], "model1": halves[1]}, virtual / "model_optim_rng.pt"
    )
    (tmp_path / "vpp" / "latest_checkpointed_iteration.txt").write_text("5")
    report = validate(tmp_path / "vpp")
    assert report.valid and report.holds.weights == "megatron", report.findings


@pytest.mark.case("B2")
def test_weights_stored_twice_are_told_and_must_be_equal(tmp_path):
    run = run_folder(tmp_path)
    write_hf(run)
    (finding,) = [f for f in validate(run, Options(deep=True)).findings if f.severity != "info"]
    assert finding.code == "V801" and "bytes too many" in finding.found
    tensors = fill(dense_shapes(CONFIG))
    tensors["model.norm.weight"][3] += 1
    write_hf(run, tensors=tensors)
    (finding,) = [f for f in validate(run, Options(deep=True)).findings if f.severity == "error"]
    value = float(tensors["model.norm.weight"][3])
    assert (finding.code, finding.tensor) == ("V802", "model.norm.weight")
    assert finding.expected == f"{value} at [3]" and finding.found == str(value - 1)


@pytest.mark.case("B3")
def test_what_cannot_be_gone_on_from_is_said_when_asked(tmp_path):
    run = run_folder(tmp_path)
    assert validate(run).valid and codes(run, resume=True) >= {"V701", "V702", "V703"}
    run = trained(tmp_path / "second", args=megatron_args(CONFIG, consumed_train_samples=40))
    assert codes(run, resume=True) == {"V703"}


@pytest.mark.case("L3")
def test_step_counts_that_disagree_are_told(tmp_path):
    (finding,) = [f for f in validate(trained(tmp_path, step=1)).findings if f.code == "V708"]
    assert finding.severity == "warning" and "7 in param_groups" in finding.text and "7 was taken" in finding.text
    assert codes(trained(tmp_path / "second", step=7)) == set()


@pytest.mark.case("L9")
def test_masters_that_do_not_round_to_the_weights_are_an_error(tmp_path):
    from ml_dtypes import bfloat16

    def run(folder, shift):
        tensors = stack(megatron_tensors({n: t.astype(np.float32) % 16 + 1 for n, t in write_hf(folder / "hf").items()}, CONFIG), 4)
        masters = {n: (t + np.float32(shift)).astype(np.float32) for n, t in tensors.items()}
        state = optimizer(masters)
        held = {n: t.astype(bfloat16).view(np.int16) for n, t in tensors.items()}
        write_torch_dist(folder / "run", state, megatron_args(CONFIG), common={"optimizer": {"optimizer": {"param_groups": [GROUP]}}})
        return write_bfloat16(folder / "run", held, state)

    (finding,) = [f for f in validate(run(tmp_path / "stale", 8)).findings if f.code == "V609"]
    assert finding.severity == "error" and "by up to 8" in finding.text
    assert "V609" not in codes(run(tmp_path / "close", 2**-10))  # less than half a step of bfloat16 wherever the weight is 1 or more


def write_bfloat16(run: Path, bits: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> Path:
    """The run written again by torch with weights in bfloat16."""
    import shutil

    import torch.distributed.checkpoint as dcp

    folder = run / "iter_0000005"
    common = (folder / "common.pt").read_bytes()
    shutil.rmtree(folder)
    tensors = {n: torch.from_numpy(np.ascontiguousarray(t)).view(torch.bfloat16) for n, t in bits.items()}
    dcp.save(
        {**tensors, **{n: torch.from_numpy(np.ascontiguousarray(t)) for n, t in state.items()}},
        storage_writer=dcp.FileSystemWriter(folder),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    (folder / "common.pt").write_bytes(common)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}')
    return run


@pytest.mark.case("H7")
def test_files_without_tensors_and_strange_shapes_are_valid(tmp_path):
    from safetensors.numpy import save_file

    for number, tensors in enumerate(({}, {"w": np.zeros((0, 4), np.float32)}, {"w": np.array(3, np.float32)})):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        assert validate(folder / "model.safetensors").valid
    (tmp_path / "broken.safetensors").write_bytes((8).to_bytes(8, "little") + b'{},"__me')
    assert codes(tmp_path / "broken.safetensors") == {"V201"}


@pytest.mark.case("N2")
def test_extra_state_is_never_missing_and_never_unexpected(tmp_path):
    tensors = stacked(tmp_path)
    objects = {f"decoder.layers.self_attention.linear_proj._extra_state/shard_{i}_4": io.BytesIO(b"x") for i in range(4)}
    write_torch_dist(tmp_path / "run", tensors, megatron_args(CONFIG), objects=objects)
    assert codes(tmp_path / "run") == set()


def test_what_megatron_cannot_reshard_is_a_remark(shared):
    report = validate(shared / "real" / "llama_dp2_distopt_dpreshard_bf16" / "mcore")
    assert {f.code for f in report.findings} == {"V706"} and report.valid


def test_zero_head_rows_and_zero_biases_are_not_held_against_a_model(tmp_path):
    shapes = dense_shapes({**CONFIG, "model_type": "qwen2"})
    random = np.random.default_rng(0)
    tensors = {n: (np.zeros(s) if n.endswith("bias") else random.normal(size=s)).astype(np.float32) for n, s in shapes.items()}
    tensors["model.embed_tokens.weight"][90:] = 0  # tokens that were reserved and never used
    write_hf(tmp_path / "hf", tensors=tensors, model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=None)
    assert codes(tmp_path / "hf", deep=True) == set()


def test_what_cannot_be_looked_into_is_never_called_valid(tmp_path):
    folder = half_an_adapter(tmp_path)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "V202" in codes(folder)
    file.rename(folder / "adapter_model.bin")
    assert codes(folder) == {"V199"}
    run = ranks(tmp_path, count=1)
    assert validate(run).valid and codes(run / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt") == {"V231"}


@pytest.mark.case("H4")
@pytest.mark.parametrize(
    ("ranges", "good"),
    [
        ([(0, 8), (4, 12)], False),
        ([(0, 8), (0, 8)], False),
        ([(0, 8), (12, 20)], False),
        ([(8, 0), (8, 16)], False),
        ([(8, 16), (0, 8)], True),
    ],
)
def test_ranges_must_be_a_partition_in_whatever_order_they_stand(tmp_path, ranges, good):
    import json

    from safetensors import SafetensorError, safe_open

    table = {f"w{i}": {"dtype": "F32", "shape": [2], "data_offsets": list(r)} for i, r in enumerate(ranges)}
    raw = json.dumps(table).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(max(max(r) for r in ranges)))
    assert codes(path) == (set() if good else {"V202"})
    if not good:
        with pytest.raises(SafetensorError):
            safe_open(path, "np")


@pytest.mark.case("H6")
@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 10**6, 0, 1])
def test_absurd_header_lengths_are_told_without_being_believed(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
    assert codes(path) == {"V201"}


@pytest.mark.case("C3")
def test_layouts_that_pad_the_vocabulary_differently_are_the_same_model(tmp_path):
    from ckpt_tools.diff.compare import diff

    hf = write_hf(tmp_path / "hf")
    for rows in (104, 112, 128):
        tensors = stack(megatron_tensors(hf, CONFIG, rows, pad=1e9), 4)
        write_torch_dist(tmp_path / str(rows), tensors, megatron_args(CONFIG, padded_vocab_size=rows))
        assert codes(tmp_path / str(rows), deep=True, info=True) >= {"V608"} and validate(tmp_path / str(rows), Options(deep=True)).valid
    assert diff(tmp_path / "104", tmp_path / "128").equal and diff(tmp_path / "112", tmp_path / "hf").equal


def test_whatever_a_config_or_an_index_says_is_a_finding_or_an_error_and_never_a_crash(tmp_path):
    import json
    import random

    from ckpt_tools.diff.compare import diff
    from ckpt_tools.errors import CkptError

    write_hf(tmp_path / "hf", shards=2)
    write_hf(tmp_path / "other")
    strange = [None, True, 0, -1, 10**9, 10**30, 1.5, 1e400, "x", "", [], {}, [1], {"a": 1}, "../x", "a\0b", "\ud800", [[[]]]]
    chance = random.Random(3)
    for _ in range(150):
        path = tmp_path / "hf" / chance.choice(["config.json", "model.safetensors.index.json"])
        good = path.read_text()
        value = json.loads(good)
        table = value["weight_map"] if "weight_map" in value and chance.random() < 0.8 else value
        table[chance.choice([*table, "new", ""])] = chance.choice(strange)
        path.write_text(json.dumps(value))
        validate(tmp_path / "hf", Options(deep=True))
        try:
            diff(tmp_path / "hf", tmp_path / "other")
        except CkptError as error:
            assert error.code
        path.write_text(good)


def test_quantised_weights_with_their_scales_are_no_fault(tmp_path):
    from ml_dtypes import float8_e4m3fn
    from safetensors.torch import save_file

    made, chance = {}, np.random.default_rng(4)
    for name, shape in dense_shapes(CONFIG).items():
        tensor = chance.normal(size=shape).astype(np.float32)
        made[name] = torch.from_numpy(tensor)
        if "_proj" in name and ".3." not in name:  # the last layer is left as it is
            made[name] = torch.from_numpy(tensor.astype(float8_e4m3fn).view(np.uint8)).view(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = torch.ones(1, 1)
    write_hf(tmp_path / "hf", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    save_file(made, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert codes(tmp_path / "hf", deep=True) == set()
    write_hf(
        tmp_path / "packed",
        tensors={"model.layers.0.mlp.up_proj.qweight": np.ones((2, 2), np.int32)},
        quantization_config={"quant_method": "gptq"},
    )
    assert codes(tmp_path / "packed", info=True) >= {"V304"} and "V301" not in codes(tmp_path / "packed")
