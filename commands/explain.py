"""ckpt explain: what an error code means and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

EPILOG = """Examples:

  ckpt explain E104      one code

  ckpt explain           all of them"""


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="A code such as E104; without one all are listed.", show_default=False)
    ] = None,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Tell more about an error code: what it means, why it is an error, what to do."""
    from ..errors import CkptError, nearest
    from ..explain import EXPLANATIONS
    from .output import Output

    output = Output("json" if json else format)
    if code is None:
        output.document("explain", {"codes": {c: {"title": e.title, "text": " ".join(e.text.split())} for c, e in EXPLANATIONS.items()}})
        output.table(["code", "meaning"], [(c, e.title) for c, e in EXPLANATIONS.items()])
        return
    wanted = code.upper()
    wanted = wanted if wanted.startswith("E") else f"E{wanted}"
    if wanted not in EXPLANATIONS:
        near = nearest(wanted, EXPLANATIONS)
        hint = f"nearest: {', '.join(near)}" if near else "`ckpt explain` lists them"
        raise CkptError("E001", f"there is no error code {code}", hint=hint)
    entry = EXPLANATIONS[wanted]
    output.document("explain", {"code": wanted, "title": entry.title, "text": " ".join(entry.text.split())})
    if not output.is_json:
        output.prose(f"{wanted}: {entry.title}", entry.text)
