"""What a person wants to know of an adapter folder: method, rank, scale, which modules, which base."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import CkptError
from .peft import module_of, read_adapter, refuse_other_kinds


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """method ("LORA", ...); r and alpha of the config (None where it has none), rslora: alpha / sqrt(r); targets: last parts of the names
    of the modules that are changed, and how many modules; saved: tensors stored whole; base: what the config calls the model;
    not_plain: why `ckpt merge` would refuse, or None."""

    method: str
    r: int | None
    alpha: float | None
    rslora: bool
    targets: tuple[str, ...]
    modules: int
    saved: tuple[str, ...]
    base: str | None
    not_plain: str | None


def adapter_facts(directory: str, names: Iterable[str]) -> AdapterFacts:
    """The facts, from adapter_config.json and the names of the stored tensors."""
    config, _ = read_adapter(directory)
    stored = list(names)
    modules = sorted({m for n in stored if (m := module_of(n)) is not None})
    why = None
    try:
        refuse_other_kinds(config, stored, directory)
    except CkptError as error:
        why = error.found
    return AdapterFacts(
        str(config.get("peft_type")),
        _number(config.get("r"), int),
        _number(config.get("lora_alpha"), (int, float)),
        config.get("use_rslora") is True,
        tuple(sorted({m.rpartition(".")[2] for m in modules})),
        len(modules),
        tuple(n for n in stored if module_of(n) is None and "lora_" not in n),
        base if isinstance(base := config.get("base_model_name_or_path"), str) else None,
        why,
    )


def _number(value: Any, kind: Any) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
