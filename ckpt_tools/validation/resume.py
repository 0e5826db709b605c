"""Checks of what training needs to go on: optimizer, step, scheduler, random states, counters."""

from __future__ import annotations

from collections.abc import Iterator

from ..megatron_target import has_optimizer
from ..optimizer.kinds import optimizer_state, rest_of_state
from .files import errors
from .finding import Problem
from .subject import Subject


def _trains(subject: Subject) -> bool:
    """Whether this is an iteration of a run: a release and an HF folder are not meant to be gone on from."""
    return subject.state is not None and subject.location is not None and subject.location.label != "release"


def no_training_state(subject: Subject) -> Iterator[Problem]:
    """HF weights and releases hold no training state at all."""
    if subject.location is None or _trains(subject) or subject.errors:
        return
    if subject.resume or subject.location.format not in ("hf", "peft"):  # of an HF folder nobody expects more unless asked
        yield Problem("weights only: training cannot go on from here", subject.directory)


def no_optimizer(subject: Subject) -> Iterator[Problem]:
    """No optimizer state: moments would start from zero."""
    if _trains(subject) and subject.state is not None and not has_optimizer(subject.state):
        yield Problem("there is no optimizer state", subject.directory)
    if subject.legacy is not None:
        holders = [r.name for r in subject.legacy.ranks if "optimizer" in r.file.value]
        without = [r.name for r in subject.legacy.ranks if "optimizer" not in r.file.value]
        if holders and without:
            text = "some ranks have optimizer state and others have none"
            yield Problem(text, subject.directory, found=f"none in {', '.join(without[:8])}", severity="error")


def no_scheduler(subject: Subject) -> Iterator[Problem]:
    """No learning-rate schedule: it would start from its beginning."""
    if _trains(subject) and not any(isinstance(subject.common.get(k), dict) for k in ("opt_param_scheduler", "lr_scheduler")):
        yield Problem("there is no state of the learning-rate scheduler", subject.directory)


def no_random_state(subject: Subject) -> Iterator[Problem]:
    """No random states: dropout and data order would differ."""
    if not _trains(subject) or subject.state is None or "rng_state" in subject.common:
        return
    if not rest_of_state(subject.state).rng_objects:
        yield Problem("there are no random states", subject.directory)


def no_progress(subject: Subject) -> Iterator[Problem]:
    """No count of what was consumed: the data would start from its beginning."""
    if not _trains(subject) or subject.state is None:
        return
    args = subject.state.args
    if args is not None and not isinstance(args.get("consumed_train_samples"), int):
        yield Problem("nothing says how many samples were consumed", subject.directory)
    if not isinstance(subject.common.get("iteration"), int):
        yield Problem("nothing inside says which iteration it is", subject.directory)


def bound_to_its_layout(subject: Subject) -> Iterator[Problem]:
    """Optimizer state that Megatron cannot load with another TP, PP or EP."""
    if subject.state is not None and subject.state.format == "torch_dist":
        found = optimizer_state(subject.state)
        if found.reshardable is False:
            yield Problem(
                "Megatron cannot load the optimizer state at another TP, PP or EP; `ckpt reshard` can", subject.directory, found=found.why
            )


def misfit(subject: Subject) -> Iterator[Problem]:
    """Optimizer state that is not that of this model."""
    yield from errors("E226", "E227")(subject)


misfit.codes = ("E226", "E227")  # type: ignore[attr-defined]


def _notes(subject: Subject, about: str) -> Iterator[Problem]:
    for note in subject.optimizer.notes if subject.optimizer is not None else ():
        kind = "step" if note.subject == "optimizer step" else "parameters" if "were not trained" in note.text else "other"
        if note.kind == "warning" and kind == about:
            tensor = note.subject.partition(",")[0] if kind == "parameters" else ""
            yield Problem(note.text, subject.directory, tensor)


def steps_disagree(subject: Subject) -> Iterator[Problem]:
    """Step counts of which one is stale."""
    yield from _notes(subject, "step")


def without_state(subject: Subject) -> Iterator[Problem]:
    """Parameters that the optimizer does not know."""
    yield from _notes(subject, "parameters")


def other_remarks(subject: Subject) -> Iterator[Problem]:
    """What else the reader of optimizer state has to say: groups that are missing or that ranks disagree about."""
    yield from _notes(subject, "other")
