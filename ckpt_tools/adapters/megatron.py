"""A LoRA adapter in a Megatron checkpoint, seen under the names of the HF model it belongs to; no byte is moved.

Megatron-Bridge and NeMo: MODULE.adapter.linear_in / linear_out, or adapter_q / _k / _v / _gate / _up for fused modules (CanonicalLoRA);
ms-swift: MODULE.lora_A.default / lora_B.default. linear_in is [rank, in], linear_out [out, rank], its rows in Megatron's order of the
fused weight. Source: Megatron-Bridge peft/utils.py ParallelLinearAdapter, canonical_lora.py; ms-swift utils/megatron_lm_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..families import family_named, family_of_config
from ..families.config import args_from_config
from ..families.dimensions import Dimensions, dimensions
from ..families.family import Binding, Family, expand
from ..formats.run_config import NAME as run_config_name
from ..formats.run_config import read_block
from ..naming import canonical_tensors
from ..tensors import Chunk, TensorMetadata
from .peft import Adapter, Pair

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:adapter\.(?:adapter_(?P<part>[a-z]+)\.)?linear_(?P<end>in|out)|lora_(?P<which>[AB])(?:\.default)?)\.weight(?P<expert>\d*)"
)
_PARTS = {"q": (0, 3), "k": (1, 3), "v": (2, 3), "gate": (0, 2), "up": (1, 2)}  # position among the HF tensors of the fused module


def is_factor(name: str) -> bool:
    """Whether a canonical name is that of a factor of an adapter."""
    return _FACTOR.fullmatch(name) is not None


def other_factor(name: str) -> str:
    """The name of the factor that belongs to this one."""
    for pair in ((".linear_in.", ".linear_out."), (".lora_A.", ".lora_B.")):
        for one, other in (pair, pair[::-1]):
            if one in name:
                return name.replace(one, other)
    return name


def holds_adapter(names: Iterable[str]) -> bool:
    """Whether stored names are those of an adapter in Megatron's own modules."""
    return any(_FACTOR.fullmatch(name) for name in names)


def open_megatron_adapter(
    checkpoint: Checkpoint, hf_config: Mapping[str, Any], *, alpha: float | None = None, family: str | None = None
) -> Adapter:
    """The adapter with HF modules. hf_config: config.json of the base model; alpha: where the checkpoint does not tell.

    Errors: E543 an adapter ckpt cannot take apart, E544 factors that do not fit or no alpha, E545 a module the model does not have.
    """
    where = checkpoint.location.directory
    chosen = family_named(family) if family else family_of_config(hf_config, where)
    args, _ = args_from_config(hf_config, chosen.rules, allow_unrepresentable=True)
    args["padded_vocab_size"] = args.get("vocab_size")
    factors: dict[tuple[str, str | None], dict[str, TensorMetadata]] = {}
    named = {n: t for n, t in checkpoint.weights.items() if not n.endswith("_extra_state")}
    for name, tensor in canonical_tensors(checkpoint.locate_all(list(named)), where).items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise CkptError("E543", f"{name} is no factor of an adapter", where=where, expected="linear_in, linear_out, lora_A, lora_B")
        which = match["which"] or {"in": "A", "out": "B"}[match["end"]]
        factors.setdefault((f"{match['module']}.weight{match['expert']}", match["part"]), {})[which] = tensor
    scale = _Scale.of(checkpoint, alpha)
    bindings = {b.mcore: b for b in expand(chosen, dimensions(args))}
    pairs: dict[str, Pair] = {}
    for (module, part), found in factors.items():
        if found.keys() != {"A", "B"}:
            raise CkptError("E544", "one of the two factors is missing", where=f"{where}: {module}", found=", ".join(found))
        binding = bindings.get(module)
        if binding is None:
            kind = "E543" if ".experts." in module else "E545"  # one adapter for all experts of a rank is no adapter of a module of HF
            raise CkptError(kind, f"ckpt does not know the adapter of {module} in a {chosen.name} model", where=where)
        pairs.update(_apart(binding, part, found["A"], found["B"], dimensions(args), scale, where))
    order = [n.removesuffix(".weight") for b in expand(chosen, dimensions(args)) for n in b.hf]
    ordered = {m: pairs[m] for m in dict.fromkeys(order) if m in pairs}
    config = _config(ordered, order, scale, hf_config, chosen)
    tensors = {f"base_model.model.{m}.lora_{w}.weight": t for m, p in ordered.items() for w, t in (("A", p.a), ("B", p.b))}
    return Adapter(where, config, tensors, ordered, {})


def _apart(
    binding: Binding, part: str | None, a: TensorMetadata, b: TensorMetadata, dims: Dimensions, scale: _Scale, where: str
) -> dict[str, Pair]:
    """HF module -> factors: A is shared by the modules that Megatron fuses, B's rows are shared out among them."""
    at = f"{where}: {binding.mcore}"
    shape = binding.mapping.mcore_shape(dims)
    pieces = list(binding.mapping.pieces(dims))
    if len(a.global_shape) != 2 or len(b.global_shape) != 2 or a.global_shape[0] != b.global_shape[1]:
        raise CkptError("E544", "the factors do not fit together", where=at, found=f"{list(a.global_shape)} and {list(b.global_shape)}")
    if len(shape) != 2 or any(p.axes is not None or p.hf[1] or p.mcore[1] for p in pieces):
        raise CkptError("E543", "ckpt cannot take the adapter of this module apart", where=at)
    rank, hf = a.global_shape[0], [n.removesuffix(".weight") for n in binding.hf]
    if part is not None:
        position, count = _PARTS.get(part, (-1, 0))
        if count != len(hf):
            raise CkptError("E543", f"ckpt does not know which of {', '.join(hf)} adapter_{part} is", where=at)
        rows: dict[int, list[Chunk]] = {position: list(b.chunks)}
        sizes = {position: binding.mapping.hf_shapes(dims)[position][0]}
    else:
        rows, sizes = {i: [] for i in range(len(hf))}, {i: s[0] for i, s in enumerate(binding.mapping.hf_shapes(dims))}
        for piece in pieces:
            for chunk in b.region((piece.mcore[0], 0), (piece.shape[0], rank)):
                offset = (chunk.global_offset[0] - piece.mcore[0] + piece.hf[0], chunk.global_offset[1])
                rows[piece.source].append(chunk.moved(offset))
    wanted = sum(sizes.values())
    fits = b.global_shape[0] == wanted or (hf == ["lm_head"] and b.global_shape[0] > wanted)  # the vocabulary may be padded
    if not fits or a.global_shape[1] != shape[1]:
        raise CkptError(
            "E544",
            "the adapter does not have the sizes of the model",
            where=at,
            expected=f"A [{rank}, {shape[1]}], B [{wanted}, {rank}]",
            found=f"A {list(a.global_shape)}, B {list(b.global_shape)}",
        )
    return {
        hf[i]: Pair(a, TensorMetadata(f"{hf[i]}.lora_B", b.dtype, (sizes[i], rank), tuple(chunks)), rank, scale.at(rank))
        for i, chunks in rows.items()
    }


class _Scale:
    """alpha of a Megatron adapter and how it becomes a scale."""

    __slots__ = ("alpha", "rslora")

    def __init__(self, alpha: float, rslora: bool) -> None:
        self.alpha, self.rslora = alpha, rslora

    def at(self, rank: int) -> float:
        """The scale of a module whose factors have this rank."""
        return self.alpha / (sqrt(rank) if self.rslora else rank)

    @staticmethod
    def of(checkpoint: Checkpoint, alpha: float | None) -> _Scale:
        """As given, else as the arguments of the run (ms-swift) or its run_config.yaml (Megatron-Bridge) say."""
        args, told = checkpoint.args or {}, read_block(checkpoint.location.directory, "peft")
        found = alpha if alpha is not None else args.get("lora_alpha", told.get("alpha"))
        if args.get("use_dora") or "DoRA" in str(told.get("_target_", "")):
            raise CkptError("E543", "this adapter is not plain LoRA", where=checkpoint.location.directory, found="DoRA")
        try:
            number = float(found)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise CkptError(
                "E544",
                "nothing says the alpha of this adapter, so its scale is unknown",
                where=checkpoint.location.directory,
                expected=f"lora_alpha in the stored arguments, or alpha under peft: in {run_config_name}",
                hint="give it with --lora-alpha",
            ) from None
        return _Scale(int(number) if number.is_integer() else number, args.get("use_rslora") is True)


def _config(pairs: Mapping[str, Pair], order: list[str], scale: _Scale, hf_config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """adapter_config.json of the adapter: its targets are exactly the modules that have factors."""
    ranks = [p.rank for p in pairs.values()]
    usual = max(set(ranks), key=lambda r: (ranks.count(r), r), default=1)
    last = {m.rpartition(".")[2] for m in pairs}
    everywhere = {m for m in order if m.rpartition(".")[2] in last} == set(pairs)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hf_config.get("_name_or_path"),
        "r": usual,
        "lora_alpha": scale.alpha,
        "lora_dropout": 0.0,
        "use_rslora": scale.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {m: p.rank for m, p in pairs.items() if p.rank != usual},
        "alpha_pattern": {},
        "target_modules": sorted(last) if everywhere else list(pairs),
    }
