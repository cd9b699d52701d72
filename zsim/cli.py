"""The command line. Exit codes: 0 done, 1 the job likely does not fit, 2 the input is wrong."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zsim import garbage_collection
from zsim.errors import ZsimError
from zsim.version import __version__

# Command name -> its module in zsim.commands (and its function, where that is called otherwise), and its line
# in the help, in that order.
_COMMANDS = {
    "run": ("run", "Simulate one training step: does it fit, how fast, and why."),
    "tune": ("studies:tune", "Find the fastest configuration that fits, and what to change."),
    "rent": ("studies:rent", "Which cluster to rent, and how many GPUs: days, money, fit."),
    "memory": ("run:memory", "What holds a GPU's memory, and when; compare settings."),
    "trust": ("run:trust", "How far to trust a prediction: published runs most like it."),
    "goodput": ("run:goodput", "Simulate a whole run: days and money, saves and failures."),
    "scaling": ("studies:scaling", "How a job scales to more GPUs, and what holds it back."),
    "sensitivity": ("studies:sensitivity", "Which numbers of the hardware the step depends on."),
    "needs": ("studies:needs", "What would hide the stalls of offloading."),
    "sweep": ("studies:sweep", "Simulate every point of a study."),
    "ui": ("run:ui", "Open a local page: change settings, see what they do."),
    "import": ("files:import_file", "Read other programs' training files."),
    "export": ("files:export", "Write other programs' training files."),
    "explain": ("reference:explain", "What a key of a file means."),
    "presets": ("reference:presets", "The models and clusters that ship with zsim."),
    "topology": ("topology", "Draw, write, time and compare clusters."),
    "calibrate": ("recorded:calibrate", "Fit a cluster's numbers to measurements."),
    "compare": ("recorded:compare", "Compare two traces: calls, times and bytes."),
    "replay": ("recorded:replay", "Run a recorded step again, on other hardware too."),
    "check": ("check", "Check predictions against recorded ones and measured runs."),
    "plan": ("run:plan", "Print a rank's ops, bytes and streams, without simulation."),
    "schema": ("reference:schema", "JSON Schema of a file, for editors."),
}


class _Commands(TyperGroup):
    """The commands, each imported when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in _COMMANDS:  # the nearest name is searched among all commands
            for name in _COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _command(name: str) -> Any:
    """The command, or the group of commands, that its module defines."""
    target, line = _COMMANDS[name]
    module_name, _, function = target.partition(":")
    module = importlib.import_module(f"zsim.commands.{module_name}")
    group: typer.Typer | None = getattr(module, "app", None)
    if group is not None:
        click_group = typer.main.get_group(group)
        click_group.short_help = line
        return click_group
    typer_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    settings = getattr(module, "EXTRA", {}).get(function or module_name)
    typer_app.command(name=name, short_help=line, context_settings=settings)(
        getattr(module, function or module_name)
    )
    return typer.main.get_command(typer_app)


app = typer.Typer(
    name="zsim",
    cls=_Commands,
    help="Simulate a training step of a real model on a real cluster: will it fit, how fast, and why.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Errors of standard output; files that zsim writes go through zsim.files.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# Read by packages when they are imported: zsim multiplies no matrices with numpy, so its BLAS needs no thread
# per core, and no plugin of pydantic concerns zsim's tables.
_LEAN_IMPORTS = {"OPENBLAS_NUM_THREADS": "1", "PYDANTIC_DISABLE_PLUGINS": "__all__"}

_LONGEST_REASON = 3_000  # characters; zsim's longest messages have a thousand


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"zsim {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. The user's mistakes are one paragraph on stderr and exit code 2."""
    garbage_collection.freeze_at_exit()
    for name, value in _LEAN_IMPORTS.items():
        os.environ.setdefault(name, value)
    _make_printable()
    try:
        code = _run_app()
        if sys.stdout is not None:
            sys.stdout.flush()  # an error of writing is reported here, not while Python ends
    except BrokenPipeError:
        sys.stderr.close()
        _drop_output()
        code = 0
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_folder():
            sys.exit(_print_refusal("the current folder is deleted; change to one that exists"))
        if error.filename is None and error.errno not in _UNWRITABLE:
            raise
        code = _print_refusal(f"{error.filename or 'standard output: cannot be written'}: {error.strerror}")
        if error.filename is None:
            _drop_output()
    sys.exit(code)


def _make_printable() -> None:
    """Let standard output take every name of a file, escaped where its encoding lacks a letter, and ignore a
    width of the terminal that is none."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    width = os.environ.get("COLUMNS", "")
    if width.isdecimal() and int(width) == 0:
        del os.environ["COLUMNS"]


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _run_app() -> str | int | None:
    """Run the app. Returns the exit code."""
    try:
        app()
    except SystemExit as system_exit:  # as all commands end
        return system_exit.code
    except ZsimError as error:
        return _print_refusal(str(error))
    except RecursionError:
        return _print_refusal("something in the input is nested deeper than zsim can follow")
    except (MemoryError, OverflowError) as error:
        return _print_refusal(f"the numbers are larger than zsim can hold ({type(error).__name__})")
    return 0


def _print_refusal(reason: str) -> int:
    """Print one paragraph, whatever text of a file or an argument the reason quotes. Returns exit code 2."""
    if len(reason) > _LONGEST_REASON:
        half = _LONGEST_REASON // 2
        reason = f"{reason[:half]} [...] {reason[-half:]}"
    printable = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in reason
    )
    print(f"zsim: {printable}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Redirect standard output to nowhere, else Python tries to flush it again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
