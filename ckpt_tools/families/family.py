"""What a family is, and how its mappings are bound to the layers and experts of one model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..errors import CkptError, nearest
from ..tensors import TensorMetadata
from .config_kinds import Rules
from .dimensions import Dimensions
from .mappings import Kept, Mapping


@dataclass(frozen=True, slots=True)
class Fused:
    """An HF tensor that holds all experts of a layer: `hf` with `{l}`, shape (experts, rows, columns) or of biases (experts, rows), its
    rows being those of `parts` (names under the layer, with `{e}`) one after the other.

    transposed  shape (experts, columns, rows).   alternating  the rows of the parts take turns: gate, up, gate, up.
    only        the family's files have no other form: the names of the parts are ckpt's own, and no file has them.
    """

    hf: str
    parts: tuple[str, ...]
    transposed: bool = False
    alternating: bool = False
    only: bool = False


# As transformers 5 holds most families in memory, and writes them with save_original_format=False.
PER_EXPERT = (
    Fused("model.layers.{l}.mlp.experts.gate_up_proj", ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight")),
    Fused("model.layers.{l}.mlp.experts.down_proj", ("mlp.experts.{e}.down_proj.weight",)),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as data.

    model_types, architectures   what config.json calls it; the first of each is written when there is no HF config to follow.
    rules      relations between config.json fields and Megatron arguments (families.config).
    tensors    mappings in the order of the HF module tree (it decides how transformers cuts shards).
    fused      HF tensors that hold all experts of a layer, read as one tensor per expert.
    copies     HF names that repeat another tensor and that Megatron does not store twice: (copy, original), `{n}` = a prediction layer.
    renamed    other spellings of HF names (pattern, replacement), read as the family's own.
    spelling   how config.json is written when there is none to follow: "v5", or "v4" for classes of remote code, which read no other.
    carried    patterns of HF names of a part that Megatron-Core's GPT model does not have (a vision tower): such tensors are kept under
               their own names beside the converted ones, byte for byte, in both directions.
    ignored    HF name pattern -> why such a tensor carries no weight of its own.
    verified   the most that the family contract of the tests proves: "logits" (megatron-core computes what transformers computes), "names"
               (megatron-core asks for exactly these names and shapes), "round trip" (transformers' names, every byte comes back).
    note       what could not be verified or held, and why.   sources  where names and arguments were read.
    float8     whether --quantize makes float8 files of it: transformers takes for linear layers what ckpt does, as its tests prove.
    unbuildable  (megatron-core version and spec, e.g. "0.19.2 local"; condition, as a mapping's `when`; why it cannot build the model).
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    rules: Rules
    tensors: tuple[Mapping, ...]
    fused: tuple[Fused, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    spelling: str = "v5"
    carried: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = (
        (r".*\.rotary_emb\.inv_freq", "computed from the config"),
        (r".*\.attn\.(masked_)?bias", "a causal mask"),
    )
    float8: bool = False
    verified: str = "round trip"
    note: str = ""
    sources: tuple[str, ...] = ()
    unbuildable: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """A mapping applied to one layer and expert: its concrete HF names and Megatron name."""

    mapping: Mapping
    hf: tuple[str, ...]
    mcore: str


@dataclass(frozen=True, slots=True)
class Bound:
    """All bindings of a model, in HF order, and the source's tensors left out on purpose (name, reason)."""

    bindings: tuple[Binding, ...]
    left_out: tuple[tuple[str, str], ...]


def expand(family: Family, dims: Dimensions) -> Iterator[Binding]:
    """Every binding the model could have, in HF module order: consecutive layer mappings are repeated layer by layer."""
    block: list[Mapping] = []
    kind = ""
    for mapping in family.tensors:
        now = "{l}" if "{l}" in mapping.mcore else "{m}" if "{m}" in mapping.mcore else ""
        if now != kind:
            yield from _layers(block, dims, kind)
            block, kind = [], now
        block.append(mapping)
    yield from _layers(block, dims, kind)


def _layers(block: Sequence[Mapping], dims: Dimensions, kind: str) -> Iterator[Binding]:
    if not kind:
        yield from (Binding(m, m.hf, m.mcore) for m in block if dims.holds(m.when, None))
        return
    for layer in range(dims.layers if kind == "{l}" else dims.mtp):
        like = layer if kind == "{l}" else dims.layers - 1  # Megatron gives a prediction layer the last layer's specification
        number = layer if kind == "{l}" else dims.layers + layer
        experts: list[Mapping] = []
        for mapping in block:
            if not dims.holds(mapping.when, like):
                continue
            if "{e}" in mapping.mcore:
                experts.append(mapping)
                continue
            yield from _experts(experts, dims, layer, number)
            experts = []
            yield _bind(mapping, layer, number, None)
        yield from _experts(experts, dims, layer, number)


def _experts(mappings: Sequence[Mapping], dims: Dimensions, layer: int, number: int) -> Iterator[Binding]:
    if mappings:
        for expert in range(dims.size("E")):
            for mapping in mappings:
                yield _bind(mapping, layer, number, expert)


def _bind(mapping: Mapping, layer: int, number: int, expert: int | None) -> Binding:
    """`{l}` and `{m}` count within their stack, `{n}` counts prediction layers on from the decoder's."""

    def fill(text: str) -> str:
        return text.replace("{l}", str(layer)).replace("{m}", str(layer)).replace("{n}", str(number)).replace("{e}", str(expert))

    return Binding(mapping, tuple(fill(n) for n in mapping.hf), fill(mapping.mcore))


def copies(family: Family, dims: Dimensions) -> Iterator[tuple[str, str]]:
    """(HF copy, HF original) of every tensor that the family's HF files may repeat; the original of a tied head is the embedding."""
    for copy, original in family.copies:
        if dims.tied and any(original in m.hf for m in family.tensors if m.when == "untied"):
            continue
        yield from ((copy.replace("{n}", str(dims.layers + m)), original) for m in range(dims.mtp))


def is_carried(family: Family, name: str) -> bool:
    """Whether a tensor belongs to a part that is kept as it is, under its own name."""
    return any(re.fullmatch(pattern, name) for pattern in family.carried)


def bind(family: Family, dims: Dimensions, present: dict[str, TensorMetadata], side: str, where: str) -> Bound:
    """The bindings for which the source has tensors, with every source tensor claimed exactly once.

    present = the source's tensors by name, side = "hf" or "mcore", where = path for messages.
    Errors: E303 missing tensors, E304 unexpected tensors, both with the nearest names.
    """
    bindings: list[Binding] = []
    claimed: set[str] = set()
    missing: list[str] = []
    absent_optional: dict[str, list[str]] = {}
    present_optional: set[str] = set()
    for binding in expand(family, dims):
        names = binding.hf if side == "hf" else (binding.mcore,)
        found = [n for n in names if n in present]
        if len(found) == len(names):
            bindings.append(binding)
            claimed.update(names)
            if binding.mapping.optional:
                present_optional.add(binding.mapping.mcore)
        elif binding.mapping.optional and not found:
            absent_optional.setdefault(binding.mapping.mcore, []).extend(names)
        else:
            missing.extend(n for n in names if n not in present)
    for template, absent in absent_optional.items():
        if template in present_optional:  # some layers have it: then all must
            missing.extend(absent)
    left_out, unexpected = [], []
    for name in present:
        if name in claimed:
            continue
        if is_carried(family, name):
            bindings.append(Binding(Kept((name,), name, present[name].global_shape), (name,), name))
            continue
        reason = reason_to_leave_out(family, dims, name, side)
        if reason:
            left_out.append((name, reason))
        else:
            unexpected.append(name)
    if missing:
        raise CkptError(
            "E303",
            f"{len(missing)} tensors of a {family.name} model are missing",
            where=where,
            expected=_some(missing),
            found=_near(missing[0], unexpected or present),
            hint="the checkpoint is incomplete, or its config is that of another model",
        )
    if unexpected:
        raise CkptError(
            "E304",
            f"{len(unexpected)} tensors are unknown to the family {family.name}",
            where=where,
            found=_some(sorted(unexpected)),
            expected=_near(unexpected[0], [n for b in bindings for n in (b.hf if side == "hf" else (b.mcore,))]),
            hint="nothing is skipped silently; if the family is wrong, name it with --family",
        )
    return Bound(tuple(bindings), tuple(sorted(left_out)))


def reason_to_leave_out(family: Family, dims: Dimensions, name: str, side: str) -> str | None:
    """Why a tensor of this name carries no weight of its own (side: "hf" or "mcore"); None when it does or is unknown."""
    if side == "hf":
        for copy, original in copies(family, dims):
            if name == copy:
                return f"a copy of {original}, to which it was compared"
        for pattern, reason in family.ignored:
            if re.fullmatch(pattern, name):
                return reason
        if dims.tied and any(m.when == "untied" and name in m.hf for m in family.tensors):
            return "config.json ties it to the embedding, which is converted"
    elif dims.tied and any(m.when == "untied" and name == m.mcore for m in family.tensors):
        return "tied to the embedding, which is converted"
    return None


def _some(names: Sequence[str], count: int = 4) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


def _near(name: str, names: Collection[str]) -> str | None:
    close = nearest(name, names)
    return f"nearest to {name}: {', '.join(close)}" if close else None
