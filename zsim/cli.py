"""The command line. Exit codes: 0 done, 1 the job does not fit, 2 the input is wrong."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from zsim.commands.calibrate import calibrate
from zsim.commands.check import check
from zsim.commands.compare import compare
from zsim.commands.export import export
from zsim.commands.import_file import EXTRA, import_file
from zsim.commands.memory import memory
from zsim.commands.needs import needs
from zsim.commands.plan import plan
from zsim.commands.presets import presets
from zsim.commands.replay import replay
from zsim.commands.run import run
from zsim.commands.scaling import scaling
from zsim.commands.sensitivity import sensitivity
from zsim.commands.sweep import sweep
from zsim.commands.topology import app as topology_app
from zsim.commands.tune import tune
from zsim.commands.ui import ui
from zsim.errors import ZsimError
from zsim.version import __version__

app = typer.Typer(
    name="zsim",
    help="Simulate a training step of a real model on a real cluster: will it fit, how fast, and why.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Of standard output: what zsim writes itself goes through zsim.files.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_LONGEST_REASON = 3_000  # characters; the longest of zsim's own lists have a thousand

app.command()(calibrate)
app.add_typer(topology_app, name="topology")
app.command()(compare)
app.command()(check)
app.command(name="import", context_settings=EXTRA)(import_file)
app.command()(export)
app.command()(replay)
app.command()(tune)
app.command()(sweep)
app.command()(scaling)
app.command()(sensitivity)
app.command()(needs)
app.command()(memory)
app.command()(ui)
app.command()(run)
app.command()(plan)
app.command()(presets)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"zsim {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the user's mistakes are one paragraph on stderr and exit code 2."""
    try:
        code = _run_app()
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is said here, not while Python ends
    except BrokenPipeError:
        sys.stderr.close()
        _drop_output()
        code = 0
    except OSError as error:
        if error.filename is None and error.errno not in _UNWRITABLE:
            raise
        code = _refused(f"{error.filename or 'standard output: cannot be written'}: {error.strerror}")
        if error.filename is None:
            _drop_output()
    sys.exit(code)


def _run_app() -> str | int | None:
    """The exit code."""
    try:
        app()
    except SystemExit as done:  # as all commands end
        return done.code
    except ZsimError as error:
        return _refused(str(error))
    except RecursionError:
        return _refused("something in the input is nested deeper than zsim can follow")
    except (MemoryError, OverflowError) as error:
        return _refused(f"the numbers are larger than zsim can hold ({type(error).__name__})")
    return 0


def _refused(reason: str) -> int:
    """One paragraph, whatever a file or an argument holds that the reason quotes."""
    if len(reason) > _LONGEST_REASON:
        half = _LONGEST_REASON // 2
        reason = f"{reason[:half]} [...] {reason[-half:]}"
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in reason
    )
    print(f"zsim: {shown}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """What standard output does not take is let go, else Python tries again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
