"""Runs of Megatron-Bridge: no `args` in the common state, the model's settings in run_config.yaml, the counters in train_state.pt.

The checkpoint is one that megatron-core wrote; only what Bridge keeps elsewhere is moved. Judges: the HF tensors it was made from, and
megatron-core, which goes on from it.
"""

from __future__ import annotations

import json
import shutil

import pytest

from ckpt_tools import open_checkpoint
from ckpt_tools.formats.run_config import read_arguments, read_block

pytestmark = pytest.mark.oracle
SAME = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization add_bias_linear add_qkv_bias "
    "qk_layernorm rotary_base rotary_percent rotary_interleaved position_embedding_type attention_dropout hidden_dropout "
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size make_vocab_size_divisible_by"
).split()


def yaml(value):
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def run_config(args):
    """The file as Bridge's YAML writer makes it: blocks at the left edge, objects as _target_ with their arguments below."""
    lines = [
        "checkpoint:", "  _target_: megatron.bridge.training.config.CheckpointConfig", "  save: /somewhere", "model:",
        "  _target_: megatron.bridge.models.llama.llama_provider.LlamaModelProvider", "  activation_func:", "    _call_: false",
        "    _target_: torch.nn.functional.silu", *(f"  {name}: {yaml(getattr(args, name))}" for name in SAME),
        "  gated_linear_unit: true", "  generation_config:", "    _call_: true", "    config_dict:", "      num_layers: 99",
        "  init_method:", "    _args_: []", "    _partial_: true", "    _target_: torch.nn.init.normal_", "    std: 0.02",
        f"  layernorm_epsilon: {args.norm_epsilon if hasattr(args, 'norm_epsilon') else args.layernorm_epsilon!r}",
        "  num_moe_experts: null", "  params_dtype:", "    _call_: false", "    _target_: torch.bfloat16", "  recompute_modules:",
        "  - core_attn", "  seq_length: 128", "  share_embeddings_and_output_weights: false", "  vocab_size: 509",
        "nvrx_straggler: null", "optimizer:", "  _target_: megatron.bridge.training.config.OptimizerConfig",
        "  use_distributed_optimizer: false", "train:", "  global_batch_size: 8",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def bridge(shared, tmp_path_factory):
    """A run of Bridge's layout, made of one that Megatron-LM 0.16.1 wrote."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    run = tmp_path_factory.mktemp("bridge") / "run"
    shutil.copytree(shared / "real" / "llama_tp2_trained_bf16" / "mcore", run)
    made = next(p for p in run.iterdir() if p.is_dir())
    common = torch.load(made / "common.pt", weights_only=False)
    args = common.pop("args")
    torch.save(common, made / "common.pt")
    (made / "run_config.yaml").write_text(run_config(args))
    counters = {"step": 5, "consumed_train_samples": args.consumed_train_samples, "skipped_train_samples": 0, "consumed_valid_samples": 0}
    state = {name: torch.tensor(value, dtype=torch.int64) for name, value in counters.items()}
    state |= {"floating_point_operations_so_far": torch.tensor(1.0), "do_train": torch.tensor(True)}
    torch.save(state, made / "train_state.pt")
    torch.save(state, run / "latest_train_state.pt")
    return run, made, args


def test_entries_of_a_block_are_read_as_plain_values_and_nothing_of_what_lies_deeper(bridge):
    model = read_block(str(bridge[1]), "model")
    assert model["num_layers"] == bridge[2].num_layers != 99 and model["recompute_modules"] == ["core_attn"]
    assert model["activation_func"] == "torch.nn.functional.silu" and model["init_method"] == "torch.nn.init.normal_"
    assert model["num_moe_experts"] is None and model["gated_linear_unit"] is True and "config_dict" not in model
    assert read_block(str(bridge[1]), "nvrx_straggler") == {} == read_block(str(bridge[1]), "nothing")


def test_the_arguments_are_those_that_megatron_would_have_stored(bridge):
    found, args = read_arguments(str(bridge[1])), bridge[2]
    for name in (*SAME, "swiglu", "group_query_attention", "untie_embeddings_and_output_weights", "consumed_train_samples"):
        assert found[name] == getattr(args, name), name
    assert found["params_dtype"] == "bfloat16" and found["iteration"] == 5 and found["num_experts"] is None


def test_the_model_comes_out_as_the_tensors_it_was_made_from(run_ckpt, bridge, shared, tmp_path):
    from safetensors.torch import load_file

    done = run_ckpt("convert", bridge[0], tmp_path / "hf", "--to", "hf")
    assert done.rc == 0 and "run_config.yaml" in done.err, done.err
    expected = load_file(shared / "real" / "llama_tp2_trained_bf16" / "expected.safetensors")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == expected.keys() and all((found[n] == t).all() for n, t in expected.items())


def test_validate_and_inspect_know_how_far_the_run_is(run_ckpt, bridge):
    assert open_checkpoint(bridge[0]).args["consumed_train_samples"] == bridge[2].consumed_train_samples
    done = run_ckpt("validate", bridge[0], "--resume", "--json")
    assert done.rc == 0 and not [f for f in json.loads(done.out)["findings"] if f["code"].startswith("V7") and f["severity"] == "error"], done.out


@pytest.mark.slow
def test_a_run_of_bridge_continues(run_ckpt, bridge):
    done = run_ckpt("verify-resume", bridge[0], "--tp", "2", "--steps", "2", "--via", "hf", "--json")
    answer = json.loads(done.out)
    assert done.rc == 0 and answer["same"] and answer["exact"] and answer["iterations"] == {"start": 5, "saved": 6, "end": 7}, answer


def test_without_any_arguments_the_config_kept_with_the_checkpoint_is_taken(run_ckpt, bridge, shared, tmp_path):
    from safetensors.torch import load_file

    real = shared / "real" / "llama_tp2_trained_bf16"
    shutil.copytree(bridge[0], tmp_path / "run")
    made = tmp_path / "run" / bridge[1].name
    (made / "run_config.yaml").unlink()
    done = run_ckpt("convert", tmp_path / "run", tmp_path / "never", "--to", "torch_dist")
    assert done.rc == 2 and "E306" in done.err and "--hf-config" in done.err
    (made / "hf").mkdir()
    shutil.copy(real / "config.json", made / "hf")
    done = run_ckpt("convert", tmp_path / "run", tmp_path / "other", "--to", "torch_dist", "--tp", "4", "--verify")
    assert done.rc == 0 and "config.json kept with it" in done.err, done.err
    done = run_ckpt("convert", tmp_path / "other", tmp_path / "hf", "--to", "hf")
    expected = load_file(real / "expected.safetensors")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert done.rc == 0 and all((found[n] == t).all() for n, t in expected.items())


def test_a_file_of_other_things_gives_no_arguments(tmp_path):
    (tmp_path / "run_config.yaml").write_text("model: {}\npeft: null\n")
    assert read_arguments(str(tmp_path)) is None
    (tmp_path / "run_config.yaml").write_bytes(b"\xff\x00model:\n  num_layers: [\n")
    assert read_arguments(str(tmp_path)) is None
