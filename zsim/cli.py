"""The command line. Exit codes: 0 done, 1 the job does not fit, 2 the input is wrong."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zsim.commands.calibrate import calibrate
from zsim.commands.check import check
from zsim.commands.compare import compare
from zsim.commands.export import export
from zsim.commands.import_file import EXTRA, import_file
from zsim.commands.memory import memory
from zsim.commands.needs import needs
from zsim.commands.options import (
    Cluster,
    ExperimentFile,
    Gpus,
    Model,
    Nodes,
    Set,
    experiment_from,
    file_option,
    folder_option,
    is_output,
    print_json,
    write_json,
)
from zsim.commands.replay import replay
from zsim.commands.scaling import scaling
from zsim.commands.sensitivity import sensitivity
from zsim.commands.sweep import sweep
from zsim.commands.topology import app as topology_app
from zsim.commands.tune import tune
from zsim.commands.ui import ui
from zsim.errors import ZsimError
from zsim.files import make_folder
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


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"zsim {__version__}")
        raise typer.Exit


@app.command()
def run(
    experiment: ExperimentFile = None,
    model: Model = None,
    cluster: Cluster = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    set_: Set = None,
    unfold: Annotated[bool, typer.Option(help="Simulate every rank instead of one per class.")] = False,
    json_: Annotated[
        Path | None, file_option("--json", help="Write the report as JSON ('-': standard output).")
    ] = None,
    out: Annotated[
        Path | None, folder_option(help="Write report.html, report.json and trace.json.gz there.")
    ] = None,
) -> None:
    """Simulate one training step: memory, time and the reason for both."""
    from zsim.report.views.text.report import print_report
    from zsim.study.advice import simulate

    result = simulate(experiment_from(experiment, model, cluster, nodes, gpus, set_), unfold=unfold)
    files: dict[str, Path] = {}
    if out is not None:
        files |= _write_all(result, out)
    if is_output(json_):
        print_json(result.report.to_dict())
    else:
        if json_ is not None:
            files["json"] = write_json(result.report.to_dict(), json_)
        print_report(result.report, files=files)
    if not result.report.fits:
        raise typer.Exit(1)


@app.command()
def plan(
    experiment: ExperimentFile = None,
    model: Model = None,
    cluster: Cluster = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    set_: Set = None,
    json_: Annotated[
        Path | None, file_option("--json", help="Write the plan as JSON ('-': standard output).")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many ops to list (0: all).")] = 60,
) -> None:
    """What a rank will do: ops, bytes, streams; no simulation."""
    from zsim.api import make_plan
    from zsim.report.views.text.plan import plan_to_dict, print_plan

    made = make_plan(experiment_from(experiment, model, cluster, nodes, gpus, set_))
    if is_output(json_):
        print_json(plan_to_dict(made))
        return
    files = {"json": write_json(plan_to_dict(made), json_)} if json_ is not None else {}
    print_plan(made, limit=limit, files=files)


@app.command()
def presets() -> None:
    """The models and clusters that ship with zsim."""
    from zsim.specs.presets import model_preset_names, topology_preset_names
    from zsim.study.published.regimes import without_a_run

    print("models:   " + _wrapped(model_preset_names()))
    print("clusters: " + _wrapped(topology_preset_names()))
    print("\nNo published run says how far zsim is off on these:")
    for what, names in without_a_run().items():
        print(f"{what + ':':<12}" + _wrapped(names, 12))


def _wrapped(names: list[str] | tuple[str, ...], indent: int = 10) -> str:
    import textwrap

    return ("\n" + " " * indent).join(textwrap.wrap(", ".join(names), 78 - indent, break_on_hyphens=False))


def _write_all(result: Any, folder: Path) -> dict[str, Path]:
    from zsim.report.views.html.report import write_html_report
    from zsim.trace.chrome.write import write_chrome_trace

    make_folder(folder)
    write_html_report(result.report, result.trace, folder / "report.html")
    write_chrome_trace(result.trace, folder / "trace.json.gz")
    write_json(result.report.to_dict(), folder / "report.json")
    return {
        "report": folder / "report.html",
        "trace": folder / "trace.json.gz",
        "json": folder / "report.json",
    }


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
