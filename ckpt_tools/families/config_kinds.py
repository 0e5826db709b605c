"""What a rule between config.json and Megatron arguments is: five kinds of plain data, and how fields are read and written.

A family is a tuple of rules. Nothing here names a model; what needs more than one field at a time is a named transform
(families.config_computed), which a `Computed` rule refers to by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..dtypes import dtype as dtype_named
from ..errors import CkptError


class Mark(Enum):
    """REQUIRED: a rule has no default. MISSING: a field is not there (null is there, and means what the rule says)."""

    REQUIRED = "required"
    MISSING = "missing"


REQUIRED, MISSING = Mark.REQUIRED, Mark.MISSING


@dataclass(frozen=True, slots=True)
class Derived:
    """A default computed from other config fields: `field`, or `field // divisor`."""

    field: str
    divisor: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One HF field equal, up to a reversible transform, to one Megatron argument.

    hf        accepted spellings, preferred first; a dot enters a nested object ("rope_parameters.rope_theta").
    arg       attribute of Megatron-LM's args; older: attributes that earlier releases used for the same thing.
    kind      a name in KINDS. operand: second factor of "times", as (HF field, Megatron argument).
    type      "int", "float", "bool", "str" or "dtype" of the HF value.
    default   value when HF does not say, a Derived, None for "then neither side says", or REQUIRED.
    shape     the shape of a tensor depends on it: a disagreement is an error, never a change.
    nullable  null is a value (it means None on the other side too), not an omission.
    absent    HF value that Megatron writes as None (no MTP layers: 0), or MISSING when there is none.
    v4        spelling written for transformers 4 when it is not hf[0].
    quiet     the default needs no note: files of the family leave the field out, and it means the same everywhere.
    forward   only HF -> Megatron (an argument that follows from a field another rule gives back).
    sparse    written without a template only when it differs from the default.
    """

    hf: tuple[str, ...]
    arg: str
    kind: str = "copy"
    type: str = "int"
    default: Any = REQUIRED
    older: tuple[str, ...] = ()
    operand: tuple[str, str] | None = None
    shape: bool = False
    nullable: bool = False
    absent: Any = MISSING
    v4: str | None = None
    quiet: bool = False
    forward: bool = False
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """An HF field with a closed list of values, each standing for several Megatron arguments at once.

    rows  HF value -> (argument, value) pairs; the first row whose pairs all hold is the one read back.
    """

    hf: tuple[str, ...]
    rows: tuple[tuple[Any, tuple[tuple[str, Any], ...]], ...]
    why: str
    default: Any = REQUIRED
    shape: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A Megatron argument that every model of the family has. binding: a checkpoint that says otherwise is another kind of model (E305);
    otherwise the value is only written (a training setting)."""

    arg: str
    value: Any
    binding: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """An HF field that must have one of the `allowed` values (null and missing count as `default`); `why` says what
    Megatron lacks (E305)."""

    hf: tuple[str, ...]
    allowed: tuple[Any, ...]
    why: str
    default: Any = None


@dataclass(frozen=True, slots=True)
class Written:
    """An HF field with no Megatron counterpart: written when there is no template, left alone otherwise. note: what a person must know."""

    hf: str
    value: Any
    note: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """A relation of several fields and arguments, by the name of its transform. options: what that transform asks for.

    hf and args name what it owns, so that a family's own rule can replace it.
    """

    name: str
    hf: tuple[str, ...]
    args: tuple[str, ...]
    options: tuple[Any, ...] = ()
    shape: bool = False


@dataclass(frozen=True, slots=True)
class Lacks:
    """What Megatron-Core's own model cannot compute for any model of the family, whatever its config. refuse: it cannot even hold the
    weights (E305, let through like any other refusal); otherwise a note to whoever builds the model."""

    what: str
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """The other rules are about the object `name` inside config.json, except for the fields `outer`, which stand beside it and take
    precedence. Files without the object have everything at the top."""

    name: str
    outer: tuple[str, ...]


AnyRule = Rule | Choice | Constant | Refuse | Written | Computed | Lacks
Rules = tuple[AnyRule | Section, ...]  # of a family


def extend(base: tuple[AnyRule, ...], *own: AnyRule) -> tuple[AnyRule, ...]:
    """`base` followed by `own`, without the rules of `base` that give an argument which one of `own` gives."""
    taken = {a for rule in own for a in given(rule)}
    return (*(rule for rule in base if not taken.intersection(given(rule))), *own)


def given(rule: AnyRule) -> tuple[str, ...]:
    """The Megatron arguments that a rule gives."""
    if isinstance(rule, Rule | Constant):
        return (rule.arg,)
    if isinstance(rule, Choice):
        return tuple(dict.fromkeys(a for _, pairs in rule.rows for a, _ in pairs))
    return rule.args if isinstance(rule, Computed) else ()


@dataclass(slots=True)
class Fields:
    """A config.json being read: values by dotted path, the notes that reading gave, whether to let through what Megatron cannot hold."""

    config: Mapping[str, Any]
    allow: bool = False
    notes: list[str] = field(default_factory=list)

    def get(self, path: str) -> Any:
        """Value at a dotted path, or MISSING. E311 when the path runs through something that is not an object."""
        value: Any = self.config
        for part in path.split("."):
            if value is None:
                return MISSING
            if not isinstance(value, Mapping):
                raise CkptError("E311", f"config.json: {path.rpartition('.')[0]} is not an object", found=brief(value))
            if part not in value:
                return MISSING
            value = value[part]
        return value

    def first(self, spellings: tuple[str, ...], type: str, *, nullable: bool = False, shape: bool = False) -> tuple[str | None, Any]:
        """(spelling found, checked value), or (None, MISSING). Spellings that disagree: E302 when a shape depends on them, else a note."""
        found = [
            (s, checked(self.get(s), type, s, positive=shape))
            for s in spellings
            if (v := self.get(s)) is not MISSING and (nullable or v is not None)
        ]
        if not found:
            return None, MISSING
        for other, value in found[1:]:
            if not same(value, found[0][1]):
                if shape:
                    raise CkptError(
                        "E302",
                        "config.json gives one size twice, with different numbers",
                        found=f"{found[0][0]} {brief(found[0][1])}, {other} {brief(value)}",
                    )
                self.notes.append(
                    f"config.json says both {found[0][0]} {brief(found[0][1])} and {other} {brief(value)}: the first was taken"
                )
        return found[0]

    def number(self, path: str, default: Any = REQUIRED, type: str = "int") -> Any:
        """Checked value of one field, or `default`. E311 when it is required and missing."""
        _, value = self.first((path,), type)
        if value is not MISSING:
            return value
        if default is REQUIRED:
            inner = next((n for n, v in self.config.items() if isinstance(v, Mapping) and path in v), None)
            hint = "it is not the config of a whole model; take config.json from the model's own folder"
            if inner is not None:
                hint = f"it stands in {inner}: this is the config of a model with several parts, which no family of one part can read"
            raise CkptError("E311", f"config.json lacks {path}", hint=hint)
        return default

    def derived(self, default: Derived) -> int:
        """The value of a Derived default."""
        value = int(self.number(default.field))
        if default.divisor is None:
            return value
        divisor = int(self.number(default.divisor))
        if not divisor or value % divisor:
            raise CkptError("E311", f"config.json: {default.field} is not a multiple of {default.divisor}", found=f"{value} and {divisor}")
        return value // divisor

    def refuse(self, what: str, **details: str) -> None:
        """Raise E305, or note it when what Megatron cannot hold is let through."""
        if not self.allow:
            raise CkptError(
                "E305",
                what,
                hint=details.pop("hint", "the weights do not depend on it: --allow-unrepresentable keeps it in the HF config only"),
                **details,
            )
        self.notes.append(what + "".join(f"; {k} {v}" for k, v in details.items() if k != "hint") + ": kept in the HF config only")


def assign(config: dict[str, Any], path: str, value: Any) -> None:
    """Put `value` at a dotted path of `config`, copying the nested objects on the way so that a template's are not changed."""
    *parents, last = path.split(".")
    for part in parents:
        inner = config.get(part)
        config[part] = dict(inner) if isinstance(inner, Mapping) else {}
        config = config[part]
    config[last] = value


def checked(value: Any, type: str, name: str, *, positive: bool = False) -> Any:
    """`value` if it has the JSON type that field `name` needs (null passes), dtype names made canonical. E311."""
    if value is None:
        return None
    if type == "dtype":
        text = value if isinstance(value, str) else str(value)
        return dtype_named(text).name
    if type == "any":
        return value
    if type == "list":
        good = isinstance(value, list | tuple)
    elif type == "bool":
        good = isinstance(value, bool)
    elif type == "str":
        good = isinstance(value, str)
    elif type == "int":
        good = isinstance(value, int) and not isinstance(value, bool) and value >= (1 if positive else 0)
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good:
        raise CkptError(
            "E311", f"{name} has an unusable value", expected=f"a positive {type}" if positive else f"{type}", found=brief(value)
        )
    return value


def same(a: Any, b: Any) -> bool:
    """Equality of two values of a rule: numbers up to rounding of a computed float, sequences by content, True only with True."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or math.isclose(a, b, rel_tol=1e-9)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def brief(value: Any) -> str:
    """repr of a value that came from a file, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
