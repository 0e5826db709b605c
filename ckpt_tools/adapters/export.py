"""Planning a PEFT adapter folder: the factors as adapter_model.safetensors, and the config that gives them their scale."""

from __future__ import annotations

import json

from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..formats.safetensors import layout_file
from ..hf_template import find_template
from ..notes import Note
from ..options import ConvertOptions
from ..planning import Placement, Plan, TargetFile, build_moves
from ..tensors import whole
from .megatron import holds_adapter, open_megatron_adapter
from .peft import CONFIG, WEIGHTS, Adapter


def plan_peft(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """The plan that writes a Megatron adapter as a PEFT folder. Errors as adapter_of."""
    return _plan(checkpoint, adapter_of(checkpoint, options), options)


def adapter_of(checkpoint: Checkpoint, options: ConvertOptions) -> Adapter:
    """The adapter in a Megatron checkpoint. E306 without the base model's config, errors of open_megatron_adapter."""
    if not holds_adapter(checkpoint.weights):
        raise CkptError(
            "E543",
            "there is no adapter in this checkpoint",
            where=checkpoint.location.directory,
            expected="MODULE.adapter.linear_in, or MODULE.lora_A",
            found=next(iter(checkpoint.weights), "no weights"),
        )
    template = find_template(checkpoint, options)
    if template.config is None:
        raise CkptError(
            "E306",
            "the base model's config is needed to name the adapter's modules",
            where=checkpoint.location.directory,
            hint="give the HF folder of the base with --hf-config DIR",
        )
    return open_megatron_adapter(checkpoint, template.config, alpha=options.lora_alpha, family=options.family)


def _plan(checkpoint: Checkpoint, adapter: Adapter, options: ConvertOptions) -> Plan:
    laid = layout_file([(n, t.dtype, t.global_shape) for n, t in adapter.tensors.items()], {"format": "pt"})
    config = (json.dumps(adapter.config, indent=2, sort_keys=True) + "\n").encode()
    placements = [Placement(n, *whole(t.global_shape), 0, laid.places[n][0], t.dtype) for n, t in adapter.tensors.items()]
    builder = build_moves(adapter.tensors, placements)
    location = checkpoint.location
    shared = len({id(p.a) for p in adapter.pairs.values()})
    notes = [
        Note("config", "", f"r {adapter.config['r']}, lora_alpha {adapter.config['lora_alpha']}: check that the run was trained with it"),
        Note("dropped", "training state", "optimizer, schedule and counters: an adapter folder has no place for them"),
    ]
    if shared < len(adapter.pairs):
        notes.append(
            Note("kept", "lora_A", f"{len(adapter.pairs)} modules share {shared} first factors, which are repeated: Megatron fuses them")
        )
    return Plan(
        {"path": location.directory, "format": checkpoint.format, "iteration": location.label, "chosen": location.chosen},
        {"format": "peft", "modules": len(adapter.pairs), "r": adapter.config["r"], "lora_alpha": adapter.config["lora_alpha"]},
        builder.sources(),
        (TargetFile(WEIGHTS, laid.size, ((0, laid.header),)), TargetFile(CONFIG, len(config), ((0, config),))),
        (),
        tuple(builder.moves),
        tuple(notes),
        len(placements),
        options.buffer,
    )
