"""Whether training can go on from a checkpoint at all: what a loader would silently start anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..validation.finding import Finding
from ..validation.run import Options, validate
from .result import Reason

# the code of a check of ckpt validate -> what Megatron calls the thing that is not there
_MISSING = {
    "V701": ("optimizer",),
    "V702": ("opt_param_scheduler",),
    "V703": ("rng_state",),
    "V704": ("iteration or consumed_train_samples",),
}
_ALL = ("optimizer", "opt_param_scheduler", "rng_state")
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
        missing |= dict.fromkeys(_ALL if finding.code == "V705" else _MISSING.get(finding.code, ()))
    return Completeness(tuple(missing), tuple(_reasons(report.findings)))


def _reasons(findings: Sequence[Finding]) -> list[Reason]:
    reasons = []
    for finding in findings:
        if finding.code in _TWICE:
            text = "the weights are stored twice" + (" and the copies differ" if finding.code == "V802" else "; the copies are equal")
            severity = "error" if finding.code == "V802" else "warning"
            reasons.append(Reason("R112", "checkpoint", text, finding.tensor, finding.expected, finding.found, severity))
        elif finding.severity == "error" and finding.code not in (*_MISSING, "V705"):
            text = f"{finding.code}: {finding.text}"
            reasons.append(Reason("R113", "checkpoint", text, finding.tensor, finding.expected, finding.found))
    return reasons
