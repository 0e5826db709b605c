"""The weights as a model: what its family expects, what is there, what does not fit; nothing is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..adapters.megatron import is_factor
from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..families import family_named, family_of_config
from ..families.config import args_from_config, infer_family
from ..families.dimensions import Dimensions, dimensions
from ..families.family import Family, copies, expand, is_carried, reason_to_leave_out
from ..hf_layouts import family_names
from ..model_names import EMBEDDING, HEAD
from ..naming import canonical_tensors
from ..notes import Note
from ..quantised import KEY, dequantised
from ..tensors import Shape, TensorMetadata
from ..views import stored_dimensions

# What quantised HF weights have beside them (compressed-tensors, FP8 of DeepSeek and others), and what stands in place of a weight.
SCALES = ("_scale_inv", "_scale", ".input_scale", ".activation_scale", ".k_scale", ".v_scale")
PACKED = (".qweight", ".weight_packed", "_blocks", ".absmax", ".weight.absmax", ".quant_state.bitsandbytes__nf4", ".SCB")


@dataclass(frozen=True, slots=True)
class Model:
    """Weights of one side ("hf" or "mcore") under the names of their family.

    tensors     name -> tensor (HF names, or canonical Megatron names);   where   folder.
    family, dims, args    None when nothing says them or they contradict each other (then `errors` says so).
    inferred    whether the family was told from tensors, not named by a config or a person.
    missing, unexpected   names against the family;   misshapen   name -> (expected, found);   keep_dtype  names never cast.
    quantised   whether config.json says so;   remarks     what was assumed about the model;
    unknown     why names and shapes were not checked; "" when they were;   factors  names of an adapter in Megatron's modules.
    """

    side: str
    where: str
    tensors: dict[str, TensorMetadata]
    family: Family | None = None
    dims: Dimensions | None = None
    args: Mapping[str, Any] | None = None
    inferred: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()
    keep_dtype: frozenset[str] = frozenset()
    unknown: str = ""
    remarks: tuple[str, ...] = ()
    quantised: bool = False
    errors: tuple[CkptError, ...] = ()
    factors: tuple[str, ...] = ()

    @property
    def repeated(self) -> list[tuple[str, str]]:
        """(original, copy) of tensors that are stored again under another name: a tied head, embeddings of prediction layers."""
        found = [] if self.tied is None else [self.tied]
        if self.side == "hf" and self.family is not None and self.dims is not None:
            found += [(o, c) for c, o in copies(self.family, self.dims) if c in self.tensors and o in self.tensors]
        return found

    @property
    def tied(self) -> tuple[str, str] | None:
        """(embedding, head) when the config ties them and both are stored."""
        names = ("model.embed_tokens.weight", "lm_head.weight") if self.side == "hf" else (EMBEDDING, HEAD)
        if self.family is not None and self.side == "hf":
            by_mcore = {m.mcore: m.hf[0] for m in self.family.tensors if m.mcore in (EMBEDDING, HEAD)}
            names = (by_mcore.get(EMBEDDING, names[0]), by_mcore.get(HEAD, names[1]))
        tied = self.dims.tied if self.dims is not None else False
        return names if tied and all(n in self.tensors for n in names) else None


def model_of_hf(checkpoint: Checkpoint, family: str | None) -> Model:
    """The weights of an HF folder against its config."""
    where, config = checkpoint.location.directory, checkpoint.config
    plain = Model("hf", where, dict(checkpoint.tensors), quantised=bool(config and config.get("quantization_config")))
    if config is None:
        return replace(plain, unknown="there is no config.json")
    packed = next((n for n in checkpoint.tensors if n.endswith(PACKED)), None)
    stored: Mapping[str, TensorMetadata] = checkpoint.tensors
    said = config.get(KEY)
    if packed is not None and isinstance(said, Mapping) and said.get("quant_method") == "mxfp4":
        try:
            stored, packed = dequantised(checkpoint.tensors, config, where)[0], None
        except CkptError as error:
            return replace(plain, unknown=error.what, errors=(error,))
    if packed is not None:
        return replace(plain, unknown=f"the weights are packed by a quantisation ({packed})")
    try:
        known = family_named(family) if family else family_of_config(config, where)
    except CkptError as error:
        return replace(plain, unknown=error.what)
    try:
        args, _ = args_from_config(config, known.rules, allow_unrepresentable=True)
        tensors = family_names(stored, known, where)
        notes: list[Note] = []
        dims = stored_dimensions({**args, "padded_vocab_size": args.get("vocab_size")}, known, tensors, "hf", notes)
    except CkptError as error:
        return replace(plain, family=known, unknown=error.what, errors=(error,))
    remarks = tuple(n.text for n in notes)
    return _against(replace(plain, tensors=tensors, family=known, dims=dims, args=args, remarks=remarks))


def model_of_megatron(
    checkpoint: Checkpoint, weights: Mapping[str, TensorMetadata], family: str | None, config: Mapping[str, Any] | None
) -> Model:
    """Megatron's weights (located) against the arguments stored with them. config: config.json kept beside them, which names the family."""
    where = checkpoint.location.directory
    try:
        tensors = canonical_tensors(weights, where)
    except CkptError as error:
        return Model("mcore", where, dict(weights), unknown=error.what, errors=(error,))
    factors = tuple(n for n in tensors if is_factor(n))
    if factors and len(factors) == len(tensors):
        return Model("mcore", where, tensors, unknown="it holds an adapter; the weights of its base lie elsewhere", factors=factors)
    tensors = {n: t for n, t in tensors.items() if not is_factor(n)}
    plain = Model("mcore", where, tensors, factors=factors)
    if checkpoint.args is None:
        return replace(plain, unknown="the checkpoint stores no model arguments")
    args: dict[str, Any] = dict(checkpoint.args)
    rows = tensors[EMBEDDING].global_shape[0] if EMBEDDING in tensors and tensors[EMBEDDING].global_shape else None
    args["padded_vocab_size"] = rows or args.get("padded_vocab_size")
    vocab = args.get("vocab_size")
    if not vocab or (isinstance(vocab, int) and rows and vocab > rows):  # too few rows: a check of its own tells
        args["vocab_size"] = args["padded_vocab_size"]
    try:
        dims = dimensions(args)
    except CkptError as error:
        return replace(plain, unknown=error.what, errors=(error,))
    inferred = False
    try:
        if family:
            known = family_named(family)
        elif config is not None:
            known = family_of_config(config, where)
        else:
            known, inferred = family_named(infer_family(args, tensors)[0]), True
    except CkptError as error:
        return replace(plain, dims=dims, args=args, unknown=error.what)
    notes: list[Note] = []
    try:
        dims = stored_dimensions(args, known, tensors, "mcore", notes)
    except CkptError as error:
        return replace(plain, family=known, dims=dims, args=args, unknown=error.what, errors=(error,))
    return _against(replace(plain, family=known, dims=dims, args=args, inferred=inferred, remarks=tuple(n.text for n in notes)))


def _against(model: Model) -> Model:
    """The model with what its family misses, does not know, and gives other shapes."""
    family, dims, side = model.family, model.dims, model.side
    if family is None or dims is None:
        return model
    missing: list[str] = []
    misshapen: list[tuple[str, Shape, Shape]] = []
    claimed: set[str] = set()
    keep: set[str] = set()
    absent: dict[str, list[str]] = {}
    present: set[str] = set()
    try:
        for binding in expand(family, dims):
            names = binding.hf if side == "hf" else (binding.mcore,)
            shapes = binding.mapping.hf_shapes(dims) if side == "hf" else (binding.mapping.mcore_shape(dims),)
            here = [n for n in names if n in model.tensors]
            claimed.update(here)
            if binding.mapping.keep_dtype:
                keep.update(here)
            if binding.mapping.optional and not here:
                absent.setdefault(binding.mapping.mcore, []).extend(names)
                continue
            if binding.mapping.optional:
                present.add(binding.mapping.mcore)
            missing += [n for n in names if n not in model.tensors]
            for name, shape in zip(names, shapes, strict=True):
                if name in model.tensors and model.tensors[name].global_shape != shape:
                    misshapen.append((name, shape, model.tensors[name].global_shape))
    except CkptError as error:
        return Model(side, model.where, model.tensors, family, dims, model.args, unknown=error.what, errors=(error,))
    for template, names_ in absent.items():
        if template in present:  # a layer that has it: then all must
            missing += names_
    claimed.update(n for n in model.tensors if is_carried(family, n))
    unexpected = [n for n in model.tensors if n not in claimed and reason_to_leave_out(family, dims, n, side) is None]
    if model.quantised:
        unexpected = [n for n in unexpected if not n.endswith(SCALES)]
    return replace(model, missing=tuple(missing), unexpected=tuple(unexpected), misshapen=tuple(misshapen), keep_dtype=frozenset(keep))
