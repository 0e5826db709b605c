"""The sizes of a model as its Megatron arguments give them: the symbols that mappings are written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CkptError
from ..tensors import Shape

MOST = 1_000_000  # layers times experts: more than any model has, and few enough to be listed


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Symbols: L layers, H hidden, A query heads, G query groups, R = A/G, d head dim, F ffn, V vocabulary, E experts, M expert ffn,
    S shared-expert ffn; any other name in a size is looked up among the Megatron arguments."""

    symbols: dict[str, int]
    padded_vocab: int
    tied: bool
    moe_layers: tuple[bool, ...]
    args: Mapping[str, Any] = field(repr=False)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.symbols["L"]

    def size(self, text: str) -> int:
        """Value of a size such as "A*d+2*G*d"."""
        total = 0
        for term in text.split("+"):
            value = 1
            for factor in term.split("*"):
                value *= int(factor) if factor.isdigit() else self._symbol(factor)
            total += value
        return total

    def shape(self, sizes: tuple[str, ...]) -> Shape:
        """Shape from a tuple of sizes."""
        return tuple(self.size(s) for s in sizes)

    def _symbol(self, name: str) -> int:
        if name in self.symbols:
            return self.symbols[name]
        value = self.args.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CkptError("E301", f"the model's arguments lack {name}", found=repr(value), hint="give the HF config with --hf-config DIR")
        return value

    @property
    def mtp(self) -> int:
        """Number of multi-token-prediction layers after the decoder's."""
        return int(self.args.get("mtp_num_layers") or 0)

    def holds(self, condition: str, layer: int | None) -> bool:
        """Whether a mapping's `when` applies: "" always; "untied"; "mtp" there are prediction layers; "dense" / "moe" = kind of the
        layer; the name of a Megatron argument, alone or after "no ": whether it is set. Several, separated by commas: all of them."""
        return all(self._holds(part.strip(), layer) for part in condition.split(",")) if condition else True

    def _holds(self, condition: str, layer: int | None) -> bool:
        if condition == "untied":
            return not self.tied
        if condition == "mtp":
            return self.mtp > 0
        if condition in ("moe", "dense") and layer is not None:
            return self.moe_layers[layer] == (condition == "moe")
        wanted, name = (False, condition[3:]) if condition.startswith("no ") else (True, condition)
        if name not in self.args:
            raise CkptError("E390", f"a family uses the unknown condition {condition!r}")
        return bool(self.args[name]) == wanted


def dimensions(args: Mapping[str, Any]) -> Dimensions:
    """Dimensions from Megatron arguments. CkptError E301 naming the argument that is missing or contradicts another."""
    layers, hidden, heads = (_need(args, n) for n in ("num_layers", "hidden_size", "num_attention_heads"))
    groups = heads
    if args.get("num_query_groups") and args.get("group_query_attention", True):
        groups = _need(args, "num_query_groups")
    if heads % groups:
        raise CkptError("E301", "query heads are not a multiple of query groups", found=f"{heads} heads, {groups} groups")
    if layers * int(args.get("num_experts") or args.get("num_moe_experts") or 1) > MOST:
        raise CkptError("E301", "no model has that many layers and experts", expected=f"at most {MOST}", found=f"{layers} layers")
    head_dim = args.get("kv_channels") or hidden // heads
    vocab = args.get("vocab_size") or 0
    symbols = {"L": layers, "H": hidden, "A": heads, "G": groups, "R": heads // groups, "d": head_dim, "V": vocab}
    if args.get("ffn_hidden_size"):
        symbols["F"] = _need(args, "ffn_hidden_size")
    experts = args.get("num_experts") or args.get("num_moe_experts")
    if experts:
        symbols["E"] = int(experts)
        symbols["M"] = int(args.get("moe_ffn_hidden_size") or symbols["F"])
    if args.get("moe_shared_expert_intermediate_size"):
        symbols["S"] = _need(args, "moe_shared_expert_intermediate_size")
    padded = args.get("padded_vocab_size") or vocab
    if padded < vocab:
        raise CkptError(
            "E301", "the padded vocabulary is smaller than the vocabulary", expected=f"at least {vocab} rows", found=f"{padded}"
        )
    tied = not args.get("untie_embeddings_and_output_weights", False)
    return Dimensions(symbols, padded, tied, _moe_layers(args, layers, bool(experts)), args)


def _need(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CkptError(
            "E301", f"the model's arguments lack a usable {name}", found=repr(value), hint="give the HF config with --hf-config DIR"
        )
    return value


def _moe_layers(args: Mapping[str, Any], layers: int, experts: bool) -> tuple[bool, ...]:
    if not experts:
        return (False,) * layers
    pattern = args.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        return tuple(i % pattern == 0 for i in range(layers))
    if not isinstance(pattern, (list, tuple)) or len(pattern) != layers:
        raise CkptError("E301", "moe_layer_freq does not fit the number of layers", expected=f"{layers} entries", found=repr(pattern)[:200])
    return tuple(bool(p) for p in pattern)
