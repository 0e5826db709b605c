"""Names of Megatron's tensors that more than one module knows: vocabulary tables, the forms of experts, names in a rank's own file."""

from __future__ import annotations

import re

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
TABLES = (EMBEDDING, HEAD, "output_layer.bias")  # what has a row for each symbol of the padded vocabulary

# How the legacy format stores experts, and in which order the optimizer counts them
TE_GROUPED = "te_grouped"  # linear_fc1.weight0, weight1, ..., then linear_fc2.weight0, ... (TEGroupedMLP)
SEQUENTIAL = "sequential"  # expert by expert, fc1 then fc2 (SequentialMLP)
GROUPED = "grouped"  # two tensors weight1 / weight2 with the transposed experts side by side (GroupedMLP, until 0.16)

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# An adapter's factor within a module: of Megatron-Bridge and NeMo, and of ms-swift
FACTOR = r"(?:adapter\.(?:adapter_[a-z]+\.)?linear_(?:in|out)|lora_[AB](?:\.default)?)"
EXPERT = re.compile(rf"^(?P<head>.*mlp\.experts\.)(?P<tail>linear_fc[12]\.(?:{FACTOR}\.)?(?:weight|bias))(?P<expert>\d+)$")  # canonical
RANK_EXPERT = re.compile(
    r"^(?P<head>.*mlp\.experts\.)(?:local_experts\.(?P<seq>\d+)\.(?P<tail>linear_fc[12]\.(?:weight|bias))"
    r"|(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<number>\d+))$"
)


def bare_name(name: str) -> str:
    """A name in a rank's file without the `module.` of wrappers, prediction layers called as megatron-core calls them today."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name.replace(".mtp_model_layer.", ".transformer_layer.") if name.startswith("mtp.") else name
