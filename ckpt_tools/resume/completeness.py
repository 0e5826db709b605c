"""Whether training can go on from a checkpoint at all: what a loader would silently start anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..validation.finding import Finding
from ..validation.run import Options, validate
from .result import Reason

# the code of a check of ckpt validate -> what Megatron calls the thing that is not there
_MISSING = {
    "V303": ("model weights",),
    "V701": ("optimizer",),
    "V702": ("opt_param_scheduler",),
    "V703": ("rng_state",),
    "V704": ("iteration or consumed_train_samples",),
}
ALL = ("optimizer", "opt_param_scheduler", "rng_state")
_TWICE = ("V801", "V802")


@dataclass(frozen=True, slots=True)
class Completeness:
    """missing: parts of the training state that are not there;   reasons: what else is wrong with the checkpoint."""

    missing: tuple[str, ...]
    reasons: tuple[Reason, ...]


def judge(path: str, iteration: str | int, *, family: str | None = None, random: bool = True) -> Completeness:
    """Ask `ckpt validate --resume` about a checkpoint. random: whether its random states can be used at all."""
    report = validate(path, Options(iteration=iteration, resume=True, family=family, ignore=() if random else ("V703",)))
    missing: dict[str, None] = {}
    for finding in report.findings:
        missing |= dict.fromkeys(ALL if finding.code == "V705" else _MISSING.get(finding.code, ()))
    return Completeness(tuple(missing), tuple(_reasons(report.findings)))


def _reasons(findings: Sequence[Finding]) -> list[Reason]:
    reasons = []
    twice, unlike = ([f for f in findings if f.code == code] for code in _TWICE)
    if unlike:
        text = f"the weights are stored twice and the copies of {len(unlike)} tensors differ"
        reasons.append(Reason("R112", "checkpoint", text, unlike[0].tensor, unlike[0].expected, unlike[0].found))
    elif twice:
        reasons.append(Reason("R112", "checkpoint", "the weights are stored twice", "", "", twice[0].found, "warning"))
    others: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.severity == "error" and finding.code not in (*_MISSING, *_TWICE, "V705"):
            others.setdefault(finding.code, []).append(finding)
    for code, found in others.items():
        more = f" ({len(found)} findings)" if len(found) > 1 else ""
        reasons.append(Reason("R113", "checkpoint", f"{code}: {found[0].text}{more}", found[0].tensor, found[0].expected, found[0].found))
    return reasons
