"""The HF folder that a conversion follows: its config, tokenizer and other side files, and how it cuts shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checkpoint import HF_FOLDER, Checkpoint, kept_hf_folder
from .dtypes import DTYPES
from .errors import CkptError
from .formats import hf as hf_format
from .formats.hf_writer import config_bytes
from .notes import Note
from .options import ConvertOptions
from .planning import Copied, TargetFile
from .quantised import KEY, meant_name, method_of, without_quantisation
from .source_files import opened
from .views import View

WEIGHT_MAP = ".ckpt-weight-map.json"  # there too: the shard layout of the HF folder, so that converting back makes the same files


@dataclass(frozen=True, slots=True)
class Template:
    """The HF folder whose config and side files are followed: config, its raw bytes, folder and side files, shard layout, notes."""

    config: dict[str, Any] | None = None
    raw: bytes | None = None
    folder: str | None = None
    files: tuple[str, ...] = ()
    weight_map: dict[str, str] | None = None
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    notes: tuple[Note, ...] = ()


def find_template(checkpoint: Checkpoint, options: ConvertOptions) -> Template:
    """The HF folder to follow: --hf-config, the source itself, or what an earlier conversion kept beside the weights."""
    folder = options.hf_config
    if folder is None and checkpoint.format == "hf":
        folder = checkpoint.folder if checkpoint.config is not None else None
    if folder is None:
        folder = kept_hf_folder(checkpoint)
    if folder is None:
        if options.to in ("hf", "split"):
            return Template(
                notes=(
                    Note(
                        "warning",
                        "",
                        "no HF folder was given: config.json is made from the checkpoint's arguments, and there is no tokenizer, "
                        "generation_config.json or chat template (give --hf-config DIR)",
                    ),
                )
            )
        return Template()
    path = folder if os.path.isfile(folder) else os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise CkptError("E306", "there is no config.json in the folder given", where=folder)
    config = hf_format.read_json(path)
    with opened(path) as file:
        raw = file.read()
    folder = os.path.dirname(path)
    files, warnings = hf_format.side_files(folder)
    notes = [Note("warning", "", w) for w in warnings]
    weight_map: Any = None  # from files: checked below
    metadata: Any = {"format": "pt"}
    if checkpoint.format == "hf" and isinstance(checkpoint.details, hf_format.HfFolder):
        weight_map, metadata = checkpoint.details.weight_map, checkpoint.details.metadata
    elif os.path.exists(stored := os.path.join(folder, WEIGHT_MAP)):
        value = hf_format.read_json(stored)
        weight_map, metadata = value.get("weight_map"), value.get("metadata", metadata)
    elif os.path.exists(index := os.path.join(folder, hf_format.INDEX_NAME)):
        weight_map = hf_format.read_json(index).get("weight_map")
    if weight_map is not None and not (
        isinstance(weight_map, dict)
        and all(isinstance(v, str) for v in weight_map.values())
        and all(map(hf_format.is_safe_name, set(weight_map.values())))
    ):
        weight_map = None
        notes.append(Note("warning", "", "the shard layout beside the config is not usable and was not followed"))
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        metadata = {"format": "pt"}
        notes.append(Note("warning", "", "the metadata of the shards beside the config is not usable and was not followed"))
    files = tuple(f for f in files if f != WEIGHT_MAP)
    if KEY in config and (options.to != "hf" or options.dtype or options.quantize or checkpoint.format != "hf"):
        method = method_of(config, path)  # another one than ckpt dequantises is refused
        config = without_quantisation(config)
        raw = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        weight_map = {m: f for n, f in weight_map.items() if (m := meant_name(n, method)) is not None} if weight_map else None
        notes.append(Note("config", "config.json", f"{KEY} was taken out: the weights are not quantised any more"))
    config, files = _remote_code(config, files, notes, options.strip_remote_code)
    return Template(config, raw, folder, files, weight_map, metadata, tuple(notes))


def _remote_code(config: dict[str, Any], files: tuple[str, ...], notes: list[Note], strip: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    code = config.get("auto_map")
    if not isinstance(code, dict):
        return config, files
    if strip:
        notes.append(Note("dropped", "auto_map", "remote code was left out as asked"))
        return {k: v for k, v in config.items() if k != "auto_map"}, tuple(f for f in files if not f.endswith(".py"))
    for value in code.values():
        for reference in value if isinstance(value, list) else [value]:
            module = str(reference).rpartition(".")[0].rpartition("--")[2]
            if module and "--" not in str(reference) and f"{module}.py" not in files:
                notes.append(Note("warning", "auto_map", f"config.json points to {module}.py, which is not in the folder"))
    return config, files


def carried_files(template: Template, folder: str) -> tuple[list[TargetFile], tuple[Copied, ...], list[Note]]:
    """What of the HF folder is kept inside an iteration folder: files to make, files to copy, and the note about them."""
    if template.raw is None or template.folder is None:
        return [], (), []
    made = [TargetFile(f"{folder}/{HF_FOLDER}/config.json", len(template.raw), ((0, template.raw),))]
    if template.weight_map is not None or template.metadata != {"format": "pt"}:
        data = json.dumps({"metadata": template.metadata, "weight_map": template.weight_map}, sort_keys=True).encode()
        made.append(TargetFile(f"{folder}/{HF_FOLDER}/{WEIGHT_MAP}", len(data), ((0, data),)))
    names = ", ".join(("config.json", *template.files))
    told = Note("carried", names, f"{1 + len(template.files)} files of the HF model are kept in {folder}/{HF_FOLDER}")
    return made, side_copies(template, f"{folder}/{HF_FOLDER}/"), [told]


def side_copies(template: Template, prefix: str = "") -> tuple[Copied, ...]:
    """The template's side files as files to copy under `prefix`."""
    if template.folder is None:
        return ()
    paths = [(os.path.join(template.folder, n), prefix + n) for n in template.files]
    return tuple(Copied(source, target, os.path.getsize(source)) for source, target in paths)


def final_config(
    view: View, template: Template, dtypes: Mapping[str, str], options: ConvertOptions, quantisation: Mapping[str, Any] | None = None
) -> tuple[bytes | None, list[Note]]:
    """config.json of the result: the template's own bytes unless something must change, and what a person must know about it.

    dtypes: of the tensors that are not quantised; quantisation: the quantization_config of those that are.
    """
    config = template.config if view.source.format == "hf" else view.config
    if config is None:
        return None, []
    notes: list[Note] = []
    counts: dict[str, int] = {}
    for name in dtypes.values():
        if DTYPES[name].floating:
            counts[name] = counts.get(name, 0) + 1
    main = max(counts, key=lambda n: counts[n], default=None)
    result = dict(config)
    for key in dtype_keys(config):
        declared = config.get(key)
        if main and declared is not None and str(declared).removeprefix("torch.") != main:
            if options.dtype or template.config is None:
                result[key] = main
            else:
                notes.append(
                    Note(
                        "warning",
                        "config.json",
                        f"says {key} {declared}, the tensors are {', '.join(f'{n} x{c}' for n, c in sorted(counts.items()))}",
                    )
                )
    if main and not any(config.get(k) for k in dtype_keys(config)):
        result["dtype"] = main
    if quantisation is not None:
        result[KEY] = dict(quantisation)
    if template.raw is not None and result == json.loads(template.raw.decode("utf-8-sig")):
        return template.raw, notes
    if template.config is not None:
        return (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode(), notes
    return config_bytes(result), notes


def dtype_keys(config: Mapping[str, Any]) -> list[str]:
    """The spellings of the dtype that a config uses; transformers 5's when it uses none."""
    return [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]
