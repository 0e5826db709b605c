"""ckpt families: which model families ckpt knows, and what was verified about each."""

from __future__ import annotations

from typing import Annotated

import typer

EPILOG = """Examples:

  ckpt families                 every family, how it was verified, what it lacks

  ckpt families deepseek_v3     one of them, with the sources of its names

  ckpt families --json          for programs"""


def families(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One family, or a model_type of config.json.", show_default=False)
    ] = None,
    format: Annotated[str, typer.Option("--format", help="auto, table, tsv, json or md.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """List the model families whose weights and config convert both ways, and how each was verified.

    logits: real megatron-core computes what transformers computes; names: megatron-core asks for exactly these names and shapes; round
    trip: transformers' names, every byte comes back.
    """
    from ..families import FAMILIES, family_named
    from .output import Output

    output = Output("json" if json else format)
    chosen = list(FAMILIES.values())
    if name is not None:
        chosen = [f for f in chosen if name in f.model_types] or [family_named(name)]
    output.document(
        "families",
        {
            "families": [
                {
                    "name": f.name,
                    "model_types": list(f.model_types),
                    "architectures": list(f.architectures),
                    "verified": f.verified,
                    "note": f.note,
                    "sources": list(f.sources),
                }
                for f in chosen
            ]
        },
    )
    if name is not None:
        family = chosen[0]
        classes, sources = ", ".join(family.architectures), "; ".join(family.sources)
        pairs: list[tuple[str, str | None]] = [("family", family.name), ("model types", ", ".join(family.model_types))]
        pairs += [("classes", classes), ("verified", family.verified), ("note", family.note or None), ("sources", sources)]
        output.summary(pairs)
        return
    output.table(["family", "model types", "verified", "note"], [(f.name, ", ".join(f.model_types), f.verified, f.note) for f in chosen])
