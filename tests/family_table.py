"""The table of families in docs/families.md and the list in README.md, made from the families themselves.

python tests/family_table.py          rewrites both
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
LIST = re.compile(r"(<!-- families -->\n).*?(\n<!-- /families -->)", re.S)
HEAD = """# Model families

Made by `python tests/family_table.py`; `ckpt families` prints the same. What *verified* says is what `tests/families/test_contract.py` proves:
a family may not claim more.

- **logits**: real megatron-core (0.16.1 and 0.19.2) builds its model from the arguments that ckpt wrote, finds every tensor under the name and
  shape it asks for (Transformer Engine names through a stand-in that has parameters only, and its local spec), and computes the logits of
  transformers within 1e-4 in float32.
- **names**: the same without the logits.
- **round trip**: names and shapes are those of transformers, every byte comes back from torch_dist and from legacy ranks, and the config written
  without the HF folder makes transformers compute the same.
"""


def page() -> str:
    """docs/families.md."""
    from ckpt_tools.families import FAMILIES

    lines = [HEAD, "| family | model types | verified | note | sources |", "| --- | --- | --- | --- | --- |"]
    for f in FAMILIES.values():
        lines.append(f"| {f.name} | {', '.join(f.model_types)} | {f.verified} | {f.note} | {'; '.join(f.sources)} |")
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """README.md with the list of families brought up to date."""
    from ckpt_tools.families import FAMILIES

    lines = []
    for level in ("logits", "names", "round trip"):
        names = ", ".join(f.name for f in FAMILIES.values() if f.verified == level)
        lines.append(f"- {level}: {names}")
    return LIST.sub(lambda m: m[1] + "\n".join(lines) + m[2], text)


if __name__ == "__main__":
    PAGE.write_text(page())
    (ROOT / "README.md").write_text(readme((ROOT / "README.md").read_text()))
