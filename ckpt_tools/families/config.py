"""config.json to Megatron arguments and back, by one tuple of rules per family that is read in both directions.

With a template (the HF config that belongs to the checkpoint) nothing is rewritten that does not disagree: each rule turns the template
into arguments, and only where these differ from the checkpoint's is anything said, changed or refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from ..dtypes import dtype as dtype_named
from ..errors import CkptError
from .config_computed import COMPUTED
from .config_kinds import (
    MISSING,
    REQUIRED,
    AnyRule,
    Choice,
    Computed,
    Constant,
    Derived,
    Fields,
    Lacks,
    Refuse,
    Rule,
    Rules,
    Section,
    Written,
    assign,
    brief,
    checked,
    given,
    same,
)
from .config_scalars import KINDS
from .megatron_args import effective_args


def args_from_config(
    config: Mapping[str, Any], rules: Rules, *, allow_unrepresentable: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Megatron-LM arguments of the model that config.json describes, and notes about every default that was used.

    Values are plain; params_dtype is a ckpt dtype name ("bfloat16") and absent when config.json names none (the tensors then decide).
    allow_unrepresentable  what Megatron-Core cannot compute, but whose weights convert (a rope type), is noted instead of refused.
    Errors: E305 what Megatron cannot hold, E311 a field that is missing or malformed, E302 one size given twice with different numbers.
    """
    section, own = _section(rules)
    fields = Fields(config if section is None else inside(config, section), allow_unrepresentable)
    args: dict[str, Any] = {}
    for rule in own:
        args.update(_forward(rule, fields))
    return args, tuple(fields.notes)


def _section(rules: Rules) -> tuple[Section | None, tuple[AnyRule, ...]]:
    """The Section among the rules, and the others."""
    found = next((rule for rule in rules if isinstance(rule, Section)), None)
    return found, tuple(rule for rule in rules if not isinstance(rule, Section))


def inside(config: Mapping[str, Any], section: Section) -> Mapping[str, Any]:
    """The fields that a family's rules are about, of a config.json that may keep them in an object of their own."""
    held = config.get(section.name)
    if not isinstance(held, Mapping):
        return config
    return {**held, **{name: config[name] for name in section.outer if config.get(name) is not None}}


def _into_section(config: Mapping[str, Any], section: Section, made: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the fields `made` in its object, or beside it where they stood."""
    held = dict(config.get(section.name) or {})
    whole = dict(config)
    for name, value in made.items():
        if name in section.outer and (name in whole or name not in held):
            whole[name] = value
        else:
            held[name] = value
    return {**whole, section.name: held}


def config_from_args(
    args: Mapping[str, Any],
    rules: Rules,
    *,
    architectures: list[str],
    model_type: str,
    template: Mapping[str, Any] | None = None,
    spelling: str = "v5",
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json for a checkpoint with these Megatron arguments, and notes about what was assumed or changed.

    template  followed verbatim: unknown fields, order and spelling are kept. A field that a shape depends on and that disagrees is E302;
              any other field that disagrees is changed, with a note.
    spelling  without a template: "v5" (rope_parameters, dtype) or "v4" (rope_theta, rope_scaling, torch_dtype); transformers 5 reads both.
    Errors: E301 arguments that a config needs are missing, E302, E305 what a config of the family cannot say, E311 a malformed template.
    """
    known = effective_args(args)
    section, own = _section(rules)
    if section is not None and template is not None and isinstance(template.get(section.name), Mapping):
        made, told = _follow(known, own, inside(template, section))
        return _into_section(template, section, made), told
    if template is not None:
        return _follow(known, own, template)
    if section is not None:
        made, told = _alone(known, own, spelling)
        said = f"config.json holds the model's {section.name} only: the checkpoint does not say the rest (give --hf-config DIR)"
        whole = {"architectures": list(architectures), "model_type": model_type}
        return _into_section(whole, section, made), (*told, said)
    made, told = _alone(known, own, spelling)
    return dict(sorted({"architectures": list(architectures), "model_type": model_type, **made}.items())), told


def _alone(known: Mapping[str, Any], rules: tuple[AnyRule, ...], spelling: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields that arguments give without a config to follow."""
    config: dict[str, Any] = {}
    notes: list[str] = []
    for rule in rules:
        for path, value in _backward(rule, known, spelling, notes).items():
            assign(config, path, value)
    return config, tuple(notes)


# Fields that say nothing about what the model computes.
_NEUTRAL = frozenset(
    """architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id id2label is_encoder_decoder label2id model_type
    name_or_path output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type
    quantization_config return_dict torch_dtype transformers_version use_cache _name_or_path _attn_implementation""".split()
)


def unread_fields(config: Mapping[str, Any], rules: Rules) -> list[str]:
    """Fields of config.json that no rule of a family reads and that may say something about what the model computes."""
    section, own = _section(rules)
    config = config if section is None else inside(config, section)
    read = {spelling.partition(".")[0] for rule in own for spelling in _spellings(rule)}
    return sorted(name for name, value in config.items() if name not in read | _NEUTRAL and value not in (None, False, [], {}))


def _spellings(rule: AnyRule) -> tuple[str, ...]:
    if isinstance(rule, Rule):
        return (*rule.hf, *((rule.operand[0],) if rule.operand else ()), *((rule.v4,) if rule.v4 else ()))
    if isinstance(rule, Written):
        return (rule.hf,)
    return rule.hf if isinstance(rule, Choice | Refuse | Computed) else ()


def infer_family(args: Mapping[str, Any], tensor_names: Collection[str]) -> tuple[str, str]:
    """The family of a Megatron checkpoint that comes without HF config, and why it is that one. CkptError E310 when it is none known.

    tensor_names are canonical names; they decide where arguments and tensors could disagree.
    """
    known = effective_args(args)
    ends = {name.rpartition("layers.")[2].partition(".")[2] for name in tensor_names}
    experts = bool(known.get("num_experts")) or any(e.startswith("mlp.router.") for e in ends)
    if experts and known.get("quick_geglu") and "self_attention.core_attention.softmax_offset" in ends:
        return "gpt_oss", "experts gated by quick GELU, attention with sinks"
    other = (
        ("multi-latent attention", bool(known.get("multi_latent_attention"))),
        ("an MLP without SwiGLU", known.get("swiglu") is False),
        ("LayerNorm", known.get("normalization") == "LayerNorm" or any(e.endswith("layer_norm_bias") for e in ends)),
        ("a norm that stores gamma - 1", known.get("layernorm_zero_centered_gamma") is True),
        ("no rotary embedding", known.get("position_embedding_type") not in (None, "rope", "yarn")),
    )
    reasons = [what for what, holds in other if holds]
    if reasons:
        raise CkptError(
            "E310",
            f"the family of this checkpoint cannot be told from its arguments: it has {', '.join(reasons)}",
            hint="name it with --family, or give the HF config with --hf-config DIR",
        )
    if experts:
        if "mlp.shared_experts.gate_weight" in ends:
            return "qwen2_moe", "experts, and a shared one with a gate"
        if "self_attention.q_layernorm.weight" in ends and not any("shared_experts" in e or "expert_bias" in e for e in ends):
            return "qwen3_moe", "experts in softmax routing, norms on the heads of q and k"
        if not any("shared_experts" in e or "expert_bias" in e or e.endswith("bias") for e in ends):
            return "mixtral", "experts in softmax routing, no norms on q and k, no shared expert"
        raise CkptError("E310", "the family of this checkpoint cannot be told from its arguments: it has experts of an unusual kind",
                        hint="name it with --family, or give the HF config with --hf-config DIR")  # fmt: skip
    if "self_attention.q_layernorm.weight" in ends:
        return "qwen3", "norms on the heads of q and k"
    biased, projected = "self_attention.linear_qkv.bias" in ends, "self_attention.linear_proj.bias" in ends
    if biased and not projected:
        return "qwen2", "biases on q, k and v, none on the output projection"
    if known.get("window_size") and not biased:
        return "mistral", "no biases, no norms on q and k, a sliding window of attention"
    return "llama", "biases on every linear layer" if biased else "no biases, no norms on q and k, no sliding window"


def padded_vocab(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of Megatron-LM's vocabulary table: the next multiple of make_vocab_size_divisible_by (usually 128) times tp. CkptError E301."""
    if min(vocab_size, divisible_by, tp) < 1:
        raise CkptError(
            "E301", "a vocabulary cannot be padded with these numbers", found=f"{vocab_size} rows to a multiple of {divisible_by} x tp {tp}"
        )
    unit = divisible_by * tp
    return -(-vocab_size // unit) * unit


def _forward(rule: AnyRule, fields: Fields) -> dict[str, Any]:
    if isinstance(rule, Constant):
        return {rule.arg: rule.value}
    if isinstance(rule, Computed):
        return COMPUTED[rule.name].forward(fields, rule.options)
    if isinstance(rule, Lacks):
        fields.refuse(rule.what) if rule.refuse else fields.notes.append(rule.what)
        return {}
    if isinstance(rule, Written):
        return {}
    if isinstance(rule, Rule):
        return _forward_rule(rule, fields)
    spelling, value = fields.first(rule.hf, "any")
    if value is MISSING:
        value = _default(rule.default, rule.hf[0], fields, quiet=isinstance(rule, Refuse) or rule.quiet)
    allowed = rule.allowed if isinstance(rule, Refuse) else tuple(v for v, _ in rule.rows)
    if not any(same(value, a) for a in allowed):
        fields.refuse(rule.why, expected=f"{spelling or rule.hf[0]} {' or '.join(brief(a) for a in allowed)}", found=brief(value))
        return {} if isinstance(rule, Refuse) else dict(rule.rows[0][1])
    return {} if isinstance(rule, Refuse) else dict(next(pairs for v, pairs in rule.rows if same(v, value)))


def _forward_rule(rule: Rule, fields: Fields) -> dict[str, Any]:
    _, value = fields.first(rule.hf, rule.type, nullable=rule.nullable, shape=rule.shape)
    if value is MISSING:
        value = _default(rule.default, rule.hf[0], fields, quiet=rule.quiet)
        if value is None and not rule.nullable:
            return {}
    if rule.absent is not MISSING and same(value, rule.absent):
        return {rule.arg: None}
    out = {rule.arg: KINDS[rule.kind].forward(value, fields.number(rule.operand[0]) if rule.operand else None)}
    if rule.type == "dtype":  # what Megatron computes in; weights of any other dtype are float32 parameters to it
        out |= {"bf16": value == "bfloat16", "fp16": value == "float16"}
    return out


def _default(default: Any, name: str, fields: Fields, *, quiet: bool) -> Any:
    if default is REQUIRED:
        return fields.number(name)  # raises
    value = fields.derived(default) if isinstance(default, Derived) else default
    if not quiet:
        fields.notes.append(f"config.json has no {name}: {value} taken")
    return value


def _canonical(rule: AnyRule, args: Mapping[str, Any]) -> dict[str, Any]:
    """What `args` say about the arguments a rule gives, in the form in which _forward gives them; what they do not say is left out."""
    if isinstance(rule, Computed):
        return COMPUTED[rule.name].canonical(args, rule.options)
    if isinstance(rule, Rule):
        value = next((args[name] for name in (rule.arg, *rule.older) if args.get(name) is not None), None)
        if value is None:
            return {rule.arg: None} if rule.nullable or (rule.absent is not MISSING and rule.arg in args) else {}
        return {rule.arg: dtype_named(str(value)).name if rule.type == "dtype" else value}
    return {name: args[name] for name in given(rule) if args.get(name) is not None}


def _backward(
    rule: AnyRule, args: Mapping[str, Any], spelling: str, notes: list[str], template: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Config fields by dotted path. Without a template an argument that is missing takes the rule's default."""
    stored = _canonical(rule, args)
    if isinstance(rule, Constant):
        _agree(rule, args)
        return {}
    if isinstance(rule, Computed):
        updates, said = COMPUTED[rule.name].backward(stored, rule.options, spelling, template)
        notes.extend(said)
        return updates
    if isinstance(rule, Choice):
        for value, pairs in rule.rows:
            if all(same(stored.get(name, wanted), wanted) for name, wanted in pairs):
                return {rule.hf[0]: value}
        raise CkptError("E305", rule.why, expected=" or ".join(_pairs(dict(p)) for _, p in rule.rows), found=_pairs(stored))
    if isinstance(rule, Written):
        if rule.note:
            notes.append(rule.note)
        return {rule.hf: rule.value}
    if isinstance(rule, Refuse | Lacks) or rule.forward:
        return {}
    return _backward_rule(rule, stored, args, spelling, notes)


def _backward_rule(rule: Rule, stored: Mapping[str, Any], args: Mapping[str, Any], spelling: str, notes: list[str]) -> dict[str, Any]:
    path = rule.v4 if spelling == "v4" and rule.v4 else rule.hf[0]
    if rule.arg not in stored:
        if rule.default is REQUIRED or isinstance(rule.default, Derived):
            raise CkptError("E301", f"the checkpoint's arguments lack {rule.arg}", hint="give the HF config with --hf-config DIR")
        if rule.default is None:
            return {}
        if not rule.quiet:
            notes.append(f"the checkpoint does not say {rule.arg}: {path} {brief(rule.default)} assumed")
        return {path: rule.default}
    value = stored[rule.arg]
    if value is None:
        return {path: None if rule.absent is MISSING else rule.absent}
    value = checked(
        KINDS[rule.kind].backward(value, args.get(rule.operand[1]) if rule.operand else None), rule.type, path, positive=rule.shape
    )
    if rule.sparse and isinstance(rule.default, Derived) and value == _derived_from_args(rule.default, args):
        return {}
    return {path: value}


def _derived_from_args(default: Derived, args: Mapping[str, Any]) -> Any:
    value, divisor = args.get(default.field), args.get(default.divisor) if default.divisor else 1
    return value // divisor if isinstance(value, int) and isinstance(divisor, int) and divisor and value % divisor == 0 else None


def _agree(rule: Constant, args: Mapping[str, Any]) -> None:
    value = args.get(rule.arg)
    if rule.binding and value is not None and not same(value, rule.value):
        raise CkptError(
            "E305",
            "a config of this family cannot say what the checkpoint's arguments say",
            expected=f"{rule.arg} {brief(rule.value)}",
            found=f"{rule.arg} {brief(value)}",
            hint="name the right family with --family",
        )


def _follow(args: Mapping[str, Any], rules: tuple[AnyRule, ...], template: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    config: dict[str, Any] = deepcopy(dict(template))
    notes: list[str] = []
    old = any(name in template for name in ("torch_dtype", "rope_theta", "rope_scaling")) and not any(
        name in template for name in ("dtype", "rope_parameters")
    )
    for rule in rules:
        if isinstance(rule, Constant):
            _agree(rule, args)
            continue
        if isinstance(rule, Written | Refuse | Lacks) or (isinstance(rule, Rule) and rule.forward):
            continue
        have, stored = _forward(rule, Fields(template, allow=True)), _canonical(rule, args)
        differ = {name for name in have.keys() & stored.keys() if not same(have[name], stored[name])}
        if not differ:
            continue
        told = COMPUTED[rule.name].tolerates(args, have) if isinstance(rule, Computed) else None
        if told:
            notes.append(told)
            continue
        checkpoint, hf = _pairs({n: stored[n] for n in sorted(differ)}), _pairs({n: have[n] for n in sorted(differ)})
        if rule.shape:
            raise CkptError(
                "E302",
                "HF config and checkpoint disagree about a size of the model",
                expected=f"{hf} (HF config, {', '.join(rule.hf)})",
                found=f"{checkpoint} (checkpoint)",
                hint="give the config of this very model",
            )
        merged = {**args, **{n: v for n, v in have.items() if v is not None and n not in stored}}
        for path, value in _backward(rule, merged, "v4" if old else "v5", notes, template).items():
            for place in _places(rule, path, template):
                assign(config, place, value)
        notes.append(f"config.json changed to what the checkpoint says: {checkpoint} (it said {hf})")
    return config, tuple(notes)


def _places(rule: AnyRule, path: str, template: Mapping[str, Any]) -> list[str]:
    """The spellings of a field that the template has, all of them; `path` when it has none."""
    if not isinstance(rule, Rule | Choice):
        return [path]
    return [s for s in rule.hf if Fields(template).get(s) is not MISSING] or [path]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {brief(value)}" for name, value in values.items())
