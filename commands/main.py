"""The ckpt program: finds the command, runs it, turns what happened into an exit status."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..errors import CkptError, nearest

DONE, NO, FAILED, BUG, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 101, 130, 141


class Entry(NamedTuple):
    """A command: the function `name` of the module `.name` (- as _), in a group of the first help screen."""

    name: str
    group: str
    summary: str


COMMANDS = (
    Entry("inspect", "Look", "Say what a checkpoint is: format, iteration, tensors, layout, model arguments"),
    Entry("validate", "Look", "Check a checkpoint: files, names, shapes, optimizer state, and with --deep every value"),
    Entry("diff", "Look", "Whether two checkpoints hold the same model, across formats and layouts; what differs and why"),
    Entry("verify-resume", "Look", "Prove that training continues: save, convert, load, go on, compare with a run that never stopped"),
    Entry("convert", "Change", "Convert between Hugging Face safetensors and Megatron-Core"),
    Entry("reshard", "Change", "Move a Megatron checkpoint to another parallel layout, optimizer included"),
    Entry("slim", "Change", "Take weights out of an iteration folder that lie beside it as safetensors too"),
    Entry("merge", "Change", "Add a LoRA adapter to the weights it was trained for"),
    Entry("families", "Help", "List the model families, and how each was verified"),
    Entry("explain", "Help", "Tell more about the code of an error or a finding, such as E104"),
)

ABOUT = """\
ckpt moves LLM checkpoints between Hugging Face safetensors and Megatron-Core (torch_dist).
It works on the files alone: no GPU, no torch, no model is built, and memory does not grow with the model.
Only verify-resume trains: it proves, with megatron-core, that a run goes on as if it had never stopped."""

EXAMPLES = """\
  ckpt inspect runs/llama                                what is in the latest iteration of a run
  ckpt convert meta-llama/ runs/llama --to torch_dist    a Hugging Face folder for Megatron, at any TP and PP
  ckpt convert runs/llama out/ --to hf --dry-run         the way back; --dry-run only shows the plan"""

CLOSING = """\
`ckpt COMMAND --help` tells all about one; `ckpt --install-completion` completes it in your shell.
Exit status: 0 done, 1 done and the answer is no, 2 could not be done, 101 a bug in ckpt, 130 interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    0 done; 1 done and the answer is no; 2 it could not be done (CkptError, usage); 101 a bug in ckpt; 130 interrupted;
    141 whoever read stdout went away. Commands return None or one of the first two.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        signal.signal(signal.SIGTERM, _terminate)
        gc.set_threshold(200_000, 20, 100)  # a plan is millions of objects and no cycles: looking for them took half of the planning
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is shown, not fatal
        status = _dispatch(given)
        sys.stdout.flush()
        return status
    except CkptError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        return _silence()
    except OSError as error:  # of a file or a folder: not a fault of ckpt, whatever it was doing
        return _failed(CkptError("E901", "a file cannot be read", where=str(error.filename or ""), found=error.strerror or str(error)))
    except SystemExit as exit:
        if isinstance(exit.__context__, BrokenPipeError):  # Typer turns a closed pipe into exit status 1
            return _silence()
        raise
    except Exception as error:  # noqa: BLE001 - the one place where a bug ends
        return _bug(error)


def _dispatch(given: list[str]) -> int:
    completing = "_CKPT_COMPLETE" in os.environ
    if not completing and (not given or given[0] in ("--help", "-h", "help")):
        if len(given) < 2 or given[0] != "help":
            sys.stdout.write(first_screen())
            return DONE
        given = [given[1], "--help"]
    if given == ["--version"]:
        from .. import __version__

        sys.stdout.write(f"ckpt {__version__}\n")
        return DONE
    if completing or given[0] in ("--install-completion", "--show-completion"):
        return _run(available(), given)
    chosen = [entry for entry in available() if entry.name == given[0]]
    if not chosen:
        raise _unknown(given[0])
    return _run(chosen, given)


def available() -> list[Entry]:
    """The commands whose module is there."""
    return [entry for entry in COMMANDS if find_spec(_module(entry), __package__)]


def _module(entry: Entry) -> str:
    return f"{__package__}.{entry.name.replace('-', '_')}"


def _unknown(word: str) -> CkptError:
    what = f"there is no option {word} before a command" if word.startswith("-") else f"there is no command {word}"
    near = nearest(word, [entry.name for entry in available()], 1)
    return CkptError("E001", what, hint=f"did you mean `ckpt {near[0]}`?" if near else "`ckpt --help` lists the commands")


def first_screen() -> str:
    """What a newcomer sees: what ckpt is, the commands in groups, three examples. Written here so that it costs no import."""
    entries = available()
    lines = [ABOUT, "", "Usage: ckpt COMMAND [OPTIONS]", ""]
    for group in dict.fromkeys(entry.group for entry in entries):
        lines.append(f"{group}:")
        lines += [f"  {entry.name:<13} {entry.summary}" for entry in entries if entry.group == group]
    return "\n".join([*lines, "", "Examples:", EXAMPLES, "", CLOSING]) + "\n"


def _run(entries: Sequence[Entry], given: list[str]) -> int:
    import typer

    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="ckpt", help=ABOUT, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=settings)
    app.callback()(_root)  # without it Typer would take a single command for the whole program
    for entry in entries:
        module = import_module(_module(entry))
        function: Callable[..., Any] = getattr(module, entry.name.replace("-", "_"))
        app.command(entry.name, rich_help_panel=entry.group, epilog=getattr(module, "EPILOG", None))(function)
    try:
        status = app(given, prog_name="ckpt", standalone_mode=False)
    except typer.TyperException as error:
        raise _usage(error) from error
    except typer.Abort:
        return _interrupted()
    if status == INTERRUPTED:
        return _interrupted()
    return status if isinstance(status, int) else DONE


def _root() -> None:
    """Move LLM checkpoints between Hugging Face and Megatron-Core."""


def _usage(error: Any) -> CkptError:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or "ckpt"
    message = error.format_message().rstrip(".")
    return CkptError("E001", message[:1].lower() + message[1:], hint=f"`{path} --help` lists what it takes")


def _failed(error: CkptError) -> int:
    from .output import render_error

    if os.environ.get("CKPT_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    render_error(error)
    return FAILED


def _bug(error: Exception) -> int:
    import traceback

    from .. import __version__
    from .output import sanitize

    if os.environ.get("CKPT_DEBUG") == "1":
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    sys.stderr.write(
        f"bug: {type(error).__name__}{place}: {sanitize(str(error))}\n"
        f"  This is a fault of ckpt {__version__}, not yours. Please report it with the output of the same command under CKPT_DEBUG=1.\n"
    )
    return BUG


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return INTERRUPTED


def _silence() -> int:
    """Point stdout at nothing, so that the interpreter's last flush does not complain either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return BROKEN_PIPE


def _terminate(number: int, frame: object) -> None:
    """End like Ctrl-C does, through every cleanup on the way: a batch system sends SIGTERM before it kills."""
    raise SystemExit(128 + number)
