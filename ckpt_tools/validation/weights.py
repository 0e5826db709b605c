"""Checks of the weights without reading them: are they there, their names, shapes and dtypes, and config against state."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ..adapters.megatron import other_factor
from ..dtypes import ALIASES, DTYPES
from ..errors import CkptError, nearest
from ..families import FAMILIES
from ..families.config import args_from_config
from ..families.config_kinds import same
from ..formats.torch_legacy import Legacy
from ..model_names import EMBEDDING, HEAD
from .finding import Problem
from .model import Model
from .subject import Subject

SOME = 20  # tensors told one by one; the rest as a number
_DIGITS = re.compile(r"\d+")
_LAYER = re.compile(r"layers\.(\d+)\.")
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_experts",
         "rotary_base", "untie_embeddings_and_output_weights")  # fmt: skip


def no_weights(subject: Subject) -> Iterator[Problem]:
    """A checkpoint without weights anywhere, judged by what lies beside it."""
    place = subject.location
    if place is None or place.format == "peft" or os.path.isfile(place.directory):
        return
    if subject.state is None and subject.hf_directory is None:
        return
    if subject.state is None and place.format != "hf":
        return  # it could not be opened; another check tells why
    if not subject.weights_in_state and not (subject.hf is not None and subject.hf.tensors) and not subject.errors:
        keys = {str(k) for k in subject.common} | {n.partition(".")[0] for n in (subject.state.tensors if subject.state else ())}
        keys |= {o.key.partition(".")[0] for o in subject.state.objects.values()} if subject.state else set()
        optimizer_only = any(n.startswith(("optimizer", "chained")) for n in keys)
        yield Problem(
            "there are no model weights in it" + (", only optimizer state: the weights must lie elsewhere" if optimizer_only else ""),
            subject.directory,
            found=", ".join(sorted(keys)[:20]) or "nothing",
            # a shard of a larger checkpoint may hold the optimizer alone; training cannot go on from it
            severity="info" if optimizer_only and place.format != "torch" and not subject.resume else "",
        )


def no_tensors(subject: Subject) -> Iterator[Problem]:
    """safetensors files that hold no tensor: legal, and rarely meant."""
    for name, header in subject.headers.items():
        if not header.tensors:
            yield Problem("the file holds no tensor", subject.shards[name])


def adapter(subject: Subject) -> Iterator[Problem]:
    """A PEFT adapter: its config, and both factors of every pair, which an adapter in Megatron's modules must have too."""
    for model in subject.models:
        for name in model.factors:
            if other_factor(name) not in model.factors:
                yield Problem("one factor of a low-rank pair is missing", model.where, other_factor(name))
    if subject.location is None or subject.location.format != "peft" or os.path.isfile(subject.directory):
        return
    if "adapter_config.json" not in subject.names:
        yield Problem("there is no adapter_config.json beside the adapter's weights", subject.directory)
    held = {n for header in subject.headers.values() for n in header.tensors}
    for name in sorted(held):
        for one, other in ((".lora_A.", ".lora_B."), (".lora_B.", ".lora_A.")):
            if one in name and name.replace(one, other) not in held:
                yield Problem("one factor of a low-rank pair is missing", subject.directory, name.replace(one, other))


def missing(subject: Subject) -> Iterator[Problem]:
    """Tensors that the family of the model needs."""
    for model in subject.models:
        yield from _some(
            [_lacking(model, n) for n in model.missing],
            model,
            f"tensors of a {model.family.name if model.family else ''} model are missing",
        )


def _lacking(model: Model, name: str) -> Problem:
    near = nearest(name, model.unexpected or model.tensors, 1)
    return Problem("a tensor of the model is missing", model.where, name, found=f"nearest: {near[0]}" if near else "")


def unexpected(subject: Subject) -> Iterator[Problem]:
    """Tensors that the family does not know."""
    for model in subject.models:
        name = model.family.name if model.family else ""
        severity = "warning" if model.inferred else ""
        told = "the family was told from the tensors" if model.inferred else ""
        made = [
            Problem(f"a tensor is unknown to the family {name}", model.where, n, found=told, severity=severity) for n in model.unexpected
        ]
        yield from _some(made, model, f"tensors are unknown to the family {name}", severity)


def unknown_family(subject: Subject) -> Iterator[Problem]:
    """Names and shapes that could not be checked."""
    for model in subject.models:
        if model.unknown and not model.errors:
            yield Problem(
                f"names and shapes were not checked: {model.unknown}",
                model.where,
                expected=f"one of the {len(FAMILIES)} families that `ckpt families` lists",
            )


def assumed(subject: Subject) -> Iterator[Problem]:
    """What had to be assumed about the model: prediction layers that the config counts and nobody stored."""
    for model in subject.models:
        for text in model.remarks:
            yield Problem(text, model.where)


def layer_holes(subject: Subject) -> Iterator[Problem]:
    """Layers that lack what the others have, told without knowing the family."""
    for model in subject.models:
        if not model.unknown or model.factors:
            continue
        layers: dict[int, set[str]] = {}
        for name in model.tensors:
            match = _LAYER.search(name)
            if match and int(match[1]) < 2**20:
                layers.setdefault(int(match[1]), set()).add(name[match.end() :])
        if layers and set(layers) != set(range(max(layers) + 1)):
            lost = sorted(set(range(max(layers) + 1)) - set(layers))
            yield Problem("the numbers of the layers have holes", model.where, found=f"no layer {', '.join(map(str, lost[:8]))}")
        for layer, names in sorted(layers.items()):
            alike = [other for number, other in layers.items() if number != layer]
            if len(alike) < 2 or any(not names < other for other in alike):
                continue  # it has something of its own: another kind of layer, such as a dense one before layers with experts
            for name in sorted(set.intersection(*alike) - names):
                yield Problem("a layer lacks a tensor that every other layer has", model.where, f"layers.{layer}.{name}")


def shapes(subject: Subject) -> Iterator[Problem]:
    """Shapes against the sizes that the config or the arguments give."""
    for model in subject.models:
        made = [
            Problem("a tensor has not the shape that the model's sizes give it", model.where, n, str(list(expected)), str(list(found)))
            for n, expected, found in model.misshapen
        ]
        yield from _some(made, model, "tensors have the wrong shape")


def vocabulary(subject: Subject) -> Iterator[Problem]:
    """Rows of the vocabulary tables against the vocabulary, and against each other."""
    for model in subject.models:
        if model.side != "mcore" or model.dims is None:
            continue
        rows = {n: t.global_shape[0] for n, t in model.tensors.items() if n in (EMBEDDING, HEAD) and t.global_shape}
        stored = subject.state.args if subject.state is not None else None
        vocab = (stored or {}).get("vocab_size")
        if len(set(rows.values())) > 1:
            yield Problem("embedding and head have different numbers of rows", model.where, HEAD, str(rows[EMBEDDING]), str(rows[HEAD]))
        if isinstance(vocab, int) and rows and min(rows.values()) < vocab:
            yield Problem(
                "the vocabulary table has fewer rows than the vocabulary", model.where, min(rows), f"{vocab}", f"{min(rows.values())}"
            )


def config_against_args(subject: Subject) -> Iterator[Problem]:
    """config.json beside Megatron's state against the arguments stored in it."""
    config, args = subject.config, subject.state.args if subject.state is not None else None
    model = next((m for m in subject.models if m.side == "hf"), None)
    if config is None or args is None or model is None or model.family is None:
        return
    try:
        told, _ = args_from_config(config, model.family.rules, allow_unrepresentable=True)
    except CkptError:
        return
    for name in SIZES:
        x, y = told.get(name), args.get(name)
        if x is not None and y is not None and not same(x, y):
            yield Problem(
                f"config.json and Megatron's arguments disagree about {name}",
                subject.directory,
                expected=f"{x} (config.json)",
                found=f"{y}",
            )


def no_config(subject: Subject) -> Iterator[Problem]:
    """Weights that nobody can build a model for."""
    place = subject.hf_directory
    if place is not None and os.path.isfile(place):
        return
    if (
        place is not None
        and subject.headers
        and subject.config is None
        and not any("config.json" in (e.where or "") for e in subject.errors)
    ):
        yield Problem("there is no config.json beside the weights", place)


def mixed_dtypes(subject: Subject) -> Iterator[Problem]:
    """One kind of tensor in several dtypes: layers that were converted differently."""
    for model in subject.models:
        if model.quantised:
            continue  # not every layer is
        kinds: dict[str, dict[str, list[str]]] = {}
        for name, tensor in model.tensors.items():
            kinds.setdefault(_DIGITS.sub("*", name), {}).setdefault(tensor.dtype, []).append(name)
        for found in kinds.values():
            if len(found) > 1:
                usual = max(found, key=lambda d: len(found[d]))
                for kind, names in found.items():
                    if kind != usual:
                        yield from _some(
                            [Problem("has another dtype than the same tensor in other layers", model.where, n, usual, kind) for n in names],
                            model,
                            "tensors have another dtype than in other layers",
                        )


def joined_dtypes(subject: Subject) -> Iterator[Problem]:
    """q, k and v, or gate and up, in different dtypes: Megatron holds them in one tensor."""
    from ..families.family import expand

    for model in subject.models:
        if model.quantised:
            continue  # not every layer is
        if model.side != "hf" or model.family is None or model.dims is None or model.unknown:
            continue
        for binding in expand(model.family, model.dims):
            found = {model.tensors[n].dtype: n for n in binding.hf if n in model.tensors}
            if len(found) > 1:
                told = ", ".join(f"{n} {d}" for d, n in found.items())
                yield Problem("tensors that make up one Megatron tensor have different dtypes", model.where, binding.hf[0], found=told)


def several_dtypes(subject: Subject) -> Iterator[Problem]:
    """Weights in more than one dtype; often meant (norms, routers, quantised weights)."""
    for model in subject.models:
        count: dict[str, int] = {}
        for tensor in model.tensors.values():
            count[tensor.dtype] = count.get(tensor.dtype, 0) + 1
        if len(count) > 1:
            told = ", ".join(f"{n} {d}" for d, n in sorted(count.items(), key=lambda c: -c[1]))
            yield Problem("the weights have several dtypes", model.where, found=told)


def router_bias(subject: Subject) -> Iterator[Problem]:
    """Biases that choose experts, rounded: 6.8, 6.801, ... become one number in bfloat16."""
    for model in subject.models:
        for name, tensor in model.tensors.items():
            if name.endswith(("router.expert_bias", "gate.e_score_correction_bias")) and DTYPES[tensor.dtype].bits < 32:
                yield Problem("the bias that chooses experts is not float32", model.where, name, "float32", tensor.dtype)


def config_dtype(subject: Subject) -> Iterator[Problem]:
    """The dtype that config.json states against the weights."""
    config = subject.config
    model = next((m for m in subject.models if m.side == "hf"), None)
    if config is None or model is None or not model.tensors or config.get("quantization_config"):
        return
    said = [str(config[k]).removeprefix("torch.") for k in ("dtype", "torch_dtype") if isinstance(config.get(k), str)]
    size: dict[str, int] = {}
    for tensor in model.tensors.values():
        size[tensor.dtype] = size.get(tensor.dtype, 0) + tensor.nbytes
    most = max(size, key=lambda d: size[d])
    for name in dict.fromkeys(ALIASES.get(s, s) for s in said):
        if name in DTYPES and name != most:
            yield Problem("config.json states another dtype than the weights have", model.where, expected=most, found=name)


def quantised_left_over(subject: Subject) -> Iterator[Problem]:
    """A quantization_config without quantised weights, or scales without one."""
    config = subject.config
    model = next((m for m in subject.models if m.side == "hf"), None)
    if config is None or model is None or not model.tensors:
        return
    quantised = config.get("quantization_config")
    narrow = any(DTYPES[t.dtype].bits <= 8 for t in model.tensors.values())
    scales = [n for n in model.tensors if n.endswith(("weight_scale_inv", "weight_scale", "_blocks", "_scales", "qweight", "absmax"))]
    if quantised and not narrow and not scales:
        yield Problem("config.json has a quantization_config, and no tensor is quantised", model.where)
    if scales and not quantised:
        yield Problem("there are scales of quantised weights, and config.json has no quantization_config", model.where, scales[0])


def legacy_layout(subject: Subject) -> Iterator[Problem]:
    """Arguments in the rank files against the ranks that are there."""
    details = subject.state.details if subject.state is not None else None
    if not isinstance(details, Legacy):
        return
    for rank in details.ranks:
        args = rank.file.value.get("args")
        first = details.ranks[0].file.value.get("iteration")
        if rank.file.value.get("iteration") != first:
            found = f"{rank.file.value.get('iteration')!r}"
            yield Problem("rank files are of different iterations", rank.file.path, expected=f"{first!r}", found=found)
        if isinstance(args, dict):
            for name in ("num_layers", "hidden_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"):
                mine, usual = args.get(name), (details.common.get("args") or {}).get(name)
                if mine != usual:
                    yield Problem(f"rank files disagree about {name}", rank.file.path, expected=f"{usual!r}", found=f"{mine!r}")


def _some(problems: list[Problem], model: Model, what: str, severity: str = "") -> Iterator[Problem]:
    yield from problems[:SOME]
    if len(problems) > SOME:
        yield Problem(f"{len(problems) - SOME} more {what}", model.where, severity=severity)
