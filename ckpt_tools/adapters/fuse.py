"""A PEFT adapter in Megatron's modules: the reverse of `megatron`, planned as a torch_dist run folder with nothing but the factors.

Modules that Megatron fuses (query, key and value; gate and up) get one pair of factors where their first factors are equal, as they are
after training in Megatron; else each keeps its own, in the way of Megatron-Bridge's CanonicalLoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CkptError, nearest
from ..families import family_named, family_of_config
from ..families.config import args_from_config
from ..families.dimensions import Dimensions, dimensions
from ..families.family import Binding, expand
from ..families.mappings import Vocab
from ..families.megatron_args import checkpoint_args
from ..formats.pickles import Namespace
from ..formats.torch_dist_writer import layout_torch_dist
from ..hf_template import carried_files, find_template
from ..layout import ParallelLayout
from ..model_names import EXPERT
from ..naming import homogeneous
from ..notes import Note
from ..options import ConvertOptions
from ..planning import Plan, build_moves
from ..tensors import Chunk, TensorMetadata
from .megatron import open_megatron_adapter
from .peft import Adapter, Pair, open_adapter

_PARTS = {2: ("gate", "up"), 3: ("q", "k", "v")}


def plan_fused(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """The plan that writes a PEFT adapter for Megatron.

    Errors: E306 without the base model's config (--hf-config), E543 what Megatron's adapters cannot hold, E545 unknown modules.
    """
    if options.to != "torch_dist":
        raise CkptError("E410", f"an adapter cannot be written as {options.to}", expected="torch_dist", where=checkpoint.location.directory)
    template = find_template(checkpoint, options)
    if template.config is None:
        raise CkptError(
            "E306",
            "the base model's config is needed to place the adapter",
            where=checkpoint.location.directory,
            hint="give --hf-config DIR",
        )
    adapter = open_adapter(checkpoint.location.directory)
    fused = fuse(adapter, template.config, family=options.family)
    dims, tensors = fused.dims, fused.tensors
    stacked = homogeneous(tensors) and _in_every_layer(tensors, dims.layers)
    args = {**fused.args, "lora_rank": fused.rank, "lora_alpha": fused.alpha}
    stored = checkpoint_args(args, layout={}, iteration=options.iteration or 0, ckpt_format="torch_dist", weights_only=True)
    common: dict[str, Any] = {
        "args": Namespace({**stored, "lora_rank": fused.rank, "lora_alpha": fused.alpha}),
        "checkpoint_version": 3.0,
        "iteration": options.iteration or 0,
        "content_metadata": {"singleton_local_shards": False, **({} if stacked else {"non_homogeneous_layers": True})},
    }
    folder = "release" if options.iteration is None else f"iter_{options.iteration:07d}"
    made, copies, told = carried_files(template, folder)
    laid = layout_torch_dist(
        tensors,
        {n: t.dtype for n, t in tensors.items()},
        common=common,
        iteration=options.iteration,
        stacked=stacked,
        layers=dims.layers,
        layout=ParallelLayout(),
        gated=False,
        extra_state=False,
        copies=copies,
    )
    builder = build_moves(tensors, laid.placements)
    return Plan(
        {"path": checkpoint.location.directory, "format": "peft", "iteration": None, "chosen": checkpoint.location.chosen},
        {"format": "torch_dist", "iteration": "release" if options.iteration is None else options.iteration, "modules": fused.modules},
        builder.sources(),
        (*laid.files[:-1], *made, laid.files[-1]),
        laid.copies,
        tuple(builder.moves),
        (*template.notes, *told, *fused.notes),
        len(tensors),
        options.buffer,
    )


def verify_fused(checkpoint: Checkpoint, written: Checkpoint, options: ConvertOptions, *, buffer: int, threads: int) -> int:
    """Compare a PEFT adapter with what was written for Megatron, taken apart again; bytes compared. Errors as verify.compare."""
    from ..verify import compare

    config = find_template(checkpoint, options).config or {}
    found = open_megatron_adapter(written, config, family=options.family).pairs
    expected = open_adapter(checkpoint.location.directory).pairs
    return sum(
        compare(
            {f"{m}.{w}": getattr(p, w) for m, p in expected.items()},
            {f"{m}.{w}": getattr(p, w) for m, p in found.items()},
            buffer=buffer,
            threads=threads,
        )
        for w in ("a", "b")
    )


@dataclass(frozen=True, slots=True)
class Fused:
    """Factors under Megatron's names (whole, per layer), what they have in common, and what a person must know."""

    tensors: dict[str, TensorMetadata]
    args: dict[str, Any]
    dims: Dimensions
    rank: int
    alpha: float
    modules: int
    notes: tuple[Note, ...]


def fuse(adapter: Adapter, hf_config: Mapping[str, Any], *, family: str | None = None) -> Fused:
    """The adapter's factors under the names of Megatron-Bridge. Errors as plan_fused."""
    where = adapter.directory
    if adapter.saved or any(p.bias is not None or p.embedding for p in adapter.pairs.values()):
        held = ", ".join([*list(adapter.saved)[:4], *(m for m, p in adapter.pairs.items() if p.embedding or p.bias is not None)])
        raise CkptError("E543", "Megatron's adapters hold factors of linear layers only", where=where, found=held)
    kinds = {(p.rank, p.scale) for p in adapter.pairs.values()}
    if len(kinds) != 1:
        found = ", ".join(f"r {r} scale {s:g}" for r, s in sorted(kinds))
        raise CkptError("E543", "Megatron's adapters have one rank and one scale for all modules", where=where, found=found or "no factors")
    chosen = family_named(family) if family else family_of_config(hf_config, where)
    args, _ = args_from_config(hf_config, chosen.rules)
    args["padded_vocab_size"] = args.get("vocab_size")
    dims = dimensions(args)
    groups = _groups(adapter, list(expand(chosen, dims)), dims)
    together = all(_shared(binding, found) for binding, found in groups if len(binding.hf) > 1)
    tensors: dict[str, TensorMetadata] = {}
    for binding, pairs in groups:
        module, _, expert = binding.mcore.rpartition(".weight")
        if len(binding.hf) == 1 or together:
            _put(tensors, f"{module}.adapter", expert, pairs[min(pairs)].a, _rows(binding, pairs, dims))
        else:
            for position, pair in pairs.items():
                _put(tensors, f"{module}.adapter.adapter_{_PARTS[len(binding.hf)][position]}", expert, pair.a, pair.b)
    _check_experts(tensors, dims, where)
    ((rank, scale),) = kinds
    kind = "LoRA: fused modules have one pair" if together else "CanonicalLoRA: fused modules keep a pair for each part"
    alpha = scale * rank
    told = f"{kind}; dim {rank}, alpha {alpha:g} are kept in the arguments as lora_rank and lora_alpha"
    return Fused(tensors, args, dims, rank, int(alpha) if alpha.is_integer() else alpha, len(groups), (Note("config", "", told),))


def _groups(adapter: Adapter, bindings: list[Binding], dims: Dimensions) -> list[tuple[Binding, dict[int, Pair]]]:
    """Megatron modules with the pairs of their HF modules, by position among them."""
    place = {n.removesuffix(".weight"): (b, i) for b in bindings for i, n in enumerate(b.hf) if n.endswith(".weight")}
    groups: dict[str, tuple[Binding, dict[int, Pair]]] = {}
    for module, pair in adapter.pairs.items():
        if module not in place:
            near = nearest(module, place)
            found = f"nearest: {', '.join(near)}" if near else None
            raise CkptError("E545", f"the adapter changes {module}, which the model does not have", where=adapter.directory, found=found)
        binding, position = place[module]
        shape = binding.mapping.hf_shapes(dims)[position]
        if isinstance(binding.mapping, Vocab) or any(p.axes for p in binding.mapping.pieces(dims)):
            raise CkptError("E543", f"ckpt does not write adapters of {binding.mcore} for Megatron", where=adapter.directory)
        if len(binding.hf) not in (1, *_PARTS) or (len(binding.hf) == 1 and _joined(binding, dims)):
            raise CkptError("E543", f"ckpt does not write adapters of {binding.mcore} for Megatron", where=adapter.directory)
        if (pair.b.global_shape[0], pair.a.global_shape[1]) != shape:
            raise CkptError(
                "E544",
                f"the adapter of {module} has not the sizes of the model",
                where=adapter.directory,
                expected=f"{list(shape)}",
                found=f"B {list(pair.b.global_shape)}, A {list(pair.a.global_shape)}",
            )
        groups.setdefault(binding.mcore, (binding, {}))[1][position] = pair
    return [(b, groups[b.mcore][1]) for b in bindings if b.mcore in groups]


def _check_experts(tensors: Mapping[str, TensorMetadata], dims: Dimensions, where: str) -> None:
    """CkptError E543 when some experts of a layer have factors and others none: Megatron stores those of all experts as one tensor."""
    held: dict[str, int] = {}
    for name in tensors:
        match = EXPERT.match(name)
        if match:
            key = f"{match['head']}{match['tail']}"
            held[key] = held.get(key, 0) + 1
    for key, count in held.items():
        if count != dims.symbols.get("E"):
            expected = f"{dims.symbols.get('E')} experts"
            raise CkptError("E543", f"only some experts have the factor {key}", where=where, expected=expected, found=str(count))


def _joined(binding: Binding, dims: Dimensions) -> bool:
    return len(list(binding.mapping.pieces(dims))) > 1


def _shared(binding: Binding, found: Mapping[int, Pair]) -> bool:
    """Whether all parts of a fused module are there with one first factor, byte for byte."""
    from ..verify import compare

    first = found[min(found)]
    if len(found) != len(binding.hf) or any(p.a.dtype != first.a.dtype or p.b.dtype != first.b.dtype for p in found.values()):
        return False
    try:
        for pair in found.values():
            compare({"A": first.a}, {"A": pair.a}, buffer=2**18, threads=1)
    except CkptError:
        return False
    return True


def _rows(binding: Binding, found: Mapping[int, Pair], dims: Dimensions) -> TensorMetadata:
    """The second factors in the order of Megatron's rows."""
    first = found[min(found)]
    chunks: list[Chunk] = []
    for piece in binding.mapping.pieces(dims):
        for part in found[piece.source].b.region((piece.hf[0], 0), (piece.shape[0], first.rank)):
            row, column = part.global_offset
            chunks.append(part.moved((row - piece.hf[0] + piece.mcore[0], column)))
    return TensorMetadata("", first.b.dtype, (binding.mapping.mcore_shape(dims)[0], first.rank), tuple(chunks))


def _put(tensors: dict[str, TensorMetadata], prefix: str, expert: str, a: TensorMetadata, b: TensorMetadata) -> None:
    for end, tensor in (("in", a), ("out", b)):
        name = f"{prefix}.linear_{end}.weight{expert}"
        tensors[name] = replace(tensor, fqn=name)


def _in_every_layer(tensors: Mapping[str, TensorMetadata], layers: int) -> bool:
    return all(any(f".layers.{layer}." in n for n in tensors) for layer in range(layers))
