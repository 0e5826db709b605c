"""The command-line reference in docs/cli.md, made from the program itself.

python tests/cli_reference.py          rewrites docs/cli.md
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
KINDS = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH"}
HEAD = """# Command line

Made by `python tests/cli_reference.py` from the program itself; `ckpt COMMAND --help` says the same.

Exit status of every command: 0 done or nothing to report; 1 done and the answer is no (differences, invalid, diverged); 2 it could not be
done; 101 a bug in ckpt; 130 interrupted. stdout is the answer, stderr everything else; in a pipe tables are plain TSV, `--json` is for
programs. `CKPT_DEBUG=1` shows tracebacks.
"""


def reference() -> str:
    """The whole page."""
    from ckpt_tools.commands.main import available

    return "\n".join([HEAD, *(section(entry.name) for entry in available())])


def section(name: str) -> str:
    """One command: usage, what it does, arguments and options by group, examples."""
    import typer

    module = import_module(f"ckpt_tools.commands.{name.replace('-', '_')}")
    app = typer.Typer()
    app.command(name)(getattr(module, name.replace("-", "_")))
    command: Any = typer.main.get_command(app)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not {"--install-completion", "--show-completion"} & set(p.opts)]
    usage = " ".join(["ckpt", name, *(a.metavar if a.required else f"[{a.metavar}]" for a in arguments), "[OPTIONS]"])
    lines = [f"## ckpt {name}", "", f"    {usage}", "", plain(command.help or ""), ""]
    lines += ["| argument | |", "| --- | --- |", *(f"| `{a.metavar}` | {cell(a.help)} |" for a in arguments), ""] if arguments else []
    groups = dict.fromkeys(getattr(o, "rich_help_panel", None) or "Options" for o in options)
    for group in groups:
        lines += [f"| {group} | | default |", "| --- | --- | --- |"]
        lines += [row(o) for o in options if (getattr(o, "rich_help_panel", None) or "Options") == group]
        lines.append("")
    epilog = getattr(module, "EPILOG", "")
    examples = [line for line in epilog.splitlines()[1:] if line.strip()]
    return "\n".join([*lines, *(["```console", *(line.strip() for line in examples), "```", ""] if examples else [])])


def row(option: Any) -> str:
    """One option as a row of a table."""
    names = ", ".join(f"`{o}`" for o in [*option.opts, *option.secondary_opts])
    kind = option.type_descriptor.annotation.__name__
    kind = "" if option.is_flag else f" {option.metavar if kind == 'list' else KINDS[kind]}"
    default = "required" if option.required else "" if option.default in (None, False, (), []) or callable(option.default) else f"`{option.default}`"
    return f"| {names}{kind} | {cell(option.help)} | {default} |"


def cell(text: str | None) -> str:
    """Text for a cell of a table."""
    return plain(text or "").replace("|", "\\|").replace("\n", " ")


def plain(text: str) -> str:
    """Text without rich's markup and escapes."""
    return re.sub(r"\\\[", "[", text).strip()


if __name__ == "__main__":
    PAGE.write_text(reference())
