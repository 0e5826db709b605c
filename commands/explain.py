"""ckpt explain: what the code of an error or a finding means, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

EPILOG = """Examples:

  ckpt explain E104      an error

  ckpt explain V301      a finding of ckpt validate

  ckpt explain R104      a reason that ckpt verify-resume gives

  ckpt explain           all of them"""


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="A code such as E104 or V301; without one all are listed.", show_default=False)
    ] = None,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Tell more about a code: what the error or finding means, why it matters, what to do."""
    from ..errors import CkptError, nearest
    from ..explain import EXPLANATIONS, Explanation
    from ..resume.meanings import MEANINGS as REASONS
    from ..validation.meanings import MEANINGS
    from ..validation.table import BY_CODE
    from .output import Output

    known = EXPLANATIONS | {c: Explanation(BY_CODE[c].title, text) for c, text in MEANINGS.items()}
    known |= {c: Explanation(title, text) for c, (title, text) in REASONS.items()}
    output = Output("json" if json else format)
    if code is None:
        output.document("explain", {"codes": {c: {"title": e.title, "text": " ".join(e.text.split())} for c, e in known.items()}})
        output.table(["code", "meaning"], [(c, e.title) for c, e in known.items()])
        return
    wanted = code.upper()
    wanted = wanted if wanted.startswith(("E", "V", "R")) else f"E{wanted}"
    if wanted not in known:
        near = nearest(wanted, known)
        hint = f"nearest: {', '.join(near)}" if near else "`ckpt explain` lists them"
        raise CkptError("E001", f"there is no code {code}", hint=hint)
    entry = known[wanted]
    output.document("explain", {"code": wanted, "title": entry.title, "text": " ".join(entry.text.split())})
    if not output.is_json:
        output.prose(f"{wanted}: {entry.title}", entry.text)
