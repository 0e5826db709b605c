"""run_config.yaml, which Megatron-Bridge keeps in an iteration folder in place of Megatron-LM's `args`: read as text, nothing is built.

The file is what a YAML writer makes of plain dataclasses: blocks at the left edge, their entries two spaces in. An object is written as
`_target_: its.path` with its arguments below. Source: a run of Megatron-Bridge whose log shows the whole file; training/config.py,
utils/checkpoint_utils.py.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ..source_files import opened
from .pickle_values import Namespace, TensorRef
from .torch_zip import open_torch_file

NAME = "run_config.yaml"
LIMIT = 4 * 2**20  # bytes; a real one has some 20 kB
_STATE = "train_state.pt"
_COUNTERS = {"step": "iteration", "consumed_train_samples": "consumed_train_samples", "consumed_valid_samples": "consumed_valid_samples",
             "skipped_train_samples": "skipped_train_samples"}  # fmt: skip
_ENTRY = re.compile(r"^  (?P<name>[A-Za-z_]\w*):[ \t]*(?P<value>.*?)[ \t]*$", re.M)
_ITEM = re.compile(r"^  (?:  )?- (.*?)[ \t]*$", re.M)
_TARGET = re.compile(r"^    _target_:[ \t]*(\S+)[ \t]*$", re.M)
_WORDS = {"null": None, "~": None, "": None, "true": True, "false": False}
# Bridge's name -> Megatron-LM's argument
_RENAMED = {
    "num_moe_experts": "num_experts",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}
_ACTIVATIONS = {"silu": "swiglu", "quick_gelu": "quick_geglu"}


class Target(str):
    """What an object of the file is: the `_target_` it was written with."""

    __slots__ = ()


def read_block(directory: str, name: str) -> dict[str, Any]:
    """The entries of one block: plain values, lists of them, and of an object its Target; {} without the file or the block."""
    path = os.path.join(directory, NAME)
    if not os.path.exists(path):
        return {}
    with opened(path) as file:
        text = file.read(LIMIT).decode("utf-8", "replace")
    block = re.search(rf"^{re.escape(name)}:[ \t]*\n((?:[ \t]+.*\n?|- .*\n?|\n)*)", text, re.M)
    if block is None:
        return {}
    entries = list(_ENTRY.finditer(block[1]))
    ends = [entry.start() for entry in entries[1:]] + [len(block[1])]
    return {entry["name"]: _value(entry["value"], block[1][entry.end() : end]) for entry, end in zip(entries, ends, strict=True)}


def _value(text: str, below: str) -> Any:
    if text == "" and (target := _TARGET.search(below)):
        return Target(target[1])
    if text == "" and (items := _ITEM.findall(below)):
        return [_plain(item) for item in items]
    return _plain(text)


def _plain(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def read_arguments(directory: str) -> Namespace | None:
    """Megatron-LM's arguments for what the `model` block describes, with the counters of train_state.pt; None when it describes none."""
    model = read_block(directory, "model")
    if not isinstance(model.get("num_layers"), int) or not isinstance(model.get("hidden_size"), int):
        return None
    args = {_RENAMED.get(n, n): value for n, value in model.items() if not n.startswith("_") and not isinstance(value, Target)}
    function = str(model.get("activation_func") or "").rpartition(".")[2]
    if model.get("gated_linear_unit") and function in _ACTIVATIONS:
        args["swiglu"] = False
        args[_ACTIVATIONS[function]] = True
    else:
        args |= {"swiglu": False, "squared_relu": function == "squared_relu", "activation_func": function or None}
    heads, groups = model.get("num_attention_heads"), model.get("num_query_groups")
    args["group_query_attention"] = groups is not None and groups != heads
    args["untie_embeddings_and_output_weights"] = not model.get("share_embeddings_and_output_weights", True)
    args["max_position_embeddings"] = model.get("seq_length")
    if model.get("scale_factor") and model.get("low_freq_factor"):  # Llama 3.1's provider
        args |= {"use_rope_scaling": True, "rope_scaling_factor": float(model["scale_factor"])}
    dtype = str(model.get("params_dtype") or "").rpartition(".")[2]
    args["params_dtype"] = dtype or ("bfloat16" if model.get("bf16") else "float32")
    optimizer = read_block(directory, "optimizer")
    args["use_distributed_optimizer"] = bool(optimizer.get("use_distributed_optimizer"))
    args["data_parallel_random_init"] = bool(read_block(directory, "rng").get("data_parallel_random_init"))
    args["global_batch_size"] = read_block(directory, "train").get("global_batch_size")
    return Namespace({**args, **read_counters(directory)})


def read_counters(directory: str) -> dict[str, int]:
    """How far the run is, from train_state.pt: scalar tensors by name. Errors: E203, E204 a damaged file."""
    path = os.path.join(directory, _STATE)
    if not os.path.exists(path):
        return {}
    file = open_torch_file(path)
    held = file.value if isinstance(file.value, dict) else {}
    found = {}
    for name, argument in _COUNTERS.items():
        value = held.get(name)
        if isinstance(value, TensorRef) and value.shape in ((), (1,)) and value.dtype in ("int32", "int64"):
            value = int.from_bytes(file.read(value), "little", signed=True)
        if isinstance(value, int) and not isinstance(value, bool):
            found[argument] = value
    return found
