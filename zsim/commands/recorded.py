"""`zsim compare`, `zsim replay` and `zsim calibrate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import (
    AllowCode,
    Set,
    answer,
    file_option,
    folder_option,
    is_output,
    json_option,
    permission,
    print_file,
    settings,
)
from zsim.errors import InputError
from zsim.files import write_atomically
from zsim.specs.strategy.registry import values_of

if TYPE_CHECKING:
    from zsim.calibrate.hardware_file import Calibration
    from zsim.calibrate.kernel_fits import CurveFit


def compare(
    simulated: Annotated[
        Path, typer.Argument(metavar="SIMULATED", help="A trace, or an experiment TOML to simulate now.")
    ],
    recorded: Annotated[
        Path,
        typer.Argument(metavar="RECORDED", help="A trace: a rank's file or a folder of ranks; or a TOML."),
    ],
    set_: Set = None,
    rank: Annotated[int | None, typer.Option(help="Whose times are compared; else the first rank's.")] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FRACTION",
            help="0.02 for all, or step=, time=, memory=, overlap=; again for more.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    json_: Annotated[Path | None, json_option("everything")] = None,
    out: Annotated[Path | None, file_option(help="Write one HTML page with both timelines.")] = None,
) -> None:
    """Two traces: are the calls the same, are times and bytes near, and what differs most.

    Exit code 1: something is past its tolerance. Times measured beside foreign load are inconclusive.
    """
    from zsim.comparison.compare import compare as compare_traces
    from zsim.comparison.verdict import Tolerances
    from zsim.study.check.targets import load_trace

    tolerances, code = Tolerances.parse(tolerance) if tolerance else None, permission(allow_code)
    comparison = compare_traces(
        load_trace(simulated, settings(set_), code),
        load_trace(recorded, code=code),
        tolerances=tolerances,
        rank=rank,
        names=(str(simulated), str(recorded)),
    )
    answer([str(comparison)], comparison.to_dict, json_)
    if out is not None:
        comparison.write_html(out)
        if not is_output(json_):
            print_file("page", out)
    if comparison.verdict == "fail":
        raise typer.Exit(1)


def replay(
    trace: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="A rank's file, several of one run, a folder of ranks, or a .tar.gz of it.",
        ),
    ],
    cluster: Annotated[
        str | None, typer.Option(help="Run its collectives on this cluster: a preset, or a topology TOML.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="On so many GPUs of it.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="On so many nodes of it.")] = None,
    recorded_on: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="The GPU of the recording, where the trace does not name it."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which step; else the one of median length.")] = None,
    whole: Annotated[
        bool, typer.Option(help="Take each file for one step: for traces without step marks.")
    ] = False,
    json_: Annotated[Path | None, json_option("the result")] = None,
    out: Annotated[
        Path | None, folder_option(help="Write the replayed ranks there, as Kineto traces.")
    ] = None,
) -> None:
    """Run a recorded step again: kernels as long as recorded, collectives together.

    Without --cluster everything takes what it took, and the recorded step comes back, each part of it. With
    --cluster collectives run on that fabric, and ranks wait for each other there. The number of ranks is set
    by --gpus and --nodes.

    What stays as it was: model, batch per GPU, strategy, the host's time between launches, and the schedule.
    Kernels on another GPU go by the ratio of peaks or of memory bandwidths. With more ranks the outermost
    group grows and the full tensors stay. Only the optimizer's kernels shrink with the shards. What a stream
    waited for is read out of the recording's times and names. Memory is not replayed.
    """
    from zsim.study.replay.replay import replay as replay_trace
    from zsim.study.replay.replay import replay_lines
    from zsim.trace.chrome import write_chrome_traces
    from zsim.trace.readers.read import read_trace

    result = replay_trace(
        read_trace(trace, whole=whole),
        cluster=cluster,
        gpus=gpus,
        nodes=nodes,
        recorded_on=recorded_on,
        step=step,
    )
    answer(replay_lines(result, ", ".join(str(path) for path in trace)), result.to_dict, json_)
    if out is not None:
        files = write_chrome_traces(result.written, out)
        if not is_output(json_):
            print_file("trace", f"{files[0].parent} ({len(files)} rank{'s' * (len(files) > 1)})")


def calibrate(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="MEASUREMENTS...",
            help="JSON of validation.microbench or fio, recorded traces, output of nccl-tests, "
            f"{' or '.join(values_of('calibrate.logs'))}.",
        ),
    ],
    base: Annotated[str, typer.Option(help="Cluster preset or file whose numbers are replaced.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the new cluster; without it, of the file.")
    ] = None,
    out: Annotated[
        Path | None, file_option(metavar="FILE.toml", help="Write the cluster file there.")
    ] = None,
    page: Annotated[
        Path | None, file_option(metavar="FILE.html", help="Draw every fit beside its points.")
    ] = None,
    json_: Annotated[Path | None, json_option("the fits")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Ranks of a log that does not say.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a log that does not say.")] = None,
) -> None:
    """Fit a cluster's numbers to measurements: efficiencies, latencies, rates, interference."""
    from zsim.calibrate.hardware_file import calibrate as fit_all
    from zsim.calibrate.measurements import merge_measurements
    from zsim.calibrate.readers import read_measurements
    from zsim.specs.cluster.files import load_cluster

    cluster = load_cluster(base)
    if out is not None and out.suffix != ".toml":
        raise InputError(f"--out {out}: expected a file that ends in .toml")
    measured = merge_measurements([read_measurements(path, ranks=ranks, nodes=nodes) for path in inputs])
    calibration = fit_all(
        cluster, base, name or (out.stem if out else f"{cluster.name}-calibrated"), measured
    )
    answer(_lines(calibration), calibration.to_dict, json_)
    if out is not None:
        print_file("cluster", write_atomically(out, calibration.toml()))
        load_cluster(out)
    if page is not None:
        from zsim.study.calibration_page import calibration_page

        print_file("page", write_atomically(page, calibration_page(calibration)))


def _lines(calibration: Calibration) -> Iterator[str]:
    from zsim.report.views.result import Column
    from zsim.report.views.text.plain import paragraph, table

    columns = [Column("number", is_left=True, min_width=35), Column("value", min_width=12)]
    columns += [Column(title) for title in ("rows", "median", "worst", "bias")]
    marks = ["*" if name in fit.at_bound else "" for fit in calibration.fits for name in fit.values]
    heading, *lines = table(columns, [row for fit in calibration.fits for row in _rows(fit)])
    yield heading
    yield from (line + mark for line, mark in zip(lines, marks, strict=True))
    if any(marks):
        yield "* at a limit of what is fitted"
    for note in calibration.notes:
        yield from paragraph(note, first="note    ")


def _rows(fit: CurveFit) -> Iterator[tuple[str, ...]]:
    """One row for each of the fit's numbers. The first row also says how well the curve fits."""
    for index, (name, value) in enumerate(fit.values.items()):
        label = name if "." in name else f"{fit.title}: {name}"
        row: tuple[str, ...] = (label, format_value(value, fit.units.get(name, "")))
        if index == 0 and fit.points:
            errors = f"{fit.median_error:.1%}", f"{fit.worst_error:.0%}", f"{fit.bias:+.1%}"
            row = *row, f"{len(fit.points)}", *errors
        yield row


def format_value(value: float, unit: str) -> str:
    """A number in its display unit."""
    from zsim.units import format_bytes, format_flops, format_rate, format_seconds

    if unit == "s":
        return format_seconds(value)
    if unit == "B/s":
        return format_rate(value)
    if unit == "FLOP/s":
        return format_flops(value)
    return format_bytes(value) if unit == "B" else f"{value:.4g}"
