"""The summary of `ckpt inspect`: the same facts as lines for people, as key and value pairs, and as JSON."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ..adapters.facts import AdapterFacts
from ..inspection.overview import Inspection, Share
from ..inspection.tensors import span
from .output import human_bytes, sanitize

WIDTH = 100  # columns that lines for people are broken at, on wider terminals too
KEY_WIDTH = 15
FORMAT_NAMES = {
    "hf": "Hugging Face safetensors",
    "torch_dist": "torch_dist (Megatron-Core distributed)",
    "torch_dcp": "torch_dcp (plain torch.distributed.checkpoint)",
    "torch": "torch (Megatron legacy, one file per rank)",
    "peft": "PEFT adapter",
    "state": "Megatron state (common.pt) beside safetensors weights",
}
_USUAL = {"vpp": 1, "cp": 1, "ep": 1, "etp": 1}  # not worth showing


# ---- JSON ---------------------------------------------------------------------------------------------------------------------------


def document(found: Inspection) -> dict[str, Any]:
    """The facts as JSON values, without "schema"; iteration is a number, "release" or null."""
    place, writer, model = found.location, found.writer, found.model
    return {
        "format": found.format,
        "iteration": place.iteration if place.iteration is not None else place.label,
        "parameters": found.weights.parameters,
        "bytes": found.weights.nbytes,
        "source": {
            "given": place.given,
            "root": place.root,
            "directory": place.directory,
            "chosen": place.chosen,
            "weights_beside": place.weights,
            "producer": place.producer,
        },
        "iterations": [plain_fields(c) for c in place.candidates],
        "weights": _share(found.weights) | {"padding_parameters": model.padding if model else 0},
        "copies": [_share(c) for c in found.copies],
        "wasted_bytes": found.wasted_bytes,
        "model": None
        if model is None
        else {"source": model.source, "family": model.family, "why": model.why, "sizes": _finite(model.sizes)},
        "writer": {
            "software": writer.software,
            "clues": list(writer.clues),
            "layout": _finite(writer.layout),
            "layout_from": writer.layout_from,
            "files": writer.files,
            "file_bytes": writer.file_bytes,
            "ranks": writer.ranks,
        },
        "optimizer": plain_fields(found.optimizer),
        "rng": {"objects": found.rest.rng_objects, "grid": list(found.rest.rng_grid)},
        "scheduler": _finite(found.rest.scheduler),
        "progress": _finite(found.rest.progress),
        "extra_state": found.extra_state,
        "tree": [plain_fields(k) | {"numbers": span(k.numbers), "parameters": k.parameters, "bytes": k.nbytes} for k in found.kinds],
        "adapter": None if found.adapter is None else plain_fields(found.adapter),
        "warnings": list(found.warnings),
    }


def plain_fields(record: Any) -> dict[str, Any]:
    """The fields of a flat dataclass for JSON: tuples as lists, `nbytes` called "bytes"."""
    fields = ((f, getattr(record, f)) for f in record.__dataclass_fields__)
    return {"bytes" if name == "nbytes" else name: list(v) if isinstance(v, tuple) else v for name, v in fields}


def _share(share: Share) -> dict[str, Any]:
    return plain_fields(share) | {"dtypes": [plain_fields(d) for d in share.dtypes]}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON cannot hold (nan, inf) as text."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and (value != value or abs(value) == float("inf")):
            return repr(value)
        return [clean(v) for v in value] if isinstance(value, list | tuple) else value

    return {str(k): clean(v) for k, v in values.items()}


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The JSON facts as pairs: `weights.parameters` and its value; items of a list are numbered."""
    pairs: list[tuple[str, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        name = f"{prefix}{key}"
        if isinstance(inner, dict) or (isinstance(inner, list) and any(isinstance(v, dict | str) for v in inner)):
            pairs += flat(inner, f"{name}.")
        elif inner is not None and inner != []:
            pairs.append((name, inner))
    return pairs


# ---- for people ---------------------------------------------------------------------------------------------------------------------


def people(found: Inspection, *, wrapped: bool) -> list[tuple[str, str]]:
    """(heading, line) pairs; an empty heading continues the one above. wrapped: break lines at the width of the terminal."""
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) - KEY_WIDTH if wrapped else 10**6
    pairs: list[tuple[str, str]] = []
    for heading, lines in _facts(found):
        texts = [t for line in lines if line for t in textwrap.wrap(sanitize(line), max(width, 30), break_on_hyphens=False) or [""]]
        pairs += [(heading if i == 0 else "", text) for i, text in enumerate(texts)]
    return pairs


def _facts(found: Inspection) -> Iterator[tuple[str, list[str]]]:
    place = found.location
    yield "checkpoint", [place.directory]
    split = " and safetensors weights beside it" if found.format == "torch_dist" and found.weights.format == "hf" else ""
    yield "format", [FORMAT_NAMES.get(found.format, found.format) + split + (f", laid out by {place.producer}" if place.producer else "")]
    if place.label is not None or place.candidates:
        yield "iteration", [f"{place.label}: {place.chosen}" if place.label else place.chosen]
    yield "also there", _others(found)
    yield "written by", _written_by(found)
    yield ("layout" if found.writer.layout else "files"), [_layout(found)]
    if found.adapter is not None:
        yield "adapter", _adapter(found.adapter)
    else:
        yield "model", _model(found)
    yield "weights", _weights(found)
    if found.copies:
        stored = " and ".join(f"as {_short_name(c.format)} in {c.directory} ({human_bytes(c.nbytes)})" for c in found.copies)
        yield "stored twice", [f"{stored}: {human_bytes(found.wasted_bytes)} wasted; the copies were not compared"]
    if found.format not in ("hf", "peft"):
        yield "optimizer", _optimizer(found)
        yield "random states", [_random(found)]
        yield "scheduler", [_scheduler(found.rest.scheduler)]
        yield "progress", [_progress(found.rest.progress)]
        yield "extra state", [f"{found.extra_state} _extra_state entries, which are not weights" if found.extra_state else ""]


def _adapter(facts: AdapterFacts) -> list[str]:
    scale = "" if facts.r is None or facts.alpha is None else f", scale alpha / {'sqrt(r)' if facts.rslora else 'r'}"
    lines = [f"{facts.method}, r {facts.r}, alpha {facts.alpha}{scale}", f"changes {facts.modules} modules: {', '.join(facts.targets)}"]
    if facts.saved:
        lines.append(f"stores {len(facts.saved)} tensors whole: {', '.join(facts.saved[:4])}{', ...' if len(facts.saved) > 4 else ''}")
    lines.append(f"for {facts.base}" if facts.base else "")
    return [*lines, f"ckpt merge refuses it: {facts.not_plain}" if facts.not_plain else ""]


def _short_name(format: str) -> str:
    return "safetensors" if format == "hf" else format


def _others(found: Inspection) -> list[str]:
    others = [c for c in found.location.candidates if c.path != found.location.directory and c.label != found.location.label]
    texts = [c.label if c.complete else f"{c.label} (incomplete: {', '.join(c.missing) or 'not recognised'})" for c in others]
    if len(texts) > 12:
        texts = [*texts[:4], f"... {len(texts) - 10} more ...", *texts[-6:]]
    return [", ".join(texts)]


def _written_by(found: Inspection) -> list[str]:
    writer = found.writer
    if writer.software is None:
        return ["unknown" + (f" ({', '.join(writer.clues)})" if writer.clues else "")] if found.format != "hf" or writer.clues else []
    return [f"{writer.software} ({', '.join(writer.clues)})"]


def _layout(found: Inspection) -> str:
    writer, layout = found.writer, found.writer.layout
    sizes = [f"{n} {layout[n]}" for n in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp") if n in layout and layout[n] != _USUAL.get(n)]
    if layout.get("etp") == layout.get("tp"):
        sizes = [text for text in sizes if not text.startswith("etp")]
    more = [f"{n.replace('_', ' ')} {layout[n]}" for n in ("first_stage_layers", "last_stage_layers", "pipeline_layout") if n in layout]
    if layout.get("sequence_parallel"):
        more.append("sequence parallel")
    if "world_size" in layout:
        more.append(f"world size {layout['world_size']}")
    if writer.layout_from == "rng_state":
        more.append("told by the grid of random states")
    files = f"{writer.files} file{'s' * (writer.files != 1)}, {human_bytes(writer.file_bytes)}" if writer.files else ""
    if writer.ranks and writer.ranks != writer.files:
        files += f", by {writer.ranks} rank{'s' * (writer.ranks != 1)}"
    return "; ".join(t for t in (", ".join(sizes + more), files) if t)


def _model(found: Inspection) -> list[str]:
    model = found.model
    if model is None:
        return []
    sizes = dict(model.sizes)

    def take(name: str, form: str) -> str:
        value = sizes.pop(name, None)
        return "" if value is None or value == "" else form.format(_figure(value))

    shape = [take("layers", "{} layers"), take("hidden", "hidden {}"), take("heads", "{} heads"), take("kv_groups", "{} kv groups")]
    shape += [take("head_dim", "head dim {}"), take("ffn", "ffn {}"), take("activation", "{}")]
    experts = [take("experts", "{} experts"), take("experts_per_token", "{} per token"), take("expert_ffn", "expert ffn {}")]
    experts += [take("shared_experts", "{} shared"), take("shared_expert_ffn", "shared ffn {}")]
    vocab, padded = sizes.pop("vocab", None), sizes.pop("padded_vocab", None)
    words = [f"vocab {vocab}" if vocab is not None else "", f"padded to {padded}" if padded not in (None, vocab) else ""]
    tied = sizes.pop("tied", None)
    words += [{True: "tied embeddings", False: "untied embeddings"}.get(tied, "") if isinstance(tied, bool) else ""]
    words += [take("max_positions", "{} positions"), take("rope_base", "rope base {}"), take("rope_type", "{} rope scaling")]
    words += [take("rope_factor", "factor {}"), take("rope_scaling_factor", "rope scaling factor {}"), take("sliding_window", "window {}")]
    words += [" ".join(t for t in (take("normalization", "{}"), take("norm_epsilon", "epsilon {}")) if t)]
    words += [take("config_dtype", "dtype {} in the config")]
    words += [f"{name.replace('_', ' ')} {_figure(value)}" for name, value in sizes.items()]
    told = {"args": "Megatron's arguments", "config.json": "config.json", "shapes": "shapes alone"}[model.source]
    first = f"{model.family or 'family unknown'} ({model.why})"
    return [f"{first}; from {told}", *(", ".join(t for t in line if t) for line in (shape, experts, words))]


def _weights(found: Inspection) -> list[str]:
    share = found.weights
    if not share.tensors:
        return ["none"]
    count = f"{share.parameters:,} parameters" + (f" ({_short(share.parameters)})" if share.parameters >= 10**6 else "")
    padding = found.model.padding if found.model else 0
    if padding:
        count += f", {padding:,} of them only pad the vocabulary"
    where = "" if share.directory == found.location.directory else f", safetensors in {share.directory}"
    tensors = f"{share.tensors:,} tensor{'s' * (share.tensors != 1)}"
    if len(share.dtypes) == 1:
        return [count, f"{human_bytes(share.nbytes)} in {tensors}, all {share.dtypes[0].dtype}{where}"]
    kinds = ", ".join(f"{d.dtype} {human_bytes(d.nbytes)} ({d.tensors:,})" for d in share.dtypes)
    return [count, f"{human_bytes(share.nbytes)} in {tensors}{where}", kinds]


def _short(count: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return str(count)


def _optimizer(found: Inspection) -> list[str]:
    state = found.optimizer
    if state.kind == "none":
        return ["none"]
    counted = f"{state.tensors} tensor{'s' * (state.tensors != 1)}, {human_bytes(state.nbytes)}"
    states = f": {', '.join(state.states)}" if state.states else ""
    step = f", step {state.step}" if state.step is not None else ""
    verdict = {True: "can be resharded", False: "cannot be resharded to another tp, pp or ep", None: "unknown whether it can be resharded"}
    return [f"{state.name}{states}", f"{counted}{step}", f"{verdict[state.reshardable]} ({state.why})"]


def _random(found: Inspection) -> str:
    if not found.rest.rng_objects:
        return "none"
    axes = ("pp", "tp", "dp")
    grid = " x ".join(f"{axis} {n}" for axis, n in zip(axes, found.rest.rng_grid, strict=False))
    return f"{found.rest.rng_objects}" + (f" ({grid})" if grid else "")


def _scheduler(values: Mapping[str, Any]) -> str:
    if not values:
        return "none"
    shown = [f"{text}{values[n]:g}" if _number(values.get(n)) else "" for n, text in (("max_lr", "lr up to "), ("min_lr", "down to "))]
    done, end = values.get("num_steps"), values.get("lr_decay_steps")
    if _number(done):
        shown.append(f"at {done:,}" + (f" of {end:,}" if _number(end) else ""))
    style = values.get("lr_decay_style")
    shown.insert(0, str(style) if style is not None else "")
    return ", ".join(t for t in shown if t) or ", ".join(f"{k} {v}" for k, v in values.items())


def _figure(value: Any) -> Any:
    """A number as people write it: 10000 for 10000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _progress(values: Mapping[str, Any]) -> str:
    names = (("consumed_train_samples", "{:,} samples consumed"), ("global_batch_size", "batch {:,}"), ("seq_length", "sequences of {:,}"))
    shown = [form.format(values[name]) for name, form in names if values.get(name) and values.get("consumed_train_samples")]
    flops = values.get("num_floating_point_operations_so_far")
    if flops and _number(flops):
        shown.append(f"{flops:.3g} floating point operations")
    return ", ".join(shown)
