"""Planning a merge: which tensors of the base are copied, which get a product added, which are replaced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint import Checkpoint, open_checkpoint
from ..dtypes import dtype
from ..errors import CkptError, nearest
from ..formats.hf_writer import layout_hf
from ..hf_template import Template, final_config, find_template, side_copies
from ..notes import Note
from ..options import ConvertOptions
from ..planning import Placement, Plan, TargetFile, build_moves
from ..tensors import TensorMetadata
from ..views import as_hf
from .megatron import open_megatron_adapter
from .peft import Adapter, Pair, open_adapter
from .record import NAME, merged_into, record_bytes, refuse_second

_INPUT = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_OUTPUT = ("lm_head.weight", "embed_out.weight", "output.weight")
_ADDED_TO = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Sum:
    """A tensor to be computed: base + scale * B A (`pair`), or base + `bias`; where it goes."""

    base: TensorMetadata
    placement: Placement
    pair: Pair | None
    bias: TensorMetadata | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class MergePlan:
    """plan: the files, and the tensors that are copied; sums: the tensors that are computed."""

    plan: Plan
    sums: tuple[Sum, ...]

    @property
    def nbytes(self) -> int:
        """Tensor bytes that will be written."""
        return self.plan.moved_bytes + sum(s.base.nbytes for s in self.sums)


def plan_merge(base: Checkpoint, adapter: Adapter, *, options: ConvertOptions, untie: bool = False, again: bool = False) -> MergePlan:
    """The plan that adds a LoRA adapter to the weights of `base` (HF, or Megatron seen under HF names).

    Errors: E545 the adapter changes what the base does not have, E544 shapes differ, E546 tied embeddings would come apart, E547 merged
    before, E206 weights that cannot be added to.
    """
    template = find_template(base, options)
    entries = merged_into(template.folder)
    digest = adapter.digest()
    if not again:
        refuse_second(entries, digest, template.folder)
    tensors, config, notes = _base(base, template, options)
    tied = _Tied.of(config, tensors)
    adapter, tensors, config, told = tied.settle(adapter, tensors, config, untie)
    pairs = {f"{module}.weight": pair for module, pair in adapter.pairs.items()}
    biases = {f"{module}.bias": pair.bias for module, pair in adapter.pairs.items() if pair.bias is not None}
    _check(adapter, pairs, biases, tensors)
    replaced = {n: replace(t, fqn=n) for n, t in adapter.saved.items() if n in tensors}
    dtypes = {n: t.dtype for n, t in tensors.items()}
    tensors = {n: replaced.get(n, t) for n, t in tensors.items()}
    laid = layout_hf(
        tensors,
        dtypes,
        config=_config_bytes(config, template),
        shard_size=options.max_shard_size,
        weight_map=template.weight_map,
        metadata=template.metadata,
        copies=tuple(c for c in side_copies(template) if c.target != NAME),
    )
    record = record_bytes(entries, adapter, digest)
    files = (*laid.files, TargetFile(NAME, len(record), ((0, record),)))
    computed = {n for n in (*pairs, *biases) if n in tensors}
    builder = build_moves(tensors, [p for p in laid.placements if p.name not in computed])
    sums = tuple(
        Sum(tensors[p.name], p, pairs.get(p.name), biases.get(p.name), adapter.transposed) for p in laid.placements if p.name in computed
    )
    notes += [*template.notes, *told, *_told(adapter, sums, replaced, dtypes)]
    location = base.location
    source = {"path": location.directory, "format": base.format, "iteration": location.label, "chosen": location.chosen}
    target = {"format": "hf", "adapter": adapter.directory, "merged": len(adapter.pairs), "replaced": len(replaced)}
    plan = Plan(
        source, target, builder.sources(), files, laid.copies, tuple(builder.moves), tuple(notes), len(laid.placements), options.buffer
    )
    return MergePlan(plan, sums)


def open_both(base: str, adapter: str, iteration: str = "latest", options: ConvertOptions | None = None) -> tuple[Checkpoint, Adapter]:
    """The base, and the adapter: a PEFT folder, or a Megatron checkpoint of one, whose modules the base's config names."""
    model, changes = open_checkpoint(base, iteration), open_checkpoint(adapter)
    if changes.format == "peft":
        return model, open_adapter(changes.location.directory)
    asked = options or ConvertOptions(to="hf")
    config = model.config or find_template(model, asked).config
    if config is None:
        where = model.location.directory
        raise CkptError("E306", "the base model's config is needed to name the adapter's modules", where=where, hint="give --hf-config DIR")
    return model, open_megatron_adapter(changes, config, alpha=asked.lora_alpha, family=asked.family)


def _base(
    base: Checkpoint, template: Template, options: ConvertOptions
) -> tuple[dict[str, TensorMetadata], dict[str, Any] | None, list[Note]]:
    if base.format == "hf":
        return dict(base.tensors), template.config, [Note("warning", "", w) for w in base.warnings]
    view = as_hf(base, family=options.family, hf_config=template.config, repeated=template.weight_map)
    raw, notes = final_config(view, template, {n: t.dtype for n, t in view.tensors.items()}, options)
    return dict(view.tensors), None if raw is None else json.loads(raw.decode("utf-8-sig")), [*view.notes, *notes]


def _config_bytes(config: Mapping[str, Any] | None, template: Template) -> bytes | None:
    if config is None:
        return None
    if template.raw is not None and config == json.loads(template.raw.decode("utf-8-sig")):
        return template.raw
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True, slots=True)
class _Tied:
    """Names of the input embedding and the output layer of a model whose config ties them; None for one that does not."""

    names: tuple[str, str] | None

    @staticmethod
    def of(config: Mapping[str, Any] | None, tensors: Mapping[str, TensorMetadata]) -> _Tied:
        source = next((n for n in tensors if n.endswith(_INPUT)), None)
        stored = next((n for n in tensors if n in _OUTPUT or n.endswith(".lm_head.weight")), None)
        # transformers' default is to tie, but writes the field; a stored head without the field is a head of its own.
        told = (config or {}).get("tie_word_embeddings", stored is None)
        if source is None or not told:
            return _Tied(None)
        return _Tied((source, stored or "lm_head.weight"))

    def settle(
        self, adapter: Adapter, tensors: dict[str, TensorMetadata], config: dict[str, Any] | None, untie: bool
    ) -> tuple[Adapter, dict[str, TensorMetadata], dict[str, Any] | None, list[Note]]:
        """Adapter, the base's tensors and config for the merge: the two tied tables stay one, or come apart when that was asked for."""
        if self.names is None:
            return adapter, tensors, config, []
        changed = [n for n in self.names if n in adapter.saved or n.removesuffix(".weight") in adapter.pairs]
        if not changed:
            return adapter, tensors, config, []
        source, head = self.names
        whole = source in adapter.saved and head in adapter.saved and not adapter.pairs.keys() & _modules(self.names)
        if whole and _equal(adapter.saved[source], adapter.saved[head]):
            once = replace(adapter, saved={n: t for n, t in adapter.saved.items() if n != head})
            told = Note("kept", head, "the adapter stores the same table twice: it stays tied")
            return once, {n: t for n, t in tensors.items() if n != head}, config, [told]
        if not untie:
            raise CkptError(
                "E546",
                "the adapter changes one of two tied tables: they would not be the same any more",
                where=f"{adapter.directory}: {', '.join(changed)}",
                expected=f"{source} and {head} one tensor (tie_word_embeddings)",
                hint="--untie stores them apart and says so in config.json",
            )
        apart = replace(tensors.get(head, tensors[source]), fqn=head)
        told = Note("config", head, "stored apart from the embedding; tie_word_embeddings is false now")
        return adapter, {**tensors, head: apart}, {**(config or {}), "tie_word_embeddings": False}, [told]


def _modules(names: tuple[str, str]) -> set[str]:
    return {n.removesuffix(".weight") for n in names}


def _equal(a: TensorMetadata, b: TensorMetadata) -> bool:
    from ..verify import compare

    if a.dtype != b.dtype:
        return False
    try:
        compare({"table": a}, {"table": b}, buffer=2**18, threads=1)
    except CkptError:
        return False
    return True


def _check(
    adapter: Adapter,
    pairs: Mapping[str, Pair],
    biases: Mapping[str, TensorMetadata],
    tensors: Mapping[str, TensorMetadata],
) -> None:
    for name in (*pairs, *biases, *adapter.saved):
        if name not in tensors:
            near = nearest(name, tensors)
            raise CkptError(
                "E545",
                f"the adapter changes {name}, which the base model does not have",
                where=adapter.directory,
                found=f"nearest: {', '.join(near)}" if near else None,
                hint="the adapter belongs to another model, or to one whose modules are called otherwise",
            )
    for name, pair in pairs.items():
        wanted = (pair.b.global_shape[0], pair.a.global_shape[1])
        base = adapter.saved.get(name, tensors[name])
        if pair.embedding or adapter.transposed:
            wanted = wanted[::-1]
        _fits(name, wanted, base)
        if base.dtype not in _ADDED_TO or tensors[name].dtype not in _ADDED_TO:
            raise CkptError(
                "E206",
                f"an adapter cannot be added to {tensors[name].dtype} weights",
                where=name,
                expected=", ".join(_ADDED_TO),
                hint="merge into the model before it was quantised",
            )
    for name, bias in biases.items():
        _fits(name, bias.global_shape, tensors[name])
    for name, tensor in adapter.saved.items():
        _fits(name, tensor.global_shape, tensors[name])


def _fits(name: str, shape: tuple[int, ...], base: TensorMetadata) -> None:
    if base.global_shape != shape:
        raise CkptError(
            "E544",
            f"what the adapter has for {name} has another shape than the base",
            where=name,
            expected=f"{list(base.global_shape)}",
            found=f"{list(shape)}",
            hint="the adapter was trained on another model, or on one whose vocabulary was resized",
        )


def _told(adapter: Adapter, sums: tuple[Sum, ...], replaced: Mapping[str, TensorMetadata], dtypes: Mapping[str, str]) -> list[Note]:
    scales = sorted({f"{p.scale:g}" for p in adapter.pairs.values()})
    names = ", ".join(s.placement.name for s in sums)
    kinds = ", ".join(sorted({dtypes[s.placement.name] for s in sums}))
    notes = [Note("merged", names, f"{len(sums)} tensors: base + {' or '.join(scales)} * B A in float32, rounded once to {kinds}")]
    if replaced:
        notes.append(Note("replaced", ", ".join(replaced), f"{len(replaced)} tensors that the adapter stores whole"))
    cast = [n for n, t in replaced.items() if t.dtype != dtypes[n] and dtype(t.dtype).floating]
    if cast:
        notes.append(Note("cast", ", ".join(cast), f"{len(cast)} tensors of the adapter to the dtype of the base"))
    return notes
