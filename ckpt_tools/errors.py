"""The one exception of ckpt, and the table of what can go wrong.

Every error carries a stable code, what happened, where (file, tensor), expected against found, and one next step.
Codes: E1xx location and iteration, E2xx files and formats, E3xx names, shapes and configs, E4xx plan and writing, E5xx safety,
E9xx environment.
"""

from __future__ import annotations


class CkptError(Exception):
    """A problem that the person using ckpt can act on; printed without a traceback, exit status 2.

    code      stable identifier such as "E201"; `ckpt explain CODE` tells more.
    what      one sentence saying what is wrong, without a final full stop.
    where     path, or "path: tensor", that the sentence is about; None when there is none.
    expected  what should have been there, already formatted; None when it says nothing.
    found     what was there instead.
    hint      one next step, as a command or an instruction.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        for label in ("where", "expected", "found", "hint"):
            text = getattr(self, label)
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)


def nearest(name: str, names: object, count: int = 3) -> list[str]:
    """The `count` strings of the iterable `names` that look most like `name`; empty when none does."""
    import difflib

    return difflib.get_close_matches(name, list(names), n=count, cutoff=0.6)  # type: ignore[call-overload]
